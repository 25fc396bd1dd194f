"""Evicting in transformers for real: each layer is cut as soon as its part of the prompt is done.

What is known of a cache goes with the cache (report.State), and what a thread is doing with it is kept by thread
(_Call), so any number of threads and caches share one block. Attention itself tells when a layer has seen a whole
prompt: it is cut right there, before guesses that came in the same pass look at it.
"""

import threading
import warnings
import weakref
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from . import metrics, refit, scorers
from ._library import KVBudgetError, count, one_of
from .attention import watched_by
from .hooks import Around, inputs_of, join, not_watched, padding_of
from .models import AttentionLayer, attention_layers, check_model, decoder_of, has_window, only_windows
from .ragged import RaggedLayer, Size
from .report import Report, State
from .selection import reselect, select
from .table import Table

MOST_SLACK = 512  # free rows per head that a recut_every may ask for


class _Call:
    """A call of generate(), or a forward pass by itself, in one thread."""

    def __init__(self, run: "Run | None", model: Any = None, prompt: int | None = None):
        self.run, self.model = run, model
        self.prompt = prompt  # length of a prompt that does not come as a pass by itself: in chunks, or with guesses
        self.cache: Any = None  # a weak reference to the cache that the prompt goes into
        self.end: int | None = None  # the cache is cut when it holds so many tokens

    def end_for(self, cache: Cache, start: int, n: int) -> int | None:
        """Where the prompt ends of which the next n tokens are a part; None where they are none."""
        if self.model is None or (self.cache is not None and self.cache() is not cache):
            return n if start == 0 else None
        if self.cache is None:
            self.cache = weakref.ref(cache)
            end = self.prompt or start + n
            self.end = end if start == 0 or end > start + 1 else None  # a single token is no turn
        return self.end


_CALL: ContextVar[_Call | None] = ContextVar("_CALL", default=None)


class _Module:
    """One attention module while it runs."""

    def __init__(self, call: _Call, layer: AttentionLayer, cache: Any, hidden: Tensor, rope: Any):
        self.call, self.layer, self.cache, self.hidden, self.rope = call, layer, cache, hidden, rope
        self.attended = False
        self.start = 0  # tokens that the layer of the cache held before
        self.end: int | None = None  # where the prompt ends that its tokens are part of


class Run:
    """Inside of the block every cache that the model fills is cut to the table's budgets, layer by layer.

    model        a decoder of transformers with sdpa, eager or flash attention, for which torch's sdpa is taken
    table        a :class:`Table` or its path; it must be for this model's shape
    ratio        the share of all cached tokens that goes, below 1; 0 leaves everything as it is
    scorer       what ranks tokens: by default the table's own metric; or a ScorerPress of kvpress, or a pair
                 (name, press), whose name must be the table's metric
    when         "prefill": prompts are cut, those of generate() in every turn, and the first pass over a fresh cache;
                 "call": nothing is cut but in run.cut(cache), for passes of your own in chunks
    recut_every  evict again after so many new tokens; recut_cap: to what the table gives for so many tokens in all
    track        go on watching queries, so that run.recut(cache) can be called (recut_every does)
    slack        free rows per head after a cut: 32, or recut_every; more slack, fewer copies and more memory
    kernel       how attention over a cut cache is computed (attention.py)
    refit        at the first cut, change the kept keys and values so that attention over them gives what the full
                 cache gave (refit.py); later cuts take rows away and do not refit again
    options      of :meth:`Table.keep`: rounding, lookup, block, and strict, which keeps sinks and window in every head:
                 by default with recut_every, and in all later cuts of a cache

    ``with kvbudget.compress(...) as run`` gives the run itself: explicit cuts, and the report. Threads may share a
    block; what they began in it is cut to its end, also when the block is left before. A cut cache can be decoded after
    the block too: the model keeps the attention implementation "kvbudget", which is the one that it had for all caches
    that are not cut. No gradient passes through a cut cache. Raises :class:`KVBudgetError` rather than doing nothing.
    """

    def __init__(
        self,
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
        refit: bool = False,
        **options: Any,
    ):
        self.model, self.ratio = model, ratio
        self.table = table = table if isinstance(table, Table) else Table(table)
        check_model(model)
        table.check(model.config)
        self.metric = metric = scorers.of_table(table) if scorer is None else scorers.of_press(scorer)
        table.check(metric=metric.name)
        table.keep(ratio, 1, **options)  # a wrong ratio or option is refused here, not in the middle of a prefill
        one_of("when", when, ("prefill", "call"))
        one_of("kernel", kernel, ("auto", "segments", "flex", "varlen"))
        for name, value, least in (("recut_every", recut_every, 1), ("recut_cap", recut_cap, 1), ("slack", slack, 0)):
            if value is not None and count(value, name) < least:
                raise KVBudgetError(f"{name}: expected at least {least}, found {value}")
        if recut_cap is not None and recut_every is None:
            raise KVBudgetError("recut_cap: needs recut_every, or give it to run.recut(cache, cap)")
        if recut_every is not None and metric.once:
            raise KVBudgetError(f"recut_every: {metric.name} {metric.once}")
        self.layers = attention_layers(model)
        self._when, self._kernel, self._options, self._refit = when, kernel, options, refit
        self._slack = min(recut_every or 32, MOST_SLACK) if slack is None else slack
        self._recut_every, self._recut_cap = recut_every, recut_cap
        self._track = (track or recut_every is not None) and metric.needs_queries
        self._last = State()
        self._standing: list[Around] = []  # in the model while the block is open
        self._open = self._has_cut = False
        self._busy: dict[int, int] = {}  # by thread: calls that it is in
        self._lock = threading.Lock()

    # ---- For the user ----

    def cut(self, cache: Cache) -> None:
        """Cuts all layers of a cache that was prefilled inside of the block, in as many chunks as you like
        (``when="call"``)."""
        state: State | None = getattr(cache, "kvb_state", None)
        if state is None:
            raise KVBudgetError("cut: this cache was not filled inside of the block, so its queries were not seen")
        for layer in self.layers:
            if layer.index in state.observed:
                self._cut(cache, layer, state)

    def recut(self, cache: Cache, cap: int | None = None) -> None:
        """Evicts again from a cut cache that has grown: to what the table gives for all tokens that it has seen, or,
        with ``cap``, for so many, so that the cache no longer grows. Tokens that are gone stay gone."""
        if cap is not None and count(cap, "cap") < 1:
            raise KVBudgetError(f"cap: expected at least 1, found {cap}")
        for layer in self.layers:
            ragged = cache.layers[layer.index]
            if isinstance(ragged, RaggedLayer):
                self._recut(ragged, layer, self._state_of(cache, layer, 0), cap)

    def report(self, cache: Cache | None = None) -> Report:
        """What became of a cache, by default the one that was cut last."""
        state: State = self._last if cache is None else getattr(cache, "kvb_state", State())
        return state.report(self.ratio)

    def __enter__(self) -> "Run":
        if self._standing:
            raise KVBudgetError("this block is open already, or another thread is not done with it; make a new one")
        if self.ratio > 0:
            self._standing = join(self.layers, self._attention)
            self._standing.append(Around(decoder_of(self.model), "forward", self._pass))
            for part in self.model.modules():
                if isinstance(part, GenerationMixin):
                    self._standing.append(Around(part, "generate", partial(self._generate, part)))
        self._open, self._has_cut = True, False
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """A block that cut nothing is an error, not a slow way to do nothing."""
        with self._lock:
            self._open, busy = False, bool(self._busy)
        self._leave()
        if kind is None and not busy and not self._has_cut and self.ratio > 0:
            raise KVBudgetError(
                "nothing was cut inside of the block: expected generate(), or a forward pass over a fresh DynamicCache "
                '(with when="call", call run.cut(cache))'
            )

    # ---- What stands in the model's methods ----

    def _leave(self) -> None:
        """The model is as it was, once the block is left and the last call that began in it is done."""
        with self._lock:
            if not self._open and not self._busy:
                for one in self._standing:
                    one.leave()
                self._standing = []

    def _within(self, call: _Call, method: Any, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        with self._lock:
            self._busy[thread] = self._busy.get(thread, 0) + 1
        token = _CALL.set(call)
        try:
            return method(*args, **kwargs)
        finally:
            _CALL.reset(token)
            with self._lock:
                self._busy[thread] -= 1
                if not self._busy[thread]:
                    del self._busy[thread]
            self._leave()

    def _generate(self, model: Any, generate: Any, *args: Any, **kwargs: Any) -> Any:
        outer = _CALL.get()
        if outer is not None and outer.model is model:  # a draft by the model itself: its cache stays whole
            return self._within(_Call(None, model), generate, *args, **kwargs)
        if outer is None and not self._open:
            return generate(*args, **kwargs)
        return self._within(_Call(self, model, self._prompt(model, args, kwargs)), generate, *args, **kwargs)

    def _prompt(self, model: Any, args: Any, kwargs: dict[str, Any]) -> int | None:
        """The prompt's length where generate() does not pass it in one piece and alone. Refuses what cannot be cut."""
        config = args[1] if len(args) > 1 else kwargs.get("generation_config")

        def given(name: str) -> Any:
            found = kwargs.get(name, getattr(config, name, None))
            return getattr(model.generation_config, name, None) if found is None else found

        guessing = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")
        assisted = any(given(name) is not None for name in guessing)
        refused = {
            "use_cache=False": (given("use_cache") is False, "there is no cache to cut"),
            "output_attentions": (given("output_attentions"), "a cut cache has no attention weights of all tokens"),
            'cache_implementation="paged"': (given("cache_implementation") == "paged", "its pages cannot be cut"),
            "guidance_scale": (given("guidance_scale") not in (None, 1), "its second cache would not be cut alike"),
            "recut_every": (assisted and self._recut_every, "guesses of an assistant or a lookup would be counted"),
            'when="call"': (
                self._when == "call" and kwargs.get("past_key_values") is None,
                "cuts in run.cut(cache) alone, which generate() does not call; leave when away",
            ),
        }
        for name, (is_so, why) in refused.items():
            if is_so:
                raise KVBudgetError(f"generate() inside of compress: {name}: {why}", "UNSUPPORTED")
        ids = kwargs.get("inputs_embeds")
        if ids is None:
            ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        return ids.shape[1] if ids is not None and (assisted or given("prefill_chunk_size")) else None

    def _pass(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        call = _CALL.get()
        if call is None and not self._open:
            return forward(*args, **kwargs)
        return self._within(call or _Call(self), forward, *args, **kwargs)

    def _attention(self, layer: AttentionLayer, forward: Any, *args: Any, **kwargs: Any) -> Any:
        call, (cache, hidden, rope) = _CALL.get(), inputs_of(args, kwargs)
        if call is None or call.run is not self or cache is None:
            return forward(*args, **kwargs)
        now = _Module(call, layer, cache, hidden, rope)
        with watched_by(partial(self._attend, now)):
            out = forward(*args, **kwargs)
        if not now.attended:
            raise not_watched(layer)
        return out

    def _attend(
        self,
        now: _Module,
        attend: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        _: Any,
    ) -> Any:
        """The attention of one layer, which is cut where its prompt ends; guesses behind that see the cut layer."""
        now.attended, n, index = True, query.shape[2], now.layer.index
        place = self._place(now.cache, now.layer)
        if place is None:
            return attend(query, key, value, mask)
        ragged = isinstance(place, RaggedLayer)
        now.start = start = (place.seen if ragged else place.keys.shape[2]) - n
        state = self._state_of(now.cache, now.layer, 0 if ragged else start)
        now.end = end = None if self._when == "call" else now.call.end_for(now.cache, start, n)
        if start == 0:
            self._begin(state, now.layer, padding_of(mask, query.shape[0], n), end == n)
        seen = place.observed if ragged else state.observed.get(index)
        if seen is None:  # only hidden, not cut
            return attend(query, key, value, mask)
        guesses = max(start + n - end, 0) if end is not None and start < end else 0
        own, m, guessed = mask, n - guesses, None
        if guesses:
            guessed = place.newest(guesses) if ragged else (place.keys[:, :, end:], place.values[:, :, end:])
            place.crop(-guesses)
            key, value = place.flat() if ragged else (place.keys, place.values)
            own = None if mask is None else mask[:, :, :m, :-guesses]
        out, weights = attend(query[:, :, :m], key, value, own)
        with torch.no_grad():
            self._look(now, state, place, seen, metrics.in_units(query[:, :, :m], scaling))
        if guessed is None:
            return out, weights
        key, value = now.cache.layers[index].update(*guessed)
        if mask is None and not hasattr(key, "kvb_layer"):
            mask = torch.ones(1, 1, n, start + n, dtype=torch.bool, device=query.device).tril(start)
        rest, _ = attend(query[:, :, m:], key, value, None if mask is None else mask[:, :, m:])
        return torch.cat([out, rest], 1), None

    def _look(self, now: _Module, state: State, place: Any, seen: list[metrics.Seen], query: Tensor) -> None:
        """After the attention of n tokens: watches them, and cuts where a prompt ends or enough tokens are new."""
        layer, total = now.layer, now.start + query.shape[2]
        prompt = now.end is not None and now.start < now.end
        if prompt or self._track or (self._when == "call" and layer.index in state.observed):
            self._observe(now, seen, query)
        ragged = isinstance(place, RaggedLayer)
        last = place.cut_at if ragged else state.tried.get(layer.index, total)
        if total == now.end if prompt else self._recut_every and total - last >= self._recut_every:
            if now.start and (self.metric.once if ragged else self.metric.whole):
                said = f"tokens of later turns all stay: {self.metric.name} {self.metric.once}"
                if said not in state.warnings:
                    warnings.warn(f"kvbudget: {said}", stacklevel=2)
                state.warnings[said] = None
            elif ragged:
                self._recut(place, layer, state, self._recut_cap)
            else:
                self._cut(now.cache, layer, state)

    def _place(self, cache: Any, layer: AttentionLayer) -> Any:
        """The layer of the cache, or None where there is no budget to keep to."""
        if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
            kind = "an offloaded cache" if getattr(cache, "offloading", False) else type(cache).__name__
            raise KVBudgetError(f"{kind} cannot be cut; use DynamicCache(config=model.config)", "UNSUPPORTED")
        place = cache.layers[layer.index]
        if not has_window(layer) and type(place) in (DynamicLayer, RaggedLayer):
            return place
        if type(place) is DynamicLayer and not all(map(has_window, self.layers)):
            raise KVBudgetError(
                f"{layer.name} has a sliding window, but its cache is made for full attention; make the cache with "
                "DynamicCache(config=model.config)"
            )
        if not has_window(layer) and not getattr(place, "is_sliding", False):
            raise KVBudgetError(f"{layer.name}: {type(place).__name__} cannot be cut; use DynamicCache()", "UNSUPPORTED")
        state = self._state_of(cache, layer, 0)
        state.left.add(layer.index)
        if len(state.left) == len(self.layers):
            raise only_windows(self.model)
        return None

    # ---- Watching ----

    def _state_of(self, cache: Any, layer: AttentionLayer, held: int) -> State:
        """What is known of a cache; held: tokens that this layer had before, if it is not cut."""
        if getattr(cache, "kvb_state", None) is None:
            if held:
                raise KVBudgetError(
                    f"{layer.name}: the cache held {held} tokens before, whose queries were not seen, so it cannot be "
                    "cut; fill it inside of the block from the start"
                )
            cache.kvb_state = State(self.metric.name)
        state: State = cache.kvb_state
        if state.metric != self.metric.name:
            raise KVBudgetError(f"the cache was watched for {state.metric}, this block ranks by {self.metric.name}")
        return state

    def _begin(self, state: State, layer: AttentionLayer, padding: list[int], whole: bool) -> None:
        """The first pass over a fresh cache, of a whole prompt or of its first chunk."""
        if not whole and any(padding):
            raise KVBudgetError(
                "padded batches cannot be prefilled in chunks; give sequences one by one", "UNSUPPORTED"
            )
        state.observed[layer.index] = [metrics.Seen(padding=p) for p in padding]

    def _observe(self, now: _Module, all_seen: list[metrics.Seen], query: Tensor) -> None:
        start, n = now.start, query.shape[2]
        for b, seen in enumerate(all_seen):
            skip = min(max(seen.padding - start, 0), n)
            turned = None
            if now.rope is not None:
                turned = tuple(x[min(b, x.shape[0] - 1), skip:n] if x.dim() == 3 else x[skip:n] for x in now.rope)
            if skip < n:
                seen.skip(start + skip - seen.padding)
                step = metrics.Step(query[b, :, skip:], now.hidden[b, skip:n], turned)
                if self._refit and not isinstance(now.cache.layers[now.layer.index], RaggedLayer):
                    seen.references = refit.gather(seen.references, now.layer, step, seen.n_tokens)
                self.metric.observe(seen, now.layer, step)

    # ---- Cutting ----

    def _protected(self, n: int) -> bool:
        """Is every token of a context so short protected, or can the metric not rank it?"""
        return n <= max(self.table.info.sink + self.table.info.window, self.metric.least)

    def _begin_cut(self, state: State, seen: list[metrics.Seen], total: int, cap: int | None, again: bool) -> None:
        """Every layer says which cut it is of; the first one of another cut than before starts a new report."""
        tokens = tuple(total - s.padding for s in seen)
        self._last, self._has_cut = state, True
        if state.cut != (tokens, cap, again):
            state.cut, state.tokens = (tokens, cap, again), tokens
            state.keep.clear()
            state.warnings.clear()

    def _keep(self, state: State, n: int) -> Any:
        if n not in state.keep:
            strict = {"strict": True} if state.cut[2] or self._recut_every else {}
            budgets = self.table.budgets(self.ratio, n, **(strict | self._options))
            state.keep[n] = budgets.keep
            state.warnings.update(dict.fromkeys(budgets.warnings))
        return state.keep[n]

    def _cut(self, cache: Cache, layer: AttentionLayer, state: State) -> None:
        full: Any = cache.layers[layer.index]
        keys, values, seen = full.keys, full.values, state.observed[layer.index]
        tried, total = layer.index in state.tried, keys.shape[2]
        self._begin_cut(state, seen, total, None, tried)
        for n in filter(self._protected, state.tokens):
            said = f"a context of {n} tokens is no longer than what is protected or {self.metric.name} needs"
            state.warnings[f"{said}, so nothing was evicted"] = None
        if all(map(self._protected, state.tokens)):
            if not state.tried:
                warnings.warn(f"kvbudget: {next(reversed(state.warnings))}", stacklevel=2)
            state.tried[layer.index] = total
            return
        kept: list[Tensor] = []
        for b, s in enumerate(seen):
            kept += self._choose(layer, keys[b, :, s.padding :], values[b, :, s.padding :], s, state)
        del state.observed[layer.index]
        state.sizes[layer.index] = self._put(cache, layer, kept, seen)  # the full layer is freed: the peak is one layer
        if self._refit:
            ragged: Any = cache.layers[layer.index]
            state.refitted[layer.index] = refit.refit(layer, keys, values, ragged)

    def _put(self, cache: Cache, layer: AttentionLayer, kept: list[Tensor], seen: list[metrics.Seen]) -> Size:
        full: Any = cache.layers[layer.index]
        new = RaggedLayer(full.keys, full.values, kept, self._slack, self._kernel, seen)
        cache.layers[layer.index] = new
        return new.size

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

    @torch.no_grad()
    def _recut(self, ragged: RaggedLayer, layer: AttentionLayer, state: State, cap: int | None) -> None:
        name = self.metric.name
        if self.metric.once:
            raise KVBudgetError(f"recut: {name} {self.metric.once}", "UNSUPPORTED")
        if self.metric.needs_queries and any(s.n_tokens != ragged.seen - s.padding for s in ragged.observed):
            raise KVBudgetError(f"recut: {name} ranks by queries, which were not watched; give track=True to compress")
        self._begin_cut(state, ragged.observed, ragged.seen, cap, True)
        if self._refit:
            state.warnings["later cuts do not refit again; what was refitted at the first one stays so"] = None
        ragged.recut(partial(self._choose_again, ragged, layer, state))

    def _choose_again(self, ragged: RaggedLayer, layer: AttentionLayer, state: State, s: int) -> Tensor:
        """Which rows of segment s stay."""
        b, h = divmod(s, ragged.n_heads)
        keys, values, places = ragged.segment(s)
        seen = ragged.observed[b]
        places, n = places - seen.padding, ragged.seen - seen.padding
        keep = min(int(self._keep(state, state.cut[1] or n)[layer.index, h]), len(places))
        if keep == len(places) or self._protected(n):
            return torch.arange(len(places))
        seen.n_tokens = n
        scores = self.metric.score(layer, keys[None], values[None], seen, places, slice(h, h + 1))[0]
        info = self.table.info
        rows = reselect(scores.float().cpu().numpy(), places.cpu().numpy(), n, keep, info.sink, info.window)
        return torch.from_numpy(rows.astype("int64"))


compress = Run
