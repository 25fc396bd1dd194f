"""Cache layers that are watched, and those that were cut, whose heads keep different numbers of tokens.

All segments of a cut layer, one per sequence and KV head, lie one after the other in two flat tensors [rows, d], each
with some free rows for the tokens to come. That is the layout that varlen kernels take as cu_seqlens; on a CPU each
segment is a view. If a table says in which formats heads are stored, the rows that were kept are packed (packed.py),
and the flat tensors hold only the tokens since the cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ._library import KVBudgetError
from .packed import Segment

_F = TypeVar("_F", bound=Callable[..., Any])
GROWTH = 64  # free rows per segment when a layer is laid out anew


def eager(function: _F) -> _F:
    """Keeps a function out of torch.compile's graphs: heads' lengths are Python numbers, new with every token."""
    return cast(_F, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def segment_rows(starts: Tensor, lengths: Tensor) -> Tensor:
    """Returns the row numbers of all segments in turn: starts[s] .. starts[s] + lengths[s] - 1 for each s."""
    ends = lengths.cumsum(0)
    base = torch.repeat_interleave(starts - (ends - lengths), lengths)
    return base + torch.arange(base.shape[0], device=base.device)


@dataclass
class Size:
    """What a cut layer takes. The layer keeps its own up to date; a report still has it when the cache is gone."""

    row_bytes: int  # of one token's key and value in one head
    place_bytes: int = 4  # of its position
    tokens: int = 0  # seen so far, in all heads and sequences, padding included
    rows: int = 0  # of these, still there and not packed
    allocated: int = 0  # the same with free rows
    at_cut: tuple[int, int] = (0, 0)  # after the latest cut: rows that stayed, of tokens without padding
    packed: tuple[int, int] = (0, 0)  # packed rows, besides the others, and the bytes that they take

    @property
    def promised(self) -> int:
        return self.rows * self.row_bytes + self.packed[1]

    @property
    def with_slack(self) -> int:
        return self.allocated * self.row_bytes + self.packed[1]

    @property
    def bytes_now(self) -> int:
        return self.with_slack + (self.allocated + self.packed[0]) * self.place_bytes


class WatchedLayer(DynamicLayer):
    """A layer of a DynamicCache that may be cut later.

    observed  by sequence: its padding, and what was seen of its queries (metrics.Seen); empty: not watched any more
    cut_at    how many tokens it held when it was last due to be cut, but all of them stayed
    """

    keys: Any
    values: Any

    def __init__(self, layer: Any = None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.__dict__.update(layer.__dict__ if layer else {})
        self.observed: list[Any] = []
        self.cut_at = 0

    def flat(self) -> tuple[Tensor, Tensor]:
        """Returns keys and values for attention, as update() does; the caller may set attributes of the tensors."""
        return self.keys.view_as(self.keys), self.values

    def newest(self, n: int) -> tuple[Tensor, Tensor]:
        """Returns the last n keys and values of every head, [B, H, n, d]."""
        return self.keys[:, :, -n:], self.values[:, :, -n:]

    def crop(self, count: int) -> None:
        super().crop(count)
        self.cut_at = min(self.cut_at, self.get_seq_length())
        for seen in self.observed:
            seen.crop(self.get_seq_length() - seen.padding)

    def _take_sequences(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self.device)
        self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)
        self.observed = [self.observed[b].copy() for b in rows] if self.observed else []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.get_seq_length():
            self._take_sequences(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length():
            self._take_sequences([b for b in range(self.keys.shape[0]) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        index = torch.as_tensor(indices)
        if self.get_seq_length():
            self._take_sequences((index.nonzero()[:, 0] if index.dtype == torch.bool else index).tolist())


class RaggedLayer(WatchedLayer):
    """A layer of a DynamicCache after eviction.

    keys, values  [B, H, T, d], the full layer
    kept          B x H index tensors, segment s = b * H + h: what it keeps, ascending
    slack         free rows per segment at first
    kernel        how attention is computed: "auto", "segments" or "varlen" (attention.py)
    observed      by sequence: its padding, and what was seen of its queries (metrics.Seen)

    Its tensors carry no gradient, and may be written in any mode, even if they were made in inference mode.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, kept: Sequence[Tensor], slack: int, kernel: str = "auto",
        observed: Sequence[Any] = (),
    ):  # fmt: skip
        super().__init__()
        self.n_sequences, self.n_heads, n_tokens, _ = keys.shape
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.kernel, self.slack, self.observed = kernel, slack, list(observed)
        self.size = Size(keys.element_size() * (keys.shape[-1] + values.shape[-1]))
        self.packed: list[Segment] = []  # by segment; empty: nothing is packed
        self.hidden: Tensor | None = None  # of the latest pass, if it had a mask: later tokens hidden from its last row
        self.seen = n_tokens  # position of the next token
        self.cut_at = n_tokens  # tokens before this one may be gone; all later ones are there
        place = torch.cat(list(kept)).to(self.device)
        lengths = [len(k) for k in kept]
        first = torch.arange(len(kept), device=self.device) * n_tokens
        take = place + torch.repeat_interleave(first, torch.tensor(lengths, device=self.device))
        k, v = (x.reshape(-1, x.shape[-1]).index_select(0, take) for x in (keys, values))
        self._lay_out(k, v, place.to(torch.int32), lengths, slack)
        self._was_cut()

    def _was_cut(self) -> None:
        self.cut_at, self.hidden = self.seen, None
        padding = sum(seen.padding for seen in self.observed)
        self.size.at_cut = sum(self.lengths), self.n_heads * (self.n_sequences * self.seen - padding)

    def _measure(self) -> None:
        self.size.tokens, self.size.rows = len(self.lengths) * self.seen, sum(self.lengths)
        self.size.allocated = self.starts[-1]
        own = {id(x): x for x in self.packed}.values()  # beams share segments
        self.size.packed = sum(len(x.places) for x in own), sum(x.bytes for x in own)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _lay_out(self, k: Tensor, v: Tensor, place: Tensor, lengths: list[int], slack: int) -> None:
        """Makes new storage from all segments' rows, given without gaps. Free keys are NaN, so that reads show."""
        self.lengths = lengths
        self.starts = [0]
        for n in lengths:
            self.starts.append(self.starts[-1] + n + slack)
        starts = torch.tensor(self.starts[:-1], device=k.device)
        to = segment_rows(starts, torch.tensor(lengths, device=k.device))
        rows = self.starts[-1]
        self.flat_keys = k.new_full((rows, k.shape[1]), float("nan")).index_copy_(0, to, k)
        self.flat_values = v.new_zeros((rows, v.shape[1])).index_copy_(0, to, v)
        self.places = place.new_zeros(rows).index_copy_(0, to, place)
        self.free = slack
        self._end = starts + torch.tensor(lengths, device=k.device)  # where each segment's next token goes
        self._measure()

    def _rebuild(self, segments: Sequence[int], slack: int, part: Callable[[int], Tensor] | None = None) -> None:
        """Lays out the given segments anew; ``part`` says which rows of each stay, counted from its start."""
        if part is None:
            lengths = [self.lengths[s] for s in segments]
            starts = torch.tensor([self.starts[s] for s in segments], device=self.device)
            take = segment_rows(starts, torch.tensor(lengths, device=self.device))
        else:
            parts = [part(s).to(self.device) + self.starts[s] for s in segments]
            lengths, take = [len(p) for p in parts], torch.cat(parts)
        k, v, place = (x.index_select(0, take) for x in (self.flat_keys, self.flat_values, self.places))
        self._lay_out(k, v, place, lengths, slack)

    # ---- What transformers calls ----

    @eager
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends keys and values [B, H, n, d], and returns the flat tensors as [1, 1, rows, d]; the attention function
        finds the segments through the attribute ``kvb_layer`` of the keys."""
        n = key_states.shape[2]
        dtype = torch.promote_types(self.dtype, key_states.dtype)  # as torch.cat does: the model may have moved
        if dtype != self.dtype or key_states.device != self.device:
            self._take_to(key_states.device, dtype)
        if n > self.free:
            self._rebuild(range(len(self.lengths)), max(GROWTH, n))
        new = torch.arange(n, device=self.device)
        to = (self._end[:, None] + new).reshape(-1)
        for flat, states in ((self.flat_keys, key_states), (self.flat_values, value_states)):
            flat.index_copy_(0, to, states.detach().reshape(-1, states.shape[-1]).to(dtype))
        self.places.index_copy_(0, to, (self.seen + new).to(torch.int32).repeat(len(self.lengths)))
        self._move(n)
        return self.flat()

    def flat(self) -> tuple[Tensor, Tensor]:
        keys = self.flat_keys[None, None]
        keys.kvb_layer = self  # type: ignore[attr-defined]
        return keys, self.flat_values[None, None]

    def newest(self, n: int) -> tuple[Tensor, Tensor]:
        """Returns copies of the last n keys and values of every segment, [B, H, n, d]."""
        rows = (self._end[:, None] - n + torch.arange(n, device=self.device)).reshape(-1)
        k, v = (x.index_select(0, rows) for x in (self.flat_keys, self.flat_values))
        return (k.view(self.n_sequences, self.n_heads, n, -1), v.view(self.n_sequences, self.n_heads, n, -1))

    def _take_to(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.size.row_bytes = dtype.itemsize * (self.flat_keys.shape[1] + self.flat_values.shape[1])
        self.flat_keys, self.flat_values = (x.to(device, dtype) for x in (self.flat_keys, self.flat_values))
        self.places, self.packed = self.places.to(device), [x.to(device) for x in self.packed]
        self._rebuild(range(len(self.lengths)), max(self.free, 1))

    def _move(self, n: int) -> None:
        """Adds n tokens at the end of every segment, or removes them if n is negative."""
        self._end = self._end + n
        self.lengths = [length + n for length in self.lengths]
        self.seen += n
        self.free -= n
        self._measure()

    def get_seq_length(self, *args: Any) -> int:
        """Returns the number of tokens seen, at which positions continue, not that of kept tokens."""
        return self.seen

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """Returns length and offset of a mask of the later tokens alone: older ones that stay are visible to all."""
        n = query if isinstance(query, int) else query.shape[0]  # up to 5.2 it is cache_position
        return self.seen - self.cut_at + n, self.cut_at

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name up to 5.2

    def crop(self, count: int) -> None:
        """Removes the newest tokens; ``count`` is minus their number, or (up to 5.2) how many stay in all.

        Candidates of prompt lookup may have been part of the pass that was cut; then what was evicted stays evicted.
        """
        n = -count if count <= 0 else self.seen - count
        if n <= 0:
            return
        for seen in self.observed:
            seen.crop(self.seen - n - seen.padding)
        if self.seen - n >= self.cut_at:
            self._move(-n)
            return
        self.seen = self.cut_at = max(self.seen - n, 0)
        formats = self._unpack()
        self._rebuild(range(len(self.lengths)), self.slack, lambda s: (self.segment(s)[2] < self.seen).nonzero()[:, 0])
        self.pack(formats)

    def _take_sequences(self, rows: Sequence[int]) -> None:
        self.n_sequences = len(rows)
        self.observed = [self.observed[b].copy() for b in rows] if self.observed else []
        self.hidden = None if self.hidden is None else self.hidden[list(rows)]
        segments = [b * self.n_heads + h for b in rows for h in range(self.n_heads)]
        self.packed = [self.packed[s] for s in segments] if self.packed else []
        self._rebuild(segments, max(self.free, 1))

    def reset(self) -> None:
        raise KVBudgetError("a cut cache cannot be filled again: make a new DynamicCache")

    def offload(self) -> NoReturn:
        raise KVBudgetError("a cut cache cannot be offloaded; it is small: use DynamicCache() without offloading")

    prefetch = offload

    # ---- What kvpress's pipeline does: layer.keys = layer.keys[:, :, :n] ----

    @property
    def keys(self) -> Any:
        return _Length(self, self.seen) if getattr(self, "is_initialized", False) else None

    @keys.setter
    def keys(self, new: Any) -> None:
        if isinstance(new, _Length):
            self.crop(new.n - self.seen)
        elif new is not None:
            raise KVBudgetError("the keys of a cut layer cannot be set: its heads have different lengths")

    values = keys

    # ---- Eviction ----

    def segment(self, s: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns keys [n, d], values [n, dv] and positions [n] of a segment: views, if nothing is packed."""
        a, b = self.starts[s], self.starts[s] + self.lengths[s]
        own = self.flat_keys[a:b], self.flat_values[a:b], self.places[a:b]
        if not self.packed:
            return own
        k, v, places = (torch.cat(parts) for parts in zip(self.packed[s].rows(self.dtype), own))
        return k, v, places

    @torch.inference_mode(False)
    @torch.no_grad()
    def pack(self, formats: Sequence[Sequence[str]]) -> None:
        """Packs all rows in the formats [H][2] of keys and values; later tokens will not be packed. [] does nothing.
        Raises KVBudgetError, and changes nothing, if a number is not finite."""
        if formats:
            segments = range(len(self.lengths))
            self.packed = [Segment.of(self.segment(s), formats[s % self.n_heads]) for s in segments]
            self._rebuild(segments, self.slack, lambda _: torch.arange(0))

    def _unpack(self) -> list[Sequence[str]]:
        """Unpacks all rows, and returns their formats for pack()."""
        if not self.packed:
            return []
        formats, rows = [x.formats for x in self.packed], [self.segment(s) for s in range(len(self.lengths))]
        self.packed = []
        k, v, places = (torch.cat(parts) for parts in zip(*rows))
        self._lay_out(k, v, places, [len(r[2]) for r in rows], self.slack)
        return formats[: self.n_heads]

    def recut(self, part: Callable[[int], Tensor]) -> None:
        """Keeps only the rows part(s) of every segment s, ascending and counted from its start. Afterwards nothing is
        packed."""
        if self.hidden is not None and bool(self.hidden[:, : self.seen - self.cut_at].any()):
            raise KVBudgetError("a cache with padding behind its first tokens cannot be cut again", "UNSUPPORTED")
        self._unpack()
        self._rebuild(range(len(self.lengths)), self.slack, part)
        self._was_cut()


class _Length:
    """Stands in for the keys or values of a cut layer when only their length is read or set."""

    def __init__(self, layer: RaggedLayer, n: int):
        self.layer, self.n = layer, n

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.layer.n_sequences, self.layer.n_heads, self.n, self.layer.flat_keys.shape[1]))

    @property
    def device(self) -> torch.device:
        return self.layer.device

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.dtype

    def __getitem__(self, index: Any) -> "_Length":
        return _Length(self.layer, len(range(self.n)[index[2]]))
