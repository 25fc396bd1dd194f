"""Compares kvbudget's budgets and kept positions with kvpress's, head by head.

usage: kvpress_budgets.py TABLE.npy TABLE.safetensors KVBUDGET [LIBKVBUDGET.so]      a solved and exported table
       kvpress_budgets.py --random KVBUDGET [LIBKVBUDGET.so]                         random tables of several shapes

KVBUDGET is the program (build/kvbudget), LIBKVBUDGET.so the shared library, by default the one beside the program.
Needs a virtual environment: pip install torch transformers==5.2.0 kvpress==0.5.5 safetensors

A tiny random Llama with the table's layers and KV heads prefills T tokens under kvpress's LUKVPress, for 11 ratios and
four lengths. Counts and kept positions are read back from masked_key_indices. They must equal `kvbudget budgets --json`
in every head, and kvb_select on the same scores (random float32 with ties) in every position. The last line is PASS or
FAIL.
"""
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

import numpy as np
import torch
from kvpress import LUKVPress
from kvpress.presses.scorer_press import ScorerPress
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

RATIOS = [0.01, 0.1, 0.125, 0.25, 0.333, 0.5, 0.575, 0.8, 0.9, 0.965, 0.99]
LENGTHS = [13, 101, 997, 4099]
# (layers, KV heads, sink, window) of the random tables; 16 and 40 heads reach other branches of torch's sum and topk
SHAPES = [(3, 8, 4, 1), (4, 3, 4, 32), (2, 1, 0, 0), (2, 16, 4, 1), (2, 40, 0, 64)]


@dataclass
class GivenScores(ScorerPress):
    """Returns prepared scores; kvpress writes into the tensor to protect tokens, so each call gets a copy."""

    scores: list = field(default_factory=list)

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return self.scores[module.layer_idx].clone()


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(os.path.abspath(path))
        u32p = ctypes.POINTER(ctypes.c_uint32)
        self.lib.kvb_select.argtypes = [ctypes.POINTER(ctypes.c_float)
                                        ] + [ctypes.c_uint32] * 4 + [u32p, ctypes.c_size_t, ctypes.c_void_p]

    def select(self, scores, keep, sink, window):
        scores = np.ascontiguousarray(scores, dtype=np.float32)
        positions = np.empty(keep, dtype=np.uint32)
        status = self.lib.kvb_select(scores.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), len(scores), keep, sink,
                                     window, positions.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32)), keep, None)
        if status != 0:
            raise RuntimeError(f"kvb_select: status {status}")
        return positions


def tiny_llama(layers, heads):
    config = LlamaConfig(vocab_size=64, hidden_size=8 * heads, intermediate_size=16, num_hidden_layers=layers,
                         num_attention_heads=heads, num_key_value_heads=heads, head_dim=8, max_position_embeddings=8192,
                         attn_implementation="sdpa")
    torch.manual_seed(1)
    return LlamaForCausalLM(config).eval()


def random_scores(rng, layers, heads, tokens):
    """Returns scores: distinct in half of the layers; in the others with ties, as from a max-pooled metric."""
    scores = [
        rng.random((1, heads, tokens)) if i % 2 else rng.integers(0, 9, (1, heads, tokens)) / 8 for i in range(layers)
    ]
    return [torch.from_numpy(s.astype(np.float32)) for s in scores]


def masks(model, layer, heads, tokens):
    """Returns booleans [heads, tokens]: the kept tokens of one layer."""
    kept = torch.ones(heads, tokens, dtype=torch.bool)
    indices = model.model.layers[layer].self_attn.masked_key_indices
    if indices is not None:
        kept[indices[1], indices[2]] = False
    return kept.numpy()


def budgets(program, table, ratio, tokens):
    command = [program, "budgets", table, "--ratio", repr(ratio), "--tokens", str(tokens), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return np.array(json.loads(done.stdout)["details"][0]["keep"])


def compare(npy, table, program, library, sink, window):
    curves = np.load(npy)
    _, layers, heads = curves.shape
    model = tiny_llama(layers, heads)
    rng = np.random.default_rng(7)
    cases = wrong_counts = wrong_positions = 0
    for tokens in LENGTHS:
        ids = torch.from_numpy(rng.integers(0, 64, (1, tokens)))
        scores = random_scores(rng, layers, heads, tokens)
        for ratio in RATIOS:
            press = LUKVPress(GivenScores(scores=scores), compression_ratio=ratio, sink=sink, window=window)
            press._budget_curves = curves
            with torch.no_grad(), press(model):
                model.model(ids)
            keep = budgets(program, table, ratio, tokens)
            if keep.shape != (layers, heads):
                raise RuntimeError(f"kvbudget budgets: shape {keep.shape}, expected {(layers, heads)}")
            for layer in range(layers):
                kept = masks(model, layer, heads, tokens)
                for head in range(heads):
                    cases += 1
                    count = int(kept[head].sum())
                    if count != keep[layer, head]:
                        wrong_counts += 1
                        print(
                            f"T={tokens} ratio={ratio} layer {layer} head {head}: kvpress keeps {count}, kvbudget "
                            f"{keep[layer, head]}"
                        )
                        continue
                    positions = library.select(scores[layer][0, head].numpy(), count, sink, window)
                    if not np.array_equal(positions, np.flatnonzero(kept[head])):
                        wrong_positions += 1
                        print(f"T={tokens} ratio={ratio} layer {layer} head {head}: the {count} kept positions differ")
    print(f"{os.path.basename(table)}: {layers} x {heads} heads, sink {sink}, window {window}: {cases} head budgets, "
          f"{wrong_counts} counts differ, {wrong_positions} position lists differ")
    return wrong_counts + wrong_positions == 0


def write_random_table(folder, index, layers, heads, sink, window):
    """Writes random prune ratios with cases that lead to ties: equal heads, heads at the floor, ends of the range."""
    rng = np.random.default_rng(100 + index)
    ratio = np.arange(1, 100) / 100
    prune = np.clip(ratio[:, None, None] + rng.normal(0, 0.2, (99, layers, heads)), 0, 0.99)
    prune[::3] = np.round(prune[::3] * 4) / 4
    prune[::7] = prune[::7].mean(axis=2, keepdims=True)
    numbers = {
        "n_layers": layers, "n_heads": heads, "n_kv_heads": heads, "head_dim": 8, "sink": sink, "window": window,
        "n_contexts": 1, "n_questions": 1, "format_version": 1
    }
    texts = dict.fromkeys([
        "tool_version", "architecture", "model_id", "model_sha256", "tokenizer_sha256", "calibration_sha256",
        "record_sha256"
    ], "")
    texts.update(format="kvbudget-table", metric="random", metric_parameters="{}", scope="global",
                 aggregate="mean_ratio", hull="feasible", max_prune="0.99", calibration_tokens="997", n_queries="1,1",
                 **{k: str(v)
                    for k, v in numbers.items()})
    tensors = {name: ratio for name in ("ratio", "loss", "lower_bound", "lambda", "table_loss", "effective_ratio")}
    tensors = {name: value.copy() for name, value in tensors.items()}
    tensors.update(prune_ratio=prune, std=np.zeros_like(prune), saturated=np.zeros(99, np.uint8))
    npy, table = os.path.join(folder, f"random{index}.npy"), os.path.join(folder, f"random{index}.safetensors")
    np.save(npy, prune)
    save_file(tensors, table, metadata=texts)
    return npy, table


def protection_of(table):
    with open(table, "rb") as file:
        metadata = json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]
    return int(metadata["sink"]), int(metadata["window"])


def main(arguments):
    random = arguments[:1] == ["--random"]
    arguments = arguments[1:] if random else arguments
    if len(arguments) not in ((1, 2) if random else (3, 4)):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    program = arguments[0 if random else 2]
    library = Library(arguments[-1] if len(arguments) in (
        2, 4) else os.path.join(os.path.dirname(program), "libkvbudget.so"))
    good = True
    if random:
        with tempfile.TemporaryDirectory() as folder:
            for index, (layers, heads, sink, window) in enumerate(SHAPES):
                npy, table = write_random_table(folder, index, layers, heads, sink, window)
                good = compare(npy, table, program, library, sink, window) and good
    else:
        npy, table = arguments[:2]
        if not np.array_equal(np.load(npy), load_file(table)["prune_ratio"]):
            print(f"{npy} and the prune_ratio of {table} differ")
            good = False
        good = compare(npy, table, program, library, *protection_of(table)) and good
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
