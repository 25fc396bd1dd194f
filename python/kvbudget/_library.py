"""libkvbudget through ctypes: the C library is the one source of budgets, limits, selection and checks.

If the environment variable KVBUDGET_LIBRARY is set, it names the library. Else it is the one inside of the package
(wheels contain it), or the one that the system's linker finds. Structures and signatures repeat runtime/kvbudget.h.
"""

import ctypes as c
import functools
import hashlib
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SONAME = "libkvbudget.so.0"
MAX_BYTES = 64 << 20  # the library's limit for a table or a ranking
BUDGETS_VERSION = 3  # version of the arithmetic that this package expects


class KVBudgetError(ValueError):
    """An error of the C library or of this package. ``status`` is its name in C, such as ``MISMATCH`` or ``FORMAT``."""

    def __init__(self, message: str, status: str = "ARGUMENT"):
        super().__init__(message)
        self.status = status


class MismatchError(KVBudgetError):
    """Two things that belong together differ; the message names what was expected and what was found."""

    def __init__(self, message: str, status: str = "MISMATCH"):
        super().__init__(message, status)


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Error(c.Structure):
    _fields_ = [("status", c.c_int), ("message", c.c_char * 512)]


class Info(c.Structure):
    _fields_ = [
        *_fields(c.c_uint32, "n_rows n_layers n_heads n_kv_heads head_dim sink window"),
        *_fields(c.c_char_p, "metric metric_parameters architecture model_id model_sha256 tokenizer_sha256"),
        *_fields(c.c_char_p, "scope aggregate hull"),
        ("max_prune", c.c_double),
        ("calibration_tokens", c.POINTER(c.c_uint32)),
        *_fields(c.c_uint32, "n_calibration_tokens n_contexts n_questions n_queries_min n_queries_max"),
        *_fields(c.c_char_p, "calibration_sha256 record_sha256 tool_version"),
        ("bounded", c.POINTER(c.c_uint8)),
        ("n_budgeted", c.c_uint32),
    ]


class Row(c.Structure):
    _fields_ = [
        *_fields(c.c_double, "ratio effective_ratio loss lower_bound multiplier table_loss"),
        ("saturated", c.c_int),
        *_fields(c.POINTER(c.c_double), "prune_ratio std"),
    ]


class RankingInfo(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        *_fields(c.c_uint32, "n_layers n_kv_heads n_features n_columns"),
        ("metrics", c.POINTER(c.c_char_p)),
        ("logarithm", c.POINTER(c.c_int)),
        ("sink", c.c_uint32),
        *_fields(c.c_char_p, "model_sha256 about"),
        ("weights", c.POINTER(c.c_double)),
        *_fields(c.c_int, "layer_mean frozen"),
    ]


class Expectation(c.Structure):
    _fields_ = [
        *_fields(c.c_uint32, "n_layers n_heads n_kv_heads head_dim"),
        *_fields(c.c_char_p, "model_sha256 metric"),
        ("has_protection", c.c_int),
        *_fields(c.c_uint32, "sink window"),
    ]


def file_sha256(path: str | os.PathLike[str]) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            found.update(piece)
    return found.hexdigest()


class Weights(c.Structure):
    _fields_ = [
        ("file_sha256", c.POINTER(c.c_char_p)),
        ("n_files", c.c_uint32),
        ("hf_id", c.c_char_p),
        ("hf_revision", c.c_char_p),
    ]

    @classmethod
    def of(cls, files: Sequence[str | os.PathLike[str]], hf_id: str | None, hf_revision: str | None) -> "Weights":
        """Reads and hashes the files."""
        hashes = [file_sha256(path).encode() for path in files]
        found = cls((c.c_char_p * len(hashes))(*hashes), len(hashes))
        found.hf_id, found.hf_revision = text("hf_id", hf_id), text("hf_revision", hf_revision)
        return found


class Options(c.Structure):
    _fields_ = [("rounding", c.c_int), ("lookup", c.c_int), ("strict", c.c_int), ("block", c.c_uint32)]


class Growth(c.Structure):
    _fields_ = [
        ("ratio", c.c_double),
        *_fields(c.c_uint32, "target_size interval buffer least"),
        ("options", Options),
        ("loose", c.c_int),
        *_fields(c.c_uint32, "sink window"),
    ]


class Summary(c.Structure):
    _fields_ = [
        *_fields(c.c_double, "requested_ratio effective_ratio"),
        ("total", c.c_uint64),
        *_fields(c.c_uint32, "keep_min keep_max heads_below_protected row_below row_above"),
        ("weight", c.c_double),
        ("warnings", c.c_uint),
    ]


_TABLE, _ERROR, _COUNTS = c.c_void_p, c.POINTER(Error), c.POINTER(c.c_uint32)
_BUDGET = [_TABLE, c.c_double, c.c_uint32, c.POINTER(Options), _COUNTS, c.c_size_t]
_STATUS: dict[str, list[Any]] = {  # functions that return a kvb_status and take a kvb_error last
    "kvb_table_open_memory": [c.POINTER(_TABLE), c.c_char_p, c.c_size_t, c.c_char_p, c.c_void_p, _ERROR],
    "kvb_ranking_open_memory": [c.POINTER(c.c_void_p), c.c_char_p, c.c_size_t, c.c_char_p, _ERROR],
    "kvb_table_row": [_TABLE, c.c_uint32, c.POINTER(Row), _ERROR],
    "kvb_table_check": [_TABLE, c.POINTER(Expectation), _ERROR],
    "kvb_table_check_weights": [_TABLE, c.POINTER(Weights), _ERROR],
    "kvb_table_find": [c.c_char_p, c.c_size_t, c.c_char_p, c.POINTER(Expectation), c.POINTER(Weights), _ERROR],
    "kvb_budgets": [*_BUDGET, _ERROR],
    "kvb_budgets_summarize": [*_BUDGET, c.POINTER(Summary), _ERROR],
    "kvb_growth_check": [_TABLE, c.POINTER(Growth), _ERROR],
    "kvb_growth_budgets": [
        _TABLE, c.POINTER(Growth), c.c_uint32, c.c_uint32, _COUNTS, c.c_size_t, c.POINTER(Summary), _ERROR
    ],
    "kvb_formats": [_TABLE, c.c_double, c.c_void_p, c.c_size_t, _ERROR],
    "kvb_unpack": [c.c_int, c.c_int, c.c_void_p, c.c_uint32, c.c_uint32, c.c_void_p, _ERROR],
    "kvb_select": [c.c_void_p, *[c.c_uint32] * 4, c.c_void_p, c.c_size_t, _ERROR],
    "kvb_reselect": [c.c_void_p, c.c_void_p, *[c.c_uint32] * 5, c.c_void_p, c.c_size_t, _ERROR],
    "kvb_rank_layer": [_TABLE, c.c_uint32, c.POINTER(c.c_void_p), c.c_uint32, c.c_void_p, _ERROR],
    "kvb_rank": [_TABLE, c.c_uint32, c.c_uint32, c.POINTER(c.c_void_p), c.c_uint32, c.c_void_p, _ERROR],
    "kvb_cu_seqlens": [c.c_void_p, c.c_size_t, c.c_uint32, c.c_uint32, c.c_void_p, c.c_size_t, _ERROR],
}
_OTHER: dict[str, tuple[list[Any], Any]] = {
    "kvb_status_name": ([c.c_int], c.c_char_p),
    "kvb_version": ([], c.c_char_p),
    "kvb_budgets_version": ([], c.c_uint32),
    "kvb_table_close": ([_TABLE], None),
    "kvb_table_info": ([_TABLE], c.POINTER(Info)),
    "kvb_table_metadata": ([_TABLE, c.c_char_p], c.c_char_p),
    "kvb_table_ranking": ([_TABLE], c.c_void_p),
    "kvb_table_has_formats": ([_TABLE], c.c_int),
    "kvb_growth_due": ([c.POINTER(Growth), c.c_uint32, c.c_uint32, c.c_int], c.c_int),
    "kvb_packing_name": ([c.c_int], c.c_char_p),
    "kvb_ranking_close": ([c.c_void_p], None),
    "kvb_ranking_about": ([c.c_void_p], c.POINTER(RankingInfo)),
    "kvb_table_prune_ratios": ([_TABLE], c.POINTER(c.c_double)),
}


def _candidates() -> list[str]:
    """Returns the paths to try, best first; a name without a folder is left to the system's linker."""
    named = os.environ.get("KVBUDGET_LIBRARY")
    bundled = Path(__file__).parent / "lib" / SONAME
    return [named] if named else [str(bundled)] * bundled.exists() + [SONAME]


@functools.cache
def library() -> c.CDLL:
    """Returns the library, loaded once. Raises ImportError if there is none or its budgets are of another version."""
    tried = []
    for path in _candidates():
        try:
            found = c.CDLL(path)
            break
        except OSError as why:
            tried.append(f"{path}: {why}")
    else:
        raise ImportError(
            "libkvbudget was not found: install a wheel of kvbudget, run `make install`, or set KVBUDGET_LIBRARY "
            "to libkvbudget.so (" + "; ".join(tried) + ")"
        )
    for name, arguments in _STATUS.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, c.c_int
    for name, (taken, result) in _OTHER.items():
        function = getattr(found, name)
        function.argtypes, function.restype = taken, result
    if found.kvb_budgets_version() != BUDGETS_VERSION:
        raise ImportError(
            f"{found._name}: computes budgets of version {found.kvb_budgets_version()}, this package expects "
            f"{BUDGETS_VERSION}; install both from the same release"
        )
    return found


def call(name: str, *arguments: Any) -> None:
    """Calls a function that returns a kvb_status; a failure becomes an exception with the library's message.

    Every count and ratio goes through :func:`count` and :func:`real`, because ctypes silently cuts off bits that do not
    fit.
    """
    error, kinds = Error(), {c.c_uint32: count, c.c_double: real}
    checked = (kinds[t](a) if t in kinds else a for a, t in zip(arguments, _STATUS[name]))
    status = getattr(library(), name)(*checked, c.byref(error))
    if status == 0:
        return
    text, kind = error.message.decode(errors="replace"), library().kvb_status_name(status).decode()
    raise MismatchError(text) if kind == "MISMATCH" else KVBudgetError(text, kind)


def count(value: Any, name: str = "a count", most: int = 2**32 - 1) -> int:
    """Returns a whole number as int if it is from 0 to ``most``. ``name`` is what messages call it."""
    try:
        found = operator.index(value)
    except TypeError:
        raise KVBudgetError(f"{name}: expected a whole number, found {value!r}") from None
    if not 0 <= found <= most:
        raise KVBudgetError(f"{name}: expected 0 to {most}, found {found}")
    return found


def one_of(name: str, value: Any, known: Sequence[str]) -> str:
    if value not in known:
        raise KVBudgetError(f"{name}: expected one of {', '.join(known)}, found {value!r}")
    return str(value)


def real(value: Any, name: str = "ratio") -> float:
    """Returns a number as float; a text such as "80%" is refused."""
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise KVBudgetError(f"{name}: expected a number such as 0.8, found {value!r}")


def text(name: str, value: str | None) -> bytes | None:
    """Encodes a text for C. None means that it is not to be compared, so an empty text is refused as a mistake."""
    if value is None:
        return None
    if not value or "\0" in value:
        raise KVBudgetError(f"{name}: expected a text, found {value!r}; leave it out if it is not to be compared")
    return value.encode()


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """Reads a file; of a larger one only ``most`` + 1 bytes, which the library then refuses."""
    try:
        with open(path, "rb") as file:
            return file.read(most + 1)
    except OSError as why:
        raise KVBudgetError(f"{os.fspath(path)}: opening: {why.strerror}", "IO") from None
    except ValueError as why:  # a NUL character, at which C would end the name
        raise KVBudgetError(f"{os.fspath(path)!r}: opening: {why}", "IO") from None
