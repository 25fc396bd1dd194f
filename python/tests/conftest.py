"""Small tables and random models, so that the tests need no download."""

import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROWS = 99


def write_table(
    path: Path, n_layers: int, n_heads: int, n_kv_heads: int, head_dim: int, metric: str = "keydiff",
    parameters: dict[str, Any] | None = None, sink: int = 2, window: int = 1, seed: int = 0, spread: float = 1,
    formats: Sequence[int] = (), **more: str,
) -> Path:  # fmt: skip
    """Writes a table of random prune ratios, with a mean of the row's ratio, in the format of formats/README.md; with
    spread=0 all heads are equal. ``formats``: one is drawn for each head's keys and for its values (version 2)."""
    rng = np.random.default_rng(seed)
    rho = np.arange(1, ROWS + 1) / 100
    spread = spread * np.minimum(rho, 1 - rho)[:, None, None] * rng.uniform(-1, 1, (1, n_layers, n_kv_heads))
    prune = rho[:, None, None] + spread - spread.mean((1, 2), keepdims=True)
    prune = np.clip(prune, 0, 0.99)
    rows = {"ratio": rho, "effective_ratio": prune.mean((1, 2))}
    rows |= {name: np.zeros(ROWS) for name in ("loss", "lower_bound", "lambda", "table_loss")}
    tensors: dict[str, np.ndarray] = {"prune_ratio": prune, "std": np.zeros_like(prune), **rows}
    tensors["saturated"] = np.zeros(ROWS, np.uint8)
    if formats:
        tensors["formats"] = rng.choice(formats, (ROWS, n_layers, n_kv_heads, 2)).astype(np.uint8)
        more |= {"format_version": "2", "packings": "bf16,int8,int4,int2"}
    meta = {
        "format": "kvbudget-table", "format_version": "1", "tool_version": "0", "architecture": "test", "model_id": "",
        "model_sha256": "", "tokenizer_sha256": "", "calibration_sha256": "", "record_sha256": "",
        "n_layers": str(n_layers), "n_heads": str(n_heads), "n_kv_heads": str(n_kv_heads), "head_dim": str(head_dim),
        "metric": metric, "metric_parameters": json.dumps(parameters or {}), "sink": str(sink), "window": str(window),
        "scope": "global", "aggregate": "mean_loss", "hull": "feasible", "max_prune": "0.99",
        "calibration_tokens": "48", "n_contexts": "1", "n_questions": "1", "n_queries": "1,1", **more,
    }  # fmt: skip
    header: dict[str, Any] = {"__metadata__": meta}
    at = 0
    for name, a in tensors.items():
        kind = "U8" if a.dtype == np.uint8 else "F64"
        header[name] = {"dtype": kind, "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in tensors.values()))
    return path


@pytest.fixture
def make_table(tmp_path: Path) -> Callable[..., Path]:
    def make(*shape: int, **how: Any) -> Path:
        return write_table(tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors", *shape, **how)

    return make
