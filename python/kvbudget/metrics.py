"""Eviction metrics in torch: keydiff, knorm, snapkv, morphkv, lagkv and expected attention, in the variants of
`kvbudget help metrics`; scorers.py tells which one a name, a table or a press means.

They give what kvpress's presses give for the ``:kvpress`` variants, and what the C scorers give for all of them. A
metric looks at one sequence at a time, so that padded rows and cut caches need no masks; what it needs of the queries
is gathered while the model runs (:class:`Seen`), in chunks if need be, in memory that does not grow with the context.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ._library import KVBudgetError
from .attention import attention_weights
from .models import AttentionLayer


@dataclass
class Seen:
    """What one layer has seen of one sequence's queries."""

    padding: int = 0  # positions before the sequence's first token
    n_tokens: int = 0  # of the sequence so far
    tail: Tensor | None = None  # [Hq, up to W, d] the last queries, as in Step
    count: int = 0  # queries in the moments below
    mean: Tensor | None = None  # [Hq, d], before rotation
    square: Tensor | None = None  # [Hq, d, d], sums of products of what deviates from the mean
    step: "Step | None" = None  # all tokens, for scorers that want them at once
    parts: list["Seen"] = field(default_factory=list)  # what each feature of a learned ranking has seen
    references: Any = None  # refit.References, until the cache is cut

    def crop(self, n: int) -> None:
        """Removes the tokens from the n-th on. What they added to the moments stays."""
        if n < self.n_tokens and self.tail is not None:
            self.tail = self.tail[:, : max(self.tail.shape[1] - (self.n_tokens - n), 0)]
        self.n_tokens = min(n, self.n_tokens)
        if self.references is not None:
            self.references = self.references.before(self.n_tokens)
        for part in self.parts:
            part.crop(n)

    def skip(self, n: int) -> None:
        """Continues at the n-th token. If tokens before it were not watched, the tail is dropped: it has no gaps."""
        if n != self.n_tokens:
            self.n_tokens, self.tail = n, None
        for part in self.parts:
            part.skip(n)

    def copy(self) -> "Seen":
        """Returns a copy for a sequence that goes on by itself; it shares tensors, which are never changed in place."""
        return replace(self, parts=[part.copy() for part in self.parts])


@dataclass(frozen=True)
class Step:
    """The next n tokens of one sequence, as an attention layer saw them."""

    query: Tensor  # [Hq, n, d], after rotation, in such units that q . k / sqrt(d) is the logit
    hidden: Tensor  # [n, D], the attention module's input
    rope: tuple[Tensor, Tensor] | None = None  # the cosines and sines [n, ...] of the rotation


def in_units(query: Tensor, scaling: float | None) -> Tensor:
    """Scales queries so that their logits q . k ``scaling`` become q . k / sqrt(d), which None stands for, too."""
    scale = 1.0 if scaling is None else scaling * math.sqrt(query.shape[-1])
    return query if math.isclose(scale, 1.0, rel_tol=1e-6) else query * scale


@dataclass(frozen=True)
class Metric:
    """A metric with its parameters. ``score`` is its formula; higher = keep."""

    name: str
    parameters: Mapping[str, Any]
    protect_sink: int
    protect_window: int
    constant: float = 0.0  # of the variant, from the program's row
    needs_hidden: ClassVar[bool] = False  # whether it reads an attention module's input
    whole: ClassVar[bool] = False  # whether it scores only whole contexts, watched in one pass

    @property
    def needs_queries(self) -> bool:
        """Whether it must observe queries before it can score."""
        return False

    @property
    def tail(self) -> int:
        """How many of the last queries vote."""
        return 0

    @property
    def least(self) -> int:
        """Contexts must be longer than this."""
        return 0

    @property
    def once(self) -> str:
        """Why a cache can be cut by it only once; empty if it can be cut again."""
        return ""

    def observe(self, seen: Seen, layer: AttentionLayer, step: Step) -> None:
        """Observes the next tokens of a sequence, before it scores."""
        if self.tail:
            old = [seen.tail.to(step.query)] if seen.tail is not None else []
            seen.tail = torch.cat([*old, step.query], 1)[:, -self.tail :].clone()
        seen.n_tokens += step.query.shape[1]

    def score(
        self, layer: AttentionLayer, keys: Tensor, values: Tensor, seen: Seen, places: Tensor, heads: slice
    ) -> Tensor:
        """Returns [G, T] for keys [G, T, d], values [G, T, dv] of KV heads ``heads``, at positions ``places`` [T]."""
        raise NotImplementedError


class KeyDiff(Metric):
    """-cos(k, anchor): keys that point away from the others are worth keeping (arXiv 2504.15364)."""

    def score(
        self, layer: AttentionLayer, keys: Tensor, values: Tensor, seen: Seen, places: Tensor, heads: slice
    ) -> Tensor:
        kind, by = self.parameters["anchor"], self.parameters["similarity"]
        if kind == "mean":
            anchor = F.normalize(keys, p=2, dim=-1).mean(1, keepdim=True)
        elif kind == "raw":
            anchor = keys.mean(1, keepdim=True)
        else:
            low, high = (keys.sort(1).values[:, i] for i in ((keys.shape[1] - 1) // 2, keys.shape[1] // 2))
            anchor = ((low + high) / 2)[:, None]
        if by == "cos":
            return -F.cosine_similarity(keys, anchor, dim=-1)
        return -(keys * anchor).sum(-1) if by == "dot" else (keys - anchor).norm(dim=-1)


class KNorm(Metric):
    """-||k||: keys of small norm attract attention (arXiv 2406.11430)."""

    def score(
        self, layer: AttentionLayer, keys: Tensor, values: Tensor, seen: Seen, places: Tensor, heads: slice
    ) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.promote_types(keys.dtype, torch.float32))
        return -norms


class Voted(Metric):
    """Ranks tokens by the attention of the last W queries, whose own tokens get the highest score of the layer."""

    @property
    def needs_queries(self) -> bool:
        return True

    @property
    def tail(self) -> int:
        return int(self.parameters["window"])

    @property
    def least(self) -> int:
        return self.tail

    @property
    def above(self) -> float:
        """By how much the score of the window's own tokens exceeds the highest vote."""
        return 1.0

    def score(
        self, layer: AttentionLayer, keys: Tensor, values: Tensor, seen: Seen, places: Tensor, heads: slice
    ) -> Tensor:
        window = self.tail
        if seen.n_tokens <= window or seen.tail is None:
            raise KVBudgetError(
                f"{layer.name}: {self.name} ranks by the last {window} queries, the context has {seen.n_tokens} "
                "tokens; use longer contexts or a smaller window"
            )
        q = _group(seen.tail, layer, heads)  # [G, group, W, d]
        logits = q @ keys[:, None].transpose(2, 3) / math.sqrt(keys.shape[-1])
        at = torch.arange(seen.n_tokens - q.shape[2], seen.n_tokens, device=places.device)
        sinks = (
            None if layer.sinks is None else _group(layer.sinks, layer, heads)[..., None].expand(q.shape[:-1])
        )
        votes = attention_weights(logits, places <= at[:, None], layer.softcap, sinks).to(keys.dtype)
        old = int((places < seen.n_tokens - window).sum())
        joined = self.join(votes[..., :old])
        top = float(joined.max()) if old else 0.0
        return F.pad(joined, (0, places.shape[0] - old), value=top + self.above)

    def join(self, votes: Tensor) -> Tensor:
        """Joins the attention [G, group, W, T] of the last queries into votes [G, T]."""
        raise NotImplementedError


class MorphKV(Voted):
    """The last queries' attention, summed over the group and joined over the queries (arXiv 2503.00979)."""

    def join(self, votes: Tensor) -> Tensor:
        rows = votes.sum(1)
        return rows.amax(1) if self.parameters["fusion"] == "max" else rows.sum(1)


class SnapKV(Voted):
    """The last queries' attention, pooled over positions (arXiv 2404.14469)."""

    @property
    def above(self) -> float:
        return self.constant

    def join(self, votes: Tensor) -> Tensor:
        votes = votes.mean(-2)
        if self.parameters["group_first"]:
            return self._pool(self._reduce(votes)[:, None])[:, 0]
        return self._reduce(self._pool(votes))

    def _reduce(self, votes: Tensor) -> Tensor:
        return votes.amax(1) if self.parameters["group_max"] else votes.mean(1)

    def _pool(self, votes: Tensor) -> Tensor:
        kernel = int(self.parameters["kernel"])
        pool = F.max_pool1d if self.parameters["max_pool"] else F.avg_pool1d
        return pool(votes, kernel, 1, kernel // 2) if votes.shape[-1] else votes


class TOVA(Voted):
    """The last query's attention, the mean over all heads of the layer or over the group (arXiv 2401.06104)."""

    @property
    def tail(self) -> int:
        return 1

    @property
    def once(self) -> str:
        if self.parameters["scope"] == "group":
            return ""
        return "is a mean over the layer's heads, which once cut hold different tokens; take tova:scope=group"

    def join(self, votes: Tensor) -> Tensor:
        rows = votes[:, :, 0].mean(1)
        return rows.mean(0, keepdim=True).expand_as(rows) if self.parameters["scope"] == "layer" else rows


class ExpectedAttention(Metric):
    """The attention that future queries will pay, if they are Gaussian like the past ones (arXiv 2510.00636).

    With epsilon, tokens of equal value score almost the same, and rounding decides which of them is evicted. So
    operations and their order are kvpress's: for one prefill both give the same bits, and evict the same tokens.
    """

    needs_hidden: ClassVar[bool] = True

    @property
    def needs_queries(self) -> bool:
        return True

    @property
    def least(self) -> int:
        return int(self.parameters["sinks"])

    def observe(self, seen: Seen, layer: AttentionLayer, step: Step) -> None:
        skip = max(0, self.least - seen.n_tokens)  # the queries of sinks are outliers
        if step.hidden.shape[0] > skip:
            self._add_moments(seen, layer.queries(step.hidden[None, skip:])[0])
        super().observe(seen, layer, step)

    def _add_moments(self, seen: Seen, q: Tensor) -> None:
        n, mean = q.shape[1], q.mean(1)
        centred = q - mean[:, None]
        square = centred.transpose(1, 2) @ centred if self.parameters["covariance"] else None
        if seen.mean is not None:  # Chan's rule for joining the moments of two samples
            off, total = mean - seen.mean, seen.count + n
            if square is not None and seen.square is not None:
                square = seen.square + square + off[:, :, None] * off[:, None] * (seen.count * n / total)
            mean = seen.mean + off * (n / total)
        seen.count, seen.mean, seen.square = seen.count + n, mean, square

    def score(
        self, layer: AttentionLayer, keys: Tensor, values: Tensor, seen: Seen, places: Tensor, heads: slice
    ) -> Tensor:
        p, d = self.parameters, keys.shape[-1]
        if seen.mean is None:
            raise KVBudgetError(
                f"{layer.name}: {self.name} needs more than its {self.least} sinks, the context has "
                f"{seen.n_tokens} tokens"
            )
        scale = layer.query_scale
        mean, cov = seen.mean * scale, None if seen.square is None else seen.square / seen.count * scale**2
        turn = layer.mean_rotation(seen.n_tokens, int(p["future"]), keys)
        if turn is not None:
            mean = mean @ turn.T
            cov = None if cov is None else turn @ (cov @ turn.T)
        mean = _group(mean, layer, heads)  # [G, group, d]
        n_kv, group = mean.shape[:2]
        first = 0 if p["sinks_in_softmax"] else int((places < self.least).sum())
        k = keys[:, first:].repeat_interleave(group, 0).transpose(1, 2)  # [G * group, d, T]
        logits = (mean.reshape(-1, 1, d) @ k).squeeze(1) / math.sqrt(d)
        if cov is not None:
            cov = _group(cov, layer, heads).reshape(-1, d, d)
            logits = logits + torch.einsum("hin,hij,hjn->hn", k, cov, k) / d / 2
        weights = logits.softmax(-1).view(n_kv, group, -1).mean(1)
        if p["value_norm"]:
            weights = (weights + p["epsilon"]) * values[:, first:].norm(dim=-1)
        return F.pad(weights, (first, 0), value=float(weights.max()) + 1 if first else 0.0)


class LagKV(Metric):
    """How much tokens stand out against the partition that follows theirs (arXiv 2504.04704)."""

    @property
    def least(self) -> int:
        return int(self.parameters["sink"]) + 2 * int(self.parameters["lag"]) - 1

    def score(
        self, layer: AttentionLayer, keys: Tensor, values: Tensor, seen: Seen, places: Tensor, heads: slice
    ) -> Tensor:
        p, total = self.parameters, keys.shape[1]
        sink, lag, weight = int(p["sink"]), int(p["lag"]), float(p["lambda"])
        judged = max((total - sink) // lag - 1, 0)  # partitions that another one follows
        own = 1 / (1 + weight) if self.constant else 1.0  # the mean of the two, or their sum
        if p["mode"] == "l2norm":
            found = -self._partitions(keys, judged).norm(dim=-1)
        else:
            found = own * (self._spread(keys, judged) + weight * self._spread(values, judged))
        if not p["cross"]:  # of equal scores the later one ranks lower
            order = found.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
            found = (lag - 1 - order).to(found.dtype) / lag
        rest = total - sink - judged * lag
        return F.pad(found.flatten(1), (sink, rest), value=own * (1 + weight))

    def _partitions(self, states: Tensor, n: int, first: int = 0) -> Tensor:
        """Returns n partitions, from ``first`` on, as [G, n, lag, d]."""
        lag = int(self.parameters["lag"])
        start = int(self.parameters["sink"]) + first * lag
        return states[:, start : start + n * lag].reshape(states.shape[0], n, lag, states.shape[-1]).float()

    def _spread(self, states: Tensor, n: int) -> Tensor:
        """Returns [G, n, lag]: in each of n partitions, the softmax over tokens of the deviation of a token's channels,
        each in units of its range in the next partition (with mode=local, in the same one)."""
        of, by = self._partitions(states, n), self._partitions(
            states, n, 0 if self.parameters["mode"] == "local" else 1
        )
        low, high = by.amin(2, keepdim=True), by.amax(2, keepdim=True)
        width = high - low
        turned = (of - low) * torch.where(width > 0, 1 / width, 0)
        return turned.std(-1).softmax(-1)


def _group(x: Tensor, layer: AttentionLayer, heads: slice) -> Tensor:
    """Reshapes [Hq, ...] to [G, group, ...], and returns the KV heads ``heads``."""
    return x.view(layer.n_kv_heads, x.shape[0] // layer.n_kv_heads, *x.shape[1:])[heads]
