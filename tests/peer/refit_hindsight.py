"""What refitting could gain if it knew what comes: references from the continuation itself, which no method has.

usage: refit_hindsight.py MODEL [--texts NAME...] [--ratios R...] [--work build/board]

For each text of calib-data/eval, a context of 2,048 tokens is prefilled and cut by the model's ready table. Printed is
the KL of the next 64 tokens as cut, refitted to the context's own queries, as `compress(..., refit=True)` does, and to
the queries of these 64 tokens themselves over the full cache. The last line has means and shares of the KL as cut.
Needs the environment of `make bench-board`: tests/peer/board.sh sets it.
"""
import argparse
import pathlib

import torch
from board_context import ROOT, Context, Subject, divergence, inputs_of
from board_presses import table
from kvbudget import refit

TOKENS, NEXT = 2048, 64


def hindsight(context, following):
    """Returns the full cache's logits after the context, and by layer the queries [H, n, d] of what follows."""
    with inputs_of(context.layers) as seen:
        full = context.logits([context.whole()], following)[0]
    return full, {layer.index: layer.queries(*seen[layer.index])[0] for layer in context.layers}


def measure(context, following, ratios):
    """Returns KL [ratio][as cut, refitted, refitted in hindsight]."""
    own = refit._queries
    full, queries = hindsight(context, following)
    kl = lambda cut: divergence(full, context.logits([cut], following)[0]).mean().item()
    found = []
    for ratio in ratios:
        row = [kl(table(False)(context)(ratio)), kl(table(True)(context)(ratio))]
        refit._queries = lambda layer, *_: queries[layer.index].reshape(layer.n_kv_heads, -1, layer.module.head_dim)
        row.append(kl(table(True)(context)(ratio)))
        refit._queries = own
        found.append(row)
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--texts", nargs="+", default=["story-en", "code-py", "lecture-en"])
    p.add_argument("--ratios", nargs="+", type=float, default=[0.8, 0.9, 0.95])
    p.add_argument("--work", type=pathlib.Path, default=ROOT / "build/board")
    o = p.parse_args()
    o.work.mkdir(parents=True, exist_ok=True)
    subject, rows = Subject(o.model, o.work), []
    subject.tables[False, True] = subject.table  # the same budgets for all three
    for name in o.texts:
        ids = subject.ids(ROOT / f"calib-data/eval/{name}.txt")
        if ids.shape[1] < TOKENS + NEXT:
            print(f"{name}: {ids.shape[1]} tokens, left out")
            continue
        with torch.no_grad():
            rows.append(measure(Context(subject, ids[:, :TOKENS]), ids[:, TOKENS : TOKENS + NEXT], o.ratios))
        print(name, *(f"{ratio}: {a:.4f} {b:.4f} {c:.4f}" for ratio, (a, b, c) in zip(o.ratios, rows[-1])), sep="  ",
              flush=True)
    means = torch.tensor(rows).mean(0)
    print("mean", *(f"{ratio}: {a:.4f} {b:.4f} {c:.4f} ({b / a:.2f}, {c / a:.2f})"
                    for ratio, (a, b, c) in zip(o.ratios, means.tolist())), sep="  ")


if __name__ == "__main__":
    main()
