"""The rows of the board: every press of kvpress that a CPU runs without weights from elsewhere, and kvbudget's tables.

To add a press, add a line to ROWS: its name, how many prefills it takes, and a function that takes a context and
returns a function from a ratio to a Cut: `pressed(lambda: MyPress())` for any press that works layer by layer.
"""
import copy
import dataclasses
import time
import types

import kvbudget
import pandas
import torch
from board_context import Absent, Cut, places_of
from board_matching import folded, matched
from kvbudget import scorers
from kvbudget.metrics import attention_weights
from kvbudget.ragged import RaggedLayer
from transformers.cache_utils import DynamicCache

from kvpress import (AdaKVPress, BlockPress, CapPress, ChunkKVPress, ChunkPress, CompactorPress, CriticalAdaKVPress,
                     CriticalKVPress, CURPress, DuoAttentionPress, EntropyGatedChunkKVPress, ExpectedAttentionPress,
                     FinchPress, KeyDiffPress, KeyRerotationPress, KnormPress, KVComposePress, KVgradPress, KVzipPress,
                     LagKVPress, LeverageScorePress, LUKVPress, MergingPress, NonCausalAttnPress,
                     ObservedAttentionPress, PyramidKVPress, RandomPress, ScorerPress, SnapKVPress, StreamingLLMPress,
                     TOVAPress)
from kvpress.presses import duo_attention_press, kvzip_press

#: their scores depend on the ratio, so they are not shared between ratios
BY_RATIO = (StreamingLLMPress, CriticalKVPress, CompactorPress, RandomPress)
#: they score parts of a context, so a layer has several scores
IN_PARTS = (BlockPress, ChunkPress)
SEED = 1


# ---- Presses that see one layer at a time ---------------------------------------------------------------------------


def causal_attention(layer):
    """Returns a layer's attention [1, H, T, T], as eager attention would compute it."""
    q = layer.queries()
    k = layer.keys.repeat_interleave(q.shape[1] // layer.keys.shape[1], 1)
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return attention_weights(q @ k.transpose(2, 3), mask, None, None)


class DropKVPress(ScorerPress):
    """DropKV as published: how far outputs move when one token goes, s_j = sum_i (p/(1-p))^2 ||v_j - o_i||^2."""

    needs_attention = True

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        group = attentions.shape[1] // keys.shape[1]
        v = values.repeat_interleave(group, 1)
        o = attentions @ v
        odds = (attentions / (1 - attentions).clamp(min=1e-6)).square()
        moved = odds.sum(2) * v.square().sum(-1) - 2 * ((odds.transpose(2, 3) @ o) * v).sum(-1)
        moved += (odds.transpose(2, 3) @ o.square().sum(-1, keepdim=True))[..., 0]
        return moved.view(1, keys.shape[1], group, -1).sum(2)


def _shared(press, context, layer, clock):
    """Lets the press, and those that it wraps, use scores of this layer that the same scorer has computed before. Their
    seconds are counted again."""
    if isinstance(press, IN_PARTS):
        return
    inner = [getattr(press, name, None) for name in ("press", "_leverage_press", "_non_causal_press")]
    for one in filter(lambda x: isinstance(x, ScorerPress), [press, *inner]):
        if isinstance(one, BY_RATIO):
            if one is not press:
                _shared(one, context, layer, clock)
            continue
        fields = {k: v for k, v in vars(one).items() if k not in ("compression_ratio", "score", "_budget_curves")}
        key = type(one).__name__, layer.index, repr(sorted(fields.items()))
        own = type(one).score

        def score(*given, one=one, key=key, own=own, **named):
            if key not in context.scores:
                start = time.process_time()
                made = own(one, *given, **named)
                context.scores[key] = made.clone(), time.process_time() - start
                return made
            found, seconds = context.scores[key]
            clock[0] += seconds
            return found.clone()
        one.__dict__["score"] = score


def _needs_attention(press):
    return any(isinstance(p, ObservedAttentionPress) or getattr(p, "needs_attention", False)
               for p in (press, getattr(press, "press", None)))


@torch.no_grad()
def by_layers(context, press):
    """Returns a Cut by the press's own compress(), called for every layer as its forward hook would call it."""
    torch.manual_seed(SEED)
    cut, clock, n, start = Cut([], [], [], context.tokens), [0.0], context.tokens, time.process_time()
    press.post_init_from_model(context.model)
    start, held = time.process_time(), 0
    for layer in context.layers:
        module = layer.module
        module.masked_key_indices, module.rotary_emb = None, layer.press_rotary()
        _shared(press, context, layer, clock)
        weights = causal_attention(layer) if _needs_attention(press) else None
        keys, values = press.compress(module, layer.hidden, layer.keys, layer.values, weights, layer.given())
        held += keys.nbytes + values.nbytes
        stop = time.process_time()
        _take(cut, layer, keys, values, module.masked_key_indices)
        start += time.process_time() - stop  # finding positions is the board's own work
        module.masked_key_indices = None
        del module.rotary_emb
    cut.seconds = time.process_time() - start + clock[0]
    cut.held = held if held < context.bytes else None
    if not any(x is not None for x in cut.keys):
        cut.keys = None
    if not any(x is not None for x in cut.values):
        cut.values = None
    fill = lambda found, name: found and [getattr(layer, name)[0] if x is None else x
                                          for x, layer in zip(found, context.layers)]
    cut.keys, cut.values = fill(cut.keys, "keys"), fill(cut.values, "values")
    if isinstance(press, (FinchPress, KeyRerotationPress)):
        cut.next = n - int(cut.hidden[0][0].sum())
    return cut


def _take(cut, layer, keys, values, masked):
    """Adds the result of compress() for one layer to the cut: hidden positions, and keys and values if changed."""
    full, groups, n = layer.keys[0], *layer.keys.shape[1:3]
    if keys.shape[2] == n:
        hidden = torch.zeros(groups, n, dtype=torch.bool)
        if masked is not None:
            hidden[masked[1], masked[2]] = True
        cut.hidden.append(hidden)
        cut.keys.append(None)
        cut.values.append(None)
        return
    places = places_of(keys[0], full)
    rotated = places is None
    if rotated:  # keys were rotated to new positions: they are in the first rows
        places = torch.arange(keys.shape[2]).expand(groups, -1)
    cut.hidden.append(torch.ones(groups, n, dtype=torch.bool).scatter_(1, places, False))
    into = places[..., None].expand_as(keys[0])
    cut.keys.append(full.scatter(1, into, keys[0]) if rotated else None)
    own = layer.values[0].gather(1, into)
    changed = rotated or not torch.equal(own, values[0])
    cut.values.append(layer.values[0].scatter(1, into, values[0]) if changed else None)


def pressed(make):
    def of(context):
        press = make()

        def at(ratio):
            press.compression_ratio = ratio
            return by_layers(context, press)
        return at
    return of


def finch():
    """Returns FinchPress as it works without a known question: the last 64 tokens vote, as in SnapKV."""
    press = FinchPress()
    press.window_size = 64
    return press


def lukv(make, metric):
    """LUKVPress with the curves of `kvbudget solve --paper` for the scorer; a ratio between two per cents interpolates
    their rows, so that it is the requested one."""
    def of(context):
        curves, sink, window = context.subject.curves(metric)
        press = LUKVPress(make(), sink=sink, window=window)

        def at(ratio):
            low, part = int(ratio * 100), ratio * 100 - int(ratio * 100)
            press._budget_curves = curves.copy()
            press._budget_curves[round(ratio * 100) - 1] = (1 - part) * curves[low - 1] + part * curves[low]
            press.compression_ratio = ratio
            return by_layers(context, press)
        return at
    return of


def duo(context):
    """DuoAttentionPress; it classifies heads on texts of calib-data, since BookSum would have to be downloaded."""
    if context.has_windows:
        raise Absent("kvpress does not do it for models with sliding windows")
    places = range(0, 10000, 2000)
    texts = [text[at : at + 2000] for text in context.subject.texts for at in places if len(text) > at + 1000]
    frame = pandas.DataFrame({"chapter": (texts * 50)[:50]})
    duo_attention_press.load_dataset = lambda *_, **__: types.SimpleNamespace(to_pandas=lambda: frame)
    duo_attention_press.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda *_: context.subject.tokenizer)
    press = DuoAttentionPress(on_the_fly_scoring=True)

    def at(ratio):
        streaming = 1 - (128 + 256) / context.tokens
        if ratio > streaming:
            raise Absent("streaming heads keep 384 tokens")
        press.head_compression_ratio = ratio / streaming
        return by_layers(context, press)
    return at


# ---- Presses that read the context twice ----------------------------------------------------------------------------


def _collect(context):
    hidden = []
    for layer in context.layers:
        gone = torch.zeros(layer.keys.shape[1:3], dtype=torch.bool)
        gone[layer.module.masked_key_indices[1], layer.module.masked_key_indices[2]] = True
        layer.module.masked_key_indices = None
        hidden.append(gone)
    return hidden


def replayed(make):
    """KVzip and similar presses: the press's own second pass over the cache of the first one."""
    def of(context):
        if context.has_windows:
            raise Absent("kvpress does not do it for models with sliding windows")
        press, ready = make(), {}
        kvzip_press.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda *_: context.subject.tokenizer)
        press.compression_ratio = 0.5
        press.compress_post = lambda model: None
        start = time.process_time()
        with press(context.model):
            press._context_ids, press._cache = context.ids, context.plain_cache()
            press._reset_internal_parameters = lambda: None
        seconds = time.process_time() - start

        def at(ratio):
            if ratio not in ready:
                press.compression_ratio = ratio
                type(press).compress_post(press, context.model)
                ready[ratio] = Cut(_collect(context), next=context.tokens, seconds=seconds)
            return ready[ratio]
        return at
    return of


def composed(structured):
    """KVCompose: attends to the context from a second copy of it; all ratios from one pass."""
    def of(context):
        if context.has_windows:
            raise Absent("kvpress does not do it for models with sliding windows")
        if "kvcompose" not in context.scores:
            press = KVComposePress(compression_ratio=0.5)
            press.compress_cache = lambda model: None
            press._reset_state = lambda: None
            start = time.process_time()
            config = context.model.config
            before = config._attn_implementation
            with press(context.model):
                context.model.model(input_ids=context.ids, past_key_values=DynamicCache())
            config._attn_implementation = before
            context.scores["kvcompose"] = press, time.process_time() - start - context.seconds
        press, seconds = context.scores["kvcompose"]

        def at(ratio):
            press.compression_ratio, press.structured = ratio, structured
            press.prepare_important_masks()
            hidden = [~torch.stack(list(heads)) for heads in press.important_mask_per_kv_head]
            cut = Cut(hidden, next=context.tokens, seconds=seconds)
            cut.held = round(context.bytes * cut.kept) if structured else None
            return cut
        return at
    return of


# ---- kvbudget -------------------------------------------------------------------------------------------------------


class Remembered(scorers.Learned):
    """The table's ranking; all ratios share its scores."""

    def score(self, layer, keys, values, seen, places, heads):
        known = self.__dict__.setdefault("known", {})
        if layer.index not in known:
            start = time.process_time()
            known[layer.index] = super().score(layer, keys, values, seen, places, heads), time.process_time() - start
            self.__dict__["spent"] = 0.0
        else:
            self.__dict__["spent"] = self.__dict__.get("spent", 0.0) + known[layer.index][1]
        return known[layer.index][0]


def table(refit, packed=False):
    """kvbudget.compress with the ready table of tokens, or of tokens and formats: the cache is really cut."""
    def of(context):
        wanted = context.subject.tables[packed, refit]
        context = context.watched(wanted)
        if context.metric is None:
            made = scorers.of_table(wanted)
            context.metric = Remembered(**{f.name: getattr(made, f.name) for f in dataclasses.fields(made)})

        def at(ratio):
            cache = copy.deepcopy(context.cache)
            run = kvbudget.compress(context.model, wanted, ratio, when="call", refit=refit, scorer=context.metric)
            context.metric.__dict__["spent"] = 0.0
            start = time.process_time()
            with run:
                run.cut(cache)
            seconds = time.process_time() - start + context.metric.__dict__["spent"]
            return opened(context, cache, seconds)
        return at
    return of


def opened(context, cache, seconds):
    """Returns a Cut with the rows of a really cut cache, at their positions."""
    sizes = [cache.layers[x.index].size for x in context.layers]
    packed = sum(s.packed[1] for s in sizes) * 2  # in the float32 of the others, for a share of 16 bits
    held = sum(s.bytes_now - s.packed[1] for s in sizes) + packed
    cut = Cut([], [], [], context.tokens, held, seconds, share=packed / context.bytes or None)
    for layer in context.layers:
        ragged = cache.layers[layer.index]
        assert isinstance(ragged, RaggedLayer)
        hidden = torch.ones(layer.keys.shape[1:3], dtype=torch.bool)
        keys, values = layer.keys[0].clone(), layer.values[0].clone()
        for h in range(len(hidden)):
            k, v, places = ragged.segment(h)
            hidden[h, places.long()], keys[h, places.long()], values[h, places.long()] = False, k, v
        cut.hidden.append(hidden)
        cut.keys.append(keys)
        cut.values.append(values)
    if all(torch.equal(k, x.keys[0]) and torch.equal(v, x.values[0])
           for k, v, x in zip(cut.keys, cut.values, context.layers)):
        cut.keys = cut.values = None
    return cut


# ---- The rows -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    prefills: int
    of: object  # context -> (ratio -> Cut)
    ours: bool = False
    packed: bool = False  # by the table of tokens and formats
    refit: bool = False  # by the table for refitted caches, if there is one
    version: str = "kvpress 0.5.5"


EA = lambda: ExpectedAttentionPress(epsilon=0.02)
MATCHING, FOLDING = "formulas of arXiv 2602.16284", "formulas of kvfold"
#: in the order in which they are measured: slow ones come last
ROWS = [
    Row("kvbudget", 1, table(False), ours=True),
    Row("kvbudget, refitted", 1, table(True), ours=True, refit=True),
    Row("kvbudget, packed", 1, table(False, packed=True), ours=True, packed=True),
    Row("kvbudget, packed, refitted", 1, table(True, packed=True), ours=True, packed=True, refit=True),
    Row("KVzip", 2, replayed(KVzipPress)),
    Row("ExpectedAttention", 1, pressed(EA)),
    Row("AdaKV(ExpectedAttention)", 1, pressed(lambda: AdaKVPress(EA()))),
    Row("SnapKV", 1, pressed(SnapKVPress)),
    Row("AdaKV(SnapKV)", 1, pressed(lambda: AdaKVPress(SnapKVPress()))),
    Row("KeyDiff", 1, pressed(KeyDiffPress)),
    Row("AdaKV(KeyDiff)", 1, pressed(lambda: AdaKVPress(KeyDiffPress()))),
    Row("Compactor", 1, pressed(CompactorPress)),
    Row("AdaKV(Compactor)", 1, pressed(lambda: AdaKVPress(CompactorPress()))),
    Row("CriticalKV(SnapKV)", 1, pressed(lambda: CriticalKVPress(SnapKVPress()))),
    Row("CriticalAdaKV(SnapKV)", 1, pressed(lambda: CriticalAdaKVPress(SnapKVPress()))),
    Row("CriticalAdaKV(ExpectedAttention)", 1,
        pressed(lambda: CriticalAdaKVPress(ExpectedAttentionPress(epsilon=0.02, use_vnorm=False)))),
    Row("CUR", 1, pressed(CURPress)),
    Row("Cap", 1, pressed(CapPress)),
    Row("LagKV", 1, pressed(LagKVPress)),
    Row("AdaKV(LagKV)", 1, pressed(lambda: AdaKVPress(LagKVPress()))),
    Row("LeverageScore", 1, pressed(LeverageScorePress)),
    Row("NonCausalAttn", 1, pressed(NonCausalAttnPress)),
    Row("TOVA", 1, pressed(TOVAPress)),
    Row("PyramidKV", 1, pressed(PyramidKVPress)),
    Row("ChunkKV(SnapKV)", 1, pressed(lambda: ChunkKVPress(SnapKVPress()))),
    Row("EntropyGatedChunkKV(SnapKV)", 1, pressed(lambda: EntropyGatedChunkKVPress(SnapKVPress()))),
    Row("Merging(SnapKV)", 1, pressed(lambda: MergingPress(SnapKVPress()))),
    Row("Merging(KeyDiff)", 1, pressed(lambda: MergingPress(KeyDiffPress()))),
    Row("Block(KeyDiff)", 1, pressed(lambda: BlockPress(KeyDiffPress()))),
    Row("Chunk(KeyDiff)", 1, pressed(lambda: ChunkPress(KeyDiffPress()))),
    Row("Finch", 1, pressed(finch)),
    Row("DuoAttention, on the fly", 1, duo),
    Row("Knorm", 1, pressed(KnormPress)),
    Row("StreamingLLM", 1, pressed(StreamingLLMPress)),
    Row("KeyRerotation(StreamingLLM)", 1, pressed(lambda: KeyRerotationPress(StreamingLLMPress()))),
    Row("Random", 1, pressed(RandomPress)),
    Row("KVzip+", 2, replayed(lambda: KVzipPress(kvzip_plus_normalization=True))),
    Row("ObservedAttention", 1, pressed(ObservedAttentionPress)),
    Row("DropKV, as published", 1, pressed(DropKVPress)),
    Row("LUKV(SnapKV)", 1, lukv(SnapKVPress, "snapkv:kvpress")),
    Row("LUKV(KeyDiff)", 1, lukv(KeyDiffPress, "keydiff")),
    Row("LUKV(ExpectedAttention)", 1, lukv(EA, "ea:kvpress")),
    Row("Attention Matching, fast", 1, matched(), version=MATCHING),
    Row("Attention Matching, fast, repeat", 2, matched(repeat=True), version=MATCHING),
    Row("Attention Matching, fast, repeat, kvbudget's budgets", 2, matched(by_table=True, repeat=True),
        version=MATCHING),
    Row("Folding(SnapKV)", 1, folded(SnapKVPress), version=FOLDING),
    Row("Folding(ExpectedAttention)", 1, folded(EA), version=FOLDING),
    Row("KVCompose", 2, composed(True)),
    Row("KVCompose, by head", 2, composed(False)),
    Row("KVgrad", 2, replayed(KVgradPress)),
]
#: presses that are not here, and why
LEFT_OUT = {
    "KVzap, FastKVzip, QFilter, RestoreKV, ExpectedAttentionStats": "need weights or statistics that are trained for a "
    "model, and there are none for these",
    "DMS": "a threshold on the scores of such weights",
    "SimLayerKV": "a threshold says which layers are cut, so the ratio cannot be set",
    "ThinK": "drops channels of keys and frees nothing",
    "CAM, Decoding, CompressionRatioDecoding, PrefillDecoding": "evict while the answer is decoded",
    "Composed, PerLayerCompression": "combine others",
}
