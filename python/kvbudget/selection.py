"""Which tokens a head keeps, and where heads lie behind one another: the library's own selection."""

import numpy as np
from numpy.typing import NDArray

from . import _library as lib


def select(scores: NDArray[np.float32], keep: int, sink: int, window: int) -> NDArray[np.uint32]:
    """The positions, ascending, that a head keeps: protected ones first, then by score (kvb_select of the library).

    scores  float32 [T], higher = keep; a NaN raises :class:`KVBudgetError`
    """
    scores = np.ascontiguousarray(scores, np.float32)
    out = np.empty(min(keep, scores.size), np.uint32)
    lib.call("kvb_select", scores.ctypes.data, scores.size, keep, sink, window, out.ctypes.data, out.size)
    return out


def reselect(
    scores: NDArray[np.float32], places: NDArray[np.uint32], tokens: int, keep: int, sink: int, window: int
) -> NDArray[np.uint32]:
    """The rows, ascending, that a head keeps which was cut before and has grown (kvb_reselect of the library).

    scores  float32 [rows]; places: the positions of the rows' tokens, ascending; tokens: how many were seen in all
    """
    scores, places = np.ascontiguousarray(scores, np.float32), np.ascontiguousarray(places, np.uint32)
    if scores.shape != places.shape:
        raise lib.KVBudgetError(f"reselect: {scores.shape} scores for {places.shape} places")
    out = np.empty(min(keep, scores.size), np.uint32)
    lib.call(
        "kvb_reselect",
        *(scores.ctypes.data, places.ctypes.data, scores.size, tokens, keep, sink, window, out.ctypes.data, out.size),
    )
    return out


def cu_seqlens(lengths: NDArray[np.uint32], slack: int = 0, block: int = 1) -> NDArray[np.int32]:
    """Where sequences of these lengths begin and end that lie behind one another, int32 [n + 1], each with ``slack``
    free rows; with ``block`` counted in pages (kvb_cu_seqlens of the library)."""
    lengths = np.ascontiguousarray(lengths, np.uint32).ravel()
    out = np.empty(lengths.size + 1, np.int32)
    lib.call(
        "kvb_cu_seqlens",
        lengths.ctypes.data,
        lengths.size,
        lib.count(slack),
        lib.count(block),
        out.ctypes.data,
        out.size,
    )
    return out
