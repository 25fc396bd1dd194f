"""Eviction scores by other code, from one attention layer's tensors: kvpress if it has the metric, otherwise the
published formula written out in PyTorch. Used by compare_scorers.py (real model) and tests/golden/make_scorers.py
(golden data).

Every function takes a Layer and gives scores [G, T] in float32, higher = keep.
"""
import dataclasses
import math
import types
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from kvpress import (CriticalKVPress, ExpectedAttentionPress, KeyDiffPress, KnormPress,
                     LagKVPress, ObservedAttentionPress, SnapKVPress, StreamingLLMPress, TOVAPress)


def stable_topk(x, k, dim=-1, sorted=True):
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return types.SimpleNamespace(values=values.narrow(dim, 0, k), indices=indices.narrow(dim, 0, k))


@dataclasses.dataclass
class Layer:
    module: torch.nn.Module  # attention module of transformers, with rotary_emb set
    x: torch.Tensor  # [1, T, D], its input
    q_raw: torch.Tensor  # [H, T, d]
    q: torch.Tensor  # [H, T, d], after RoPE
    k: torch.Tensor  # [G, T, d], after RoPE
    v: torch.Tensor  # [G, T, d]
    position_embeddings: tuple
    weights: torch.Tensor | None = None  # [H, T, T], the model's own attention; None: softmax of q and k

    @property
    def T(self):
        return self.k.shape[1]

    @property
    def group(self):
        return self.q.shape[0] // self.k.shape[0]

    def attention(self, rows):
        """Returns attention [H, rows, T] of the last `rows` queries: causal softmax over all keys."""
        if self.weights is not None:
            return self.weights[:, self.T - rows:]
        keys = self.k.repeat_interleave(self.group, 0)
        z = self.q[:, self.T - rows:] @ keys.transpose(1, 2) / math.sqrt(self.k.shape[2])
        seen = torch.arange(self.T)[None] <= torch.arange(self.T - rows, self.T)[:, None]
        return z.masked_fill(~seen, -math.inf).softmax(-1)

    def by_group(self, x):
        """Returns x [H, ...] as [G, group, ...]."""
        return x.reshape(self.k.shape[0], self.group, *x.shape[1:])

    def press(self, press):
        """Returns the press's score; torch.topk is made to prefer lower positions if scores tie, as all do in SnapKV's
        window."""
        needs_all = self.weights is not None or isinstance(press, ObservedAttentionPress)
        full = self.attention(self.T)[None] if needs_all else None
        with mock.patch("torch.topk", stable_topk):
            s = press.score(self.module, self.x, self.k[None], self.v[None], full,
                            {"position_embeddings": self.position_embeddings})
        return s[0].float()


@torch.no_grad()
def layer_of(module, rotary, x):
    """Returns the Layer of a transformers attention module for its input x [1, T, D]."""
    module.rotary_emb = rotary
    T, d = x.shape[1], module.head_dim
    cos, sin = rotary(x, torch.arange(T)[None])

    def heads(y):
        return y.reshape(T, -1, d).transpose(0, 1)

    def turn(y):
        half = torch.cat([-y[..., d // 2:], y[..., :d // 2]], -1)
        return y * cos[0] + half * sin[0]

    q_raw = heads(module.q_proj(x))
    return Layer(module, x, q_raw, turn(q_raw), turn(heads(module.k_proj(x))), heads(module.v_proj(x)), (cos, sin))


def save(layer, folder):
    """Writes the tensors as score_layer.c reads them."""
    def put(name, t):
        np.save(f"{folder}/{name}.npy", np.ascontiguousarray(t.detach().numpy().astype("<f4")))
    put("q_raw", layer.q_raw.transpose(0, 1))
    put("q", layer.q.transpose(0, 1))
    put("k", layer.k)
    put("v", layer.v)
    put("wo", layer.module.o_proj.weight)
    put("rope_frequency", layer.module.rotary_emb.inv_freq)


def pad_tail(s, n, above):
    return F.pad(s, (0, n), value=s.max().item() + above)


def snapkv(layer, window, kernel, max_pool, group_first=False, group_max=False, total=False, above=1.0):
    votes = layer.attention(window)[:, :, :layer.T - window]
    votes = votes.sum(1) if total else votes.mean(1)
    pool = F.max_pool1d if max_pool else F.avg_pool1d

    def pooled(u):
        return pool(u[None], kernel, 1, kernel // 2)[0]

    def reduced(u):
        g = layer.by_group(u)
        return g.sum(1) if total else g.amax(1) if group_max else g.mean(1)
    return pad_tail(pooled(reduced(votes)) if group_first else reduced(pooled(votes)), window, above)


def keydiff(layer, anchor, similarity):
    k = layer.k
    a = {"mean": lambda: F.normalize(k, dim=-1).mean(1, keepdim=True), "raw": lambda: k.mean(1, keepdim=True),
         "median": lambda: k.quantile(0.5, dim=1, keepdim=True)}[anchor]()
    if similarity == "cos":
        return -F.cosine_similarity(k, a, dim=-1)
    return -(k * a).sum(-1) if similarity == "dot" else (k - a).norm(dim=-1)


def ea_lukv(layer, future=512, sinks=4, epsilon=0.02):
    """Returns Expected Attention as LU-KV published it, with a softmax over all keys."""
    q = layer.q_raw[:, sinks:].double()
    mean = q.mean(1, keepdim=True)
    cov = (q - mean).transpose(1, 2) @ (q - mean) / q.shape[1]
    T, d = layer.T, layer.k.shape[2]
    angle = torch.arange(T, T + future).double()[:, None] * layer.module.rotary_emb.inv_freq.double()
    factor = layer.module.rotary_emb.attention_scaling
    c, s = angle.cos().mean(0) * factor, angle.sin().mean(0) * factor
    R = torch.cat([torch.cat([c.diag(), -s.diag()], 1), torch.cat([s.diag(), c.diag()], 1)], 0)
    mean, cov = mean @ R.T, R @ cov @ R.T
    k = layer.k.double().repeat_interleave(layer.group, 0)
    z = (k @ mean.transpose(1, 2))[..., 0] / math.sqrt(d) + ((k @ cov) * k).sum(-1) / (2 * d)
    p = layer.by_group(z.softmax(-1)).mean(1)
    return ((p + epsilon) * layer.v.double().norm(dim=-1)).float()


def lagkv_raw(layer, sink, lag, mode):
    """Returns t^K and t^V [G, partitions - 1, lag] by the formulas of the paper (eq. 4 to 8)."""
    n = (layer.T - sink) // lag

    def part(z):
        p = z[:, sink:sink + n * lag].reshape(z.shape[0], n, lag, -1)
        return p[:, :-1], p[:, 1:] if mode == "lag" else p[:, :-1]

    def spread(z):
        own, ref = part(z)
        low, high = ref.amin(2, keepdim=True), ref.amax(2, keepdim=True)
        y = torch.where(high > low, (own - low) / (high - low), torch.zeros(()))
        return y.std(-1).softmax(-1)
    return spread(layer.k), spread(layer.v), part(layer.k)[0].norm(dim=-1)


def lagkv(layer, sink, lag, mode="lag", cross=False, mean=False):
    tk, tv, norm = lagkv_raw(layer, sink, lag, mode)
    s = -norm if mode == "l2norm" else (tk + tv) / (2 if mean else 1)
    if not cross:
        order = s.sort(dim=-1, stable=True).indices
        s = torch.empty_like(s).scatter(-1, order, torch.arange(lag, dtype=s.dtype).expand_as(s)) / lag
    top = 1.0 if mean else 2.0
    G = layer.k.shape[0]
    return torch.cat(
        [torch.full((G, sink), top),
         s.reshape(G, -1),
         torch.full((G, layer.T - sink - s.shape[1] * lag), top)], 1)


def lagkv_kept(layer, sink, lag, ratio):
    """Returns the kept positions [G][...] of the published one-shot compression: int(ratio * lag) of every partition
    but the last."""
    tk, tv, _ = lagkv_raw(layer, sink, lag, "lag")
    best = (tk + tv).topk(int(ratio * lag), -1).indices
    best = best + sink + lag * torch.arange(best.shape[1])[None, :, None]
    tail = torch.arange(sink + lag * best.shape[1], layer.T)
    return [sorted([*range(sink), *best[g].flatten().tolist(), *tail.tolist()]) for g in range(layer.k.shape[0])]


def morphkv(layer, window, fusion):
    rows = layer.by_group(layer.attention(window)[:, :, :layer.T - window]).sum(1)
    return pad_tail(rows.sum(1) if fusion == "sum" else rows.amax(1), window, 1)


def tova_group(layer):
    return pad_tail(layer.by_group(layer.attention(1)[:, 0, :-1]).mean(1), 1, 1)


def h2o_sum(layer):
    return layer.by_group(layer.attention(layer.T).sum(1)).mean(1)


def ea_press(**kw):
    return ExpectedAttentionPress(**kw)


def scores(lag):
    """Returns [(our metric, source, function of a Layer, number of sinks and of last tokens with filler scores, and for
    ranks a function of a Layer for the ranked scores [G, partitions, lag])]. `lag`: LagKV's partition."""
    kvp = "kvpress 0.5.5 "
    cases = [
        ("snapkv:kvpress", kvp + "SnapKVPress", lambda a: a.press(SnapKVPress()), 0, 64),
        ("snapkv:kvpress:window=32:kernel=7", kvp + "SnapKVPress(32, 7)",
         lambda a: a.press(SnapKVPress(window_size=32, kernel_size=7)), 0, 32),
        ("snapkv:keydiff", kvp + "SnapKVPress(32, 7)", lambda a: a.press(SnapKVPress(window_size=32, kernel_size=7)), 0,
         32),
        ("snapkv:lukv", "formula (published LU-KV code)", lambda a: snapkv(a, 32, 7, True, above=0), 0, 32),
        ("snapkv:adakv", "formula (AdaKV)", lambda a: snapkv(a, 32, 7, True, group_first=True), 0, 32),
        ("snapkv:adakv:group_max=1", "formula (AdaKV, max)",
         lambda a: snapkv(a, 32, 7, True, group_first=True, group_max=True), 0, 32),
        ("snapkv:factory", "formula (KVCache-Factory)", lambda a: snapkv(a, 8, 7, True), 0, 8),
        ("rocketkv", "formula (RocketKV stage 1)", lambda a: snapkv(a, 32, 63, True, group_first=True, total=True), 0,
         32),
        ("rocketkv:window=128", "formula (RocketKV, multi-turn)",
         lambda a: snapkv(a, 128, 63, True, group_first=True, total=True), 0, 128),
        ("keydiff", kvp + "KeyDiffPress", lambda a: a.press(KeyDiffPress()), 0, 0),
        *[(f"keydiff:anchor={x}", f"formula ({x} anchor)", lambda a, x=x: keydiff(a, x, "cos"), 0, 0)
          for x in ("raw", "median")],
        *[(f"keydiff:similarity={x}", f"formula ({x})", lambda a, x=x: keydiff(a, "mean", x), 0, 0)
          for x in ("dot", "euclid")],
        ("ea:kvpress", kvp + "ExpectedAttentionPress(epsilon=0.02)", lambda a: a.press(ea_press(epsilon=0.02)), 4, 0),
        ("ea:kvpress:epsilon=0", kvp + "ExpectedAttentionPress()", lambda a: a.press(ea_press()), 4, 0),
        ("ea:kvpress:future=1:epsilon=0:covariance=0:value_norm=0",
         kvp + "ExpectedAttentionPress(1, no covariance, no vnorm)",
         lambda a: a.press(ea_press(n_future_positions=1, use_covariance=False, use_vnorm=False)), 4, 0),
        ("ea:lukv", "formula (published LU-KV code)", ea_lukv, 0, 0),
        (f"lagkv:kvpress:lag={lag}", kvp + f"LagKVPress(lag_size={lag})", lambda a: a.press(LagKVPress(lag_size=lag)),
         0, 0),
        (f"lagkv:kvpress:lag={lag}:cross=1", kvp + f"LagKVPress(lag_size={lag}, cross)",
         lambda a: a.press(LagKVPress(lag_size=lag, cross_scoring=True)), 4, lag),
        (f"lagkv:paper:lag={lag}", "formula (published LagKV code)", lambda a: lagkv(a, 16, lag), 0, 0),
        (f"lagkv:paper:lag={lag}:cross=1", "formula (published LagKV code)", lambda a: lagkv(a, 16, lag, cross=True),
         16, lag),
        (f"lagkv:paper:lag={lag}:mode=local:cross=1", "formula (LocalKV)", lambda a: lagkv(a, 16, lag, "local", True),
         16, lag),
        (f"lagkv:paper:lag={lag}:mode=l2norm", "formula (L2Norm)", lambda a: lagkv(a, 16, lag, "l2norm"), 0, 0),
        ("morphkv", "formula (MorphKV, sum)", lambda a: morphkv(a, 32, "sum"), 0, 32),
        ("morphkv:fusion=max", "formula (MorphKV, max)", lambda a: morphkv(a, 32, "max"), 0, 32),
        ("h2o", "formula (column sums)", h2o_sum, 0, 0),
        ("h2o:kvpress", kvp + "ObservedAttentionPress", lambda a: a.press(ObservedAttentionPress()), 0, 0),
        ("tova", kvp + "TOVAPress", lambda a: a.press(TOVAPress()), 0, 1),
        ("tova:scope=group", "formula (KeyDiff's baseline)", tova_group, 0, 1),
        ("knorm", kvp + "KnormPress", lambda a: a.press(KnormPress()), 0, 0),
        ("critical:share=0+snapkv:kvpress", kvp + "CriticalKVPress(SnapKVPress, 0)",
         lambda a: a.press(CriticalKVPress(SnapKVPress(), first_stage_ratio=0.0)), 0, 64),
        ("critical:share=0+ea:kvpress:epsilon=0:value_norm=0", kvp + "CriticalKVPress(ExpectedAttentionPress, 0)",
         lambda a: a.press(CriticalKVPress(ea_press(use_vnorm=False), first_stage_ratio=0.0)), 4, 0),
        ("critical:share=0+knorm", kvp + "CriticalKVPress(KnormPress, 0)",
         lambda a: a.press(CriticalKVPress(KnormPress(), first_stage_ratio=0.0)), 0, 0),
    ]
    ranks = {f"lagkv:kvpress:lag={lag}": (4, lambda a: sum(lagkv_raw(a, 4, lag, "lag")[:2])),
             f"lagkv:paper:lag={lag}": (16, lambda a: sum(lagkv_raw(a, 16, lag, "lag")[:2])),
             f"lagkv:paper:lag={lag}:mode=l2norm": (16, lambda a: -lagkv_raw(a, 16, lag, "lag")[2])}
    return [(*c[:3], ranks[c[0]][0], c[4], ranks[c[0]][1]) if c[0] in ranks else (*c, None) for c in cases]


def top(s, n):
    """Returns the positions of the n best, the lower one if scores tie."""
    return [sorted(row.sort(descending=True, stable=True).indices[:n].tolist()) for row in s]


def inversion(got, raw, sink):
    """For ranks within partitions, returns the most by which the peer's raw scores [G, partitions, lag] fail to ascend
    in our order, as a share of their range. Tokens with raw scores that differ only by rounding may be in either
    order: layer 0 has many equal keys."""
    ranks = got[:, sink:sink + raw.shape[1] * raw.shape[2]].reshape(raw.shape)
    ordered = raw.double().gather(-1, ranks.sort(dim=-1, stable=True).indices)
    return ((ordered.cummax(-1).values - ordered).amax() / (raw.max() - raw.min())).item()


def h2o_half_kept(layer, n):
    s = h2o_sum(layer)
    s[:, layer.T - n // 2:] = math.inf
    return top(s, n)


def kept(lag, ratio):
    """Returns [(our metric, source, function of a Layer for kept positions per head, function of T for tokens per head,
    and, if near ties matter, a function of a Layer for the peer's scores)]."""
    def press(p):
        p.compression_ratio = ratio
        return lambda a: top(a.press(p), count(a.T))

    def count(T):
        return max(1, int(T * (1 - ratio)))
    kvp = "kvpress 0.5.5 "
    cases = [
        ("critical+snapkv:kvpress", kvp + "CriticalKVPress(SnapKVPress)", press(CriticalKVPress(SnapKVPress())), count),
        ("critical+keydiff", kvp + "CriticalKVPress(KeyDiffPress)", press(CriticalKVPress(KeyDiffPress())), count),
        ("critical:share=1+knorm", kvp + "KnormPress", press(KnormPress()), count),
        ("streaming:kvpress", kvp + "StreamingLLMPress", press(StreamingLLMPress()), count),
        ("streaming", kvp + "StreamingLLMPress", press(StreamingLLMPress()), count),
        ("h2o:half", "formula (H2O as published)", lambda a: h2o_half_kept(a, count(a.T)), count),
        (f"lagkv:paper:lag={lag}", "formula (published LagKV code, one-shot)",
         lambda a: lagkv_kept(a, 16, lag, 1 - ratio), lambda T: 16 + int(
             (1 - ratio) * lag) * ((T - 16) // lag - 1) + lag + (T - 16) % lag),
    ]
    return [(*c, (lambda a: a.press(KnormPress())) if c[0] == "critical:share=1+knorm" else None) for c in cases]
