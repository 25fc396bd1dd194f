#!/usr/bin/env python3
"""Compares the optimum of `kvbudget solve --exact` with two general solvers on small instances: HiGHS and OR-tools
CP-SAT.

  exact_crosscheck.py [--rounds N] [--constrained N] [--seed S] [--ratios 10,50,90] [-v]

Every instance is written as the published .npy arrays, imported, and solved by the program itself, globally and layer
by layer; then --constrained N times each kind with random constraints: pages, levels, ranks, caps of layers, floors,
ceilings, pins. Importances are whole numbers, and so are all losses: the three optima must be exactly equal, and the
program's budgets must reach them and meet the constraints. Loss curves and constraints are computed here from the
arrays in NumPy, without kvbudget's code. Constraints that the program refuses must be contradictory, and rows that it
calls saturated must be those with lower limits above the budget. Exit status 1 at the first difference.
Needs numpy, highspy and ortools (a virtual environment); the kinds: random, heavy-tailed, tied, all zero, constant,
perfect metric, one head, T = protected + 1, saturated.
"""
import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
KVB = ROOT / "build" / "kvbudget"
KINDS = ["random", "heavy", "tied", "zero", "constant", "perfect", "one head", "one free token", "saturated"]


def make(kind, rng):
    """Returns scores and importance [L,G,T], sink, window."""
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


def loss_curves(scores, importance, sink, window):
    """Returns the loss [heads, T + 1] of keeping b tokens; for fewer than the protected ones, that of only these."""
    tokens = scores.shape[2]
    out = []
    for s, a in zip(scores.reshape(-1, tokens), importance.reshape(-1, tokens).astype(int)):
        middle = np.arange(sink, tokens - window)
        order = middle[np.argsort(-s[middle], kind="stable")]
        lost = np.concatenate([np.cumsum(a[order][::-1])[::-1], [0]])
        out.append(np.concatenate([np.full(sink + window, lost[0]), lost]))
    return np.array(out)


def draw_constraints(shape, rng):
    """Returns constraints as arrays, and as the program's options."""
    layers, heads, _ = shape
    c = {"block": int(rng.choice([1, 1, 2, 3, 5, 16])), "ranks": 1, "levels": 0, "cap": [1.0] * layers,
         "least": [0.0] * (layers * heads), "most": [1.0] * (layers * heads)}
    options = ["--block", c["block"]] if c["block"] > 1 else []
    divisors = [d for d in range(2, heads + 1) if heads % d == 0]
    if divisors and rng.random() < 0.4:
        c["ranks"] = int(rng.choice(divisors))
        options += ["--ranks", c["ranks"]]
    elif rng.random() < 0.4:
        c["levels"] = int(rng.integers(1, 3))
        options += ["--levels", c["levels"]]
    if rng.random() < 0.4:
        layer, share = int(rng.integers(layers)), round(float(rng.uniform(0.4, 0.9)), 2)
        c["cap"][layer] = share
        options += ["--layer-cap", f"{share}@{layer}"]
    for option, key, low, high in (("--floor", "least", 0.05, 0.3), ("--ceiling", "most", 0.5, 0.95)):
        if rng.random() < 0.4:
            head, share = int(rng.integers(layers * heads)), round(float(rng.uniform(low, high)), 2)
            c[key][head] = share
            options += [option, f"{share}@{head // heads}.{head % heads}"]
    if rng.random() < 0.3:
        head = int(rng.integers(layers * heads))
        c["least"][head] = c["most"][head] = 1.0
        options += ["--pin", f"{head // heads}.{head % heads}"]
    return c, options


NOTHING = {"block": 1, "ranks": 1, "levels": 0}


def units_up(tokens, block):
    return math.ceil((tokens - 1e-6) / block)


def units_down(tokens, block):
    return math.floor((tokens + 1e-6) / block)


def make_model(loss, shape, floor, scope, c):
    """Returns the problem without budgets, for both solvers: heads = [(fewest pages, costs of this and more pages)],
    groups = heads with a common budget, caps = [(heads, pages)], layers = heads with at most c["levels"] budgets."""
    layers, heads, tokens = shape
    block, own = c["block"], heads // c["ranks"]
    part = {(l, r): [l * heads + r * own + i for i in range(own)] for l in range(layers) for r in range(c["ranks"])}
    model = {"heads": [], "groups": [], "caps": [], "layers": [], "levels": c["levels"], "ranks": c["ranks"]}
    for h, curve in enumerate(loss):
        pages = units_up(tokens, block)
        low = max(units_up(floor, block), units_up(c["least"][h] * tokens, block) if "least" in c else 1, 1)
        high = units_down(c["most"][h] * tokens, block) if "most" in c and c["most"][h] < 1 else pages
        model["heads"].append((low, [int(curve[min(u * block, tokens)]) for u in range(low, high + 1)]))
    for l in range(layers) if scope == "layer" else [None]:
        for r in range(c["ranks"]):
            model["groups"].append([h for k in ([l] if l is not None else range(layers)) for h in part[k, r]])
    for (l, _), members in part.items():
        if "cap" in c and c["cap"][l] < 1:
            model["caps"].append((members, units_down(c["cap"][l] * own * tokens, block)))
    if c["levels"]:
        model["layers"] = [list(range(l * heads, (l + 1) * heads)) for l in range(layers)]
    return model


def contradicts(model):
    """Returns whether no budgets at all meet the limits, levels not considered."""
    low = [head[0] for head in model["heads"]]
    high = [head[0] + len(head[1]) - 1 for head in model["heads"]]
    if any(not head[1] for head in model["heads"]) or any(sum(low[h] for h in m) > cap for m, cap in model["caps"]):
        return True
    span = []
    for group in model["groups"]:
        capped = {h for members, _ in model["caps"] for h in members}
        most = sum(high[h] for h in group if h not in capped)
        for members, cap in model["caps"]:
            if set(members) <= set(group):
                most += min(cap, sum(high[h] for h in members))
        span.append((sum(low[h] for h in group), most))
    ranks = model["ranks"]
    return any(
        max(s[0] for s in span[g:g + ranks]) > min(s[1] for s in span[g:g + ranks]) for g in range(0, len(span), ranks))


def linear(model, budget, variable, at_most, exactly):
    """States the problem through three functions; returns [(cost, variable)]. Fewer pages never cost less, so a budget
    is an upper limit; ranks, which must keep equally much, have equal totals."""
    x, cost = [], []
    for low, costs in model["heads"]:
        row = [variable() for _ in costs]
        exactly(row, [1] * len(row), 1)
        x.append([(low + i, v) for i, v in enumerate(row)])
        cost += [(c, v) for c, v in zip(costs, row)]
    pages = lambda members: ([v for h in members for _, v in x[h]], [u for h in members for u, _ in x[h]])
    for group, most in zip(model["groups"], budget):
        at_most(*pages(group), most)
    for g in range(0, len(model["groups"]), model["ranks"]):
        for other in model["groups"][g + 1 : g + model["ranks"]]:
            (a, u), (b, v) = pages(model["groups"][g]), pages(other)
            exactly(a + b, u + [-k for k in v], 0)
    for members, most in model["caps"]:
        at_most(*pages(members), most)
    for members in model["layers"]:
        used = {u: variable() for u in sorted({u for h in members for u, _ in x[h]})}
        at_most(list(used.values()), [1] * len(used), model["levels"])
        for h in members:
            for u, v in x[h]:
                at_most([v, used[u]], [1, -1], 0)
    return cost


def highs(model, budget):
    import highspy

    h = highspy.Highs()
    h.silent()
    for option in ("mip_rel_gap", "mip_abs_gap"):
        h.setOptionValue(option, 0.0)
    total = lambda x, k: sum(int(w) * v for v, w in zip(x, k))
    cost = linear(model, budget, h.addBinary, lambda x, k, most: h.addConstr(total(x, k) <= most),
                  lambda x, k, sum_: h.addConstr(total(x, k) == sum_))
    h.minimize(sum(c * v for c, v in cost))
    if h.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return None
    assert h.getModelStatus() == highspy.HighsModelStatus.kOptimal
    values = h.getSolution().col_value
    # Computed from the choices, not the floating-point objective, so that the loss is a whole number.
    return sum(c for c, v in cost if values[v.index] > 0.5)


def cp_sat(model, budget):
    from ortools.sat.python import cp_model

    m = cp_model.CpModel()
    total = lambda x, k: sum(int(w) * v for v, w in zip(x, k))
    cost = linear(model, budget, lambda: m.new_bool_var(""), lambda x, k, most: m.add(total(x, k) <= most),
                  lambda x, k, sum_: m.add(total(x, k) == sum_))
    m.minimize(sum(c * v for c, v in cost))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(m)
    if status == cp_model.INFEASIBLE:
        return None
    assert status == cp_model.OPTIMAL
    return round(solver.objective_value)


class Server:
    """cp_sat() in another process: both packages contain a HiGHS library, and one process cannot load both."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, __file__, "--serve"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def solve(self, model, budget):
        print(json.dumps([model, budget]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def serve():
    for line in sys.stdin:
        print(json.dumps(cp_sat(*json.loads(line))), flush=True)


def run(*command, refusable=False):
    done = subprocess.run([str(c) for c in (KVB, *command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode and not (refusable and done.returncode == 1):
        sys.exit("%s\n%s" % (" ".join(str(c) for c in command), done.stderr))
    return done.stdout if done.returncode == 0 else None


def budgets_of(model, shape, scope, ratio, constrained, block):
    """Returns the pages of each group at a prune ratio, and whether lower limits raised them."""
    layers, heads, tokens = shape
    size = (1 if scope == "layer" else layers) * heads * tokens
    # Without constraints the number of pruned tokens is rounded, as in the paper; with them no budget is exceeded.
    left = math.floor(size - ratio * size +
                      1e-6) if constrained else size - round(ratio * (size // tokens // heads) * heads * tokens)
    given = left // block // model["ranks"]
    low = [sum(model["heads"][h][0] for h in group) for group in model["groups"]]
    ranks = model["ranks"]
    low = [max(low[g - g % ranks : g - g % ranks + ranks]) for g in range(len(low))]
    return [max(given, l) for l in low], any(given < l for l in low)


def keeps_to(keep, model, shape, c):
    """Returns whether the program's budgets meet the model's constraints, apart from the total."""
    tokens, block = shape[2], c["block"]
    pages = [units_up(int(k), block) for k in keep]
    return (all(k == min(u * block, tokens) for k, u in zip(keep, pages))
            and all(low <= u < low + len(costs) for u, (low, costs) in zip(pages, model["heads"]))
            and all(sum(pages[h] for h in members) <= cap for members, cap in model["caps"])
            and all(len({int(keep[h]) for h in members}) <= c["levels"] for members in model["layers"])
            and all(len({sum(pages[h] for h in group) for group in model["groups"][g : g + model["ranks"]]}) == 1
                    for g in range(0, len(model["groups"]), model["ranks"])))


def compare(instance, scope, c, options, ratios, folder, server, verbose):
    """Returns (optima compared, greedy above the optimum, refused) of one instance under one set of constraints."""
    kind, loss, shape, floor, protection, total = instance
    constrained = c is not NOTHING
    model = make_model(loss, shape, floor, scope, c)
    chosen = ",".join(str(r / 100) for r in ratios)
    options = ("--metric", "keydiff", "--scope", scope, *protection, "--quiet", "--paper", "--exact", *options)
    out = run("solve", folder / "run.h5", *options, "--budgets", folder / "keep.npy", "--json", refusable=constrained)
    if out is None:
        least, raised = budgets_of(model, shape, scope, 0.01, True, c["block"])
        if not contradicts(model) and not raised and not c["levels"] and highs(model, least) is not None:
            sys.exit(f"REFUSED: {kind} {shape} {protection} {options}: there are solutions")
        return 0, 0, 1
    rows, keep = {round(100 * r["ratio"]): (i, r)
                  for i, r in enumerate(json.loads(out)["rows"])}, np.load(folder / "keep.npy")[0]
    done = better = 0
    for ratio in ratios:
        if ratio not in rows: # floors and pins do not allow this ratio
            continue
        at, row = rows[ratio]
        budget, raised = budgets_of(model, shape, scope, ratio / 100, constrained, c["block"])
        if c["levels"] and row["saturated"]: # lower limits with few levels are not computed here
            continue
        expected, second = highs(model, budget), server.solve(model, budget)
        found = row["optimum"] * total
        mine = keep[at].reshape(-1)
        reached = sum(int(curve[b]) for curve, b in zip(loss, mine))
        if verbose:
            print(
                f"{kind}, {scope}, {ratio} % {options[10:]}: {found:.6f}, budgets {reached}, HiGHS {expected}, CP-SAT "
                f"{second}"
            )
        if (expected is None or abs(found - expected) > 1e-6 or reached != expected or expected != second
                or not row["proved"] or bool(row["saturated"]) != raised or not keeps_to(mine, model, shape, c)):
            sys.exit(
                f"DIFFERENT: {kind} {shape} {protection} {scope} {ratio} % {options[10:]} {chosen}: kvbudget {found}, "
                f"its budgets {reached} "
                f"{mine}, saturated {row['saturated']}/{raised}, HiGHS {expected}, CP-SAT {second}")
        done += 1
        better += row["greedy"] > row["optimum"] * (1 + 1e-9)
    return done, better, 0


def check(kind, rng, ratios, folder, server, draws, verbose):
    """Returns the results [plain, constrained] of one instance."""
    scores, importance, sink, window = make(kind, rng)
    steps = folder / "steps"
    (steps / "context_a").mkdir(parents=True, exist_ok=True)
    np.save(steps / "context_a" / "keydiff.npy", scores)
    np.save(steps / "context_a" / "question_0.npy", importance)
    run("import", steps, "-o", folder / "run.h5", "--force")
    tokens = scores.shape[2]
    instance = (kind, loss_curves(scores, importance, sink, window), scores.shape,
                max(round((1.0 - 0.99) * tokens),
                    sink + window), ("--sink", sink, "--window", window), total_mass(importance, sink, window))
    results = [np.zeros(3, int), np.zeros(3, int)]
    for scope in ("global", "layer"):
        results[0] += compare(instance, scope, NOTHING, (), ratios, folder, server, verbose)
        for _ in range(draws):
            c, options = draw_constraints(scores.shape, rng)
            if options:
                results[1] += compare(instance, scope, c, options, ratios, folder, server, verbose)
    return results


def total_mass(importance, sink, window):
    """Returns the total of which losses are shares: all importance between the protected tokens."""
    return int(importance[..., sink : importance.shape[2] - window].astype(int).sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--constrained", type=int, default=2, help="sets of constraints for every instance and scope")
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
            sums = [np.zeros(3, int), np.zeros(3, int)]
            for _ in range(arguments.rounds):
                for total, one in zip(
                        sums,
                        check(kind, rng, ratios, pathlib.Path(folder), server, arguments.constrained,
                              arguments.verbose)):
                    total += one
            print(
                f"{kind:15} {sums[0][0]:4d} optima equal, greedy above {sums[0][1]:3d} of them; constrained: "
                f"{sums[1][0]:4d} equal, "
                f"greedy above {sums[1][1]:3d}, {sums[1][2]} contradictions refused", flush=True)
    server.close()
    print("kvbudget = HiGHS = CP-SAT everywhere")


if __name__ == "__main__":
    main()
