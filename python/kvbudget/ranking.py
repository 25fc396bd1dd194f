"""Learned rankings, as the C library reads them from a table or a file of `kvbudget learn`."""

import ctypes as c
import os
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _library as lib


class Compared:
    """Equality for dataclasses that hold arrays, whose own == gives an array."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [f.name for f in fields(self)]  # type: ignore[arg-type]
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)


@dataclass(frozen=True, eq=False)
class Ranking(Compared):
    """What `kvbudget learn` fitted, as a table carries it: a linear form of features per KV head (kvbudget.h)."""

    name: str  # the table's metric
    metrics: tuple[str, ...]  # whose scores are the features, in this order
    logarithm: tuple[bool, ...]  # whether the feature is the score's logarithm
    sink: int  # first tokens that take no part in means and deviations
    # [L, G, P]: for z and z|z| of each feature; with layer_mean for the mean of z over the layer, of each; if frozen,
    # mean and 1 / deviation of each; for recency; a constant
    weights: NDArray[np.float64] = field(repr=False)
    layer_mean: bool  # heads of a layer can only be ranked together
    frozen: bool  # means and deviations are the calibration's, whatever was evicted


def read_ranking(handle: Any) -> Ranking | None:
    """Returns a copy of the library's kvb_ranking; None if there is none, since the table is for a plain metric."""
    if not handle:
        return None
    r = lib.library().kvb_ranking_about(handle).contents
    weights = np.ctypeslib.as_array(r.weights, (r.n_layers, r.n_kv_heads, r.n_columns)).copy()
    weights.flags.writeable = False
    metrics = tuple(name.decode() for name in r.metrics[: r.n_features])
    logarithm = tuple(map(bool, r.logarithm[: r.n_features]))
    return Ranking(r.name.decode(), metrics, logarithm, r.sink, weights, bool(r.layer_mean), bool(r.frozen))


def open_ranking(path: str | os.PathLike[str]) -> Ranking:
    """Reads the ranking in a file of `kvbudget learn`, or in a table that was made with one."""
    handle = c.c_void_p()
    data = lib.read_file(path, lib.MAX_BYTES)
    lib.call("kvb_ranking_open_memory", c.byref(handle), data, len(data), os.fsencode(path))
    try:
        found = read_ranking(handle)
        assert found is not None
        return found
    finally:
        lib.library().kvb_ranking_close(handle)
