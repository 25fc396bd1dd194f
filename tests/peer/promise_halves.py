"""Tests whether promises of `kvbudget recommend` are kept: made on half of its texts, checked on the other half.

usage: promise_halves.py RESULTS.json [--draws 200]     RESULTS.json: the output of `recommend --json`

The rule is implemented here again: p-values by betting with stakes of 1, 1/2, 1/4 and 1/8 (arXiv 2010.09686), tested
from low to high ratios. Fails if more promises are broken than the confidence allows.
"""

import argparse
import json
import math
import random

BETS = ((1, 0.5), (0.5, 0.25), (0.25, 0.125), (0.125, 0.125))  # bet, share of the wealth


def p_value(losses: list[float], limit: float) -> float:
    wealth = 0.0
    for bet, part in BETS:
        factors = [1 + bet / (1 - limit) * (limit - loss) for loss in losses]
        wealth += part * (math.exp(sum(map(math.log, factors))) if min(factors) > 0 else 0)
    return 1 / wealth if wealth > 1 else 1


p = argparse.ArgumentParser()
p.add_argument("results")
p.add_argument("--draws", type=int, default=200)
a = p.parse_args()
found = json.load(open(a.results, encoding="utf-8"))
ratios: dict[float, list[tuple[float, list[float]]]] = {}  # for each limit, in units of the cap
for row, detail in zip(found["rows"], found["details"]):
    clipped = [min(max(x, 0), row["cap"]) / row["cap"] for x in detail["texts"]]
    ratios.setdefault(row["ratio"], []).append((row["limit"] / row["cap"], clipped))
error, n = 1 - found["settings"]["confidence"], found["settings"]["n_texts"]
random.seed(1)
broken = refused = 0
for _ in range(a.draws):
    half = set(random.sample(range(n), n // 2))
    promised = None
    for limits in ratios.values():
        if any(p_value([x for i, x in enumerate(losses) if i in half], limit) > error for limit, losses in limits):
            break
        promised = limits
    refused += promised is None
    judged = [([x for i, x in enumerate(losses) if i not in half], limit) for limit, losses in promised or ()]
    broken += any(sum(losses) / len(losses) > limit for losses, limit in judged)
print(f"{broken} of {a.draws} promises were broken, {error * a.draws:g} are allowed; {refused} halves promised nothing")
assert broken <= error * a.draws
