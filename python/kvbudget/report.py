"""What became of a cache: bytes, tokens and warnings, kept while it is watched and cut."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from .metrics import Seen
from .ragged import RaggedLayer


@dataclass(frozen=True)
class Report:
    """What became of a cache. Bytes are those of the layers that were cut, in all sequences."""

    bytes_full: int  # before, when each layer was cut
    bytes_promised: int  # the kept tokens alone
    bytes_with_slack: int  # the same with the free rows for new tokens
    bytes_now: int  # with free rows, positions, and all tokens since; when the cache is gone, as it was last seen
    saved: float  # 1 - now / full
    requested_ratio: float
    effective_ratio: float  # share of the tokens that went
    tokens: tuple[int, ...]  # length of each sequence when it was cut
    layers_cut: int
    layers_left: int  # without a budget: sliding windows
    warnings: tuple[str, ...]


@dataclass
class State:
    """One cache while it is watched; numbers are sums over the layers that were cut so far."""

    observed: dict[int, list[Seen]] = field(default_factory=dict)  # by layer, then sequence
    keep: dict[int, Any] = field(default_factory=dict)  # by tokens: [L, G]
    cut: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    tokens: tuple[int, ...] = ()
    short: bool = False  # nothing but protected tokens
    bytes_full: int = 0
    bytes_promised: int = 0
    bytes_with_slack: int = 0
    bytes_now: dict[int, int] = field(default_factory=dict)  # by layer, as it was last seen
    kept: int = 0
    of: int = 0
    warnings: dict[str, None] = field(default_factory=dict)  # an ordered set

    def report(self, requested_ratio: float, bytes_now: int) -> Report:
        return Report(
            bytes_full=self.bytes_full,
            bytes_promised=self.bytes_promised,
            bytes_with_slack=self.bytes_with_slack,
            bytes_now=bytes_now,
            saved=1 - bytes_now / self.bytes_full if self.bytes_full else 0.0,
            requested_ratio=requested_ratio,
            effective_ratio=1 - self.kept / self.of if self.of else 0.0,
            tokens=self.tokens,
            layers_cut=len(self.cut),
            layers_left=len(self.left),
            warnings=tuple(self.warnings),
        )


def cache_bytes(cache: Cache, layers: Sequence[int] | None = None) -> int:
    """Bytes that a cache's keys and values really take, cut or not; storages that are shared count once."""
    seen: dict[int, int] = {}
    for i in range(len(cache.layers)) if layers is None else layers:
        layer: Any = cache.layers[i]
        ragged = isinstance(layer, RaggedLayer)
        tensors = (layer.flat_keys, layer.flat_values, layer.places) if ragged else (layer.keys, layer.values)
        for tensor in filter(lambda t: isinstance(t, Tensor), tensors):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
