"""Calls of a model inside a block: turns, threads, copies, modes, and arguments of generate()."""

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from families import build
from test_eviction import METRICS, T, as_it_was, model, prefill, prompt, table  # noqa: F401  (fixtures)
from transformers.cache_utils import DynamicCache

import kvbudget
from kvbudget.models import attention_layers
from kvbudget.ragged import RaggedLayer

HOW: dict[str, Any] = dict(do_sample=False, pad_token_id=0, eos_token_id=None)


def say(model: Any, ids: torch.Tensor, n: int = 6, **more: Any) -> Any:
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, **HOW, **more)


def places(cache: Any) -> list[list[int]]:
    return [layer.segment(s)[2].tolist() for layer in cache.layers for s in range(len(layer.lengths))]


@pytest.mark.parametrize("metric", METRICS)
def test_every_turn_is_cut(model: Any, make_table: Any, metric: str) -> None:
    """After each prompt the cache has the table's share of all tokens."""
    table, cache, ids = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS[metric])), DynamicCache(), prompt()
    with kvbudget.compress(model, table, 0.6) as run:
        for turn in range(3):
            out = say(model, ids, past_key_values=cache)
            n = ids.shape[1]
            assert run.report().tokens == (n,) and run.report().effective_ratio == pytest.approx(0.6, abs=0.1)
            if turn:  # strict: the newest tokens of the prompt are in every head
                newest = set(range(n - table.info.window, n))
                assert all(newest <= set(kept) for kept in places(cache))
            ids = torch.cat([out, prompt(1, 25, seed=turn + 5)], 1)
    assert len(run.report().warnings) == len(set(run.report().warnings)) <= 4


def test_turns_give_the_logits_of_a_full_cache_with_hidden_tokens(model: Any, make_table: Any) -> None:
    """Three turns, step by step, compared with a full cache that hides the tokens that each cut evicted."""
    table, reference, ids, held = kvbudget.Table(make_table(4, 4, 2, 16)), copy.deepcopy(model), prompt(), 0
    reference.config._attn_implementation = "hiding_sdpa"
    cut, full = DynamicCache(), DynamicCache()
    for turn in range(3):
        with kvbudget.compress(model, table, 0.6):
            out = say(model, ids, past_key_values=cut, return_dict_in_generate=True, output_logits=True)
        n, theirs = ids.shape[1], []
        for part in (out.sequences[:, held:n], *out.sequences[:, n:-1].split(1, 1)):
            with torch.no_grad():
                theirs.append(reference(part, past_key_values=full).logits[:, -1])
            for layer, kept in zip(attention_layers(reference), cut.layers):
                layer.module.__dict__["hidden"] = hidden = torch.ones(1, 2, n, dtype=torch.bool)
                for h in range(2):
                    hidden[0, h, [p for p in kept.segment(h)[2].tolist() if p < n]] = False
        for a, b in zip(out.logits, theirs):
            assert float((a - b).abs().max()) < 2e-5 * float(b.abs().max())
        held, ids = out.sequences.shape[1] - 1, torch.cat([out.sequences, prompt(1, 25, seed=turn + 5)], 1)


def test_turns_that_cannot_be_cut_again_say_so(model: Any, make_table: Any) -> None:
    table, cache = kvbudget.Table(make_table(4, 4, 2, 16, metric="tova", parameters={"scope": "layer"})), DynamicCache()
    with pytest.warns(UserWarning, match="later turns all stay: tova"), kvbudget.compress(model, table, 0.6) as run:
        out = say(model, prompt(), past_key_values=cache)
        say(model, torch.cat([out, prompt(1, 25, seed=5)], 1), past_key_values=cache)
    assert run.report().tokens == (T,) and "later turns all stay" in " ".join(run.report().warnings)
    with pytest.raises(kvbudget.KVBudgetError, match="interval: tova is a mean"):
        kvbudget.compress(model, table, 0.6, interval=8)


def test_later_cuts_spare_the_newest_tokens(model: Any, make_table: Any) -> None:
    """Even heads with tiny budgets keep them; and a prompt that was too short to be cut is cut once it has grown."""
    table = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS["snapkv"]))
    for start in (T, 6):
        cache = DynamicCache()
        with warnings.catch_warnings(), kvbudget.compress(model, table, 0.9, interval=8) as run:
            warnings.simplefilter("ignore")
            say(model, prompt(1, start), 2 * 8 + 1, past_key_values=cache)
        last = start + 16 if start == T else 16  # a short prompt counts towards the first interval
        assert run.report().tokens == (last,)
        assert all(set(range(last - 8, last)) <= set(kept) for kept in places(cache))
    assert min(map(len, places(cache))) < 22


def test_a_padded_batch_is_cut_again_by_its_own_lengths(model: Any, table: kvbudget.Table) -> None:  # noqa: F811
    ids, new = prompt(2), prompt(2, 20, seed=4)
    ids[1, :11] = 0
    mask, caches = torch.cat([(ids != 0).long(), torch.ones(2, 20, dtype=torch.long)], 1), []
    for b, skip in ((slice(0, 2), 0), (slice(1, 2), 11)):
        caches.append(DynamicCache())
        with torch.no_grad(), kvbudget.compress(model, table, 0.6) as run:
            for part, at in ((ids[b, skip:], T), (new[b], T + 20)):
                where = (mask[b, skip:at].cumsum(1) - 1).clamp(min=0)[:, -part.shape[1] :]
                model(part, past_key_values=caches[-1], attention_mask=mask[b, skip:at], position_ids=where)
            run.cut(caches[-1])
    both, alone = places(caches[0]), places(caches[1])
    assert [[p - 11 for p in both[4 * i + 2 + h]] for i in range(4) for h in range(2)] == alone


def test_threads_share_a_block(model: Any, make_table: Any) -> None:
    """Two prefills are in the same layer at the same time: each cache is cut by its own queries."""
    table, meet = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS["snapkv"])), threading.Barrier(2, timeout=60)
    prompts = [prompt(seed=1), prompt(seed=2)]
    alone = []
    for ids in prompts:
        with kvbudget.compress(model, table, 0.7):
            alone.append(places(prefill(model, ids)))
    found: list[Any] = [None, None]

    def fill(i: int) -> None:
        found[i] = places(prefill(model, prompts[i]))

    hooks = [layer.module.o_proj.register_forward_pre_hook(lambda *_: (meet.wait(), None)[1])
             for layer in attention_layers(model)]  # fmt: skip
    with kvbudget.compress(model, table, 0.7):
        in_parallel(fill)
    for hook in hooks:
        hook.remove()
    assert found == alone != alone[::-1]


def in_parallel(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_blocks_are_not_nested(model: Any, table: kvbudget.Table) -> None:  # noqa: F811
    """A second block on one model, or the same block twice at once, is refused; one after another works."""
    run = kvbudget.compress(model, table, 0.7)
    for _ in range(2):
        with run:
            with pytest.raises(kvbudget.KVBudgetError, match="inside of a block"), kvbudget.compress(model, table, 0.5):
                pass
            with pytest.raises(kvbudget.KVBudgetError, match="open already"), run:
                pass
            prefill(model, prompt())


def test_what_a_thread_began_is_cut_to_the_end(model: Any, table: kvbudget.Table) -> None:  # noqa: F811
    """The block ends while another thread is in layer 2: its cache is cut in all layers, then the model is restored."""
    inside, left, caches = threading.Event(), threading.Event(), []

    def wait(*_: Any) -> None:
        if not caches:
            inside.set()
            assert left.wait(60)

    hook = model.model.layers[2].register_forward_pre_hook(wait)
    ids, thread = prompt(), threading.Thread(target=lambda: caches.append(prefill(model, prompt())))
    with kvbudget.compress(model, table, 0.7) as run:
        thread.start()
        assert inside.wait(60)
    with pytest.raises(kvbudget.KVBudgetError, match="inside of a block"), kvbudget.compress(model, table, 0.7):
        pass
    left.set()
    thread.join()
    hook.remove()
    assert run.report(caches[0]).layers_cut == 4
    assert not isinstance(prefill(model, ids).layers[0], RaggedLayer)


def test_a_copied_model_is_a_plain_one(model: Any, table: kvbudget.Table) -> None:  # noqa: F811
    with kvbudget.compress(model, table, 0.7):
        other = copy.deepcopy(model)
        assert not isinstance(prefill(other, prompt()).layers[0], RaggedLayer)
        with torch.no_grad():
            other.lm_head.weight.zero_()
        assert say(other, prompt())[0, T:].tolist() == [0] * 6  # its own generate(), not the original's
        prefill(model, prompt())


@pytest.mark.parametrize("mode", ["grad", "inference"])
def test_modes(model: Any, table: kvbudget.Table, mode: str) -> None:  # noqa: F811
    """With gradients on, or a prefill in inference mode and decoding outside: the same logits, without gradient."""
    out = []
    for prefilled in (torch.no_grad(), torch.enable_grad() if mode == "grad" else torch.inference_mode()):
        cache = DynamicCache()
        with prefilled, kvbudget.compress(model, table, 0.7):
            model(prompt(), past_key_values=cache)
            model(prompt(1, 40, seed=3), past_key_values=cache)
        with torch.enable_grad() if mode == "grad" else torch.no_grad():
            out.append(model(prompt(1, 1, seed=5), past_key_values=cache).logits)
        assert not cache.layers[0].flat_keys.requires_grad
    assert torch.equal(*out)


def test_a_model_that_changes_its_type(table: kvbudget.Table) -> None:  # noqa: F811
    """A cache filled in float32 is continued in float64, as a full cache can be."""
    model = build("llama")
    with kvbudget.compress(model, table, 0.7):
        cache = prefill(model, prompt())
    kept = copy.deepcopy(cache)
    with torch.no_grad():
        before = model(prompt(1, 1, seed=5), past_key_values=kept).logits
        after = model.to(torch.float64)(prompt(1, 1, seed=5), past_key_values=cache).logits
    assert cache.layers[0].flat_keys.dtype == after.dtype == torch.float64
    assert float((before - after).abs().max()) < 1e-4


@pytest.mark.parametrize("own", [True, False])
def test_a_compiled_model(table: kvbudget.Table, own: bool) -> None:  # noqa: F811
    """A compiled model gives the same tokens, and is not compiled again for every length."""
    found, counted = [], torch._dynamo.testing.CompileCounter()
    for compiled in (False, True):
        model = build("llama")  # noqa: F811
        if compiled:
            model.forward = torch.compile(model.forward, backend=counted)
        if own:
            cache = kvbudget.Cache(table, target_size=16, interval=8, config=model.config)
            found.append(say(model, prompt(), 30, past_key_values=cache).tolist())
        else:
            with kvbudget.compress(model, table, target_size=16, interval=8):
                found.append(say(model, prompt(), 30).tolist())
    assert found[0] == found[1] and 0 < counted.frame_count < 40, counted.frame_count


def test_slack_does_not_grow_with_the_interval(model: Any, table: kvbudget.Table) -> None:  # noqa: F811
    with kvbudget.compress(model, table, 0.7, interval=10**9) as run:
        run.cut(prefill(model, prompt()))
    assert run.report().bytes_now < 4 * 2 * 600 * 132


def test_warnings_do_not_pile_up(make_table: Any) -> None:
    """A hybrid model that is cut again and again has each warning once."""
    hybrid, cache = build("gemma3"), None
    with kvbudget.compress(hybrid, str(make_table(4, 4, 2, 16)), 0.6, interval=4) as run:
        cache = DynamicCache(config=hybrid.config)
        say(hybrid, prompt(), 14, past_key_values=cache)
    said = run.report().warnings
    assert sum("sliding window" in w for w in said) == 1 and any("2 of 4 layers" in w for w in said)
    assert sum("far from" in w for w in said) <= 1


def test_flash_attention(model: Any, table: kvbudget.Table) -> None:  # noqa: F811
    """It is replaced by torch's sdpa, or by eager attention if the family has sinks or a softcap."""
    for family, stands_in in (("llama", "kvbudget"), ("gemma2", "kvbudget_eager")):
        flash = build(family)
        flash.config._attn_implementation_internal = "flash_attention_2"
        with kvbudget.compress(flash, table, 0.7):
            assert flash.config._attn_implementation == stands_in
            cache = prefill(flash, prompt())
        assert any(isinstance(layer, RaggedLayer) for layer in cache.layers)


@pytest.mark.parametrize(
    "more",
    [dict(use_cache=False), dict(output_attentions=True, return_dict_in_generate=True), dict(guidance_scale=2.0),
     dict(cache_implementation="paged")],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_generate_arguments_that_are_refused(model: Any, table: kvbudget.Table, more: dict[str, Any]) -> None:  # noqa: F811
    """The error names the argument."""
    words = f"generate.. inside of compress: {next(iter(more))}"
    with pytest.raises(kvbudget.KVBudgetError, match=words), kvbudget.compress(model, table, 0.7):
        say(model, prompt(), **more)


def test_other_calls_that_are_refused(model: Any, table: kvbudget.Table) -> None:  # noqa: F811
    def refused(words: str, call: Callable[[], Any], **how: Any) -> None:
        with pytest.raises(kvbudget.KVBudgetError, match=words), kvbudget.compress(model, table, 0.7, **how):
            call()

    refused("interval: guesses", lambda: say(model, prompt(), prompt_lookup_num_tokens=3), interval=8)
    refused('when="call"', lambda: say(model, prompt()), when="call")
    batch, mask = prompt(2), torch.ones(2, T, dtype=torch.long)
    mask[1, :5] = 0
    refused("in chunks", lambda: model.generate(batch, attention_mask=mask, prefill_chunk_size=9, **HOW))
    refused("changed to 'eager'", lambda: (model.set_attn_implementation("eager"), prefill(model, prompt())))
    with kvbudget.compress(model, table, 0.7):
        cache = prefill(model, prompt())
    for layer in attention_layers(model):
        layer.config._attn_implementation = "kvbudget_eager"
    with pytest.raises(kvbudget.KVBudgetError, match="output_attentions"), torch.no_grad():
        model(prompt(1, 1), past_key_values=cache, output_attentions=True)
