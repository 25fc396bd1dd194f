"""What is decoded over a cut cache against kvpress's mask of the same budgets, with bytes and steps in pairs.

usage: cut_logits.py MODEL TABLE... [--tokens 500 2000 8000] [--ratios 0.5 0.8 0.95] [--new 32] [--text FILE]
                     [--pairs 5]
MODEL is a GGUF or a Hugging Face folder, each TABLE one for it, of a metric that kvpress has. Per table, length and
ratio: the largest difference of logits over --new forced tokens between kvbudget.compress and LUKVPress (float32;
PASS is 1e-4), whether the likeliest tokens agree, bytes of the cut cache over what the table promises, and the median
of a decoding step over that of the full cache and of the mask, measured in turns. Needs kvpress 0.5.5, so transformers
below 5.3, and the package kvbudget in PYTHONPATH with KVBUDGET_LIBRARY.
"""
import argparse
import statistics
import time

import hf_model
import kvbudget
import kvpress
import torch
from transformers.cache_utils import DynamicCache

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("model")
p.add_argument("tables", nargs="+")
p.add_argument("--tokens", type=int, nargs="+", default=[500, 2000, 8000])
p.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.8, 0.95])
p.add_argument("--new", type=int, default=32)
p.add_argument("--text", default="LICENSE")
p.add_argument("--pairs", type=int, default=5, help="turns of the three ways, of --new steps each; 0: no times")
p.add_argument("--tolerance", type=float, default=1e-4)
a = p.parse_args()
model, tokenizer = hf_model.load(a.model)
text = tokenizer(open(a.text, encoding="utf-8").read(), add_special_tokens=False).input_ids


def scorer(info):
    """kvpress's scorer with the parameters that the table was made for."""
    name, q = info.metric.split(":")[0], info.metric_parameters
    if name == "snapkv":
        return kvpress.SnapKVPress(window_size=int(q["window"]), kernel_size=int(q["kernel"]))
    if name == "ea":
        return kvpress.ExpectedAttentionPress(
            n_future_positions=int(q["future"]), n_sink=int(q["sinks"]), epsilon=q["epsilon"]
        )
    return {"keydiff": kvpress.KeyDiffPress, "knorm": kvpress.KnormPress}[name]()


def lukv(table, ratio):
    press = kvpress.LUKVPress(
        scorer(table.info), compression_ratio=ratio, sink=table.info.sink, window=table.info.window
    )
    press._budget_curves = table.prune_ratios
    return press


@torch.no_grad()
def prefill(context, ids):
    cache = DynamicCache()
    with context:
        model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def decode(cache, ids, n):
    """Logits [n, V] of n forced tokens, one a step, and the median seconds of a step."""
    rows, times = [], []
    for token in ids[:n]:
        start = time.perf_counter()
        rows.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
        times.append(time.perf_counter() - start)
    return torch.stack(rows), statistics.median(times)


def hide(masks):
    """Gives the layers the masks that a press has left there; one that is not hidden has none."""
    for layer, mask in zip(model.model.layers, masks):
        layer.self_attn.masked_key_indices = mask


worst = 0.0
for path in a.tables:
    table = kvbudget.Table(path)
    for n_tokens in a.tokens:
        ids = torch.tensor([(text * (1 + (n_tokens + a.new) // len(text)))[: n_tokens + a.new]])
        context, forced = ids[:, :n_tokens], ids[0, n_tokens:].tolist()
        for ratio in a.ratios:
            masked = prefill(lukv(table, ratio)(model), context)
            masks = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]
            theirs, _ = decode(masked, forced, a.new)
            hide([None] * len(masks))
            run_context = kvbudget.compress(model, table, ratio)
            with run_context as run:
                cut = DynamicCache()
                with torch.no_grad():
                    model(context, past_key_values=cut, logits_to_keep=1)
            ours, _ = decode(cut, forced, a.new)
            report = run.report()
            off = float((ours - theirs).abs().max())
            worst = max(worst, off)
            line = (
                f"{table.info.metric} T={n_tokens} ratio={ratio}: logits {off:.1e}, likeliest "
                f"{int((ours.argmax(-1) == theirs.argmax(-1)).sum())} of {a.new}, "
                f"{report.bytes_now / 1e6:.1f} MB of {report.bytes_full / 1e6:.1f} "
                f"(promised {report.bytes_promised / 1e6:.1f})"
            )
            steps = {"full": [], "mask": [], "cut": []}
            for _ in range(a.pairs):
                full = prefill(torch.no_grad(), context)
                for name, cache, mask in (("full", full, None), ("mask", masked, masks), ("cut", cut, None)):
                    hide(mask or [None] * len(masks))
                    before = cache.get_seq_length()
                    steps[name].append(decode(cache, forced, a.new)[1])
                    cache.crop(n_tokens - before if name == "cut" else n_tokens)
            hide([None] * len(masks))
            if a.pairs:
                over = {n: statistics.median(c / x for c, x in zip(steps["cut"], steps[n])) for n in ("full", "mask")}
                line += f", a step {over['full']:.2f} of the full cache's, {over['mask']:.2f} of the mask's"
            print(line, flush=True)
print(f"largest difference of logits {worst:.1e}: {'PASS' if worst <= a.tolerance else 'FAIL'}")
