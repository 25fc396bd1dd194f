"""Whole generations over cut caches, second cuts, chunks, reports, and everything that must be refused."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import build
from test_families import T, hide_what_was_cut, hiding  # noqa: F401  (registers the reference)
from transformers.cache_utils import DynamicCache, StaticCache

import kvbudget
from kvbudget.models import attention_layers, check_model
from kvbudget.ragged import RaggedLayer

WINDOW = {"window": 8, "kernel": 3, "max_pool": 0, "group_first": 0, "group_max": 0}
METRICS: dict[str, dict[str, Any]] = {
    "keydiff": dict(metric="keydiff"),
    "knorm": dict(metric="knorm"),
    "snapkv": dict(metric="snapkv:kvpress:window=8:kernel=3", parameters=WINDOW, window=8),
    "ea": dict(metric="ea:kvpress", parameters={"future": 512, "sinks": 4, "epsilon": 0.02}, sink=4),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(autouse=True)
def as_it_was(model: Any) -> Iterator[None]:
    yield
    for layer in attention_layers(model):
        layer.config._attn_implementation = "sdpa"
        for name in ("hidden", "masked_key_indices"):  # of the reference and of kvpress
            layer.module.__dict__.pop(name, None)


@pytest.fixture
def table(make_table: Any) -> kvbudget.Table:
    return kvbudget.Table(make_table(4, 4, 2, 16))


def prompt(batch: int = 1, n: int = T, seed: int = 1) -> torch.Tensor:
    """Returns random tokens, all different within a sequence."""
    draw = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(94, generator=draw)[:n] + 2 for _ in range(batch)])


def prefill(model: Any, ids: torch.Tensor, **more: Any) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, **more)
    return cache


WAYS: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "sampling": dict(do_sample=True, temperature=0.8),
    "beams": dict(do_sample=False, num_beams=3),
    "prompt lookup": dict(do_sample=False, prompt_lookup_num_tokens=3),
    "chunks": dict(do_sample=False, prefill_chunk_size=7),
    "chunks of a config": dict(generation_config=transformers.GenerationConfig(
        prefill_chunk_size=39, max_new_tokens=24, pad_token_id=0)),  # fmt: skip
}


@pytest.mark.parametrize("way", WAYS)
def test_generate(model: Any, table: kvbudget.Table, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate() gives the same as with a full cache that hides the evicted tokens."""
    ids, crops = prompt(), []
    crop = RaggedLayer.crop
    monkeypatch.setattr(RaggedLayer, "crop", lambda layer, n: (crops.append(n), crop(layer, n))[1])
    how = dict(max_new_tokens=24, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=0, **WAYS[way])
    torch.manual_seed(3)
    with kvbudget.compress(model, table, 0.7) as run:
        ours = model.generate(ids, **how)
    assert run.report().layers_cut == 4 and run.report().tokens in ((T,), (T,) * 3)
    cut, chunks = DynamicCache(), dict(prefill_chunk_size=how.get("prefill_chunk_size"))
    if way == "chunks of a config":
        chunks = dict(prefill_chunk_size=how["generation_config"].prefill_chunk_size)
    with kvbudget.compress(model, table, 0.7):
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cut, max_new_tokens=1, **chunks)
    hide_what_was_cut(model, cut, [0])
    for layer in attention_layers(model):
        layer.config._attn_implementation = "hiding_sdpa"
    torch.manual_seed(3)
    theirs = model.generate(ids, **how)
    assert ours.tolist() == theirs.tolist()
    assert bool(crops) == (way == "prompt lookup")


@pytest.mark.parametrize("metric", ["keydiff", "snapkv"])
@pytest.mark.parametrize("guesses", ["lookup", "assistant"])
def test_guesses_in_the_first_pass(model: Any, make_table: Any, metric: str, guesses: str) -> None:
    """Guesses of a lookup or an assistant are not part of the prompt: two turns give the same ids as without guesses.

    With guesses, transformers 5.23 passes all the text again to a filled cache, so there it is one turn."""
    turns = 2 if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23) else 1
    table, ids, more = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS[metric])), prompt(), prompt(1, 9, seed=2)
    ids[:, 20:] = ids[:, :20]
    assistant: dict[str, Any] = dict(prompt_lookup_num_tokens=3)
    if guesses == "assistant":
        assistant = dict(assistant_model=copy.deepcopy(model))
    found = []
    for how in ({}, assistant):
        cache = DynamicCache(config=model.config)
        with kvbudget.compress(model, table, 0.7) as run:
            out = ids
            for _ in range(turns):
                out = model.generate(out, past_key_values=cache, max_new_tokens=9, do_sample=False, eos_token_id=0,
                                     attention_mask=torch.ones_like(out), pad_token_id=0, **how)  # fmt: skip
                out = torch.cat([out, more], 1)
        found.append(out.tolist())
        assert run.report().tokens == (T + (9 + 9) * (turns - 1),)
    assert found[0] == found[1]
    for layer in cache.layers:
        for s in range(2):
            places = layer.segment(s)[2].tolist()
            assert places == sorted(set(places)) and places[-1] == layer.seen - 1 == cache.get_seq_length() - 1


def test_a_padded_batch_gives_what_its_rows_give_alone(model: Any, table: kvbudget.Table) -> None:
    """Two sequences, one padded on the left: each is cut by its own length and answers as it does alone."""
    ids = prompt(2)
    ids[1, :11] = 0
    mask = (ids != 0).long()
    how = dict(max_new_tokens=10, do_sample=False, pad_token_id=0)
    with kvbudget.compress(model, table, 0.7) as run:
        both = model.generate(ids, attention_mask=mask, **how)
    assert run.report().tokens == (T, T - 11)
    with kvbudget.compress(model, table, 0.7):
        alone = [
            model.generate(ids[b : b + 1, s:], attention_mask=mask[b : b + 1, s:], **how) for b, s in ((0, 0), (1, 11))
        ]
    assert both[0, T:].tolist() == alone[0][0, T:].tolist()
    assert both[1, T:].tolist() == alone[1][0, T - 11 :].tolist()


def test_a_second_turn(model: Any, table: kvbudget.Table) -> None:
    """A cut cache is continued in a second call, and a copy of it is a prefix that can be used again."""
    ids, cache = prompt(), DynamicCache(config=model.config)
    how = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    with kvbudget.compress(model, table, 0.7):
        first = model.generate(ids, past_key_values=cache, attention_mask=torch.ones_like(ids), **how)
    prefix = copy.deepcopy(cache)
    longer = torch.cat([first, prompt(1, 7, seed=2)], 1)
    second = model.generate(longer, past_key_values=cache, attention_mask=torch.ones_like(longer), **how)
    assert cache.get_seq_length() == longer.shape[1] + 4
    again = model.generate(longer, past_key_values=prefix, attention_mask=torch.ones_like(longer), **how)
    assert second.tolist() == again.tolist()  # a copied cache is a prefix that can be used again
    with torch.no_grad():  # one token at a time, over the same cut
        with kvbudget.compress(model, table, 0.7):
            slow = prefill(model, ids)
        for i in range(T, longer.shape[1]):
            out = model(longer[:, i : i + 1], past_key_values=slow).logits
    assert int(out[0, -1].argmax()) == int(second[0, longer.shape[1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(table: kvbudget.Table, dtype: torch.dtype) -> None:
    """bf16 and fp16 caches keep their type, and logits differ from a full cache with hidden tokens by rounding only."""
    model, ids = build("llama", dtype), prompt()
    with kvbudget.compress(model, table, 0.7):
        cut = prefill(model, ids)
    assert cut.layers[0].flat_keys.dtype == dtype
    with torch.no_grad():
        ours = model(prompt(1, 1, seed=5), past_key_values=cut).logits.float()
        hide_what_was_cut(model, cut, [0])
        for layer in attention_layers(model):
            layer.config._attn_implementation = "hiding_sdpa"
        theirs = model(prompt(1, 1, seed=5), past_key_values=prefill(model, ids)).logits.float()
    assert float((ours - theirs).abs().max()) < 0.05 * float(theirs.abs().max())


@pytest.mark.parametrize("chunk", [64, 200, 512, 1024, 2048])
def test_chunks_of_a_long_prefill(make_table: Any, chunk: int) -> None:
    """The last queries span several chunks: the same rows are kept as after a prefill in one pass."""
    model = build("llama", max_position_embeddings=4096)  # noqa: F811
    table = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS["snapkv"]))  # noqa: F811
    ids, kept = prompt(44, 50).view(1, 2200), []
    for size in (2200, chunk):
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), kvbudget.compress(model, table, 0.8, when="call") as run:
            for part in ids.split(size, 1):
                model(part, past_key_values=cache, logits_to_keep=1)
            run.cut(cache)
        kept.append([layer.segment(s)[2].tolist() for layer in cache.layers for s in range(2)])
    same = [len(set(a) & set(b)) / len(a) for a, b in zip(*kept)]
    assert [len(a) for a in kept[0]] == [len(b) for b in kept[1]] and min(same) > 0.98, same  # rounding moves ties


@pytest.mark.parametrize("metric", METRICS)
def test_chunks(model: Any, make_table: Any, metric: str) -> None:
    """A prefill in chunks keeps the same tokens as a prefill in one pass."""
    table, ids = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS[metric])), prompt()
    with kvbudget.compress(model, table, 0.7):
        whole = prefill(model, ids)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), kvbudget.compress(model, table, 0.7, when="call") as run:
        for part in ids.split([2, 17, 13, 8], 1):
            model(part, past_key_values=cache)
        assert not isinstance(cache.layers[0], RaggedLayer)
        run.cut(cache)
    assert run.report().tokens == (T,)
    for ours, theirs in zip(cache.layers, whole.layers):
        assert ours.lengths == theirs.lengths
        for s in range(2):
            assert ours.segment(s)[2].tolist() == theirs.segment(s)[2].tolist()


@pytest.mark.parametrize("metric", METRICS)
def test_cutting_again_while_an_answer_grows(model: Any, make_table: Any, metric: str) -> None:
    """With a target size the cache does not grow; protected tokens are kept, and rows belong to their positions."""
    table, ids = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS[metric])), prompt()
    info, cache = table.info, DynamicCache(config=model.config)
    with kvbudget.compress(model, table, target_size=16, interval=10) as run:
        out = model.generate(ids, past_key_values=cache, max_new_tokens=31, do_sample=False, pad_token_id=0,
                             attention_mask=torch.ones_like(ids))  # fmt: skip
    with torch.no_grad():
        full = prefill(model, out)
    total = T + 30
    assert cache.get_seq_length() == total
    for i, layer in enumerate(cache.layers):
        assert layer.cut_at == total  # 10, 20 and 30 tokens after the first cut
        keep = table.grown(run.rule, T).keep[i]
        for n in (T + 10, T + 20, T + 30):
            keep = np.minimum(keep + 10, table.grown(run.rule, n).keep[i])
        for h in range(2):
            k, _, places = layer.segment(h)
            assert len(k) == keep[h]
            assert places.tolist() == sorted(set(places.tolist()))
            protected = [*range(info.sink), *range(total - info.window, total)][: len(k)]
            assert set(protected) <= set(places.tolist())
            if i == 0:  # the first layer's keys depend on their token alone
                assert torch.allclose(k, full.layers[0].keys[0, h, places.long()], atol=1e-5)
    assert run.report().bytes_now < run.report().bytes_full


def test_recut_by_hand(model: Any, table: kvbudget.Table) -> None:
    """run.cut() gives every head what the table says for all tokens seen so far."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), kvbudget.compress(model, table, 0.6) as run:
        model(prompt(), past_key_values=cache)
        for part in prompt(1, 20, seed=4).split(1, 1):
            model(part, past_key_values=cache)
        run.cut(cache)
    for layer, keep in zip(cache.layers, table.keep(0.6, T + 20)):
        assert layer.lengths == [min(int(k), n) for k, n in zip(keep, layer.lengths)] and layer.seen == T + 20


def test_recut_needs_to_have_watched(model: Any, make_table: Any) -> None:
    """A metric that ranks by queries cannot be cut again unless they were watched."""
    table, cache = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS["snapkv"])), DynamicCache(config=model.config)
    with torch.no_grad(), kvbudget.compress(model, table, 0.6) as run:
        model(prompt(), past_key_values=cache)
        run.cut(cache)  # the queries that it has seen are still the last ones
        model(prompt(1, 1), past_key_values=cache)
        with pytest.raises(kvbudget.KVBudgetError, match='only when="call"'):
            run.cut(cache)


def test_the_report(model: Any, table: kvbudget.Table) -> None:
    """Bytes, ratios and counts of the report are those of the table and of the cache itself."""
    with kvbudget.compress(model, table, 0.7, slack=8) as run:
        cache = prefill(model, prompt())
    r, kept = run.report(), int(table.keep(0.7, T).sum())
    assert r.bytes_full == 4 * 2 * T * 2 * 16 * 4 and r.bytes_promised == kept * 2 * 16 * 4
    assert r.bytes_now == (kept + 8 * 8) * (2 * 16 * 4 + 4) == kvbudget.cache_bytes(cache)
    assert r.effective_ratio == pytest.approx(table.budgets(0.7, T).effective_ratio)
    assert (r.layers_cut, r.layers_left, r.tokens, r.requested_ratio) == (4, 0, (T,), 0.7)
    with torch.no_grad():
        model(prompt(1, 30, seed=3), past_key_values=cache)  # it grows, beyond its free rows
    grown = run.report(cache)
    assert grown == run.report() and grown.bytes_full == 4 * 2 * (T + 30) * 2 * 16 * 4
    assert grown.bytes_now == kvbudget.cache_bytes(cache) > r.bytes_now and grown.effective_ratio == r.effective_ratio
    assert grown.saved == 1 - grown.bytes_now / grown.bytes_full
    del cache
    assert run.report() == grown  # as it was last


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("n", [100, 400])
def test_bytes_are_those_promised_and_the_slack(make_table: Any, n: int, ratio: float, dtype: torch.dtype) -> None:
    """With heads of 64 numbers, as in most models, bytes are within 5 % of kept tokens and free rows, at any length."""
    model = build("llama", dtype, head_dim=64)
    table, ids = kvbudget.Table(make_table(4, 4, 2, 64)), torch.randint(2, 96, (2, n))
    with kvbudget.compress(model, table, ratio) as run:
        cache = prefill(model, ids)
    r, row = run.report(), 2 * 64 * torch.finfo(dtype).bits // 8
    assert r.bytes_promised == 2 * int(table.keep(ratio, n).sum()) * row
    assert r.bytes_with_slack == r.bytes_promised + 2 * 4 * 2 * 32 * row
    assert r.bytes_with_slack <= kvbudget.cache_bytes(cache) <= 1.05 * r.bytes_with_slack


def test_ratio_0_does_nothing(model: Any, table: kvbudget.Table) -> None:
    """Ratio 0 leaves the cache as it is, without an error."""
    with kvbudget.compress(model, table, 0.0) as run:
        cache = prefill(model, prompt())
    assert not any(isinstance(layer, RaggedLayer) for layer in cache.layers) and run.report().layers_cut == 0


def test_nothing_but_protected_tokens(model: Any, make_table: Any) -> None:
    """T below sinks + window: everything is kept, with a warning."""
    table = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS["snapkv"]))
    with pytest.warns(UserWarning, match="nothing was evicted"), kvbudget.compress(model, table, 0.8) as run:
        out = model.generate(
            prompt(1, 9), max_new_tokens=4, do_sample=False, attention_mask=torch.ones(1, 9, dtype=torch.long)
        )
    assert out.shape[1] == 13 and run.report().layers_cut == 0 and "9 tokens" in run.report().warnings[0]
    ids = prompt(2)
    ids[1, :32] = 0  # one row of 8 tokens, one of 40
    with warnings.catch_warnings(), kvbudget.compress(model, table, 0.8) as run:
        warnings.simplefilter("error")
        cache = prefill(model, ids, attention_mask=(ids != 0).long())
    assert cache.layers[0].lengths[2:] == [8, 8] and max(cache.layers[0].lengths[:2]) < T


def test_what_is_refused(model: Any, table: kvbudget.Table, make_table: Any) -> None:
    """Static and offloaded caches, other attention, wrong options and blocks that cut nothing: an error says why."""
    ids = prompt()

    def refused(
        words: str, ratio: float | None = 0.7, on: Any = model, of: Any = table, cache: Any = None, **how: Any
    ) -> None:
        with pytest.raises(kvbudget.KVBudgetError, match=words):
            with torch.no_grad(), kvbudget.compress(on, of, ratio, **how):
                on(ids, past_key_values=cache() if cache else None, use_cache=cache is not None)

    refused("StaticCache cannot be cut", cache=lambda: StaticCache(config=model.config, max_cache_len=64))
    refused("offloaded", cache=lambda: offloaded())
    refused("nothing was cut")  # no cache at all
    refused("ratio", ratio=1.0)
    refused("kernel: expected", kernel="fast")
    refused("when: expected", when="never")
    refused("interval: expected at least 1", interval=0)
    refused("buffer: expected at least 4", interval=4, buffer=3)
    refused("buffer: needs", buffer=4)
    refused("interval: with when", interval=4, when="call")
    refused("one of the two", target_size=9)
    refused("target_size: expected at least 4", ratio=None, target_size=3)
    refused("rounding: expected", rounding="up")
    refused("expected 4, the table says 5", of=make_table(5, 4, 2, 16))
    refused("has no scorer in Python", of=make_table(4, 4, 2, 16, metric="h2o"))
    refused("found str", scorer="keydiff")
    for layer in attention_layers(model):
        layer.config._attn_implementation = "flex_attention"
    refused("'flex_attention' is not supported")
    held = DynamicCache(config=model.config)
    for layer in attention_layers(model):
        layer.config._attn_implementation = "sdpa"
    with torch.no_grad():
        model(ids, past_key_values=held)
    refused("held 40 tokens before", cache=lambda: held)


def offloaded() -> DynamicCache:
    cache = DynamicCache()
    cache.offloading = True  # DynamicCache(offloading=True) needs a GPU
    cache.update = lambda k, v, i, *_, **__: DynamicCache.update(without(cache), k, v, i)  # type: ignore[method-assign]
    return cache


def without(cache: DynamicCache) -> DynamicCache:
    """Returns a copy of the cache that does not offload."""
    plain = copy.copy(cache)
    plain.__dict__.update(offloading=False)
    plain.__dict__.pop("update", None)
    return plain


def test_right_padding_is_refused(model: Any, table: kvbudget.Table) -> None:
    """Padding on the right would be counted as text."""
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, -5:] = 0
    with pytest.raises(kvbudget.KVBudgetError, match="on the left"), kvbudget.compress(model, table, 0.7):
        prefill(model, prompt(2), attention_mask=mask)


def test_models_that_cannot_be_cut(make_table: Any) -> None:
    """The meta device, a window in every layer, a hybrid model with a cache for full attention: an error."""
    table = make_table(4, 4, 2, 16)
    with torch.device("meta"):
        meta = build("llama")
    with pytest.raises(kvbudget.KVBudgetError, match="meta device"), kvbudget.compress(meta, str(table), 0.7):
        pass
    sliding = build("mistral", sliding_window=8)
    with pytest.raises(kvbudget.KVBudgetError, match="every layer of MistralForCausalLM has a sliding window"):
        with kvbudget.compress(sliding, str(table), 0.7):
            prefill(sliding, prompt())
    hybrid = build("gemma3")
    with pytest.raises(kvbudget.KVBudgetError, match="DynamicCache\\(config=model.config\\)"), torch.no_grad():
        with kvbudget.compress(hybrid, str(table), 0.7):
            hybrid(prompt(), past_key_values=DynamicCache())


def test_a_config_that_an_old_transformers_misreads(model: Any, table: kvbudget.Table) -> None:
    """Before version 5 transformers ignores theta of a new config.json, and keys would be rotated by other angles."""
    old = int(transformers.__version__.split(".")[0]) < 5
    odd = copy.deepcopy(model)
    odd.config.rope_parameters = {"rope_type": "default", "rope_theta": 7.0}
    if not old:
        check_model(odd)
        return
    with pytest.raises(kvbudget.MismatchError, match="reads 10000.*says 7"), kvbudget.compress(odd, table, 0.7):
        pass


def test_an_exception_leaves_no_hooks(model: Any, table: kvbudget.Table) -> None:
    """A model is restored when an exception ends the block."""
    with pytest.raises(RuntimeError, match="mine"), kvbudget.compress(model, table, 0.7):
        raise RuntimeError("mine")
    assert not {"forward", "generate"} & {name for part in model.modules() for name in part.__dict__}
    full = prefill(model, prompt())
    assert not isinstance(full.layers[0], RaggedLayer)
