"""Which weights a model has, in the words of `kvbudget profile`: files with their hashes, repository, commit, shape."""

import json
import os
import re
from pathlib import Path
from typing import Any

from ._library import file_sha256

__all__ = ["describe"]

SNAPSHOT = re.compile(r"models--([\w.-]+?)(?:--([\w.-]+))?/snapshots/([0-9a-f]{40,64})$")
COMMIT = re.compile(r"[0-9a-f]{40,64}")


def source_of(model: Any) -> Path | None:
    """Returns the folder that the weights were loaded from, the user's or one of the hub's cache; None if unknown."""
    name, commit = str(getattr(model.config, "_name_or_path", "") or ""), getattr(model.config, "_commit_hash", None)
    if name and os.path.isdir(name):
        return Path(name).resolve()
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=commit)
    return Path(found).parent if isinstance(found, str) else None


def _weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that transformers loads; an empty list if any or all are missing."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        names = {"model.safetensors"}
    elif index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    else:
        return []
    files = [folder / name for name in sorted(names)]
    return files if all(f.is_file() for f in files) else []


def hub_of(folder: Path) -> dict[str, str]:
    """Returns repository and commit of a folder in the hub's cache; only the commit of one that `hf download` wrote."""
    if found := SNAPSHOT.search(folder.as_posix()):
        first, second, commit = found.groups()
        return {"hf_id": f"{first}/{second}" if second else first, "hf_revision": commit}
    note = folder / ".cache" / "huggingface" / "download" / "config.json.metadata"
    line = note.read_text().splitlines()[:1] if note.is_file() else []
    return {"hf_revision": line[0]} if line and COMMIT.fullmatch(line[0]) else {}


def _shape(model: Any) -> str:
    """Returns numbers of the config that tell models of one family apart, as JSON."""
    config = model.config.get_text_config(decoder=True)
    found = {
        "width": config.hidden_size,
        "ffn_width": getattr(config, "intermediate_size", None),
        "vocabulary": model.get_input_embeddings().weight.shape[0],
        "context_length": getattr(config, "max_position_embeddings", None),
        "experts": getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None),
    }
    return json.dumps({k: v for k, v in found.items() if v}, separators=(",", ":"))


def describe(model: Any) -> dict[str, str]:
    """Returns attributes of a record that are known: model_shape, model_container, model_files, hf_id, hf_revision.

    model_files are the files of the folder that the model says it was loaded from, each hashed whole; they are left
    out if there are none. Changes made in memory since do not show in them; they do in model_sha256.
    """
    found = {"model_shape": _shape(model)}
    if folder := source_of(model):
        found |= hub_of(folder)
        if files := _weight_files(folder):
            hashes = {f.name: file_sha256(f) for f in files}
            found |= {"model_container": "safetensors", "model_files": json.dumps(hashes, separators=(",", ":"))}
    return found
