"""kvpress: its own pipeline with several questions, its scorers, and LUKVPress's positions."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import build, tokenizer
from test_eviction import METRICS, T, as_it_was, prefill, prompt  # noqa: F401  (as_it_was: used by every test)
from transformers.cache_utils import DynamicCache

import kvbudget
from kvbudget import controller, scorers
from kvbudget.models import attention_layers

kvpress = pytest.importorskip("kvpress")
pytestmark = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 3), reason="kvpress is for transformers below 5.3"
)
PRESSES: dict[str, Any] = {
    "keydiff": lambda: kvpress.KeyDiffPress(),
    "knorm": lambda: kvpress.KnormPress(),
    "snapkv": lambda: kvpress.SnapKVPress(window_size=8, kernel_size=3),
    "ea": lambda: kvpress.ExpectedAttentionPress(epsilon=0.02),
}


@pytest.fixture(scope="module", params=["llama", "qwen3", "phi3"])
def model(request: Any) -> Any:
    return build(request.param)


def lukv(table: kvbudget.Table, scorer: Any, ratio: float) -> Any:
    press = kvpress.LUKVPress(scorer, compression_ratio=ratio, sink=table.info.sink, window=table.info.window)
    press._budget_curves = table.prune_ratios
    return press


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("ratio", [0.3, 0.8])
def test_positions_are_lukvs(model: Any, make_table: Any, metric: str, ratio: float) -> None:
    """The kept positions are exactly those that LUKVPress does not mask."""
    table = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS[metric]))
    with lukv(table, PRESSES[metric](), ratio)(model):
        prefill(model, prompt(2))
    theirs = {}
    for layer in attention_layers(model):
        kept = torch.ones(2, 2, T, dtype=torch.bool)
        if layer.module.masked_key_indices is not None:
            kept[layer.module.masked_key_indices] = False
        theirs[layer.index] = kept.view(4, T)
        layer.module.masked_key_indices = None
    for scorer in (None, PRESSES[metric]()):
        with kvbudget.compress(model, table, ratio, scorer=scorer):
            cut = prefill(model, prompt(2))
        for i, kept in theirs.items():
            for s in range(4):
                assert cut.layers[i].segment(s)[2].tolist() == kept[s].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("metric", ["keydiff", "knorm", "ea"])
def test_scores_are_kvpress_to_the_bit(model: Any, make_table: Any, metric: str, monkeypatch: Any) -> None:
    """If a text repeats its tokens, many scores differ only by rounding, which must therefore be the same."""
    table = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS[metric]))
    ids = torch.randint(2, 90, (1, 250), generator=torch.Generator().manual_seed(4))
    seen: list[Any] = []
    select = controller.reselect
    monkeypatch.setattr(controller, "reselect", lambda scores, *how: (seen.append(scores.copy()), select(scores, *how))[1])
    for scorer in (None, PRESSES[metric]()):
        with kvbudget.compress(model, table, 0.5, scorer=scorer):
            prefill(model, ids)
    ours, theirs = np.stack(seen[: len(seen) // 2]), np.stack(seen[len(seen) // 2 :])
    assert ours.shape == (8, 250) and np.ptp(ours[:, 4:]) > 0
    np.testing.assert_array_equal(ours, theirs)


def test_the_pipeline_with_questions(model: Any, make_table: Any) -> None:
    """Three questions over one cut context: both modes give the answers of LUKVPress."""
    table = kvbudget.Table(make_table(4, 4, 2, 16))
    pipe = transformers.pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer())
    model.generation_config.eos_token_id = 0
    context = " " + " ".join(f"w{i}" for i in prompt(1, 60)[0].tolist())
    questions = [" ".join(f"w{i}" for i in prompt(1, 4, seed=s)[0].tolist()) for s in (7, 8, 9)]

    def answers(press: Any) -> Any:
        return pipe(context, questions=questions, press=press, max_new_tokens=8)["answers"]

    wanted = answers(lukv(table, kvpress.KeyDiffPress(), 0.6))
    compact, mask = kvbudget.BudgetPress(table, 0.6), kvbudget.BudgetPress(table, 0.6, mode="mask")
    assert answers(compact) == wanted and compact.run is not None and compact.run.report().layers_cut == 4
    assert answers(mask) == wanted
    assert answers(kvbudget.BudgetPress(table.path, 0.6, scorer=kvpress.KeyDiffPress())) == wanted
    assert answers(compact) == wanted  # a press can be used again
    assert answers(None) != wanted
    assert len(set(wanted)) > 1


def test_masking_hides_and_keeps_the_cache(model: Any, make_table: Any) -> None:
    """mode="mask" frees nothing and hides as many tokens as the table evicts."""
    table = make_table(4, 4, 2, 16)
    with pytest.raises(kvbudget.KVBudgetError, match="packs none"):
        kvbudget.BudgetPress(str(make_table(4, 4, 2, 16, formats=[2])), 0.6, mode="mask")
    press = kvbudget.BudgetPress(str(table), 0.6, mode="mask")
    with press(model):
        cache = prefill(model, prompt())
    assert cache.layers[0].keys.shape[2] == T and press.run is not None
    assert press.run.report().bytes_now == press.run.report().bytes_full
    hidden = [layer.module.masked_key_indices[0].numel() for layer in attention_layers(model)]
    assert sum(hidden) == 4 * 2 * T - int(kvbudget.Table(table).keep(0.6, T).sum())


def test_a_press_for_another_metric_is_refused(model: Any, make_table: Any) -> None:
    """Another scorer, or the same with another window, is refused; the error names both."""
    table = kvbudget.Table(make_table(4, 4, 2, 16, **METRICS["snapkv"]))
    for wrong in (
        kvpress.KeyDiffPress(), kvpress.SnapKVPress(), kvpress.SnapKVPress(window_size=8), kvpress.TOVAPress()
    ):
        with pytest.raises(kvbudget.MismatchError, match="the table says snapkv:kvpress:window=8:kernel=3"):
            with kvbudget.compress(model, table, 0.5, scorer=wrong):
                pass
    with pytest.raises(kvbudget.KVBudgetError, match="mode"):
        kvbudget.BudgetPress(table, 0.5, mode="hide")  # type: ignore[arg-type]


def test_names_of_presses() -> None:
    """Presses that the program has too get its names; others are named by class and parameters."""
    assert scorers.of_press(kvpress.SnapKVPress()).name == "snapkv:kvpress"
    assert scorers.of_press(kvpress.ExpectedAttentionPress(epsilon=0.02)).name == "ea:kvpress"
    assert scorers.of_press(kvpress.ExpectedAttentionPress()).name == "ea:kvpress:epsilon=0"
    assert scorers.of_press(kvpress.TOVAPress()).name == "tova"
    assert scorers.of_press(("tova:kvpress", kvpress.TOVAPress())).name == "tova:kvpress"
    assert scorers.of_press(kvpress.LeverageScorePress()).name == "kvpress:LeverageScorePress"
    assert scorers.of_press(kvpress.LagKVPress(n_sink=2)).name == "lagkv:kvpress:sink=2"
    assert scorers.of_press(kvpress.RandomPress(seed=3)).name == "kvpress:RandomPress:seed=3"


def test_a_table_for_any_press(model: Any, make_table: Any) -> None:
    """A metric that only kvpress has works through its press."""
    table = kvbudget.Table(make_table(4, 4, 2, 16, metric="kvpress:LeverageScorePress"))
    with kvbudget.compress(model, table, 0.5, scorer=kvpress.LeverageScorePress()) as run:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt(), past_key_values=cache)
    assert run.report().layers_cut == 4
