"""Caches of tables with formats: bytes and numbers equal the library's, and logits follow from these numbers."""

import copy
import ctypes as c
from typing import Any

import numpy as np
import pytest
import torch
from families import build
from test_families import hide_what_was_cut, hiding  # noqa: F401  (registers the reference)
from test_families import T as PROMPT
from transformers.cache_utils import DynamicCache

import kvbudget
from kvbudget import packed
from kvbudget._library import library
from kvbudget.models import attention_layers
from kvbudget.ragged import RaggedLayer

FORMATS = list(packed.BITS)


def pointer(x: Any) -> Any:
    return c.c_void_p(x.ctypes.data)


def size_of(form: str, keys: bool, n: int, d: int) -> int:
    lib = library()
    lib.kvb_packed_bytes.restype = c.c_size_t
    return int(lib.kvb_packed_bytes(FORMATS.index(form), 0 if keys else 1, n, d))


def by_library(rows: torch.Tensor, form: str, keys: bool) -> tuple[np.ndarray, torch.Tensor]:
    """Returns the bytes of kvb_pack() and the numbers of kvb_unpack()."""
    given, (n, d) = np.ascontiguousarray(rows.float().numpy()), rows.shape
    stored, back = np.zeros(size_of(form, keys, n, d), np.uint8), np.empty((n, d), np.float32)
    how = FORMATS.index(form), 0 if keys else 1
    assert library().kvb_pack(*how, pointer(given), n, d, pointer(stored), None) == 0
    assert library().kvb_unpack(*how, pointer(stored), n, d, pointer(back), None) == 0
    return stored, torch.from_numpy(back)


def drawn(kind: str, n: int, d: int) -> torch.Tensor:
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(n + d))
    return {
        "normal": x,
        "outliers": x * torch.tensor([1.0] * (d - 1) + [300.0]),
        "positive": x.abs() + 5,
        "constant": torch.full_like(x, -0.37),
        "zero": torch.zeros_like(x),
        "tiny": x * 1e-38,
        "huge": x * 1e30,
        "coarse": (x * 2).round().abs(),
    }[kind]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("kind", ["normal", "outliers", "positive", "constant", "zero", "tiny", "huge", "coarse"])
def test_bytes_are_the_librarys(form: str, keys: bool, kind: str) -> None:
    for n, d in ((1, 64), (31, 8), (32, 16), (33, 40), (70, 64), (96, 96), (100, 7), (5, 128)):
        rows = drawn(kind, n, d)
        ours, (stored, back) = packed.pack(rows, form, keys), by_library(rows, form, keys)
        assert ours.contiguous().view(torch.uint8).flatten().tolist() == stored.tolist()
        assert packed.unpack(ours, form, keys, n, d).float().equal(back)
        if form != "bf16":  # what other devices do
            assert packed._unpack_by_torch(ours, packed.BITS[form], keys, n, d).equal(back)
    assert packed.unpack(packed.pack(rows[:0], form, keys), form, keys, 0, 128).shape == (0, 128)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture
def table(make_table: Any) -> kvbudget.Table:
    return kvbudget.Table(make_table(4, 4, 2, 16, formats=range(4)))


def text(batch: int = 1, n: int = 150, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 96, (batch, n), generator=torch.Generator().manual_seed(seed))


def cut(model: Any, table: Any, ids: torch.Tensor, ratio: float = 0.6, **how: Any) -> tuple[Any, Any]:
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), kvbudget.compress(model, table, ratio, **how) as run:
        model(ids, past_key_values=cache)
    return cache, run


def logits(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Returns logits of the next tokens: five together, the others one by one."""
    with torch.no_grad():
        out = [model(ids[:, :5], past_key_values=cache).logits]
        out += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(5, ids.shape[1])]
    return torch.cat(out, 1).float()


def segments(cache: Any) -> list[tuple[torch.Tensor, ...]]:
    return [layer.segment(s) for layer in cache.layers for s in range(len(layer.lengths))]


def stored_as(table: kvbudget.Table, rows: list[Any], ratio: float) -> list[Any]:
    """Returns the segments' rows after the library has packed and unpacked them in the table's formats."""
    forms = table.formats(ratio).reshape(-1, 2).tolist()
    return [tuple(by_library(x, f, i == 0)[1] for i, (x, f) in enumerate(zip(r, form))) for r, form in zip(rows, forms)]


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_unpacked_rows(
    table: kvbudget.Table, refit: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits equal those over plain rows that the library has packed and unpacked, with and without refit."""
    model, more = build("llama", dtype), text(1, 12, 9)
    ours, run = cut(model, table, text(), 0.7, refit=refit)
    with monkeypatch.context() as patch:
        patch.setattr(RaggedLayer, "pack", lambda *_: None)
        theirs, _ = cut(model, table, text(), 0.7, refit=refit)
    assert bool(run.report().heads_refitted) == refit
    want = stored_as(table, segments(theirs), 0.7)
    for (k, v, places), (a, b), (plain_k, plain_v, at) in zip(segments(ours), want, segments(theirs)):
        assert k.dtype == dtype and k.equal(a.to(dtype)) and v.equal(b.to(dtype)) and places.equal(at)
        plain_k.copy_(a)
        plain_v.copy_(b)
    assert logits(model, ours, more).equal(logits(model, theirs, more))


def test_logits_are_those_of_a_full_cache(model: Any, table: kvbudget.Table) -> None:
    """Kept rows of the full cache are packed and unpacked by the library, and evicted ones hidden."""
    ids, more = text(1, PROMPT), text(1, 12, 9)
    ours, _ = cut(model, table, ids)
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=full)
    places = [x[2].long() for x in segments(ours)]
    plain = [(full.layers[i // 2].keys[0, i % 2][at], full.layers[i // 2].values[0, i % 2][at])
             for i, at in enumerate(places)]  # fmt: skip
    for i, (at, (k, v)) in enumerate(zip(places, stored_as(table, plain, 0.6))):
        full.layers[i // 2].keys[0, i % 2, at], full.layers[i // 2].values[0, i % 2, at] = k, v
    hide_what_was_cut(model, ours, [0])
    found = logits(model, ours, more)
    layers = attention_layers(model)
    try:
        for layer in layers:
            layer.config._attn_implementation = "hiding_sdpa"
        assert torch.allclose(found, logits(model, full, more), atol=2e-5)
    finally:
        for layer in layers:
            layer.config._attn_implementation = "sdpa"
            layer.module.__dict__.pop("hidden", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [0.3, 0.6, 0.8, 0.9, 0.95])
def test_bytes_are_those_of_the_table(make_table: Any, ratio: float, dtype: torch.dtype) -> None:
    """The tensors take what kvb_packed_bytes() says for the counts and formats of the table's row."""
    model, n = build("llama", dtype, head_dim=64), 300
    table = kvbudget.Table(make_table(4, 4, 2, 64, formats=range(4)))
    cache, run = cut(model, table, text(2, n), ratio)
    r, keep, slack = run.report(), table.keep(ratio, n), 4 * 2 * 2 * 32
    forms = table.formats(ratio)
    heads = [(int(keep[i, h]), *forms[i, h].tolist()) for i in range(4) for h in range(2)]
    want = 2 * sum(size_of(f, True, k, 64) + size_of(g, False, k, 64) for k, f, g in heads)
    assert r.bytes_promised == want and r.bytes_with_slack == want + slack * 128 * dtype.itemsize
    assert r.bytes_now == r.bytes_with_slack + 4 * (2 * int(keep.sum()) + slack) == kvbudget.cache_bytes(cache)
    assert r.effective_ratio == pytest.approx(1 - keep.sum() / (8 * n))
    logits(model, cache, text(2, 50, 3))
    grown = run.report(cache)
    assert grown.bytes_promised == want + 8 * 2 * 50 * 128 * dtype.itemsize
    assert grown.bytes_now == kvbudget.cache_bytes(cache)


def test_turns_pack_what_is_new(model: Any, table: kvbudget.Table) -> None:
    """The next cut unpacks, selects and packs again: old rows that it keeps are packed from their unpacked numbers."""
    cache, _ = cut(model, table, text())
    with torch.no_grad(), kvbudget.compress(model, table, 0.6, when="call") as run:
        for part in text(1, 40, 5).split(1, 1):
            model(part, past_key_values=cache)
        before = segments(cache)
        run.cut(cache)
    assert all(layer.lengths == [0, 0] and len(layer.packed) == 2 for layer in cache.layers)
    for (k, v, places), old, n in zip(segments(cache), before, table.keep(0.6, 190).flatten().tolist()):
        assert len(places) == min(n, len(old[2])) and old[2][torch.isin(old[2], places)].equal(places)
        assert k.shape == v.shape == (len(places), 16)
    want = stored_as(table, [(k[torch.isin(at, new[2])], v[torch.isin(at, new[2])])
                             for (k, v, at), new in zip(before, segments(cache))], 0.6)  # fmt: skip
    assert all(k.equal(a) and v.equal(b) for (k, v, _), (a, b) in zip(segments(cache), want))


def test_answers_with_an_interval(model: Any, table: kvbudget.Table) -> None:
    """Plain rows never exceed the interval, and ids equal those without an interval until the second cut."""
    how = dict(do_sample=False, pad_token_id=0, attention_mask=torch.ones(1, 150, dtype=torch.long))
    for new in (16, 40):
        ids, caches = [], [DynamicCache(config=model.config) for _ in range(2)]
        for cache, interval in zip(caches, (None, 16)):
            with kvbudget.compress(model, table, 0.6, interval=interval, strict=True):
                ids.append(model.generate(text(), past_key_values=cache, max_new_tokens=new, **how).tolist())
        assert ids[0][0][:166] == ids[1][0][:166]
        assert [layer.lengths for layer in caches[1].layers] == [[(new - 1) % 16] * 2] * 4


def test_sequences_come_go_and_are_copied(model: Any, table: kvbudget.Table) -> None:
    """Beams share packed rows, copies do not; a crop into the cut part packs the rest again."""
    cache, run = cut(model, table, text(2))
    layer, own = cache.layers[1], segments(cache)[4:8]
    prefix, bytes_now = copy.deepcopy(cache), layer.size.bytes_now
    layer.reorder_cache(torch.tensor([1, 1, 0]))
    for ours, theirs in zip(segments(cache)[4:10], [*own[2:], *own[2:], *own[:2]]):
        assert all(map(torch.equal, ours, theirs))
    assert layer.size.packed == (sum(len(x[2]) for x in own), sum(x.bytes for x in prefix.layers[1].packed))
    assert kvbudget.cache_bytes(cache, [1]) == layer.size.bytes_now > bytes_now  # free rows of the third
    layer.crop(-40)
    for ours, theirs in zip(segments(cache)[4:6], own[2:]):
        assert ours[2].tolist() == [p for p in theirs[2].tolist() if p < 110]
    assert layer.seen == 110 and len(layer.packed) == 6 and set(layer.lengths) == {0}
    assert all(a.equal(b) for x, y in zip(segments(prefix)[4:8], own) for a, b in zip(x, y))
    beams = dict(num_beams=3, max_new_tokens=8, do_sample=False, pad_token_id=0)
    with kvbudget.compress(model, table, 0.6):
        model.generate(text(), attention_mask=torch.ones(1, 150, dtype=torch.long), **beams)


def test_padded_batches_are_as_alone(model: Any, table: kvbudget.Table) -> None:
    ids, mask = text(2), torch.ones(2, 150, dtype=torch.long)
    mask[1, :60] = 0
    both = DynamicCache(config=model.config)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), kvbudget.compress(model, table, 0.6):
        model(ids, past_key_values=both, attention_mask=mask, position_ids=places)
    for b, start in ((0, 0), (1, 60)):
        alone, _ = cut(model, table, ids[b : b + 1, start:])
        for ours, theirs in zip([x for i, x in enumerate(segments(both)) if i % 4 // 2 == b], segments(alone)):
            assert (ours[2] - start).equal(theirs[2])
            # A number close to the middle between two codes may be rounded to either.
            assert float(((ours[0] - theirs[0]).abs() > 1e-4).float().mean()) < 0.02


def test_a_cache_that_cuts_itself(model: Any, table: kvbudget.Table) -> None:
    cache, (block, run) = kvbudget.Cache(table, 0.6, config=model.config), cut(model, table, text())
    with torch.no_grad():
        model(text(), past_key_values=cache)
    assert all(a.equal(b) for x, y in zip(segments(cache), segments(block)) for a, b in zip(x, y))
    assert cache.report() == run.report()


def test_what_is_refused(model: Any, table: kvbudget.Table, make_table: Any) -> None:
    plain = kvbudget.Table(make_table(4, 4, 2, 16))
    assert not plain.has_formats and set(plain.formats(0.5).flatten()) == {"bf16"} and table.has_formats
    assert set(table.formats(0).flatten()) == {"bf16"} and table.formats(0.5).shape == (4, 2, 2)
    for how, said in ((dict(target_size=64), "shares out bytes"), (dict(ratio=0.5, kernel="varlen"), "plain rows")):
        with pytest.raises(kvbudget.KVBudgetError, match=said):
            kvbudget.compress(model, table, **how)
    for bad in (float("inf"), float("nan"), 3.4e38):
        with pytest.raises(kvbudget.KVBudgetError, match="not finite, or too large"):
            packed.pack(torch.tensor([[1.0, -bad], [2.0, 0.0]]), "int4", False)
    with pytest.raises(kvbudget.KVBudgetError, match="expected 0 up to"):
        table.formats(1)
