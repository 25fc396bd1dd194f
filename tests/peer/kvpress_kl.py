"""Measures tables in kvpress: KL to the full cache and NLL, compared with uniform and AdaKV budgets.

usage: kvpress_kl.py MODEL TABLE.npy... --texts FILE... [--tokens 2048] [--ratios 0.8] [--no-ada]
Each TABLE.npy needs the JSON file beside it, which names its metric. Every text (plain, the contexts of a
.jsonl, or token ids as .npy) is cut to TOKENS tokens, prefilled, compressed, and teacher-forced on its next 64 tokens.
Prints the means over the texts, for every table the ratio of its KL to the uniform table's, and the runs per second
(`kvbudget eval` prints its own). Needs kvpress 0.5.5, torch, transformers >= 4.56, < 5.3, gguf.
"""
import argparse
import json
import os
import time

import numpy as np
import torch

import hf_model
from kvpress import AdaKVPress, LUKVPress
from presses import scorer
from transformers import DynamicCache

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("model")
p.add_argument("tables", nargs="+")
p.add_argument("--texts", nargs="+", required=True)
p.add_argument("--tokens", type=int, default=2048)
p.add_argument("--ratios", type=float, nargs="+", default=[0.8])
p.add_argument("--no-ada", action="store_true", help="leave AdaKV out, for speed")
a = p.parse_args()
N = 64
model, tokenizer = hf_model.load(a.model)


def read_texts():
    """Yields (name, ids [1, n])."""
    def encode(text):
        return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    for path in a.texts:
        if path.endswith(".npy"):
            yield os.path.basename(path), torch.from_numpy(np.load(path).astype("i8"))[None]
            continue
        with open(path, encoding="utf-8") as f:
            if path.endswith(".jsonl"):
                for line in f:
                    o = json.loads(line)
                    yield o["sample_id"], encode(o["context"])
            else:
                yield os.path.basename(path), encode(f.read())


@torch.no_grad()
def next_logp(context, following, press):
    cache, T, n = DynamicCache(), context.shape[1], following.shape[1]
    if press is None:
        model(context, past_key_values=cache, logits_to_keep=1)
    else:
        with press(model):
            model(context, past_key_values=cache, logits_to_keep=1)
    out = model(following, past_key_values=cache, position_ids=torch.arange(T, T + n)[None],
                cache_position=torch.arange(T, T + n))
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    return out.logits[0].log_softmax(-1)


tables = []
for path in a.tables:
    with open(path.removesuffix(".npy") + ".json", encoding="utf-8") as f:
        tables.append((path, np.load(path), json.load(f)["metadata"]))
results, seconds = {}, []
for name, ids in read_texts():
    if ids.shape[1] < a.tokens + N:
        print(f"{name}: {ids.shape[1]} tokens, {a.tokens + N} are needed; left out")
        continue
    context, following = ids[:, : a.tokens], ids[:, a.tokens : a.tokens + N]
    full = next_logp(context, following, None)
    uniform = np.broadcast_to(((np.arange(99) + 1) / 100)[:, None, None], tables[0][1].shape).copy()
    for path, curve, metadata in tables:
        for ratio in a.ratios:
            runs = {"uniform": uniform, "ada": None, path: curve}
            if a.no_ada:
                del runs["ada"]
            for kind, budgets in runs.items():
                key = (metadata["metric"], ratio, kind)
                if name in results.get(key, {}):
                    continue
                if budgets is None:
                    press = AdaKVPress(scorer(metadata, ratio))
                else:
                    press = LUKVPress(scorer(metadata, 0.0), compression_ratio=ratio, sink=int(metadata["sink"]),
                                      window=int(metadata["window"]))
                    press._budget_curves = budgets
                start = time.perf_counter()
                y = next_logp(context, following, press)
                seconds.append(time.perf_counter() - start)
                kl = (full.exp() * (full - y)).sum(-1).mean().item()
                nll = -y[:-1].gather(1, following[0, 1:, None]).mean().item()
                results.setdefault(key, {})[name] = (kl, nll)
    print("text", name, flush=True)
for (metric, ratio, kind), v in results.items():
    kl, nll = np.mean(list(v.values()), 0)
    base = np.mean([x[0] for x in results[metric, ratio, "uniform"].values()])
    each = " ".join(f"{x[0]:.3f}" for x in v.values())
    print(
        f"{metric:18s} {ratio:.2f} {kind:40s} KL {kl:.4f} ({kl / base:4.0%} of uniform)  NLL {nll:.3f}   by text {each}"
    )
print(f"{len(seconds)} compressed runs, {np.mean(seconds):.2f} s each, {1 / np.mean(seconds):.2f} a second")
