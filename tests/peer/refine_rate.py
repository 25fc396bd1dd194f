"""Compares cuts per second, and KLs, of `kvbudget refine` with the same search in transformers.

usage: refine_rate.py MODEL.gguf HF TABLE.safetensors REFINED.safetensors --ids IDS.npy IDS.npy...
       [--tokens 1024...] [--next 64...] [--ratios 0.8...] [--compute f32...] [--evaluations 10]
       [--program build/kvbudget]

HF is the same model as a Hugging Face folder (or the .gguf). Both sides get the same token ids (build/tests/tokens
writes them), at least two texts, and the same number of threads, one side after the other, for every length of
context and continuation. The search in transformers, in float32, has two forms: "press" is kvpress as usual, with a
prefill for every cut; "kept" keeps keys, values and scores of a text, as refine does, selects with LUKVPress and hides,
one cut after the other. The time of a cut is the median over all cuts, without the prefills of the texts. It is printed
beside refine's time without prefills and with them; a short search has many. Exit status 1 if a KL differs from
`kvbudget eval`'s in f32 by more than 1e-2 of it and 1e-4. Needs the packages of kvpress_kl.py; tables must be for
metrics that kvpress has.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

sys.path.insert(0, os.getcwd())
import hf_model
from kvpress import LUKVPress
from kvpress.presses.base_press import BasePress
from kvpress.presses.scorer_press import ScorerPress
from masked import divergence
from presses import scorer
from transformers import DynamicCache


class KeepScores(BasePress):
    """Keeps a scorer's scores of every layer, by layer, and evicts nothing."""

    def __init__(self, press):
        self.press, self.scores = press, {}

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        self.scores[module.layer_idx] = self.press.score(module, hidden_states, keys, values, attentions, kwargs)
        return keys, values


class KeptScores(ScorerPress):
    """Returns scores that KeepScores has kept, set in `kept`."""

    def score(self, module, *_):
        return self.kept[module.layer_idx].clone()


class Text:
    """One text and a model: its cache, and the KL between the predictions of a cut cache and of the full one."""

    def __init__(self, model, path, n_tokens, n_next):
        ids = torch.from_numpy(np.load(path).astype("i8"))[None]
        self.model, self.context, self.next = model, ids[:, :n_tokens], ids[:, n_tokens : n_tokens + n_next]
        self.full = self.predict(self.prefill(None))

    @torch.no_grad()
    def prefill(self, press):
        cache = DynamicCache()
        if press is None:
            self.model(self.context, past_key_values=cache, logits_to_keep=1)
            return cache
        with press(self.model):
            self.model(self.context, past_key_values=cache, logits_to_keep=1)
        return cache

    @torch.no_grad()
    def predict(self, cache):
        at = torch.arange(self.context.shape[1], self.context.shape[1] + self.next.shape[1])
        out = self.model(self.next, past_key_values=cache, position_ids=at[None], cache_position=at)
        for layer in self.model.model.layers:
            layer.self_attn.masked_key_indices = None
        return out.logits[0].log_softmax(-1)

    def kl(self, cache):
        return divergence(self.full, self.predict(cache))

    def kl_of_kept(self, cache, press):
        """Returns the KL after cutting a copy of the cache; press has its scores."""
        copy = DynamicCache()
        for i, (layer, kept) in enumerate(zip(self.model.model.layers, cache.layers)):
            press.compress(layer.self_attn, None, kept.keys, kept.values, None, {})
            copy.update(kept.keys, kept.values, i)  # because hiding writes into the keys that attention sees
        return self.kl(copy)


def budget_press(by, table, ratio):
    curves, metadata = table
    press = LUKVPress(by, compression_ratio=ratio, sink=int(metadata["sink"]), window=int(metadata["window"]))
    press._budget_curves = curves
    return press


def exported(program, path, target):
    subprocess.run([program, "export", path, "--format", "npy", "-o", target], check=True, capture_output=True)
    with open(target.removesuffix(".npy") + ".json", encoding="utf-8") as f:
        return np.load(target), json.load(f)["metadata"]


def run_theirs(a, model, tables, n_tokens, n_next):
    """Returns KLs by (form, table, ratio), each a list over texts, and the seconds of every cut by form."""
    kl, seconds = {}, {"press": [], "kept": []}
    for path in a.ids:
        text = Text(model, path, n_tokens, n_next)
        keep = KeepScores(scorer(tables[0][1], 0.0))
        cache, by = text.prefill(keep), KeptScores()
        by.kept = keep.scores
        for t, table in enumerate(tables):
            for ratio in a.ratios:
                start = time.perf_counter()
                one = text.kl(text.prefill(budget_press(scorer(table[1], 0.0), table, ratio)))
                middle = time.perf_counter()
                two = text.kl_of_kept(cache, budget_press(by, table, ratio))
                seconds["press"].append(middle - start)
                seconds["kept"].append(time.perf_counter() - middle)
                kl.setdefault(("press", t, ratio), []).append(one)
                kl.setdefault(("kept", t, ratio), []).append(two)
    return kl, seconds


def settings(a, n_tokens, n_next, compute):
    return [
        "--tokens",
        str(n_tokens),
        "--next",
        str(n_next),
        "--bos",
        "no",
        "--compute",
        compute,
        "-r",
        ",".join(map(str, a.ratios)),
        "--json",
    ]


def run_eval(a, n_tokens, n_next):
    command = [
        a.program,
        "eval",
        a.model,
        "table=" + a.table,
        "refined=" + a.refined,
        *a.ids,
        "-a",
        "none",
    ]
    command += settings(a, n_tokens, n_next, "f32")
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["rows"]
    return {(int(r["allocator"] == "refined"), r["ratio"]): r["kl"] for r in rows if r["ratio"] > 0}


def run_refine(a, n_tokens, n_next, compute):
    """Returns the number of cuts, cuts per second, and cuts per second without the prefills."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            a.program,
            "refine",
            a.model,
            a.table,
            *a.ids[1:],
            "--select",
            a.ids[0],
            "--evaluations",
            str(a.evaluations),
            "-o",
            os.path.join(folder, "refined.safetensors"),
        ]
        command += settings(a, n_tokens, n_next, compute)
        told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    pattern = r"(\d+) cuts measured, ([0-9.]+) a second, ([0-9.]+) without"
    n, whole, cutting = re.search(pattern, told).groups()
    return int(n), float(whole), float(cutting)


def compare(kl, ours):
    """Prints the KLs side by side. Returns whether all are close."""
    good = True
    for (form, t, ratio), values in sorted(kl.items()):
        found, expected = np.mean(values), ours[t, ratio]
        near = abs(found - expected) <= max(1e-4, 1e-2 * expected)
        good &= near
        print(
            f"  {('table', 'refined')[t]:8} {ratio:.2f}  eval {expected:.5f}, {form} {found:.5f}, off by "
            f"{abs(found / expected - 1):.1e} of it{'' if near else '  DIFFERENT'}"
        )
    return good


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "hf", "table", "refined"):
        p.add_argument(name)
    p.add_argument("--ids", nargs="+", required=True)
    p.add_argument("--tokens", type=int, nargs="+", default=[1024])
    p.add_argument("--next", type=int, nargs="+", default=[64])
    p.add_argument("--ratios", type=float, nargs="+", default=[0.8])
    p.add_argument("--program", default="build/kvbudget")
    p.add_argument("--compute", nargs="+", default=["f32"], help="precisions of refine; all else is float32")
    p.add_argument("--evaluations", type=int, default=10)
    a = p.parse_args()
    model, _ = hf_model.load(a.hf, tokenizer=False)
    with tempfile.TemporaryDirectory() as folder:
        tables = [
            exported(a.program, path, os.path.join(folder, name))
            for path, name in ((a.table, "table.npy"), (a.refined, "refined.npy"))
        ]
    good = True
    for n_tokens, n_next in itertools.product(a.tokens, a.next):
        kl, seconds = run_theirs(a, model, tables, n_tokens, n_next)
        each = {form: np.median(of) for form, of in seconds.items()}
        print(f"{n_tokens} + {n_next} tokens: a cut takes {each['press']:.3f} s with press, {each['kept']:.3f} s kept")
        for compute in a.compute:
            n, whole, cutting = run_refine(a, n_tokens, n_next, compute)
            print(f"  refine {compute}: {n} cuts")
            for name, rate in (("without prefills", cutting), ("with prefills", whole)):
                times = ", ".join(f"{rate * took:.1f} times {form}" for form, took in each.items())
                print(f"    {name}: {rate:.2f} a second, {times}", flush=True)
        good &= compare(kl, run_eval(a, n_tokens, n_next))
    return 0 if good else 1


sys.exit(main())
