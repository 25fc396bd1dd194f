"""Writes tests/golden/scorers.bin: one small attention layer and every metric's scores for it, by other code (kvpress
0.5.5, or the published formula in PyTorch; see tests/peer/scorer_peers.py). tests/unit/test_profiler_golden.c compares
ours with them.

Little-endian. Header: 8 bytes "KVBSCO01", then u32: T, H, G, d, D, cases. Then f32: q_raw [T,H,d], q [T,H,d], k
[G,T,d], v [G,T,d], wo [D,H*d], rope_frequency [d/2]. Then the cases: metric name (128 bytes, zero padded), u32 sinks,
u32 tail, u32 kept per head (0: scores), u32 n, then n f32 (scores [G,T]) or n u32 (kept positions of head 0, head 1,
...).
"""
import os
import struct
import sys

import numpy as np
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "tests", "peer"))
import scorer_peers as peers

T, H, G, D_HEAD, WIDTH, LAG = 200, 4, 2, 16, 48, 32
OUT = os.path.join(HERE, "scorers.bin")


def make_layer():
    torch.manual_seed(20261121)
    config = LlamaConfig(hidden_size=WIDTH, num_attention_heads=H, num_key_value_heads=G, head_dim=D_HEAD,
                         num_hidden_layers=1, max_position_embeddings=4096, attn_implementation="sdpa")
    module = LlamaAttention(config, 0).float().eval()
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.25)
    # A common direction, as in real hidden states: without it, all keys would be about equally far from their mean.
    x = torch.randn(1, T, WIDTH) + torch.randn(WIDTH)
    return peers.layer_of(module, LlamaRotaryEmbedding(config), x)


def floats(t):
    return np.ascontiguousarray(t.detach().numpy().astype("<f4")).tobytes()


@torch.no_grad()
def main():
    layer = make_layer()
    scores = peers.scores(LAG)
    kept = peers.kept(LAG, 0.6)
    parts = [b"KVBSCO01", struct.pack("<6I", T, H, G, D_HEAD, WIDTH, len(scores) + len(kept)),
             floats(layer.q_raw.transpose(0, 1)), floats(layer.q.transpose(0, 1)), floats(layer.k), floats(layer.v),
             floats(layer.module.o_proj.weight), floats(layer.module.rotary_emb.inv_freq)]
    for metric, _, function, sinks, tail, ranked in scores:
        s = function(layer)
        assert s.shape == (G, T), metric
        parts += [
            metric.encode().ljust(128, b"\0"),
            struct.pack("<4I", 0 if ranked else sinks, tail, 0, s.numel()),
            floats(s)
        ]
    for metric, _, function, count, _ in kept:
        positions = function(layer)
        assert all(len(p) == count(T) for p in positions), metric
        flat = [j for head in positions for j in head]
        parts += [
            metric.encode().ljust(128, b"\0"),
            struct.pack("<4I", 0, 0, count(T), len(flat)),
            struct.pack(f"<{len(flat)}I", *flat)
        ]
    with open(OUT, "wb") as out:
        out.write(b"".join(parts))
    print(f"{OUT}: {len(scores)} metrics, {len(kept)} kept sets")


main()
