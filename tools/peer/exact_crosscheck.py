#!/usr/bin/env python3
"""Compares the optimum of `kvbudget validate` with two general solvers on small instances: HiGHS and OR-tools CP-SAT.

  exact_crosscheck.py [--rounds N] [--seed S] [--ratios 10,50,90] [-v]

Every instance is written as the published .npy arrays, imported, and solved by the program itself, globally and layer
by layer. Importances are whole numbers, so that every loss is one too: the three optima must be equal, not close, and
the budgets of `solve --exact` must reach them. Here the loss curves are made again from the arrays in NumPy; nothing of
kvbudget's is reused. Exit status 1 at the first difference. Needs numpy, highspy and ortools (a virtual environment);
the kinds: random, heavy-tailed, tied, all zero, constant, perfect metric, one head, T = protected + 1, saturated.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
KVB = ROOT / "build" / "kvbudget"
KINDS = ["random", "heavy", "tied", "zero", "constant", "perfect", "one head", "one free token", "saturated"]


def make(kind, rng):
    """(scores, importance) [L,G,T], sink, window."""
    shape = (int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(20, 60)))
    sink, window = int(rng.integers(0, 3)), int(rng.integers(1, 4))
    if kind == "one head":
        shape = (1, 1, 80)
    if kind == "one free token":
        shape = (*shape[:2], sink + window + 1)
    if kind == "saturated":
        window = shape[2] // 3
    importance = rng.integers(0, 1000, shape)
    if kind in ("heavy", "saturated"):
        importance = np.minimum(rng.pareto(0.8, shape) * 10, 1e5).astype(int)
    if kind == "tied":
        importance = rng.integers(0, 4, shape)
    if kind == "zero":
        importance = np.zeros(shape, int)
    if kind == "constant":
        importance = np.full(shape, 7)
    scores = importance * np.exp(rng.normal(0, 0 if kind == "perfect" else 1, shape))
    if kind == "tied":
        scores = rng.integers(0, 3, shape)
    return scores.astype(np.float32), importance.astype(np.float32), sink, window


def curves(scores, importance, sink, window):
    """loss[head][b - floor] for b = floor .. T, and the floor."""
    layers, heads, tokens = scores.shape
    floor = max(round((1.0 - 0.99) * tokens), sink + window)
    out = []
    for s, a in zip(scores.reshape(-1, tokens), importance.reshape(-1, tokens).astype(int)):
        middle = np.arange(sink, tokens - window)
        order = middle[np.argsort(-s[middle], kind="stable")]
        lost = np.concatenate([np.cumsum(a[order][::-1])[::-1], [0]])
        out.append(lost[floor - sink - window :])
    return out, floor


def highs(loss, budget):
    """One binary for each head and choice."""
    import highspy

    h = highspy.Highs()
    h.silent()
    for option in ("mip_rel_gap", "mip_abs_gap"):
        h.setOptionValue(option, 0.0)
    x = [[h.addBinary() for _ in head] for head in loss]
    for head in x:
        h.addConstr(sum(head) == 1)
    h.addConstr(sum(b * v for head in x for b, v in enumerate(head)) == budget)
    h.minimize(sum(int(c) * v for head, costs in zip(x, loss) for c, v in zip(costs, head)))
    assert h.getModelStatus() == highspy.HighsModelStatus.kOptimal
    values = h.getSolution().col_value
    # The choices, not the floating-point objective: the loss is then a whole number.
    return sum(int(costs[int(np.argmax([values[v.index] for v in head]))]) for head, costs in zip(x, loss))


def cp_sat(loss, budget):
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    x = [[model.new_bool_var("") for _ in head] for head in loss]
    for head in x:
        model.add_exactly_one(head)
    model.add(sum(b * v for head in x for b, v in enumerate(head)) == budget)
    model.minimize(sum(int(c) * v for head, costs in zip(x, loss) for c, v in zip(costs, head)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)


class Server:
    """cp_sat() in a process of its own: both packages bring a HiGHS library, and one process cannot hold the two."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def solve(self, loss, budget):
        print(json.dumps([[[int(c) for c in costs] for costs in loss], int(budget)]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def serve():
    for line in sys.stdin:
        print(cp_sat(*json.loads(line)), flush=True)


def run(*command):
    done = subprocess.run([str(c) for c in (KVB, *command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit("%s\n%s" % (" ".join(str(c) for c in command), done.stderr))
    return done.stdout


def check(kind, rng, ratios, folder, server, verbose):
    scores, importance, sink, window = make(kind, rng)
    steps, record = folder / "steps", folder / "run.h5"
    (steps / "context_a").mkdir(parents=True, exist_ok=True)
    np.save(steps / "context_a" / "keydiff.npy", scores)
    np.save(steps / "context_a" / "question_0.npy", importance)
    run("import", steps, "-o", record, "--force")
    loss, floor = curves(scores, importance, sink, window)
    layers, heads, tokens = scores.shape
    total = total_mass(importance, sink, window)
    done = better = 0
    for scope in ("global", "layer"):
        options = ("--metric", "keydiff", "--scope", scope, "--sink", sink, "--window", window, "--quiet")
        rows = json.loads(run("validate", record, *options, "--json"))[0]["rows"]
        run("solve", record, *options, "--exact", "--budgets", folder / "keep.npy")
        keep = np.load(folder / "keep.npy")[0].reshape(99, -1)
        groups = [loss] if scope == "global" else [loss[i : i + heads] for i in range(0, layers * heads, heads)]
        for ratio in ratios:
            row, expected = rows[ratio - 1], [0, 0]
            for group in groups:
                n_layers = len(group) // heads
                left = len(group) * tokens - round(ratio / 100 * n_layers * heads * tokens)
                budget = max(left - len(group) * floor, 0)
                expected[0] += highs(group, budget)
                expected[1] += server.solve(group, budget)
            found = row["optimum"] * total
            reached = sum(int(head[b - floor]) for head, b in zip(loss, keep[ratio - 1]))
            if verbose:
                print(f"{kind}, {scope}, {ratio} %: {found:.6f}, budgets {reached}, HiGHS {expected[0]}, CP-SAT {expected[1]}")
            if abs(found - expected[0]) > 1e-6 or reached != expected[0] or expected[0] != expected[1]:
                sys.exit(f"DIFFERENT: {kind} {scores.shape} sink {sink} window {window} {scope} {ratio} %: kvbudget {found}, "
                         f"its budgets {reached}, HiGHS {expected[0]}, CP-SAT {expected[1]}")
            done += 1
            better += row["greedy"] > row["optimum"] * (1 + 1e-9)
    return done, better


def total_mass(importance, sink, window):
    """What losses are shares of: everything between the protected tokens."""
    return int(importance[..., sink : importance.shape[2] - window].astype(int).sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ratios", default="5,30,50,80,97")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve()
    server = Server()
    ratios, rng = [int(r) for r in arguments.ratios.split(",")], np.random.default_rng(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            compared = better = 0
            for _ in range(arguments.rounds):
                a, b = check(kind, rng, ratios, pathlib.Path(folder), server, arguments.verbose)
                compared += a
                better += b
            print(f"{kind:15} {compared:4d} optima equal; greedy is above the optimum in {better}")
    server.close()
    print("kvbudget = HiGHS = CP-SAT everywhere")


if __name__ == "__main__":
    main()
