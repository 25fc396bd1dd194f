#!/usr/bin/env python3
"""Writes a folder with the shape of a large model and random weights, to measure time and memory.

    tests/peer/make_shape.py llama-3.1-8b FOLDER [--layers N]

Writes config.json, sharded safetensors in bfloat16 and their index, but no tokenizer: texts must be given as token ids.
A tensor is one random tile, shifted by its number and repeated; matrices are scaled by the root of their columns, so
that activations stay finite through all layers. --layers limits the model's layers, for small disks.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np

SHARD_BYTES = 4 << 30
CONFIGS = Path(__file__).resolve().parent.parent.parent / "docs" / "configs"

Shape = Tuple[int, ...]


def layer_tensors(config: Dict[str, Any]) -> Iterator[Tuple[str, Shape]]:
    """Yields names after model.layers.N., and shapes."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads, head = config["num_key_value_heads"], config.get("head_dim") or width // heads
    yield "self_attn.q_proj.weight", (heads * head, width)
    yield "self_attn.k_proj.weight", (kv_heads * head, width)
    yield "self_attn.v_proj.weight", (kv_heads * head, width)
    yield "self_attn.o_proj.weight", (width, heads * head)
    yield "input_layernorm.weight", (width,)
    yield "post_attention_layernorm.weight", (width,)
    if config["model_type"].startswith("qwen3"):
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)
    if config.get("num_experts"):
        yield "mlp.gate.weight", (config["num_experts"], width)
        groups = [f"mlp.experts.{e}." for e in range(config["num_experts"])]
        inner = config["moe_intermediate_size"]
    else:
        groups, inner = ["mlp."], config["intermediate_size"]
    for group in groups:
        yield group + "gate_proj.weight", (inner, width)
        yield group + "up_proj.weight", (inner, width)
        yield group + "down_proj.weight", (width, inner)


def all_tensors(config: Dict[str, Any]) -> Iterator[Tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (config["vocab_size"], config["hidden_size"])
    for layer in range(config["num_hidden_layers"]):
        for name, shape in layer_tensors(config):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (config["hidden_size"],)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (config["vocab_size"], config["hidden_size"])


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits: np.ndarray = values.astype(np.float32).view(np.uint32)
    rounded: np.ndarray = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    return rounded


class Tile:
    """Normal random numbers with deviation 1, used repeatedly from different offsets."""

    def __init__(self, seed: int) -> None:
        self.values = np.random.default_rng(seed).standard_normal((1 << 22) + 4099, dtype=np.float32)
        self.scaled: Dict[int, np.ndarray] = {}

    def write(self, out: Any, shape: Shape, number: int) -> None:
        if len(shape) == 1:
            out.write(to_bf16(1 + 0.1 * self.values[: shape[0]]).tobytes())
            return
        rows, columns = shape
        if columns not in self.scaled:
            self.scaled[columns] = to_bf16(self.values / np.sqrt(columns))
        tile, left, first = self.scaled[columns], rows * columns, number * 8191 % 4099
        while left:
            piece = tile[first : first + min(left, len(tile) - first)]
            out.write(piece.tobytes())
            left -= len(piece)
            first = 0


def size_of(shape: Shape) -> int:
    return 2 * int(np.prod(shape))


def split(tensors: List[Tuple[str, Shape]]) -> List[List[Tuple[str, Shape]]]:
    """Splits the tensors into shards of about SHARD_BYTES."""
    shards: List[List[Tuple[str, Shape]]] = [[]]
    filled = 0
    for name, shape in tensors:
        if shards[-1] and filled + size_of(shape) > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape))
        filled += size_of(shape)
    return shards


def write_shard(path: Path, tensors: List[Tuple[str, Shape]], tile: Tile, number: int) -> None:
    header: Dict[str, Any] = {}
    at = 0
    for name, shape in tensors:
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size_of(shape)]}
        at += size_of(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for i, (_, shape) in enumerate(tensors):
            tile.write(out, shape, number + i)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="a folder of docs/configs, or any config.json")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    named = CONFIGS / options.shape / "config.json"
    config = json.loads((named if named.exists() else Path(options.shape)).read_text())
    if options.layers:
        config["num_hidden_layers"] = options.layers
    options.folder.mkdir(parents=True, exist_ok=True)
    shards, tile, weight_map, number = split(list(all_tensors(config))), Tile(options.seed), {}, 0
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_shard(options.folder / name, shard, tile, number)
        number += len(shard)
        weight_map.update({tensor: name for tensor, _ in shard})
    total = sum(size_of(shape) for _, shape in all_tensors(config))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (options.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (options.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{options.folder}: {total / 2**30:.2f} GiB in {len(shards)} files")


if __name__ == "__main__":
    main()
