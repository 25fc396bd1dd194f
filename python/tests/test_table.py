"""Tables: the library's answers reach Python; wrong tables are refused with errors that name both sides."""

import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvbudget

PROGRAM = os.environ.get("KVBUDGET_PROGRAM") or shutil.which("kvbudget")


@pytest.fixture
def path(make_table: Any) -> Path:
    found: Path = make_table(4, 8, 2, 16, sink=4, window=3)
    return found


def test_info_and_rows(path: Path) -> None:
    """The file's description and its rows reach Python unchanged."""
    table = kvbudget.Table(path)
    assert (table.info.n_rows, table.info.n_layers, table.info.n_heads, table.info.n_kv_heads) == (99, 4, 8, 2)
    assert (table.info.sink, table.info.window, table.info.metric) == (4, 3, "keydiff")
    assert table.info.calibration_tokens == (48,) and table.info.metric_parameters == {}
    assert table.info.bounded == () and table.info.n_budgeted == 4
    row = table.row(79)
    assert row.ratio == 0.8 and row.prune_ratio.shape == (4, 2) and not row.saturated
    assert np.array_equal(row.prune_ratio, table.prune_ratios[79])
    assert table.metadata("scope") == "global" and table.metadata("no such key") is None
    with pytest.raises(kvbudget.KVBudgetError, match="row"):
        table.row(99)


def test_budgets_are_those_of_the_program(path: Path) -> None:
    """Every number equals that of `kvbudget budgets`, for all of its options, to the bit."""
    if not PROGRAM:
        pytest.skip("no program kvbudget")
    table = kvbudget.Table(path)
    for ratio, tokens, options in (
        (0.5, 1000, {}), (0.83, 77, {"strict": True}), (0.345, 513, {}), (0.7, 640, {"block": 16}), (0.0, 9, {})
    ):
        flags = [w for k, v in options.items() for w in ((f"--{k}",) if v is True else (f"--{k}", str(v)))]
        words = [PROGRAM, "budgets", path, "--json", "-r", str(ratio), "-t", str(tokens), *flags]
        shown = subprocess.run(words, capture_output=True, text=True)
        wanted, found = json.loads(shown.stdout), table.budgets(ratio, tokens, **options)
        assert found.keep.tolist() == wanted["details"][0]["keep"]
        assert np.array_equal(found.keep, table.keep(ratio, tokens, **options))
        for name in ("total", "keep_min", "keep_max", "effective_ratio", "row"):
            assert getattr(found, name) == pytest.approx(wanted["settings"][name], abs=1e-12), name
        assert len(found.warnings) == len(wanted["settings"]["warnings"])
        for ours, theirs in zip(found.warnings, wanted["settings"]["warnings"]):  # apart from the name of an option
            assert ours.replace("strict=True", "--strict") == theirs


def test_a_table_of_another_model_metric_or_protection_is_refused(path: Path) -> None:
    """The error names both sides."""
    table = kvbudget.Table(path)
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    table.check(config, metric="keydiff", protection=(4, 3))
    for wrong, sides in (
        ({"config": config | {"num_hidden_layers": 5}}, ("expected 5", "says 4")),
        ({"config": config | {"num_key_value_heads": 4}}, ("expected 4", "says 2")),
        ({"config": config | {"head_dim": 32}}, ("expected 32", "says 16")),
        ({"metric": "snapkv:kvpress"}, ("expected snapkv:kvpress", "says keydiff")),
        ({"protection": (4, 64)}, ("expected 64", "says 3")),
        ({"model_sha256": "ab" * 32}, ("expected abab", "says nothing")),
    ):
        with pytest.raises(kvbudget.MismatchError) as refusal:
            table.check(**wrong)
        assert all(side in str(refusal.value) for side in sides) and refusal.value.status == "MISMATCH"


def test_a_table_of_other_weights_is_refused(make_table: Callable[..., Path], tmp_path: Path) -> None:
    """Hashes of weight files and names at Hugging Face must match; an entry that the table lacks does not match."""
    files = [tmp_path / "1.bin", tmp_path / "2.bin"]
    for file in files:
        file.write_bytes(file.name.encode())
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    said = {"model_files": json.dumps(hashes), "hf_id": "org/name", "hf_revision": "0123"}
    table, silent = kvbudget.Table(make_table(4, 8, 2, 16, **said)), kvbudget.Table(make_table(4, 8, 2, 16))
    table.check(weight_files=files[::-1], hf_id="org/name", hf_revision="0123")
    for other, wrong, sides in (
        (table, {"weight_files": files[:1]}, ("1 files", "has 2")),
        (table, {"weight_files": [files[0], __file__]}, ("file 1", "and 0 of the table's 2")),
        (table, {"hf_id": "org/other"}, ("expected org/other", "says org/name")),
        (table, {"hf_revision": "4567"}, ("expected 4567", "says 0123")),
        (silent, {"hf_id": "org/name"}, ("expected org/name", "says nothing")),
        (silent, {"weight_files": files}, ("2 files", "has 0")),
    ):
        with pytest.raises(kvbudget.MismatchError) as refusal:
            other.check(**wrong)
        assert all(side in str(refusal.value) for side in sides), str(refusal.value)


@pytest.mark.parametrize("ratio", [1.0, 1.5, float("nan"), float("inf")])
def test_ratios_that_mean_nothing(path: Path, ratio: float) -> None:
    """Ratios of 1 and above, and NaN, are an error."""
    with pytest.raises(kvbudget.KVBudgetError, match="ratio"):
        kvbudget.Table(path).keep(ratio, 100)


def test_edges(path: Path) -> None:
    """Ratio 0, one token, fewer tokens than are protected: the documented results; wrong counts are refused."""
    table = kvbudget.Table(path)
    assert (table.keep(0.0, 100) == 100).all() and (table.keep(0.99, 1) == 1).all()
    assert table.keep(0.8, 100, strict=True).min() >= 7
    assert (table.keep(0.8, 5, strict=True) == 5).all()  # fewer tokens than are protected
    assert "lose the newest" in " ".join(table.budgets(0.95, 20).warnings)
    for wrong in ({"tokens": -1}, {"tokens": 2**32}, {"tokens": 10, "rounding": "up"}, {"tokens": 10, "block": -2}):
        with pytest.raises(kvbudget.KVBudgetError):
            table.keep(0.5, **wrong)
    with pytest.raises(ValueError):
        table.prune_ratios[0, 0, 0] = 0.5


def test_damaged_files(path: Path, tmp_path: Path) -> None:
    """Cut-off and missing files are refused by name."""
    whole = path.read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:cut])
        with pytest.raises(kvbudget.KVBudgetError) as refusal:
            kvbudget.Table(tmp_path / "cut")
        assert refusal.value.status == "FORMAT" and "cut" in str(refusal.value)
    with pytest.raises(kvbudget.KVBudgetError) as refusal:
        kvbudget.Table(tmp_path / "missing")
    assert refusal.value.status == "IO"


def test_select() -> None:
    """Protected tokens first, then by score, equal scores by position; a NaN is refused."""
    scores = np.array([0.0, 5, 5, 1, 9, -1], np.float32)
    assert kvbudget.select(scores, 4, 1, 1).tolist() == [0, 1, 4, 5]
    assert kvbudget.select(scores, 9, 1, 1).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(kvbudget.KVBudgetError, match="NaN|nan"):
        kvbudget.select(np.full(4, np.nan, np.float32), 2, 0, 0)


def test_counts_are_whole_and_fit(path: Path) -> None:
    """Counts that ctypes and NumPy would truncate (to 32 bits, 7.9 to 7) are refused."""
    table, scores = kvbudget.Table(path), np.arange(6, dtype=np.float32)
    places = np.arange(6, dtype=np.uint32)
    for wrong in (-1, 2**32, 2**32 + 3, 7.9, "7", None):
        for call in (
            lambda n: kvbudget.select(scores, n, 0, 0),
            lambda n: kvbudget.select(scores, 3, n, 0),
            lambda n: kvbudget.select(scores, 3, 0, n),
            lambda n: kvbudget.reselect(scores, places, n, 3, 0, 0),
            lambda n: kvbudget.reselect(scores, places, 6, n, 0, 0),
            lambda n: kvbudget.cu_seqlens(places, slack=n),
            lambda n: kvbudget.cu_seqlens([n, 1]),
            lambda n: table.row(n),
            lambda n: table.keep(0.5, n),
            lambda n: table.budgets(0.5, 100, block=n),
            lambda n: table.rank(n, 0, scores[None]),
            lambda n: table.check(protection=(n, 3)),
            lambda n: table.check(kvbudget.ModelShape(n, 8, 2, 16)),
        ):
            with pytest.raises(kvbudget.KVBudgetError, match="whole number|0 to 4294967295"):
                call(wrong)
    assert table.keep(0.5, np.int64(100)).sum() == table.keep(0.5, 100).sum()
    for wrong in (scores.reshape(2, 3), np.float32(1)):
        with pytest.raises(kvbudget.KVBudgetError, match="of one head"):
            kvbudget.select(wrong.reshape(-1, 1) if wrong.ndim == 0 else wrong, 1, 0, 0)
    for ratio in ("80%", "0.8", None, [0.5]):
        with pytest.raises(kvbudget.KVBudgetError, match="ratio: expected a number such as 0.8"):
            table.keep(ratio, 100)


def test_numbers_that_hold_arrays_are_compared(path: Path) -> None:
    """== of these objects is a bool, although == of their arrays is an array."""
    table = kvbudget.Table(path)
    assert table.budgets(0.5, 100) == table.budgets(0.5, 100) != table.budgets(0.5, 101)
    assert table.row(3) == table.row(3) != table.row(4)
    assert (table.row(3) == 3) is False


def test_texts_end_where_they_end(path: Path) -> None:
    """Texts with a NUL character, where C would stop reading, and empty names are refused."""
    table = kvbudget.Table(path)
    with pytest.raises(kvbudget.KVBudgetError, match="null") as refusal:
        kvbudget.Table(str(path) + "\0.other")
    assert refusal.value.status == "IO"
    for name in ("metric", "model_sha256", "hf_id", "hf_revision"):
        for wrong in ("", "keydiff\0"):
            with pytest.raises(kvbudget.KVBudgetError, match=name):
                table.check(**{name: wrong})
    with pytest.raises(kvbudget.KVBudgetError, match="key"):
        table.metadata("metric\0")
    with pytest.raises(kvbudget.KVBudgetError, match="weight_files: expected the files"):
        table.check(weight_files=[])


def test_parameters_that_python_cannot_read(make_table: Any) -> None:
    """The library's JSON reader accepts 1., Python's does not: an error, instead of no parameters."""
    with pytest.raises(kvbudget.KVBudgetError, match="metric_parameters") as refusal:
        kvbudget.Table(make_table(4, 4, 2, 16, metric_parameters='{"window":1.}'))
    assert refusal.value.status == "FORMAT"


def test_what_a_shell_shows(tmp_path: Path) -> None:
    """dir() and help() list what is available; using anything else raises an error that names the extra to install."""
    import sys

    assert kvbudget.__version__ == kvbudget.version()
    code = (
        "import importlib.util, pydoc, sys, kvbudget; torch = importlib.util.find_spec('torch') is not None\n"
        "assert 'Table' in dir(kvbudget) and ('compress' in dir(kvbudget)) == torch\n"
        "text = pydoc.plain(pydoc.render_doc(kvbudget))\n"
        "assert (' compress(' in text) == torch and ' class Table(' in text, text\n"
        "if not torch: kvbudget.compress\n"
    )
    for flags in ([], ["-S"]):  # without site-packages there is no torch; NumPy is found by its path
        (tmp_path / "numpy").symlink_to(Path(np.__file__).parent) if flags else None
        folders = [str(Path(kvbudget.__file__).parents[1]), str(tmp_path)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
        ran = subprocess.run([sys.executable, *flags, "-c", code], env=env, capture_output=True, text=True)
        said = ran.stderr.splitlines()[-1] if ran.stderr else ""
        assert (ran.returncode == 0) == (not flags), ran.stderr
        assert not flags or said == (
            "ImportError: kvbudget.compress needs torch and transformers: pip install 'kvbudget[transformers]'"
        )
    if PROGRAM:
        ran = subprocess.run([sys.executable, "-m", "kvbudget", "--version"], capture_output=True, text=True)
        assert ran.returncode == 0 and kvbudget.__version__ in ran.stdout.splitlines()[0]


def test_threads_and_copies(path: Path, make_table: Any) -> None:
    """One table serves several threads; copies and pickles outlive it and its file, and never read another one."""
    import copy
    import pickle

    table = kvbudget.Table(path)
    wanted, found = table.keep(0.7, 300), []
    threads = [threading.Thread(target=lambda: found.append(table.keep(0.7, 300))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8 and all(np.array_equal(f, wanted) for f in found)
    copies = [copy.copy(table), copy.deepcopy(table)]
    del table
    path.write_bytes(make_table(4, 8, 2, 16, seed=1).read_bytes())  # now another table
    copies += [pickle.loads(pickle.dumps(copies[0])), copy.deepcopy(copies[1])]
    path.unlink()
    copies.append(pickle.loads(pickle.dumps(copies[-2])))
    assert all(np.array_equal(t.keep(0.7, 300), wanted) and t.path == str(path) for t in copies)


def test_without_a_library() -> None:
    """Without the library the error says how to get it."""
    import sys

    code = "import kvbudget; kvbudget.version()"
    env = os.environ | {"KVBUDGET_LIBRARY": "/nowhere/libkvbudget.so"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ran.returncode == 1 and "KVBUDGET_LIBRARY" in ran.stderr.splitlines()[-1]


def test_a_library_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with other arithmetic would silently give other budgets: it is refused, and both versions are named."""
    from kvbudget import _library

    monkeypatch.setattr(_library, "BUDGETS_VERSION", 99)
    _library.library.cache_clear()
    try:
        with pytest.raises(ImportError, match="computes budgets of version [0-9]+, this package expects 99"):
            kvbudget.version()
    finally:
        monkeypatch.undo()
    assert kvbudget.version()


def test_a_table_of_a_newer_format(make_table: Any) -> None:
    """A format that this version does not know is refused by its number."""
    with pytest.raises(kvbudget.KVBudgetError, match="version") as refusal:
        kvbudget.Table(make_table(4, 4, 2, 16, format_version="9"))
    assert refusal.value.status == "VERSION"


def test_import_is_light() -> None:
    """Importing the package does not import torch."""
    import sys

    code = "import kvbudget, sys; assert not {'torch', 'transformers', 'kvpress'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reselect_takes_protected_rows_then_the_best() -> None:
    """The library's selection among rows that earlier cuts have left."""
    places = np.array([0, 1, 5, 6, 8, 9], np.uint32)
    scores = np.array([0, 0, 2, 1, 0, 0], np.float32)
    assert kvbudget.reselect(scores, places, 10, 5, 2, 2).tolist() == [0, 1, 2, 4, 5]
    assert kvbudget.reselect(scores, places, 10, 9, 2, 2).tolist() == [0, 1, 2, 3, 4, 5]
    everything = np.arange(6, dtype=np.uint32)
    assert np.array_equal(kvbudget.reselect(scores, everything, 6, 3, 1, 1), kvbudget.select(scores, 3, 1, 1))
    with pytest.raises(kvbudget.KVBudgetError, match=r"places\[2\]"):
        kvbudget.reselect(scores, places[[0, 2, 1, 3, 4, 5]], 10, 5, 2, 2)
    with pytest.raises(kvbudget.KVBudgetError, match="scores for"):
        kvbudget.reselect(scores, places[:5], 10, 5, 2, 2)


def test_cu_seqlens_counts_rows_or_pages() -> None:
    """Offsets count rows and their slack, or whole pages."""
    lengths = np.array([[3, 0], [16, 17]], np.uint32)
    assert kvbudget.cu_seqlens(lengths).tolist() == [0, 3, 3, 19, 36]
    assert kvbudget.cu_seqlens(lengths, slack=1, block=16).tolist() == [0, 1, 2, 4, 6]
    assert kvbudget.cu_seqlens(lengths).dtype == np.int32
    with pytest.raises(kvbudget.KVBudgetError, match="batch smaller"):
        kvbudget.cu_seqlens(np.array([2**31], np.uint32))


def test_the_serving_guides_selection_on_a_device_is_the_librarys() -> None:
    """The lines in SERVING.md choose what kvb_select chooses."""
    torch = pytest.importorskip("torch")
    guide = (Path(__file__).parents[2] / "runtime" / "SERVING.md").read_text()
    code = next(block for block in guide.split("```python\n")[1:] if "def select_on_device" in block).split("```")[0]
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    rng = np.random.default_rng(3)
    for n_tokens, sink, window in ((50, 4, 8), (50, 0, 0), (9, 4, 8), (300, 4, 64)):
        scores = rng.integers(-3, 4, (5, n_tokens)).astype(np.float32)  # many ties
        scores[0, 0] = np.inf
        keep = [1, n_tokens, n_tokens // 2, 3, n_tokens // 3]
        found = names["select_on_device"](torch.from_numpy(scores), keep, sink, window)
        for row, k, positions in zip(scores, keep, found):
            assert positions.tolist() == kvbudget.select(row, k, sink, window).tolist()
