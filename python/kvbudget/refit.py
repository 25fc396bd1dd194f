"""Refits a cut cache: once, after the prefill, each head's kept keys and values are changed so that attention over them
comes closer to that over the full cache. The cache keeps its shape, and decoding costs nothing more.

This is kvb_refit() of the library (docs/refit.md) in torch, where the cache is:

    k'_s = k_s + A^-1 Q'(log sum over s of exp(q.k_j) - q.k_s),  A = Q'Q + 0.01 mean I
    w = argmin over w >= 0 of |p w - 1|^2, p the slots' shares of the full attention        beta = log w in [-3, 3]
    k''_j = k'_j + beta_j u,  u = A^-1 Q'1                           so that q.u is near 1 for the head's queries
    V' = V + (P'P + 0.03 mean I)^-1 P'(O - P V)                      P the attention over the slots

where s are the tokens that a summary stands for, in slots that have the least attention, and no value moves by more
than half of its length (the bias by Attention Matching, arXiv 2602.16284). A quarter of the queries is left out of the
fit, in blocks. These choose what is used: first how many slots hold summaries, 3/4, 3/8, 3/16 or none, then whether
shifted keys help, then whether changed values do.
"""

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .metrics import Seen, Step
from .models import AttentionLayer
from .ragged import RaggedLayer

FIRST, STRIDE = 6, 3  # the first positions are sinks, whose queries are outliers
MOST_ROWS = 2048  # query rows per KV head; longer contexts have every 6th position, every 12th, ...
AHEAD = 256  # references are turned to positions T .. T + 255
MOST_NUMBERS = 1 << 24  # attention weights that are held at a time: 64 MiB
RIDGE = 0.03
BLOCK = 16  # queries that are left out of the fit together, since neighbours are alike


@dataclass(frozen=True)
class References:
    """A sequence's own queries at every stride-th position, turned back to position 0: [Hq, m, d]."""

    rows: Tensor
    stride: int = STRIDE
    last: tuple[Tensor, Tensor] | None = None  # cosines and sines of the last token

    def before(self, n: int) -> "References":
        """Returns those of the first n tokens."""
        return replace(self, rows=self.rows[:, : max(-(-(n - FIRST) // self.stride), 0)])


def gather(known: References | None, layer: AttentionLayer, step: Step, first: int) -> References:
    """Adds queries of the next tokens, the first of which is the sequence's token ``first``."""
    stride = known.stride if known else STRIDE
    begin = max(FIRST - first, (FIRST - first) % stride)
    q = step.query[:, begin::stride].float()
    last: tuple[Tensor, Tensor] | None = None
    if layer.turns() and step.rope is not None:
        cos, sin = (x[begin::stride].float() for x in step.rope)
        last = step.rope[0][-1].float(), step.rope[1][-1].float()
        if q.shape[1]:
            q = layer.turn(q, cos, -sin) / (cos * cos + sin * sin).mean()  # YaRN's angles are scaled
    rows = torch.cat([known.rows, q], 1) if known else q
    while rows.shape[1] > max(MOST_ROWS * layer.n_kv_heads // layer.n_heads, 4):
        rows, stride = rows[:, ::2], stride * 2
    return References(rows.clone(), stride, last)


def _queries(layer: AttentionLayer, seen: Seen, total: int) -> Tensor:
    """Returns references [G, n, d], scaled for q.k, at pseudo-random positions after the context, always the same."""
    known: References = seen.references
    rows, device = known.rows, known.rows.device
    if known.last is not None and rows.shape[1]:
        rotary = replace(layer, rotary=copy.deepcopy(layer.rotary))  # dynamic ones remember the longest text
        ends = sorted({total - seen.padding, total})  # the last token's angles tell if the model counted padding
        at = torch.tensor(ends, device=device) - 1
        off = (rotary.angles(rows, at)[0].float() - known.last[0]).abs().flatten(1).amax(1)
        ahead = (torch.arange(rows.shape[1], device=device) * 2654435761 % 2**32) >> 24
        rows = layer.turn(rows, *(x.float() for x in rotary.angles(rows, ends[int(off.argmin())] + ahead % AHEAD)))
    return rows.reshape(layer.n_kv_heads, -1, rows.shape[-1]) / math.sqrt(rows.shape[-1])


@torch.no_grad()
def refit(layer: AttentionLayer, keys: Tensor, values: Tensor, cut: RaggedLayer) -> int:
    """Refits the rows of a layer that was just cut from keys and values [B, G, T, d], and forgets the references.
    Returns how many heads were changed."""
    changed = 0
    for b, seen in enumerate(cut.observed):
        queries = _queries(layer, seen, keys.shape[2])
        for h in range(cut.n_heads):
            k, v, places = cut.segment(b * cut.n_heads + h)
            sinks = None if layer.sinks is None else layer.sinks.float().view(cut.n_heads, -1)[h]
            head = Head(keys[b, h, seen.padding :], values[b, h, seen.padding :], queries[h], layer.softcap, sinks)
            found = head.fit(places.long() - seen.padding)
            if found is not None:
                k.copy_(found[0])
                v.copy_(found[1])
                changed += 1
        seen.references = None
    return changed


class Head:
    """One KV head's full attention for its reference queries, and what it can be refitted to.

    keys [T, d], values [T, dv], in whose type the results are held and judged; queries [n, d], already scaled;
    softcap, sinks [query heads of the group] as the model's attention has them
    """

    def __init__(
        self, keys: Tensor, values: Tensor, queries: Tensor, softcap: float | None = None, sinks: Tensor | None = None
    ):
        self.keys, self.values, self.softcap = keys, values, softcap
        block = max(1, min(len(queries) // 4, BLOCK))
        left = torch.arange(len(queries), device=queries.device) // block % 4 == 3
        self.n_fit = int((~left).sum())
        order = torch.cat([(~left).nonzero()[:, 0], left.nonzero()[:, 0]])  # those that the fit uses come first
        self.queries = queries[order]
        self.sinks = None if sinks is None else sinks.repeat_interleave(len(queries) // len(sinks))[order, None]
        self.error_before = self.error_after = math.nan  # on the left-out queries, in units of the outputs' variance

    def _attend(self) -> tuple[Tensor, Tensor]:
        """Returns outputs of the full cache [n, dv] and the logarithm of its mass [n, 1], some rows at a time. Sets
        mean and most [T]: a token's mean and largest share of the attention of the queries that are fitted to."""
        keys, values, outputs, masses = self.keys.float(), self.values.float(), [], []
        self.mean, self.most = keys.new_zeros(len(keys)), keys.new_zeros(len(keys))
        step = max(1, MOST_NUMBERS // len(keys))
        for at in range(0, len(self.queries), step):
            logits = self._logits(self.queries[at : at + step], keys)
            sinks = [] if self.sinks is None else [self.sinks[at : at + step]]
            mass = torch.cat([logits, *sinks], 1).logsumexp(-1, keepdim=True)
            shares = (logits - mass).exp()
            outputs.append(shares @ values)
            masses.append(mass)
            if at < self.n_fit:
                fitted = shares[: self.n_fit - at]
                self.mean += fitted.sum(0) / self.n_fit
                self.most = torch.maximum(self.most, fitted.amax(0))
        return torch.cat(outputs), torch.cat(masses)

    def _logits(self, queries: Tensor, keys: Tensor) -> Tensor:
        logits = queries @ keys.T
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def fit(self, kept: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns the best keys and values of the slots of the tokens ``kept``; None if the bare ones are best, or if
        the head keeps more than half, has fewer than 4 queries, or has numbers that are not finite."""
        if len(kept) > len(self.keys) // 2 or len(self.queries) < 4:
            return None
        full, mass = self._attend()
        scale = float((full - full.mean(0)).pow(2).mean()) + 1e-30
        keys, values = self.keys[kept], self.values[kept]
        sink = torch.zeros_like(mass) if self.sinks is None else (self.sinks - mass).exp()

        def shares(keys: Tensor, first: int = 0) -> Tensor:
            """Returns the slots' shares of the full mass, [n, t], of the queries from ``first`` on."""
            return (self._logits(self.queries[first:], keys.float()) - mass[first:]).exp()

        def attention(keys: Tensor, first: int = 0) -> Tensor:
            weights = shares(keys, first)
            return weights / (weights.sum(-1, keepdim=True) + sink[first:]).clamp(min=1e-30)

        def error(keys: Tensor, values: Tensor) -> float:
            missing = full[self.n_fit :] - attention(keys, self.n_fit) @ values.float()
            return float(missing.pow(2).mean()) / scale

        self.error_before = self.error_after = error(keys, values)
        if not math.isfinite(self.error_before):
            return None
        best: tuple[Tensor, Tensor] | None = None

        def better(keys: Tensor, values: Tensor) -> bool:
            """Keeps these rows if they are finite and the best so far on the left-out queries."""
            nonlocal best
            left = error(keys, values)
            if not (left < self.error_after and bool(values.isfinite().all() and keys.isfinite().all())):
                return False
            self.error_after, best = left, (keys, values)
            return True

        factor = self._factor()
        if factor is not None and len(kept) > 1:
            for n in (len(kept) * 3 // part for part in (4, 8, 16)):
                start = self._summarise(n, kept, mass, factor) if n else None
                if start is not None:
                    better(*start)
            keys, values = best or (keys, values)
            beta = self._bias(shares(keys), 1 - sink)
            u = torch.cholesky_solve(self.queries[: self.n_fit].double().sum(0)[:, None], factor)[:, 0].float()
            shifted = keys if beta is None else (keys.float() + beta[:, None] * u).to(keys.dtype)
            keys = shifted if better(shifted, values) else keys
        p = attention(keys)[: self.n_fit]
        change = self._change(p, full[: self.n_fit] - p @ values.float())
        if change is not None:
            most = 0.5 * values.float().norm(dim=-1, keepdim=True)
            part = (most / change.norm(dim=-1, keepdim=True).clamp(min=1e-30)).clamp(max=1)
            better(keys, (values.float() + part * change).to(values.dtype))
        return best

    def _factor(self) -> Tensor | None:
        """Returns the lower factor of Q'Q + 0.01 mean I over the queries that are fitted to; None if there is none."""
        queries = self.queries[: self.n_fit]
        square = (queries.T @ queries).double()
        square.diagonal().add_(0.01 * square.diagonal().mean())
        factor, failed = torch.linalg.cholesky_ex(square)
        return None if failed else factor

    def _summarise(self, n: int, kept: Tensor, mass: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns the kept rows with summaries of all other tokens in the n slots that have the least attention; None
        if there are too few different tokens."""
        every = self.keys.float()
        slots = self.most[kept].argsort(stable=True)[:n]
        gone = torch.ones_like(self.most, dtype=torch.bool).index_fill(0, kept, False).index_fill(0, kept[slots], True)
        rows = gone.nonzero()[:, 0]
        part, places = self.mean[rows] + 1e-9, every[rows] @ factor.float()
        apart, belongs, largest = part.new_full((len(rows),), math.inf), torch.zeros_like(rows), part.new_ones(())
        for s in range(n):  # the next centre is the token whose distance, times its attention, is largest
            by = part * apart if s else part
            centre = by.argmax()
            largest = torch.minimum(largest, by[centre])
            distance = (places - places[centre]).square().sum(1)
            belongs = torch.where(distance < apart, s, belongs)
            apart = torch.minimum(apart, distance)
        if not float(largest) > 0:
            return None
        member = torch.nn.functional.one_hot(belongs, n).float()
        average = (member * part[:, None] / (part @ member)).T
        k, v, queries = average @ every[rows], average @ self.values[rows].float(), self.queries[: self.n_fit]
        step = max(1, MOST_NUMBERS // len(rows))
        logs = torch.cat([
            ((self._logits(queries[at : at + step], every[rows]) - m).exp() @ member + 1e-20).log() + m
            for at in range(0, self.n_fit, step)
            for m in [mass[at : min(at + step, self.n_fit)]]
        ])
        if self.softcap is not None:
            logs = self.softcap * torch.atanh((logs / self.softcap).clamp(-0.99, 0.99))
        k = k + torch.cholesky_solve((queries.T @ (logs - queries @ k.T)).double(), factor).T.float()
        keys, values = self.keys[kept], self.values[kept]
        return keys.index_copy(0, slots, k.to(keys.dtype)), values.index_copy(0, slots, v.to(values.dtype))

    def _bias(self, shares: Tensor, target: Tensor) -> Tensor | None:
        """Returns beta [t] by accelerated projected gradient (Beck and Teboulle 2009) from w = 1; None: not finite."""
        a, y = shares[: self.n_fit].double(), target[: self.n_fit, 0].double()
        product = (a.T @ a).mv if a.shape[1] <= len(a) else lambda x: a.T @ (a @ x)
        right, w, norm = a.T @ y, a.new_ones(a.shape[1]), a.new_ones(())
        z = x = w
        for _ in range(20):  # the largest eigenvalue, by power iteration: a has no negative number
            x = product(x / norm)
            norm = x.norm()
        rate = 1 / (1.02 * norm)
        momentum = 1.0
        for _ in range(120):
            to = (z - rate * (product(z) - right)).clamp(min=1e-6)
            following = (1 + math.sqrt(1 + 4 * momentum * momentum)) / 2
            z, w = to + (momentum - 1) / following * (to - w), to
            momentum = following
        beta = w.log().clamp(-3, 3).float()
        return beta if bool(beta.isfinite().all()) else None

    def _change(self, p: Tensor, missing: Tensor) -> Tensor | None:
        """Returns (P'P + 0.03 mean I)^-1 P' missing = P' (P P' + 0.03 mean I)^-1 missing, by the smaller matrix."""
        n, t = p.shape
        gram, right = (p.T @ p, p.T @ missing) if t <= n else (p @ p.T, missing)
        square = gram.double()
        square.diagonal().add_(RIDGE * square.trace() / t)
        factor, failed = torch.linalg.cholesky_ex(square)
        if failed:
            return None
        solved = torch.cholesky_solve(right.double(), factor).float()
        return solved if t <= n else p.T @ solved
