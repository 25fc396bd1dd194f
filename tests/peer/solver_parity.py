#!/usr/bin/env python3
"""Compares `kvbudget solve --hull full --aggregate mean_ratio` with the published step 2 on the same arrays.

  solver_parity.py RUN.h5                      a record of kvbudget profile
  solver_parity.py --steps DIR                 a directory of context_*/{metric,question_*}.npy
  solver_parity.py --synthetic                 generated arrays of the default model's shape

For every metric: the largest difference of any head's budget at any of 99 ratios, for every question and for the mean
table. If scores tie (max-pooled SnapKV), the published code breaks ties by an unstable sort, so budgets can only be
compared without ties (with stable ranks as scores); losses are compared with the real scores, each solver's budgets in
its own order, at ratios from 5 % on (with --synthetic they are printed but not judged). Exit status 1 if a limit is
exceeded. Needs numpy and h5py; run it from a virtual environment.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import h5py
import numpy as np

import lukv_solver

ROOT = pathlib.Path(__file__).resolve().parents[2]


def synthetic(folder, n_layers, n_heads, n_tokens, n_questions, seed):
    """Writes heavy-tailed importance with another scale for every head, and metrics that are noisy versions of it."""
    rng = np.random.default_rng(seed)
    shape = (n_layers, n_heads, n_tokens)
    scale = np.exp(rng.normal(0, 1.5, (n_layers, n_heads, 1)))
    shared = rng.pareto(1.2, shape)
    context = folder / "context_synthetic"
    context.mkdir(parents=True)
    for q in range(n_questions):
        oracle = scale * (shared * rng.random(shape) + 0.3 * rng.pareto(1.2, shape)) / n_tokens
        oracle[oracle < np.quantile(oracle, 0.1)] = 0  # weights below the smallest f16 are zero in the published arrays
        np.save(context / f"question_{q}.npy", oracle.astype(np.float32))
    noisy = lambda sigma: (np.log(shared + 1e-6) + rng.normal(0, sigma, shape)).astype(np.float32)
    np.save(context / "keydiff.npy", noisy(2))
    np.save(context / "ea.npy", noisy(1))
    raw = np.pad(noisy(0.7), ((0, 0), (0, 0), (3, 3)), mode="edge")
    np.save(context / "snapkv.npy", np.lib.stride_tricks.sliding_window_view(raw, 7, axis=-1).max(-1))


def read_questions(record, metric, limit):
    """Yields (score, oracle), both [L,G,T], in the order in which `solve` takes them."""
    for context in sorted(record["contexts"].values(), key=lambda c: int(c.attrs["order"])):
        score = context["scores"][metric][...]
        for number in sorted(context["questions"], key=int)[:limit]:
            if "oracle" in context["questions"][number]:
                yield score, context["questions"][number]["oracle"][...]


def run(*command):
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{command[1]} failed with status {done.returncode}")
    return done.stdout


FIRST_JUDGED = 5  # per cent pruned


def is_tied(score, sink, window):
    rows = np.sort(score[..., sink:score.shape[-1] - window], axis=-1)
    return bool((rows[..., 1:] == rows[..., :-1]).any())


def solve_with_kvbudget(args, record_path, metric, work):
    """Returns (the output of `solve --json`, every question's budgets [questions,99,L,G], the mean table [99,L,G])."""
    budgets, table, array = work / "budgets.npy", work / "table.safetensors", work / "table.npy"
    options = ["--questions", args.questions] if args.questions else []
    text = run(args.kvbudget, "solve", record_path, "--metric", metric, "--hull", "full", "--aggregate", "mean_ratio",
               "--budgets", budgets, "-o", table, "--json", "--quiet", *options)
    run(args.kvbudget, "export", table, "-o", array)
    return json.loads(text)["details"][0], np.load(budgets), np.load(array)


def compare(args, record_path, record, metric, work):
    info, ours, table = solve_with_kvbudget(args, record_path, metric, work)
    sink, window = info["sink"], info["window"]
    real, distinct, own_order, one_order, seconds, tied = 0, 0, [], [], 0.0, False
    ratios = np.zeros_like(table)
    questions = list(read_questions(record, metric, args.questions))
    assert len(questions) == len(ours), "the record's questions are not those that were solved"
    for keep, (score, oracle) in zip(ours, questions):
        middle = slice(sink, oracle.shape[-1] - window)
        stable = lambda l, h: np.argsort(-score[l, h, middle], kind="stable")
        unstable = lambda l, h: np.argsort(score[l, h, middle])[::-1]
        start = time.perf_counter()
        theirs = lukv_solver.solve(oracle, score, sink, window)
        seconds += time.perf_counter() - start
        ranked = lukv_solver.solve(oracle, lukv_solver.stable_ranks(score), sink, window)
        tied |= is_tied(score, sink, window)
        real = max(real, int(np.abs(keep - theirs).max()))
        distinct = max(distinct, int(np.abs(keep - ranked).max()))
        ratios += (1.0 - ranked / oracle.shape[-1]) / len(ours)
        loss = lukv_solver.losses(oracle, stable, keep, sink, window)
        own_order.append(loss / lukv_solver.losses(oracle, unstable, theirs, sink, window) - 1)
        one_order.append(loss / lukv_solver.losses(oracle, stable, theirs, sink, window) - 1)
    own_order, one_order = (100 * np.abs(np.mean(x, axis=0)) for x in (own_order, one_order))
    off = np.abs(table - ratios).max() * oracle.shape[-1]
    passed = (real <= args.tokens or (tied and distinct <= args.tokens)) and off <= args.tokens
    # How much the order of tied tokens changes the loss depends on the data: no limit holds for generated scores. Below
    # 5 % pruned the loss is tiny, and one token of many ties is a large share of it: printed, but not judged.
    judged = own_order[FIRST_JUDGED - 1:]
    passed = passed and (args.synthetic or judged.max() <= 100 * args.loss)
    print(f"{metric}: {len(ours)} questions, sink {sink}, window {window}, scores {'tie' if tied else 'are distinct'}")
    print(f"  largest difference of a budget: {real} tokens with the real scores, {distinct} with ties taken out")
    print(f"  largest difference of the mean table, ties taken out: {off:.6f} tokens")
    for name, value in (("each in its own order", own_order), ("both in ours", one_order)):
        shown = ", ".join(f"{value[r - 1]:.4f}" for r in (10, 30, 50, 80, 90))
        print(f"  mean loss differs, {name}: by {value.max():.4f} % at most, at ratio {value.argmax() + 1} %; "
              f"at 10, 30, 50, 80, 90 %: {shown} %")
    print(
        f"  judged: ratios from {FIRST_JUDGED} % on, each in its own order: {judged.max():.4f} % at most, at ratio "
        f"{judged.argmax() + FIRST_JUDGED} %"
    )
    ms = 1e3 * info["solve_seconds"] / len(ours)
    print(f"  per question: published algorithm {seconds / len(ours):.3f} s; kvbudget {ms:.2f} ms, with the "
          f"certificate, without sorting by score ({1e3 * seconds / len(ours) / ms:.0f} times)")
    print("  PASS" if passed else "  FAIL")
    return passed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?")
    parser.add_argument("--steps", type=pathlib.Path)
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--shape", default="30x3x1620", help="layers x KV heads x tokens of --synthetic")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--questions", type=int, help="use the first N questions of every context")
    parser.add_argument("--metric", action="append", help="default: all of the record")
    parser.add_argument("--tokens", type=int, default=3, help="largest difference allowed")
    parser.add_argument("--loss", type=float, default=0.005, help="largest relative difference of losses allowed")
    parser.add_argument("--kvbudget", default=ROOT / "build" / "kvbudget")
    args = parser.parse_args()
    if (args.record is not None) + (args.steps is not None) + args.synthetic != 1:
        parser.error("one of RUN.h5, --steps DIR and --synthetic is needed")
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        path = args.record
        if args.synthetic:
            args.steps = work / "steps"
            synthetic(args.steps, *map(int, args.shape.split("x")), args.questions or 3, args.seed)
        if args.steps:
            path = work / "run.h5"
            heads = np.load(next(args.steps.glob("*/question_0.npy")), mmap_mode="r").shape[1]
            run(args.kvbudget, "import", args.steps, "-o", path, "--model-heads", heads, "--head-dim", 64)
        with h5py.File(path) as record:
            first = next(iter(record["contexts"].values()))
            results = [compare(args, path, record, m, work) for m in args.metric or list(first["scores"])]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
