"""Budgets for the heads of a KV cache: open and check tables, really evict in transformers, record any model.

Tables need only numpy. Names that need torch and transformers, or kvpress, are imported when they are first used.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ._library import KVBudgetError, MismatchError, library
from .selection import cu_seqlens, reselect, select
from .table import Budgets, ModelShape, Ranking, Row, Table, TableInfo

if TYPE_CHECKING:
    from .cache import Cache
    from .eviction import Run, compress
    from .presses import BudgetPress
    from .recorder import record
    from .report import Report, cache_bytes

_LATER = {
    "Cache": "cache",
    "Report": "report",
    "Run": "eviction",
    "cache_bytes": "report",
    "compress": "eviction",
    "BudgetPress": "presses",
    "record": "recorder",
}

__all__ = [
    "Budgets", "BudgetPress", "Cache", "KVBudgetError", "MismatchError", "ModelShape", "Ranking", "Report", "Row",
    "Run", "Table", "TableInfo", "cache_bytes", "compress", "cu_seqlens", "record", "reselect", "select", "version",
]  # fmt: skip


def version() -> str:
    """Returns the version of the C library."""
    text: str = library().kvb_version().decode()
    return text


def _needs(name: str) -> tuple[str, ...]:
    return ("torch", "transformers", "kvpress") if name == "BudgetPress" else ("torch", "transformers")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version()
    if name not in _LATER:
        raise AttributeError(f"module 'kvbudget' has no attribute {name!r}")
    missing = [package for package in _needs(name) if importlib.util.find_spec(package) is None]
    if missing:
        extra = "kvpress" if name == "BudgetPress" else "transformers"
        raise ImportError(f"kvbudget.{name} needs {' and '.join(missing)}: pip install 'kvbudget[{extra}]'")
    return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)


def __dir__() -> list[str]:
    """Lists only names that can be imported here, since help() looks up every name in the list."""
    ready = [name for name in __all__ if name not in _LATER or all(map(importlib.util.find_spec, _needs(name)))]
    return sorted([*ready, "__version__", *(name for name in globals() if name.startswith("__"))])
