"""A recording's folder, OUTPUT.steps: files are written atomically, so that an interrupted run can continue."""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ._library import KVBudgetError, MismatchError
from ._program import program
from .table import ModelShape
from .work import Work


def write(path: Path, content: bytes) -> None:
    """Writes a file atomically: a kill leaves the old file or none."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial, path)


def write_array(path: Path, array: Any) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array))
    write(path, buffer.getvalue())


def metric_file(name: str) -> str:
    return name.replace(":", "_").replace("=", "_").replace("/", "_") + ".npy"


def _is_record(path: Path) -> bool:
    """Whether it is an HDF5 file, or an empty one, which holds nothing to lose."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(8) in (b"\x89HDF\r\n\x1a\n", b"")


@contextlib.contextmanager
def steps(output: Path, attributes: dict[str, Any], resume: bool, force: bool) -> Iterator[Path]:
    """Yields OUTPUT.steps, locked, and removes it on success; with resume, what is there must be of the same run."""
    folder = output.with_name(output.name + ".steps")
    if output.exists() and not _is_record(output):
        raise KVBudgetError(f"{output}: exists and is not a record; give another name")
    if output.exists() and not force:
        raise KVBudgetError(f"{output}: exists; give force=True to replace it when the new record is complete")
    if folder.exists() and not (folder / "head.json").exists() and any(x.name != "lock" for x in folder.iterdir()):
        raise KVBudgetError(f"{folder}: is no interrupted recording, and would be removed in the end; move it away")
    if folder.exists() and not (resume or force):
        raise KVBudgetError(
            f"{folder}: an interrupted recording is there; give resume=True to go on, or force=True to start again"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise KVBudgetError(f"{folder}: another process is recording there") from None
        if not resume:
            for old in folder.glob("context_*"):
                shutil.rmtree(old)
            (folder / "head.json").unlink(missing_ok=True)
        head = json.dumps(attributes, indent=1, sort_keys=True)
        if (folder / "head.json").exists():
            old = json.loads((folder / "head.json").read_text())
            differs = [k for k in attributes | old if attributes.get(k) != old.get(k)]
            if differs:
                k = differs[0]
                raise MismatchError(
                    f"{folder}: {k}: the interrupted recording has {old.get(k)!r}, this one {attributes.get(k)!r}; "
                    "resume with the same model, texts and options, or give force=True"
                )
        else:
            write(folder / "head.json", head.encode())
        yield folder
    shutil.rmtree(folder)


def weights_sha256(model: nn.Module) -> str:
    """Returns an identity of a model's weights: a hash of names, types, shapes and bytes of all its tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        plain = tensor.detach().contiguous().cpu().flatten()
        digest.update(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return digest.hexdigest()


def tokenizer_sha256(tokenizer: Any) -> str:
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def assemble(
    folder: Path, output: Path, todo: Sequence[Work], attributes: dict[str, Any], names: Sequence[str],
    shape: ModelShape, force: bool,
) -> None:  # fmt: skip
    """Writes the side file, and makes the record by `kvbudget import`."""
    contexts = [
        {
            "id": work.sample_id,
            "metrics": {metric_file(name): name for name in names},
            "questions": [
                json.loads((folder / f"context_{work.sample_id}" / f"question_{i}.json").read_text())
                for i in range(len(work.questions))
            ],
        }
        for work in todo
    ]
    side = {"format": "kvbudget-lukv-steps", "format_version": 1, "n_heads": shape.n_heads, "head_dim": shape.head_dim}
    write(folder / "kvbudget.json", json.dumps(side | {"attributes": attributes, "contexts": contexts}).encode())
    command = [program(), "import", str(folder), "-o", str(output), *(["--force"] * force)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise KVBudgetError(f"kvbudget import: {ran.stderr.strip() or ran.returncode}", "FORMAT")
