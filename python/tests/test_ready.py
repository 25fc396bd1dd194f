"""compress(model, "auto", ...) finds the ready table for a model's weights, or refuses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import write_table
from families import build
from transformers import AutoModelForCausalLM

import kvbudget
from kvbudget import ready
from kvbudget.table import ModelShape


def table_of(model: Any, path: Path, **more: str) -> Path:
    shape = ModelShape.of(model.config)
    return write_table(path, shape.n_layers, shape.n_heads, shape.n_kv_heads, shape.head_dim, **more)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a small random model, loaded from a folder with its name; the folder of tables has one for it."""
    build("llama").save_pretrained(tmp_path / "Base-1M")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "Base-1M").eval()
    folder = tmp_path / "tables"
    folder.mkdir()
    monkeypatch.setenv("KVBUDGET_TABLES", str(folder))
    table_of(model, folder / "base-1m.safetensors", model_names="Org/Base-1M,Org/Base-1M-GGUF")
    write_table(folder / "another.safetensors", 7, 4, 2, 16, model_names="Org/Another")
    return model


def test_auto(base: Any) -> None:
    ids = torch.arange(3, 63)[None]
    with kvbudget.compress(base, "auto", 0.5) as run:
        base.generate(ids, max_new_tokens=2, do_sample=False)
    assert run.table.path.endswith("tables/base-1m.safetensors")
    assert abs(run.report().effective_ratio - 0.5) < 0.05
    packed = ready.folder() / "packed"
    packed.mkdir()
    table_of(base, packed / "base-1m.safetensors", model_names="Org/Base-1M")
    assert kvbudget.compress(base, "auto:packed", 0.5).table.path == str(packed / "base-1m.safetensors")
    refitted = ready.folder() / "refit-packed"
    refitted.mkdir()
    assert ready.find(base, packed=True, refit=True).path == str(packed / "base-1m.safetensors")  # the next best
    table_of(base, refitted / "base-1m.safetensors", model_names="Org/Base-1M")
    run = kvbudget.compress(base, "auto:packed", 0.5, refit=True)
    assert run.table.path == str(refitted / "base-1m.safetensors")
    run = kvbudget.compress(base, "auto", 0.5)
    for name in ("Org/Base-1M", "org/base-1m-gguf"):
        base.config._name_or_path = name
        assert ready.find(base).path == run.table.path


@pytest.mark.parametrize("name", ["Org/Base-1M-chat", "Else/Base-1M", "Base-1", ""])
def test_another_model_of_that_shape(base: Any, name: str) -> None:
    base.config._name_or_path = name
    with pytest.raises(kvbudget.MismatchError) as why:
        kvbudget.compress(base, "auto", 0.5)
    for words in (f'"{name}"', "base-1m.safetensors has this shape and is for Org/Base-1M,", "kvbudget tune", "PATH"):
        assert words in str(why.value)


def test_another_shape(base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base.config.num_hidden_layers += 1
    with pytest.raises(kvbudget.MismatchError, match="n_layers: expected"):
        ready.find(base)
    monkeypatch.setenv("KVBUDGET_TABLES", str(tmp_path / "none"))
    with pytest.raises(kvbudget.KVBudgetError, match="none: opening the folder"):
        ready.find(base)


def test_gguf(base: Any, tmp_path: Path) -> None:
    """A GGUF file in the model's folder is recognised by its hash, if the model has the table's name."""
    source = tmp_path / "files"
    source.mkdir()
    (source / "a.gguf").write_bytes(b"another one")
    (source / "b.gguf").write_bytes(b"the weights")
    hash_of = kvbudget._library.file_sha256(source / "b.gguf")
    table_of(base, tmp_path / "tables" / "gguf.safetensors", model_sha256=hash_of, model_id="A name")
    base.config._name_or_path = str(source)
    base.config._model_name_or_path = "A name"
    assert ready.find(base).path.endswith("tables/gguf.safetensors")
    base.config._model_name_or_path = "Another name"
    with pytest.raises(kvbudget.MismatchError, match="has this shape"):
        ready.find(base)


def test_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of the tree are found by the models' shapes and names at Hugging Face."""
    monkeypatch.delenv("KVBUDGET_TABLES", raising=False)
    for name, *shape in (
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 9, 3, 64),
        ("google/gemma-3-270m", 18, 4, 1, 256),
        ("Qwen/Qwen2.5-Coder-0.5B-Instruct", 24, 14, 2, 64),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", 28, 12, 2, 128),
    ):
        keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
        model = SimpleNamespace(config=SimpleNamespace(_name_or_path=name, **dict(zip(keys, shape))))
        assert Path(ready.find(model).path).stem == name.split("/")[1].lower()
        model.config._name_or_path += "-it"
        with pytest.raises(kvbudget.MismatchError, match=name):
            ready.find(model)
