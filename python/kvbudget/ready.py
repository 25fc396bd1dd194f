"""Ready tables: finds the one in the folder that is for a model of transformers."""

import ctypes as c
import os
import sys
from pathlib import Path
from typing import Any

from . import _library as lib
from .origin import hub_of, source_of
from .table import ModelShape, Table

PLACE = "share/kvbudget/tables"


def folder() -> Path:
    """Returns the folder of ready tables: KVBUDGET_TABLES, or that of the wheel, the source tree or `make install`."""
    here, named = Path(__file__).resolve().parent, os.environ.get("KVBUDGET_TABLES")
    places = [here / "tables", here.parents[1] / "tables", Path(sys.prefix) / PLACE, Path("/usr/local") / PLACE]
    return Path(named) if named else next(filter(Path.is_dir, places), places[0])


def _find(model: Any, place: Path, name: str | None, sha256: str | None = None) -> Table:
    mine, weights = lib.Expectation(), lib.Weights.of((), name, None)
    ModelShape.of(model.config).fill(mine)
    mine.model_sha256 = lib.text("model_sha256", sha256)
    path = c.create_string_buffer(4096)
    lib.call("kvb_table_find", path, len(path), os.fsencode(place), c.byref(mine), c.byref(weights))
    return Table(os.fsdecode(path.value))


def find(model: Any, packed: bool = False, refit: bool = False) -> Table:
    """Returns the table of these weights (`packed`: the one of tokens and formats; `refit`: the one for refitted caches
    if there is one, else the usual one), by the name that the model was loaded by and its shape; for a model from a
    GGUF file, by a file in its folder that has the table's hash, and by the name in that file. Raises
    :class:`MismatchError`, which says what was looked for, what comes near, and what to do."""
    place = folder() / ("refit-packed" if packed else "refit")
    if refit and place.is_dir():
        try:
            return _find_in(model, place)
        except lib.MismatchError:
            pass
    return _find_in(model, folder() / "packed" if packed else folder())


def _find_in(model: Any, place: Path) -> Table:
    source, name = source_of(model), str(getattr(model.config, "_name_or_path", "") or "")
    if source:
        name = hub_of(source).get("hf_id") or source.name
    try:
        return _find(model, place, name or None)
    except lib.MismatchError as why:
        gguf_name = getattr(model.config, "_model_name_or_path", None)  # general.name of a GGUF file
        for file in sorted(source.glob("*.gguf")) if source and gguf_name else ():
            try:
                found = _find(model, place, None, lib.file_sha256(file))
            except lib.MismatchError:
                continue
            if found.info.model_id == gguf_name:
                return found
        raise lib.MismatchError(f"{why}, and compress(model, PATH, ...) takes any table") from None
