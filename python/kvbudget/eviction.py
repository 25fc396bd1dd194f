"""Evicting in transformers for real: each layer is cut as soon as its prefill is done."""

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from . import metrics, scorers
from ._library import KVBudgetError
from .hooks import attached, padding_of
from .models import AttentionLayer, attention_layers, check_model, has_window
from .ragged import RaggedLayer
from .report import Report, State, cache_bytes
from .selection import reselect, select
from .table import Table


class Run:
    """What :func:`compress` yields: explicit cuts, and the report."""

    def __init__(
        self,
        model: nn.Module,
        table: Table,
        ratio: float,
        metric: metrics.Metric,
        *,
        when: str,
        slack: int,
        recut_every: int | None,
        recut_cap: int | None,
        track: bool,
        kernel: str,
        options: dict[str, Any],
    ):
        self.model, self.table, self.ratio, self.metric = model, table, ratio, metric
        self.layers = attention_layers(model)
        self._when, self._slack, self._kernel, self._options = when, slack, kernel, options
        self._recut_every, self._recut_cap = recut_every, recut_cap
        self._track = (track or recut_every is not None) and metric.needs_queries
        self._states: weakref.WeakKeyDictionary[Cache, State] = weakref.WeakKeyDictionary()
        self._latest: weakref.ref[Cache] | None = None
        self._last = State()
        # By layer, between attention and the end of its module: queries and mask.
        self._seen: dict[int, tuple[Tensor, Tensor | None]] = {}

    # ---- For the user ----

    def cut(self, cache: Cache) -> None:
        """Cuts all layers of a cache that was prefilled inside of the block, in as many chunks as you like
        (``when="call"``)."""
        state = self._states.get(cache)
        if state is None:
            raise KVBudgetError("cut: this cache was not filled inside of the block, so its queries were not seen")
        for layer in self.layers:
            if isinstance(cache.layers[layer.index], DynamicLayer) and layer.index in state.observed:
                self._cut(cache, layer, state)

    def recut(self, cache: Cache, cap: int | None = None) -> None:
        """Evicts again from a cut cache that has grown: to what the table gives for all tokens that it has seen, or,
        with ``cap``, for so many, so that the cache no longer grows. Tokens that are gone stay gone."""
        for layer in self.layers:
            ragged = cache.layers[layer.index]
            if isinstance(ragged, RaggedLayer):
                self._recut(ragged, layer, cap)

    def report(self) -> Report:
        """What became of the cache that was cut last."""
        state, cache = self._last, self._latest() if self._latest else None
        now = sum(state.bytes_now.values()) if cache is None else cache_bytes(cache, sorted(state.cut))
        return state.report(self.ratio, now)

    # ---- Hooks ----

    def _watch(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        *_: Any,
    ) -> None:
        self._seen[layer.index] = (metrics.in_units(query, scaling), mask)

    def _after(self, layer: AttentionLayer, _: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], __: Any) -> None:
        """After one attention module: observe, and cut its layer if this was a prefill."""
        given = [*args, *kwargs.values()]
        cache = next((x for x in given if isinstance(x, Cache)), None)
        seen = self._seen.pop(layer.index, None)
        if cache is None or self.ratio <= 0:
            return
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        place = self._place(cache, layer)
        if place is None:
            return
        if seen is None:
            raise KVBudgetError(
                f"{layer.name}: does not compute attention through transformers' attention interface, so it cannot "
                "use a cut cache",
                "UNSUPPORTED",
            )
        n_tokens = place.seen if isinstance(place, RaggedLayer) else place.keys.shape[2]
        fresh = n_tokens == hidden.shape[1]
        state = self._begin(cache, layer, seen[1], hidden) if fresh else self._states.get(cache)
        if state is not None:
            self._observe(state, place, layer, seen[0], hidden, kwargs.get("position_embeddings"))
            if fresh and self._when == "prefill":
                self._cut(cache, layer, state)
        if state is not None and layer.index in state.cut:
            state.bytes_now[layer.index] = cache_bytes(cache, [layer.index])
        if self._recut_every and isinstance(place, RaggedLayer) and place.seen - place.cut_at >= self._recut_every:
            self._recut(place, layer, self._recut_cap)

    def _place(self, cache: Cache, layer: AttentionLayer) -> Any:
        """The layer of the cache, or None where there is no budget to keep to."""
        if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
            kind = "an offloaded cache" if getattr(cache, "offloading", False) else type(cache).__name__
            raise KVBudgetError(f"{kind} cannot be cut; use DynamicCache(config=model.config)", "UNSUPPORTED")
        place = cache.layers[layer.index]
        if has_window(layer):
            if type(place) is DynamicLayer and any(not has_window(other) for other in self.layers):
                raise KVBudgetError(
                    f"{layer.name} has a sliding window, but its cache is made for full attention; make the cache with "
                    "DynamicCache(config=model.config)"
                )
            self._leave(cache, layer)
            return None
        if type(place) in (DynamicLayer, RaggedLayer):
            return place
        if getattr(place, "is_sliding", False):
            self._leave(cache, layer)
            return None
        raise KVBudgetError(f"{layer.name}: a {type(place).__name__} cannot be cut; use DynamicCache()", "UNSUPPORTED")

    def _leave(self, cache: Cache, layer: AttentionLayer) -> None:
        state = self._states.setdefault(cache, State())
        state.left.add(layer.index)
        if len(state.left) == len(self.layers):
            raise KVBudgetError(
                f"every layer of {type(self.model).__name__} has a sliding window (config.sliding_window = "
                f"{getattr(layer.config, 'sliding_window', None)}), so there is nothing to cut; set it to None if the "
                "contexts are shorter than the window",
                "UNSUPPORTED",
            )

    # ---- Cutting ----

    def _begin(self, cache: Cache, layer: AttentionLayer, mask: Tensor | None, hidden: Tensor) -> State:
        """A prefill of a fresh cache: how long is each sequence?"""
        state = self._states.setdefault(cache, State())
        n = hidden.shape[1]
        padding = padding_of(mask, hidden.shape[0], n)
        if self._when == "call" and any(padding):
            raise KVBudgetError(
                "padded batches cannot be prefilled in chunks; give sequences one by one", "UNSUPPORTED"
            )
        state.observed[layer.index] = [metrics.Seen(padding=p) for p in padding]
        self._latest, self._last = weakref.ref(cache), state
        return state

    def _observe(
        self, state: State, place: Any, layer: AttentionLayer, query: Tensor, hidden: Tensor, rope: Any
    ) -> None:
        cut = isinstance(place, RaggedLayer)
        if cut and not self._track:
            return
        n = hidden.shape[1]
        for b, seen in enumerate(place.observed if cut else state.observed.get(layer.index, [])):
            skip = seen.padding if seen.n_tokens == 0 else 0
            turned = None
            if rope is not None:
                turned = tuple(x[min(b, x.shape[0] - 1), skip:] if x.dim() == 3 else x[skip:] for x in rope)
            if skip < n:
                self.metric.observe(seen, layer, metrics.Step(query[b, :, skip:], hidden[b, skip:], turned))

    def _protected(self, n: int) -> bool:
        """Is every token of a context so short protected, or can the metric not rank it?"""
        return n <= max(self.table.info.sink + self.table.info.window, self.metric.least)

    def _keep(self, state: State, n: int) -> Any:
        if n not in state.keep:
            budgets = self.table.budgets(self.ratio, n, **self._options)
            state.keep[n] = budgets.keep
            state.warnings.update(dict.fromkeys(budgets.warnings))
        return state.keep[n]

    def _cut(self, cache: Cache, layer: AttentionLayer, state: State) -> None:
        full: Any = cache.layers[layer.index]
        keys, values, seen = full.keys, full.values, state.observed.pop(layer.index)
        n_heads, total = keys.shape[1], keys.shape[2]
        state.tokens = tuple(total - s.padding for s in seen)
        for n in filter(self._protected, state.tokens):
            said = f"a context of {n} tokens is no longer than what is protected or {self.metric.name} needs"
            state.warnings[f"{said}, so nothing was evicted"] = None
        if all(map(self._protected, state.tokens)):
            if not state.short:
                warnings.warn(f"kvbudget: {next(reversed(state.warnings))}", stacklevel=2)
            state.short = True
            return
        kept: list[Tensor] = []
        for b, s in enumerate(seen):
            kept += self._choose(layer, keys[b, :, s.padding :], values[b, :, s.padding :], s, state)
        self._put(cache, layer, kept, seen)  # the full layer is freed here: the peak is one layer, not all
        n_kept = sum(map(len, kept))
        bytes_per_row = keys.element_size() * (keys.shape[-1] + values.shape[-1])
        state.cut.add(layer.index)
        state.bytes_full += keys.shape[0] * n_heads * total * bytes_per_row
        state.bytes_promised += n_kept * bytes_per_row
        state.bytes_with_slack += (n_kept + len(kept) * self._slack) * bytes_per_row
        state.kept += n_kept
        state.of += n_heads * sum(state.tokens)
        if state.left:
            said = f"{len(state.left)} of {len(self.layers)} layers have a sliding window and were left alone"
            state.warnings[said] = None

    def _put(self, cache: Cache, layer: AttentionLayer, kept: list[Tensor], seen: list[metrics.Seen]) -> None:
        full: Any = cache.layers[layer.index]
        new = RaggedLayer(full.keys, full.values, kept, self._slack, self._kernel)
        new.observed = seen if self._track else []
        cache.layers[layer.index] = new

    def _choose(
        self, layer: AttentionLayer, keys: Tensor, values: Tensor, seen: metrics.Seen, state: State
    ) -> list[Tensor]:
        """Positions, padding counted, that each head of one sequence keeps; keys [G, n, d] without padding."""
        n_heads, n, _ = keys.shape
        everything = torch.arange(n) + seen.padding
        if self._protected(n):
            return [everything] * n_heads
        keep = self._keep(state, n)[layer.index]
        places = torch.arange(n, device=keys.device)
        scores = self.metric.score(layer, keys, values, seen, places, slice(0, n_heads)).float().cpu().numpy()
        info = self.table.info
        chosen = (select(scores[h], int(keep[h]), info.sink, info.window) for h in range(n_heads))
        return [torch.from_numpy(p.astype("int64")) + seen.padding for p in chosen]

    def _recut(self, ragged: RaggedLayer, layer: AttentionLayer, cap: int | None) -> None:
        if self.metric.needs_queries and not ragged.observed:
            raise KVBudgetError(
                f"recut: {self.metric.name} ranks by queries, which were not watched; give compress(..., track=True)"
            )
        seen = ragged.observed or [metrics.Seen() for _ in range(ragged.n_sequences)]
        ragged.recut(partial(self._choose_again, ragged, layer, seen, cap))

    def _choose_again(
        self, ragged: RaggedLayer, layer: AttentionLayer, all_seen: list[metrics.Seen], cap: int | None, s: int
    ) -> Tensor:
        """Which rows of segment s stay."""
        b, h = divmod(s, ragged.n_heads)
        keys, values, places = ragged.segment(s)
        places = places - all_seen[b].padding
        n = ragged.seen - all_seen[b].padding
        keep = min(int(self._keep(self._last, cap or n)[layer.index, h]), len(places))
        if keep == len(places) or self._protected(n):
            return torch.arange(len(places))
        seen = all_seen[b]
        seen.n_tokens = n
        scores = self.metric.score(layer, keys[None], values[None], seen, places, slice(h, h + 1))[0]
        info = self.table.info
        rows = reselect(scores.float().cpu().numpy(), places.cpu().numpy(), n, keep, info.sink, info.window)
        return torch.from_numpy(rows.astype("int64"))

    def _finish(self) -> None:
        """A block that cut nothing is an error, not a slow way to do nothing."""
        if self.ratio <= 0 or self._last.cut or self._last.short:
            return
        raise KVBudgetError(
            "nothing was cut inside of the block: expected a forward pass over a fresh DynamicCache (a cache that held "
            'tokens before cannot be cut; with when="call", call run.cut(cache))'
        )


@contextlib.contextmanager
def compress(
    model: nn.Module,
    table: Table | str,
    ratio: float,
    *,
    scorer: Any = None,
    when: Literal["prefill", "call"] = "prefill",
    recut_every: int | None = None,
    recut_cap: int | None = None,
    track: bool = False,
    slack: int | None = None,
    kernel: Literal["auto", "segments", "flex", "varlen"] = "auto",
    **options: Any,
) -> Iterator[Run]:
    """Inside of the block every fresh cache that the model fills is cut to the table's budgets, layer by layer.

    model        a decoder of transformers with sdpa or eager attention
    table        a :class:`Table` or its path; it must be for this model's shape
    ratio        the share of all cached tokens that goes, below 1; 0 leaves everything as it is
    scorer       what ranks tokens: by default the table's own metric; or a ScorerPress of kvpress, or a pair
                 (name, press), whose name must be the table's metric
    when         "prefill": the first pass over a fresh cache is the whole context, and is cut; "call": cut only in
                 run.cut(cache), for prefills in chunks
    recut_every  evict again after so many new tokens; recut_cap: to what the table gives for so many tokens in all
    track        go on watching queries, so that run.recut(cache) can be called (recut_every does)
    slack        free rows per head after a cut: 32, or recut_every; more slack, fewer copies and more memory
    kernel       how attention over a cut cache is computed (attention.py)
    options      of :meth:`Table.keep`: rounding, lookup, strict, block

    A cut cache can be decoded after the block too: the model keeps the attention implementation "kvbudget", which is
    the one that it had for all caches that are not cut. Raises :class:`KVBudgetError` rather than doing nothing.
    """
    run = prepare(
        Run,
        model,
        table,
        ratio,
        scorer=scorer,
        when=when,
        recut_every=recut_every,
        recut_cap=recut_cap,
        track=track,
        slack=slack,
        kernel=kernel,
        **options,
    )
    with attached(run.layers, run._watch, run._after):
        yield run
    run._finish()


def prepare(
    kind: type[Run],
    model: nn.Module,
    table: Table | str,
    ratio: float,
    *,
    scorer: Any = None,
    when: str = "prefill",
    recut_every: int | None = None,
    recut_cap: int | None = None,
    track: bool = False,
    slack: int | None = None,
    kernel: str = "auto",
    **options: Any,
) -> Run:
    """A run of the given kind, once everything that can be wrong has been looked at."""
    table = table if isinstance(table, Table) else Table(table)
    check_model(model)
    table.check(model.config)
    metric = scorers.of_table(table) if scorer is None else scorers.of_press(scorer)
    table.check(metric=metric.name)
    table.keep(ratio, 1, **options)  # a wrong ratio or option is refused here, not in the middle of a prefill
    for name, value, known in (
        ("when", when, ("prefill", "call")),
        ("kernel", kernel, ("auto", "segments", "flex", "varlen")),
    ):
        if value not in known:
            raise KVBudgetError(f"{name}: expected one of {', '.join(known)}, found {value!r}")
    slack = (recut_every or 32) if slack is None else slack
    if slack < 0 or (recut_every is not None and recut_every < 1):
        raise KVBudgetError("slack and recut_every: expected counts of at least 0 and 1")
    if getattr(getattr(model, "generation_config", None), "prefill_chunk_size", None) and when == "prefill":
        raise KVBudgetError(
            'generation_config.prefill_chunk_size is set: only the first chunk would be cut; use when="call"'
        )
    return kind(
        model,
        table,
        ratio,
        metric,
        when=when,
        slack=slack,
        recut_every=recut_every,
        recut_cap=recut_cap,
        track=track,
        kernel=kernel,
        options=options,
    )
