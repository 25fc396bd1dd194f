"""Measures the effect of --compute's precision on a record and on the tables that are made from it.

usage: compute_effect.py KVBUDGET MODEL CALIB.jsonl [--compute bf16x3 bf16] [--metric M] [--max-tokens N] [--questions
       N]
Profiles in f32, then follows the same answers in f32 and in each precision, so that only arithmetic differs.
Prints, per precision: the largest and the mean difference of scores and oracle, relative to each head's largest value;
then, for tables made from the first half of the questions, the largest change of a head's budget in tokens, and the
loss of both tables on the second half (importance in f32 of the tokens that the metric's f32 ranking evicts, as a share
of all; protected tokens are kept). Needs numpy and h5py.
"""
import argparse
import json
import os
import subprocess
import tempfile

import h5py
import numpy as np

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("kvbudget")
p.add_argument("model")
p.add_argument("calib")
p.add_argument("--compute", nargs="+", default=["bf16x3", "bf16"])
p.add_argument("--metric", nargs="+", default=["snapkv:kvpress", "keydiff", "ea:kvpress"])
p.add_argument("--max-tokens", type=int, default=0)
p.add_argument("--questions", type=int, default=30)
p.add_argument("--new-tokens", type=int, default=64)
p.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.8, 0.9])
a = p.parse_args()


def kvbudget(*arguments):
    done = subprocess.run([a.kvbudget, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def profile(calib, record, compute, *more):
    kvbudget("profile", a.model, calib, "-o", record, "--ignore-eos", "--compute", compute, "-q", str(a.questions),
             *(["--max-tokens", str(a.max_tokens)] if a.max_tokens else []), *more)


def difference(ours, theirs):
    """Returns, for each head, the largest difference relative to the largest value."""
    return (np.abs(ours - theirs).max(-1) / np.maximum(np.abs(theirs).max(-1), 1e-30)).ravel()


def held_out_loss(context, metric, keep, sink, window, questions):
    scores, lost, total = context["scores"][metric][:], 0.0, 0.0
    protected = np.zeros(scores.shape[-1], bool)
    protected[:sink] = protected[len(protected) - window :] = True
    order = np.argsort(-np.where(protected, np.inf, scores), axis=-1, kind="stable")
    for q in questions:
        oracle = np.take_along_axis(context["questions"][q]["oracle"][:].astype(np.float64), order, -1)
        rank = np.arange(oracle.shape[-1])
        lost += (oracle * (rank >= np.maximum(keep, sink + window)[..., None])).sum()
        total += oracle[..., sink + window :].sum()
    return lost / total


with tempfile.TemporaryDirectory() as work:
    at = lambda name: os.path.join(work, name)
    profile(a.calib, at("drawn.h5"), "f32", "--ignore-answers", "-n", str(a.new_tokens))
    with h5py.File(at("drawn.h5")) as f, open(at("given.jsonl"), "w") as out:
        for cid, c in f["contexts"].items():
            questions = [c["questions"][q] for q in sorted(c["questions"], key=int)]
            row = {
                "sample_id": cid, "context_ids": c["token_ids"][:].tolist(),
                "question_ids": [q["suffix_ids"][:].tolist() for q in questions],
                "answer_ids": [q["answer_ids"][:].tolist() for q in questions], "answer_prefix": ""
            }
            out.write(json.dumps(row) + "\n")
    for compute in ["f32", *a.compute]:
        profile(at("given.jsonl"), at(f"{compute}.h5"), compute)
    for metric in a.metric:
        for compute in ["f32", *a.compute]:
            kvbudget("solve", at(f"{compute}.h5"), "--metric", metric, "-q", str(max(a.questions // 2, 1)), "-o",
                     at(f"{compute}-{metric}.safetensors"), "--quiet")
    f32 = h5py.File(at("f32.h5"))
    for compute in a.compute:
        other = h5py.File(at(f"{compute}.h5"))
        print(f"--compute {compute} against f32, same answers:")
        for cid, c in f32["contexts"].items():
            for name in c["scores"]:
                d = difference(other["contexts"][cid]["scores"][name][:], c["scores"][name][:])
                print(f"  {cid} {name:20s} largest {d.max():.1e}, mean over heads {d.mean():.1e}")
            d = np.concatenate([
                difference(other["contexts"][cid]["questions"][q]["oracle"][:], c["questions"][q]["oracle"][:])
                for q in c["questions"]
            ])
            print(f"  {cid} {'oracle':20s} largest {d.max():.1e}, mean over heads and questions {d.mean():.1e}")
        for metric in a.metric:
            for cid, c in f32["contexts"].items():
                T, later = c["token_ids"].shape[0], sorted(c["questions"], key=int)[max(a.questions // 2, 1) :]
                for ratio in a.ratios:
                    both = [
                        json.loads(
                            kvbudget("budgets", at(f"{k}-{metric}.safetensors"), "--ratio", str(ratio), "--tokens",
                                     str(T), "--json")) for k in ("f32", compute)
                    ]
                    keep = [np.array(b["details"][0]["keep"]) for b in both]
                    loss = [
                        held_out_loss(c, metric, k, both[0]["settings"]["sink"], both[0]["settings"]["window"], later)
                        if later else float("nan") for k in keep
                    ]
                    moved = np.abs(keep[0] - keep[1])
                    print(
                        f"  {metric:16s} {cid} {100 * ratio:.0f} % pruned: budgets differ by at most {moved.max()} of "
                        f"{T} tokens (mean {moved.mean():.1f}); "
                        f"loss on {len(later)} other questions {100 * loss[0]:.3f} % with f32's table, "
                        f"{100 * loss[1]:.3f} % with {compute}'s"
                    )
