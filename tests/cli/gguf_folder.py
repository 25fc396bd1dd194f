"""Writes the first layers of a llama GGUF file as a Hugging Face folder, as transformers would: rows of queries and
keys in its order, weights dequantised to float32, the first rows of the embedding. The standard library only.

usage: gguf_folder.py MODEL.gguf FOLDER LAYERS ROWS
"""

import array
import json
import os
import struct
import sys

F32, Q4_1, Q8_0 = 0, 3, 8
NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
CONFIG = {
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}  # fmt: skip


class Cursor:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, form):
        found = struct.unpack_from("<" + form, self.data, self.at)[0]
        self.at += struct.calcsize("<" + form)
        return found

    def text(self):
        size = self.take("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8", "replace")

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, n = self.take("I"), self.take("Q")
            return [self.value(inner) for _ in range(n)]
        return self.take("BbHhIif?"[kind] if kind < 8 else {10: "Q", 11: "q", 12: "d"}[kind])


def read(path):
    """(metadata, {name: (shape, columns first; type; bytes from there on)})"""
    c = Cursor(open(path, "rb").read())
    assert c.data[:4] == b"GGUF"
    c.at = 8
    n_tensors, n_values, metadata, tensors = c.take("Q"), c.take("Q"), {}, {}
    for _ in range(n_values):
        key = c.text()
        metadata[key] = c.value(c.take("I"))
    for _ in range(n_tensors):
        name, shape = c.text(), [c.take("Q") for _ in range(c.take("I"))]
        tensors[name] = (shape, c.take("I"), c.take("Q"))
    start = -(-c.at // 32) * 32
    view = memoryview(c.data)
    return metadata, {name: (shape, kind, view[start + at :]) for name, (shape, kind, at) in tensors.items()}


def values(kind, data, n):
    out = array.array("f")
    if kind == F32:
        out.frombytes(data[: 4 * n])
        return out
    size = {Q4_1: 20, Q8_0: 34}[kind]
    for at in range(0, n // 32 * size, size):
        if kind == Q8_0:
            (d,) = struct.unpack_from("<e", data, at)
            out.extend([d * q for q in struct.unpack_from("32b", data, at + 2)])
        else:
            d, m = struct.unpack_from("<ee", data, at)
            both = bytes(data[at + 4 : at + 20])
            out.extend([d * (q & 15) + m for q in both])
            out.extend([d * (q >> 4) + m for q in both])
    return out


def as_transformers(rows, columns, heads):
    """GGUF has the two rows that turn together side by side, transformers half a head apart."""
    size, out = len(rows) // columns // heads, array.array("f")
    for row in range(len(rows) // columns):
        inside = row % size
        source = row - inside + (2 * inside if inside < size // 2 else 2 * (inside - size // 2) + 1)
        out.extend(rows[source * columns : (source + 1) * columns])
    return out


def main():
    path, folder, n_layers, n_rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    metadata, tensors = read(path)
    config = {name: metadata["llama." + key] for name, key in CONFIG.items()}
    config |= {"model_type": "llama", "num_hidden_layers": n_layers, "tie_word_embeddings": True}
    wanted = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for layer in range(n_layers):
        wanted |= {f"blk.{layer}.{a}.weight": f"model.layers.{layer}.{b}.weight" for a, b in NAMES.items()}
    header, parts, at = {}, [], 0
    for name, theirs in wanted.items():
        shape, kind, data = tensors[name]
        shape = [shape[0], n_rows] if name == "token_embd.weight" else shape
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        numbers = values(kind, data, n)
        for part, heads in ("attn_q.", "num_attention_heads"), ("attn_k.", "num_key_value_heads"):
            if part in name:
                numbers = as_transformers(numbers, shape[0], config[heads])
        header[theirs] = {"dtype": "F32", "shape": shape[::-1], "data_offsets": [at, at + 4 * n]}
        at += 4 * n
        parts.append(numbers.tobytes())
    text = json.dumps(header).encode()
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(parts))
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)


if __name__ == "__main__":
    main()
