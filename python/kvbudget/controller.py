"""Watches and cuts caches: one controller for blocks of compress (eviction.py) and for a cache that cuts itself
(cache.py). The library's rule (kvb_growth) says when to cut, to how many rows, and what always stays; the controller
asks it and keeps the rows that a scorer ranks highest. The state of a cache is stored with it: in its ``kvb_state``
(report.py), and what was seen of a layer's queries in the layer (ragged.py).
"""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _library as lib
from . import metrics, refit, scorers
from ._library import KVBudgetError, count, one_of, real
from .hooks import padding_of, refuse_presses
from .models import AttentionLayer
from .ragged import RaggedLayer, Size, WatchedLayer
from .report import Report, State
from .selection import reselect
from .table import Budgets, Table

MOST_SLACK = 512  # the most free rows per head that an interval asks for


@dataclass
class Pass:
    """One attention module while it runs."""

    layer: AttentionLayer
    cache: Any
    hidden: Tensor | None = None  # [B, n, D], the module's input; None: not seen, nor are the angles, rope
    rope: Any = None
    call: Any = None  # the call that the pass is part of, for end_of_turn
    attended: bool = False
    start: int = 0  # tokens that the layer of the cache held before the pass
    end: int | None = None  # where the turn of its tokens ends


class Controller:
    """The rules by which caches are cut; ``compress`` says what the arguments mean."""

    def __init__(
        self, table: Table | str, ratio: float | None = None, *, target_size: int | None = None,
        interval: int | None = None, buffer: int | None = None, scorer: Any = None, slack: int | None = None,
        kernel: str = "auto", refit: bool = False, **options: Any,
    ):  # fmt: skip
        self.table = table = table if isinstance(table, Table) else Table(table)
        self.metric = metric = scorers.of_table(table) if scorer is None else scorers.of_press(scorer)
        table.check(metric=metric.name)
        if (ratio is None) == (target_size is None):
            raise KVBudgetError(f"expected one of the two, ratio or target_size, found {ratio} and {target_size}")
        given = dict(target_size=target_size, interval=interval, buffer=buffer)
        for name, value in given.items():
            if value is not None and count(value, name) < 1:
                raise KVBudgetError(f"{name}: expected at least 1, found {value}")
        counts = {name: value or 0 for name, value in given.items()}
        self.rule = rule = table.growth(
            lib.Growth(ratio=0 if ratio is None else real(ratio), least=metric.least, **counts), **options
        )
        self.interval: int | None = rule.interval or None
        if self.interval and metric.once:
            raise KVBudgetError(f"{'interval' if ratio is not None else 'target_size'}: {metric.name} {metric.once}")
        if self.interval and table.metadata("n_continued") == "0":
            warnings.warn(
                "this table was solved for questions about a text that is cut once; for caches that are cut while the "
                "model writes, see docs/decoding.md", stacklevel=3,
            )  # fmt: skip
        one_of("kernel", kernel, ("auto", "segments", "varlen"))
        if table.has_formats and kernel == "varlen":
            raise KVBudgetError("kernel varlen: reads plain rows, which this table packs; leave it out", "UNSUPPORTED")
        self.ratio, self._kernel, self._refit, self._track = ratio, kernel, refit, rule.interval > 0
        self._slack = min(rule.interval or 32, MOST_SLACK) if slack is None else count(slack, "slack")
        self._formats = table.formats(ratio).tolist() if ratio is not None and table.has_formats else None
        table.grown(rule, 1)  # raises what budgets refuse now, not in the middle of a prefill
        self.cuts = ratio is None or ratio > 0
        self._last, self._has_cut = State(), False

    def due(self, n: int, cut_at: int, turn_ends: bool) -> bool:
        """Whether a layer that has seen n tokens must be cut now."""
        return bool(lib.library().kvb_growth_due(self.rule, n, cut_at, turn_ends))

    def report(self, cache: Any = None) -> Report:
        """Returns the report about a cache, by default the one that was cut last."""
        state: State = self._last if cache is None else getattr(cache, "kvb_state", State())
        return state.report(self.ratio)

    def end_of_turn(self, now: Pass, n: int) -> int | None:
        """Returns where the turn of the next n tokens ends; None if they belong to none."""
        return now.start + n if now.start == 0 or n > 1 else None

    # ---- Watching ----

    def attend(
        self, now: Pass, attend: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: Any
    ) -> Any:
        """Computes one layer's attention, and cuts the layer where its turn ends; guesses after that see it cut."""
        n, index, place = query.shape[2], now.layer.index, now.cache.layers[now.layer.index]
        now.start = start = place.get_seq_length() - n
        now.end = end = self.end_of_turn(now, n)
        if start == 0:
            place = self._begin(now, padding_of(mask, query.shape[0], n), end == n)
        elif not isinstance(place, WatchedLayer):
            raise KVBudgetError(
                f"{now.layer.name}: the cache held {start} tokens before, whose queries were not seen, so it cannot be "
                "cut; fill it inside of the block from the start"
            )
        state = self.state_of(now.cache)
        if not place.observed:  # mode="mask": tokens were hidden, not cut
            return attend(query, key, value, mask)
        guesses = max(start + n - end, 0) if end is not None and start < end else 0
        own, m, guessed = mask, n - guesses, None
        if guesses:
            guessed = place.newest(guesses)
            place.crop(-guesses)
            key, value = place.flat()
            own = None if mask is None else mask[:, :, :m, :-guesses]
        out, weights = attend(query[:, :, :m], key, value, own)
        with torch.no_grad():
            self._look(now, state, place, metrics.in_units(query[:, :, :m], scaling))
        if guessed is None:
            return out, weights
        key, value = now.cache.layers[index].update(*guessed)
        if mask is None and not hasattr(key, "kvb_layer"):
            mask = torch.ones(1, 1, n, start + n, dtype=torch.bool, device=query.device).tril(start)
        rest, _ = attend(query[:, :, m:], key, value, None if mask is None else mask[:, :, m:])
        return torch.cat([out, rest], 1), None

    def _begin(self, now: Pass, padding: list[int], whole: bool) -> WatchedLayer:
        """Begins to watch a layer in the first pass over a fresh cache, of a whole prompt or of its first chunk."""
        if not whole and any(padding):
            raise KVBudgetError("padded batches cannot be prefilled in chunks; give them one by one", "UNSUPPORTED")
        refuse_presses(now.layer.module)
        place = now.cache.layers[now.layer.index]
        if not isinstance(place, WatchedLayer):
            place = now.cache.layers[now.layer.index] = WatchedLayer(place)
        place.observed = [metrics.Seen(padding=p) for p in padding]
        return place

    def state_of(self, cache: Any) -> State:
        if getattr(cache, "kvb_state", None) is None:
            cache.kvb_state = State(self.metric.name)
        state: State = cache.kvb_state
        if state.metric != self.metric.name:
            raise KVBudgetError(f"the cache was watched for {state.metric}, this block ranks by {self.metric.name}")
        return state

    def _look(self, now: Pass, state: State, place: WatchedLayer, query: Tensor) -> None:
        """Called after the attention of n tokens: observes them, and cuts if a turn ends or enough tokens are new."""
        total, turn = now.start + query.shape[2], now.end is not None and now.start < now.end
        if turn or self._track:
            self._observe(now, place, query)
        if not self.due(total, place.cut_at, turn and total == now.end):
            return
        if now.start and (self.metric.once if isinstance(place, RaggedLayer) else self.metric.whole):
            said = f"tokens of later turns all stay: {self.metric.name} {self.metric.once}"
            self._warn(state, said)
        else:
            self.cut_layer(now.cache, now.layer)

    def _observe(self, now: Pass, place: WatchedLayer, query: Tensor) -> None:
        start, n = now.start, query.shape[2]
        for b, seen in enumerate(place.observed):
            skip = min(max(seen.padding - start, 0), n)
            turned = None
            if now.rope is not None:
                turned = tuple(x[min(b, x.shape[0] - 1), skip:n] if x.dim() == 3 else x[skip:n] for x in now.rope)
            if skip < n:
                seen.skip(start + skip - seen.padding)
                hidden = query.new_empty(n - skip, 0) if now.hidden is None else now.hidden[b, skip:n]
                step = metrics.Step(query[b, :, skip:], hidden, turned)
                if self._refit and not isinstance(place, RaggedLayer):
                    seen.references = refit.gather(seen.references, now.layer, step, seen.n_tokens)
                self.metric.observe(seen, now.layer, step)

    # ---- Cutting ----

    @torch.no_grad()
    def cut_layer(self, cache: Any, layer: AttentionLayer) -> None:
        """Cuts a layer to the budgets of all tokens that it has seen; tokens that are gone stay gone."""
        place, state = cache.layers[layer.index], self.state_of(cache)
        total, ragged = place.get_seq_length(), isinstance(place, RaggedLayer)
        if ragged and self.metric.once:
            raise KVBudgetError(f"cut: {self.metric.name} {self.metric.once}", "UNSUPPORTED")
        tokens, again = tuple(total - s.padding for s in place.observed), place.cut_at > 0
        self._last, self._has_cut = state, True
        if state.cut != (tokens, again):  # the first layer of another cut resets the state
            state.cut, state.tokens = (tokens, again), tokens
            state.budgets.clear()
            state.warnings.clear()
        if ragged:
            if self._refit:
                state.warnings["later cuts do not refit again; what was refitted at the first one stays so"] = None
            place.recut(partial(self._choose_again, place, layer, state))
            self._pack(place, layer)
        elif not self._all_stay(state, place):
            self._first_cut(cache, layer, state)
        place.cut_at = total

    def _warn(self, state: State, said: str, aloud: bool = True) -> None:
        if aloud and said not in state.warnings:
            warnings.warn(f"kvbudget: {said}", stacklevel=2)
        state.warnings[said] = None

    def _all_stay(self, state: State, place: WatchedLayer) -> bool:
        found = [self._budgets(state, n).requested_ratio == 0 for n in state.tokens]
        for n in () if self.rule.target_size else (n for n, stays in zip(state.tokens, found) if stays):
            said = f"a context of {n} tokens is no longer than what is protected or {self.metric.name} needs"
            self._warn(state, f"{said}, so nothing was evicted", all(found) and place.cut_at == 0)
        return all(found)

    def _first_cut(self, cache: Any, layer: AttentionLayer, state: State) -> None:
        full = cache.layers[layer.index]
        keys, values, kept = full.keys, full.values, []
        for b, seen in enumerate(full.observed):
            k, v = keys[b, :, seen.padding :], values[b, :, seen.padding :]
            n_heads, n, _ = k.shape
            places = torch.arange(n, device=keys.device)
            chosen = self._choose(layer, state, seen, n, (k, v, places), slice(0, n_heads))
            kept += [places + seen.padding for places in chosen]
        state.sizes[layer.index] = self._put(cache, layer, kept)  # the full layer is freed: the peak is one layer
        if self._refit:
            state.refitted[layer.index] = refit.refit(layer, keys, values, cache.layers[layer.index])
        self._pack(cache.layers[layer.index], layer)

    def _pack(self, place: RaggedLayer, layer: AttentionLayer) -> None:
        if self._formats:
            place.pack(self._formats[layer.index])

    def _put(self, cache: Any, layer: AttentionLayer, kept: list[Tensor]) -> Size:
        full = cache.layers[layer.index]
        new = RaggedLayer(full.keys, full.values, kept, self._slack, self._kernel, full.observed)
        cache.layers[layer.index] = new
        return new.size

    def _choose_again(self, ragged: RaggedLayer, layer: AttentionLayer, state: State, s: int) -> Tensor:
        """Returns which rows of segment s stay."""
        b, h = divmod(s, ragged.n_heads)
        (k, v, places), seen = ragged.segment(s), ragged.observed[b]
        rows, n = (k[None], v[None], places - seen.padding), ragged.seen - seen.padding
        return self._choose(layer, state, seen, n, rows, slice(h, h + 1))[0]

    def _choose(
        self, layer: AttentionLayer, state: State, seen: metrics.Seen, n: int, rows: tuple[Tensor, ...], heads: slice
    ) -> list[Tensor]:
        """Returns which rows of some heads' keys and values [G, m, d] at places [m] stay, by head, ascending."""
        keys, values, places = rows
        keep = self._budgets(state, n).keep[layer.index, heads].tolist()
        if min(keep) >= len(places):
            return [torch.arange(len(places))] * len(keys)
        if self.metric.needs_queries and seen.n_tokens != n:
            raise KVBudgetError(f'cut: {self.metric.name} ranks by queries, which only when="call" goes on watching')
        seen.n_tokens = n
        scores = self.metric.score(layer, keys, values, seen, places, heads).float().cpu().numpy()
        at = places.cpu().numpy()
        found = (reselect(s, at, n, k, self.rule.sink, self.rule.window) for s, k in zip(scores, keep))
        return [torch.from_numpy(chosen.astype("int64")) for chosen in found]

    def _budgets(self, state: State, n: int) -> Budgets:
        """Returns the table's budgets for a sequence of n tokens, at the cut that the state is of."""
        if n not in state.budgets:
            state.budgets[n] = found = self.table.grown(self.rule, n, int(state.cut[1]))
            state.requested = found.requested_ratio or state.requested
            state.warnings.update(dict.fromkeys(found.warnings))
        return state.budgets[n]
