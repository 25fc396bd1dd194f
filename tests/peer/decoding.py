"""Compares kvbudget's budgets per head with other methods at equal memory, for caches that are cut during decoding.

usage: decoding.py answers MODEL TEXT... --out ANSWERS.json [--prompt 128] [--new 1000] [--seed 1]
       decoding.py texts MODEL TEXT... --out TEXTS.json [--prompt 128] [--new 1000]
       decoding.py calibration ANSWERS.json --out CALIB.jsonl [--at 384 896] [--next 128]
       decoding.py caps MODEL ANSWERS.json [--tables LABEL=TABLE...] [--learn ANSWERS.json] [--caps 0.5 0.25 0.12]
                   [--interval 16] [--count N] [--only METHOD...] [--dtype bfloat16] [--csv FILE]
       decoding.py problems MODEL GSM8K.jsonl --tables LABEL=TABLE... [--caps 0.5 0.25 0.12] [--interval 16]
                   [--count 100] [--new 320] [--batch 50] [--only METHOD...] [--csv FILE]
       decoding.py chat MODEL --tables LABEL=TABLE... [--caps 0.5 0.25] [--interval 64] [--count 8] [--csv FILE]
answers: MODEL is asked in its chat template to continue the beginning of each TEXT (a plain text, or calibration lines,
of which the contexts are used), --prompt tokens in all, and answers with --new tokens: sampled at 0.7 over the whole
cache, with a repetition penalty of 1.1, without which small models repeat themselves.
texts: the TEXTs themselves in the same form, as if the model had written them: code, to see which lines it completes.
calibration: lines for `kvbudget profile` with such answers as contexts and the tokens that followed as questions.
caps: the answers' tokens are forced, all texts in one batch, over caches that hold at most CAP x (all tokens) rows,
averaged over heads, at every step: all methods cut every --interval tokens, to the cap less the interval. Printed: mean
KL to the whole cache in nats over the new tokens, and over their last half; how often the likeliest token is the same;
the most rows of any step, averaged over heads; how often the likeliest token is the one that follows; the share of
lines that the model completes, that is with every token the likeliest; the seconds that it took. Methods:
DecodingPress of kvpress with KeyDiff, key norms, TOVA, R-KV's score (arXiv 2505.24133: 0.1 attention - 0.9 redundancy)
and, with the centres of the queries in three texts of --learn, TriAttention's (arXiv 2604.04921); StreamingLLM;
kvbudget with each table, and with equal heads under the same metric, which for morphkv is MorphKV cut every --interval
tokens.
problems: word problems are answered greedily in the chat template, by the whole cache and then over caches of CAP x
(the mean length of prompt and whole answer) rows. Printed: the share of right answers (the last number), the mean
length of answers in tokens, how many did not end, and the seconds.
chat: --count chats of ten turns at once: the first gives five numbers, eight are about other things, and the last asks
for one of the five, each in turn. The whole cache's answers are forced over caches that keep the share CAP of all
tokens so far. Printed: the share of right numbers, rows and bytes relative to the whole cache's, and the tokens.
Needs kvpress, gguf, and the package kvbudget in PYTHONPATH with KVBUDGET_LIBRARY and KVBUDGET_PROGRAM.
"""
import argparse
import copy
import json
import pathlib
import re
import tempfile
import time
from contextlib import nullcontext

import hf_model
import kvpress
import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicCache

import kvbudget
from kvbudget.ragged import RaggedLayer

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("act", choices=("answers", "texts", "calibration", "caps", "problems", "chat"))
p.add_argument("files", nargs="+")
p.add_argument("--out")
p.add_argument("--prompt", type=int, default=128)
p.add_argument("--new", type=int)
p.add_argument("--seed", type=int, default=1)
p.add_argument("--at", type=int, nargs="+", default=[384, 896])
p.add_argument("--next", type=int, default=128)
p.add_argument("--tables", nargs="*", default=[])
p.add_argument("--caps", type=float, nargs="+", default=[0.5, 0.25, 0.12])
p.add_argument("--interval", type=int, default=16)
p.add_argument("--learn")
p.add_argument("--count", type=int)
p.add_argument("--batch", type=int, default=50)
p.add_argument("--only", nargs="+")
p.add_argument("--csv")
p.add_argument("--dtype", default="float32", help="bfloat16 for models that are slow: the whole cache's line then "
               "says how far its own passes and steps are apart")
a = p.parse_args()
new = a.new or (320 if a.act == "problems" else 1000)
ASK = "Here is how a text begins. Say in detail what it is about, and then write on, at length."


def contexts(path):
    if path.endswith(".jsonl"):
        return [json.loads(line)["context"] for line in open(path, encoding="utf-8")]
    return [open(path, encoding="utf-8").read()]


def answers():
    model, tokenizer = hf_model.load(a.files[0], dtype=getattr(torch, a.dtype))
    asked = tokenizer.apply_chat_template([{"role": "user", "content": ASK + "\n\n\0"}], tokenize=False,
                                          add_generation_prompt=True).split("\0")
    before, after = (tokenizer(part, add_special_tokens=False).input_ids for part in asked)
    room = a.prompt - len(before) - len(after)
    texts = [tokenizer(text, add_special_tokens=False).input_ids for path in a.files[1:] for text in contexts(path)]
    ids = torch.tensor([before + text[:room] + after for text in texts])
    torch.manual_seed(a.seed)
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                             do_sample=True, temperature=0.7, top_k=0, repetition_penalty=1.1, pad_token_id=0)
    json.dump({"prompt": a.prompt, "ids": out.tolist()}, open(a.out, "w"))
    for row in out:
        print(repr(tokenizer.decode(row[a.prompt : a.prompt + 40])), "...", repr(tokenizer.decode(row[-30:])))


def texts():
    tokenizer = hf_model.tokenizer_of(a.files[0])
    ids = [tokenizer(text, add_special_tokens=False).input_ids for path in a.files[1:] for text in contexts(path)]
    ids = [text[: a.prompt + new] for text in ids if len(text) >= a.prompt + new]
    print(f"{len(ids)} texts")
    json.dump({"prompt": a.prompt, "ids": ids}, open(a.out, "w"))


def calibration():
    with open(a.out, "w") as f:
        for i, ids in enumerate(json.load(open(a.files[0]))["ids"]):
            for n in a.at:
                json.dump({"sample_id": f"answer-{i}-{n}", "context_ids": ids[:n], "question_ids": [ids[n : n + 1]],
                           "answer_ids": [ids[n + 1 : n + 1 + a.next]]}, f)
                f.write("\n")


class Streaming(kvpress.DecodingPress):
    """Keeps the first four and the newest. (StreamingLLMPress is wrong if DecodingPress cuts again: topk reorders.)"""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        n = keys.shape[2] - self.target_size
        return tuple(x if n <= 0 else torch.cat([x[:, :, :4], x[:, :, 4 + n :]], 2) for x in (keys, values))


class RKV(kvpress.SnapKVPress):
    """R-KV's score as published: attention of the last 8 queries, pooled, less a key's similarity to the others."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        looked = super().score(module, hidden_states, keys, values, attentions, kwargs)
        key = F.normalize(keys, dim=-1)
        alike = (key @ key.transpose(2, 3)).tril(-1) + (key @ key.transpose(2, 3)).triu(1)
        redundant = alike.mean(-1).softmax(-1)
        old = keys.shape[2] - self.window_size
        return torch.cat([(0.1 * looked - 0.9 * redundant)[..., :old], looked[..., old:]], -1)


class TriAttention(kvpress.ScorerPress):
    """TriAttention's score as published: the queries' centre before RoPE, rotated to positions 1, 2, 4 ... 65,536
    tokens ahead and multiplied with the key, averaged over these; plus the excess of the queries' norms over their
    centre, times the key's. Normalised per query head; a KV head takes its group's maximum. Keeps the last 8 tokens."""

    def __init__(self, model, texts):
        super().__init__()
        seen = {}

        def note(module, inputs, output, layer):
            q = output.float().unflatten(-1, (-1, layer.head_dim))  # [B, T, H, d] before RoPE
            q = torch.complex(*q.chunk(2, -1))
            for key, x in (("mean", q), ("norm", q.abs())):
                seen.setdefault((layer.layer_idx, key), []).append(x.mean((0, 1)))

        layers = [layer.self_attn for layer in model.model.layers]
        hooks = [x.q_proj.register_forward_hook(lambda *y, x=x: note(*y, layer=x)) for x in layers]
        with torch.no_grad():
            for row in texts:
                model(torch.tensor([row]), logits_to_keep=1)
        for hook in hooks:
            hook.remove()
        self.centre = {key: torch.stack(x).mean(0) for key, x in seen.items()}
        angle = model.model.rotary_emb.inv_freq * 2.0 ** torch.arange(17)[:, None]
        self.ahead = torch.polar(torch.ones_like(angle), angle).mean(0)
        self.step = torch.polar(torch.ones_like(angle[0]), angle[0])

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        cos, sin = (x[0, -1, : module.head_dim // 2].float() for x in kwargs["position_embeddings"])  # of the newest
        mean, norm = (self.centre[module.layer_idx, key] for key in ("mean", "norm"))
        looking = mean * torch.complex(cos, sin) * self.step * self.ahead  # [H, d / 2]
        key = torch.complex(*keys.float().chunk(2, -1))  # [B, G, n, d / 2]
        key = key.repeat_interleave(module.num_key_value_groups, 1)
        score = (looking[:, None] * key.conj()).real.sum(-1) + ((norm - mean.abs())[:, None] * key.abs()).sum(-1)
        score = (score - score.mean(-1, keepdim=True)) / score.std(-1, keepdim=True, correction=0).clamp_min(1e-6)
        score = score.unflatten(1, (keys.shape[1], -1)).amax(2)
        score[..., -8:] = torch.inf
        return score


def presses(cap, learned):
    """Returns kvpress's presses by name, set up so that no step holds more than `cap` rows."""
    def decoding(press, kind=kvpress.DecodingPress):
        return kind(press, compression_interval=1, target_size=cap - a.interval)  # every pass

    return {name: decoding(press) for name, press in learned.items()} | {
        "DecodingPress(KeyDiff)": decoding(kvpress.KeyDiffPress()),
        "DecodingPress(Knorm)": decoding(kvpress.KnormPress()),
        "TOVA": decoding(kvpress.TOVAPress()),
        "R-KV": decoding(RKV(window_size=8, kernel_size=5)),
        "streaming": decoding(kvpress.KnormPress(), Streaming),
    }


def alike(path, folder):
    """Returns the table with equal heads: the same ranking, protection and rows."""
    data = pathlib.Path(path).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    del header["__metadata__"]["content_sha256"]
    found = {name: data[begin + at[0] : begin + at[1]] for name, at in
             ((name, header[name]["data_offsets"]) for name in ("prune_ratio", "ratio"))}
    heads = len(found["prune_ratio"]) // len(found["ratio"])
    even = b"".join(found["ratio"][i : i + 8] * heads for i in range(0, len(found["ratio"]), 8))
    text = json.dumps(header).encode()
    out = pathlib.Path(folder) / f"{len(list(pathlib.Path(folder).iterdir()))}.safetensors"
    out.write_bytes(len(text).to_bytes(8, "little") + text + data[begin:].replace(found["prune_ratio"], even, 1))
    return kvbudget.Table(out)


def opened(folder):
    """Returns the tables by their labels, and for each of their metrics one with equal heads."""
    tables = {}
    for given in a.tables:
        label, path = given.split("=", 1)
        tables[label] = kvbudget.Table(path)
        tables[f"{tables[label].info.metric.split(':')[0]} alike"] = alike(path, folder)
    return tables


def rows_of(cache):
    """Returns the rows of the fullest sequence, averaged over its heads."""
    found = []
    for layer in cache.layers:
        if isinstance(layer, RaggedLayer):
            found.append(torch.tensor(layer.lengths, dtype=torch.float).view(layer.n_sequences, -1).mean(1))
        else:
            found.append(torch.full((layer.keys.shape[0],), float(layer.keys.shape[2])))
    return float(torch.stack(found).mean(0).max())


def seen_by(cache, batch, n):
    """Returns the mask with which n new tokens see all rows of the cache and, causally, each other."""
    rows = cache.get_seq_length()
    return torch.ones(n, rows + n, dtype=torch.bool).tril(rows).expand(batch, 1, n, rows + n)


def completed(right, ends):
    """Returns the shares of right tokens and of whole lines with only right tokens; right, ends: [B, n]."""
    lines = [line.all().item() for hits, end in zip(right, ends)
             for line in hits.tensor_split((end.nonzero()[:, 0] + 1).tolist())[1:-1]]
    return right.float().mean().item(), sum(lines) / max(len(lines), 1)


@torch.no_grad()
def follow(model, ids, start, whole, cache, ends):
    """Forces the tokens from `start` on, over a cache that cuts itself or is cut by a press after every pass. One pass
    of --interval tokens between cuts gives the same logits as single steps."""
    divergence, same, right, most = [], [], [], 0.0
    model(ids[:, :start], past_key_values=cache, logits_to_keep=1)
    for t in range(start, ids.shape[1] - a.interval + 1, a.interval):  # whole passes
        part = ids[:, t : t + a.interval]
        at, how = torch.arange(t, t + part.shape[1]), {}
        if not isinstance(cache, kvbudget.Cache):
            how["attention_mask"] = seen_by(cache, *part.shape)
        most = max(most, rows_of(cache) + part.shape[1])
        logits = model(part, past_key_values=cache, cache_position=at, position_ids=at[None], **how).logits
        for full, own in zip(whole[:, t - start :].transpose(0, 1), logits.transpose(0, 1)):
            full, own = full.float().log_softmax(-1), own.float().log_softmax(-1)
            divergence.append((full.exp() * (full - own)).sum(-1).mean().item())
            same.append((full.argmax(-1) == own.argmax(-1)).float().mean().item())
            right.append(own.argmax(-1))
    half = len(divergence) // 2
    mean = [sum(x) / len(x) for x in (divergence, divergence[half:], same)]
    right = torch.stack(right, 1)[:, : ids.shape[1] - start - 1]
    follows = ids[:, start + 1 :][:, : right.shape[1]]
    return *mean, most, *completed(right == follows, ends[:, : right.shape[1]])


def caps():
    model, tokenizer = hf_model.load(a.files[0], dtype=getattr(torch, a.dtype))
    given = json.load(open(a.files[1]))
    ids, start = torch.tensor(given["ids"][: a.count]), given["prompt"]
    ends = torch.tensor([["\n" in tokenizer.decode(x) for x in row] for row in ids[:, start + 1 :].tolist()])
    with torch.no_grad():  # [B, new, V] of the whole cache, text by text
        whole = torch.stack([model(row[None], logits_to_keep=ids.shape[1] - start).logits[0] for row in ids])
    learned = {"TriAttention": TriAttention(model, json.load(open(a.learn))["ids"][:3])} if a.learn else {}
    csv = open(a.csv, "a") if a.csv else None
    with tempfile.TemporaryDirectory() as folder:
        tables = opened(folder)
        for share in [1.0] + a.caps:
            cap = int(share * ids.shape[1])
            ways = presses(cap, learned) | tables if share < 1 else {"whole cache": lambda model: nullcontext()}
            for name, way in ways.items():
                if share < 1 and a.only and not any(word in name for word in a.only):
                    continue
                begun = time.time()
                if isinstance(way, kvbudget.Table):
                    cache = kvbudget.Cache(way, target_size=cap - a.interval, interval=a.interval, config=model.config)
                    found = follow(model, ids, start, whole, cache, ends)
                else:
                    model.set_attn_implementation("sdpa")
                    with way(model):
                        found = follow(model, ids, start, whole, DynamicCache(), ends)
                line = f"{share:g},{cap},{name}," + ",".join(f"{x:.4f}" for x in found)
                print(line.replace(",", "  "), f"{time.time() - begun:.0f} s", flush=True)
                if csv:
                    print(line, file=csv, flush=True)


def number(text):
    """Returns the last number of an answer, or None."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None


@torch.no_grad()
def solve(model, tokenizer, questions, make):
    """Returns answers to the questions, and their lengths with the prompt, over the caches that `make` makes."""
    texts, prompts, lengths = [], [], []
    for i in range(0, len(questions), a.batch):
        asked = [tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False,
                                               add_generation_prompt=True) for q in questions[i : i + a.batch]]
        given = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False)
        out = model.generate(**given, past_key_values=make(), max_new_tokens=new, do_sample=False, num_beams=1,
                             repetition_penalty=1.0, pad_token_id=tokenizer.pad_token_id)
        answers = out[:, given.input_ids.shape[1] :]
        texts += tokenizer.batch_decode(answers, skip_special_tokens=True)
        ended = torch.tensor(tokenizer.convert_tokens_to_ids([tokenizer.eos_token, "<|im_end|>"]))
        stop = torch.isin(answers, ended)
        lengths += torch.where(stop.any(1), stop.int().argmax(1), new).tolist()
        prompts += given.attention_mask.sum(1).tolist()
    return texts, prompts, lengths


def problems():
    model, tokenizer = hf_model.load(a.files[0], dtype=getattr(torch, a.dtype))
    tokenizer.padding_side = "left"
    given = [json.loads(line) for line in open(a.files[1], encoding="utf-8")][: a.count or 100]
    given.sort(key=lambda x: len(x["question"]))  # little padding
    wanted = [number(x["answer"]) for x in given]
    csv = open(a.csv, "a") if a.csv else None

    def one(share, cap, name, make):
        begun = time.time()
        texts, prompts, lengths = solve(model, tokenizer, [x["question"] for x in given], make)
        right = sum(number(text) == value for text, value in zip(texts, wanted)) / len(wanted)
        mean = sum(lengths) / len(lengths)
        line = f"{share:g},{cap},{name},{right:.3f},{mean:.0f},{sum(n == new for n in lengths)}"
        print(line.replace(",", "  "), f"{time.time() - begun:.0f} s", flush=True)
        if csv:
            print(line, file=csv, flush=True)
        return sum(prompts) / len(prompts) + mean

    size = one(1, 0, "whole cache", DynamicCache)
    with tempfile.TemporaryDirectory() as folder:
        for share in a.caps:
            cap = int(share * size)
            for name, table in opened(folder).items():
                if not a.only or name in a.only:
                    one(share, cap, name, lambda: kvbudget.Cache(table, target_size=cap - a.interval,
                                                                 interval=a.interval, config=model.config))


TOLD = {"the room of the meeting": 3, "the code of the front door": 5, "the number of my locker": 4,
        "the price of the tickets in dollars": 3, "the phone extension of the office": 4}
TURNS = ("How does a hash table work?", "Write a short poem about the sea.", "What do bees do in winter?",
         "Explain what a mortgage is.", "How do I make bread without yeast?", "What is a binary search?",
         "Tell me something about the city of Lisbon.", "Why is the sky blue?")


@torch.no_grad()
def say(model, ids, cache, n, step):
    """Reads ids in passes of at most `step` tokens and returns the n greedy tokens that follow."""
    out = []
    while True:
        for part in ids.split(step, 1):
            at = torch.arange(part.shape[1]) + cache.get_seq_length()
            how = dict(past_key_values=cache, cache_position=at, position_ids=at[None], logits_to_keep=1)
            logits = model(part, **how).logits
        if len(out) == n:
            return torch.cat(out, 1) if n else None
        ids = logits[:, -1:].argmax(-1)
        out.append(ids)


def turn_of(tokenizer, words, first=False):
    """Returns the tokens [1, n] of a user's turn, up to where the answer begins."""
    before = [] if first else [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\0"}]
    text = tokenizer.apply_chat_template(before + [{"role": "user", "content": words}], tokenize=False,
                                         add_generation_prompt=True)
    return tokenizer(text if first else text.split("\0")[1], add_special_tokens=False, return_tensors="pt").input_ids


def chat():
    model, tokenizer = hf_model.load(a.files[0], dtype=getattr(torch, a.dtype))
    draw, count, answer = torch.Generator().manual_seed(a.seed), a.count or 8, 96
    told = [{what: str(int(torch.randint(10 ** (n - 1), 10**n, (1,), generator=draw))) for what, n in TOLD.items()}
            for _ in range(count)]
    first = [turn_of(tokenizer, "Remember this: " + "; ".join(f"{k} is {v}" for k, v in x.items()) + ".", True)
             for x in told]
    turns = [torch.cat(first), *(turn_of(tokenizer, words).expand(count, -1) for words in TURNS)]
    whole, said = DynamicCache(config=model.config), []
    for turn in turns:  # answers with the whole cache
        said += [turn, say(model, turn, whole, answer, 4096)]
    said = torch.cat(said, 1)

    def one(share, name, make):
        begun, right, cache = time.time(), 0, make()
        say(model, said, cache, 0, a.interval)
        for what in TOLD:
            asked = turn_of(tokenizer, f"What was {what}? Answer with the number alone.").expand(count, -1)
            found = tokenizer.batch_decode(say(model, asked, copy.deepcopy(cache), 12, 4096))
            right += sum(x[what] in text for x, text in zip(told, found))
        size = sum(x.keys.nbytes + x.values.nbytes for x in whole.layers)
        part = 1.0 if share == 1 else kvbudget.cache_bytes(cache) / size
        line = (f"{share:g},{name},{right / count / len(TOLD):.3f},{rows_of(cache) / said.shape[1]:.3f},{part:.3f},"
                f"{said.shape[1]}")
        print(line.replace(",", "  "), f"{time.time() - begun:.0f} s", flush=True)
        if a.csv:
            print(line, file=open(a.csv, "a"))

    one(1, "whole cache", lambda: DynamicCache(config=model.config))
    with tempfile.TemporaryDirectory() as folder:
        for share in a.caps:
            for name, table in opened(folder).items():
                one(share, name, lambda: kvbudget.Cache(table, 1 - share, interval=a.interval, config=model.config))


{"answers": answers, "texts": texts, "calibration": calibration, "caps": caps, "problems": problems,
 "chat": chat}[a.act]()
