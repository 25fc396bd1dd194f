"""Compares the loss curves and gains of a record (`profile --curves`) with PyTorch.

usage: judge_losses.py MODEL RECORD.h5 [--metric M]... [--curve-tolerance 1e-4] [--gain-tolerance 1e-3]

For each question transformers prefills the context in float32 and the question and answer are teacher-forced after it.
Curves: at each level the head's output is computed with only the metric's best tokens (sinks and window first, by the
scores of the record) and with all of them, through W_O, for every recorded query. The record must hold the curves of
all queries, that is --curve-queries must be at least the answer's length. Gains: each layer is cut in KeyDiff's order,
every other row to 20 % of the context, the others to 4 %, and the logits are compared. The last line is PASS or FAIL.
"""
import argparse
import json

import h5py
import numpy as np
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_model

SHARES = [0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.04, 0.06, 0.09, 0.13, 0.2, 0.3, 0.45, 0.65, 0.85]
CUT_LEVELS = {1: 10, 2: 6}  # of the first, third, .. row, and of the others

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("model")
p.add_argument("record")
p.add_argument("--metric", action="append", help="judge this one's curves (default: all)")
p.add_argument("--gain-rows", type=int, default=8, help="as the profile was given it")
p.add_argument("--curve-tolerance", type=float, default=1e-4)
p.add_argument("--gain-tolerance", type=float, default=1e-3)
a = p.parse_args()

model, _ = hf_model.load(a.model, tokenizer=False)
config = model.config
L, H, G = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
d, group = getattr(config, "head_dim", None) or config.hidden_size // H, H // G
output_matrix = [layer.self_attn.o_proj.weight.double() for layer in model.model.layers]
moved = {}  # layer -> addend to its heads' outputs [n, H*d] in the next pass
seen = {}  # layer -> (queries, keys, values, heads' outputs) of the last pass over a tail


def watched_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    n, total = query.shape[2], key.shape[2]
    k, v = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ k.transpose(2, 3) * scaling).masked_fill(
        torch.ones(n, total, dtype=torch.bool).triu(total - n + 1), float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(1, 2).contiguous()
    seen[module.layer_idx] = query[0].double(), key[0].double(), value[0].double(), out[0].double()
    if module.layer_idx in moved:
        out = out + moved[module.layer_idx].view_as(out)
    return out, None


ALL_ATTENTION_FUNCTIONS.register("watched", watched_attention)


@torch.no_grad()
def prefill(context):
    cache = DynamicCache()
    model.config._attn_implementation = "sdpa"
    model(torch.tensor([context]), past_key_values=cache, logits_to_keep=1)
    model.config._attn_implementation = "watched"
    return cache


@torch.no_grad()
def tail_logits(cache, T, tail):
    """Returns logits [n, vocabulary] of `tail` after the T tokens of the cache, which is restored."""
    n = len(tail)
    out = model(torch.tensor([tail]), past_key_values=cache, position_ids=torch.arange(T, T + n)[None],
                cache_position=torch.arange(T, T + n))
    cache.crop(T)
    return out.logits[0].double()


def cut_outputs(layer, T, order, n_kept, rows):
    """Returns the outputs [rows, H*d] of heads if each KV head keeps the first n_kept tokens of order [G, T]."""
    q, k, v, full = seen[layer]
    out = full[rows].clone()
    for g in range(G):
        visible = torch.zeros(k.shape[1], dtype=torch.bool)
        visible[order[g][:n_kept]] = True
        visible[T:] = True
        for j in range(g * group, (g + 1) * group):
            scores = q[j, rows] @ k[g].T * d**-0.5
            causal = torch.arange(k.shape[1])[None] <= T + rows[:, None]
            scores = scores.masked_fill(~(causal & visible), float("-inf"))
            out[:, j] = scores.softmax(-1) @ v[g]
    return out


def ranked(scores, sink, window):
    """Returns positions [G, T]: sinks and window first, then by score, ties by position."""
    scores = torch.as_tensor(np.asarray(scores)).double().clone()
    scores[:, :sink] = float("inf")
    scores[:, scores.shape[1] - window:] = float("inf")
    return torch.sort(scores, dim=1, descending=True, stable=True).indices


def level_tokens(level, T, protect):
    return max(round(SHARES[level] * T), min(max(protect, 1), T))


def square(layer, difference):
    """Returns the mean squared norm of W_O times a difference of heads' outputs [n, H, d]."""
    return (difference.reshape(len(difference), H * d) @ output_matrix[layer].T).square().sum(-1).mean().item()


def keydiff_order(layer, T):
    k = seen[layer][1][:, :T]
    unit = k / k.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return ranked(-(unit * unit.sum(1, keepdim=True)).sum(-1), 4, 1)


def judge_gains(name, cache, T, tail, first, n, recorded):
    """Returns the largest relative difference of KL and of squares, over layers and kinds."""
    rows, worst = torch.arange(first, first + n), 0.0
    full = tail_logits(cache, T, tail)[rows].log_softmax(-1)
    own = dict(seen)
    for layer in range(L):
        seen.update(own)
        order, move = keydiff_order(layer, T), torch.zeros(n, H, d, dtype=torch.float64)
        for kind, level in CUT_LEVELS.items():
            own_rows = rows[kind - 1::2]
            move[kind - 1::2] = cut_outputs(layer, T, order, level_tokens(level, T, 5), own_rows) \
                - own[layer][3][own_rows]
        add = torch.zeros(len(tail), H, d)
        add[rows] = move.float()
        moved[layer] = add
        other = tail_logits(cache, T, tail)[rows].log_softmax(-1)
        moved.clear()
        kl = (full.exp() * (full - other)).sum(-1)
        for kind in CUT_LEVELS:
            expected = kl[kind - 1::2].mean().item(), square(layer, move[kind - 1::2])
            for found, want in zip(recorded[layer, kind], expected):
                worst = max(worst, abs(found - want) / max(abs(want), 3e-5))
    print(f"{name}  gains   off by at most {worst:.1e}", flush=True)
    return worst


def judge_curves(name, T, rows, curves, scores, parameters):
    """Returns the largest difference at any level, relative to the head's largest error."""
    sink, window = parameters["protect_sink"], parameters["protect_window"]
    order, protect, worst = None, min(sink + window, T), 0.0
    for layer in range(L):
        order = ranked(scores[layer], sink, window)
        for level in range(len(SHARES)):
            move = cut_outputs(layer, T, order, level_tokens(level, T, protect), rows) - seen[layer][3][rows]
            for g in range(G):
                part = torch.zeros_like(move)
                part[:, g * group:(g + 1) * group] = move[:, g * group:(g + 1) * group]
                off = abs(curves[layer, g, level] - square(layer, part))
                worst = max(worst, off / max(curves[layer, g].max(), 1e-12))
    print(f"{name}  off by at most {worst:.1e}", flush=True)
    return worst


curve, gain = 0.0, 0.0
with h5py.File(a.record) as record:
    metrics = json.loads(record.attrs["metrics"])
    for context_id, c in record["contexts"].items():
        context = c["token_ids"][:].tolist()
        cache, T = prefill(context), len(context)
        for number, q in c["questions"].items():
            if "curves" not in q:
                continue
            suffix, answer = q["suffix_ids"][:].tolist(), q["answer_ids"][:].tolist()
            tail, first = suffix + answer[:-1], len(suffix)
            tail_logits(cache, T, tail)
            rows = torch.arange(first, len(tail))
            for metric in a.metric or q["curves"]:
                if metric.startswith("learned"):  # its curves belong to a ranking fitted without this context
                    continue
                curve = max(curve, judge_curves(f"{context_id} {number} {metric}", T, rows,
                                                q["curves"][metric][:], c["scores"][metric][:], metrics[metric]))
            if "gains" in q:
                n = min(len(answer) - 1, a.gain_rows)
                gain = max(gain, judge_gains(f"{context_id} {number}", cache, T, tail, first, n,
                                             q["gains"]["keydiff"][:]))
good = curve <= a.curve_tolerance and gain <= a.gain_tolerance
print(f"curves {curve:.1e} (at most {a.curve_tolerance}), gains {gain:.1e} (at most {a.gain_tolerance}):",
      "PASS" if good else "FAIL")
