"""Scorers compared with their formulas in plain loops, and a table's learned ranking from the record to the cache."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import FAMILIES, build
from test_eviction import T, prefill, prompt

import kvbudget
from kvbudget import metrics, scorers
from kvbudget.attention import watched_by
from kvbudget.hooks import inputs_of, joined
from kvbudget.models import attention_layers, has_window

PROGRAM = os.environ.get("KVBUDGET_PROGRAM") or shutil.which("kvbudget")
FEATURES = ["keydiff", "snapkv:kvpress:window=8:kernel=3", "morphkv:window=6", "lagkv:kvpress:lag=8"]
FEATURES += ["ea:kvpress", "tova:scope=group"]


def scores_of(name: str, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor) -> np.ndarray:
    """Returns a metric's scores [G, T] for one layer of a Llama with these arrays."""
    metric, layer = scorers.parse(name), attention_layers(build("llama"))[0]
    seen, n = metrics.Seen(), keys.shape[1]
    metric.observe(seen, layer, metrics.Step(query, torch.zeros(n, 64)))
    found = metric.score(layer, keys, values, seen, torch.arange(n), slice(0, keys.shape[0]))
    return np.asarray(found, np.float64)


@pytest.fixture
def arrays() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(4)
    return tuple(torch.randn(h, 29, 16, generator=draw) for h in (2, 2, 4))  # type: ignore[return-value]


@pytest.mark.parametrize("fusion", ["sum", "max"])
def test_morphkv_is_its_formula(arrays: Any, fusion: str) -> None:
    """Attention of the last W queries, summed over the group, then the sum or the maximum over queries."""
    keys, values, query = arrays
    found, w = scores_of(f"morphkv:window=5:fusion={fusion}", keys, values, query), np.zeros((4, 5, 29))
    for h in range(4):
        for r in range(5):
            logits = (keys[h // 2] @ query[h, 24 + r]).numpy().astype(np.float64) / 4
            seen = np.exp(logits[: 25 + r] - logits[: 25 + r].max())
            w[h, r, : 25 + r] = seen / seen.sum()
    rows = w.reshape(2, 2, 5, 29).sum(1)
    wanted = rows.sum(1) if fusion == "sum" else rows.max(1)
    assert np.abs(found[:, :24] - wanted[:, :24]).max() < 1e-6
    assert np.allclose(found[:, 24:], wanted[:, :24].max() + 1)


@pytest.mark.parametrize("scope", ["layer", "group"])
def test_tova_is_its_formula(arrays: Any, scope: str) -> None:
    """Attention of the last query, averaged over all heads or over the group."""
    keys, values, query = arrays
    logits = np.stack([(keys[h // 2] @ query[h, 28]).numpy().astype(np.float64) / 4 for h in range(4)])
    w = np.exp(logits - logits.max(1, keepdims=True))
    w /= w.sum(1, keepdims=True)
    wanted = np.repeat(w.mean(0)[None], 2, 0) if scope == "layer" else w.reshape(2, 2, 29).mean(1)
    found = scores_of(f"tova:scope={scope}", keys, values, query)
    assert np.abs(found[:, :28] - wanted[:, :28]).max() < 1e-6
    assert np.allclose(found[:, 28], wanted[:, :28].max() + 1)


def test_tova_of_a_layer_is_refused_a_second_time() -> None:
    """A mean over the layer needs all of its heads, but these hold different tokens once they are cut."""
    assert "take tova:scope=group" in scorers.parse("tova").once and not scorers.parse("tova:scope=group").once


@pytest.mark.parametrize("how", ["kvpress", "paper", "kvpress:mode=local:cross=1", "kvpress:mode=l2norm:lambda=2"])
def test_lagkv_is_its_formula(arrays: Any, how: str) -> None:
    """Partitions of 6 tokens after 3 sinks: four whole ones; the last of them and the tokens after it are kept."""
    keys, values, query = arrays
    metric = scorers.parse(f"lagkv:{how}:sink=3:lag=6")
    p, found = metric.parameters, scores_of(f"lagkv:{how}:sink=3:lag=6", keys, values, query)
    mean, weight = how.startswith("kvpress"), p["lambda"]
    assert np.allclose(found[:, :3], found[:, 21:].max()) and found[:, 3:21].max() < found[0, 0]
    for g in range(2):
        for first in (3, 9, 15):
            s = np.zeros(6)
            for z, w in ((keys[g].numpy(), 1), (values[g].numpy(), weight)):
                own, by = z[first : first + 6], z[first + 6 : first + 12]
                by = own if p["mode"] == "local" else by
                spread = ((own - by.min(0)) / (by.max(0) - by.min(0))).std(1, ddof=1)
                s += w / (1 + weight if mean else 1) * np.exp(spread) / np.exp(spread).sum()
            if p["mode"] == "l2norm":
                s = -np.linalg.norm(keys[g, first : first + 6].numpy(), axis=1)
            wanted = s if p["cross"] else s.argsort().argsort() / 6
            assert np.abs(found[g, first : first + 6] - wanted).max() < 1e-6


def test_lagkv_gives_equal_tokens_ranks_by_position(arrays: Any) -> None:
    """Of equal tokens the later one ranks lower, and a channel without a range counts for nothing."""
    keys, values, query = (torch.ones_like(x) for x in arrays)
    found = scores_of("lagkv:kvpress:sink=3:lag=6", keys, values, query)
    assert np.allclose(found[0, 3:9], np.arange(5, -1, -1) / 6)


@torch.no_grad()
def watched(family: str) -> tuple[Any, Any, dict[int, Any], dict[int, Any]]:
    """Returns a model in eager attention, its output with attention matrices, and queries and input of each layer."""
    model, queries, inputs = build(family), {}, {}
    if model is None:
        pytest.skip(f"transformers {transformers.__version__} does not have {family}")
    layers = attention_layers(model)
    for layer in layers:
        layer.config._attn_implementation = "eager"

    def around(layer: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        def watch(attend: Any, *what: Any) -> Any:
            queries[layer.index] = what
            return attend(*what[:4])

        inputs[layer.index] = inputs_of(args, kwargs)[1]
        with watched_by(watch):
            return forward(*args, **kwargs)

    with joined(layers, around):
        model(prompt(), use_cache=False)
    for layer in layers:
        layer.config._attn_implementation = "eager"
    return model, model(prompt(), output_attentions=True, use_cache=False), queries, inputs


@pytest.mark.parametrize("family", FAMILIES)
def test_votes_are_the_models_own_attention(family: str) -> None:
    """SnapKV without pooling is the mean attention of the last queries, however the family computes logits."""
    model, out, queries, _ = watched(family)
    metric = scorers.parse("snapkv:kvpress:window=4:kernel=1")
    layers = attention_layers(model)
    maps = out.attentions if len(out.attentions) == len(layers) else [out.attentions[x.index] for x in layers]
    if not queries or maps[0] is None:
        pytest.skip(f"{family} has attention code of its own")
    for layer, attention in zip(layers, maps):
        if has_window(layer):
            continue
        query, key, value, _, scaling, _ = queries[layer.index]
        seen = metrics.Seen()
        metric.observe(seen, layer, metrics.Step(metrics.in_units(query[0], scaling), torch.zeros(query.shape[2], 1)))
        with torch.no_grad():
            found = metric.score(layer, key[0], value[0], seen, torch.arange(T), slice(0, key.shape[1]))
        weights = attention[0, :, -4:, :-4].mean(1)
        wanted = weights.view(key.shape[1], -1, T - 4).mean(1)
        assert torch.allclose(found[:, :-4], wanted, atol=1e-6), layer.name


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("gpt2", "gpt-neox")])
def test_queries_before_rotation(family: str) -> None:
    """At position 0 nothing is rotated (yarn scales): expected attention's queries equal those that attend there."""
    model, _, queries, inputs = watched(family)
    if not queries:
        pytest.skip(f"{family} has attention code of its own")
    for layer in attention_layers(model):
        query, _, _, _, scaling, _ = queries[layer.index]
        with torch.no_grad():
            ours = layer.queries(inputs[layer.index])[0, :, 0] * layer.query_scale
            turn = layer.mean_rotation(0, 1, query)
            ours = ours if turn is None else ours @ turn.T
        assert torch.allclose(ours, metrics.in_units(query, scaling)[0, :, 0], atol=1e-5), layer.name


def test_queries_that_are_not_known_are_refused() -> None:
    """An unknown norm of queries is refused rather than left out."""
    model = build("llama")
    layer = attention_layers(model)[0]
    layer.module.q_layernorm = torch.nn.Identity()
    with pytest.raises(kvbudget.KVBudgetError, match="norm of queries, Identity, is not known"):
        layer.queries(torch.zeros(1, 2, 64))


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> kvbudget.Table:
    """Returns a table for a ranking that scores each token by itself, with frozen means and deviations."""
    return learn(tmp_path_factory, "--own")


@pytest.fixture(scope="module")
def learned_layers(tmp_path_factory: pytest.TempPathFactory) -> kvbudget.Table:
    """Returns a table for a ranking that uses all heads of a layer together, the default."""
    return learn(tmp_path_factory)


def learn(tmp_path_factory: pytest.TempPathFactory, *options: str) -> kvbudget.Table:
    """Returns a table for a ranking that `kvbudget learn` has fitted to a record of a random Llama."""
    pytest.importorskip("h5py")
    if not PROGRAM:
        pytest.skip("no program kvbudget")
    folder = tmp_path_factory.mktemp("learned")
    with open(folder / "calib.jsonl", "w") as f:
        for i in range(3):
            entry = {"sample_id": f"c{i}", "context_ids": prompt(1, 60, seed=i)[0].tolist()}
            entry |= {
                "question_ids": [prompt(1, 3, seed=9)[0].tolist()], "answer_ids": [prompt(1, 5, seed=7)[0].tolist()]
            }
            f.write(json.dumps(entry) + "\n")
    kvbudget.record(build("llama"), None, folder / "calib.jsonl", FEATURES, output=folder / "run.h5")
    words = [str(w) for f in FEATURES for w in ("--feature", f)]
    for command in (
        ["learn", "run.h5", "-o", "rank.safetensors", *options, *words],
        ["solve", "run.h5", "-m", "learned=rank.safetensors", "-o", "table.safetensors"],
    ):
        subprocess.run([PROGRAM, *command, "--quiet"], cwd=folder, check=True)
    return kvbudget.Table(folder / "table.safetensors")


def by_formula(table: kvbudget.Table, layer: int, head: int, features: np.ndarray) -> np.ndarray:
    """Returns one head's scores by the formula in kvbudget.h, from features [F, T]."""
    r, n = table.ranking, features.shape[1]
    assert r is not None
    w, out = r.weights[layer, head], np.zeros(n)
    out += w[-1] - w[-2] * np.log(n - np.arange(n))
    for f, x in enumerate(features.astype(np.float64)):
        x = np.log(np.maximum(x, 1e-12)) if r.logarithm[f] else x
        mean, scale = w[2 * len(features) :][2 * f : 2 * f + 2]  # frozen
        z = (x - mean) * scale * (np.arange(n) >= r.sink)
        out += w[2 * f] * z + w[2 * f + 1] * z * abs(z)
    return out


def test_a_table_carries_its_ranking(learned: kvbudget.Table, make_table: Any) -> None:
    """Names, weights and kvb_rank's numbers reach Python; so do its errors."""
    r = learned.ranking
    assert r is not None and r.name == learned.info.metric and set(r.metrics) == set(FEATURES)
    assert r.weights.shape == (4, 2, 4 * len(FEATURES) + 2) and not r.weights.flags.writeable
    assert r.frozen and not r.layer_mean
    features = np.random.default_rng(1).uniform(0.1, 3, (len(FEATURES), 50)).astype(np.float32)
    for layer, head in ((0, 0), (3, 1)):
        assert np.allclose(learned.rank(layer, head, features), by_formula(learned, layer, head, features), atol=1e-5)
    for words, call in (
        (f"expected scores of {len(FEATURES)} metrics", lambda: learned.rank(0, 0, features[:2])),
        ("layer and head", lambda: learned.rank(4, 0, features)),
        ("finite", lambda: learned.rank(0, 0, features * np.float32("inf"))),
        ("learned ranking", lambda: kvbudget.Table(make_table(4, 4, 2, 16)).rank(0, 0, features)),
    ):
        with pytest.raises(kvbudget.KVBudgetError, match=words):
            call()
    assert kvbudget.Table(make_table(4, 4, 2, 16)).ranking is None


def record(folder: Path, metrics_: list[Any], ids: list[int]) -> Any:
    """Returns the recorder's scores of a context by metric, [L, G, T] each."""
    h5py = pytest.importorskip("h5py")
    line = {"context_ids": ids, "question_ids": [[5, 6]], "answer_ids": [[7, 8, 9]]}
    (folder / "one.jsonl").write_text(json.dumps(line))
    path = kvbudget.record(build("llama"), None, folder / "one.jsonl", metrics_, output=folder / "one.h5")
    with h5py.File(path) as f:
        return {name: array[:] for name, array in f["contexts/one-1/scores"].items()}


def test_compress_ranks_by_it(learned: kvbudget.Table, tmp_path: Path) -> None:
    """Each head keeps what kvb_select selects by the formula from features that the recorder has written."""
    ids, info, r = prompt(1, 50), learned.info, learned.ranking
    found = record(tmp_path, FEATURES, ids[0].tolist())
    with kvbudget.compress(build("llama"), learned, 0.5) as run:
        cut = prefill(run.model, ids)
    assert r is not None and run.report().layers_cut == 4
    for (layer, h), keep in np.ndenumerate(learned.keep(0.5, 50)):
        features = np.stack([found[name][layer, h] for name in r.metrics])
        scores = by_formula(learned, layer, h, features).astype(np.float32)
        wanted = kvbudget.select(scores, int(keep), info.sink, info.window)
        assert cut.layers[layer].segment(h)[2].tolist() == wanted.tolist()


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 3), reason="kvpress is for transformers below 5.3"
)
@pytest.mark.parametrize("mode", ["compact", "mask"])
def test_budget_press_ranks_by_it(learned: kvbudget.Table, mode: Any) -> None:
    """With a learned table BudgetPress keeps the same tokens as compress."""
    pytest.importorskip("kvpress")
    model, ids = build("llama"), prompt(1, 50)
    with kvbudget.compress(build("llama"), learned, 0.5) as run:
        wanted = prefill(run.model, ids)
    press = kvbudget.BudgetPress(learned, 0.5, mode=mode)
    with press(model):
        cache = prefill(model, ids)
    for layer in attention_layers(model):
        for h in range(2):
            if mode == "compact":
                kept = cache.layers[layer.index].segment(h)[2].tolist()
            else:
                _, heads, places = layer.module.masked_key_indices
                kept = sorted(set(range(50)) - set(places[heads == h].tolist()))
            assert kept == wanted.layers[layer.index].segment(h)[2].tolist()


def test_chunks_and_second_cuts_by_it(learned: kvbudget.Table) -> None:
    """Chunks are cut like one pass; a second cut of a cache that has lost nothing equals the first cut."""
    model, ids = build("llama"), prompt(1, 50)
    with kvbudget.compress(model, learned, 0.5):
        whole = prefill(model, ids)
    parts = kvbudget.compress(model, learned, 0.5, when="call")
    with torch.no_grad(), parts as run:
        chunked = type(whole)(config=model.config)
        for part in ids.split([20, 30], 1):
            model(part, past_key_values=chunked)
        run.cut(chunked)
    for a, b in zip(whole.layers, chunked.layers):
        assert [a.segment(s)[2].tolist() for s in range(2)] == [b.segment(s)[2].tolist() for s in range(2)]
    how = dict(max_new_tokens=21, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids))
    grown = type(whole)(config=model.config)
    with kvbudget.compress(model, learned, 0.5, interval=10) as run:
        model.generate(ids, past_key_values=grown, **how)
    keep = learned.keep(0.5, 70)
    for i, layer in enumerate(grown.layers):
        for h in range(2):
            places = layer.segment(h)[2].tolist()
            assert len(places) == keep[i, h] and places == sorted(set(places)) and places[-1] == 69


def test_layers_are_ranked_together(learned_layers: kvbudget.Table, tmp_path: Path) -> None:
    """Heads keep what kvb_rank_layer ranks first by all heads' features; single heads and second cuts are refused."""
    ids, info, r = prompt(1, 50), learned_layers.info, learned_layers.ranking
    assert r is not None and r.layer_mean and r.weights.shape[-1] == 3 * len(FEATURES) + 2
    found = record(tmp_path, [*FEATURES, learned_layers], ids[0].tolist())
    with kvbudget.compress(build("llama"), learned_layers, 0.5) as run:
        cut = prefill(run.model, ids)
    for layer, keep in enumerate(learned_layers.keep(0.5, 50)):
        features = np.stack([found[name][layer] for name in r.metrics])
        scores = learned_layers.rank_layer(layer, features)
        assert np.array_equal(scores, found[info.metric][layer])
        for h in range(2):
            wanted = kvbudget.select(scores[h], int(keep[h]), info.sink, info.window)
            assert cut.layers[layer].segment(h)[2].tolist() == wanted.tolist()
    with pytest.raises(kvbudget.KVBudgetError, match="kvb_rank_layer"):
        learned_layers.rank(0, 0, np.ones((len(FEATURES), 9), np.float32))
    with pytest.raises(kvbudget.KVBudgetError, match="expected 2 KV heads, found 1"):
        learned_layers.rank_layer(0, np.ones((len(FEATURES), 1, 9), np.float32))
    with pytest.raises(kvbudget.KVBudgetError, match="learn --own"):
        kvbudget.compress(build("llama"), learned_layers, 0.5, interval=5)
    with pytest.raises(kvbudget.KVBudgetError, match="learn --own"):
        run.cut(cut)


@torch.no_grad()
def test_recency_counts_places_in_the_text(learned: kvbudget.Table) -> None:
    """With gaps between tokens, scores change only by the term of recency."""
    metric, layer = scorers.of_table(learned), attention_layers(build("llama"))[1]
    assert learned.ranking is not None
    draw, n = torch.Generator().manual_seed(2), 40
    keys, values, query = (torch.randn(h, n, 16, generator=draw) for h in (2, 2, 4))
    seen = metrics.Seen()
    metric.observe(seen, layer, metrics.Step(query, torch.randn(n, 64, generator=draw)))
    together = metric.score(layer, keys, values, seen, torch.arange(n), slice(0, 2))
    seen.n_tokens = n + 25
    for part in seen.parts:
        part.n_tokens = n  # the same votes
    object.__setattr__(metric, "features", tuple(_Fixed(f, n) for f in metric.features))  # type: ignore[attr-defined]
    places = torch.cat([torch.arange(10), torch.arange(35, 65)])
    apart = metric.score(layer, keys, values, seen, places, slice(0, 2))
    weight = torch.tensor(learned.ranking.weights[1, :, -2])[:, None]
    change = weight * ((n - torch.arange(n)).log() - (n + 25 - places).log())
    assert torch.allclose(apart - together, change.float(), atol=1e-5) and float(change.abs().max()) > 1e-3


class _Fixed:
    """A feature with scores that ignore places."""

    def __init__(self, metric: metrics.Metric, n: int):
        self.metric, self.n = metric, n

    def score(self, layer: Any, keys: Any, values: Any, seen: metrics.Seen, places: Any, heads: slice) -> torch.Tensor:
        seen.n_tokens = self.n
        return self.metric.score(layer, keys, values, seen, torch.arange(self.n), heads)


def test_the_recorder_takes_a_table_for_its_metric(learned: kvbudget.Table, tmp_path: Path) -> None:
    """Scores in the record equal kvb_rank's for the recorded features."""
    found = record(tmp_path, [*FEATURES, learned], prompt(1, 44)[0].tolist())
    assert learned.ranking is not None
    for layer in range(4):
        for h in range(2):
            features = np.stack([found[name][layer, h] for name in learned.ranking.metrics])
            assert np.array_equal(found[learned.info.metric][layer, h], learned.rank(layer, h, features))


def test_the_recorder_takes_a_ranking_for_its_metrics(learned: kvbudget.Table, tmp_path: Path) -> None:
    """learned=FILE records the features that `solve --metric learned=FILE` ranks by; other files are refused."""
    file = Path(learned.path).with_name("rank.safetensors")
    found = record(tmp_path, [f"learned={file}", FEATURES[0]], prompt(1, 44)[0].tolist())
    assert learned.ranking is not None and set(found) == set(learned.ranking.metrics) | {FEATURES[0]}
    words = [str(PROGRAM), "solve", "one.h5", "-m", f"learned={file}", "-o", "again.safetensors", "--quiet"]
    subprocess.run(words, cwd=tmp_path, check=True)
    assert kvbudget.Table(tmp_path / "again.safetensors").info.metric == learned.info.metric
    with pytest.raises(kvbudget.KVBudgetError, match="one.jsonl"):
        record(tmp_path, [f"learned={tmp_path / 'one.jsonl'}"], prompt(1, 44)[0].tolist())


def test_the_programs_scores_by_it(tmp_path: Path) -> None:
    """`kvbudget profile` and the recorder agree on the features and on the ranking's scores."""
    h5py = pytest.importorskip("h5py")
    if not PROGRAM:
        pytest.skip("no program kvbudget")
    model = build("llama")
    model.save_pretrained(tmp_path / "model")
    with open(tmp_path / "calib.jsonl", "w") as f:
        for i in range(2):
            line = {"sample_id": f"c{i}", "context_ids": prompt(1, 60, seed=i)[0].tolist()}
            f.write(json.dumps(line | {"question_ids": [[5, 6]], "answer_ids": [[7, 8, 9]]}) + "\n")

    def run(*words: str) -> None:
        subprocess.run([str(PROGRAM), *words, "--quiet"], cwd=tmp_path, check=True)

    chosen = [word for name in FEATURES for word in ("-m", name)]
    run("profile", "model", "calib.jsonl", "-o", "features.h5", *chosen)
    run("learn", "features.h5", "-o", "rank.safetensors", *[w.replace("-m", "-f") for w in chosen])
    run("solve", "features.h5", "-m", "learned=rank.safetensors", "-o", "table.safetensors")
    run("profile", "model", "calib.jsonl", "-o", "c.h5", "-m", "learned=rank.safetensors")
    table = kvbudget.Table(tmp_path / "table.safetensors")
    kvbudget.record(model, None, tmp_path / "calib.jsonl", [table], output=tmp_path / "python.h5")
    with h5py.File(tmp_path / "c.h5") as ours, h5py.File(tmp_path / "python.h5") as theirs:
        for sample in ("c0", "c1"):
            one, two = (f[f"contexts/{sample}/scores/{table.info.metric}"][:] for f in (ours, theirs))
            assert np.abs(one - two).max() <= 1e-4 * np.abs(one).max()


def test_another_models_ranking_is_refused(learned: kvbudget.Table) -> None:
    """A ranking does not fit a model of another shape."""
    with pytest.raises(kvbudget.MismatchError, match="n_heads: expected 7, the table says 4"):
        with kvbudget.compress(build("qwen2 7:1"), learned, 0.5):
            pass
