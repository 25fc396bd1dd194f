"""Eviction metrics in torch: keydiff, knorm, snapkv and expected attention, in the variants of `kvbudget help metrics`.

They give what kvpress's presses give for the ``:kvpress`` variants, and what the C scorers give for all of them. A
metric looks at one sequence at a time, so that padded rows and cut caches need no masks; what it must know of queries
is gathered while the model runs (:class:`Seen`), by chunks if need be, in memory that does not grow with the context.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
    tail: Tensor | None = None  # [Hq, up to W, d] the last queries, as they attend
    count: int = 0  # queries in the moments below
    mean: Tensor | None = None  # [Hq, d], before rotation
    square: Tensor | None = None  # [Hq, d, d], sums of products of what deviates from the mean
    step: "Step | None" = None  # all tokens, for scorers that want them at once

    def forget(self, n: int) -> None:
        """The last n tokens were taken back. Their part in the moments stays."""
        self.n_tokens -= n
        self.tail = None if self.tail is None else self.tail[:, : self.tail.shape[1] - n]


@dataclass(frozen=True)
class Step:
    """The next n tokens of one sequence, as an attention layer saw them."""

    query: Tensor  # [Hq, n, d], as it attends
    hidden: Tensor  # [n, D], as it went into the layer
    rope: tuple[Tensor, Tensor] | None = None  # the cosines and sines [n, ...] that it was turned by


@dataclass(frozen=True)
class Metric:
    """A metric with its parameters. ``score`` is its formula; higher = keep."""

    name: str
    parameters: Mapping[str, Any]
    protect_sink: int
    protect_window: int

    needs_queries: ClassVar[bool] = False  # cannot score without having observed

    @property
    def tail(self) -> int:
        """How many of the last queries vote."""
        return 0

    @property
    def least(self) -> int:
        """Contexts must be longer than this."""
        return 0

    def observe(self, seen: Seen, layer: AttentionLayer, step: Step) -> None:
        """Takes the next tokens in."""
        if self.tail:
            old = [seen.tail] if seen.tail is not None else []
            seen.tail = torch.cat([*old, step.query], 1)[:, -self.tail :].clone()
        seen.n_tokens += step.query.shape[1]

    def score(
        self, layer: AttentionLayer, keys: Tensor, values: Tensor, seen: Seen, places: Tensor, heads: slice
    ) -> Tensor:
        """[G, T] for keys [G, T, d] and values [G, T, dv] of the KV heads ``heads``, at positions ``places`` [T]."""
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


class SnapKV(Metric):
    """What the last W queries attend to, pooled over positions (arXiv 2404.14469)."""

    needs_queries = True

    @property
    def tail(self) -> int:
        return int(self.parameters["window"])

    @property
    def least(self) -> int:
        return self.tail

    def score(
        self, layer: AttentionLayer, keys: Tensor, values: Tensor, seen: Seen, places: Tensor, heads: slice
    ) -> Tensor:
        n_kv, window = keys.shape[0], self.tail
        if seen.n_tokens <= window or seen.tail is None:
            raise KVBudgetError(
                f"{layer.name}: {self.name} ranks by the last {window} queries, the context has {seen.n_tokens} "
                "tokens; use longer contexts or a smaller window"
            )
        q = _group(seen.tail, layer.config, heads) * layer.query_scale  # [G, group, W, d]
        logits = q @ keys[:, None].transpose(2, 3) / math.sqrt(keys.shape[-1])
        at = torch.arange(seen.n_tokens - q.shape[2], seen.n_tokens, device=places.device)
        sinks = None if layer.sinks is None else _group(layer.sinks, layer.config, heads)[..., None].expand(q.shape[:-1])
        votes = attention_weights(logits, places <= at[:, None], layer.softcap, sinks).to(keys.dtype)
        old = int((places < seen.n_tokens - window).sum())
        votes = votes[..., :old].mean(-2)
        if self.parameters["group_first"]:
            pooled = self._pool(self._reduce(votes)[:, None])[:, 0]
        else:
            pooled = self._reduce(self._pool(votes))
        above = 0.0 if self.name.startswith("snapkv:lukv") else 1.0
        top = float(pooled.max()) if old else 0.0
        return F.pad(pooled, (0, places.shape[0] - old), value=top + above).view(n_kv, -1)

    def _reduce(self, votes: Tensor) -> Tensor:
        return votes.amax(1) if self.parameters["group_max"] else votes.mean(1)

    def _pool(self, votes: Tensor) -> Tensor:
        kernel = int(self.parameters["kernel"])
        pool = F.max_pool1d if self.parameters["max_pool"] else F.avg_pool1d
        return pool(votes, kernel, 1, kernel // 2) if votes.shape[-1] else votes


class ExpectedAttention(Metric):
    """The attention that future queries will pay, if they are Gaussian like the past ones (arXiv 2510.00636)."""

    needs_queries = True

    @property
    def least(self) -> int:
        return int(self.parameters["sinks"])

    def observe(self, seen: Seen, layer: AttentionLayer, step: Step) -> None:
        skip = max(0, self.least - seen.n_tokens)  # sinks have outliers for queries
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
        mean, cov = seen.mean * scale, None if seen.square is None else seen.square * (scale * scale / seen.count)
        turn = layer.mean_rotation(seen.n_tokens, int(p["future"]), keys)
        if turn is not None:
            mean = mean @ turn.T
            cov = None if cov is None else turn @ cov @ turn.T
        mean = _group(mean, layer.config, heads)  # [G, group, d]
        logits = mean @ keys.transpose(1, 2) / math.sqrt(d)
        if cov is not None:
            cov = _group(cov, layer.config, heads)  # [G, group, d, d]
            logits = logits + ((keys[:, None] @ cov) * keys[:, None]).sum(-1) / d / 2
        first = 0 if p["sinks_in_softmax"] else int((places < self.least).sum())
        weights = logits[..., first:].softmax(-1).mean(1)
        if p["value_norm"]:
            weights = (weights + p["epsilon"]) * values[:, first:].norm(dim=-1)
        return F.pad(weights, (first, 0), value=float(weights.max()) + 1 if first else 0.0)


def _group(x: Tensor, config: Any, heads: slice) -> Tensor:
    """[Hq, ...] to [G, group, ...], of the KV heads ``heads``."""
    n_kv = getattr(config, "num_key_value_heads", None) or x.shape[0]
    return x.view(n_kv, x.shape[0] // n_kv, *x.shape[1:])[heads]


@dataclass(frozen=True)
class Press(Metric):
    """A ScorerPress of kvpress; it sees one whole prefill, so neither chunks nor second cuts."""

    press: Any = None

    needs_queries = True

    def observe(self, seen: Seen, layer: AttentionLayer, step: Step) -> None:
        seen.step = step if seen.n_tokens == 0 else None
        super().observe(seen, layer, step)

    def score(
        self, layer: AttentionLayer, keys: Tensor, values: Tensor, seen: Seen, places: Tensor, heads: slice
    ) -> Tensor:
        step = seen.step
        if step is None:
            raise KVBudgetError(f"{layer.name}: {self.name} scores whole contexts only, in one pass", "UNSUPPORTED")
        kwargs: dict[str, Any] = {"hidden_states": step.hidden[None], "past_key_values": None}
        if step.rope is not None:
            kwargs["position_embeddings"] = tuple(x[None] for x in step.rope)
        own = layer.module.__dict__.get("rotary_emb")
        layer.module.__dict__["rotary_emb"] = layer.rotary  # where kvpress's scorers look for it
        try:
            scores: Tensor = self.press.score(layer.module, step.hidden[None], keys[None], values[None], None, kwargs)
        finally:
            if own is None:
                del layer.module.__dict__["rotary_emb"]
        seen.step = None
        return scores[0]


def of_press(scorer: Any) -> Metric:
    """A metric from a ScorerPress of kvpress, or from a pair (name, press). What kvpress and the C program both have
    bears the program's name, so that their tables fit; another press is called ``kvpress:Class:parameter=value``."""
    name, press = scorer if isinstance(scorer, tuple) else (None, scorer)
    if isinstance(press, Metric):
        return press
    kind = type(press).__name__
    if not callable(getattr(press, "score", None)):
        raise KVBudgetError(f"scorer: expected a ScorerPress of kvpress, found {kind}")
    known = _as_known(kind, press)
    if name is None:
        name = known.name if known else ":".join(["kvpress", kind, *_press_parameters(press)])
    if known is not None:
        return Press(name, known.parameters, known.protect_sink, known.protect_window, press)
    window = getattr(press, "window_size", 1)
    return Press(name, {}, 4, window if isinstance(window, int) else 1, press)


def _as_known(kind: str, press: Any) -> Metric | None:
    if kind == "KeyDiffPress":
        return build("keydiff", {})
    if kind == "KnormPress":
        return build("knorm", {})
    if kind == "SnapKVPress":
        return build("snapkv:kvpress", {"window": press.window_size, "kernel": press.kernel_size})
    if kind == "ExpectedAttentionPress":
        given = {"future": press.n_future_positions, "sinks": press.n_sink, "epsilon": press.epsilon}
        flags = {"covariance": int(press.use_covariance), "value_norm": int(press.use_vnorm)}
        return build("ea:kvpress", given | flags)
    return None


def _press_parameters(press: Any) -> list[str]:
    """Numbers that are not the press's defaults; its own ratio is not a parameter of the score."""
    fields = getattr(type(press), "__dataclass_fields__", {})
    return [
        f"{name}={_text(getattr(press, name))}"
        for name, field in fields.items()
        if name != "compression_ratio"
        and isinstance(getattr(press, name, None), (bool, int, float))
        and getattr(press, name) != field.default
    ]


_SNAPKV = ("window", "kernel", "max_pool", "group_first", "group_max")
_EA = ("future", "sinks", "epsilon", "covariance", "value_norm", "sinks_in_softmax", "stored")
#: name: (class, defaults in the order of the C program's names); a protected window of None is the parameter's
_KNOWN: dict[str, tuple[type[Metric], dict[str, Any]]] = {
    "keydiff": (KeyDiff, {"anchor": "mean", "similarity": "cos"}),
    "knorm": (KNorm, {}),
    "snapkv:kvpress": (SnapKV, dict(zip(_SNAPKV, (64, 5, 0, 0, 0)))),
    "snapkv:lukv": (SnapKV, dict(zip(_SNAPKV, (32, 7, 1, 0, 0)))),
    "snapkv:adakv": (SnapKV, dict(zip(_SNAPKV, (32, 7, 1, 1, 0)))),
    "snapkv:factory": (SnapKV, dict(zip(_SNAPKV, (8, 7, 1, 0, 0)))),
    "snapkv:keydiff": (SnapKV, dict(zip(_SNAPKV, (32, 7, 0, 0, 0)))),
    "ea:kvpress": (ExpectedAttention, dict(zip(_EA, (512, 4, 0.02, 1, 1, 0, 0)))),
    "ea:lukv": (ExpectedAttention, dict(zip(_EA, (512, 4, 0.02, 1, 1, 1, 0)))),
}
_CHOICES = {"anchor": ("mean", "raw", "median"), "similarity": ("cos", "dot", "euclid")}


def parse(text: str) -> Metric:
    """A metric from its name, `name[:variant][:parameter=value]...`; a bare one means `:kvpress` where there is one."""
    plain = [part for part in text.split(":") if "=" not in part]
    given = dict(part.split("=", 1) for part in text.split(":") if "=" in part)
    base = ":".join(plain)
    base = base if base in _KNOWN else f"{base}:kvpress"
    if base not in _KNOWN:
        raise KVBudgetError(
            f"metric {text!r} has no scorer in Python; expected one of {', '.join(_KNOWN)}, or a ScorerPress of kvpress"
        )
    defaults = _KNOWN[base][1]
    if not given.keys() <= defaults.keys():
        raise KVBudgetError(f"metric {text!r}: its parameters are {', '.join(defaults) or 'none'}")
    return build(base, {name: _value(base, name, value) for name, value in given.items()})


def build(base: str, given: Mapping[str, Any]) -> Metric:
    """A metric from its plain name and the parameters that are given; its full name has those that are not defaults."""
    kind, defaults = _KNOWN[base]
    values = {name: given.get(name, default) for name, default in defaults.items()}
    if values.get("stored"):
        raise KVBudgetError(f"metric {base}:stored=1 needs stored query statistics, which only the C program has")
    if int(values.get("kernel", 1)) % 2 == 0:
        raise KVBudgetError(f"metric {base}: kernel must be odd, found {values['kernel']}")
    named = "".join(f":{name}={_text(value)}" for name, value in values.items() if value != defaults[name])
    return kind(base + named, values, 4, int(values.get("window", 1)))


def of_table(name: str, parameters: Mapping[str, Any]) -> Metric:
    """The metric that a table is for, with the table's own parameters."""
    base = ":".join(part for part in name.split(":") if "=" not in part)
    if base not in _KNOWN:
        raise KVBudgetError(
            f"the table is for {name}, which has no scorer in Python; give one with scorer=, a ScorerPress of kvpress",
            "UNSUPPORTED",
        )
    return build(base, {k: v for k, v in parameters.items() if k in _KNOWN[base][1]})


def _value(base: str, name: str, text: str) -> Any:
    if name in _CHOICES:
        if text not in _CHOICES[name]:
            raise KVBudgetError(f"metric {base}: {name} expects one of {', '.join(_CHOICES[name])}, found {text!r}")
        return text
    try:
        return float(text) if name == "epsilon" else int(text)
    except ValueError:
        raise KVBudgetError(f"metric {base}: {name} expects a number, found {text!r}") from None


def _text(value: Any) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)
