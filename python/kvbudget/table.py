"""Tables of budgets, opened, checked and asked by the C library."""

import ctypes as c
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import _library as lib
from ._library import MismatchError
from .ranking import Compared, Ranking, read_ranking

Rounding = Literal["layer_lr", "floor", "global_lr"]
Lookup = Literal["nearest", "linear"]
_ROUNDINGS, _LOOKUPS = ("layer_lr", "floor", "global_lr"), ("nearest", "linear")
_PROTECTED, _SATURATED, _LENGTH, _CLAMPED, _EFFECTIVE = 1, 2, 4, 8, 16  # KVB_WARN_*


@dataclass(frozen=True)
class ModelShape:
    """What a table must agree with: counts of layers, query heads, KV heads, and the size of a key."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """Reads a transformers config, an object with the same attributes, or a dictionary of them."""
        if isinstance(config, cls):
            return config
        if hasattr(config, "get_text_config"):
            config = config.get_text_config(decoder=True)
        given = config if isinstance(config, Mapping) else None

        def get(name: str) -> Any:
            return getattr(config, name, None) if given is None else given.get(name)

        layers, heads = get("num_hidden_layers"), get("num_attention_heads")
        if not layers or not heads:
            raise lib.KVBudgetError(
                f"the config of {type(config).__name__} lacks num_hidden_layers or num_attention_heads"
            )
        dim = get("head_dim") or (get("hidden_size") or 0) // heads
        return cls(layers, heads, get("num_key_value_heads") or heads, dim)

    def fill(self, expected: lib.Expectation) -> None:
        for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim"):
            setattr(expected, name, lib.count(getattr(self, name), name))


@dataclass(frozen=True)
class TableInfo:
    """What a table says about itself; texts that the file does not give are empty. See runtime/kvbudget.h."""

    n_rows: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    sink: int
    window: int
    metric: str
    metric_parameters: dict[str, Any]
    architecture: str
    model_id: str
    model_sha256: str
    tokenizer_sha256: str
    scope: str
    aggregate: str
    hull: str
    max_prune: float
    calibration_tokens: tuple[int, ...]
    n_contexts: int
    n_questions: int
    n_queries_min: int
    n_queries_max: int
    calibration_sha256: str
    record_sha256: str
    tool_version: str
    bounded: tuple[int, ...]  # layers without a budget, whose cache does not grow with the text: they keep all tokens
    n_budgeted: int  # how many layers have one


@dataclass(frozen=True, eq=False)
class Row(Compared):
    """What the solver found for one global ratio. Losses are shares of the oracle's total importance."""

    ratio: float
    effective_ratio: float
    loss: float
    lower_bound: float
    multiplier: float
    table_loss: float
    saturated: bool
    prune_ratio: NDArray[np.float64] = field(repr=False)  # [L, G]
    std: NDArray[np.float64] = field(repr=False)  # [L, G]


@dataclass(frozen=True, eq=False)
class Budgets(Compared):
    """How many of ``tokens`` tokens each head keeps, and the other numbers that ``kvbudget budgets`` prints."""

    keep: NDArray[np.uint32] = field(repr=False)  # [L, G]
    tokens: int
    requested_ratio: float
    effective_ratio: float  # what these integers really prune
    total: int
    keep_min: int
    keep_max: int
    heads_below_protected: int
    row: float  # of the table, in per cent
    warnings: tuple[str, ...]


class Table:
    """A table of budgets: for 99 global ratios, or fewer of the user's choice, the share that every KV head evicts.

    Immutable; any number of threads may use one. Raises :class:`KVBudgetError` with the library's message if the file
    is missing, damaged, too new or not a table.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._open(os.fspath(path), lib.read_file(path, lib.MAX_BYTES))

    def _open(self, path: str, data: bytes) -> None:
        self.path, self._data = path, data
        handle = c.c_void_p()
        lib.call("kvb_table_open_memory", c.byref(handle), data, len(data), os.fsencode(path), None)
        self._handle = handle
        self._close = weakref.finalize(self, lib.library().kvb_table_close, handle)
        #: Whether it says in which formats heads store what they keep: ratios are then of bytes (docs/bits.md).
        self.has_formats = bool(lib.library().kvb_table_has_formats(handle))
        self.info = _info(path, lib.library().kvb_table_info(handle).contents)
        info = self.info
        shape = (info.n_rows, info.n_layers, info.n_kv_heads)
        ratios = np.ctypeslib.as_array(lib.library().kvb_table_prune_ratios(handle), shape).copy()
        ratios.flags.writeable = False
        #: Prune ratios [R, L, G], read-only.
        self.prune_ratios: NDArray[np.float64] = ratios
        #: The ranking that the table carries; None if it is for a plain metric.
        self.ranking = read_ranking(lib.library().kvb_table_ranking(handle))

    def __repr__(self) -> str:
        i = self.info
        return f"Table({self.path!r}: {i.metric}, {i.n_layers} layers x {i.n_kv_heads} KV heads, {i.n_rows} ratios)"

    def __copy__(self) -> "Table":
        return self  # nothing can change it

    def __deepcopy__(self, memo: dict[int, Any]) -> "Table":
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # with the bytes that were read, since the file may change
        return _reopen, (self.path, self._data)

    def metadata(self, key: str) -> str | None:
        """Returns an entry of the file's metadata as it is, known to this version or not; None if there is none."""
        text: bytes | None = lib.library().kvb_table_metadata(self._handle, lib.text("key", key))
        return None if text is None else text.decode()

    def row(self, index: int) -> Row:
        """Returns row ``index`` of the table, counted from 0; its ratio says which one it is."""
        row = lib.Row()
        lib.call("kvb_table_row", self._handle, lib.count(index, "index"), c.byref(row))
        shape = (self.info.n_layers, self.info.n_kv_heads)
        names = ("ratio", "effective_ratio", "loss", "lower_bound", "multiplier", "table_loss")
        numbers = {name: getattr(row, name) for name in names}
        prune_ratio, std = (np.ctypeslib.as_array(a, shape).copy() for a in (row.prune_ratio, row.std))
        return Row(**numbers, saturated=bool(row.saturated), prune_ratio=prune_ratio, std=std)

    def check(
        self, config: Any = None, *, metric: str | None = None, protection: tuple[int, int] | None = None,
        model_sha256: str | None = None, hf_id: str | None = None, hf_revision: str | None = None,
        weight_files: Sequence[str | os.PathLike[str]] | None = None,
    ) -> None:  # fmt: skip
        """Raises :class:`MismatchError`, which names both sides, unless the table is for this model and scorer.

        config        a transformers config, a dictionary of its entries, or a :class:`ModelShape`
        metric        the scorer that will rank, e.g. ``"snapkv:kvpress"``
        protection    (sinks, window) that will be protected
        model_sha256  identity of the weights
        hf_id         the repository at Hugging Face that the weights are from, ``"organisation/name"``
        hf_revision   the commit there
        weight_files  all files that hold the weights (``*.safetensors``), which are read and hashed
        """
        expected = lib.Expectation()
        if config is not None:
            ModelShape.of(config).fill(expected)
        expected.metric, expected.model_sha256 = lib.text("metric", metric), lib.text("model_sha256", model_sha256)
        if protection is not None:
            sink, window = protection
            expected.has_protection = 1
            expected.sink, expected.window = lib.count(sink, "sink"), lib.count(window, "window")
        lib.call("kvb_table_check", self._handle, c.byref(expected))
        if weight_files is not None and not weight_files:
            raise lib.KVBudgetError("weight_files: expected the files that hold the weights, found none")
        mine = lib.Weights.of(weight_files or (), hf_id, hf_revision)
        lib.call("kvb_table_check_weights", self._handle, c.byref(mine))

    def rank(self, layer: int, head: int, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns scores [T] of one head's tokens from those of the ranking's metrics, float32 [F, T] (kvb_rank)."""
        features, rows = self._features(features, 2)
        out = np.empty(features.shape[1], np.float32)
        lib.call("kvb_rank", self._handle, layer, head, rows, out.size, out.ctypes.data)
        return out

    def rank_layer(self, layer: int, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns scores [G, T] of a whole layer from float32 [F, G, T], by any ranking (kvb_rank_layer)."""
        features, rows = self._features(features, 3)
        out = np.empty((features.shape[1], features.shape[2]), np.float32)
        if out.shape[0] != self.info.n_kv_heads:
            raise lib.KVBudgetError(f"{self.path}: expected {self.info.n_kv_heads} KV heads, found {out.shape[0]}")
        lib.call("kvb_rank_layer", self._handle, layer, rows, out.shape[1], out.ctypes.data)
        return out

    def _features(self, features: NDArray[np.float32], n_dims: int) -> tuple[NDArray[np.float32], Any]:
        """Returns features as the library takes them: contiguous, and a pointer for each metric."""
        features = np.ascontiguousarray(features, np.float32)
        wanted = len(self.ranking.metrics) if self.ranking else features.shape[0]
        if features.ndim != n_dims or features.shape[0] != wanted:
            raise lib.KVBudgetError(f"{self.path}: expected scores of {wanted} metrics, found {features.shape}")
        return features, (c.c_void_p * wanted)(*(row.ctypes.data for row in features))

    def keep(
        self, ratio: float, tokens: int, *, rounding: Rounding = "layer_lr", lookup: Lookup = "nearest",
        strict: bool = False, block: int = 1,
    ) -> NDArray[np.uint32]:  # fmt: skip
        """Returns how many of ``tokens`` tokens each head keeps, [L, G], if the share ``ratio`` of all is evicted.

        The defaults give kvpress's integers. If the table has formats, the ratio is the share of a bf16 cache's bytes
        that is saved, and more tokens are kept. ``strict`` keeps sinks and window in every head, ``block`` gives whole
        pages, ``lookup="linear"`` mixes the rows around a ratio, and ``rounding`` is explained in runtime/README.md.
        """
        keep = np.empty((self.info.n_layers, self.info.n_kv_heads), np.uint32)
        options = _options(rounding, lookup, strict, block)
        tokens = lib.count(tokens, "tokens")
        lib.call("kvb_budgets", self._handle, ratio, tokens, c.byref(options), _pointer(keep), keep.size)
        return keep

    def formats(self, ratio: float) -> NDArray[np.str_]:
        """Returns the names of the formats in which each head stores its keys and its values, [L, G, 2], of the row
        that :meth:`keep` uses for this ratio: "bf16", "int8", "int4" or "int2"."""
        found = np.empty((self.info.n_layers, self.info.n_kv_heads, 2), np.uint8)
        lib.call("kvb_formats", self._handle, ratio, found.ctypes.data, found.size)
        return np.array([lib.library().kvb_packing_name(i).decode() for i in range(4)])[found]

    def budgets(
        self, ratio: float, tokens: int, *, rounding: Rounding = "layer_lr", lookup: Lookup = "nearest",
        strict: bool = False, block: int = 1,
    ) -> Budgets:  # fmt: skip
        """Returns the same as keep(), and all that ``kvbudget budgets`` prints: what is really pruned, and warnings."""
        keep = self.keep(ratio, tokens, rounding=rounding, lookup=lookup, strict=strict, block=block)
        options, s = _options(rounding, lookup, strict, block), lib.Summary()
        lib.call(
            "kvb_budgets_summarize",
            *(self._handle, ratio, tokens, c.byref(options), _pointer(keep), keep.size, c.byref(s)),
        )
        return self._summed(keep, tokens, s)

    def growth(self, rule: lib.Growth, strict: bool | None = None, **options: Any) -> lib.Growth:
        """Fills in the defaults of a rule by which growing caches are cut (kvb_growth_check)."""
        options = {"lookup": "linear", "strict": bool(strict), **options}
        rule.options, rule.loose = _options(**options), strict is False
        lib.call("kvb_growth_check", self._handle, c.byref(rule))
        return rule

    def grown(self, rule: lib.Growth, tokens: int, cut_at: int = 0) -> Budgets:
        """Returns the budgets of a cache that has seen ``tokens`` tokens (kvb_growth_budgets), with a requested ratio
        of 0 if all of it is to stay."""
        keep, s = np.empty((self.info.n_layers, self.info.n_kv_heads), np.uint32), lib.Summary()
        lib.call(
            "kvb_growth_budgets",
            *(self._handle, c.byref(rule), tokens, cut_at, _pointer(keep), keep.size, c.byref(s)),
        )
        return self._summed(keep, tokens, s)

    def _summed(self, keep: NDArray[np.uint32], tokens: int, s: lib.Summary) -> Budgets:
        below, above = self._percent(s.row_below), self._percent(s.row_above)
        return Budgets(
            *(keep, tokens, s.requested_ratio, s.effective_ratio, s.total, s.keep_min, s.keep_max),
            *(s.heads_below_protected, below + s.weight * (above - below), tuple(self._warnings(s, tokens))),
        )

    def _percent(self, row: int) -> float:
        """Returns the ratio of row ``row``, counted from 1, in per cent; row 0 prunes nothing."""
        return 100 * self.row(row - 1).ratio if row else 0.0

    def _warnings(self, s: lib.Summary, tokens: int) -> list[str]:
        info, said = self.info, []
        if s.warnings & _PROTECTED:
            said.append(
                f"{s.heads_below_protected} of {info.n_layers * info.n_kv_heads} heads keep fewer than the "
                f"{info.sink + info.window} protected tokens (sink {info.sink}, window {info.window}) and lose the "
                "newest of them; strict=True spares them"
            )
        if s.warnings & _SATURATED:
            said.append(
                f"row {self._percent(s.row_above):g} % is saturated: heads stopped at the solver's floor, so less is "
                "pruned than asked for"
            )
        if s.warnings & _LENGTH:
            lengths = info.calibration_tokens
            said.append(
                f"{tokens} tokens are far from the table's calibration, {min(lengths)} to {max(lengths)} tokens"
            )
        if s.warnings & _CLAMPED:
            said.append(
                f"ratio {s.requested_ratio:g} is outside the table's rows, {self._percent(1):g} to "
                f"{self._percent(info.n_rows):g} %; row {self._percent(s.row_above):g} % was used"
            )
        if s.warnings & _EFFECTIVE:
            said.append(f"these counts prune {s.effective_ratio:.4f}, not the {s.requested_ratio:g} that was asked for")
        return said


def _reopen(path: str, data: bytes) -> Table:
    table = Table.__new__(Table)
    table._open(path, data)
    return table


def _info(path: str, i: lib.Info) -> TableInfo:
    values: dict[str, Any] = {}
    for name, *_ in lib.Info._fields_:
        value = getattr(i, name)
        values[name] = value.decode() if isinstance(value, bytes) else value
    values["bounded"] = tuple(layer for layer in range(i.n_layers) if i.bounded and i.bounded[layer])
    values["calibration_tokens"] = tuple(i.calibration_tokens[: values.pop("n_calibration_tokens")])
    try:
        values["metric_parameters"] = json.loads(values["metric_parameters"])
    except (ValueError, RecursionError) as why:  # the library's JSON is more generous than Python's
        raise lib.KVBudgetError(f'{path}: metadata "metric_parameters": {why}', "FORMAT") from None
    return TableInfo(**values)


def _options(
    rounding: str = "layer_lr", lookup: str = "nearest", strict: bool = False, block: int = 1
) -> lib.Options:
    rounding, lookup = lib.one_of("rounding", rounding, _ROUNDINGS), lib.one_of("lookup", lookup, _LOOKUPS)
    return lib.Options(_ROUNDINGS.index(rounding), _LOOKUPS.index(lookup), bool(strict), lib.count(block, "block"))


def _pointer(counts: NDArray[np.uint32]) -> Any:
    return counts.ctypes.data_as(c.POINTER(c.c_uint32))


__all__ = ["Budgets", "MismatchError", "ModelShape", "Ranking", "Row", "Table", "TableInfo"]
