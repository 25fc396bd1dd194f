"""The recorder: arrays compared with formulas in plain loops, interruptions, and records that the program solves."""

import contextlib
import hashlib
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import build, tokenizer
from test_eviction import prefill, prompt

import kvbudget
from kvbudget import calibration, recorder, sampling
from kvbudget._program import program
from kvbudget.models import attention_layers

h5py = pytest.importorskip("h5py")
try:
    PROGRAM = program()
except FileNotFoundError:
    pytest.skip("no program kvbudget", allow_module_level=True)
METRICS = ["keydiff", "knorm", "snapkv:kvpress:window=8:kernel=3", "ea:kvpress", "snapkv:lukv:window=4", "ea:lukv"]


@pytest.fixture(autouse=True)
def always_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_NUMBERS", 1000)  # several pieces of rows


def lines(tmp_path: Path, answers: bool = True, n: int = 2) -> Path:
    path = tmp_path / "calib.jsonl"
    with open(path, "w") as f:
        for i in range(n):
            entry: dict[str, Any] = {"sample_id": f"c{i}", "context_ids": prompt(1, 40 + i, seed=i)[0].tolist()}
            entry["question_ids"] = [prompt(1, 3, seed=9)[0].tolist(), prompt(1, 2, seed=8)[0].tolist()]
            if answers:
                entry["answer_ids"] = [prompt(1, 5, seed=7)[0].tolist(), prompt(1, 4, seed=6)[0].tolist()]
            f.write(json.dumps(entry) + "\n")
    return path


@torch.no_grad()
def oracle(model: Any, context: list[int], suffix: list[int], answer: list[int]) -> np.ndarray:
    """Returns the oracle's importance, from the model's own attention matrices in one pass over everything."""
    config, T = model.config, len(context)
    for layer in attention_layers(model):
        layer.config._attn_implementation = "eager"
    values: dict[int, torch.Tensor] = {}
    out = model(torch.tensor([context + suffix + answer[:-1]]), output_attentions=True, use_cache=True)
    cache = out.past_key_values
    best = []
    for i, layer in enumerate(attention_layers(model)):
        v = cache.layers[i].values[0, :, :T]
        values[i] = v
        n_heads, group = config.num_attention_heads, config.num_attention_heads // v.shape[0]
        w_o = layer.output_weights()
        norms = torch.stack([(v[h // group] @ w_o[h]).norm(dim=-1) for h in range(n_heads)])
        weights = out.attentions[i][0, :, T + len(suffix) :, :T] * (norms / (norms.sum() + 1e-9))[:, None]
        best.append(weights.view(v.shape[0], -1, T).amax(1))
    for layer in attention_layers(model):
        layer.config._attn_implementation = "sdpa"
    return torch.stack(best).numpy()


def budgets(record: Path, metric: str) -> np.ndarray:
    """Returns how many of 40 tokens each head keeps, for all 99 ratios."""
    out = record.with_suffix(".safetensors")
    subprocess.run([PROGRAM, "solve", record, "-m", metric, "-o", out, "--quiet"], check=True)
    table = kvbudget.Table(out)
    out.unlink()
    return np.stack([table.keep(percent / 100, 40) for percent in range(1, 100)])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_as_the_profiler_records(family: str, tmp_path: Path) -> None:
    """Oracle and scores are within 1e-4 of `kvbudget profile`'s, and with the same scores the budgets are the same."""
    model, calib, ours, theirs = build(family), lines(tmp_path), tmp_path / "c.h5", tmp_path / "python.h5"
    model.save_pretrained(tmp_path / "model")
    chosen = [word for metric in METRICS for word in ("-m", metric)]
    subprocess.run([PROGRAM, "profile", tmp_path / "model", calib, "-o", ours, *chosen, "--quiet"], check=True)
    kvbudget.record(model, None, calib, METRICS, output=theirs)
    with h5py.File(ours) as one, h5py.File(theirs, "r+") as two:
        for name in ("c0", "c1"):
            x, y = one[f"contexts/{name}"], two[f"contexts/{name}"]
            for array in [f"scores/{metric}" for metric in METRICS] + [f"questions/{i}/oracle" for i in range(2)]:
                wanted = x[array][:]
                assert (np.abs(y[array][:] - wanted) <= 1e-4 * np.abs(wanted).max(-1, keepdims=True)).all(), array
            for metric in METRICS:  # rounding may order nearly equal scores differently in the two programs
                scores, place = x["scores"][metric][:], y["scores"][metric]
                place[...] = scores
                place.attrs.modify("sha256", np.bytes_(hashlib.sha256(scores.tobytes()).hexdigest()))
    for metric in METRICS:
        assert (budgets(ours, metric) == budgets(theirs, metric)).all(), metric


@pytest.mark.parametrize("family", ["llama", "qwen2 7:1", "qwen3", "gemma", "phi", "gpt2", "olmo2", "mixtral"])
def test_against_plain_formulas(family: str, tmp_path: Path) -> None:
    """Oracle importance is the formula's, computed from whole attention matrices; solve takes the record."""
    model, calib = build(family), lines(tmp_path)
    chosen = METRICS if family in ("llama", "qwen3", "gemma", "mixtral") else METRICS[:3]
    path = kvbudget.record(model, None, calib, chosen, output=tmp_path / "run.h5")
    assert not (tmp_path / "run.h5.steps").exists()
    contexts, _ = calibration.read(calib)
    with h5py.File(path) as f:
        assert f.attrs["n_heads"] == model.config.num_attention_heads and list(f["contexts"]) == ["c0", "c1"]
        for c in contexts:
            assert c.ids is not None
            assert f[f"contexts/{c.sample_id}/token_ids"][:].tolist() == c.ids
            for i, q in enumerate(c.questions):
                assert q.ids is not None and q.answer_ids is not None
                group = f[f"contexts/{c.sample_id}/questions/{i}"]
                assert group.attrs["n_queries"] == len(q.answer_ids) - 1
                wanted = oracle(model, c.ids, q.ids, q.answer_ids)
                assert np.abs(group["oracle"][:] - wanted).max() <= 1e-5 * wanted.max()
            assert sorted(f[f"contexts/{c.sample_id}/scores"]) == sorted(chosen)
    out = tmp_path / "tables"
    ran = subprocess.run(
        [PROGRAM, "solve", path, "-m", "keydiff", "--sink", "2", "-o", out], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    table = kvbudget.Table(next(out.glob("*.safetensors")) if out.is_dir() else out)
    table.check(model.config, metric="keydiff")


def test_an_interrupted_recording_goes_on(tmp_path: Path) -> None:
    """A recording that is stopped after every step ends with the same bytes as one that was not stopped."""
    model, calib = build("llama"), lines(tmp_path, answers=False)
    how: dict[str, Any] = dict(metrics=["keydiff"], new_tokens=5)
    whole = kvbudget.record(model, None, calib, output=tmp_path / "whole.h5", **how).read_bytes()
    path, said = tmp_path / "run.h5", 0

    def stop(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvbudget.record(model, None, calib, output=path, progress=stop, **how)
    with pytest.raises(kvbudget.KVBudgetError, match="resume=True"):
        kvbudget.record(model, None, calib, output=path, **how)
    with pytest.raises(kvbudget.MismatchError, match="new_tokens: the interrupted recording has 5, this one 6"):
        kvbudget.record(model, None, calib, output=path, resume=True, **(how | {"new_tokens": 6}))
    while not path.exists():
        with_stop = iter([None, None])

        def second(_: str, steps: Any = with_stop) -> None:
            if next(steps, stop) is stop:
                raise KeyboardInterrupt

        try:
            kvbudget.record(model, None, calib, output=path, resume=True, progress=second, **how)
        except KeyboardInterrupt:
            said += 1
            next(path.with_name("run.h5.steps").glob("context_*")).joinpath("question_0.npy.partial").write_bytes(
                b"cut"
            )
    assert said >= 2 and path.read_bytes() == whole and not list(tmp_path.glob("*.steps"))
    with pytest.raises(kvbudget.KVBudgetError, match="exists"):
        kvbudget.record(model, None, calib, output=path, **how)
    kvbudget.record(model, None, calib, output=path, force=True, **how)
    assert path.read_bytes() == whole


def test_sampling_is_seeded(tmp_path: Path) -> None:
    """Philox4x32-10 gives its published answers, and draws do not depend on what else is recorded."""
    assert sampling.philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert sampling.philox([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    model, found = build("llama"), []
    for name, n, seed in (("a", 2, 1), ("b", 1, 1), ("c", 1, 2)):
        how: dict[str, Any] = dict(new_tokens=8, temperature=2.0, seed=seed)
        path = kvbudget.record(model, None, lines(tmp_path, False, n), ["knorm"], output=tmp_path / f"{name}.h5", **how)
        with h5py.File(path) as f:
            found.append([f[f"contexts/c0/questions/{i}/answer_ids"][:].tolist() for i in range(2)])
    assert found[0] == found[1] != found[2] and len(found[0][0]) == 8


def test_greedy_is_generate(tmp_path: Path) -> None:
    """Greedy answers are those of generate()."""
    model, calib = build("llama"), lines(tmp_path, False, 1)
    path = kvbudget.record(model, None, calib, ["knorm"], output=tmp_path / "run.h5", new_tokens=6, greedy=True)
    contexts, _ = calibration.read(calib)
    with h5py.File(path) as f:
        for i, q in enumerate(contexts[0].questions):
            ids = torch.tensor([(contexts[0].ids or []) + (q.ids or [])])
            wanted = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
            )
            assert f[f"contexts/c0/questions/{i}/answer_ids"][:].tolist() == wanted[0, ids.shape[1] :].tolist()


def test_some_answers_are_given(tmp_path: Path) -> None:
    """A given answer is used; if it is null, or a single token, which gives no query, an answer is sampled instead."""
    model, drawn = build("llama"), []
    line = {"sample_id": "c0", "context_ids": list(range(1, 41)), "question_ids": [[3, 4], [5, 6, 7]]}
    for answers in (None, [[8, 9, 10], None], [[8], None]):
        calib = tmp_path / "some.jsonl"
        calib.write_text(json.dumps(line | ({"answer_ids": answers} if answers else {})) + "\n")
        with pytest.warns(match="1 of 1 given") if answers == [[8], None] else contextlib.nullcontext():
            path = kvbudget.record(model, None, calib, ["knorm"], output=tmp_path / f"{len(drawn)}.h5", new_tokens=6)
        with h5py.File(path) as f:
            drawn.append([f[f"contexts/c0/questions/{i}/answer_ids"][:].tolist() for i in range(2)])
    assert drawn[1] == [[8, 9, 10], drawn[0][1]] and drawn[2] == drawn[0] and len(drawn[0][1]) > 1


def test_what_is_refused(tmp_path: Path) -> None:
    """Wrong metrics, options, lines and models, and existing files: an error says what to do."""
    model, calib = build("llama"), lines(tmp_path)

    def refused(words: str, of: Any = model, lines_of: Any = calib, metrics: Any = ("knorm",), **how: Any) -> None:
        with pytest.raises((kvbudget.KVBudgetError, TypeError), match=words):
            kvbudget.record(of, None, lines_of, metrics, output=tmp_path / "no.h5", **how)
        assert not (tmp_path / "no.h5").exists() and not (tmp_path / "no.h5.steps").exists()

    refused("has no scorer in Python", metrics=["h2o"])
    refused("its parameters are", metrics=["keydiff:window=3"])
    refused("kernel must be odd", metrics=["snapkv:kernel=4"])
    refused("each once", metrics=["knorm", "knorm"])
    press = SimpleNamespace(score=len)
    refused("same file's name", metrics=[("a:b", press), ("a_b", press)])
    for option, values in dict(new_tokens=(0, 2.5), max_tokens=(-1, 2**32), max_questions=(-1, "2"), seed=(-1, 2**64),
                               temperature=("0.7", 0.0), bos=("maybe",)).items():  # fmt: skip
        for value in values:
            refused(option, **{option: value})
    refused("unexpected keyword", tokens=3)
    with torch.device("meta"):
        refused("meta device", of=build("llama"))
    bad = tmp_path / "bad.jsonl"
    for text, words in (
        ("{", "line 1: not JSON"),
        ('{"context_ids": [1]}', "either questions or question_ids"),
        ('{"context_ids": [999], "question_ids": [[1]]}', "token ids from 0 to 95"),
        ('{"context_ids": [5], "question_ids": [[1]], "sample_id": "../x"}', "sample_id"),
        ("", "no calibration lines"),
    ):
        bad.write_text(text + "\n")
        refused(words, lines_of=bad)
    bad.write_bytes(b"\n\xe9")
    refused("bad.jsonl: byte 1 is no UTF-8", lines_of=bad)
    for name, steps in (("calib.jsonl", False), ("own.h5", True)):  # files of other kinds are not overwritten
        own = tmp_path / f"{name}.steps" / "notes" if steps else tmp_path / name
        own.parent.mkdir(exist_ok=True)
        own.write_text(calib.read_text())
        with pytest.raises(kvbudget.KVBudgetError, match="is no interrupted" if steps else "is not a record"):
            kvbudget.record(model, None, calib, ["knorm"], output=tmp_path / name, force=True)
        assert own.read_text() == calib.read_text()


def test_contexts_that_are_too_short_for_a_metric(tmp_path: Path) -> None:
    """A context no longer than a metric's window is refused, with both numbers."""
    with pytest.raises(kvbudget.KVBudgetError, match="the context has 40 tokens, expected more than 64"):
        kvbudget.record(build("llama"), None, lines(tmp_path), ["snapkv:kvpress"], output=tmp_path / "no.h5")


def test_texts_and_windows(tmp_path: Path) -> None:
    """Texts are tokenized; layers with a window are listed, not recorded, and keep everything in the table."""
    words = " ".join(f"w{i}" for i in prompt(1, 40)[0].tolist())
    calib = tmp_path / "text.jsonl"
    line = {"context": words, "questions": ["w3\u2028w4"], "answers": ["w5 w6 w7"], "answer_prefix": " w8"}
    calib.write_text(json.dumps(line, ensure_ascii=False))
    path = kvbudget.record(build("gemma3"), tokenizer(), calib, ["keydiff"], output=tmp_path / "run.h5", bos="yes")
    with h5py.File(path) as f:
        assert f.attrs["bounded_layers"] in (b"0,2", "0,2") and f.attrs["layer_window"] == 8
        assert f.attrs["n_layers"] == 2
        c = f["contexts/text-1"]
        assert c["token_ids"][:3].tolist() == [1, *prompt(1, 40)[0, :2].tolist()] and c["token_ids"].shape == (41,)
        assert c["questions/0/suffix_ids"][:].tolist() == [3, 4, 8] and c["questions/0/answer_ids"][:].tolist() == [
            5, 6, 7
        ]
        best = c["questions/0/oracle"][:]
        assert best.shape == (2, 2, 41) and (best > 0).all()
    out = tmp_path / "t.safetensors"
    subprocess.run([PROGRAM, "solve", path, "-m", "keydiff", "-o", out, "--quiet"], check=True)
    table = kvbudget.Table(out)
    assert table.info.n_layers == 4 and table.info.bounded == (0, 2) and table.info.n_budgeted == 2
    assert (table.keep(0.5, 41)[[0, 2]] == 41).all() and table.keep(0.5, 41)[[1, 3]].sum() == 2 * 41
    with kvbudget.compress(build("gemma3"), table, 0.5) as run:
        prefill(run.model, prompt(1, 60))
    assert run.report().layers_cut == 2 and run.report().layers_left == 2


def test_a_model_of_windows_alone_is_refused(tmp_path: Path) -> None:
    """If no layer's cache grows, there is nothing to record."""
    model = build("mistral")
    model.config.sliding_window = 8
    for layer in attention_layers(model):
        layer.module.sliding_window = 8
    with pytest.raises(kvbudget.KVBudgetError, match="every layer"):
        kvbudget.record(model, None, lines(tmp_path), ["keydiff"], output=tmp_path / "run.h5")


def test_what_families_do_to_scales_norms_and_rotations() -> None:
    """Granite and Gemma scale logits in their own way, Gemma and OLMo 2 normalise the output of attention, SmolLM3 and
    hybrid models have layers without rotation."""
    granite, gemma = build("granite", attention_multiplier=0.5), build("gemma2", query_pre_attn_scalar=64)
    assert attention_layers(granite)[0].query_scale == pytest.approx(0.5 * 4)
    assert attention_layers(gemma)[0].query_scale == pytest.approx(64**-0.5 * 4)
    assert attention_layers(build("llama"))[0].query_scale == pytest.approx(1)
    for model, added in ((gemma, 1), (build("olmo2"), 0)):
        layer, decoder = attention_layers(model)[1], model.model.layers[1]
        with torch.no_grad():
            decoder.post_attention_layernorm.weight.uniform_(0.5, 2)
        plain = layer.module.o_proj.weight.T.reshape(layer.n_heads, -1, 64)
        wanted = plain * (added + decoder.post_attention_layernorm.weight)
        assert torch.allclose(layer.output_weights(), wanted, rtol=1e-4)
    keys = torch.zeros(2, 5, 16)
    for family, turned in (("smollm3", [1, 1, 1, 0]), ("cohere2", [1, 0] * 2), ("exaone4", [1, 0] * 2)):
        model = build(family)
        if model is not None:
            found = [layer.mean_rotation(5, 3, keys) is not None for layer in attention_layers(model)]
            assert found == [bool(x) for x in turned], family
