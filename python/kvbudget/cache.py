"""A cache that cuts itself: passed as ``past_key_values=``, without a block around the model."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from ._library import KVBudgetError
from .controller import Controller, Pass
from .hooks import use_registered_attention
from .models import AttentionLayer, only_windows
from .ragged import WatchedLayer, eager
from .report import Report
from .table import Table


class Cache(DynamicCache):
    """``model.generate(**inputs, past_key_values=kvbudget.Cache(table, target_size=1024, config=model.config))``

    table   a :class:`Table` or its path
    config  the config of the model that fills the cache: its attention implementation becomes "kvbudget", which treats
            all other caches as the former one did
    rules   ratio or target_size, interval, buffer, scorer, slack, kernel and the options of :meth:`Table.keep`, as in
            :func:`kvbudget.compress`, which gives the same tokens

    A cache does not see where a prompt ends: with a ratio and without an interval it treats every pass of several
    tokens as a turn and is cut after each, so also after every chunk of a prefill. Nor does it see a layer's input and
    rotations, or which tokens are guesses: for expected attention, presses of kvpress, refit, prompt lookup and
    assistants use :func:`kvbudget.compress`. A copy (copy.deepcopy) is independent from then on.
    """

    def __init__(self, table: Table | str, ratio: float | None = None, *, config: Any, **rules: Any):
        super().__init__(config=config)
        for name in rules.keys() & {"refit", "when"}:
            raise KVBudgetError(f"{name}: only kvbudget.compress can do it, which sees how the model is called")
        self.controller = rule = Controller(table, ratio, **rules)
        if any(metric.needs_hidden for metric in (rule.metric, *getattr(rule.metric, "features", ()))):
            raise KVBudgetError(
                f"{rule.metric.name} ranks by what goes into each layer, which a cache does not see; use "
                "kvbudget.compress",
                "UNSUPPORTED",
            )
        rule.table.check(config)
        decoder = config.get_text_config(decoder=True)
        if "flash" in str(decoder._attn_implementation):
            raise KVBudgetError('flash attention cannot be cut: model.set_attn_implementation("sdpa")', "UNSUPPORTED")
        full = [i for i, layer in enumerate(self.layers) if type(layer) is DynamicLayer]
        if not full:
            raise only_windows(type(config).__name__, decoder)
        if rule.cuts:
            use_registered_attention([AttentionLayer(0, SimpleNamespace(config=decoder), None)])
            state = rule.state_of(self)
            state.left = {i for i, layer in enumerate(self.layers) if getattr(layer, "is_sliding", False)}
            for i in full:
                self.layers[i] = WatchedLayer(self.layers[i])
        self._awaited: int | None = None  # layer whose keys were handed out but not attended to yet

    @eager
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if self._awaited is not None:
            raise KVBudgetError(
                f'layer {self._awaited}: its attention does not go through the implementation "kvbudget"; give '
                "config=model.config of the same model, and do not change its attention implementation afterwards",
                "UNSUPPORTED",
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if isinstance(layer, WatchedLayer):
            keys, _ = layer.flat()
            keys.kvb_cache, self._awaited = self, layer_idx  # type: ignore[attr-defined]
        return keys, values

    def attend(self, module: Any, attend: Callable[..., Any], *given: Any) -> Any:
        """Called by attention over keys of this cache, with the arguments of a watch (attention.py)."""
        assert self._awaited is not None
        index, self._awaited = self._awaited, None
        return self.controller.attend(Pass(AttentionLayer(index, module, None), self), attend, *given[:5])

    def report(self) -> Report:
        return self.controller.report(self)

    def crop(self, *_: Any) -> NoReturn:
        raise KVBudgetError(
            "crop: the tokens to remove, such as guesses of prompt lookup or an assistant, may already have decided "
            "what was cut; use kvbudget.compress for guesses, and copy.deepcopy(cache) to ask about a text twice",
            "UNSUPPORTED",
        )

