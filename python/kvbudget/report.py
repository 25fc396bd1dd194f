"""The report about a cache: bytes, tokens and warnings, collected while it is watched and cut."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from .ragged import RaggedLayer, Size
from .table import Budgets


@dataclass(frozen=True)
class Report:
    """What became of a cache. Bytes are those of the layers that were cut, in all sequences, as they are now; if the
    cache is gone, as they were last."""

    bytes_full: int  # what a full cache of all the tokens seen so far takes
    bytes_promised: int  # the kept tokens alone, in the formats in which they are stored
    bytes_with_slack: int  # the same with the free rows for new tokens
    bytes_now: int  # the same with positions: what is really taken
    saved: float  # 1 - now / full
    requested_ratio: float  # with a target size: the ratio that gives it, at the latest cut
    effective_ratio: float  # share of the tokens that were gone after the latest cut
    tokens: tuple[int, ...]  # length of each sequence at the latest cut
    layers_cut: int
    layers_left: int  # without a budget: sliding windows
    heads_refitted: int  # KV heads, in all sequences, whose rows were refitted at the first cut
    warnings: tuple[str, ...]  # of the latest cut


@dataclass
class State:
    """What is known of one cache. It is the cache's attribute ``kvb_state``, and is copied with it."""

    metric: str = ""
    cut: tuple[Any, ...] = ()  # tells the latest cut of all layers from other cuts
    budgets: dict[int, Budgets] = field(default_factory=dict)  # of that cut, by tokens
    tokens: tuple[int, ...] = ()
    requested: float = 0.0
    sizes: dict[int, Size] = field(default_factory=dict)  # by layer that is cut
    left: set[int] = field(default_factory=set)
    refitted: dict[int, int] = field(default_factory=dict)  # by layer: heads
    warnings: dict[str, None] = field(default_factory=dict)  # an ordered set

    def report(self, requested_ratio: float | None) -> Report:
        sizes = self.sizes.values()
        full, now = (sum(s.tokens * s.row_bytes for s in sizes), sum(s.bytes_now for s in sizes))
        stayed, of = (sum(s.at_cut[i] for s in sizes) for i in range(2))
        windows = f"{len(self.left)} of {len(self.left) + len(sizes)} layers have a sliding window and were left alone"
        return Report(
            bytes_full=full,
            bytes_promised=sum(s.promised for s in sizes),
            bytes_with_slack=sum(s.with_slack for s in sizes),
            bytes_now=now,
            saved=1 - now / full if full else 0.0,
            requested_ratio=self.requested if requested_ratio is None else requested_ratio,
            effective_ratio=1 - stayed / of if of else 0.0,
            tokens=self.tokens,
            layers_cut=len(sizes),
            layers_left=len(self.left),
            heads_refitted=sum(self.refitted.values()),
            warnings=(*self.warnings, *[windows] * bool(self.left and sizes)),
        )


def cache_bytes(cache: Cache, layers: Sequence[int] | None = None) -> int:
    """Returns the bytes that a cache's keys and values, and a cut one's positions, really take; shared storage once."""
    seen: dict[int, int] = {}
    for i in range(len(cache.layers)) if layers is None else layers:
        layer: Any = cache.layers[i]
        ragged = isinstance(layer, RaggedLayer)
        tensors = [layer.flat_keys, layer.flat_values, layer.places] if ragged else [layer.keys, layer.values]
        for part in layer.packed if ragged else ():
            tensors += [*part.stored, part.places]
        for tensor in filter(lambda t: isinstance(t, Tensor), tensors):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
