"""Files of `kvbudget export` in the programs that they are for (kvpress, mlx-lm, torch), or checked by their schema."""

import importlib.util
import json
import os
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import build
from test_eviction import T, prefill, prompt

import kvbudget
from kvbudget.models import attention_layers

PROGRAM = os.environ.get("KVBUDGET_PROGRAM") or shutil.which("kvbudget")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="no program kvbudget")
WITH_KVPRESS = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 3)


@pytest.fixture
def path(make_table: Any) -> Path:
    found: Path = make_table(4, 4, 2, 16)
    return found


def export(path: Path, kind: str, name: str, ratio: float = 0.7, tokens: int = T, *more: str) -> Path:
    out = path.with_name(name)
    words = ["export", path, "-f", kind, "-r", str(ratio), "-t", str(tokens), "-o", out, *more]
    subprocess.run([str(PROGRAM), *map(str, words)], check=True)
    return out


def patched(name: str, folder: Path) -> Any:
    """Returns a press's module of the installed kvpress with our proposed patch."""
    if not WITH_KVPRESS:
        pytest.skip("kvpress is for transformers below 5.3")
    kvpress = pytest.importorskip("kvpress")
    if version("kvpress") != "0.5.5" or not shutil.which("patch"):
        pytest.skip("the patch is for kvpress 0.5.5")
    shutil.copytree(Path(kvpress.__file__).parent, folder / "kvpress")
    patch = Path(__file__).parents[2] / "docs/kvpress-local-files.patch"
    subprocess.run(["patch", "-p1", "-d", folder, "-i", patch], check=True)
    spec = importlib.util.spec_from_file_location(name, folder / f"kvpress/presses/{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_duo_attention_of_kvpress_streams_the_heads_that_keep_least(path: Path, tmp_path: Path) -> None:
    """The patched press lets those heads stream that keep least in the table."""
    module = patched("duo_attention_press", tmp_path)
    folder = export(path, "duo", "duo")
    config = json.loads((folder / "config.json").read_text())
    model = build("llama")
    ratio = config["head_compression_ratio"]
    press = module.DuoAttentionPress(head_compression_ratio=ratio, pattern_path=str(folder))
    with press(model):
        prefill(model, prompt(1))
    keep = kvbudget.Table(path).keep(0.7, T)
    assert 0 < (2 * keep < T).sum() < keep.size
    assert np.array_equal(press.streaming_mask.numpy(), 2 * keep < T)
    assert (press.sink_size, press.recent_size) == (config["sink_size"], config["recent_size"])
    assert press.compression_ratio == pytest.approx(config["effective_ratio"])
    np.savetxt(folder / "full_attention_heads.tsv", np.ones((3, 2)), delimiter="\t")
    with pytest.raises(ValueError, match="shape"):
        press.post_init_from_model(model)


def test_lukv_of_kvpress_reads_the_exported_curves(path: Path, tmp_path: Path) -> None:
    """The patched press, given the exported file, keeps the table's budgets."""
    module = patched("lukv_press", tmp_path)
    table, out, model = kvbudget.Table(path), path.with_name("curves.npy"), build("llama")
    subprocess.run([str(PROGRAM), "export", str(path), "-o", str(out)], check=True)
    scorer = module.ExpectedAttentionPress(epsilon=2e-2)
    press = module.LUKVPress(scorer, 0.7, table.info.sink, table.info.window, curve_path=str(out))
    with press(model):
        prefill(model, prompt(1))
    masked = [torch.stack(layer.module.masked_key_indices) for layer in attention_layers(model)]
    kept = [[T - int((m[1] == head).sum()) for head in range(2)] for m in masked]
    assert np.array_equal(kept, table.keep(0.7, T))
    np.save(out, table.prune_ratios[:, :3])
    with pytest.raises(ValueError, match="shape"):
        module.LUKVPress(scorer, 0.7, curve_path=str(out)).post_init_from_model(model)
    with pytest.raises(KeyError, match="curve_path"):
        module.LUKVPress(scorer, 0.7).post_init_from_model(model)


def test_per_layer_compression_of_kvpress_keeps_these_tokens(path: Path) -> None:
    """Every layer's cache has exactly the exported length."""
    if not WITH_KVPRESS:
        pytest.skip("kvpress is for transformers below 5.3")
    kvpress = pytest.importorskip("kvpress")
    layers = json.loads(export(path, "per-layer", "layers.json").read_text())
    press = kvpress.PerLayerCompressionPress(kvpress.KeyDiffPress(), layers["compression_ratios"])
    model = build("llama")
    with press(model):
        cache = prefill(model, prompt(1))
    assert [layer.keys.shape[2] for layer in cache.layers] == layers["tokens"]
    means = kvbudget.Table(path).keep(0.7, T).mean(1)
    assert np.abs(np.array(layers["tokens"]) - means).max() < 1 and sum(layers["tokens"]) == round(means.sum())


def test_rotating_caches_of_mlx_lm_hold_these_tokens(path: Path) -> None:
    """mlx-lm's caches, made from the list, hold the sinks and the newest tokens, as many as the list says."""
    mx = pytest.importorskip("mlx.core")
    rotating = pytest.importorskip("mlx_lm.models.cache").RotatingKVCache
    layers = json.loads(export(path, "per-layer", "layers.json").read_text())
    for n in layers["tokens"]:
        cache = rotating(max_size=n, keep=layers["sink"])
        for step in range(T):  # a value is the number of its token
            held, _ = cache.update_and_fetch(*[mx.full((1, 2, 1, 4), step)] * 2)
        sinks, latest = list(range(layers["sink"])), list(range(T - n + layers["sink"], T))
        assert sorted(np.array(held)[0, 0, :, 0].tolist()) == sinks + latest


def test_pages_hold_what_is_written_through_the_block_table(path: Path) -> None:
    """A paged cache as vLLM lays it out, [pages, page, d] and a block table per sequence, gives the rows back."""
    folder, page, rng = export(path, "varlen", "arrays", 0.7, T, "--block", "4"), 4, np.random.default_rng(0)
    lengths, cu, indptr, blocks = (
        np.load(folder / f"{name}.npy") for name in ("lengths", "cu_seqlens", "page_indptr", "block_table")
    )
    assert np.array_equal(lengths, kvbudget.Table(path).keep(0.7, T, block=4))
    for layer in range(4):
        rows = rng.normal(size=(cu[layer, -1], 8))
        pool = np.zeros((indptr[layer, -1], page, 8))
        taken: list[int] = []
        for head, n in enumerate(lengths[layer]):
            own = [p for p in blocks[layer, head] if p >= 0]
            assert own == list(range(indptr[layer, head], indptr[layer, head + 1])) and len(own) == -(-n // page)
            taken += own
            for i, row in enumerate(rows[cu[layer, head] : cu[layer, head + 1]]):
                pool[own[i // page], i % page] = row
        assert taken == list(range(len(pool)))
        for head, n in enumerate(lengths[layer]):
            read = pool[blocks[layer, head][: -(-n // page)]].reshape(-1, 8)[:n]
            assert np.array_equal(read, rows[cu[layer, head] : cu[layer, head + 1]])


def test_paged_attention_of_torch_reads_the_block_table(path: Path) -> None:
    """torch's own paged cache, given the exported tables, attends to each head's rows only."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    paged = pytest.importorskip("torch.nn.attention.experimental._paged_attention").PagedAttention
    folder, page = export(path, "varlen", "arrays", 0.7, T, "--block", "4"), 4
    lengths, indptr, blocks = (
        torch.from_numpy(np.load(folder / f"{name}.npy")).long() for name in ("lengths", "page_indptr", "block_table")
    )
    draw = torch.Generator().manual_seed(0)
    for n, pages, table in zip(lengths, indptr[:, -1].tolist(), blocks):
        cache, table = paged(pages, page, len(n), device="cpu"), table[:, :pages]  # as wide as the longest of all
        cache.page_table[:, : table.shape[1]] = table
        for head, own in enumerate(table):
            cache.physical_to_logical[head, own[own >= 0]] = torch.arange(int((own >= 0).sum()))
        query = torch.randn(len(n), 1, 1, 16, generator=draw)
        rows = [torch.randn(2, int(count), 16, generator=draw) for count in n]
        stored = torch.full((2, 1, 1, pages * page, 16), 1e3)  # rows that were never written must not be read
        for head, (k, v) in enumerate(rows):
            places = torch.arange(len(k))[None]
            cache.assign(torch.tensor([head]), places, k[None, None], v[None, None], *stored)

        def within(b: Any, h: Any, q: Any, at: Any, n: torch.Tensor = n) -> Any:
            return at < n[b]

        mask = create_block_mask(within, len(n), 1, 1, table.shape[1] * page, device="cpu", BLOCK_SIZE=(1, page))
        found = flex_attention(query, *stored, block_mask=cache.convert_logical_block_mask(mask, kv_len=n))
        for head, (k, v) in enumerate(rows):
            wanted = torch.softmax(query[head, 0] @ k.T / 4, -1) @ v
            assert torch.allclose(found[head, 0], wanted, atol=1e-5)
