"""Compares `kvbudget eval` with PyTorch: masked attention with the same kept positions, and kvpress's LUKVPress with
the same tables.

usage: eval_parity.py MODEL KEPT.jsonl [--tables TABLE.npy...] [--learned TABLE.safetensors...] [--relative 1e-2]
                      [--tolerance 1e-3] [--kvpress-tolerance 1e-2]

KEPT.jsonl comes from `kvbudget eval ... --dump-kept KEPT.jsonl`: token ids, kept positions of every head, and the KL
that eval found. For each line the context is prefilled with full attention by transformers in float32; then the
continuation is teacher-forced once with every position visible, and once with the positions hidden that eval evicted
from each head. The KL must equal eval's within --tolerance and within the share --relative. With --tables, lines of
--allocator are repeated in kvpress if a table is for their metric; kvpress scores, selects and hides by itself. The
.npy needs the JSON file beside it, and must hold the table that eval was given. With --learned the same for tables with
a ranking (`kvbudget learn`): features, ranking and selection are those of the package `kvbudget`, hiding is kvpress's
(BudgetPress, mode="mask"). The last line is PASS or FAIL.
"""
import argparse
import json
import time

import numpy as np
import torch

import hf_model
from masked import divergence, log_p

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("model")
p.add_argument("kept")
p.add_argument("--tables", nargs="*", default=[])
p.add_argument("--learned", nargs="*", default=[], help="tables with a ranking, as eval was given them")
p.add_argument("--relative", type=float, default=1e-2, help="how far KL may be off, as a share")
p.add_argument("--allocator", default="lukv", help="label of the lines that the tables belong to (lukv)")
p.add_argument("--tolerance", type=float, default=1e-3)
p.add_argument("--kvpress-tolerance", type=float, default=1e-2)
a = p.parse_args()

model, _ = hf_model.load(a.model, tokenizer=False)

tables = {}
for path in a.tables:
    with open(path.removesuffix(".npy") + ".json", encoding="utf-8") as f:
        metadata = json.load(f)["metadata"]
    tables[metadata["metric"]] = (np.load(path), metadata)
if tables:
    from kvpress import LUKVPress
    from presses import scorer
rankings = {}
if a.learned:
    from kvbudget import Table
    from kvbudget.presses import BudgetPress
    rankings = {table.ranking.name: table for table in map(Table, a.learned)}
layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
references, worst, worst_share, worst_kvpress, worst_learned, seconds = {}, 0.0, 0.0, 0.0, 0.0, []
for line in open(a.kept, encoding="utf-8"):
    run = json.loads(line)
    ids, T, n = torch.tensor([run["ids"]]), run["n_tokens"], run["n_next"]
    context, following = ids[:, :T], ids[:, T : T + n]
    if run["text"] not in references:
        references[run["text"]] = log_p(model, context, following)
    full = references[run["text"]]
    hidden = torch.ones(layers * heads, T, dtype=torch.bool)
    for h, positions in enumerate(run["kept"]):
        hidden[h, torch.tensor(positions, dtype=torch.long)] = False
    kl = divergence(full, log_p(model, context, following, hidden.view(layers, heads, T)))
    worst = max(worst, abs(kl - run["kl"]))
    worst_share = max(worst_share, abs(kl - run["kl"]) / max(run["kl"], 1e-9) if run["ratio"] > 0 else 0)
    text = (
        f"{run['text']:16s} {run['metric']:16s} {run['allocator']:10s} {run['ratio']:.2f}  eval {run['kl']:.6f}  "
        f"masked {kl:.6f}  off {kl - run['kl']:+.1e}")
    if run["metric"] in tables and run["allocator"] == a.allocator and run["ratio"] > 0:
        curves, metadata = tables[run["metric"]]
        press = LUKVPress(scorer(metadata, 0.0), compression_ratio=run["ratio"], sink=run["sink"], window=run["window"])
        press._budget_curves = curves
        start = time.perf_counter()
        other = divergence(full, log_p(model, context, following, press=press))
        seconds.append(time.perf_counter() - start)
        worst_kvpress = max(worst_kvpress, abs(other - run["kl"]))
        text += f"  kvpress {other:.6f}  off {other - run['kl']:+.1e}"
    if run["metric"] in rankings and run["ratio"] > 0:
        press = BudgetPress(rankings[run["metric"]], run["ratio"], mode="mask")
        other = divergence(full, log_p(model, context, following, press=press))
        share = abs(other / run["kl"] - 1)
        worst_learned = max(worst_learned, share)
        text += f"  kvpress by the learned ranking {other:.6f}  off {share:.1e} of it"
    print(text, flush=True)
print(f"largest difference: masked attention {worst:.2e} (allowed {a.tolerance:g}), {worst_share:.1e} of the KL "
      f"(allowed {a.relative:g})" +
      (f", kvpress {worst_kvpress:.2e} (allowed {a.kvpress_tolerance:g}), {np.mean(seconds):.2f} s a run"
       if seconds else ""))
if rankings:
    print(f"largest share by which kvpress with a learned ranking is off: {worst_learned:.1e} (allowed {a.relative:g})")
good = references and worst <= a.tolerance and worst_kvpress <= a.kvpress_tolerance and (seconds or not tables)
good = good and max(worst_learned, worst_share) <= a.relative and (worst_learned > 0 or not rankings)
print("PASS" if good else "FAIL")
raise SystemExit(0 if good else 1)
