"""Compares the board's harness with `kvbudget eval`, kvpress's own prefill and pipeline, and the really cut cache."""
import copy
import json
import subprocess

import kvbudget
import torch
from board_context import PROGRAM, ROOT, Context, divergence
from board_presses import ROWS
from kvpress import AdaKVPress, KVPressTextGenerationPipeline, KVzipPress, SnapKVPress
from transformers.cache_utils import DynamicCache

OF = {row.name: row for row in ROWS}


def same_as_eval(subject, text):
    """Prints the ready table's KL by the harness and by the program, at ratios that are rows. Returns the context, the
    64 tokens after it, and the largest relative difference without refitting."""
    path, worst = ROOT / f"calib-data/eval/{text}.txt", 0.0
    ids = subject.ids(path)
    context, following = Context(subject, ids[:, :2048]), ids[:, 2048:2112]
    full = context.logits([context.whole()], following)[0]
    for name, more in (("kvbudget", ()), ("kvbudget, refitted", ("--refit",))):
        table = subject.tables[False, bool(more)]
        at, ratios = OF[name].of(context), (0.5, 0.75, 0.8, 0.88, 0.94) if not more else (0.8,)
        ours = [divergence(full, x).mean().item() for x in context.logits([at(r) for r in ratios], following)]
        out = subprocess.run([PROGRAM, "eval", subject.path, table.path, path, "-r", ",".join(map(str, ratios)),
                              "-a", "none", "--json", "--quiet", *more], check=True, text=True, stdout=subprocess.PIPE)
        rows = {r["ratio"]: r["kl"] for r in json.loads(out.stdout)["rows"] if r["allocator"]}
        for ratio, kl in zip(ratios, ours):
            off = abs(kl / rows[ratio] - 1)
            print(f"{name} at {ratio}: harness {kl:.6f}, eval {rows[ratio]:.6f}, off by {off:.1e}", flush=True)
            worst = max(worst, off if not more else 0.0)  # the package refits further (docs/refit.md)
    return context, following, worst


def same_when_cut(context, following):
    """Returns the largest difference of logits between the mask and the really cut cache, at 80 %."""
    run = kvbudget.compress(context.model, context.subject.table, 0.8, when="call")
    cache, n = copy.deepcopy(context.cache), following.shape[1]
    with run:
        run.cut(cache)
        out = context.model(following, past_key_values=cache, position_ids=context.tokens + torch.arange(n)[None],
                            cache_position=torch.arange(context.tokens, context.tokens + n))
    mask = context.logits([OF["kvbudget"].of(context)(0.8)], following)[0]
    off = (out.logits[0] - mask).abs().max().item()
    print(f"mask and cut cache: logits differ by at most {off:.1e}", flush=True)
    return off


def same_as_kvpress(context):
    """Returns in how many positions kvpress's own prefill differs, for three presses at 80 %."""
    differ = 0
    for name, press in (("SnapKV", SnapKVPress(0.8)), ("AdaKV(SnapKV)", AdaKVPress(SnapKVPress(0.8))),
                        ("KVzip", KVzipPress(0.8))):
        cut, cache = OF[name].of(context)(0.8), DynamicCache()
        with press(context.model):
            context.model.model(input_ids=context.ids, past_key_values=cache)
        gone = 0
        for i, layer in enumerate(context.layers):
            masked, keys = layer.module.masked_key_indices, cache.layers[layer.index].keys
            layer.module.masked_key_indices = None
            hidden = torch.zeros_like(cut.hidden[i])
            if masked is not None:
                hidden[masked[1], masked[2]] = True
            else:
                near = torch.cdist(keys[0], layer.keys[0]).argmin(-1)
                hidden = torch.ones_like(hidden).scatter_(1, near, False)
            gone += int((hidden & ~cut.hidden[i]).sum())
        print(f"{name}: {gone} of {sum(int(h.sum()) for h in cut.hidden)} evicted positions differ from kvpress's own",
              flush=True)
        differ += gone
    return differ


def same_answers(subject, sample):
    """Compares answers of kvpress's own pipeline and of the harness to a needle question; returns how many differ."""
    encode = lambda text: subject.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    context, question = Context(subject, encode(sample["context"])), sample["questions"][0]
    pipe, differ = KVPressTextGenerationPipeline(model=subject.model, tokenizer=subject.tokenizer), 0
    for name, press in (("SnapKV", SnapKVPress(0.5)), ("AdaKV(SnapKV)", AdaKVPress(SnapKVPress(0.5)))):
        asked = encode(question + sample["answer_prefix"])
        mine = context.answers([OF[name].of(context)(0.5)], asked, 16, lambda _: False)
        theirs = pipe(sample["context"], question=question, answer_prefix=sample["answer_prefix"], press=press,
                      max_new_tokens=16)["answer"]
        print(f"{name}: {mine[0]!r}, pipeline {theirs!r}", flush=True)
        differ += mine[0] != theirs
    return differ


@torch.no_grad()
def check(subject, sample):
    """Runs all comparisons; sample: one of a task of RULER."""
    context, following, worst = same_as_eval(subject, "story-en")
    off = same_when_cut(context, following)
    differ = same_as_kvpress(context) + same_answers(subject, sample)
    good = worst <= 1e-2 and off <= 1e-3 and not differ
    print("PASS" if good else "FAIL")
    return 0 if good else 1
