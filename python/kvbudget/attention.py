"""Attention over a cut cache, registered with transformers as the implementations ``kvbudget`` and ``kvbudget_eager``.

A layer that is not cut goes to sdpa or eager attention with unchanged arguments, so a model may keep the registered
name for good. For a cut layer there are two kernels:

segments  one product per sequence and head: works everywhere, and unpacks packed heads
varlen    torch.nn.attention.varlen over the flat tensors, for passes of one token: on CUDA, in half precision, without
          padding or softcaps
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from ._library import KVBudgetError
from .ragged import RaggedLayer, eager

SDPA, EAGER = "kvbudget", "kvbudget_eager"
#: a model's attention implementation: the one that replaces it
REPLACES = {"sdpa": SDPA, SDPA: SDPA, "eager": EAGER, EAGER: EAGER}

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]


def new_tokens_mask(layer: RaggedLayer, n: int, mask: Tensor | None) -> Tensor | None:
    """Returns which tokens after the cut the n new ones see, bool [B, n, later]; None: a single token sees all.

    mask is what transformers made: bool, or 0 where visible and very negative elsewhere; its last columns are the later
    tokens. If it is None, tokens see what is not ahead of them.
    """
    later = layer.seen - layer.cut_at
    if mask is None:
        if n == 1:
            return None
        return layer.flat_keys.new_ones(n, later, dtype=torch.bool).tril(later - n).expand(layer.n_sequences, -1, -1)
    mask = mask[:, 0, -n:, mask.shape[-1] - later :]
    visible = mask if mask.dtype == torch.bool else mask == 0
    return visible.expand(layer.n_sequences, -1, -1)


def by_segment(
    layer: RaggedLayer, query: Tensor, visible: Tensor | None, scaling: float | None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of queries [B, Hq, n, d], as [B, n, Hq, dv]: one product per segment, a group's query heads as rows."""
    batch, n_heads, n, d = query.shape
    group = n_heads // layer.n_heads
    out = query.new_empty(batch, n, n_heads, layer.flat_values.shape[1])
    for s in range(len(layer.lengths)):
        b, h = divmod(s, layer.n_heads)
        heads = slice(h * group, (h + 1) * group)
        k, v, _ = layer.segment(s)
        q = query[b, heads].reshape(1, 1, group * n, d)
        mask = None
        if visible is not None:
            mask = F.pad(visible[b], (len(k) - visible.shape[2], 0), value=True).repeat(group, 1)
        if softcap is None and sinks is None and not q.is_cuda:  # on CUDA it may build a kernel for every new length
            rows = F.scaled_dot_product_attention(q, k[None, None], v[None, None], attn_mask=mask, scale=scaling)[0, 0]
        else:
            own = None if sinks is None else sinks[heads].repeat_interleave(n)
            weights = attention_weights(q[0, 0] @ k.T * (d**-0.5 if scaling is None else scaling), mask, softcap, own)
            rows = weights.to(v.dtype) @ v
        out[b, :, heads] = rows.view(group, n, -1).transpose(0, 1)
    return out


def attention_weights(logits: Tensor, mask: Tensor | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Softmax in float32 of logits [..., rows, T] where a bool mask is true, with Gemma's softcap and GPT-OSS's sinks
    [..., rows]: a sink takes part in the sum and has no value."""
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    logits = logits.float()
    logits = logits if mask is None else logits.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return logits.softmax(-1)
    return torch.cat([logits, sinks.float()[..., None]], -1).softmax(-1)[..., :-1]


def by_varlen(layer: RaggedLayer, query: Tensor, scaling: float | None) -> Tensor:
    """The same for one new token by a varlen kernel, with arguments that all its versions take: a group's query heads
    are the rows of a sequence with one head, and the free rows after a segment are a sequence without queries."""
    batch, n_heads, _, d = query.shape
    group, device = n_heads // layer.n_heads, query.device
    sequences = 2 * batch * layer.n_heads
    bounds = [x for start, n in zip(layer.starts, layer.lengths) for x in (start, start + n)] + [layer.starts[-1]]
    assert varlen_attn is not None
    out = varlen_attn(
        query.reshape(batch * n_heads, 1, d),
        layer.flat_keys[:, None],
        layer.flat_values[:, None],
        (torch.arange(1, sequences + 2, device=device) // 2 * group).to(torch.int32),
        torch.tensor(bounds, dtype=torch.int32, device=device),
        group,
        max(b - a for a, b in zip(bounds, bounds[1:])),
        scale=scaling,
    )
    assert isinstance(out, Tensor)
    return out.view(batch, 1, n_heads, -1)


def _takes_varlen(layer: RaggedLayer, query: Tensor, visible: Tensor | None) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    if layer.packed or layer.kernel == "segments" or (layer.kernel == "auto" and not (query.is_cuda and half)):
        return False
    causal = new_tokens_mask(layer, query.shape[2], None)
    fits = varlen_attn is not None and (visible is None or bool((visible if causal is None else visible == causal).all()))
    if layer.kernel == "varlen" and not fits:
        raise KVBudgetError("kernel varlen needs torch 2.10 or newer and new tokens without padding", "UNSUPPORTED")
    return fits and query.shape[2] == 1


def ragged_attention(
    layer: RaggedLayer, query: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of queries [B, Hq, n, d] over a cut layer that already holds the n new tokens: [B, n, Hq, dv]."""
    visible = new_tokens_mask(layer, query.shape[2], mask)
    layer.hidden = None if mask is None or visible is None else ~visible[:, -1]
    if softcap is None and sinks is None and _takes_varlen(layer, query, visible):
        return by_varlen(layer, query, scaling)
    return by_segment(layer, query, visible, scaling, softcap, sinks)


#: Called instead of ``attend``, the attention itself, while an attention module runs in this thread; None: not watched.
WATCH: ContextVar[Callable[..., Any] | None] = ContextVar("WATCH", default=None)


@contextlib.contextmanager
def watched_by(watch: Callable[..., Any]) -> Iterator[None]:
    """Inside of the block, attention calls watch(attend, query, key, value, mask, scaling, more)."""
    token = WATCH.set(watch)
    try:
        yield
    finally:
        WATCH.reset(token)


def _stand_in(find_base: Callable[[nn.Module], Any], may_have: Sequence[str]) -> Callable[..., Any]:
    """Returns an attention function that handles cut layers and leaves all others to find_base(module). ``may_have``
    names the arguments softcap and sinks, if the base has them. kvpress wraps it and passes dropout by position."""

    @eager
    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
        scaling: float | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
            layer = getattr(key, "kvb_layer", None)
            if layer is None:
                return find_base(module)(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
            if kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False):
                raise KVBudgetError(
                    "output_attentions: over a cut cache there are no attention weights of all tokens; leave it out",
                    "UNSUPPORTED",
                )
            return ragged_attention(layer, query, mask, scaling, *(kwargs.get(name) for name in may_have)), None

        watch, cache = WATCH.get(), getattr(key, "kvb_cache", None)
        if watch is None and cache is not None:
            watch = partial(cache.attend, module)
        if watch is None:
            return attend(query, key, value, attention_mask)
        return watch(attend, query, key, value, attention_mask, scaling, kwargs)

    return forward


AttentionInterface.register(SDPA, _stand_in(lambda _: ALL_ATTENTION_FUNCTIONS["sdpa"], ()))
# Every family has its own eager attention, which alone applies Gemma's softcap and GPT-OSS's sinks.
AttentionInterface.register(
    EAGER, _stand_in(lambda m: sys.modules[type(m).__module__].eager_attention_forward, ("softcap", "s_aux"))
)
# Without these a custom implementation gets no mask at all.
AttentionMaskInterface.register(SDPA, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
AttentionMaskInterface.register(EAGER, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
