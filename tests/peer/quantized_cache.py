"""Compares tokens and formats per head with transformers' own QuantizedCache, in transformers, at equal bytes.

usage: quantized_cache.py MODEL TABLE --texts FILE... [--tokens 2048] [--bits 4 2]
                          [--pairs N [--ratios 0.8 0.95] [--tokens-alone TABLE] [--dtype bfloat16]]
TABLE is of version 2 (`kvbudget solve --formats`). Every text is cut to TOKENS tokens and prefilled in one pass, then
its next 64 are forced. Printed per way and text: bytes of the cache after the prefill, and the mean KL to the full
cache in nats. QuantizedCache keeps all tokens, in groups of 64 numbers; its scales and zeros are counted as two bytes
each, although it holds them in the model's float32. The table's ratio is the least, in whole per cents, at which
kvbudget.compress takes no more bytes: bare, and with refit=True. The 64 tokens are added in all ways, unpacked.
--pairs N: instead, bytes really held at --ratios on the first text, and the time of a decoding step, N times in turns
of 16 steps, relative to the full cache's; refitted, with the table and with that of --tokens-alone.
Needs optimum-quanto (backend quanto), hqq (backend hqq), gguf, and the package kvbudget in PYTHONPATH with
KVBUDGET_LIBRARY and KVBUDGET_PROGRAM.
"""
import argparse
import copy
import os
import statistics
import time

import hf_model
import kvbudget
import torch
from transformers.cache_utils import DynamicCache, QuantizedCache

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("model")
p.add_argument("table")
p.add_argument("--texts", nargs="+", required=True)
p.add_argument("--tokens", type=int, default=2048)
p.add_argument("--bits", type=int, nargs="+", default=[4, 2])
p.add_argument("--tokens-alone", metavar="TABLE", help="with --pairs: a table of version 1, to time refitted cuts")
p.add_argument("--ratios", type=float, nargs="+", default=[0.8, 0.95])
p.add_argument("--pairs", type=int, default=0)
p.add_argument("--dtype", default="float32", help="with --pairs: of the model")
a = p.parse_args()
NEXT, GROUP = 64, 64
model, tokenizer = hf_model.load(a.model)
table = kvbudget.Table(a.table)
info = table.info
FULL = info.n_layers * info.n_kv_heads * a.tokens * 2 * info.head_dim * 2  # of a bf16 cache
# backend: axes of keys and of values, 0 or -1 by quanto's names and 0 or 1 by hqq's: along tokens or along channels
WAYS = {
    "quanto, per token": ("quanto", 0, 0),
    "quanto, keys per channel": ("quanto", -1, 0),
    "hqq, per token": ("hqq", 1, 1),
    "hqq, keys per channel": ("hqq", 0, 1),
}


def stored(cache):
    """Returns the bytes of codes, plus two for each scale and zero."""
    total = 0
    for layer in cache.layers:
        for x in (layer._quantized_keys, layer._quantized_values):
            if isinstance(x, tuple):
                total += x[0].nbytes + 2 * (x[1]["scale"].numel() + x[1]["zero"].numel())
            else:
                total += x._data._data.nbytes + 2 * (x._scale.numel() + x._shift.numel())
    return total


@torch.no_grad()
def forced(cache, ids):
    return model(ids, past_key_values=cache).logits[0].log_softmax(-1)


@torch.no_grad()
def cut(context, ratio, table=table, **how):
    cache = DynamicCache(config=model.config)
    with kvbudget.compress(model, table, ratio, **how) as run:
        model(context, past_key_values=cache, logits_to_keep=1)
    return cache, run.report()


@torch.no_grad()
def whole(context, cache):
    model(context, past_key_values=cache, logits_to_keep=1)
    return cache


def ratio_for(most):
    """Returns the least ratio with at most so many bytes, by the table's own counts."""
    for percent in range(1, 100):
        ratio = percent / 100
        if promised(ratio) <= most:
            return ratio
    raise SystemExit("no row takes so few bytes")


def promised(ratio):
    keep, forms = table.keep(ratio, a.tokens), table.formats(ratio)
    bits = {"bf16": 16, "int8": 8, "int4": 4, "int2": 2}

    def size(b, lines, n):
        whole, rest = divmod(n, 32)
        return 2 * lines * n if b == 16 else lines * (whole * (4 + 4 * b) + (rest > 0) * (4 + -(-rest * b // 8)))

    d = info.head_dim
    return sum(
        size(bits[k], d, int(n)) + size(bits[v], int(n), d)
        for row, names in zip(keep, forms) for n, (k, v) in zip(row, names)
    )  # fmt: skip


def texts():
    for path in a.texts:
        with open(path, encoding="utf-8") as f:
            ids = tokenizer(f.read(), add_special_tokens=False, return_tensors="pt").input_ids
        if ids.shape[1] >= a.tokens + NEXT:
            yield os.path.basename(path), ids[:, : a.tokens], ids[:, a.tokens : a.tokens + NEXT]
        else:
            print(f"{path}: {ids.shape[1]} tokens are too few; left out")


def compare():
    results = {}
    for name, context, following in texts():
        plain = whole(context, DynamicCache(config=model.config))
        full = forced(plain, following)

        def judge(way, size, cache):
            kl = float((full.exp() * (full - forced(cache, following))).sum(-1).mean())
            results.setdefault(way, []).append((size, kl))
            print(f"{name:16s} {way:34s} {size:9d} bytes, {size / FULL:6.2%} of bf16   KL {kl:.5f}", flush=True)

        for bits in a.bits:
            size = 0
            for way, (backend, keys, values) in WAYS.items():
                cache = QuantizedCache(
                    backend, model.config, nbits=bits, axis_key=keys, axis_value=values, q_group_size=GROUP
                )
                for i, layer in enumerate(plain.layers):  # as a prefill does; its attention is not quantised
                    cache.update(layer.keys[:, :, : a.tokens], layer.values[:, :, : a.tokens], i)
                size = stored(cache)
                judge(f"int{bits} {way}", size, cache)
            ratio = ratio_for(size)
            for refit in (False, True):
                cache, report = cut(context, ratio, refit=refit, slack=NEXT)
                assert report.bytes_promised == promised(ratio) <= size
                judge(f"table at {ratio:.0%}{', refitted' * refit} (int{bits})", report.bytes_promised, cache)
    print("\nmean over the texts")
    for way, found in results.items():
        size, kl = (sum(x) / len(found) for x in zip(*found))
        print(f"{way:34s} {size / FULL:6.2%} of bf16   KL {kl:.5f}   by text " + " ".join(f"{x[1]:.4f}" for x in found))


@torch.no_grad()
def seconds_a_step(cache, following):
    cache = copy.deepcopy(cache)
    start = time.perf_counter()
    for i in range(16):
        model(following[:, i : i + 1], past_key_values=cache)
    return (time.perf_counter() - start) / 16


def measure():
    model.to(getattr(torch, a.dtype))
    _, context, following = next(texts())
    full = whole(context, DynamicCache(config=model.config))
    ways = {"full": full}
    print(f"full: {kvbudget.cache_bytes(full)} bytes")
    for ratio in a.ratios:
        ways[f"formats, refitted {ratio:.0%}"] = cut(context, ratio, refit=True)
        if a.tokens_alone:
            ways[f"tokens, refitted {ratio:.0%}"] = cut(context, ratio, a.tokens_alone, refit=True)
    for way in list(ways)[1:]:
        ways[way], r = ways[way]
        print(f"{way}: {r.bytes_promised} bytes, {r.bytes_now} with free rows and positions")
    shares = {way: [] for way in ways}
    for _ in range(a.pairs):
        base = seconds_a_step(full, following)
        for way, cache in ways.items():
            shares[way].append(base if cache is full else seconds_a_step(cache, following) / base)
        print(" ".join(f"{found[-1]:.3f}" for found in shares.values()), flush=True)
    print(f"full: {1000 * statistics.median(shares.pop('full')):.0f} ms a step")
    for way, found in shares.items():
        print(f"{way}: {statistics.median(found):.2f} of its time ({min(found):.2f} to {max(found):.2f})")


measure() if a.pairs else compare()
