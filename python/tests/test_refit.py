"""Refitted caches are closer to the full cache on queries that were left out, and otherwise unchanged."""

import ctypes as c
import threading
from typing import Any

import numpy as np
import pytest
import torch
from families import build
from test_eviction import prefill
from transformers.cache_utils import DynamicCache

import kvbudget
from kvbudget import refit
from kvbudget._library import library
from kvbudget.models import attention_layers

N = 200
FAMILIES = ["llama", "qwen2 7:1", "phi", "gemma2", "cohere", "gpt-neox", "glm", "smollm3", "gpt-oss", "gpt2"]


def text(batch: int = 1, n: int = N, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 96, (batch, n), generator=torch.Generator().manual_seed(seed))


def shape_of(model: Any) -> tuple[int, ...]:
    shape = kvbudget.ModelShape.of(model.config)
    return shape.n_layers, shape.n_heads, shape.n_kv_heads, shape.head_dim


def cut(model: Any, table: Any, ids: torch.Tensor, ratio: float = 0.8, **more: Any) -> tuple[Any, Any]:
    given = {k: more.pop(k) for k in ("attention_mask",) if k in more}
    with kvbudget.compress(model, table, ratio, **more) as run:
        cache = prefill(model, ids, **given)
    return cache, run.report()


def segments(cache: Any) -> list[tuple[torch.Tensor, ...]]:
    return [x.segment(s) for x in cache.layers if hasattr(x, "lengths") for s in range(len(x.lengths))]


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[refit.Head]:
    """Returns a list to which every head that is fitted gets appended."""
    found: list[refit.Head] = []
    fit = refit.Head.fit
    monkeypatch.setattr(refit.Head, "fit", lambda head, kept: (found.append(head), fit(head, kept))[1])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, make_table: Any, heads: list[refit.Head]) -> None:
    """The error on left-out queries falls, and the cache has the same positions, type and bytes."""
    model = build(family)
    if model is None:
        pytest.skip(f"this transformers does not have {family}")
    table, ids = kvbudget.Table(make_table(*shape_of(model))), text()
    bare, before = cut(model, table, ids)
    fitted, after = cut(model, table, ids, refit=True)
    judged = [h for h in heads if np.isfinite(h.error_before)]
    assert after.bytes_now == before.bytes_now and before.heads_refitted == 0 < after.heads_refitted <= len(judged)
    assert all(h.error_after <= h.error_before for h in judged)
    assert np.mean([h.error_after / h.error_before for h in judged]) < 0.95
    changed = 0
    for a, b in zip(segments(bare), segments(fitted)):
        assert torch.equal(a[2], b[2]) and bool(b[0].isfinite().all() and b[1].isfinite().all())
        changed += not (torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]))
    assert changed == after.heads_refitted


@pytest.mark.parametrize("family", ["llama", "phi", "cohere", "glm", "gpt-neox"])
def test_references_stand_where_they_say(family: str, make_table: Any) -> None:
    """A reference query is the query before rotation; rotated to its own position, it is the original query again."""
    model = build(family)
    layer, seen = attention_layers(model)[1], []
    watch = refit.gather

    def keep(known: Any, of: Any, step: Any, first: int) -> Any:
        if of.index == 1:
            seen.append(step)
        return watch(known, of, step, first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refit, "gather", keep)
        with kvbudget.compress(model, str(make_table(*shape_of(model))), 0.5, refit=True):
            prefill(model, text(1, 60))
    step = seen[0]
    whole = watch(None, layer, step, 0)
    if hasattr(layer.module, "q_proj"):
        plain = layer.queries(step.hidden[None])[0]
        assert torch.allclose(whole.rows, plain[:, 6::3], atol=1e-4)
    cos, sin = layer.angles(whole.rows, torch.arange(6, 60, 3))
    assert torch.allclose(layer.turn(whole.rows, cos, sin), step.query[:, 6::3], atol=1e-4)
    parts = None
    for a, b in ((0, 5), (5, 23), (23, 24), (24, 60)):
        piece = type(step)(step.query[:, a:b], step.hidden[a:b], tuple(x[a:b] for x in step.rope))
        parts = watch(parts, layer, piece, a)
    assert parts is not None and torch.allclose(parts.rows, whole.rows, atol=1e-6)
    assert parts.before(30).rows.shape[1] == 8


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture
def table(model: Any, make_table: Any) -> kvbudget.Table:
    return kvbudget.Table(make_table(*shape_of(model)))


def kl(model: Any, cache: Any, ids: torch.Tensor, full: torch.Tensor) -> float:
    with torch.no_grad():
        found = model(ids, past_key_values=cache).logits.log_softmax(-1)
    return float((full.exp() * (full - found)).sum(-1).mean())


def test_next_tokens_are_nearer(model: Any, table: kvbudget.Table) -> None:
    """Over four texts, KL to the full cache falls for tokens that come after the context."""
    sums = [0.0, 0.0]
    for seed in range(4):
        ids, more = text(seed=seed), text(1, 16, seed + 50)
        with torch.no_grad():
            full = model(more, past_key_values=prefill(model, ids)).logits.log_softmax(-1)
        for on in (False, True):
            sums[on] += kl(model, cut(model, table, ids, refit=on)[0], more, full)
    assert sums[1] < sums[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(table: kvbudget.Table, dtype: torch.dtype, heads: list[refit.Head]) -> None:
    """Rows keep their type, and errors are measured with the rounded rows."""
    half = build("llama", dtype)
    cache, report = cut(half, table, text(), refit=True)
    assert report.heads_refitted > 0
    assert all(h.error_after <= h.error_before for h in heads if np.isfinite(h.error_before))
    assert all(k.dtype == v.dtype == dtype and bool(k.isfinite().all()) for k, v, _ in segments(cache))


def test_bare_heads_are_bit_equal(model: Any, table: kvbudget.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are unchanged if they keep more than half, if no fit helps, or if their numbers are not finite."""
    ids = text()
    for ratio in (0.1, 0.8):
        if ratio == 0.8:
            monkeypatch.setattr(refit.Head, "_change", lambda head, p, missing: None)
            monkeypatch.setattr(refit.Head, "_factor", lambda head: None)
        fitted, report = cut(model, table, ids, ratio, refit=True)
        assert report.heads_refitted == 0
        for a, b in zip(segments(cut(model, table, ids, ratio)[0]), segments(fitted)):
            assert all(map(torch.equal, a, b))
    keys, kept = torch.randn(40, 8), torch.arange(0, 40, 4)
    for bad in (float("nan"), float("inf"), 1e30):
        for at in range(3):
            given = [keys.clone(), torch.randn(40, 8), torch.randn(32, 8)]
            given[at][1] = bad
            found = refit.Head(*given).fit(kept)
            assert found is None or all(bool(x.isfinite().all()) for x in found)
    for n in (0, 3):
        assert refit.Head(keys, keys, torch.randn(n, 8)).fit(kept) is None
    for flat in (torch.zeros(40, 8), torch.ones(40, 8)):
        found = refit.Head(flat, flat, torch.ones(32, 8)).fit(kept)
        assert found is None or all(bool(x.isfinite().all()) for x in found)


def test_batches_chunks_turns_and_threads(model: Any, table: kvbudget.Table) -> None:
    """A padded batch, chunks and threads give the rows of a sequence alone; later cuts warn that they do not refit."""
    ids, mask = text(2), torch.ones(2, N, dtype=torch.long)
    mask[1, :60] = 0
    alone = [segments(cut(model, table, x, refit=True)[0]) for x in (ids[:1], ids[1:, 60:])]
    places = (mask.cumsum(1) - 1).clamp(min=0)
    both = DynamicCache(config=model.config)
    with torch.no_grad(), kvbudget.compress(model, table, 0.8, refit=True):
        model(ids, past_key_values=both, attention_mask=mask, position_ids=places)
    parts = DynamicCache(config=model.config)
    with torch.no_grad(), kvbudget.compress(model, table, 0.8, when="call", refit=True) as run:
        for part in ids[:1].split(70, 1):
            model(part, past_key_values=parts)
        run.cut(parts)
    threads: list[Any] = [None, None]

    def work(i: int) -> None:
        threads[i] = prefill(model, ids[i : i + 1, 60 * i :])

    with kvbudget.compress(model, table, 0.8, refit=True):
        running = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    batch = segments(both)
    for ours, theirs, offset in (
        ([x for i, x in enumerate(batch) if i % 4 < 2], alone[0], 0),
        ([x for i, x in enumerate(batch) if i % 4 > 1], alone[1], 60),
        (segments(parts), alone[0], 0),
        (segments(threads[0]), alone[0], 0),
        (segments(threads[1]), alone[1], 0),
    ):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a[2] - offset, b[2])
            assert torch.allclose(a[0], b[0], atol=2e-3) and torch.allclose(a[1], b[1], atol=2e-3)
    cache = DynamicCache(config=model.config)
    with kvbudget.compress(model, table, 0.8, refit=True, interval=5) as run:
        model.generate(ids[:1], past_key_values=cache, max_new_tokens=12, do_sample=True, pad_token_id=0,
                       attention_mask=mask[:1])  # fmt: skip
    assert run.report().heads_refitted and any("do not refit again" in w for w in run.report().warnings)


class CHead(c.Structure):
    _fields_ = [
        *((name, c.c_uint32) for name in ("n_tokens", "head_dim", "n_kept", "n_queries")),
        *((name, c.c_void_p) for name in ("k", "v", "positions", "queries")),
    ]


class CResult(c.Structure):
    _fields_ = [("changed", c.c_int), ("judged", c.c_int), ("before", c.c_double), ("after", c.c_double)]


@pytest.mark.parametrize("shape", [(90, 20, 64, 16), (300, 60, 40, 32), (64, 1, 32, 8), (50, 9, 9, 8)])
def test_equals_the_library(shape: tuple[int, ...]) -> None:
    """kvb_refit() of random heads: the same errors and rows."""
    (tokens, kept, queries, d), lib = shape, library()
    if not hasattr(lib, "kvb_refit"):
        pytest.skip("this library does not refit")
    for seed in range(4):
        rng = np.random.default_rng(seed)
        k, v, q = (rng.standard_normal((n, d), np.float32) for n in (tokens, tokens, queries))
        q = q / np.float32(np.sqrt(d)) + np.float32(0.3)
        at = np.sort(rng.choice(tokens, kept, replace=False)).astype(np.uint32)
        head = CHead(tokens, d, kept, queries, *(x.ctypes.data for x in (k, v, at, q)))
        size, result = c.c_size_t(), CResult()
        assert lib.kvb_refit_bytes(c.byref(head), c.byref(size), None) == 0
        work = np.empty(size.value, np.uint8)
        new_k, new_v = np.empty((kept, d), np.float32), np.empty((kept, d), np.float32)
        to, k_to, v_to = (c.c_void_p(x.ctypes.data) for x in (work, new_k, new_v))
        assert lib.kvb_refit(c.byref(head), to, size, k_to, v_to, None, c.byref(result), None) == 0
        ours = refit.Head(*map(torch.from_numpy, (k, v, q)))
        found = ours.fit(torch.from_numpy(at.astype(np.int64)))
        assert ours.error_before == pytest.approx(result.before, rel=1e-4)
        assert ours.error_after == pytest.approx(result.after, rel=1e-3)
        rows = (k[at], v[at]) if found is None else tuple(x.numpy() for x in found)
        assert all(np.allclose(a, b, atol=2e-4, rtol=2e-3) for a, b in zip(rows, (new_k, new_v)))
