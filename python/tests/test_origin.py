"""Identity: a record of the recorder names files, repository, commit and shape as `kvbudget profile` does."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from families import build
from test_recorder import PROGRAM, lines
from transformers import AutoModelForCausalLM

import kvbudget
from kvbudget import origin

h5py = pytest.importorskip("h5py")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAMES = ("model_container", "model_files", "model_shape", "hf_id", "hf_revision")


def identity(record: Path) -> dict[str, Any]:
    with h5py.File(record) as f:
        found = {n: t.decode() if isinstance(t := f.attrs[n], bytes) else t for n in NAMES if n in f.attrs}
    return {n: json.loads(t) if t.startswith("{") else t for n, t in found.items()}


@pytest.mark.parametrize("shards", [False, True])
def test_as_the_profiler(shards: bool, tmp_path: Path) -> None:
    """For a snapshot of the hub's cache, whole or in shards, entries equal the profiler's; the table checks files."""
    folder = tmp_path / "models--org--tiny-1" / "snapshots" / COMMIT
    build("llama").save_pretrained(folder, max_shard_size="200KB" if shards else "1GB")
    model = AutoModelForCausalLM.from_pretrained(folder)
    ours = kvbudget.record(model, None, lines(tmp_path, n=1), ["keydiff"], output=tmp_path / "ours.h5")
    theirs = tmp_path / "theirs.h5"
    words = (PROGRAM, "profile", folder, tmp_path / "calib.jsonl", "-m", "keydiff", "-o", theirs, "--quiet")
    subprocess.run(words, check=True)
    found = identity(ours)
    assert found == identity(theirs) and found["hf_id"] == "org/tiny-1" and found["hf_revision"] == COMMIT
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 1) == shards and all(f.name in found["model_files"] for f in files)
    out = tmp_path / "t.safetensors"
    subprocess.run([PROGRAM, "solve", ours, "-m", "keydiff", "-o", out, "--quiet"], check=True)
    table = kvbudget.Table(out)
    table.check(weight_files=files, hf_id="org/tiny-1")
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"\x7f")
    with pytest.raises(kvbudget.KVBudgetError, match="safetensors"):
        table.check(weight_files=files)


def test_where_little_is_known(tmp_path: Path) -> None:
    """Without a folder there is only the shape; after `hf download` also the commit; with a missing shard, no files."""
    assert set(origin.describe(build("llama"))) == {"model_shape"}
    build("llama").save_pretrained(tmp_path / "here")
    note = tmp_path / "here" / ".cache" / "huggingface" / "download" / "config.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{COMMIT}\netag\n1.0\n")
    found = origin.describe(AutoModelForCausalLM.from_pretrained(tmp_path / "here"))
    assert found["hf_revision"] == COMMIT and "hf_id" not in found and "model.safetensors" in found["model_files"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "here")
    (tmp_path / "here" / "model.safetensors").rename(tmp_path / "here" / "away")
    (tmp_path / "here" / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    assert "model_files" not in origin.describe(model)
