"""Really evicts in transformers: each layer is cut as soon as its part of the prompt is done.

The rules are in the controller (controller.py), and the state of a cache is stored with the cache. What a thread is
doing is stored by thread (_Call), so any number of threads and caches can share one block. A layer is cut inside its
attention as soon as it has seen a whole prompt, before guesses from the same pass attend to it.
"""

import threading
import weakref
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ._library import KVBudgetError, one_of
from .attention import watched_by
from .cache import Cache as OwnCache
from .controller import Controller, Pass
from .hooks import Around, inputs_of, join, not_watched
from .models import AttentionLayer, attention_layers, check_model, decoder_of, has_window, only_windows
from .ragged import WatchedLayer
from .ready import find
from .table import Table


class _Call:
    """A call of generate(), or a forward pass by itself, in one thread."""

    def __init__(self, run: "Run | None", model: Any = None, prompt: int | None = None):
        self.run, self.model = run, model
        self.prompt = prompt  # length of a prompt that does not come as a pass by itself: in chunks, or with guesses
        self.cache: Any = None  # a weak reference to the cache that the prompt goes into
        self.end: int | None = None  # the cache is cut when it holds so many tokens

    def end_for(self, cache: Cache, start: int, n: int) -> int | None:
        """Returns where the prompt of the next n tokens ends; None if they belong to none."""
        if self.model is None or (self.cache is not None and self.cache() is not cache):
            return n if start == 0 else None
        if self.cache is None:
            self.cache = weakref.ref(cache)
            end = self.prompt or start + n
            self.end = end if start == 0 or end > start + 1 else None  # a single token is no turn
        return self.end


_CALL: ContextVar[_Call | None] = ContextVar("_CALL", default=None)


class Run(Controller):
    """Cuts every cache that the model fills inside the block to the table's budgets, layer by layer.

    model        a decoder of transformers with sdpa, eager or flash attention (torch's sdpa then replaces the latter)
    table        a :class:`Table` or its path, for this model's shape; or "auto": the ready table of these weights, or
                 "auto:packed": the one that also stores heads in 8, 4 and 2 bits, for less loss in as many bytes
    ratio        the share of all cached tokens that is evicted, below 1; 0 evicts nothing
    target_size  instead of a ratio: how many tokens the heads keep on average, shared out by the table; the cache does
                 not grow
    interval     cut whenever so many tokens are new, whether of a prompt, a chunk or an answer. By default 128 with a
                 target_size; with a ratio only prompts are cut, each at its end
    buffer       how many rows a head may hold above its budget: by default the interval. The newest buffer - interval
                 tokens stay in every head whatever their score
    scorer       what ranks tokens: by default the table's own metric; or a ScorerPress of kvpress, or a pair
                 (name, press), whose name must be the table's metric
    when         "prefill": as described above; "call": caches are cut only by run.cut(cache), as often as you like,
                 for passes of your own in chunks
    slack        free rows per head after a cut: 32, or the interval; more slack means fewer copies and more memory
    kernel       how attention over a cut cache is computed: "auto", "segments" or "varlen" (attention.py)
    refit        at the first cut, change the kept keys and values so that attention over them comes closer to that
                 over the full cache (refit.py); later cuts take rows away and do not refit again
    options      of :meth:`Table.keep`: rounding, lookup (by default "linear": the ratio is kept between rows, too),
                 block, and strict, which keeps sinks and window in every head: by default with an interval, and in all
                 later cuts of a cache

    ``with kvbudget.compress(...) as run`` gives the run itself, for explicit cuts and the report. Threads may share a
    block; calls that began in it go on being cut until they end, even after the block. A cut cache can also be decoded
    after the block: the model keeps the attention implementation "kvbudget", which treats caches that are not cut as
    the former one did. No gradient passes through a cut cache. Raises :class:`KVBudgetError` rather than doing
    nothing.
    """

    def __init__(
        self, model: nn.Module, table: Table | str, ratio: float | None = None, *,
        when: Literal["prefill", "call"] = "prefill", **rules: Any,
    ):  # fmt: skip
        check_model(model)
        if isinstance(table, str) and table in ("auto", "auto:packed"):
            table = find(model, packed=table != "auto", refit=bool(rules.get("refit")))
        super().__init__(table, ratio, **rules)
        self.table.check(model.config)
        one_of("when", when, ("prefill", "call"))
        if when == "call":
            if "interval" in rules:
                raise KVBudgetError('interval: with when="call" nothing is cut but in run.cut(cache)')
            self.interval = None
        self.model, self.layers, self._when = model, attention_layers(model), when
        self._track |= when == "call"
        self._standing: list[Around] = []  # methods replaced in the model while the block is open
        self._open = False
        self._busy: dict[int, int] = {}  # by thread: the number of calls that it is in
        self._lock = threading.Lock()

    # ---- For the user ----

    def cut(self, cache: Cache) -> None:
        """Cuts all layers of a cache now: one that was prefilled inside of the block, in as many chunks as you like
        (``when="call"``), or one that was cut and has grown. Tokens that are gone stay gone."""
        if getattr(cache, "kvb_state", None) is None:
            raise KVBudgetError("cut: this cache was not filled inside of the block, so its queries were not seen")
        for layer in self.layers:
            if isinstance(cache.layers[layer.index], WatchedLayer):
                self.cut_layer(cache, layer)

    def __enter__(self) -> "Run":
        if self._standing:
            raise KVBudgetError("this block is open already, or another thread is not done with it; make a new one")
        if self.cuts:
            self._standing = join(self.layers, self._attention)
            self._standing.append(Around(decoder_of(self.model), "forward", self._pass))
            for part in self.model.modules():
                if isinstance(part, GenerationMixin):
                    self._standing.append(Around(part, "generate", partial(self._generate, part)))
        self._open, self._has_cut = True, False
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Raises an error if the block cut nothing, instead of being a slow way to do nothing."""
        with self._lock:
            self._open, busy = False, bool(self._busy)
        self._leave()
        if kind is None and not busy and not self._has_cut and self.cuts:
            raise KVBudgetError(
                "nothing was cut inside of the block: expected generate(), or a forward pass over a fresh DynamicCache "
                '(with when="call", call run.cut(cache))'
            )

    # ---- What replaces the model's methods ----

    def _leave(self) -> None:
        """Restores the model when the block is left and the last call that began in it is done."""
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
        """Returns the prompt's length unless generate() passes it alone and whole. Refuses what cannot be cut."""
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
            "interval": (assisted and self.interval, "guesses of an assistant or a lookup would be counted"),
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
        now = Pass(layer, cache, hidden, rope, call)
        with watched_by(partial(self._attend, now)):
            out = forward(*args, **kwargs)
        if not now.attended:
            raise not_watched(layer)
        return out

    def _attend(self, now: Pass, attend: Any, *given: Any) -> Any:
        now.attended = True
        return self.attend(now, attend, *given[:5]) if self._is_budgeted(now.cache, now.layer) else attend(*given[:4])

    def due(self, n: int, cut_at: int, turn_ends: bool) -> bool:
        return self._when == "prefill" and super().due(n, cut_at, turn_ends)

    def end_of_turn(self, now: Pass, n: int) -> int | None:
        end: int | None = None if self._when == "call" else now.call.end_for(now.cache, now.start, n)
        return end

    def _is_budgeted(self, cache: Any, layer: AttentionLayer) -> bool:
        """Whether this layer of the cache has a budget."""
        if isinstance(cache, OwnCache):
            raise KVBudgetError("a kvbudget.Cache cuts itself; use it outside of the block of compress", "UNSUPPORTED")
        if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
            kind = "an offloaded cache" if getattr(cache, "offloading", False) else type(cache).__name__
            raise KVBudgetError(f"{kind} cannot be cut; use DynamicCache(config=model.config)", "UNSUPPORTED")
        place = cache.layers[layer.index]
        full = type(place) is DynamicLayer or isinstance(place, WatchedLayer)
        if not has_window(layer) and full:
            return True
        if full and not all(map(has_window, self.layers)):
            raise KVBudgetError(
                f"{layer.name} has a sliding window, but its cache is made for full attention; make the cache with "
                "DynamicCache(config=model.config)"
            )
        if not has_window(layer) and not getattr(place, "is_sliding", False):
            raise KVBudgetError(f"{layer.name}: {type(place).__name__} cannot be cut; use DynamicCache()", "UNSUPPORTED")
        state = self.state_of(cache)
        state.left.add(layer.index)
        if len(state.left) == len(self.layers):
            raise only_windows(type(self.model).__name__, self.model.config)
        return False


compress = Run
