"""Budgets from two records of the same tokens, for `compare_recorder.py` and `record_families.py`.

Two programs in float32 may order scores differently that differ only by rounding, and then some budgets differ. So
budgets are compared twice: with each record's own scores, and with the first record's scores in both. The order of
nearly equal scores does not explain differences in the second comparison.
"""
import hashlib
import pathlib
import shutil
import subprocess

import h5py
import numpy as np

import kvbudget


def solve(program, record, metric, folder):
    """Returns the budgets of 99 ratios at the context's length [99,L,G], and the table's info."""
    out = pathlib.Path(folder) / "budgets.safetensors"
    subprocess.run([program, "solve", record, "-m", metric, "-o", out, "--quiet"], check=True, capture_output=True)
    table = kvbudget.Table(out)
    out.unlink()
    n_tokens = table.info.calibration_tokens[0]
    return np.stack([table.keep(r / 100, n_tokens) for r in range(1, 100)]).astype(np.int64), table.info


def ranked_by(first, second, path):
    """Writes a copy of the second record with the first one's scores and their hashes; both hold one context."""
    shutil.copy(second, path)
    with h5py.File(first) as f, h5py.File(path, "r+") as g:
        (x,), (y,) = f["contexts"].values(), g["contexts"].values()
        for name in x["scores"]:
            scores, out = x["scores"][name][:], y["scores"][name]
            out[...] = scores
            out.attrs.modify("sha256", np.bytes_(hashlib.sha256(scores.tobytes()).hexdigest()))
    return path
