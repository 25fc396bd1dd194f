"""A plain heap in Python, as methods.md 2.5 describes the published solver: bench_solver's times are compared with
it.

heap_solver.py PROBLEM [CSV]: PROBLEM is the file of `bench_solver greedy PROBLEM`: five little-endian u32 (layers, KV
heads, tokens, sink, window), then for every head the oracle's importance in the metric's order, f32 [heads, tokens -
sink - window]. The order is given, since all questions of a context share it. Prints seconds, and the tokens kept at 50
%; and, given bench_solver's CSV about the same problem, how many times as fast that is. Uses only the standard library
and takes one token per pop, as described.
"""
import array
import heapq
import struct
import sys
import time


def discard_slopes(gains):
    """Returns the cost of dropping the worst, second worst, .. token of one head, made convex by the lower hull of the
    running sum."""
    points, sums, total = [], [0.0], 0.0
    for gain in reversed(gains):
        total += gain
        sums.append(total)
    for k, y in enumerate(sums):
        while len(points) > 1:
            a, b = points[-2], points[-1]
            if (b - a) * (y - sums[a]) - (sums[b] - sums[a]) * (k - a) > 0:
                break
            points.pop()
        points.append(k)
    slopes = []
    for a, b in zip(points, points[1:]):
        slopes += [(sums[b] - sums[a]) / (b - a)] * (b - a)
    return slopes


def solve(slopes, n_tokens, least):
    """Returns the tokens kept per head at 99 ratios."""
    n = len(slopes)
    heap = [(s[0], h, 0) for h, s in enumerate(slopes)]
    heapq.heapify(heap)
    keep, rows, gone = [n_tokens] * n, [], 0
    for i in range(1, 100):
        target = round(i / 100 * n * n_tokens)
        while gone < target and heap:
            _, h, k = heapq.heappop(heap)
            keep[h] -= 1
            gone += 1
            if keep[h] > least and k + 1 < len(slopes[h]):
                heapq.heappush(heap, (slopes[h][k + 1], h, k + 1))
        rows.append(list(keep))
    return rows


def main():
    with open(sys.argv[1], "rb") as file:
        layers, heads, n_tokens, sink, window = struct.unpack("<5I", file.read(20))
        middle = n_tokens - sink - window
        gains = []
        for _ in range(layers * heads):
            row = array.array("f", file.read(4 * middle))
            if sys.byteorder == "big":
                row.byteswap()
            gains.append(row.tolist())
    least = max(round((1.0 - 0.99) * n_tokens), sink + window)
    start = time.perf_counter()
    slopes = [discard_slopes(g) for g in gains]
    middle_time = time.perf_counter()
    rows = solve(slopes, n_tokens, least)
    end = time.perf_counter()
    print(f"python heap,{layers * heads},{n_tokens},{end - start:.4f},hulls {middle_time - start:.3f} s; heap "
          f"{end - middle_time:.3f} s; sum {sum((h + 1) * k for h, k in enumerate(rows[49]))}")
    if len(sys.argv) > 2:
        with open(sys.argv[2], encoding="utf-8") as file:
            ours = float(file.read().split("greedy,")[1].split(",")[2])
        print(f"# one question: {(end - start) / ours:.0f} times as fast as the heap")


if __name__ == "__main__":
    main()
