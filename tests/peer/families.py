"""Compares every family of models with transformers: small random models, as safetensors and as GGUF.

usage: families.py KVBUDGET [--only NAME,...] [--draw SEED] [--tokens 600] [--compute f32] [--keep FOLDER]
       families.py --fixtures FOLDER
On token ids, for a folder and, if the format can hold the model, for a GGUF file: logits of all positions (within 1e-3
and 1e-4 of their range), oracle importance and the scores of every metric (within 1e-4 of each head's maximum), and the
KL that `eval` finds after evicting, compared with masked attention in PyTorch (within 1e-3). Contexts are longer than
windows and than the original length of scaled rotary positions. Scores are compared with kvpress and the formulas of
scorer_peers.py, on the queries, keys and values that the model itself uses. Ends with PASS or FAIL.
--draw: other sizes than in family_models.py, of heads, groups, widths, windows and experts, drawn with SEED.
--fixtures: writes the tiny models of tests/unit/test_profiler_families.c, with transformers' results for them.
Needs torch, transformers 5.2, kvpress 0.5.5, numpy, h5py, gguf.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import family_models
import family_peers
import gguf_models
import h5py
import numpy as np
import scorer_peers
import torch
import transformers

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

SUFFIX, ANSWER, NEXT = 7, 9, 24  # tokens of a question and its answer; tokens after a cut cache
LAG = 64  # partitions of LagKV: several in a short context
CUTS = ("-m", "keydiff", "-m", "snapkv:kvpress:window=16", "-a", "uniform", "-a", "ada", "-r", "0.5,0.9")
# GGUF cannot say which layers have no experts, which have no rotation unless it is every fourth, nor that there are
# windows in the llama architecture, which Mistral's files use.
NOT_IN_GGUF = {"qwen3-moe", "smollm3", "mistral-window"}
FIXTURES = (
    "llama", "mistral", "qwen2-window", "qwen3", "phi3", "granite", "smollm3", "olmo2", "olmo3", "gemma2", "gemma3",
    "gpt-oss", "qwen3-moe", "mixtral", "olmoe", "glm4", "exaone4", "cohere", "cohere2",
    "ministral3", "cohere-norm", "olmoe-clip", "gpt-oss-mxfp4", "seed-oss",
)  # fmt: skip


def run(*words):
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))[:300]}: {done.stderr.strip()}")


def relative(ours, theirs):
    """Returns the largest difference of [B, G, T], relative to each head's largest number."""
    return ((ours - theirs).abs() / theirs.abs().amax(-1, keepdim=True)).max().item()


class Comparison:
    """One model, compared in each of its file formats."""

    def __init__(self, a, folder, m):
        self.a, self.folder = a, folder
        T, vocabulary = a.tokens, m.config.vocab_size
        rows = T + max(SUFFIX + ANSWER, NEXT)
        self.ids = torch.randint(1, vocabulary, (rows,), generator=torch.Generator().manual_seed(2))
        self.judge = family_peers.Judge(m, self.ids[:T])
        self.oracle = self.judge.oracle(self.ids[T : T + SUFFIX + ANSWER], SUFFIX) if self.judge.layers else None
        self.cases = [(*case, self._want(case)) for case in scorer_peers.scores(LAG)] if self.judge.layers else []
        np.save(folder / "ids.npy", self.ids[:T].numpy().astype(np.int32))
        np.save(folder / "text.npy", self.ids[: T + NEXT].numpy().astype(np.int32))
        line = {
            "sample_id": "one",
            "context_ids": self.ids[:T].tolist(),
            "question_ids": [self.ids[T : T + SUFFIX].tolist()],
            "answer_ids": [self.ids[T + SUFFIX : T + SUFFIX + ANSWER].tolist()],
        }
        (folder / "calib.jsonl").write_text(json.dumps(line) + "\n")

    def _want(self, case):
        return self.judge.scores(case[5] or case[2])

    def of(self, model):
        """Returns {what: (difference, allowed, more words)} for the file or folder `model`."""
        a, theirs = self.a, self.judge.logits.numpy()
        out = self.folder / "logits.npy"
        run(pathlib.Path(a.kvbudget).parent / "tests/logits", model, self.folder / "ids.npy", out, "cpu", a.compute)
        span = float(theirs.max() - theirs.min())
        off = float(np.abs(np.load(out) - theirs).max())
        found = {"logits": (off, min(1e-3, 1e-4 * span), f" of {span:.1f}")}
        return found | self._record(model) | self._eviction(model) if self.judge.layers else found

    def _record(self, model):
        record = self.folder / "run.h5"
        chosen = [word for case in self.cases for word in ("-m", case[0])]
        words = ("profile", model, self.folder / "calib.jsonl", "-o", record, "--force", "--quiet", *chosen)
        run(self.a.kvbudget, *words, "--compute", self.a.compute)
        worst = (0.0, "")
        with h5py.File(record) as f:
            oracle = torch.from_numpy(f["contexts/one/questions/0/oracle"][:]).double()
            scores = f["contexts/one/scores"]
            for metric, _, _, sinks, tail, raw, want in self.cases:
                got = torch.from_numpy(scores[metric][:])
                ranked = slice(sinks, self.a.tokens - tail)  # the others have a filler
                if raw:
                    off = max(scorer_peers.inversion(x, y, sinks) for x, y in zip(got, want))
                else:
                    off = relative(got[..., ranked], want[..., ranked])
                worst = max(worst, (off, metric))
        return {"oracle": (relative(oracle, self.oracle), 1e-4, ""), "scores": (worst[0], 1e-4, f" ({worst[1]})")}

    def _eviction(self, model):
        kept, T = self.folder / "kept.jsonl", self.a.tokens
        words = ("-t", T, "-n", NEXT, "--dump-kept", kept, "-o", self.folder / "worth", "-q")
        for old in self.folder.glob("worth*"):
            old.unlink()
        run(self.a.kvbudget, "eval", model, self.folder / "text.npy", *CUTS, *words, "--compute", self.a.compute)
        worst, largest = 0.0, 0.0
        for line in kept.read_text().splitlines():
            one = json.loads(line)
            kl = self.judge.damage(self.ids[T : T + NEXT], one["kept"])
            worst, largest = max(worst, abs(one["kl"] - kl)), max(largest, kl)
        return {"KL": (worst, 1e-3, f" of {largest:.2f}")}


def compare(a, name, folder):
    shape = family_models.draw_shape(name, random.Random(f"{name} {a.draw}")) if a.draw is not None else {}
    if shape:
        print(f"{name:16s} {shape}", flush=True)
    m = family_models.make(name, shape)
    family_models.save(m, folder)
    one, good = Comparison(a, folder, m), True
    models = {"folder": folder}
    if name not in NOT_IN_GGUF and gguf_models.write(m, folder / "model.gguf"):
        models["GGUF"] = folder / "model.gguf"
    for container, model in models.items():
        found = one.of(model)
        fine = all(off <= allowed for off, allowed, _ in found.values())
        words = ", ".join(f"{what} {off:.1e}{more}" for what, (off, _, more) in found.items())
        nothing = "" if one.judge.layers else ", every layer has a window"
        print(f"{name:16s} {container:6s} {words}{nothing}: {'same' if fine else 'DIFFERENT'}", flush=True)
        good &= fine
    return good


def write_fixture(name, folder):
    """Writes a model in bfloat16, the last 8 rows of logits of 100 tokens, and the oracle of an answer, in float32."""
    m, T = family_models.make_tiny(name), 100
    family_models.save(m, folder, torch.bfloat16)
    ids = torch.tensor([(i * 37 + i * i % 11) % 60 + 1 for i in range(T + 9)])
    judge = family_peers.Judge(m, ids[:T])
    np.save(folder / "logits.npy", judge.logits[-8:].numpy())
    np.save(folder / "oracle.npy", judge.oracle(ids[T:], 3).float().numpy())


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kvbudget", nargs="?")
    p.add_argument("--only", default="", help="names, commas between")
    p.add_argument("--draw", type=int, metavar="SEED", help="draw the sizes")
    p.add_argument("--tokens", type=int, default=600)
    p.add_argument("--compute", default="f32")
    p.add_argument("--keep", type=pathlib.Path, help="leave the models here")
    p.add_argument("--fixtures", type=pathlib.Path, help="write the tiny models here, and no more")
    a = p.parse_args()
    if not a.fixtures and not a.kvbudget:
        p.error("expected KVBUDGET, the program")
    names = [n for n in a.only.split(",") if n] or list(FIXTURES if a.fixtures else family_models.MODELS)
    good = True
    with torch.no_grad(), tempfile.TemporaryDirectory() as scratch:
        for name in names:
            folder = (a.fixtures or a.keep or pathlib.Path(scratch)) / name
            folder.mkdir(parents=True, exist_ok=True)
            if a.fixtures:
                write_fixture(name, folder)
            else:
                good &= compare(a, name, folder)
    if not a.fixtures:
        print("PASS" if good else "FAIL")
    return not good


sys.exit(main())
