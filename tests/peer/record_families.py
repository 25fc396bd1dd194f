"""Compares the Python package's recorder with `kvbudget profile` on small random models of every family that both read.

usage: record_families.py KVBUDGET [--only NAME,...] [--tokens 150] [--tolerance 1e-4]
The models are those of families.py. Both record keydiff, knorm, snapkv and Expected Attention; oracle and scores are
compared relative to each head's maximum, and budgets of 99 ratios are made from either record: ranked by the same
scores they must be the same (record_budgets.py says why). A model whose layers all have a window must be refused by
both. Needs torch, transformers >= 5.2, numpy, h5py, and the package kvbudget in PYTHONPATH with KVBUDGET_LIBRARY.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import family_models
import h5py
import numpy as np
import torch
import transformers

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("kvbudget", type=os.path.abspath)
p.add_argument("--only", default="", help="names, commas between")
p.add_argument("--tokens", type=int, default=150)
p.add_argument("--tolerance", type=float, default=1e-4)
a = p.parse_args()
os.environ["KVBUDGET_PROGRAM"] = a.kvbudget
import kvbudget
import record_budgets

transformers.utils.logging.disable_progress_bar()
METRICS = ["keydiff", "knorm", "snapkv:kvpress:window=16", "ea:kvpress"]


def make(name, folder):
    """Makes the family's model, saved in the folder too, and a calibration line. Without a GPU transformers would load
    packed experts as bfloat16, so the recorder gets the model from memory."""
    model = family_models.make(name)
    family_models.save(model, folder)
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(1, model.config.vocab_size, (a.tokens + 16,), generator=draw).tolist()
    line = {"sample_id": "one", "context_ids": ids[: a.tokens]}
    line |= {"question_ids": [ids[a.tokens :][:7]], "answer_ids": [ids[a.tokens :][7:]]}
    (folder / "calib.jsonl").write_text(json.dumps(line) + "\n")
    return model


def relative(x, y):
    """Returns the largest difference of [L,G,T], relative to each head's largest number."""
    return float((np.abs(x - y) / np.abs(x).max(-1, keepdims=True)).max())


def agree(off):
    return max(off.values()) <= a.tolerance


def say(off):
    return ", ".join(f"{name} {value:.1e}" for name, value in off.items())


def count_budgets(ours, theirs, scratch):
    """Counts the budgets of all metrics, those that differ, and those that differ even with the same scores."""
    mixed = record_budgets.ranked_by(ours, theirs, scratch / "mixed.h5")
    total = apart = unexplained = 0
    for metric in METRICS:
        keep, keep2, keep3 = (record_budgets.solve(a.kvbudget, x, metric, scratch)[0] for x in (ours, theirs, mixed))
        total += keep.size
        apart += np.count_nonzero(keep != keep2)
        unexplained += np.count_nonzero(keep != keep3)
    return total, apart, unexplained


def compare(model, folder, scratch):
    ours, theirs, calib = scratch / "c.h5", scratch / "python.h5", folder / "calib.jsonl"
    chosen = [word for m in METRICS for word in ("-m", m)]
    words = [a.kvbudget, "profile", folder, calib, "-o", ours, "--force", "--quiet", *chosen]
    refused = subprocess.run([str(w) for w in words], capture_output=True).returncode != 0
    try:
        kvbudget.record(model, None, calib, METRICS, output=theirs, force=True)
    except kvbudget.KVBudgetError as why:
        return refused, f"refused: {why}" if refused else f"the recorder alone refuses: {why}"
    if refused:
        return False, "the profiler alone refuses"
    with h5py.File(ours) as x, h5py.File(theirs) as y:
        x, y = x["contexts/one"], y["contexts/one"]
        off = {"oracle": relative(x["questions/0/oracle"][:], y["questions/0/oracle"][:])}
        off |= {m: relative(x["scores"][m][:], y["scores"][m][:]) for m in x["scores"]}
    if folder.name == "llama-dynamic":  # its angles change with every token, and old keys are rotated differently
        del off["oracle"], off["ea:kvpress"]
        return agree(off), say(off)
    total, apart, unexplained = count_budgets(ours, theirs, scratch)
    said = f"{say(off)}; of {total} budgets {apart} differ, {unexplained} ranked by the same scores"
    return agree(off) and unexplained == 0, said


good, n = True, 0
with tempfile.TemporaryDirectory() as scratch:
    for name in [n for n in a.only.split(",") if n] or family_models.MODELS:
        folder = pathlib.Path(scratch) / name
        folder.mkdir()
        same, found = compare(make(name, folder), folder, pathlib.Path(scratch))
        print(f"{name:16s} {found}: {'same' if same else 'DIFFERENT'}", flush=True)
        good, n = good and same, n + 1
print(f"{n} families: {'PASS' if good and n else 'FAIL'}")
sys.exit(not (good and n))
