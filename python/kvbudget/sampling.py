"""Draws answers as the C program does: a draw depends only on (seed, context, question, step)."""

import torch
from torch import Tensor

from ._library import KVBudgetError


def philox(counter: list[int], key: list[int]) -> list[int]:
    (c0, c1, c2, c3), (k0, k1), low = counter, key, 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & low, (p0 >> 32) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [c0, c1, c2, c3]


def _uniform(seed: int, context: int, question: int, step: int) -> float:
    low = 0xFFFFFFFF
    w = philox([step, question, context & low, context >> 32], [seed & low, seed >> 32])
    return ((w[1] << 32 | w[0]) >> 11) * 2.0**-53


def draw(logits: Tensor, *, temperature: float, seed: int, context: int, question: int, step: int) -> int:
    """Draws a token id from softmax(logits / temperature); temperature 0 takes the likeliest."""
    if not bool(torch.isfinite(logits.max())) or bool(logits.isnan().any()):
        raise KVBudgetError("the logits are not finite; the model's activations overflow on this text", "NUMERIC")
    if temperature == 0:
        return int(logits.argmax())
    weights = ((logits.double() - logits.max().double()) / temperature).exp().cpu()
    sums = weights.cumsum(0)
    at = torch.tensor(_uniform(seed, context, question, step), dtype=torch.float64) * sums[-1]
    return min(int(torch.searchsorted(sums, at, right=True)), logits.shape[0] - 1)
