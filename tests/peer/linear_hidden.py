"""Measures a linear map of hidden states as a ranking (the form of KVzap-linear, arXiv 2601.07891), fitted on the same
record as `kvbudget learn` and evaluated on the same texts, with a table of kvbudget's own solver.

usage: linear_hidden.py MODEL RUN.h5 KVBUDGET --texts FILE... [--budgets RUN2.h5] [--target mean] [--window 16]
                        [--ratios 0.5 0.8 0.9] [--tokens 2048]

Per KV head a ridge regression on the layer's input after its norm (D numbers per token, all tokens weighted equally)
fits the target of `learn`, log(I / mean I + 0.001), where I is the mean or the maximum of RUN.h5's oracle over the
questions; lambda is chosen by the squared error on left-out texts. A copy of the record RUN2.h5 of the same contexts
(by default RUN.h5) gets the scores, each text's by a map fitted without it, and the program KVBUDGET solves a table for
them. Then each text is prefilled, its tokens are ranked by the map of all texts, and the next 64 are teacher-forced
with the evicted ones hidden. Prints the KL to the full cache, averaged over texts, as `kvbudget eval` does.
Needs torch, transformers, h5py and the package kvbudget (python/).
"""
import argparse
import hashlib
import os
import shutil
import subprocess
import tempfile

import h5py
import numpy as np
import torch

import hf_model
from kvbudget import Table, selection
from masked import divergence, log_p

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("model")
p.add_argument("record")
p.add_argument("kvbudget")
p.add_argument("--texts", nargs="+", required=True)
p.add_argument("--budgets")
p.add_argument("--target", choices=("mean", "max"), default="mean")
p.add_argument("--window", type=int, default=16)
p.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.8, 0.9])
p.add_argument("--tokens", type=int, default=2048)
a = p.parse_args()
N, SINK, NAME, LAMBDAS = 64, 4, "linear-hidden", (1e-3, 1e-2, 1e-1, 1.0)
model, tokenizer = hf_model.load(a.model)
inputs = {}
for index, layer in enumerate(model.model.layers):
    layer.input_layernorm.register_forward_hook(lambda m, x, y, index=index: inputs.update({index: y[0].double()}))


@torch.no_grad()
def hidden_states(ids):
    """Returns [L, T, D + 1] for token ids [T]: each layer's input after its norm, and a constant."""
    model(torch.tensor(ids)[None], use_cache=False, logits_to_keep=1)
    x = torch.stack([inputs[layer] for layer in sorted(inputs)])
    return torch.cat((x, torch.ones(*x.shape[:2], 1, dtype=x.dtype)), -1)


def importance(context):
    """Returns log(I / mean I + 0.001) [L, G, T], where mean I is that of the questions' mean, as in `learn`."""
    oracles = [q["oracle"][:].astype("f8") for q in context["questions"].values() if "oracle" in q]
    worth = np.max(oracles, 0) if a.target == "max" else np.mean(oracles, 0)
    return torch.from_numpy(np.log(worth / np.mean(oracles) + 1e-3))


def equations(x, y):
    """Returns means over the tokens after the sinks: x x^T [L, P, P], x y [L, P, G], y y [L, G]."""
    x, y = x[:, SINK:], y[:, :, SINK:].transpose(1, 2)
    n = x.shape[1]
    return x.transpose(1, 2) @ x / n, x.transpose(1, 2) @ y / n, (y * y).mean(1)


def solve(systems, strength):
    """Returns weights [L, P, G]; all except the constant are penalised."""
    A, b = sum(s[0] for s in systems), sum(s[1] for s in systems)
    ridge = torch.full((A.shape[1],), strength * len(systems), dtype=A.dtype)
    ridge[-1] = 0
    return torch.linalg.solve(A + torch.diag(ridge), b)


def squared_error(w, system):
    A, b, c = system
    return (c - 2 * (w * b).sum(1) + (w * (A @ w)).sum(1)).mean().item()


def fit(record):
    """Returns (weights of all texts, scores of each text by the weights of the others {name: [L, G, T]})."""
    names = list(record["contexts"])
    states = {k: hidden_states(record["contexts"][k]["token_ids"][:].astype("i8")) for k in names}
    systems = {k: equations(states[k], importance(record["contexts"][k])) for k in names}

    def without(k, strength):
        return solve([s for other, s in systems.items() if other != k], strength)
    errors = {s: sum(squared_error(without(k, s), systems[k]) for k in names) / len(names) for s in LAMBDAS}
    best = min(errors, key=errors.get)
    print("squared error on texts left out, by lambda: " + ", ".join(f"{s:g} {e:.4f}" for s, e in errors.items()))
    return solve(list(systems.values()), best), {k: (states[k] @ without(k, best)).transpose(1, 2) for k in names}


def make_table(scores, folder):
    """Returns the table that the solver makes from a copy of the record with these scores."""
    copy, table = os.path.join(folder, "run.h5"), os.path.join(folder, "table.safetensors")
    shutil.copy(a.budgets or a.record, copy)
    with h5py.File(copy, "r+", libver="v110") as record:
        for k, values in scores.items():
            values = values.float().numpy()
            added = record["contexts"][k]["scores"].create_dataset(NAME, data=values, chunks=(1, *values.shape[1:]),
                                                                   fletcher32=True)
            added.attrs["sha256"] = np.bytes_(hashlib.sha256(values.tobytes()).hexdigest())
    subprocess.run([a.kvbudget, "solve", copy, "--metric", NAME, "--sink", str(SINK), "--window", str(a.window),
                    "--quiet", "-o", table], check=True, stdout=subprocess.DEVNULL)
    return Table(table)


def hidden_by(scores, table, ratio):
    """Returns the evicted tokens [L, G, T] by scores [L, G, T]."""
    keep = table.keep(ratio, scores.shape[2])
    out = torch.ones(scores.shape, dtype=torch.bool)
    for layer, head in np.ndindex(*keep.shape):
        places = selection.select(scores[layer, head].float().numpy(), int(keep[layer, head]), SINK, a.window)
        out[layer, head, torch.from_numpy(places.astype("i8"))] = False
    return out


def judge(path, weights, table):
    """Returns {ratio: KL} of one text, or None if it is too short."""
    with open(path, encoding="utf-8") as f:
        ids = tokenizer(f.read(), add_special_tokens=False, return_tensors="pt").input_ids
    if ids.shape[1] < a.tokens + N:
        return None
    context, following = ids[:, : a.tokens], ids[:, a.tokens : a.tokens + N]
    scores = (hidden_states(context[0].tolist()) @ weights).transpose(1, 2)
    full = log_p(model, context, following)
    return {r: divergence(full, log_p(model, context, following, hidden_by(scores, table, r))) for r in a.ratios}


def main():
    with h5py.File(a.record) as record:
        weights, scores = fit(record)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        table = make_table(scores, folder)
        for path in a.texts:
            kls = judge(path, weights, table)
            if kls is None:
                print(f"{path}: shorter than {a.tokens + N} tokens; left out")
                continue
            found.append(kls)
            print(f"{os.path.basename(path):20s} " + "  ".join(f"{r:g}: {kl:.4f}" for r, kl in kls.items()), flush=True)
    if found:
        print(f"KL, mean of {len(found)} texts: " +
              "  ".join(f"{r:g}: {np.mean([k[r] for k in found]):.4f}" for r in a.ratios))


main()
