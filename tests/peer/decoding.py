"""Caches that are cut while a model writes: kvbudget's budgets per head beside other methods, at equal memory.

usage: decoding.py answers MODEL TEXT... --out ANSWERS.json [--prompt 128] [--new 1000] [--seed 1]
       decoding.py calibration ANSWERS.json --out CALIB.jsonl [--at 384 896] [--next 128]
       decoding.py caps MODEL ANSWERS.json [--tables LABEL=TABLE...] [--caps 0.5 0.25 0.12] [--interval 16]
                   [--only METHOD...] [--csv FILE]
answers: MODEL is asked in its chat template to write on about the beginning of each TEXT (a plain text, or calibration
lines, whose contexts are taken), --prompt tokens in all, and answers with --new tokens: sampled at 0.7 over the whole
cache, with a repetition penalty of 1.1, without which small models go round in circles.
calibration: lines for `kvbudget profile` whose contexts are such answers and whose questions are what came next.
caps: the answers' tokens are forced, all texts in one batch, over caches that hold at most CAP x (all tokens) rows in
the mean of their heads at every step: all methods cut every --interval tokens, to the cap less the interval. Printed:
mean KL to the whole cache in nats over the new tokens, and over their last half; how often the likeliest token is the
same; the most rows of any step, in the mean over heads; the seconds that it took. Methods: DecodingPress of kvpress
with KeyDiff, key norms, TOVA and R-KV's score (arXiv 2505.24133: 0.1 attention - 0.9 redundancy), StreamingLLM,
kvbudget with each table and with all heads alike under the same metric, which for morphkv is MorphKV cut every
--interval tokens. Needs kvpress, gguf, and the package kvbudget in PYTHONPATH with KVBUDGET_LIBRARY and
KVBUDGET_PROGRAM.
"""
import argparse
import json
import pathlib
import sys
import tempfile
import time

import hf_model
import kvpress
import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicCache

import kvbudget
from kvbudget.ragged import RaggedLayer

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python/tests"))
import conftest  # writes tables whose heads are alike

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("act", choices=("answers", "calibration", "caps"))
p.add_argument("files", nargs="+")
p.add_argument("--out")
p.add_argument("--prompt", type=int, default=128)
p.add_argument("--new", type=int, default=1000)
p.add_argument("--seed", type=int, default=1)
p.add_argument("--at", type=int, nargs="+", default=[384, 896])
p.add_argument("--next", type=int, default=128)
p.add_argument("--tables", nargs="*", default=[])
p.add_argument("--caps", type=float, nargs="+", default=[0.5, 0.25, 0.12])
p.add_argument("--interval", type=int, default=16)
p.add_argument("--only", nargs="+")
p.add_argument("--csv")
a = p.parse_args()
ASK = "Here is how a text begins. Say in detail what it is about, and then write on, at length."


def contexts(path):
    if path.endswith(".jsonl"):
        return [json.loads(line)["context"] for line in open(path, encoding="utf-8")]
    return [open(path, encoding="utf-8").read()]


def answers():
    model, tokenizer = hf_model.load(a.files[0])
    asked = tokenizer.apply_chat_template([{"role": "user", "content": ASK + "\n\n\0"}], tokenize=False,
                                          add_generation_prompt=True).split("\0")
    before, after = (tokenizer(part, add_special_tokens=False).input_ids for part in asked)
    room = a.prompt - len(before) - len(after)
    texts = [tokenizer(text, add_special_tokens=False).input_ids for path in a.files[1:] for text in contexts(path)]
    ids = torch.tensor([before + text[:room] + after for text in texts])
    torch.manual_seed(a.seed)
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=a.new, min_new_tokens=a.new,
                             do_sample=True, temperature=0.7, top_k=0, repetition_penalty=1.1, pad_token_id=0)
    json.dump({"prompt": a.prompt, "ids": out.tolist()}, open(a.out, "w"))
    for row in out:
        print(repr(tokenizer.decode(row[a.prompt : a.prompt + 40])), "...", repr(tokenizer.decode(row[-30:])))


def calibration():
    with open(a.out, "w") as f:
        for i, ids in enumerate(json.load(open(a.files[0]))["ids"]):
            for n in a.at:
                json.dump({"sample_id": f"answer-{i}-{n}", "context_ids": ids[:n], "question_ids": [ids[n : n + 1]],
                           "answer_ids": [ids[n + 1 : n + 1 + a.next]]}, f)
                f.write("\n")


class Streaming(kvpress.DecodingPress):
    """The first four and the newest. (StreamingLLMPress loses count when DecodingPress cuts again: topk reorders.)"""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        n = keys.shape[2] - self.target_size
        return tuple(x if n <= 0 else torch.cat([x[:, :, :4], x[:, :, 4 + n :]], 2) for x in (keys, values))


class RKV(kvpress.SnapKVPress):
    """R-KV's score as published: attention of the last 8 queries, pooled, less how much a key is like the others."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        looked = super().score(module, hidden_states, keys, values, attentions, kwargs)
        key = F.normalize(keys, dim=-1)
        alike = (key @ key.transpose(2, 3)).tril(-1) + (key @ key.transpose(2, 3)).triu(1)
        redundant = alike.mean(-1).softmax(-1)
        old = keys.shape[2] - self.window_size
        return torch.cat([(0.1 * looked - 0.9 * redundant)[..., :old], looked[..., old:]], -1)


def presses(cap):
    """How kvpress's caches are cut so that no step holds more than `cap` rows."""
    def decoding(press, kind=kvpress.DecodingPress):
        return kind(press, compression_interval=1, target_size=cap - a.interval)  # every pass

    return {
        "DecodingPress(KeyDiff)": decoding(kvpress.KeyDiffPress()),
        "DecodingPress(Knorm)": decoding(kvpress.KnormPress()),
        "TOVA": decoding(kvpress.TOVAPress()),
        "R-KV": decoding(RKV(window_size=8, kernel_size=5)),
        "streaming": decoding(kvpress.KnormPress(), Streaming),
    }


def alike(table, folder):
    """A table of the same metric whose heads keep equally many."""
    i = table.info
    path = pathlib.Path(folder) / f"{len(list(pathlib.Path(folder).iterdir()))}.safetensors"
    return kvbudget.Table(str(conftest.write_table(
        path, i.n_layers, i.n_heads, i.n_kv_heads, i.head_dim, metric=i.metric, parameters=i.metric_parameters,
        sink=i.sink, window=i.window, spread=0)))


def opened(folder):
    """The tables by their labels, and one with all heads alike for each metric of theirs."""
    tables = {}
    for given in a.tables:
        label, path = given.split("=", 1)
        tables[label] = kvbudget.Table(path)
        tables[f"{tables[label].info.metric.split(':')[0]} alike"] = alike(tables[label], folder)
    return tables


def rows_of(cache):
    """Rows of the fullest sequence in the mean of its heads."""
    found = []
    for layer in cache.layers:
        if isinstance(layer, RaggedLayer):
            found.append(torch.tensor(layer.lengths, dtype=torch.float).view(layer.n_sequences, -1).mean(1))
        else:
            found.append(torch.full((layer.keys.shape[0],), float(layer.keys.shape[2])))
    return float(torch.stack(found).mean(0).max())


def seen_by(cache, batch, n):
    """What n new tokens see of a cache whose rows all came before them; by rows alone they would see each other."""
    rows = cache.get_seq_length()
    return torch.ones(n, rows + n, dtype=torch.bool).tril(rows).expand(batch, 1, n, rows + n)


@torch.no_grad()
def follow(model, ids, start, whole, cache):
    """Forces the tokens from `start` on, over a cache that cuts itself or is cut by a press after every pass. Between
    cuts a pass of --interval tokens has the logits of as many steps."""
    divergence, same, most = [], [], 0.0
    model(ids[:, :start], past_key_values=cache, logits_to_keep=1)
    for t in range(start, ids.shape[1] - a.interval + 1, a.interval):  # whole passes
        part = ids[:, t : t + a.interval]
        at, how = torch.arange(t, t + part.shape[1]), {}
        if not isinstance(cache, kvbudget.Cache):
            how["attention_mask"] = seen_by(cache, *part.shape)
        most = max(most, rows_of(cache) + part.shape[1])
        logits = model(part, past_key_values=cache, cache_position=at, position_ids=at[None], **how).logits
        for full, own in zip(whole[:, t - start :].transpose(0, 1), logits.transpose(0, 1)):
            full, own = full.log_softmax(-1), own.log_softmax(-1)
            divergence.append((full.exp() * (full - own)).sum(-1).mean().item())
            same.append((full.argmax(-1) == own.argmax(-1)).float().mean().item())
    half = len(divergence) // 2
    mean = [sum(x) / len(x) for x in (divergence, divergence[half:], same)]
    return *mean, most


def caps():
    model, _ = hf_model.load(a.files[0])
    given = json.load(open(a.files[1]))
    ids, start = torch.tensor(given["ids"]), given["prompt"]
    with torch.no_grad():  # [B, new, V] of the whole cache, text by text: float32
        whole = torch.stack([model(row[None], logits_to_keep=ids.shape[1] - start).logits[0] for row in ids])
    csv = open(a.csv, "a") if a.csv else None
    with tempfile.TemporaryDirectory() as folder:
        tables = opened(folder)
        for share in a.caps:
            cap = int(share * ids.shape[1])
            ways = {name: (press, None) for name, press in presses(cap).items()}
            ways |= {name: (None, table) for name, table in tables.items()}
            for name, (press, table) in ways.items():
                if a.only and not any(word in name for word in a.only):
                    continue
                begun = time.time()
                if press is not None:
                    model.set_attn_implementation("sdpa")
                    with press(model):
                        found = follow(model, ids, start, whole, DynamicCache())
                else:
                    cache = kvbudget.Cache(table, target_size=cap - a.interval, interval=a.interval,
                                           config=model.config)
                    found = follow(model, ids, start, whole, cache)
                line = f"{share:g},{cap},{name},{found[0]:.4f},{found[1]:.4f},{found[2]:.4f},{found[3]:.1f}"
                print(line.replace(",", "  "), f"{time.time() - begun:.0f} s", flush=True)
                if csv:
                    print(line, file=csv, flush=True)


{"answers": answers, "calibration": calibration, "caps": caps}[a.act]()
