"""Compares runs per second, and KLs, of `kvbudget eval` and of kvpress on the same work, measured one after the
other.

usage: eval_rate.py MODEL.gguf HF TABLE.npy... --ids IDS.npy... [--tokens 2048] [--ratios 0.5 0.8] [--program
       build/kvbudget] [--compute f32 ...]
Both sides get the same token ids (build/tests/tokens writes them).
HF is the same model as a Hugging Face folder (or the .gguf). Every TABLE.npy has its .json and .safetensors beside it.
Both sides evict each text for every metric, ratio and allocator (uniform, AdaKV, the table) and teacher-force the next
64 tokens on the same number of threads. kvpress's time counts only its compressed runs, each with its prefill, which a
press needs; ours counts everything from the opened model to the last result: prefill, scores, the full cache's
reference and the oracle, whereas kvpress's reference run is not counted. Exit status 1 if a KL of uniform or table
budgets differs by more than 1e-2 (relative 5 %). Needs the packages of kvpress_kl.py.
"""
import argparse
import json
import os
import re
import subprocess
import sys

NEXT = 64  # as in kvpress_kl.py


def run_theirs(a):
    here = os.path.dirname(os.path.abspath(__file__))
    command = [
        sys.executable,
        os.path.join(here, "kvpress_kl.py"), a.hf, *a.tables, "--texts", *a.ids, "--tokens",
        str(a.tokens), "--ratios", *map(str, a.ratios)
    ]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {}
    for metric, ratio, kind, kl in re.findall(r"^(\S+)\s+([0-9.]+)\s+(\S+)\s+KL ([0-9.]+)", out, re.M):
        found[metric, float(ratio), kind if kind in ("uniform", "ada") else "lukv"] = float(kl)
    n, each = re.search(r"^(\d+) compressed runs, ([0-9.]+) s each", out, re.M).groups()
    return found, int(n), float(each) * int(n)


def run_ours(a, compute):
    tables = ["lukv=" + path.removesuffix(".npy") + ".safetensors" for path in a.tables]
    command = [
        a.program, "eval", a.model, *tables, *a.ids, "--tokens",
        str(a.tokens), "--next",
        str(NEXT), "--ratio", ",".join(map(str, a.ratios)), "-a", "uniform", "-a", "ada", "--compute", compute, "--bos",
        "no", "--json"
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {(r["metric"], r["ratio"], r["allocator"]): r["kl"] for r in json.loads(done.stdout)["rows"]}
    n, seconds = re.search(r"^(\d+) runs in ([0-9.]+) s", done.stderr, re.M).groups()
    return found, int(n), float(seconds)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("hf")
    p.add_argument("tables", nargs="+")
    p.add_argument("--ids", nargs="+", required=True)
    p.add_argument("--tokens", type=int, default=2048)
    p.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.8])
    p.add_argument("--program", default="build/kvbudget")
    p.add_argument("--compute", nargs="+", default=["f32"], help="precisions of kvbudget; kvpress runs in float32")
    a = p.parse_args()
    theirs, n_theirs, seconds_theirs = run_theirs(a)
    print(f"kvpress         {n_theirs:4} runs  {seconds_theirs:7.1f} s  {n_theirs / seconds_theirs:6.2f} a second")
    good = True
    for compute in a.compute:
        ours, n, seconds = run_ours(a, compute)
        rate = n / seconds
        print(
            f"kvbudget {compute:6} {n:4} runs  {seconds:7.1f} s  {rate:6.2f} a second  "
            f"{rate / (n_theirs / seconds_theirs):5.1f} times as many"
        )
        for key in sorted(theirs):
            # kvpress's AdaKVPress protects no sinks and no window of its own, so it keeps other tokens.
            judged = key[2] != "ada"
            near = abs(ours[key] - theirs[key]) <= max(1e-2, 0.05 * theirs[key])
            good &= near or not judged
            print(
                f"  {key[0]:16} {key[1]:.2f} {key[2]:8} KL {ours[key]:.4f}, kvpress "
                f"{theirs[key]:.4f}{'' if near else '  differs' + ('' if judged else ' (not judged)')}"
            )
    return 0 if good else 1


sys.exit(main())
