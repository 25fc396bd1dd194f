"""Which tokens a head keeps, and the offsets of heads' rows that lie one after the other, both by the library."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _library as lib


def _scores(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    scores = np.ascontiguousarray(scores, np.float32)
    if scores.ndim != 1:
        raise lib.KVBudgetError(f"scores: expected those of one head, [tokens], found the shape {scores.shape}")
    return scores


def counts(values: ArrayLike, name: str) -> NDArray[np.uint32]:
    """Returns an array of numbers that `_library.count` would accept: NumPy, too, would cut off what does not fit."""
    given = np.asarray(values)
    if given.size and (given.dtype.kind not in "iu" or given.min() < 0 or given.max() >= 2**32):
        raise lib.KVBudgetError(f"{name}: expected whole numbers from 0 to {2**32 - 1}")
    return np.ascontiguousarray(given, np.uint32)


def select(scores: NDArray[np.float32], keep: int, sink: int, window: int) -> NDArray[np.uint32]:
    """Returns the positions, ascending, that a head keeps: protected ones, then the best by score (kvb_select).

    scores  float32 [T], higher = keep; a NaN raises :class:`KVBudgetError`
    """
    scores = _scores(scores)
    keep, sink, window = lib.count(keep, "keep"), lib.count(sink, "sink"), lib.count(window, "window")
    out = np.empty(min(keep, scores.size), np.uint32)
    lib.call("kvb_select", scores.ctypes.data, scores.size, keep, sink, window, out.ctypes.data, out.size)
    return out


def reselect(
    scores: NDArray[np.float32], places: NDArray[np.uint32], tokens: int, keep: int, sink: int, window: int
) -> NDArray[np.uint32]:
    """Returns the rows, ascending, that are kept by a head that was cut before and has grown (kvb_reselect).

    scores  float32 [rows]; places: the positions of the rows' tokens, ascending; tokens: how many were seen in all
    """
    scores, places = _scores(scores), counts(places, "places")
    keep, sink, window = lib.count(keep, "keep"), lib.count(sink, "sink"), lib.count(window, "window")
    if scores.shape != places.shape:
        raise lib.KVBudgetError(f"reselect: {scores.shape} scores for {places.shape} places")
    out = np.empty(min(keep, scores.size), np.uint32)
    lib.call(
        "kvb_reselect",
        *(scores.ctypes.data, places.ctypes.data, scores.size, tokens, keep, sink, window, out.ctypes.data, out.size),
    )
    return out


def cu_seqlens(lengths: NDArray[np.uint32], slack: int = 0, block: int = 1) -> NDArray[np.int32]:
    """Returns the offsets, int32 [n + 1], of sequences of these lengths that lie one after the other, each with
    ``slack`` free rows; with ``block`` > 1 they count pages of so many rows (kvb_cu_seqlens)."""
    lengths = counts(lengths, "lengths").ravel()
    out = np.empty(lengths.size + 1, np.int32)
    slack, block = lib.count(slack, "slack"), lib.count(block, "block")
    lib.call("kvb_cu_seqlens", lengths.ctypes.data, lengths.size, slack, block, out.ctypes.data, out.size)
    return out
