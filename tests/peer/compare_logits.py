"""Compares next-token logits of every position of a text with transformers (float32, the same token ids).

usage: compare_logits.py KVBUDGET MODEL.gguf TEXT [--tokens 1500] [--backend cpu]
Prints the largest absolute difference and ends with PASS (<= 1e-3) or FAIL. Needs torch, transformers >= 4.56, < 5.3,
gguf, numpy.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch

import hf_model

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("program")
p.add_argument("model")
p.add_argument("text")
p.add_argument("--tokens", type=int, default=1500)
p.add_argument("--backend", default="cpu")
p.add_argument("--tolerance", type=float, default=1e-3)
a = p.parse_args()

model, tokenizer = hf_model.load(a.model)
with open(a.text, encoding="utf-8") as f:
    ids = tokenizer(f.read(), add_special_tokens=False, return_tensors="pt").input_ids[:, : a.tokens]
with tempfile.TemporaryDirectory() as folder:
    np.save(f"{folder}/ids.npy", ids[0].numpy().astype("<i4"))
    out = f"{folder}/logits.npy"
    logits = os.path.join(os.path.dirname(a.program), "tests/logits")
    subprocess.run([logits, a.model, f"{folder}/ids.npy", out, a.backend], check=True)
    ours = torch.from_numpy(np.load(out))
with torch.no_grad():
    theirs = model(ids).logits[0]
difference = (ours - theirs).abs()
same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
print(
    f"{ids.shape[1]} positions x {theirs.shape[1]} logits: largest difference {difference.max():.2e}, mean "
    f"{difference.mean():.2e}, "
    f"logits from {theirs.min():.1f} to {theirs.max():.1f}, same top token {same:.2%}")
print("PASS" if difference.max() <= a.tolerance else "FAIL")
sys.exit(difference.max().item() > a.tolerance)
