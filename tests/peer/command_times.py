"""Time and memory of every command that works long, on this machine: rows of docs/times.csv, and the page's table.

usage: command_times.py KVBUDGET [MODEL...] [--only WORD...] --csv docs/times.csv
       [--page docs/performance.md] [--work build/times]

MODEL: names of get-model.sh. Every command runs once, as a user would call it, with contexts of 2,048 tokens, and its
whole process is measured, children included: seconds, processor seconds, largest resident memory. Rows of the same
machine, model and command replace older ones; the page's table shows the machine that was measured last, with other
machines below. DNNL_MAX_CPU_ISA holds the products to a smaller processor. Needs Python alone.
"""
import argparse
import csv
import os
import pathlib
import platform
import re
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIELDS = ["machine", "model", "command", "seconds", "cpu_seconds", "gib"]
NAMES = {"smollm2-135m": "SmolLM2 135M", "gemma3-270m": "Gemma 3 270M", "qwen2.5-coder-0.5b": "Qwen2.5-Coder 0.5B",
         "qwen2.5-coder-1.5b": "Qwen2.5-Coder 1.5B"}
METRICS = "-m snapkv:kvpress -m keydiff -m ea:kvpress"
#: words that name each command in the table, and its arguments: {} are files of the work folder
COMMANDS = [
    ("profile, 32 drawn answers", "profile MODEL {four.jsonl} -o {drawn.h5} --force --max-tokens 2048 -q 8 "
     "--ignore-answers " + METRICS),
    ("profile, continuations, curves", "profile MODEL {eight.jsonl} -o {run.h5} --force --curves --curve-queries 128 "
     "--gain-rows 24 -m knorm " + METRICS),
    ("learn", "learn {run.h5} -o {ranking.safetensors} --force -f keydiff -f ea:kvpress -f knorm"),
    ("solve, importance", "solve {run.h5} -m keydiff -o {keydiff.safetensors} --force --loss importance"),
    ("solve, output", "solve {run.h5} -m keydiff -o {output.safetensors} --force"),
    ("solve, tokens and formats", "solve {run.h5} -m keydiff -o {bits.safetensors} --force --formats bf16,int8,int4"),
    ("validate", "validate {drawn.h5} -m keydiff --ratios 0.5,0.8,0.9"),
    ("eval, 48 runs", "eval MODEL TEXTS2 " + METRICS + " -a uniform -a ada -r 0.5,0.8,0.9,0.95 -o {eval} --force"),
    ("eval, a table, refitted", "eval MODEL {keydiff.safetensors} TEXTS2 -a uniform -r 0.8,0.9 --refit -o {refit} "
     "--force"),
    ("task, four needles", "task MODEL {keydiff.safetensors} -k niah_single_1 -t 2048 -c 4 -r 0.8,0.9 -a uniform "
     "-o {task} --force"),
    ("refine, 200 evaluations", "refine MODEL {keydiff.safetensors} TEXTS4 -o {refined.safetensors} --force"),
    ("recommend", "recommend MODEL {keydiff.safetensors} TEXTS8 --max-kl 0.5 --confidence 0.5 -r 0.3,0.5"),
    ("tune", "tune MODEL -o {tuned}"),
]


def machine():
    info = pathlib.Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^flags.*", info, re.M)[0].split())
    held = os.environ.get("DNNL_MAX_CPU_ISA", "").lower()
    paths = [name for name, flag in (("AMX", "amx_tile"), ("bfloat16", "avx512_bf16"), ("AVX-512", "avx512f"),
                                     ("AVX2", "avx2")) if flag in flags]
    name = re.search(r"^model name[^:]*: (.*)", info, re.M)[1] if "model name" in info else platform.machine()
    return f"{name.strip()}, {len(os.sched_getaffinity(0))} cores, {held or (paths or ['plain'])[0]}"


def prepare(work, kvb, model):
    """Writes the calibration files; the texts are those of calib-data that are long enough for the model."""
    lines = [p.read_text().splitlines()[0] for p in sorted((ROOT / "calib-data").glob("*.jsonl"))[:4]]
    (work / "four.jsonl").write_text("\n".join(lines) + "\n")
    plain = [ROOT / "calib-data/plain" / f"{n}.txt" for n in
             ("code-py", "config-web", "contract-en", "manual-en", "math-en", "table-log", "letters-fr", "essay-de")]
    subprocess.run([kvb, "calib", model, *plain, "-o", work / "eight.jsonl", "--force", "--continue", "1", "--tokens",
                    "1920", "--answer-tokens", "128"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run(words, log):
    """Returns (seconds, processor seconds, GiB) of a process and its children."""
    start = time.time()
    with open(log, "wb") as out:
        child = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(child.pid, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 1 if "recommend" in words else 0):  # 1: too few texts to promise
        raise SystemExit(f"{' '.join(map(str, words))}\nended with {status}; {log} has what it printed")
    return time.time() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20


def table(rows):
    """Yields the page's lines: for each machine a table with a column for every model."""
    for at in dict.fromkeys(row["machine"] for row in reversed(rows)):
        own = [row for row in rows if row["machine"] == at]
        models = [name for name in NAMES if any(row["model"] == name for row in own)]
        yield f"\n{at}:\n"
        yield "| command | " + " | ".join(NAMES[m] for m in models) + " |"
        yield "|---|" + "---:|" * len(models)
        for command, _ in COMMANDS:
            cells = {row["model"]: row for row in own if row["command"] == command}
            if cells:
                yield f"| {command} | " + " | ".join(
                    f"{float(cells[m]['seconds']):.3g} s, {float(cells[m]['gib']):.2f} GiB" if m in cells else ""
                    for m in models) + " |"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kvbudget", type=os.path.abspath)
    p.add_argument("models", nargs="*", metavar="MODEL", choices=[[], *NAMES])
    p.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="only commands that begin with one of these")
    p.add_argument("--csv", type=pathlib.Path, required=True)
    p.add_argument("--page", type=pathlib.Path, help="docs/performance.md, to write the table there")
    p.add_argument("--work", type=pathlib.Path, default=ROOT / "build/times")
    a = p.parse_args()
    here, rows = machine(), []
    if a.csv.exists():
        with open(a.csv, newline="") as f:
            rows = list(csv.DictReader(f))
    for name in a.models:
        model = subprocess.check_output([ROOT / "tools/scripts/get-model.sh", name], text=True).strip()
        work = a.work / name
        work.mkdir(parents=True, exist_ok=True)
        prepare(work, a.kvbudget, model)
        texts = [str(ROOT / f"calib-data/{t}.txt") for t in ("eval/story-en", "eval/manual-en", "eval/code-py",
                 "eval/log-table", "plain/contract-en", "plain/manual-en", "plain/code-py", "plain/config-web")]
        for command, words in COMMANDS:
            if not command.startswith(tuple(a.only)):
                continue
            subprocess.run(f"rm -rf {work}/tuned* {work}/*.cells", shell=True, check=True)
            given = []
            for word in words.split():
                given += texts[: int(word[5:])] if word.startswith("TEXTS") else [
                    model if word == "MODEL" else re.sub(r"\{(.*)\}", lambda m: str(work / m[1]), word)]
            seconds, cpu, gib = run([a.kvbudget, *given], work / "log.txt")
            rows = [r for r in rows if (r["machine"], r["model"], r["command"]) != (here, name, command)]
            rows.append(dict(machine=here, model=name, command=command, seconds=f"{seconds:.2f}",
                             cpu_seconds=f"{cpu:.2f}", gib=f"{gib:.3f}"))
            print(f"{name} {command}: {seconds:.1f} s, {cpu:.1f} s of processors, {gib:.2f} GiB", flush=True)
            with open(a.csv, "w", newline="") as f:
                out = csv.DictWriter(f, FIELDS, lineterminator="\n")
                out.writeheader()
                out.writerows(rows)
    if not a.page:
        return
    text = a.page.read_text()
    head, rest = text.split("[times]: #", 1)
    a.page.write_text(head + "[times]: #\n" + "\n".join(table(rows)) + "\n\n[end]: #" + rest.split("[end]: #", 1)[1])


if __name__ == "__main__":
    main()
