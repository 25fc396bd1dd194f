"""Emulates a cut cache in transformers by hiding tokens: each KV head sees only its own tokens of the context."""
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def masked_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Softmax attention, causal for the rows at the end; module.hidden [G, T] hides context positions of KV heads."""
    group = query.shape[1] // key.shape[1]
    k, v = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    n, total = query.shape[2], k.shape[2]
    scores = query @ k.transpose(2, 3) * scaling
    scores = scores.masked_fill(torch.ones(n, total, dtype=torch.bool).triu(total - n + 1), float("-inf"))
    hidden = getattr(module, "hidden", None)
    if hidden is not None:
        scores[..., :hidden.shape[1]] = scores[..., :hidden.shape[1]].masked_fill(
            hidden.repeat_interleave(group, 0)[None, :, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("kept", masked_attention)


@torch.no_grad()
def log_p(model, context, following, hidden=None, press=None):
    """Returns log probabilities [n, vocabulary] of `following` [1, n] after a prefilled `context` [1, T]. Tokens in
    `hidden` [L, G, T] (or None) are not visible; press: a press of kvpress, or None."""
    cache, T, n = DynamicCache(), context.shape[1], following.shape[1]
    model.config._attn_implementation = "sdpa"
    if press is None:
        model(context, past_key_values=cache, logits_to_keep=1)
    else:
        with press(model):
            model(context, past_key_values=cache, logits_to_keep=1)
    if hidden is not None:
        model.config._attn_implementation = "kept"
        for layer, mask in zip(model.model.layers, hidden):
            layer.self_attn.hidden = mask
    out = model(following, past_key_values=cache, position_ids=torch.arange(T, T + n)[None],
                cache_position=torch.arange(T, T + n))
    for layer in model.model.layers:
        layer.self_attn.hidden = layer.self_attn.masked_key_indices = None
    return out.logits[0].double().log_softmax(-1)


def divergence(full, other):
    """Returns the KL in nats, averaged over the rows."""
    return (full.exp() * (full - other)).sum(-1).mean().item()
