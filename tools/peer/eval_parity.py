"""Holds `kvbudget eval` against PyTorch: the same kept positions by masked attention, and kvpress's LUKVPress on the
same tables.

usage: eval_parity.py MODEL KEPT.jsonl [--tables TABLE.npy...] [--learned TABLE.safetensors...] [--relative 1e-2]
                      [--tolerance 1e-3] [--kvpress-tolerance 1e-2]

KEPT.jsonl comes from `kvbudget eval ... --dump-kept KEPT.jsonl`: token ids, kept positions of every head, and the KL
that eval found. For each line the context is prefilled with full attention by transformers in float32; then the
continuation is teacher-forced once with every position visible, and once with those hidden, head by head, that eval
evicted. The KL of both must be eval's within the tolerance. With --tables, lines of the allocator whose metric a table
has are repeated in kvpress, which scores, selects and hides by itself. The .npy needs its JSON side-car, and must hold
the table that eval was given. With --learned the same for tables that carry a ranking (`kvbudget learn`): features,
ranking and selection are those of the package `kvbudget`, hiding is kvpress's (BudgetPress, mode="mask"), and KL must
be eval's within the share --relative. The last line is PASS or FAIL.
"""
import argparse
import json
import time

import numpy as np
import torch

import hf_model
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("model")
p.add_argument("kept")
p.add_argument("--tables", nargs="*", default=[])
p.add_argument("--learned", nargs="*", default=[], help="tables with a ranking, as eval was given them")
p.add_argument("--relative", type=float, default=1e-2, help="how far KL by a learned ranking may be off, as a share")
p.add_argument("--allocator", default="lukv", help="label of the lines that the tables belong to (lukv)")
p.add_argument("--tolerance", type=float, default=1e-3)
p.add_argument("--kvpress-tolerance", type=float, default=1e-2)
a = p.parse_args()


def masked_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Softmax attention, causal for the rows at the end; module.hidden [G, T] hides context positions of KV heads."""
    group = query.shape[1] // key.shape[1]
    k, v = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    n, total = query.shape[2], k.shape[2]
    scores = query @ k.transpose(2, 3) * scaling
    scores = scores.masked_fill(torch.ones(n, total, dtype=torch.bool).triu(total - n + 1), float("-inf"))
    hidden = getattr(module, "hidden", None)
    if hidden is not None:
        scores[..., :hidden.shape[1]] = scores[..., :hidden.shape[1]].masked_fill(
            hidden.repeat_interleave(group, 0)[None, :, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("kept", masked_attention)
model, _ = hf_model.load(a.model, tokenizer=False)


@torch.no_grad()
def log_p(context, following, hidden=None, press=None):
    """Log probabilities [n, vocabulary] behind a prefilled context; hidden [L, G, T] or None."""
    cache, T, n = DynamicCache(), context.shape[1], following.shape[1]
    model.config._attn_implementation = "sdpa"
    if press is None:
        model(context, past_key_values=cache, logits_to_keep=1)
    else:
        with press(model):
            model(context, past_key_values=cache, logits_to_keep=1)
    if hidden is not None:
        model.config._attn_implementation = "kept"
        for layer, mask in zip(model.model.layers, hidden):
            layer.self_attn.hidden = mask
    out = model(following, past_key_values=cache, position_ids=torch.arange(T, T + n)[None],
                cache_position=torch.arange(T, T + n))
    for layer in model.model.layers:
        layer.self_attn.hidden = layer.self_attn.masked_key_indices = None
    return out.logits[0].double().log_softmax(-1)


def divergence(full, other):
    return (full.exp() * (full - other)).sum(-1).mean().item()


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
references, worst, worst_kvpress, worst_learned, seconds = {}, 0.0, 0.0, 0.0, []
for line in open(a.kept, encoding="utf-8"):
    run = json.loads(line)
    ids, T, n = torch.tensor([run["ids"]]), run["n_tokens"], run["n_next"]
    context, following = ids[:, :T], ids[:, T : T + n]
    if run["text"] not in references:
        references[run["text"]] = log_p(context, following)
    full = references[run["text"]]
    hidden = torch.ones(layers * heads, T, dtype=torch.bool)
    for h, positions in enumerate(run["kept"]):
        hidden[h, torch.tensor(positions, dtype=torch.long)] = False
    kl = divergence(full, log_p(context, following, hidden.view(layers, heads, T)))
    worst = max(worst, abs(kl - run["kl"]))
    text = (
        f"{run['text']:16s} {run['metric']:16s} {run['allocator']:10s} {run['ratio']:.2f}  eval {run['kl']:.6f}  "
        f"masked {kl:.6f}  off {kl - run['kl']:+.1e}")
    if run["metric"] in tables and run["allocator"] == a.allocator and run["ratio"] > 0:
        curves, metadata = tables[run["metric"]]
        press = LUKVPress(scorer(metadata, 0.0), compression_ratio=run["ratio"], sink=run["sink"], window=run["window"])
        press._budget_curves = curves
        start = time.perf_counter()
        other = divergence(full, log_p(context, following, press=press))
        seconds.append(time.perf_counter() - start)
        worst_kvpress = max(worst_kvpress, abs(other - run["kl"]))
        text += f"  kvpress {other:.6f}  off {other - run['kl']:+.1e}"
    if run["metric"] in rankings and run["ratio"] > 0:
        other = divergence(full, log_p(context, following,
                                       press=BudgetPress(rankings[run["metric"]], run["ratio"], mode="mask")))
        share = abs(other / run["kl"] - 1)
        worst_learned = max(worst_learned, share)
        text += f"  kvpress by the learned ranking {other:.6f}  off {share:.1e} of it"
    print(text, flush=True)
print(f"largest difference: masked attention {worst:.2e} (allowed {a.tolerance:g})" +
      (f", kvpress {worst_kvpress:.2e} (allowed {a.kvpress_tolerance:g}), {np.mean(seconds):.2f} s a run"
       if seconds else ""))
if rankings:
    print(f"largest share by which kvpress with a learned ranking is off: {worst_learned:.1e} (allowed {a.relative:g})")
good = references and worst <= a.tolerance and worst_kvpress <= a.kvpress_tolerance and (seconds or not tables)
good = good and worst_learned <= a.relative and (worst_learned > 0 or not rankings)
print("PASS" if good else "FAIL")
raise SystemExit(0 if good else 1)
