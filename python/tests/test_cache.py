"""A cache that cuts itself: it gives the tokens of compress, never exceeds budget and buffer, and refuses misuse."""

import copy
import json
import subprocess
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import FAMILIES, build, tokenizer
from test_calls import HOW, in_parallel, places, say
from test_eviction import METRICS, T, as_it_was, model, offloaded, prompt, table  # noqa: F401  (fixtures)
from test_recorder import PROGRAM, lines
from transformers.cache_utils import DynamicCache

import kvbudget
from kvbudget.models import attention_layers
from kvbudget.ragged import RaggedLayer, WatchedLayer

RULES: dict[str, dict[str, Any]] = {
    "ratio": dict(ratio=0.7),
    "target": dict(target_size=16, interval=8),
    "buffer": dict(target_size=16, interval=6, buffer=14),
    "grows into it": dict(target_size=44, interval=4),
}
START = 120  # tokens of a prompt before a thousand new ones
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": dict(num_beams=3),
    "samples": dict(do_sample=True, temperature=0.8, num_return_sequences=3),
    "padded": {},
    "chunks": dict(prefill_chunk_size=13),
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("metric, way", [*(("snapkv", w) for w in WAYS), ("keydiff", "greedy"), ("knorm", "chunks")])
def test_gives_the_tokens_of_compress(model: Any, make_table: Any, rules: str, metric: str, way: str) -> None:
    """Tokens and kept rows are equal, over three turns where generate() allows them."""
    if way == "chunks" and rules == "ratio":
        pytest.skip("a cache does not see where a prompt ends")
    table, found = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS[metric])), []  # noqa: F811
    for own in (False, True):
        ids, how, mask = prompt(2 if way == "padded" else 1), {**HOW, **WAYS[way]}, None
        cache = kvbudget.Cache(table, config=model.config, **RULES[rules]) if own else DynamicCache()
        mask = torch.ones_like(ids)
        mask[1:, :7] = 0
        with torch.no_grad():
            for turn in range(3 if way in ("greedy", "padded") else 1):
                torch.manual_seed(turn)
                given = dict(past_key_values=cache, attention_mask=mask, max_new_tokens=11, **how)
                if own:
                    out = model.generate(ids, **given)
                else:
                    with kvbudget.compress(model, table, **RULES[rules]):
                        out = model.generate(ids, **given)
                ids = torch.cat([out, prompt(len(out), 9, seed=turn + 5)], 1)
                mask = torch.cat([mask, torch.ones_like(ids[: len(mask), mask.shape[1] :])], 1)
        report = cache.report() if own else None
        assert report is None or report.layers_cut == 4 and 0 < report.effective_ratio < 1
        found.append((out.tolist(), places(cache)))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, make_table: Any) -> None:
    """Softcaps, sinks, sliding windows, all kinds of queries: the tokens of compress, or its refusal."""
    if build(family) is None or "conv" in str(FAMILIES[family][1]):
        pytest.skip(f"{family} is not there, or brings a cache of its own")
    found, ids = [], prompt()
    for own in (True, False):
        model = build(family)  # noqa: F811
        shape = kvbudget.ModelShape.of(model.config)
        path = make_table(shape.n_layers, shape.n_heads, shape.n_kv_heads, shape.head_dim)
        rules = dict(target_size=9, interval=5)
        try:
            if own:
                cache = kvbudget.Cache(str(path), config=model.config, **rules)
                out = say(model, ids, 12, past_key_values=cache)
                assert cache.report().layers_cut + cache.report().layers_left == 4
            else:
                with kvbudget.compress(model, str(path), **rules):
                    out = say(model, ids, 12)
        except kvbudget.KVBudgetError as refusal:
            found.append(refusal.status)
        else:
            found.append(out.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("rules", [dict(interval=64), dict(interval=16, buffer=80)], ids=str)
def test_rows_stay_within_budget_and_buffer(make_table: Any, rules: dict[str, int]) -> None:
    """A thousand tokens one by one: no head exceeds its budget and the buffer, not even during attention; sinks and the
    newest tokens are in every head, and the mean over heads is the target."""
    model, target = build("llama", max_position_embeddings=2048), 40  # noqa: F811
    table = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS["snapkv"]))  # noqa: F811
    cache = kvbudget.Cache(table, target_size=target, config=model.config, **rules)
    interval, buffer, most = rules["interval"], rules.get("buffer", rules["interval"]), []
    update = RaggedLayer.update

    def budgets(n: int) -> Any:
        return table.grown(cache.controller.rule, n, 1).keep.astype(int) - (buffer - interval)

    def count(layer: RaggedLayer, *given: Any, **more: Any) -> Any:
        out = update(layer, *given, **more)
        most.append(max(n - k for n, k in zip(layer.lengths, keep[cache.layers.index(layer)])))
        return out

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaggedLayer, "update", count)
        logits = model(prompt(2, 60).view(1, START), past_key_values=cache).logits
        keep = budgets(START)
        for n in range(START + 1, START + 1001):
            logits = model(logits[:, -1:].argmax(-1), past_key_values=cache).logits
            assert cache.get_seq_length() == n == int(cache.layers[3].segment(1)[2][-1]) + 1
            last = n - (n - START) % interval
            if last == n:
                keep = budgets(n)
                newest, sinks = range(n - 8 - buffer + interval, n), range(2)
                for layer in cache.layers:
                    for s in range(2):
                        at = layer.segment(s)[2].tolist()
                        assert set(newest) | set(sinks) <= set(at) and at == sorted(set(at))
            rows = [row for layer in cache.layers for row in layer.lengths]
            assert sum(rows) <= 8 * (target + buffer) + 4  # because layers are rounded
    assert max(most) == buffer
    assert cache.report().tokens == (last,) and cache.report().bytes_now == kvbudget.cache_bytes(cache)
    assert cache.report().requested_ratio == pytest.approx(1 - target / (last - buffer + interval))


def test_the_evaluator_cuts_alike(tmp_path: Path) -> None:
    """`kvbudget eval` and this cache have the same KL; the table was made for prompts, hence the warning."""
    model, ids = build("llama"), prompt(2, 50).view(1, 100)
    lines(tmp_path)  # calib.jsonl
    model.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "text.npy", ids[0].numpy().astype(np.int32))
    for words in ("profile model calib.jsonl -m morphkv:window=8 -o r.h5", "solve r.h5 -m morphkv:window=8 -o t.safetensors",
                  "eval model t.safetensors text.npy -m none -p morphkv:window=8:interval=8 -a none -r 0.5,0.7 -t 60 "
                  "-n 40 -o kl"):  # fmt: skip
        subprocess.run([PROGRAM, *words.split(), "--quiet"], check=True, cwd=tmp_path)
    for row in json.loads((tmp_path / "kl.json").read_text())["rows"]:
        with pytest.warns(UserWarning, match="docs/decoding.md"):
            cache = kvbudget.Cache(tmp_path / "t.safetensors", target_size=round(60 - 60 * row["ratio"]), interval=8,
                                   config=model.config)  # fmt: skip
        wanted, whole = 0.0, DynamicCache()
        with torch.no_grad():
            for part in (ids[:, :60], *ids[:, 60:].split(1, 1)):
                full, own = (model(part, past_key_values=c).logits[0, -1].log_softmax(-1) for c in (whole, cache))
                wanted += float((full.exp() * (full - own)).sum()) / 40
        assert row["kl"] == pytest.approx(wanted, rel=1e-3) and wanted > 0


def test_the_target_holds_at_every_length(make_table: Any) -> None:
    """The target holds beyond the table's last row too, and where its last rows are saturated."""
    table = kvbudget.Table(make_table(4, 4, 2, 16))
    rule = kvbudget.compress(build("llama"), table, target_size=40).rule
    for n in (41, 60, 100, 999, 3999, 4001, 100_000):
        keep = table.grown(rule, n).keep
        assert 0.97 * 320 <= keep.sum() <= 324, n
    assert table.grown(rule, 40).keep.tolist() == [[40, 40]] * 4


@pytest.mark.parametrize("chunk", [64, 150, 512, 650, 2048])  # the last chunk is long enough to be cut
def test_chunks_that_are_cut_are_one_cut(make_table: Any, chunk: int) -> None:
    """If scores do not depend on earlier cuts (key norms of the first layer) nor budgets on the length (equal heads),
    cutting after each chunk leaves the rows of one cut, after 2,048 tokens and 100 more."""
    model = build("llama", vocab_size=2304, max_position_embeddings=4096)  # noqa: F811
    table = kvbudget.Table(make_table(4, 4, 2, 16, metric="knorm", spread=0))  # noqa: F811
    ids, kept = (torch.randperm(2300, generator=torch.Generator().manual_seed(1)) + 2)[None], []
    with torch.no_grad():
        for size in (2048, chunk):
            cache = kvbudget.Cache(table, target_size=60, interval=50, config=model.config)
            for part in (*ids[:, :2048].split(size, 1), *ids[:, 2048:2148].split(1, 1)):
                model(part, past_key_values=cache)
            kept.append([cache.layers[0].segment(h)[2].tolist() for h in range(2)])
        whole = DynamicCache()
        with kvbudget.compress(model, table, target_size=60, when="call") as run:
            model(ids[:, :2148], past_key_values=whole)
            run.cut(whole)
    kept.append([whole.layers[0].segment(h)[2].tolist() for h in range(2)])
    assert kept[0] == kept[1] == kept[2] and len(kept[0][0]) == 60


@pytest.mark.parametrize("rules", ["ratio", "buffer"])
@pytest.mark.parametrize("seed", range(3))
def test_ten_turns_have_the_logits_of_a_full_cache_with_hidden_tokens(make_table: Any, rules: str, seed: int) -> None:
    """Turns of 1 to 60 tokens, each followed by an answer, compared with a full cache that hides evicted tokens:
    positions are right, and each turn that is long enough is cut when it has been read."""
    model = build("llama", max_position_embeddings=1024)  # noqa: F811
    table = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS["snapkv"]))  # noqa: F811
    reference, cache = copy.deepcopy(model), kvbudget.Cache(table, config=model.config, **RULES[rules])
    reference.config._attn_implementation, full = "hiding_sdpa", DynamicCache()
    drawn = torch.Generator().manual_seed(seed)
    turns = [60, *torch.randint(1, 61, (9,), generator=drawn).tolist()] if seed else [60, 1, 5, 40, 2, 17, 60, 3, 30, 44]
    for turn, n in enumerate(turns):
        said = [*prompt(1, n, seed=turn).split(n, 1), *prompt(1, 7, seed=turn + 50).split(1, 1)]
        for part in said:
            with torch.no_grad():
                ours, theirs = (m(part, past_key_values=c).logits for m, c in ((model, cache), (reference, full)))
            assert float((ours - theirs).abs().max()) < 3e-5 * float(theirs.abs().max())
            total = cache.get_seq_length()
            for layer, kept in zip(attention_layers(reference), cache.layers):
                if isinstance(kept, RaggedLayer):
                    layer.module.__dict__["hidden"] = hidden = torch.ones(1, 2, total, dtype=torch.bool)
                    for h in range(2):
                        hidden[0, h, kept.segment(h)[2].long()] = False
            if part.shape[1] >= 6 or (part.shape[1] > 1 and rules == "ratio"):
                assert cache.layers[0].cut_at == total == cache.report().tokens[0]
    assert total == list(accumulate(turns))[-1] + 70


def test_sequences_that_leave_take_what_was_seen_of_them(model: Any, make_table: Any) -> None:  # noqa: F811
    """Beams and batches over a cache that is not cut yet: the last queries are reordered with their sequences."""
    table = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS["snapkv"]))  # noqa: F811
    cache = kvbudget.Cache(table, target_size=50, interval=50, config=model.config)
    with torch.no_grad():
        model(prompt(3), past_key_values=cache)
    before, keys = [seen.tail for seen in cache.layers[1].observed], cache.layers[1].keys
    assert type(cache.layers[1]) is WatchedLayer and not torch.equal(before[0], before[1])
    for act, rows in (
        (lambda: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda: cache.batch_repeat_interleave(2), [2, 2, 0, 0, 0, 0]),
        (lambda: cache.batch_select_indices(torch.tensor([1, 2])), [2, 0]),
    ):
        act()
        assert all(torch.equal(seen.tail, before[b]) for seen, b in zip(cache.layers[1].observed, rows, strict=True))
        assert torch.equal(cache.layers[1].keys, keys[rows])
    cache.layers[1].crop(-3)
    assert [seen.n_tokens for seen in cache.layers[1].observed] == [T - 3] * 2


def test_threads_with_caches_of_their_own(model: Any, make_table: Any) -> None:  # noqa: F811
    """Two caches at once on one model, by different rules: each has the tokens that it has alone."""
    table = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS["snapkv"]))  # noqa: F811
    ways, found = [RULES["target"], RULES["ratio"]], [None, None]

    def answer(i: int) -> Any:
        cache = kvbudget.Cache(table, config=model.config, **ways[i])
        return say(model, prompt(1, T, seed=i), 40, past_key_values=cache).tolist(), places(cache)

    def work(i: int) -> None:
        found[i] = answer(i)

    alone = [answer(i) for i in range(2)]
    in_parallel(work)
    assert found == alone


def test_copies_go_their_own_way(model: Any, table: kvbudget.Table) -> None:  # noqa: F811
    """A copy of a cut cache is a prefix for another question: it behaves like a cache that was never copied."""
    cache, alone = (kvbudget.Cache(table, config=model.config, **RULES["target"]) for _ in range(2))
    with torch.no_grad():
        for c in (cache, alone):
            model(prompt(), past_key_values=c)
        kept = copy.deepcopy(cache)
        for c in (cache, kept, alone):
            for token in prompt(1, 20, seed=3 if c is cache else 4).split(1, 1):
                model(token, past_key_values=c)
    assert places(kept) == places(alone) != places(cache) and kept.report() == alone.report()


def test_pipelines_and_chats(model: Any, table: kvbudget.Table) -> None:  # noqa: F811
    """transformers' own pipeline, with a text and with messages, gives the same with Cache and with compress."""
    words, found = tokenizer(), []
    words.chat_template = "{% for m in messages %}w7 {{ m['content'] }} {% endfor %}"
    text = " ".join(f"w{i}" for i in prompt(1, 35)[0].tolist())
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=words)
    for asked in (text, [{"role": "user", "content": text}]):
        for own in (True, False):
            how: dict[str, Any] = dict(max_new_tokens=12, **HOW)
            if own:
                how["past_key_values"] = cache = kvbudget.Cache(table, config=model.config, **RULES["target"])
                found.append(pipe(asked, **how))
                assert cache.report().layers_cut == 4
            else:
                with kvbudget.compress(model, table, **RULES["target"]):
                    found.append(pipe(asked, **how))
    assert found[0] == found[1] and found[2] == found[3]


def test_the_readme(make_table: Any) -> None:
    """The example of python/README.md runs as it is written there."""
    page = (Path(__file__).parents[1] / "README.md").read_text()
    example = next(block for block in page.split("```python\n")[1:] if "kvbudget.Cache(" in block).split("```")[0]
    ids = prompt(15, 80).view(1, 1200)
    names = dict(kvbudget=kvbudget, model=build("llama", max_position_embeddings=2048))
    names |= dict(table=kvbudget.Table(make_table(4, 4, 2, 16)))
    names |= dict(inputs=dict(input_ids=ids, attention_mask=torch.ones_like(ids)))
    exec(compile(example, "README.md", "exec"), names)
    assert names["cache"].report().layers_cut == 4


def test_what_is_refused(model: Any, table: kvbudget.Table, make_table: Any) -> None:  # noqa: F811
    """Errors name what is refused, and what to do instead."""

    def refused(words: str, act: Any = lambda _: 0, of: Any = table, config: Any = model.config, **rules: Any) -> None:
        with pytest.raises(kvbudget.KVBudgetError, match=words), torch.no_grad():
            act(kvbudget.Cache(of, config=config, **(rules or RULES["target"])))

    def compressed(cache: Any) -> None:
        with kvbudget.compress(model, table, 0.7):
            model(prompt(), past_key_values=cache)

    def other_attention(cache: Any) -> None:
        model.set_attn_implementation("sdpa")
        model(prompt(), past_key_values=cache)

    refused("ea:kvpress ranks by what goes into.*use kvbudget.compress", of=make_table(4, 4, 2, 16, **METRICS["ea"]))
    refused("refit: only kvbudget.compress", refit=True, ratio=0.5)
    refused("expected 4, the table says 5", of=make_table(5, 4, 2, 16))
    refused("one of the two", ratio=0.5, target_size=16)
    refused("every layer of MistralConfig has a sliding", config=build("mistral", sliding_window=8).config)
    for how in (dict(prompt_lookup_num_tokens=3), dict(assistant_model=copy.deepcopy(model))):
        refused("crop: .*use kvbudget.compress", lambda c: say(model, prompt(), past_key_values=c, **how))
    refused("cuts itself; use it outside", compressed)
    refused("give config=model.config of the same model", other_attention)
    refused("give config=model.config", lambda c: build("llama")(prompt(), past_key_values=c))
    refused("cannot be offloaded", lambda c: (say(model, prompt(), past_key_values=c), c.layers[0].offload()))
    with pytest.raises(ValueError, match="cache_implementation"):  # transformers' own words
        cache = kvbudget.Cache(table, 0.5, config=model.config)
        say(model, prompt(), past_key_values=cache, cache_implementation="quantized")
    flash = build("llama").config
    flash._attn_implementation_internal = "flash_attention_2"
    refused("flash attention cannot be cut", config=flash)
    kvpress = pytest.importorskip("kvpress")

    def pressed(cache: Any) -> None:
        with kvpress.KnormPress(0.5)(model):
            model(prompt(), past_key_values=cache)

    refused("KnormPress of kvpress would cut the same cache", pressed)
