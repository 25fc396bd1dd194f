"""Compares every scorer with other code for the same metric, on the same tensors of a real model (methods.md 6.40).

usage: compare_scorers.py MODEL --text FILE [--tokens 2048] [--layers 0 9 29] [--lag 128] [--program
       build/tests/score_layer] [--fixture JSON]
One float32 forward pass of transformers gives each layer's input; its projections are the queries, keys and values that
both sides get. Prints, per metric, the largest difference as a share of the head's range over the positions that are
really ranked, and for kept sets the tokens that differ. Ranks are compared by the scores that they rank, since those of
equal keys in layer 0 differ only by rounding. Exit status 1 if a difference exceeds 1e-4. Needs kvpress 0.5.5, torch,
transformers >= 4.56, < 5.3.
--fixture: pooled scores and kept positions of RocketKV's stage 1 from a published fixture (seed 1701).
"""
import argparse
import json
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

import hf_model
import scorer_peers

TOLERANCE = 1e-4


def ours(program, folder, metrics, keep=0):
    subprocess.run([program, folder, *(["--keep", str(keep)] if keep else []), *metrics], check=True)
    return [torch.from_numpy(np.load(f"{folder}/score_{i}.npy")) for i in range(len(metrics))]


def difference(got, want, sinks, tail):
    """Returns the maximum over heads of max |got - want| / range of want, over the ranked positions."""
    a, b = (t[:, sinks:t.shape[1] - tail].double() for t in (got, want))
    span = (b.amax(1) - b.amin(1)).clamp_min(1e-30)
    return ((a - b).abs().amax(1) / span).max().item()


def really_moved(mine, theirs, peer):
    """Returns how many tokens only one side keeps, except those with a peer score within rounding of the threshold."""
    n = 0
    for g, (x, y) in enumerate(zip(mine, theirs)):
        moved = set(x) - set(y)
        if peer is not None:
            edge, slack = peer[g][y].min(), 1e-6 * (peer[g].max() - peer[g].min())
            moved = {j for j in moved if abs(peer[g][j] - edge) > slack}
        n += len(moved)
    return n


def layers_of(path, text, tokens, wanted):
    model, tokenizer = hf_model.load(path, attention="sdpa")
    with open(text, encoding="utf-8") as f:
        ids = tokenizer(f.read(), return_tensors="pt", truncation=True, max_length=tokens).input_ids
    inputs = {}

    def hook(i):
        return lambda module, args, kw: inputs.__setitem__(i,
                                                           kw.get("hidden_states", args[0] if args else None).detach())
    for i in wanted:
        model.model.layers[i].self_attn.register_forward_pre_hook(hook(i), with_kwargs=True)
    with torch.no_grad():
        model(ids, logits_to_keep=1)
    for i in wanted:
        yield i, scorer_peers.layer_of(model.model.layers[i].self_attn, model.model.rotary_emb, inputs[i])


def check_fixture(program, path):
    with open(path, encoding="utf-8") as f:
        case = json.load(f)
    torch.manual_seed(1701)
    q = torch.randn(1, 4, 3, 8)[0]
    k = torch.randn(1, 2, 17, 8).half().float()[0]
    with tempfile.TemporaryDirectory() as folder:
        for name, t in (("query_mean", torch.zeros(4, 8)), ("query_cov", torch.zeros(4, 8, 8)), ("q", q.transpose(0,
                                                                                                                  1)),
                        ("q_raw", q.transpose(0, 1)), ("k", k), ("v", k), ("wo", torch.zeros(8, 32)), ("rope_frequency",
                                                                                                       torch.ones(4))):
            np.save(f"{folder}/{name}.npy", np.ascontiguousarray(t.numpy().astype("<f4")))
        s, = ours(program, folder, ["rocketkv:window=3:kernel=3"])
    want = torch.tensor(case["pooled"]).reshape(2, -1)
    error = ((s[:, :14] - want).abs() / (1 + want.abs())).max().item()
    same = sum(scorer_peers.top(s, case["capacity"]), []) == case["retained"]
    print(
        f"{'rocketkv':52} published fixture, seed 1701: {error:.1e} of 1 + |score| (2e-5 allowed), kept positions "
        f"{'equal' if same else 'DIFFER'}"
    )
    return error <= 2e-5 and same


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--text", required=True)
    p.add_argument("--tokens", type=int, default=2048)
    p.add_argument("--layers", type=int, nargs="+", default=[0, 9, 29])
    p.add_argument("--lag", type=int, default=128)
    p.add_argument("--program", default="build/tests/score_layer")
    p.add_argument("--fixture")
    a = p.parse_args()
    worst, moved, good, said = {}, {}, True, {}
    for _, layer in layers_of(a.model, a.text, a.tokens, a.layers):
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            scorer_peers.save(layer, folder)
            cases = scorer_peers.scores(a.lag)
            start = time.time()
            got = ours(a.program, folder, [c[0] for c in cases])
            print(f"# ours: {time.time() - start:.2f} s for {len(cases)} metrics, reading and writing included",
                  file=sys.stderr)
            for (metric, who, function, sinks, tail, raw), s in zip(cases, got):
                said[metric] = who
                error = (
                    scorer_peers.inversion(s, raw(layer), sinks) if raw else difference(s, function(layer), sinks, tail)
                )
                worst[metric] = max(worst.get(metric, 0), error)
            for ratio in (0.5, 0.8, 0.95):
                for metric, who, function, count, peer in scorer_peers.kept(a.lag, ratio):
                    n = count(layer.T)
                    mine, theirs = scorer_peers.top(ours(a.program, folder, [metric], n)[0], n), function(layer)
                    said["kept: " + metric] = who
                    differ = really_moved(mine, theirs, peer(layer) if peer else None)
                    moved["kept: " + metric] = moved.get("kept: " + metric, 0) + differ
    for metric, error in worst.items():
        good &= error <= TOLERANCE
        print(
            f"{metric:52} {said[metric]:56} {error:.1e}{'' if error <= TOLERANCE else '  MORE THAN ' + str(TOLERANCE)}")
    for metric, n in moved.items():
        good &= n == 0
        print(f"{metric:52} {said[metric]:56} {n} tokens differ{'' if n == 0 else '  EXPECTED NONE'}")
    if a.fixture:
        good &= check_fixture(a.program, a.fixture)
    return 0 if good else 1


sys.exit(main())
