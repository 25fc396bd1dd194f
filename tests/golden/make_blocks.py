"""Regenerates blocks.txt: which keys kvpress's BlockPress(KeyDiffPress) keeps, for the policy `keydiff` to repeat.

usage: make_blocks.py [OUT]     (needs: pip install torch kvpress==0.5.5; made with torch 2.15, CPU)
One case per line: T d BLOCK RATIO SEED KEPT INDEX...    indices ascending; keys are made from SEED by keys() below.
"""
import os
import sys

import numpy as np
import torch
from kvpress import BlockPress, KeyDiffPress


def keys(T, d, seed):
    """Returns keys from a linear congruential generator; every number is exact in float32. The first channel has a
    bias, as in real keys."""
    out, state = np.empty((T, d), np.float32), seed
    for i in range(T * d):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        out.flat[i] = np.float32(((state >> 8) - (1 << 23)) / (1 << 23))
    out[:, 0] += np.float32(0.5)
    return out


def kept(k, block, ratio):
    T, d = k.shape
    index = torch.arange(T, dtype=torch.float32).view(1, 1, T, 1).expand(1, 1, T, d)
    press = BlockPress(press=KeyDiffPress(compression_ratio=ratio), block_size=block)
    _, values = press.compress(None, torch.zeros(1, T, 1), torch.from_numpy(k).view(1, 1, T, d), index, None, {})
    return sorted(int(v) for v in values[0, 0, :, 0])


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "blocks.txt")
    with open(out, "w") as f:
        seed = 1
        for T, d in ((300, 16), (700, 64), (1000, 128)):
            for block in (128, 32, 1, 2000):
                for ratio in (0.5, 0.8):
                    if block == 1 and T > 300:
                        continue
                    indices = kept(keys(T, d, seed), block, ratio)
                    f.write(f"{T} {d} {block} {ratio} {seed} {len(indices)} {' '.join(map(str, indices))}\n")
                    seed += 1


main()
