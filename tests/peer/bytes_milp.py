#!/usr/bin/env python3
"""Compares `solve --formats` with HiGHS: for small random problems the optimum of the multiple-choice knapsack lies
between the certified bound and greedy's loss; greedy's choice keeps to the budget and has the reported loss.

  make build/tests/bytes_rows && bytes_milp.py [--rounds N] [--seed S]

Needs numpy and scipy (its milp is HiGHS). Exit status 1 at the first difference. Prints how often greedy is optimal,
and how much more than the optimum it loses.
"""
import argparse
import pathlib
import subprocess
import sys

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "build" / "tests" / "bytes_rows"


def make(rng):
    """Returns loss [N, T + 1], added [N, J], cost [J, T + 1], floor, budgets; curves need not be convex."""
    heads, formats, tokens = int(rng.integers(1, 6)), int(rng.integers(1, 5)), int(rng.integers(6, 26))
    floor = int(rng.integers(1, 4))
    gains = rng.pareto(1.2, (heads, tokens)) * rng.uniform(0.1, 3, (heads, 1))
    if rng.random() < 0.7:
        gains = np.sort(gains)[:, ::-1] * np.exp(rng.normal(0, 0.5, gains.shape))
    loss = np.concatenate([np.cumsum(gains[:, ::-1], 1)[:, ::-1], np.zeros((heads, 1))], 1)
    if rng.random() < 0.3:
        loss[:, :-1] *= rng.uniform(0.7, 1.3, loss[:, :-1].shape)
    bits = rng.choice([1, 2, 4, 8, 16], formats, replace=False)
    group, shared = int(rng.integers(2, 9)), int(rng.integers(0, 5))
    kept = np.arange(tokens + 1)
    cost = np.array([kept * b + shared * -(-kept // group) for b in bits])
    added = rng.exponential(1, (heads, formats)) * 4.0 / bits * (bits < 16) * rng.choice([0.1, 1, 3])
    budgets = sorted(rng.integers(0, cost.max() * heads + 2, 4).tolist(), reverse=True)
    return loss, added, cost, floor, budgets


def ours(loss, added, cost, floor, budgets):
    """Yields rows (bytes, loss, bound, saturated, [(keep, format)]) of bytes_rows."""
    heads, tokens = loss.shape[0], loss.shape[1] - 1
    numbers = [heads, added.shape[1], tokens, floor, len(budgets), *loss.ravel(), *added.ravel(), *cost.ravel(),
               *budgets]
    out = subprocess.run([PROGRAM], input="\n".join(repr(float(x)) for x in numbers), text=True, check=True,
                         capture_output=True).stdout
    for line in out.splitlines():
        word = line.split()
        choice = [int(x) for x in word[4:]]
        yield int(word[0]), float(word[1]), float(word[2]), word[3] == "1", list(zip(choice[::2], choice[1::2]))


def optimum(loss, added, cost, floor, budget):
    """Returns HiGHS's least loss, or None if no choice fits."""
    heads, formats = added.shape
    items = loss[:, None, floor:] + added[:, :, None]  # [N, J, T + 1 - floor]
    each = items[0].size
    one = np.kron(np.eye(heads), np.ones(each))
    found = milp(items.ravel(), integrality=np.ones(heads * each), bounds=Bounds(0, 1), options={"mip_rel_gap": 0},
                 constraints=[LinearConstraint(one, 1, 1),
                              LinearConstraint(np.tile(cost[:, floor:].ravel(), heads), -np.inf, budget)])
    return found.fun if found.status == 0 else None


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=300)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    rng = np.random.default_rng(a.seed)
    rows = optimal = saturated = 0
    excess, slack, total = 0.0, 0.0, 0.0
    for number in range(a.rounds):
        loss, added, cost, floor, budgets = problem = make(rng)
        for budget, (used, lost, bound, full, choice) in zip(budgets, ours(*problem)):
            say = f"problem {number}, seed {a.seed}, budget {budget}: loss {lost:.12g}, bound {bound:.12g}"
            best = optimum(loss, added, cost, floor, budget)
            near = 1e-6 * (1 + lost)
            if abs(lost - sum(loss[n, b] + added[n, j] for n, (b, j) in enumerate(choice))) > near:
                sys.exit(f"{say}: its choice loses something else")
            if used != sum(cost[j, b] for b, j in choice) or any(b < floor for b, _ in choice):
                sys.exit(f"{say}: its choice takes other bytes, or less than the floor")
            if full != (best is None):
                sys.exit(f"{say}: saturated {full}, HiGHS finds {best}")
            rows, saturated = rows + 1, saturated + full
            if full:
                continue
            if used > budget or not bound - near <= best <= lost + near:
                sys.exit(f"{say}: takes {used} bytes, and HiGHS finds {best:.12g}")
            optimal += lost <= best + near
            excess, slack, total = excess + lost - best, slack + best - bound, total + best
    print(f"{a.rounds} problems, {rows} budgets, {saturated} of them too small: every optimum of HiGHS is between "
          f"bound and loss. Greedy is optimal at {optimal}; beyond the optima it loses {100 * excess / total:.2f} %, "
          f"and the bounds are {100 * slack / total:.2f} % below them")


if __name__ == "__main__":
    main()
