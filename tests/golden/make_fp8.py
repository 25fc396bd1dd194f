"""Regenerates fp8.bin: what torch makes of FP8 E4M3 and of its products with scales.

usage: make_fp8.py [OUT]     (needs: torch)
Layout, little-endian: the 256 bytes' values as f32; then a matrix of ROWS x COLUMNS bytes, its scales for blocks of
DOWN x ACROSS as f32 and as bfloat16, and the products with the first and with the second, in f32.
"""

import os
import sys

import torch

ROWS, COLUMNS, DOWN, ACROSS = 16, 37, 5, 8


def products(matrix, scales):
    full = scales.float().repeat_interleave(DOWN, 0).repeat_interleave(ACROSS, 1)
    return matrix.float() * full[:ROWS, :COLUMNS]


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "fp8.bin")
    random = torch.Generator().manual_seed(3)
    all_bytes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    matrix = torch.randn(ROWS, COLUMNS, generator=random).mul(100).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-ROWS // DOWN), -(-COLUMNS // ACROSS), generator=random) * 0.01
    halves = scales.to(torch.bfloat16)
    parts = [all_bytes.float(), matrix.view(torch.uint8), scales, halves.view(torch.int16)]
    parts += [products(matrix, scales), products(matrix, halves)]
    data = b"".join(p.numpy().tobytes() for p in parts)
    with open(out, "wb") as file:
        file.write(data)
    print(f"{out}: {len(data)} bytes")


main()
