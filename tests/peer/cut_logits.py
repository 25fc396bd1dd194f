"""Compares decoding over a cut cache with kvpress's mask of the same budgets: logits, bytes and time per step.

usage: cut_logits.py MODEL TABLE... [--tokens 500 2000 8000] [--ratios 0.5 0.8 0.95] [--new 32] [--text FILE...]
                     [--pairs 5] [--float64]
MODEL is a GGUF or a Hugging Face folder; each TABLE is for it, and for a metric that kvpress has. Per table, length and
ratio: the largest difference of logits over --new forced tokens between kvbudget.compress and LUKVPress (float32;
PASS is 1e-4), how many kept tokens differ, whether the likeliest tokens agree, bytes of the cut cache beside those that
the table promises, and the median time of a decoding step relative to the full cache and to the mask, in turns.
--float64: also how far either is from the same decoding in float64 over the same kept keys and values, which tells
whose rounding causes a difference. Needs kvpress 0.5.5, so transformers below 5.3, and the package kvbudget in
PYTHONPATH with KVBUDGET_LIBRARY.
"""
import argparse
import copy
import statistics
import time
import types

import hf_model
import kvbudget
import kvpress
import torch
from kvbudget.hooks import use_registered_attention
from kvbudget.models import attention_layers
from kvbudget.ragged import RaggedLayer
from transformers.cache_utils import DynamicCache

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("model")
p.add_argument("tables", nargs="+")
p.add_argument("--tokens", type=int, nargs="+", default=[500, 2000, 8000])
p.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.8, 0.95])
p.add_argument("--new", type=int, default=32)
p.add_argument("--text", nargs="+", default=["LICENSE"], help="one behind the other; repeated if too short")
p.add_argument("--pairs", type=int, default=5, help="turns of the three ways, of --new steps each; 0: no times")
p.add_argument("--float64", action="store_true")
p.add_argument("--tolerance", type=float, default=1e-4)
a = p.parse_args()
model, tokenizer = hf_model.load(a.model)
text = "".join(open(name, encoding="utf-8").read() for name in a.text)
text = tokenizer(text, add_special_tokens=False).input_ids


def scorer(info):
    """Returns kvpress's scorer with the parameters that the table was made for."""
    name, q = info.metric.split(":")[0], info.metric_parameters
    if name == "snapkv":
        return kvpress.SnapKVPress(window_size=int(q["window"]), kernel_size=int(q["kernel"]))
    if name == "ea":
        return kvpress.ExpectedAttentionPress(
            n_future_positions=int(q["future"]), n_sink=int(q["sinks"]), epsilon=q["epsilon"]
        )
    return {"keydiff": kvpress.KeyDiffPress, "knorm": kvpress.KnormPress}[name]()


class Masks(kvpress.LUKVPress):
    """LUKVPress for several ratios in one prefill: its masks have no effect before the first decoded token."""

    def compress(self, module, *of_the_layer):
        press, scores = self.press, self.press.score(module, *of_the_layer)
        self.press = types.SimpleNamespace(score=lambda *_: scores.clone())
        for ratio in a.ratios:
            self.compression_ratio = ratio
            out = super().compress(module, *of_the_layer)
            self.by_ratio.setdefault(ratio, []).append(module.masked_key_indices)
        self.press = press
        return out


@torch.no_grad()
def prefill_for_all(table, context):
    """Returns the full cache of a context, and by ratio a run for cut_of() and LUKVPress's masks of all layers. Two
    prefills, most of the work, serve all ratios."""
    runs = {r: kvbudget.compress(model, table, r, when="call") for r in a.ratios}
    press, cache, first = masks_of(table), DynamicCache(), runs[a.ratios[0]]
    with press(model):
        model(context, past_key_values=DynamicCache(), logits_to_keep=1)
    with first:
        model(context, past_key_values=cache, logits_to_keep=1)
        first.cut(copy.deepcopy(cache))
    return cache, runs, press.by_ratio


def masks_of(table):
    press = Masks(scorer(table.info), compression_ratio=a.ratios[0], sink=table.info.sink, window=table.info.window)
    press._budget_curves, press.by_ratio = table.prune_ratios.copy(), {}
    return press


def cut_of(full, run):
    """Returns a copy of the full cache, cut by the run."""
    cut = copy.deepcopy(full)
    run.cut(cut)
    return cut


def hidden_places(masks, n_layers, n_heads, n_tokens):
    """Returns the positions that LUKVPress hides, bool [L, G, T]."""
    hidden = torch.zeros(n_layers, n_heads, n_tokens, dtype=torch.bool)
    for i, where in enumerate(masks):
        if where is not None:
            hidden[i, where[1], where[2]] = True
    return hidden


def kept_otherwise(cut, hidden):
    """Returns how many tokens the cut cache keeps although the mask hides them."""
    heads = ((i, h, layer) for i, layer in enumerate(cut.layers) for h in range(layer.n_heads))
    return sum(int(hidden[i, h, layer.segment(h)[2].long()].sum()) for i, h, layer in heads)


@torch.no_grad()
def exact(full, hidden, forced):
    """Returns logits [n, V] of the forced tokens in float64 over the keys and values that are not hidden."""
    cut = DynamicCache()
    for layer, gone in zip(full.layers, hidden):
        kept = [(~of_head).nonzero()[:, 0] for of_head in gone]
        cut.layers.append(RaggedLayer(layer.keys.double(), layer.values.double(), kept, len(forced)))
    return decode(cut, None, forced, in_float64)[0]


@torch.no_grad()
def decode(cache, masks, ids, model=model):
    """Returns logits [n, V] of n forced tokens, one per step, and the median seconds of a step; restores the cache."""
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.masked_key_indices = masks[i] if masks else None
    rows, times, before = [], [], cache.get_seq_length()
    for token in ids:
        start = time.perf_counter()
        rows.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
        times.append(time.perf_counter() - start)
    cut = isinstance(cache.layers[0], RaggedLayer)
    cache.crop(-len(ids) if cut else before)
    return torch.stack(rows), statistics.median(times)


def steps_in_turns(full, masked, masks, cut, forced):
    """Returns the time of a step over the cut cache relative to the full cache and to the mask, as medians of pairs."""
    over = {"full": [], "mask": []}
    for _ in range(a.pairs):
        seconds = decode(cut, None, forced)[1]
        over["full"].append(seconds / decode(full, None, forced)[1])
        over["mask"].append(seconds / decode(masked, masks, forced)[1])
    return {name: statistics.median(found) for name, found in over.items()}


def compare(full, run, masks, forced):
    """Prints one line for a table, length and ratio. Returns the largest difference of logits."""
    masked = copy.deepcopy(full)  # kvpress writes over the keys that it hides
    theirs, _ = decode(masked, masks, forced)
    cut = cut_of(full, run)
    report, held = run.report(), kvbudget.cache_bytes(cut)  # before anything is decoded
    hidden = hidden_places(masks, len(full.layers), *full.layers[0].keys.shape[1:3])
    otherwise = kept_otherwise(cut, hidden)
    ours, _ = decode(cut, None, forced)
    off = float((ours - theirs).abs().max())
    same = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    line = (
        f"{run.table.info.metric} T={full.get_seq_length()} ratio={run.ratio}: logits {off:.1e}, {otherwise} tokens "
        f"kept otherwise, likeliest {same} of {len(forced)}, {held / 1e6:.2f} MB of {report.bytes_full / 1e6:.1f} "
        f"(promised {report.bytes_promised / 1e6:.2f}, with slack {report.bytes_with_slack / 1e6:.2f})"
    )
    if a.float64:
        truth = exact(full, hidden, forced)
        far = [float((logits - truth).abs().max()) for logits in (ours, theirs)]
        line += f", from float64 {far[0]:.1e}, the mask {far[1]:.1e}"
    if a.pairs:
        over = steps_in_turns(full, masked, masks, cut, forced)
        line += f", a step {over['full']:.2f} of the full cache's, {over['mask']:.2f} of the mask's"
    print(line, flush=True)
    return off


in_float64 = copy.deepcopy(model).double() if a.float64 else None  # except the angles, which stay float32
if a.float64:
    use_registered_attention(attention_layers(in_float64))
worst, tables = 0.0, [kvbudget.Table(path) for path in a.tables]
for n_tokens in a.tokens:
    ids = (text * (1 + (n_tokens + a.new) // len(text)))[: n_tokens + a.new]
    for table in tables:
        full, runs, masks = prefill_for_all(table, torch.tensor([ids[:n_tokens]]))
        worst = max([worst] + [compare(full, runs[r], masks[r], ids[n_tokens:]) for r in a.ratios])
print(f"largest difference of logits {worst:.1e}: {'PASS' if worst <= a.tolerance else 'FAIL'}")
