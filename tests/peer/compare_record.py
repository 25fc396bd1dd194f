"""Compares scores and oracle of a record with an f32 PyTorch port of the published protocol, on the same tokens.

usage: compare_record.py MODEL RECORD.h5 [--questions N]
MODEL is the GGUF that was profiled, or a Hugging Face folder with the same weights. The token ids (context, suffix,
answer) come from the record, so nothing depends on a sampler. Scores: SnapKV, KeyDiff and Expected Attention in each
recorded variant, as LU-KV published them (:lukv) and by kvpress's own classes (:kvpress). Differences are relative to
each head's maximum; ends with PASS (<= 1e-4) or FAIL. Needs torch, transformers >= 4.56, < 5.3, gguf, numpy, h5py, and
kvpress 0.5.5 for the :kvpress variants.
"""
import argparse
import json
import sys

import h5py
import numpy as np
import torch
from torch.nn import functional as F

import hf_model

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("model")
p.add_argument("record")
p.add_argument("--questions", type=int, default=3,
               help="per context (the port prefills again for each, as the published code does)")
p.add_argument("--tolerance", type=float, default=1e-4)
a = p.parse_args()

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

S = {"phase": None}


def value_norm(v, w_o):
    """Returns ||v W_O^(h)|| of every query head, divided by the layer's sum. v [G,T,d], w_o [D,H*d] -> [H,T]."""
    G, T, d = v.shape
    H = w_o.shape[1] // d
    n = torch.stack([(v[h // (H // G)].double() @ w_o[:, h * d:(h + 1) * d].T.double()).norm(dim=-1) for h in range(H)])
    return (n / (n.sum() + 1e-9)).float()


def snapkv_lukv(w, G, window=32, kernel=7):
    """Max-pooled mean attention of the last queries; the window gets the layer's maximum."""
    s = w[0, :, -window:, :-window].mean(1)[None]
    s = F.max_pool1d(s, kernel, 1, kernel // 2)[0].reshape(G, -1, s.shape[-1]).mean(1)
    return torch.cat([s, s.max().expand(G, window)], 1)


def expected_attention_lukv(mod, x, k, v, rotary, sinks=4, future=512, epsilon=0.02):
    """Statistics without the sinks' rows, softmax with the sinks. x [T,D], k and v [G,T,d]."""
    G, T, d = k.shape
    q = F.linear(x[sinks:], mod.q_proj.weight).view(T - sinks, -1, d).transpose(0, 1)
    mu = q.mean(1)
    cov = (q - mu[:, None]).transpose(1, 2) @ (q - mu[:, None]) / q.shape[1]
    cos, sin = rotary(x, torch.arange(T, T + future)[None])
    half = torch.zeros(d, d)
    half[d // 2 :, : d // 2], half[: d // 2, d // 2 :] = torch.eye(d // 2), -torch.eye(d // 2)
    r = (cos[0].mean(0)[:, None] * torch.eye(d) + sin[0].mean(0)[:, None] * half)
    mu, cov = mu @ r.T, r @ cov @ r.T
    kk = k.repeat_interleave(q.shape[0] // G, 0)
    z = (kk @ mu[..., None])[..., 0] / d**0.5 + ((kk @ cov) * kk).sum(-1) / (2 * d)
    s = z.softmax(-1).view(G, -1, T).mean(1)
    return (s + epsilon) * v.norm(dim=-1)


def attend(mod, q, k, v, mask, dropout=0.0, scaling=None, **_):
    l, T, n = mod.layer_idx, S["T"], q.shape[1] // k.shape[1]
    w = q @ k.repeat_interleave(n, 1).transpose(2, 3) * scaling
    if mask is not None:
        w = w + mask[..., : k.shape[2]]
    w = w.softmax(-1)
    if S["phase"] == "context":
        S["norm"][l] = value_norm(v[0, :, :T], mod.o_proj.weight)
        for name in S["metrics"]:
            S["scores"][name][l] = score(name, mod, w, k, v)
    elif S["phase"] == "decode" and q.shape[2] == 1:
        x = (w[0, :, 0, :T] * S["norm"][l]).reshape(k.shape[1], n, T).amax(1)
        S["best"][l] = torch.maximum(S["best"][l], x)
    return (w @ v.repeat_interleave(n, 1)).transpose(1, 2).contiguous(), w


def score(name, mod, w, k, v):
    spec = S["metrics"][name]
    if name.startswith("keydiff"):
        u = F.normalize(k[0], dim=-1)
        return -torch.cosine_similarity(k[0], u.mean(1, keepdim=True), dim=-1)
    if name.startswith("snapkv:lukv"):
        return snapkv_lukv(w, k.shape[1], int(spec["window"]), int(spec["kernel"]))
    if name.startswith("ea:lukv"):
        return expected_attention_lukv(mod, S["hidden"][0], k[0], v[0], m.model.rotary_emb, int(spec["sinks"]),
                                       int(spec["future"]), spec["epsilon"])
    from kvpress import ExpectedAttentionPress, SnapKVPress

    if name.startswith("snapkv:kvpress"):
        press = SnapKVPress(window_size=int(spec["window"]), kernel_size=int(spec["kernel"]))
    elif name.startswith("ea:kvpress"):
        press = ExpectedAttentionPress(n_future_positions=int(spec["future"]), n_sink=int(spec["sinks"]),
                                       epsilon=spec["epsilon"])
    else:
        return None
    mod.rotary_emb = m.model.rotary_emb
    return press.score(mod, S["hidden"], k, v, None, {"position_embeddings": S["rotation"]})[0]


def keep_inputs(mod, args, kwargs):
    S["hidden"] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    S["rotation"] = kwargs["position_embeddings"]


AttentionInterface.register("observed", attend)
AttentionMaskInterface.register("observed", eager_mask)
m, _ = hf_model.load(a.model, "observed", tokenizer=False)
for layer in m.model.layers:
    layer.self_attn.register_forward_pre_hook(keep_inputs, with_kwargs=True)
L, G = m.config.num_hidden_layers, m.config.num_key_value_heads
worst = 0.0


def report(what, ours, theirs):
    """Prints the largest difference relative to the head's largest magnitude."""
    global worst
    scale = theirs.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    d = ((ours - theirs).abs() / scale).amax(-1)
    at = np.unravel_index(int(d.argmax()), d.shape)
    print(
        f"  {what:28s} largest relative difference {d.max():.2e} (layer {at[0]}, head {at[1]}), mean over heads "
        f"{d.mean():.2e}"
    )
    worst = max(worst, d.max().item())


with torch.no_grad(), h5py.File(a.record) as f:
    specs = json.loads(f.attrs["metrics"])
    for cid, c in f["contexts"].items():
        ids = torch.from_numpy(c["token_ids"][:].astype(np.int64))[None]
        T = ids.shape[1]
        names = {n: specs[n] for n in c["scores"]}
        S.update(T=T, phase="context", metrics=names, norm={}, scores={n: {} for n in names})
        m(ids, logits_to_keep=1)
        print(f"context {cid}: {T} tokens")
        for n in names:
            if S["scores"][n][0] is None:
                print(f"  {n:28s} has no peer here, left out")
                continue
            ours, theirs = torch.from_numpy(c["scores"][n][:]), torch.stack([S["scores"][n][l] for l in range(L)])
            first = int(specs[n]["sinks"]) if n.startswith("ea:kvpress") else 0
            last = T - int(specs[n]["window"]) if n.startswith("snapkv") else T
            # without positions whose score is only a filler, the maximum
            report(n, ours[..., first:last], theirs[..., first:last])
        for q in sorted(c["questions"], key=int)[: a.questions]:
            g = c["questions"][q]
            if not g.attrs["n_queries"]:
                continue
            answer = torch.from_numpy(g["answer_ids"][:].astype(np.int64))[None]
            prompt = torch.cat([ids, torch.from_numpy(g["suffix_ids"][:].astype(np.int64))[None]], 1)
            S.update(phase="decode", best=torch.zeros(L, G, T))
            out = m(prompt, use_cache=True, logits_to_keep=1)
            for step in range(int(g.attrs["n_queries"])):
                out = m(answer[:, step : step + 1], past_key_values=out.past_key_values, use_cache=True)
            report(f"oracle, question {q}, {int(g.attrs['n_queries'])} queries", torch.from_numpy(g["oracle"][:]),
                   S["best"])
print(f"worst {worst:.2e}: {'PASS' if worst <= a.tolerance else 'FAIL'}")
sys.exit(worst > a.tolerance)
