"""Regenerates tests/fuzz/corpus/table: small valid tables to start the fuzzer from.

usage: make_table_seeds.py [FOLDER]
"""
import json
import os
import random
import struct
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def table(layers, heads, sink, window, ratio_of, rows=range(1, 100), **extra):
    """extra: further metadata of the table; n_rows is added if there is not one row for every per cent."""
    if len(rows) != 99:
        extra["n_rows"] = str(len(rows))
    prune = [ratio_of(i / 100, h) for i in rows for h in range(layers * heads)]
    ratio = [i / 100 for i in rows]
    tensors = [("prune_ratio", prune, [len(rows), layers, heads]), ("ratio", ratio, [len(rows)]),
               ("std", [0.01] * len(prune), [len(rows), layers, heads])]
    tensors += [(name, ratio, [len(rows)])
                for name in ("loss", "lower_bound", "lambda", "table_loss", "effective_ratio")]
    header = {
        "__metadata__": {
            "format": "kvbudget-table", "format_version": "1", "tool_version": "0.1.0", "architecture": "llama",
            "model_id": "seed", "model_sha256": "a" * 64, "tokenizer_sha256": "", "n_layers": str(layers),
            "n_heads": str(2 * heads), "n_kv_heads": str(heads), "head_dim": "8", "metric": "keydiff",
            "metric_parameters": "{}", "sink": str(sink), "window": str(window), "scope": "global",
            "aggregate": extra.pop("aggregate", "mean_loss"), "hull": "feasible", "max_prune": "0.99",
            "calibration_tokens": "13,101", "n_contexts": "2", "n_questions": "3", "n_queries": "1,63",
            "calibration_sha256": "", "record_sha256": "", **extra
        }
    }
    data = b""
    for name, values, shape in tensors:
        packed = struct.pack(f"<{len(values)}d", *values)
        header[name] = {"dtype": "F64", "shape": shape, "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    header["saturated"] = {"dtype": "U8", "shape": [len(rows)], "data_offsets": [len(data), len(data) + len(rows)]}
    data += bytes(len(rows) - 1) + b"\1"
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "../fuzz/corpus/table")
    os.makedirs(folder, exist_ok=True)
    random.seed(1)
    for name, content in [("one_head", table(1, 1, 0, 0, lambda r, h: r)),
                          ("two_layers", table(2, 1, 4, 32, lambda r, h: [r * r, 2 * r - r * r][h])),
                          ("ties", table(1, 4, 4, 1, lambda r, h: round(random.random() * 4) / 4)),
                          ("pages_and_caps",
                           table(
                               2, 2, 4, 1, lambda r, h: r, rows=(30, 50, 80), constraints=json.dumps({
                                   "block": 16, "levels": 0, "ranks": 1, "by_layer": False, "layer_cap": [0.5, 1],
                                   "least": [0.1, 0, 0, 0.15], "most": [1, 0.9, 1, 1]
                               }))),
                          ("ranks",
                           table(2, 2, 4, 1, lambda r, h: r, rows=(50, ),
                                 constraints=json.dumps({"block": 1, "ranks": 2, "by_layer": True}))),
                          ("levels_and_pin",
                           table(1, 3, 0, 4, lambda r, h: r * (h > 0), rows=(20, 60),
                                 constraints=json.dumps({"levels": 2, "least": [1, 0, 0]}))),
                          ("weights",
                           table(1, 2, 4, 1, lambda r, h: r, rows=(50, 80), aggregate="worst",
                                 text_weights="[[0.25,0.75],[1,0]]"))]:
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
