"""Regenerates quants.bin: random blocks of every tensor type, and the floats to which gguf-py decodes them.

usage: make_quants.py [OUT]     (needs: pip install gguf==0.19.0 numpy)
Layout, little-endian: u32 number of cases; per case u32 type, u32 number of values, u32 number of bytes, the bytes, the
values as f32.
"""
import os
import struct
import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

BLOCKS = 3  # random blocks per type, and one in which all bits but those of scales are set
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
         "IQ4_NL", "IQ4_XS", "MXFP4"]
# Byte offsets of the float16 scales in a block. They are made finite, since NaN has several bit patterns.
SCALES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": []}


def blocks_of(name, random):
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    if name == "F32":
        return random.standard_normal((1, 32)).astype("<f4").view(np.uint8)
    if name == "BF16":
        return (random.standard_normal((1, 32)).astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    if name == "F16":  # normal, denormal, zeros, infinities, largest
        special = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x3C00]
        return np.concatenate([np.array(special, "<u2"),
                               random.standard_normal(22).astype("<f2").view("<u2")])[None].view(np.uint8)
    blocks = random.integers(0, 256, (BLOCKS + 1, size), dtype=np.uint8)
    blocks[-1] = 255
    if name == "MXFP4":  # exponents: two denormals, the middle, the largest with which all values are finite
        blocks[:, 0] = [0, 1, 127, 252]
    for at in SCALES[name]:
        scale = random.standard_normal(BLOCKS + 1).astype("<f2")
        scale[1] = np.float16(-3e-6)  # a denormal
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "quants.bin")
    random = np.random.default_rng(7)
    data = struct.pack("<I", len(TYPES))
    for name in TYPES:
        kind = GGMLQuantizationType[name]
        blocks = blocks_of(name, random)
        source = blocks.view({"F32": "<f4", "F16": "<f2"}.get(name, "u1"))
        expected = dequantize(source, kind).astype("<f4").ravel()
        data += struct.pack("<III", kind, expected.size, blocks.size) + blocks.tobytes() + expected.tobytes()
    with open(out, "wb") as file:
        file.write(data)
    print(f"{out}: {len(TYPES)} types, {len(data)} bytes")


main()
