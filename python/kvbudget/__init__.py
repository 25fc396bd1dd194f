"""Budgets of KV-cache heads in Python: open and check a table, really evict in transformers, record any model.

Only numpy is needed for tables. What needs torch and transformers, or kvpress, is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._library import KVBudgetError, MismatchError, library
from .selection import cu_seqlens, reselect, select
from .table import Budgets, ModelShape, Ranking, Row, Table, TableInfo

if TYPE_CHECKING:
    from .eviction import Run, compress
    from .presses import BudgetPress
    from .recorder import record
    from .report import Report, cache_bytes

_LATER = {
    "Report": "report",
    "Run": "eviction",
    "cache_bytes": "report",
    "compress": "eviction",
    "BudgetPress": "presses",
    "record": "recorder",
}

__all__ = [
    "Budgets",
    "BudgetPress",
    "KVBudgetError",
    "MismatchError",
    "ModelShape",
    "Ranking",
    "Report",
    "Row",
    "Run",
    "Table",
    "TableInfo",
    "cache_bytes",
    "compress",
    "cu_seqlens",
    "record",
    "reselect",
    "select",
    "version",
]


def version() -> str:
    """The version of the C library."""
    text: str = library().kvb_version().decode()
    return text


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'kvbudget' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
