"""Records what a model's heads need, in transformers: the protocol of `kvbudget profile`, any decoder, any device.

One prefill per context; every question's answer is decoded over it, then removed. The oracle importance of a context
token for a KV head is the largest attention that any query of an answer pays it, times its ||v W_O||, as a share:

    I[g,j] = max over queries k and heads h in group g of A[h,k,j] w[h,j],  w[h,j] = ||v_j W_O^h|| / (sum of all + 1e-9)

Attention is computed a few rows at a time, so memory is linear in the context. Arrays are put into OUTPUT.steps/, each
atomically; at the end `kvbudget import` makes the record of them and checks every number.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from . import calibration, metrics, origin
from ._library import KVBudgetError
from .attention import attention_weights, watched_by
from .chat import Frame
from .hooks import inputs_of, joined, not_watched
from .models import AttentionLayer, attention_layers, check_model, has_window, only_windows
from .sampling import draw
from .steps import assemble, metric_file, steps, tokenizer_sha256, weights_sha256, write, write_array
from .table import ModelShape
from .work import Options, Work, prepare

ORACLE = "max over queries of attention times layer-normalised |v W_O|, max over the group"
MOST_NUMBERS = 1 << 24  # attention weights that are held at a time: 64 MiB


class _Recorder:
    """Watches the attention layers: scores and value norms in the prefill, importance while answers are decoded."""

    def __init__(self, model: Any, layers: list[AttentionLayer], chosen: Sequence[metrics.Metric]):
        self.model, self.layers, self.chosen = model, layers, chosen
        self.roots = {layer.index: _value_roots(layer) for layer in layers}
        self.observed_from: int | None = None  # in decoding: the first recorded row of the pass
        self.scores: dict[str, list[Any]] = {}
        self.norms: dict[int, Tensor] = {}
        self.best: dict[int, Tensor] = {}
        self.n_tokens = 0

    @torch.no_grad()
    def prefill(self, ids: list[int]) -> DynamicCache:
        """Computes the scores of all metrics, [L, G, T] each, and returns the cache of the context."""
        self.n_tokens, self.observed_from, cache = len(ids), None, DynamicCache()
        self.scores = {m.name: [] for m in self.chosen}
        with joined(self.layers, self._around_prefill):
            self._pass(ids, cache)
        return cache

    def begin_question(self) -> None:
        self.best = {
            i: torch.zeros(layer.n_kv_heads, self.n_tokens, device=self.norms[i].device)
            for i, layer in ((layer.index, layer) for layer in self.layers)
        }

    @torch.no_grad()
    def decode(self, ids: list[int], cache: Cache, observed_from: int) -> Tensor:
        """Runs one pass over the cache, and returns the last row's logits."""
        self.observed_from = observed_from
        with joined(self.layers, self._around_decoding):
            return self._pass(ids, cache)

    def importance(self) -> Any:
        return torch.stack([self.best[layer.index].cpu() for layer in self.layers]).numpy()

    def _pass(self, ids: list[int], cache: Cache) -> Tensor:
        given = torch.tensor([ids], device=self.model.get_input_embeddings().weight.device)
        logits: Tensor = self.model(given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[0, -1].float()

    def _around_prefill(self, layer: AttentionLayer, forward: Any, *args: Any, **kwargs: Any) -> Any:
        queries: list[Tensor] = []

        def watch(attend: Any, query: Tensor, *given: Any) -> Any:
            queries.append(metrics.in_units(query, given[3]))
            return attend(query, *given[:3])

        with watched_by(watch):
            out = forward(*args, **kwargs)
        if not queries:
            raise not_watched(layer)
        self._score(layer, queries[0], *inputs_of(args, kwargs))
        return out

    def _around_decoding(self, layer: AttentionLayer, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with watched_by(partial(self._observe, layer)):
            return forward(*args, **kwargs)

    def _score(self, layer: AttentionLayer, query: Tensor, cache: Any, hidden: Tensor, rope: Any) -> None:
        """Called after a layer's prefill: computes every metric's scores, and the norms of the values."""
        place: Any = cache.layers[layer.index]
        keys, values = place.keys[0], place.values[0]
        step = metrics.Step(
            query[0], hidden[0], None if rope is None else tuple(x[0] if x.dim() == 3 else x for x in rope)
        )
        places = torch.arange(self.n_tokens, device=keys.device)
        for metric in self.chosen:
            if self.n_tokens <= metric.least:
                raise KVBudgetError(
                    f"metric {metric.name}: the context has {self.n_tokens} tokens, expected more than {metric.least}"
                )
            seen = metrics.Seen()
            metric.observe(seen, layer, step)
            scores = metric.score(layer, keys, values, seen, places, slice(0, keys.shape[0])).float()
            if not bool(torch.isfinite(scores).all()):
                raise KVBudgetError(f"{layer.name}: {metric.name} is not finite; the activations overflow", "NUMERIC")
            self.scores[metric.name].append(scores.cpu().numpy())
        self.norms[layer.index] = _value_norms(values, self.roots[layer.index])

    def _observe(
        self, layer: AttentionLayer, attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor,
        mask: Tensor | None, scaling: float | None, more: dict[str, Any],
    ) -> Any:  # fmt: skip
        """Computes the attention of recorded rows on the context's tokens, a few rows at a time."""
        n_kv, total, n = key.shape[1], key.shape[2], query.shape[2]
        group = query.shape[1] // n_kv
        q, k = query[0].view(n_kv, group, n, -1), key[0][:, None].transpose(2, 3)
        eager = self.model.config._attn_implementation.endswith("eager")  # only eager applies these two
        softcap, sinks = (more.get(name) if eager else None for name in ("softcap", "s_aux"))
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        norms = self.norms[layer.index].view(n_kv, group, 1, -1)
        rows = max(1, MOST_NUMBERS // (query.shape[1] * total))
        assert self.observed_from is not None
        for a in range(self.observed_from, n, rows):
            b = min(n, a + rows)
            if mask is None:
                seen = (
                    torch.arange(total, device=key.device)
                    <= torch.arange(total - n + a, total - n + b, device=key.device)[:, None]
                )
            else:
                seen = mask[0, 0, a:b, :total] if mask.dtype == torch.bool else mask[0, 0, a:b, :total] == 0
            own = None if sinks is None else sinks.view(n_kv, group, 1).expand(-1, -1, b - a)
            weights = attention_weights((q[:, :, a:b] @ k) * scaling, seen, softcap, own)[..., : self.n_tokens]
            found = (weights * norms).amax((1, 2))
            self.best[layer.index] = torch.maximum(self.best[layer.index], found)
        return attend(query, key, value, mask)


def _value_roots(layer: AttentionLayer) -> Tensor:
    """Returns R [Hq, dv, dv] with ||R v|| = ||v W_O||: dv^2 operations per value instead of dv D, no digits lost."""
    weights = layer.output_weights().double()  # [Hq, dv, D]
    roots: Tensor = torch.linalg.qr(weights.transpose(1, 2), mode="r").R.float()
    return roots


def _value_norms(values: Tensor, roots: Tensor) -> Tensor:
    """Returns w [Hq, T] of values [G, T, dv], as shares of the layer's sum."""
    n_heads, group = roots.shape[0], roots.shape[0] // values.shape[0]
    norms = torch.stack(
        [(values[h // group].float() @ roots[h].to(values.device).T).norm(dim=-1) for h in range(n_heads)]
    )
    return norms / (norms.sum(dtype=torch.float64) + 1e-9).float()


def _attributes(
    model: Any, tokenizer: Any, chosen: Sequence[metrics.Metric], o: Options, calib_sha256: str, given: int,
    model_id: str | None, model_sha256: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Returns what the record says about itself, in the words of `kvbudget profile`."""
    described = {
        m.name: dict(m.parameters) | {"protect_sink": m.protect_sink, "protect_window": m.protect_window}
        for m in chosen
    }
    config = model.config.get_text_config(decoder=True)
    bounded = ",".join(str(layer.index) for layer in attention_layers(model) if has_window(layer))
    return {
        "tool_version": f"python, transformers {transformers.__version__}",
        "architecture": config.model_type,
        "model_id": (
            model_id if model_id is not None else os.path.basename(str(getattr(model.config, "_name_or_path", "")))
        ),
        "model_sha256": model_sha256 or weights_sha256(model),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "calibration_sha256": calib_sha256,
        "backend": f"torch {next(model.parameters()).device.type}",
        "compute": str(next(model.parameters()).dtype).removeprefix("torch."),
        "oracle": ORACLE,
        "width": config.hidden_size,
        "new_tokens": o.new_tokens,
        "given_answers": given,
        "sampling": "greedy" if o.greedy else "temperature",
        "temperature": 0 if o.greedy else o.temperature,
        "seed": str(o.seed),
        "ignore_eos": o.ignore_eos,
        "ignore_answers": o.ignore_answers,
        "include_first": o.include_first,
        "bos": o.bos,
        "max_tokens": o.max_tokens,
        "max_questions": o.max_questions,
        "metrics": json.dumps(described, separators=(",", ":")),
        **origin.describe(model),
    } | ({"bounded_layers": bounded, "layer_window": config.sliding_window} if bounded else {})


# ---- The run ----


def _end_ids(model: Any, tokenizer: Any) -> set[int]:
    found = [
        getattr(tokenizer, "eos_token_id", None),
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
    ]
    flat = [i for x in found for i in (x if isinstance(x, (list, tuple)) else [x])]
    return {i for i in flat if i is not None}


def _answer(
    recorder: _Recorder, cache: Cache, work: Work, number: int, o: Options, ends: set[int]
) -> tuple[list[int], int]:
    """Decodes one question; returns its answer, given or drawn, and how many queries were recorded."""
    suffix, answer = work.questions[number]
    first = len(suffix) - o.include_first
    recorder.begin_question()
    if answer is not None:
        recorder.decode(suffix + answer[:-1], cache, first)
        return answer, len(answer) - 1 + o.include_first
    key, drawn = int(hashlib.sha256(work.sample_id.encode()).hexdigest()[:16], 16), list[int]()
    heat = 0.0 if o.greedy else o.temperature
    logits = recorder.decode(suffix, cache, first)
    while True:
        drawn.append(draw(logits, temperature=heat, seed=o.seed, context=key, question=number, step=len(drawn)))
        if len(drawn) == o.new_tokens or (drawn[-1] in ends and not o.ignore_eos):
            return drawn, len(drawn) - 1 + o.include_first
        logits = recorder.decode(drawn[-1:], cache, 0)


def _record_context(
    recorder: _Recorder, work: Work, folder: Path, o: Options, ends: set[int], progress: Callable[[str], None]
) -> None:
    """Prefills a context, and records its scores and all questions that are not recorded yet."""
    folder.mkdir(exist_ok=True)
    missing = [i for i in range(len(work.questions)) if not (folder / f"question_{i}.json").exists()]
    if not missing and (folder / "context.json").exists():
        return
    cache = recorder.prefill(work.ids)
    for name, layers in recorder.scores.items():
        write_array(folder / metric_file(name), np.stack(layers))
    write_array(folder / "context_ids.npy", np.array(work.ids, np.int32))
    write(folder / "context.json", b"{}")
    progress(f"{work.sample_id}: {len(work.ids)} tokens")
    for i in missing:
        answer, n_queries = _answer(recorder, cache, work, i, o, ends)
        cache.crop(len(work.ids) - cache.get_seq_length())
        if n_queries:
            importance = recorder.importance()
            if not np.isfinite(importance).all():
                raise KVBudgetError(f"sample {work.sample_id}, question {i + 1}: importance is not finite", "NUMERIC")
            write_array(folder / f"question_{i}.npy", importance)
        else:
            progress(f"{work.sample_id}, question {i + 1}: the answer ended at once, nothing was recorded")
        write_array(folder / f"suffix_ids_{i}.npy", np.array(work.questions[i][0], np.int32))
        write_array(folder / f"answer_ids_{i}.npy", np.array(answer, np.int32))
        write(folder / f"question_{i}.json", json.dumps({"number": i, "n_queries": n_queries}).encode())
        progress(f"{work.sample_id}, question {i + 1} of {len(work.questions)}: {n_queries} queries")


def record(
    model: Any, tokenizer: Any, calib: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    metrics: Sequence[Any] = ("keydiff", "snapkv:kvpress", "ea:kvpress"), *, output: str | os.PathLike[str],
    resume: bool = False, force: bool = False, model_id: str | None = None, model_sha256: str | None = None,
    progress: Callable[[str], None] | None = None, **options: Any,
) -> Path:  # fmt: skip
    """Records a model for `kvbudget solve`, as `kvbudget profile` does, and returns the record's path.

    model, tokenizer  of transformers, on any device; the tokenizer may be None if the lines hold token ids
    calib             a file of calibration lines, or several (formats/README.md)
    metrics           names as in `kvbudget help metrics` (keydiff, knorm, snapkv, morphkv, lagkv and ea have scorers
                      here), ScorerPress objects of kvpress, pairs (name, press), a Table for its metric, or
                      learned=FILE for the metrics that this ranking of `kvbudget learn` is made of
    resume, force     continue an interrupted recording; start again, or replace the record
    model_id, model_sha256  name and identity of the weights; by default the folder's name and a hash of all tensors
    options           of :class:`Options`: new_tokens, temperature, seed, greedy, ignore_eos, ignore_answers,
                      include_first, bos, max_tokens, max_questions, chat (context and question in the tokenizer's
                      own chat template)
    """
    from .scorers import of_recording

    o, output = Options(**options), Path(output)
    check_model(model)
    chosen = of_recording(metrics)
    if len({metric_file(m.name) for m in chosen}) < len(chosen):
        raise KVBudgetError("metrics: two names become the same file's name: " + ", ".join(m.name for m in chosen))
    layers, shape = attention_layers(model), ModelShape.of(model.config)
    if [layer.index for layer in layers] != list(range(shape.n_layers)):
        raise KVBudgetError(
            f"{type(model).__name__}: {len(layers)} of {shape.n_layers} layers have attention, a record needs all",
            "UNSUPPORTED",
        )
    layers = [layer for layer in layers if not has_window(layer)]  # the others' cache does not grow with the text
    if not layers:
        raise only_windows(type(model).__name__, model.config)
    contexts, calib_sha256 = calibration.read(calib)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    frame = Frame.of(tokenizer) if o.chat else None
    todo = [prepare(tokenizer, c, o, vocabulary, frame) for c in contexts]
    given = sum(answer is not None for work in todo for _, answer in work.questions)
    if short := sum(work.n_short for work in todo):
        warnings.warn(f"kvbudget: {short} of {given + short} given answers have fewer than two tokens with this "
                      "tokenizer, too few to record a query; the model answers these questions itself", stacklevel=2)
    attributes = _attributes(model, tokenizer, chosen, o, calib_sha256, given, model_id, model_sha256)
    attributes |= frame.attributes() if frame else {}
    recorder, ends = _Recorder(model, layers, chosen), _end_ids(model, tokenizer)
    with steps(output, attributes, resume, force) as folder:
        for work in todo:
            part = folder / f"context_{work.sample_id}"
            _record_context(recorder, work, part, o, ends, progress or (lambda _: None))
        assemble(folder, output, todo, attributes, [m.name for m in chosen], shape, force)
    return output
