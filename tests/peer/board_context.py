"""A context that is prefilled once with the full cache and cut in many ways, and predictions and answers after it.

A press of kvpress looks at one layer's input, keys and values at the end of a prefill. These are kept here, so that one
prefill serves all presses and ratios. A cut says which positions of every KV head are hidden, and has the new keys or
values if the method changes them; cuts without changes share the full keys and values and are decoded together.
"""
import contextlib
import copy
import dataclasses
import os
import pathlib
import subprocess
import time

import hf_model
import kvbudget
import numpy as np
import torch
from kvbudget.models import AttentionLayer, _layer_type, attention_layers, has_window
from kvbudget.ready import find
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import rotate_half

from kvpress.utils import get_prerope_query_states

BATCH = 32  # cuts that are decoded together


class Absent(Exception):
    """Raised with the reason, for the board, if a press does not support a model."""


@dataclasses.dataclass
class Layer:
    """One layer with a cache that can be cut, as the prefill left it."""

    index: int
    module: torch.nn.Module
    hidden: torch.Tensor  # [1, T, D], the input of the attention module
    rope: tuple  # cosines and sines [1, T, d]
    rotary: torch.nn.Module
    keys: torch.Tensor  # [1, G, T, d]
    values: torch.Tensor

    def queries(self, hidden=None, rope=None):
        """Returns the queries [1, H, T, d] of an input, or of the layer's own: rotated, and scaled for the softmax."""
        cos, sin = (x.unsqueeze(1) for x in rope or self.rope)
        q = get_prerope_query_states(self.module, self.hidden if hidden is None else hidden)
        return (q * cos + rotate_half(q) * sin) * self.module.scaling

    def press_rotary(self):
        """Returns the embedding from which kvpress's scorers take angles; Gemma's depend on the kind of layer."""
        found = AttentionLayer(self.index, self.module, self.rotary)
        return self.rotary if not _layer_type(self.rotary, self.module) else (
            lambda like, places: [x[None] for x in found.angles(like, places[0])])

    def given(self):
        """Returns what a press's hook is given of the layer's call."""
        return {"hidden_states": self.hidden, "position_embeddings": self.rope,
                "cache_position": torch.arange(self.keys.shape[2])}


@dataclasses.dataclass
class Cut:
    """The part of a context that a method keeps."""

    hidden: list  # for each layer that is cut: bool [G, T], the evicted positions
    keys: list | None = None  # for each layer: [G, T, d], or None if unchanged
    values: list | None = None
    next: int = 0  # position of the next token
    held: int | None = None  # bytes of the method's own cache; None: nothing was freed
    seconds: float = 0.0  # processor time beyond the prefill
    bias: list | None = None  # for each layer: [G, T], added to q . k
    share: float | None = None  # of the full cache's bytes, if rows are not of the model's type

    @property
    def kept(self):
        return self.share or 1 - sum(int(h.sum()) for h in self.hidden) / sum(h.numel() for h in self.hidden)


class Behind:
    """The cached context that a layer's new tokens attend to: keys [1 or B, G, T, d], hidden and bias
    [B, G, T]."""

    def __init__(self, keys, values, hidden, bias=None):
        self.keys, self.values, self.hidden, self.bias = keys, values, hidden, bias

    def attend(self, query, key, value, scaling):
        """Attends to the visible part of the context and, causally, to the new tokens. Returns [B, n, H, d]."""
        (batch, heads, n, d), groups = query.shape, key.shape[1]
        rows, total = heads // groups * n, key.shape[2]
        q = query.reshape(batch, groups, rows, d) * scaling
        shared = len(self.keys) == 1 and batch > 1  # one product for all cuts
        fold = lambda x: x.transpose(0, 1).reshape(1, groups, batch * rows, -1) if shared else x
        unfold = lambda x: x.reshape(groups, batch, rows, -1).transpose(0, 1) if shared else x
        old = unfold(fold(q) @ self.keys.transpose(2, 3))
        if self.bias is not None:
            old = old + self.bias[:, :, None]
        old = old.masked_fill(self.hidden[:, :, None], float("-inf"))
        new = (q @ key.transpose(2, 3)).view(batch, groups, -1, n, total)
        ahead = torch.ones(n, total, dtype=torch.bool).triu(total - n + 1)
        new = new.masked_fill(ahead, float("-inf")).reshape(batch, groups, rows, total)
        weights = torch.cat([old, new], -1).softmax(-1)
        of_old, of_new = weights.split([old.shape[-1], total], -1)
        out = unfold(fold(of_old) @ self.values) + of_new @ value
        return out.reshape(batch, heads, n, -1).transpose(1, 2)


def _attention(base):
    def attend(module, query, key, value, mask, dropout=0.0, scaling=None, **more):
        behind = module.__dict__.get("behind")
        if behind is None:
            return base(module, query, key, value, mask, dropout=dropout, scaling=scaling, **more)
        return behind.attend(query, key, value, scaling or query.shape[-1] ** -0.5).contiguous(), None
    return attend


ALL_ATTENTION_FUNCTIONS["sdpa"] = _attention(ALL_ATTENTION_FUNCTIONS["sdpa"])


ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("KVBUDGET_PROGRAM", str(ROOT / "build/kvbudget"))


class Subject:
    """A model with its tokenizer, ready tables and texts."""

    def __init__(self, name, work):
        found = subprocess.check_output([ROOT / "tools/scripts/get-model.sh", name], text=True)
        self.name, self.path, self.work = name, found.strip(), work
        self.model, self.tokenizer = hf_model.load(self.path)
        self.tokenizer.chat_template = None  # texts and tasks are used without a template, in KVzip too
        kinds = [(packed, refit) for packed in (False, True) for refit in (False, True)]
        self.tables = {kind: find(self.model, *kind) for kind in kinds}
        self.table = self.tables[False, False]
        self.texts = [p.read_text() for p in sorted((ROOT / "calib-data/plain").glob("*.txt"))]

    def ids(self, path):
        """Returns the ids [1, n] of a text, by the program's tokenizer."""
        out = self.work / "ids.npy"
        subprocess.run([pathlib.Path(PROGRAM).parent / "tests/tokens", self.path, path, "--npy", out], check=True)
        return torch.from_numpy(np.load(out).astype("int64"))[None]

    def curves(self, metric):
        """Returns curves for LUKVPress [99, L, G], sinks and window, by `kvbudget solve --paper` on calib-data."""
        base = self.work / self.name
        base.mkdir(exist_ok=True)
        npy = base / f"{metric.split(':')[0]}.npy"
        if not npy.exists():
            record = base / "run.h5"
            if not record.exists():
                texts = sorted((ROOT / "calib-data").glob("*.jsonl"))
                self._run("profile", self.path, *texts, "-o", record, "--ignore-answers", "-q", "8", "--max-tokens",
                          "2048", "--resume")
            solved = npy.with_suffix(".safetensors")
            self._run("solve", record, "--metric", metric, "--paper", "-o", solved, "--force")
            self._run("export", solved, "-o", npy, "--force")
        table = kvbudget.Table(npy.with_suffix(".safetensors"))
        return np.load(npy), table.info.sink, table.info.window

    def _run(self, *words):
        subprocess.run([PROGRAM, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def inputs_of(layers):
    """Yields a dict that fills with what each attention layer is given, (hidden, rope) by index, while a model runs."""
    seen = {}

    def look(module, _, given, output):
        seen[module.layer_idx] = given["hidden_states"], given["position_embeddings"]

    hooks = [layer.module.register_forward_hook(look, with_kwargs=True) for layer in layers]
    yield seen
    for hook in hooks:
        hook.remove()


class Context:
    """A context of ids [1, T], prefilled by a subject's model."""

    def __init__(self, subject, ids, table=None):
        """Prefills, and watches for the table's metric (default: of the subject's table of tokens)."""
        model, table = subject.model, table or subject.table
        self.subject, self.model, self.ids, self.table = subject, model, ids, table
        self.scores, self.metric, self.others = {}, None, {}  # filled by board_presses.py and watched()
        found = [layer for layer in attention_layers(model) if not has_window(layer)]
        self.run = kvbudget.compress(model, table, 0.5, when="call", refit=True)
        self.cache = DynamicCache(config=model.config)
        with self.run, inputs_of(found) as seen:
            start = time.process_time()
            model.model(ids, past_key_values=self.cache)
            self.seconds = time.process_time() - start
            scratch, first = copy.copy(self.cache), found[0].index  # because a block must cut something
            scratch.layers, scratch.kvb_state = list(self.cache.layers), copy.deepcopy(self.cache.kvb_state)
            scratch.layers[first] = copy.deepcopy(self.cache.layers[first])
            self.run.cut_layer(scratch, self.run.layers[first])
        self.layers = [Layer(x.index, x.module, *seen[x.index], x.rotary, self.cache.layers[x.index].keys,
                             self.cache.layers[x.index].values) for x in found]

    def watched(self, table):
        """Returns this context, or one prefilled again if it was not watched for the table's metric: two tables of a
        model may have rankings of their own."""
        metric = table.info.metric
        if metric == self.table.info.metric:
            return self
        if metric not in self.others:
            self.others[metric] = Context(self.subject, self.ids, table)
        return self.others[metric]

    @property
    def tokens(self):
        return self.ids.shape[1]

    @property
    def bytes(self):
        """Returns the bytes of the part of the cache that can be cut."""
        return sum(x.nbytes for layer in self.layers for x in (layer.keys, layer.values))

    def whole(self):
        return Cut([torch.zeros(x.keys.shape[1:3], dtype=torch.bool) for x in self.layers], next=self.tokens)

    @property
    def has_windows(self):
        return len(self.layers) < len(self.cache.layers)

    def plain_cache(self):
        """Returns the full cache as transformers fills it; it may grow without changing this one."""
        cache = DynamicCache()
        for layer in self.layers:
            cache.update(layer.keys, layer.values, layer.index)
        return cache

    def _fresh(self, batch):
        """Returns a cache for new tokens only, with the windows of layers that are not cut."""
        cache, cut = DynamicCache(config=self.model.config), {x.index for x in self.layers}
        for index in set(range(len(self.cache.layers))) - cut:
            cache.layers[index] = copy.copy(self.cache.layers[index])
            cache.layers[index].batch_repeat_interleave(batch)
        return cache

    def _behind(self, cuts):
        for i, layer in enumerate(self.layers):
            hidden = torch.stack([cut.hidden[i] for cut in cuts])
            keys, values = layer.keys, layer.values
            if any(cut.keys or cut.values for cut in cuts):
                keys = torch.stack([cut.keys[i] if cut.keys else layer.keys[0] for cut in cuts])
                values = torch.stack([cut.values[i] if cut.values else layer.values[0] for cut in cuts])
            bias = None
            if any(cut.bias for cut in cuts):
                bias = torch.stack([cut.bias[i] if cut.bias else torch.zeros(hidden.shape[1:]) for cut in cuts])
            layer.module.__dict__["behind"] = Behind(keys, values, hidden, bias)

    def _leave(self):
        for layer in self.layers:
            layer.module.__dict__.pop("behind", None)

    @torch.no_grad()
    def _forward(self, cache, ids, positions, at):
        """Returns logits [B, n, V] of ids [B, n], whose positions begin at `positions` [B]; at: earlier tokens."""
        n = ids.shape[1]
        return self.model(ids, past_key_values=cache, position_ids=positions[:, None] + torch.arange(n),
                          cache_position=torch.arange(at, at + n)).logits

    def logits(self, cuts, following):
        """Returns logits [n, V] of the tokens `following` [1, n] after each cut."""
        self._behind(cuts)
        try:
            return self._forward(self._fresh(len(cuts)), following.expand(len(cuts), -1),
                                 torch.tensor([cut.next for cut in cuts]), self.tokens)
        finally:
            self._leave()

    def answers(self, cuts, question, most, enough):
        """Returns greedy answers to the ids `question` [1, n]; cuts that share the full keys and values are batched. An
        answer ends at an end token, after `most` tokens, or when enough(text) says that its score cannot rise."""
        found = [None] * len(cuts)
        plain = [i for i, cut in enumerate(cuts) if not (cut.keys or cut.values)]
        own = [i for i in range(len(cuts)) if i not in set(plain)]
        for order, size in ((plain, BATCH), (own, 5)):
            for at in range(0, len(order), size):
                batch = order[at : at + size]
                for i, text in zip(batch, self._answer([cuts[i] for i in batch], question, most, enough)):
                    found[i] = text
        return found

    @torch.no_grad()
    def _answer(self, cuts, question, most, enough):
        ends = self.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends]) | {self.subject.tokenizer.eos_token_id}
        said, left = [[] for _ in cuts], list(range(len(cuts)))
        self._behind(cuts)
        try:
            cache = self._fresh(len(cuts))
            positions = torch.tensor([cut.next for cut in cuts])
            ids, at = question.expand(len(cuts), -1), self.tokens
            for _ in range(most):
                new = self._forward(cache, ids, positions, at)[:, -1].argmax(-1)
                at, positions = at + ids.shape[1], positions + ids.shape[1]
                stay = []
                for row, token in enumerate(new.tolist()):
                    said[left[row]].append(token)
                    if token not in ends and not enough(self.text(said[left[row]])):
                        stay.append(row)
                if not stay:
                    break
                if len(stay) < len(left):
                    left = [left[row] for row in stay]
                    cache.batch_select_indices(torch.tensor(stay))
                    new, positions = new[stay], positions[stay]
                    self._behind([cuts[i] for i in left])
                ids = new[:, None]
        finally:
            self._leave()
        return [self.text(tokens) for tokens in said]

    def text(self, tokens):
        return self.subject.tokenizer.decode(tokens, skip_special_tokens=True)


def divergence(full, other):
    """Returns KL [n] in nats between the rows of two arrays of logits."""
    p = full.double().log_softmax(-1)
    return (p.exp() * (p - other.double().log_softmax(-1))).sum(-1)


_ODD = torch.from_numpy(np.random.default_rng(1).integers(1 << 62, size=1024) * 2 + 1)


def places_of(keys, full):
    """Returns the positions [G, n] of rows of keys [G, n, d] in full [G, T, d], by their bits, or None if rows were
    changed. Keys are rotated by their position, so no two rows of a head are equal."""
    marks = [(x.contiguous().view(torch.int32).long() * _ODD[: x.shape[-1]]).sum(-1) for x in (keys, full)]
    order = marks[1].sort(-1)
    at = torch.searchsorted(order.values, marks[0]).clamp(max=full.shape[1] - 1)
    found = order.indices.gather(1, at)
    return found if bool((marks[1].gather(1, found) == marks[0]).all()) else None
