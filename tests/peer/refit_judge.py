"""Compares kvb_refit() with PyTorch in float64: the formulas of docs/refit.md, with another solver for the weights.

    python tests/peer/refit_judge.py build/libkvbudget.so
"""
import ctypes
import sys

import numpy
import torch


class Head(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint32) for n in ("n_tokens", "head_dim", "n_kept", "n_queries")] + [
        (n, ctypes.c_void_p) for n in ("k", "v", "positions", "queries")]


class Result(ctypes.Structure):
    _fields_ = [("changed", ctypes.c_int), ("judged", ctypes.c_int)] + [
        (n, ctypes.c_double) for n in ("before", "after")]


def library_refit(lib, K, V, Q, kept):
    arrays = [numpy.ascontiguousarray(x, numpy.float32) for x in (K, V, Q)]
    positions = numpy.ascontiguousarray(kept, numpy.uint32)
    k, v = (numpy.zeros((len(kept), K.shape[1]), numpy.float32) for _ in range(2))
    head = Head(len(K), K.shape[1], len(kept), len(Q), arrays[0].ctypes.data, arrays[1].ctypes.data,
                positions.ctypes.data, arrays[2].ctypes.data)
    size, out = ctypes.c_size_t(), Result()
    assert lib.kvb_refit_bytes(ctypes.byref(head), ctypes.byref(size), None) == 0
    work = ctypes.create_string_buffer(size.value)
    status = lib.kvb_refit(ctypes.byref(head), work, size, k.ctypes.data_as(ctypes.c_void_p),
                           v.ctypes.data_as(ctypes.c_void_p), None, ctypes.byref(out), None)
    assert status == 0, status
    return torch.from_numpy(k).double(), torch.from_numpy(v).double(), out


def summarised(K, V, Q, S, M, n):
    """Returns the kept rows with summaries of the others in the n slots that have the least attention."""
    full, k, v = (Q @ K.T).softmax(-1), K[S], V[S]
    slots = full.amax(0)[S].argsort()[:n]
    rows = torch.ones(len(K)).index_fill(0, S, 0).index_fill(0, S[slots], 1).nonzero()[:, 0]
    part = full.mean(0)[rows] + 1e-9
    distances = torch.stack([((K[rows] - K[r]) @ M * (K[rows] - K[r])).sum(-1) for r in rows])
    centres = [int(part.argmax())]
    while len(centres) < n:
        centres.append(int((part * distances[centres].amin(0)).argmax()))
    belongs = distances[centres].argmin(0)
    for s, slot in enumerate(slots):
        mine = belongs == s
        average = part[mine] / part[mine].sum()
        k[slot], v[slot] = average @ K[rows[mine]], average @ V[rows[mine]]
        mass = (Q @ K[rows[mine]].T).logsumexp(-1)
        k[slot] += torch.linalg.solve(M, Q.T @ (mass - Q @ k[slot]))
    return k, v


def torch_refit(K, V, Q, kept):
    """Returns left-out errors of the bare head and of the library's choice, relative to the outputs' variance."""
    K, V, Q = (torch.from_numpy(x).double() for x in (K, V, Q))
    O, S = (Q @ K.T).softmax(-1) @ V, torch.from_numpy(kept.astype("int64"))
    out = torch.arange(len(Q)) // 16 % 4 == 3
    M = Q[~out].T @ Q[~out]
    M = M + 1e-2 * M.diagonal().mean() * torch.eye(len(M))
    off = lambda k, v: float(((Q @ k.T).softmax(-1) @ v - O)[out].pow(2).mean())
    starts = [(K[S], V[S]), *(summarised(K, V, Q[~out], S, M, len(S) * 3 // part) for part in (4, 8, 16))]
    k, v = min(starts, key=lambda start: off(*start))
    mass, variance = (Q @ K.T).logsumexp(-1, keepdim=True), (O - O.mean(0)).pow(2).mean()
    A = (Q @ k.T - mass).exp()[~out]
    w = z = torch.ones(len(S), dtype=torch.float64)
    rate, t = 1 / torch.linalg.eigvalsh(A.T @ A)[-1], 1.0
    for _ in range(120):
        to = (z - rate * (A.T @ (A @ z - 1))).clamp(min=1e-6)
        t2 = (1 + (1 + 4 * t * t) ** 0.5) / 2
        w, z, t = to, to + (t - 1) / t2 * (to - w), t2
    u = torch.linalg.solve(M, Q[~out].sum(0))
    errors, bare = [], off(K[S], V[S]) / float(variance)
    for keys in (k, k + w.log().clamp(-3, 3)[:, None] * u):
        P = (Q @ keys.T).softmax(-1)
        X, R = P[~out].T @ P[~out], P[~out].T @ (O - P @ v)[~out]
        change = torch.linalg.solve(X + 0.03 * X.diagonal().mean() * torch.eye(len(X)), R)
        change *= (0.5 * v.norm(dim=-1, keepdim=True) / change.norm(dim=-1, keepdim=True)).clamp(max=1)
        errors.append([float((P @ x - O)[out].pow(2).mean() / variance) for x in (v, v + change)])
    least = min(errors[errors[1][0] < errors[0][0]])  # keys first, then values
    return bare, min(bare, least), (Q, O, out, variance)


def main():
    lib = ctypes.CDLL(sys.argv[1])
    rng = numpy.random.default_rng(3)
    worst = 0.0
    for T, d, t, n in ((700, 64, 90, 256), (900, 128, 300, 200), (400, 32, 20, 300), (1200, 64, 500, 120)):
        K, V, Q = (rng.standard_normal((m, d)).astype("float32") for m in (T, T, n))
        Q = ((Q + rng.standard_normal(d) * 0.7) / d**0.5 * 1.5).astype("float32")
        kept = numpy.sort(rng.choice(T, t, replace=False))
        k, v, found = library_refit(lib, K, V, Q, kept)
        bare, least, (Q64, O, out, variance) = torch_refit(K, V, Q, kept)
        given = float(((Q64 @ k.T).softmax(-1) @ v - O)[out].pow(2).mean() / variance)
        off = max(abs(found.before / bare - 1), abs(found.after / least - 1), abs(found.after / given - 1))
        print(f"T {T} d {d} t {t} n {n}: {found.before:.4f} -> {found.after:.4f}, PyTorch {bare:.4f} -> {least:.4f}, "
              f"changed {found.changed}, off by {off:.2e}")
        worst = max(worst, off)
    print("PASS" if worst < 1e-2 else "FAIL")
    return worst >= 1e-2


if __name__ == "__main__":
    sys.exit(main())
