"""A press for kvpress's own pipeline, with a table's budgets."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ._library import KVBudgetError, one_of
from .eviction import Run
from .models import AttentionLayer
from .ragged import Size
from .table import Table

try:
    from kvpress.presses.base_press import BasePress
except ImportError as why:
    raise ImportError("BudgetPress needs kvpress: pip install kvbudget[kvpress] (transformers below 5.3)") from why


class BudgetPress(BasePress):  # type: ignore[misc]
    """``pipe(context, question=q, press=BudgetPress(table, 0.8))``, or ``with press(model): ...``.

    mode="compact" evicts for real, as :func:`kvbudget.compress` does; mode="mask" hides evicted tokens as kvpress's
    head-wise presses do: no memory is saved, and decoding is slower than with the full cache. ``options`` are those of
    :func:`kvbudget.compress`, such as scorer; ``run`` is the Run in use, and ``run.report()`` its report.
    """

    def __init__(
        self, table: Table | str, compression_ratio: float, mode: Literal["compact", "mask"] = "compact", **options: Any
    ):
        one_of("mode", mode, ("compact", "mask"))
        self.table = table if isinstance(table, Table) else Table(table)
        if mode == "mask" and self.table.has_formats:
            raise KVBudgetError('mode="mask" hides tokens and packs none, as this table does', "UNSUPPORTED")
        self.compression_ratio, self.mode, self.options = compression_ratio, mode, options
        self.run: Run | None = None

    @contextlib.contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        kind = Run if self.mode == "compact" else _MaskingRun
        with kind(model, self.table, self.compression_ratio, **self.options) as self.run:
            yield


class _MaskingRun(Run):
    """Leaves the cache as it is, and tells kvpress's patched attention which keys to hide."""

    def _put(self, cache: Any, layer: AttentionLayer, kept: list[Tensor]) -> Size:
        if len(self._busy) > 1:
            raise KVBudgetError('mode="mask" hides tokens of a module, which threads cannot share', "UNSUPPORTED")
        full = cache.layers[layer.index]
        keys, values, seen = full.keys, full.values, full.observed
        full.observed = []
        hidden = torch.ones(keys.shape[:3], dtype=torch.bool)
        for s, places in enumerate(kept):
            b, h = divmod(s, keys.shape[1])
            hidden[b, h, : seen[b].padding] = False  # no token there: the attention mask hides it
            hidden[b, h, places] = False
        at: Any = tuple(i.to(keys.device) for i in torch.where(hidden))
        layer.module.masked_key_indices = at
        rows, n_kept = hidden.numel(), sum(map(len, kept))
        of = rows - keys.shape[1] * sum(s.padding for s in seen)
        return Size(keys.element_size() * (keys.shape[-1] + values.shape[-1]), 0, rows, n_kept, rows, (n_kept, of))

    def _prompt(self, model: Any, args: Any, kwargs: dict[str, Any]) -> int | None:
        prompt = super()._prompt(model, args, kwargs)
        if prompt is not None:
            raise KVBudgetError('mode="mask" takes prompts in one pass, without chunks or guesses', "UNSUPPORTED")
        return None
