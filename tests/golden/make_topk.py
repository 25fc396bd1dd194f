"""Regenerates topk.txt: results of PyTorch and kvpress on a CPU that the runtime must reproduce.

usage: make_topk.py [OUT]     (needs: pip install torch kvpress==0.5.5; made with torch 2.15, CPU)
Lines of the file:
  sum N VALUE... = SUM              torch.sum of N float32; numbers are given as hexadecimal bits
  topk N K VALUE... = INDEX...      the indices that torch.topk takes, ascending; values are small whole numbers
  row RATIO ROW                     kvpress's row for a ratio (hexadecimal float), counted from 0
  counts G T RATIO... = COUNT...    tokens that kvpress's LUKVPress keeps in each of G heads, from prune ratios
"""
import os
import sys
from types import SimpleNamespace

import numpy as np
import torch
from kvpress import LUKVPress, RandomPress

# McIlroy's adversary for introselect with n = 64, k = 40: introselect degenerates and falls back to its heap.
ADVERSARY = [
    31, 62, 34, 60, 33, 58, 36, 56, 35, 54, 38, 52, 37, 50, 32, 48, 23, 46, 22, 44, 21, 42, 20, 40, 25, 27,
    29, 28, 26, 30, 24, 39, 63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 19, 18, 17, 16, 15, 14, 13, 12,
    11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0,
]


def row(press):
    """Returns the row that LUKVPress.compress reads, by means of an array that only remembers the requested index."""
    class Curves:
        def __getitem__(self, index):
            self.row = index[0]
            return np.zeros(1)

    press._budget_curves = Curves()
    counts(press, 1, 4)
    return press._budget_curves.row


def counts(press, heads, tokens):
    module = SimpleNamespace(layer_idx=0, config=SimpleNamespace(_attn_implementation="sdpa"), masked_key_indices=None)
    keys = torch.zeros(1, heads, tokens, 1)
    press.compress(module, None, keys, keys, None, {})
    if module.masked_key_indices is None:
        return [tokens] * heads
    return (tokens - torch.bincount(module.masked_key_indices[1], minlength=heads)).tolist()


def ratios(random, heads, tokens):
    kind = random.integers(0, 6)
    if kind == 0:  # uniform: every fraction ties
        return np.full(heads, random.random())
    if kind == 1:  # a few levels: some fractions tie
        return random.integers(0, 5, heads) / 5 * 0.97
    if kind == 2:  # many heads at the solver's floor
        return np.where(random.random(heads) < 0.6, 0.99, random.random(heads))
    if kind == 3:  # whole tokens of another context length, mean of three questions
        return np.mean(1 - random.integers(1, 4126, (3, heads)) / 4125, axis=0)
    if kind == 4:  # ends of the range
        return random.choice([0.0, 1.0, 0.999999, 1e-9, 0.5], heads)
    return random.random(heads)


def bits(values):
    return " ".join(f"{v:x}" for v in np.asarray(values, "<f4").view("<u4").ravel())


def write(out):
    random = np.random.default_rng(1)
    for n in [*range(1, 34), 40, 47, 48, 63, 64, 65, 100, 127, 128, 511, 512, 600, 1024]:
        for scale in (1, 4096.0, 131072.0):
            x = (random.random(n) * scale).astype("<f4")
            print("sum", n, bits(x), "=", bits([torch.from_numpy(x).sum().item()]), file=out)
            if n > 128:
                break
    for n in [*range(1, 40), 48, 63, 64, 65, 96, 127, 128, 129, 256, 1024]:
        for levels in (1, 2, 4, 16) if n <= 128 else (3,):
            x = random.integers(0, levels, n)
            if levels == 4:
                x.sort()
            for k in sorted({1, int(random.integers(1, n + 1)), n // 2 or 1, max(1, n // 64)}):
                chosen = sorted(torch.topk(torch.tensor(x, dtype=torch.float32), k).indices.tolist())
                print("topk", n, k, *x, "=", *chosen, file=out)
    for divide in (1, 3):
        x = np.array(ADVERSARY) // divide
        for k in (38, 40, 42):
            print("topk", len(x), k, *x, "=",
                  *sorted(torch.topk(torch.tensor(x, dtype=torch.float32), k).indices.tolist()), file=out)
    for c in [
            0.125, 0.135, 0.145, 0.575, 0.001, 0.005, 0.0149, 0.015, 0.0151, 0.025, 0.985, 0.986, 0.995, 0.9999,
            *(i / 1000 for i in range(3, 1000, 7))
    ]:
        print("row", float(c).hex(), row(LUKVPress(RandomPress(), compression_ratio=c)), file=out)
    for heads in (1, 2, 3, 4, 5, 8, 10, 16, 32, 64, 128):
        for tokens in (1, 4, 13, 101, 997, 1024, 4099, 32768, 131072):
            r = ratios(random, heads, tokens)
            if heads * tokens > 1 << 22:
                continue
            press = LUKVPress(RandomPress(), compression_ratio=0.5)
            press._budget_curves = np.tile(r, (99, 1, 1))
            print("counts", heads, tokens, *(x.hex() for x in r.tolist()), "=", *counts(press, heads, tokens), file=out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "topk.txt")
    with open(path, "w") as file:
        write(file)
