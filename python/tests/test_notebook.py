"""Runs the notebooks in examples/ as they are, cell by cell, on a small random model."""

import json
from pathlib import Path
from typing import Any

import pytest
from families import build
from test_chat import byte_tokenizer
from test_recorder import PROGRAM

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.skipif(not PROGRAM, reason="no program kvbudget")
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Every code cell runs, in order, and none is committed with its output."""
    tokenizer = byte_tokenizer(None)
    build("llama", vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("MODEL", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent / "python"))
    monkeypatch.chdir(EXAMPLES)
    names: dict[str, Any] = {}
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        assert cell["outputs"] == [] and cell["execution_count"] is None
        exec(compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "% saved" in said, said
