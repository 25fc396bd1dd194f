"""Compares seconds of `kvbudget profile` with the published protocol in PyTorch, in pairs on the same tokens.

usage: time_protocol.py KVBUDGET MODEL CALIB.jsonl [--pairs N] [--compute f32 bf16x3 bf16] [--new-tokens N] [--questions
       N] [--recorder]
MODEL is the GGUF. The protocol (LU-KV's released code): the context once with attention maps for the scores, then, for
every question, context and question again and NEW_TOKENS sampled tokens, one question at a time, eager attention,
float32. PyTorch runs ONE question of each pair and its seconds are multiplied by the number of questions, which favours
it, as does leaving out the writing of records. kvbudget's seconds are those of the whole command, loading included.
Also: the prefill of the context by PyTorch's SDPA in float32, without scores, compared with kvbudget's prefill; and a
profile that follows given answers. --recorder: also the Python package's recorder, which samples answers to the same
questions, with two metrics (kvbudget in PYTHONPATH, KVBUDGET_LIBRARY). Prints all pairs, then the medians. Needs torch,
transformers >= 4.56, < 5.3, gguf, numpy, h5py.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
import time

import h5py
import numpy as np
import torch
from torch.nn import functional as F

import hf_model

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("kvbudget", type=os.path.abspath)
p.add_argument("model")
p.add_argument("calib")
p.add_argument("--pairs", type=int, default=3)
p.add_argument("--compute", nargs="+", default=["f32", "bf16x3", "bf16"])
p.add_argument("--new-tokens", type=int, default=64)
p.add_argument("--questions", type=int, default=30)
p.add_argument("--max-tokens", type=int, default=0)
p.add_argument("--temperature", type=float, default=0.7)
p.add_argument("--recorder", action="store_true")
a = p.parse_args()
os.environ["KVBUDGET_PROGRAM"] = a.kvbudget

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

S = {}


def attend(mod, q, k, v, mask, dropout=0.0, scaling=None, **_):
    """Eager attention that stores what the protocol uses: SnapKV and KeyDiff of the context, the maximum over decoded
    rows."""
    l, T, n = mod.layer_idx, S["T"], q.shape[1] // k.shape[1]
    w = q @ k.repeat_interleave(n, 1).transpose(2, 3) * scaling
    if mask is not None:
        w = w + mask[..., : k.shape[2]]
    w = w.softmax(-1)
    if S["phase"] == "context":
        projection = mod.o_proj.weight.T.view(q.shape[1], q.shape[3], -1)
        norm = torch.stack([(v[0, h // n] @ projection[h]).norm(dim=-1) for h in range(q.shape[1])])
        S["norm"][l] = norm / (norm.sum() + 1e-9)
        s = F.max_pool1d(w[0, :, -32:, :-32].mean(1)[None], 7, 1, 3)[0].view(k.shape[1], n, -1).mean(1)
        unit = F.normalize(k[0], dim=-1)
        S["scores"][l] = (s, -torch.cosine_similarity(unit, unit.mean(1, keepdim=True), dim=-1))
    elif q.shape[2] == 1:
        x = (w[0, :, 0, :T] * S["norm"][l]).view(k.shape[1], n, T).amax(1)
        S["best"][l] = torch.maximum(S["best"][l], x)
    return (w @ v.repeat_interleave(n, 1)).transpose(1, 2).contiguous(), w


def run_kvbudget(compute, calib, record, *more):
    start = time.perf_counter()
    done = subprocess.run(
        [
            a.kvbudget, "profile", a.model, calib, "-o", record, "--force", "--ignore-eos", "--compute", compute, "-n",
            str(a.new_tokens), "-q",
            str(a.questions)
        ] + (["--max-tokens", str(a.max_tokens)] if a.max_tokens else []) + list(more),
        capture_output=True,
        text=True,
    )
    took = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr)
    parts = dict((n, float(s)) for n, s in re.findall(r"(prefill|scorers|decoding|writing) ([0-9.]+)", done.stderr))
    return took, parts


def run_torch(m, ids, suffix):
    """Returns (seconds of the context, seconds of one question)."""
    S.update(T=ids.shape[1], phase="context", norm={}, scores={})
    start = time.perf_counter()
    m(ids, logits_to_keep=1)
    context = time.perf_counter() - start
    S.update(phase="decode", best=torch.zeros(m.config.num_hidden_layers, m.config.num_key_value_heads, ids.shape[1]))
    start = time.perf_counter()
    out = m(torch.cat([ids, suffix], 1), use_cache=True, logits_to_keep=1)
    for _ in range(a.new_tokens - 1):
        token = torch.multinomial((out.logits[0, -1] / a.temperature).softmax(-1), 1)[None]
        out = m(token, past_key_values=out.past_key_values, use_cache=True)
    return context, time.perf_counter() - start


def time_sdpa(m, ids):
    m.set_attn_implementation("sdpa")
    start = time.perf_counter()
    m(ids, logits_to_keep=1, use_cache=True)
    took = time.perf_counter() - start
    m.set_attn_implementation("observed")
    return took


def time_recorder(m, given, record):
    """Returns seconds of kvbudget.record with SDPA: a prefill, scores, all questions one by one, and writing."""
    import kvbudget

    m.set_attn_implementation("sdpa")
    start = time.perf_counter()
    kvbudget.record(m, None, given, ["keydiff", "snapkv:lukv"], output=record, force=True, ignore_answers=True,
                    ignore_eos=True, new_tokens=a.new_tokens, temperature=a.temperature)
    took = time.perf_counter() - start
    m.set_attn_implementation("observed")
    return took


def answers_of(record, path):
    """Writes the record's tokens as calibration data with given answers."""
    with h5py.File(record) as f, open(path, "w") as out:
        for cid, c in f["contexts"].items():
            questions = [c["questions"][q] for q in sorted(c["questions"], key=int)]
            row = {
                "sample_id": cid, "context_ids": c["token_ids"][:].tolist(),
                "question_ids": [q["suffix_ids"][:].tolist() for q in questions],
                "answer_ids": [q["answer_ids"][:].tolist() for q in questions], "answer_prefix": ""
            }
            out.write(json.dumps(row) + "\n")


AttentionInterface.register("observed", attend)
AttentionMaskInterface.register("observed", eager_mask)
m, _ = hf_model.load(a.model, "observed", tokenizer=False)
recorder = []
seen = {c: {"ratio": [], "prefill": [], "given": []} for c in a.compute}
with tempfile.TemporaryDirectory() as work, torch.no_grad():
    record, given = os.path.join(work, "run.h5"), os.path.join(work, "given.jsonl")
    run_kvbudget(a.compute[0], a.calib, record, "--ignore-answers")  # warms the file cache and gives the tokens
    answers_of(record, given)
    with h5py.File(record) as f:
        (cid, c), *more = f["contexts"].items()
        if more:
            raise SystemExit("one context is timed: give a calibration file with one line")
        ids = torch.from_numpy(c["token_ids"][:].astype(np.int64))[None]
        suffix = torch.from_numpy(c["questions"]["0"]["suffix_ids"][:].astype(np.int64))[None]
        questions = len(c["questions"])
    S.update(T=256, phase="context", norm={}, scores={})
    m(ids[:, :256], logits_to_keep=1)  # the first pass of a process is slower
    print(
        f"{ids.shape[1]} tokens, {questions} questions, {a.new_tokens} new tokens; {torch.get_num_threads()} threads "
        f"in PyTorch {torch.__version__}",
        flush=True)
    for pair in range(a.pairs):
        sdpa = time_sdpa(m, ids)
        context, question = run_torch(m, ids, suffix)
        theirs = context + questions * question
        print(
            f"pair {pair + 1}: protocol {context:.1f} + {questions} x {question:.1f} = {theirs:.0f} s; SDPA prefill "
            f"{sdpa:.2f} s",
            flush=True)
        if a.recorder:
            recorder.append(theirs / time_recorder(m, given, os.path.join(work, "python.h5")))
            print(f"  recorder {theirs / recorder[-1]:.1f} s: {recorder[-1]:.1f} times the protocol", flush=True)
        for compute in a.compute:
            took, parts = run_kvbudget(compute, a.calib, record, "--ignore-answers")
            follow, follow_parts = run_kvbudget(compute, given, record)
            seen[compute]["ratio"].append(theirs / took)
            seen[compute]["prefill"].append(sdpa / parts["prefill"])
            seen[compute]["given"].append(theirs / follow)
            print(
                f"  {compute:7s} {took:.2f} s: prefill {parts['prefill']:.2f}, scorers {parts['scorers']:.2f}, "
                f"decoding {parts['decoding']:.2f}, writing {parts['writing']:.2f}; "
                f"given answers {follow:.2f} s, decoding {follow_parts['decoding']:.2f}; {theirs / took:.0f} times the "
                f"protocol, prefill {sdpa / parts['prefill']:.2f} times SDPA",
                flush=True)
for compute in a.compute:
    s = {n: statistics.median(v) for n, v in seen[compute].items()}
    print(
        f"median of {a.pairs}: {compute:7s} {s['ratio']:.0f} times the protocol, {s['given']:.0f} times with given "
        f"answers, prefill {s['prefill']:.2f} times SDPA in float32"
    )
if recorder:
    print(f"median of {a.pairs}: recorder {statistics.median(recorder):.1f} times the protocol")
