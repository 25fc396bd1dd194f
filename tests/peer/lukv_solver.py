"""Step 2 of the published LU-KV pipeline, rewritten from its description (methods.md 2.4-2.7, ecosystem.md 1).

It keeps the numerical details that decide single tokens: an unstable argsort that is then reversed, float32 running
sums in discard order, a float64 lower hull that pops collinear points, slopes stored as float32, and a heap that drops
one token at a time until the next of 99 targets is met. Slow on purpose: it is the reference.
"""
import heapq

import numpy as np


def floor_tokens(n_tokens, sink, window):
    return max(int(round((1.0 - 0.99) * n_tokens)), sink + window)


def discard_slopes(oracle, score):
    """Returns the convexified costs of dropping the 1st, 2nd, .. worst token of a head's middle region; float32 [M]."""
    best_first = np.argsort(score)[::-1]
    loss = np.zeros(len(score) + 1, np.float32)
    np.cumsum(oracle[best_first][::-1], dtype=np.float32, out=loss[1:])
    y = loss.astype(np.float64)
    hull = []
    for k in range(len(y)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (b - a) * (y[k] - y[a]) - (y[b] - y[a]) * (k - a) > 0:
                break
            hull.pop()
        hull.append(k)
    slopes = np.empty(len(score), np.float32)
    for a, b in zip(hull, hull[1:]):
        slopes[a:b] = (y[b] - y[a]) / (b - a)
    return slopes


def solve(oracle, score, sink, window):
    """oracle, score [L,G,T] float32 -> tokens kept [99,L,G]; one budget over all layers."""
    n_layers, n_heads, n_tokens = oracle.shape
    middle = slice(sink, n_tokens - window)
    least = floor_tokens(n_tokens, sink, window)
    slopes = {(l, h): discard_slopes(oracle[l, h, middle], score[l, h, middle]).tolist()
              for l in range(n_layers) for h in range(n_heads)}
    heap = [(s[0], l, h, 0) for (l, h), s in slopes.items()]
    heapq.heapify(heap)
    keep = np.full((n_layers, n_heads), n_tokens)
    rows = np.empty((99, n_layers, n_heads), np.int64)
    gone = 0
    for i in range(99):
        target = round((i + 1) / 100 * n_layers * n_heads * n_tokens)
        while gone < target and heap:
            _, l, h, k = heapq.heappop(heap)
            keep[l, h] -= 1
            gone += 1
            if keep[l, h] > least and k + 1 < len(slopes[l, h]):
                heapq.heappush(heap, (slopes[l, h][k + 1], l, h, k + 1))
        rows[i] = keep
    return rows


def stable_ranks(score):
    """Returns scores without ties in the same order, the lower position first among equals; float32 [L,G,T]."""
    order = np.argsort(-score, axis=-1, kind="stable")
    ranks = np.empty(score.shape, np.float32)
    np.put_along_axis(ranks, order, -np.arange(score.shape[-1], dtype=np.float32) + np.zeros_like(score), -1)
    return ranks


def losses(oracle, order_of, keep, sink, window):
    """Returns the evicted importance for each row of keep [99,L,G]; order_of(layer, head) is best first."""
    n_layers, n_heads, n_tokens = oracle.shape
    out = np.zeros(len(keep))
    for l in range(n_layers):
        for h in range(n_heads):
            middle = oracle[l, h, sink:n_tokens - window].astype(np.float64)[order_of(l, h)]
            tail = np.append(np.cumsum(middle[::-1])[::-1], 0.0)
            out += tail[np.clip(keep[:, l, h] - sink - window, 0, len(middle))]
    return out
