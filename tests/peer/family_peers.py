"""The reference of families.py: oracle, scores and damage of eviction of a model of transformers on a context, from
queries, keys, values and attention weights that the model's own code has computed.

Scorers expect that channels rotate in pairs (i, i + d/2) and that the product of query and key, over sqrt(d), is the
attention logit. Channels are put in that order, and queries scaled; the judge then rotates the queries itself and must
get those that the model attended with, so that the same formulas (scorer_peers.py) serve all families.
"""

import contextlib
import copy
import sys
import types
from unittest import mock

import scorer_peers
import torch

PAIRS = ("cohere", "cohere2", "glm4")  # channels (2i, 2i + 1) rotate together; in others, two halves


class Rotary(torch.nn.Module):
    """Cosines and sines of channel pairs (i, i + d/2); pairs without a frequency are not rotated."""

    def __init__(self, frequency, factor, half):
        super().__init__()
        self.inv_freq = torch.zeros(half).double()
        self.inv_freq[: frequency.shape[0]] = frequency
        self.attention_scaling = torch.where(self.inv_freq > 0, factor, 1.0)

    def forward(self, x, position_ids):
        angle = position_ids[..., None].double() * self.inv_freq
        cos, sin = angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling
        return torch.cat([cos, cos], -1).to(x.dtype), torch.cat([sin, sin], -1).to(x.dtype)


class Attention(torch.nn.Module):
    """The part of an attention module that kvpress uses, over queries that are already computed."""

    def __init__(self, own, config, rotary, head_dim):
        super().__init__()
        self.q_proj, self.o_proj, self.rotary_emb = torch.nn.Identity(), own.o_proj, rotary
        self.head_dim, self.layer_idx = head_dim, own.layer_idx
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.config = types.SimpleNamespace(
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=head_dim,
            hidden_size=config.hidden_size,
        )


def budgeted(m):
    """Returns the layers without a window: those that are budgeted."""
    kinds = getattr(m.config, "layer_types", None)
    if kinds is None:
        window = getattr(m.config, "sliding_window", None)
        kinds = ["sliding_attention" if window else "full_attention"] * m.config.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]


@contextlib.contextmanager
def watched(m):
    """Yields {layer: (queries before rotation, after it, keys, values, weights, scale)}, filled in while m runs."""
    code, seen, before = sys.modules[type(m).__module__], {}, []
    rotate, attend = code.apply_rotary_pos_emb, code.eager_attention_forward

    def rotating(q, *rest, **more):
        before[:] = [q]
        return rotate(q, *rest, **more)

    def attending(module, query, key, value, mask, scaling=None, **more):
        output, weights = attend(module, query, key, value, mask, scaling=scaling, **more)
        raw = before.pop() if before else query
        seen[module.layer_idx] = (raw[0], query[0], key[0], value[0], weights[0], module.scaling)
        return output, weights

    with mock.patch.object(code, "apply_rotary_pos_emb", rotating):
        with mock.patch.object(code, "eager_attention_forward", attending):
            yield seen


def order_of(kind, d, turning):
    """Returns an order of channels with pairs at (i, i + d/2), unrotated ones at the end of each half."""
    if kind in PAIRS:
        first, second = list(range(0, turning, 2)), list(range(1, turning, 2))
    else:
        first, second = list(range(turning // 2)), list(range(turning // 2, turning))
    still = list(range(turning, d))
    return first + still[: len(still) // 2] + second + still[len(still) // 2 :]


def growth(config, n):
    """Returns the factors [n, 1] of queries at positions 0 .. n - 1 after rotation, for Ministral 3."""
    r = config.rope_parameters
    steps = torch.floor(torch.arange(n) / r.get("original_max_position_embeddings", n))
    return (1 + r.get("llama_4_scaling_beta", 0) * torch.log(1 + steps))[:, None]


class Judge:
    """A model that has read a context of ids [T]."""

    def __init__(self, m, ids):
        self.m, self.T = m, len(ids)
        with watched(m) as seen:
            out = m(ids[None], use_cache=True)
        self.logits, self.cache = out.logits[0], out.past_key_values
        self.rotary = m.model.rotary_emb
        if self.rotary.rope_type == "dynamic":  # from now on with the context's frequencies
            self.rotary.rope_type = "default"
        self.layers = {number: self._layer(number, seen[number]) for number in budgeted(m)}

    def _layer(self, number, seen):
        raw, q, k, v, weights, scale = seen
        c, d, own = self.m.config, k.shape[-1], self.m.model.layers[number].self_attn
        still = torch.equal(raw, q)  # a layer without rotary positions
        frequency = getattr(self.rotary, "full_attention_inv_freq", getattr(self.rotary, "inv_freq", None))
        factor = getattr(self.rotary, "full_attention_attention_scaling", getattr(self.rotary, "attention_scaling", 1))
        rotary = Rotary(frequency[:0] if still else frequency.double(), factor, d // 2)
        order = order_of(c.model_type, d, 0 if still else 2 * frequency.shape[0])
        raw, q = raw[..., order] * scale * d**0.5, q[..., order] * scale * d**0.5
        cos, sin = rotary(raw, torch.arange(self.T)[None])
        turned = raw * cos + torch.cat([-raw[..., d // 2 :], raw[..., : d // 2]], -1) * sin
        turned = turned * growth(self.rotary.config, self.T)
        off = ((turned - q).abs().max() / q.abs().max()).item()
        assert off < 1e-4, f"layer {number}: the judge's queries are {off:.1e} off what the model attends with"
        x = raw.transpose(0, 1).reshape(1, self.T, -1)
        module = Attention(own, c, rotary, d)
        return scorer_peers.Layer(module, x, raw, q, k[..., order], v, (cos, sin), weights)

    def _decode(self, ids):
        cache = copy.deepcopy(self.cache)
        return self.m(ids[None], past_key_values=cache, use_cache=True).logits[0]

    def oracle(self, ids, first):
        """Returns importance [B, G, T] for the following tokens ids [n], from `first` to the last but one."""
        with watched(self.m) as seen:
            self._decode(ids)
        found = []
        for number, layer in self.layers.items():
            best = seen[number][4][:, first:-1, : self.T].double().amax(1) * self._value_weights(number, layer.v)
            found.append(layer.by_group(best).amax(1))
        return torch.stack(found)

    def _value_weights(self, number, v):
        """Returns [H, T] for values v [G, T, d]: norms of v W_O (before a norm, of v W_O diag(w)) over their sum."""
        layer, d, group = self.m.model.layers[number], v.shape[2], self.m.config.num_attention_heads // v.shape[0]
        w_o = layer.self_attn.o_proj.weight.double()
        norm = getattr(layer, "post_self_attn_layernorm", None)
        if norm is None and hasattr(layer, "post_feedforward_layernorm"):
            norm = layer.post_attention_layernorm
        if norm is not None:
            w_o = (norm.weight.double() + ("Gemma" in type(layer).__name__))[:, None] * w_o
        heads = w_o.split(d, 1)
        n = torch.stack([(v[h // group].double() @ w.T).norm(dim=-1) for h, w in enumerate(heads)])
        return n / (n.sum() + 1e-9)

    def scores(self, case):
        """Returns scores [B, G, T] by one of scorer_peers.scores()."""
        return torch.stack([case(layer) for layer in self.layers.values()])

    def damage(self, ids, kept):
        """Returns the mean KL, in nats, after ids [n] between the full cache and one in which head h, counted over all
        layers, keeps the positions kept[h]."""
        full, groups = self._decode(ids).double().log_softmax(-1), self.m.config.num_key_value_heads
        hooks = []
        for number, layer in self.layers.items():
            hidden = torch.ones(groups, self.T, dtype=torch.bool)
            for g, positions in enumerate(kept[number * groups : (number + 1) * groups]):
                hidden[g, positions] = False
            own = self.m.model.layers[number].self_attn
            hooks.append(own.register_forward_pre_hook(hiding(layer, hidden), with_kwargs=True))
        cut = self._decode(ids).double().log_softmax(-1)
        for hook in hooks:
            hook.remove()
        return (full.exp() * (full - cut)).sum(-1).mean().item()


def hiding(layer, hidden):
    """Returns a hook that masks the positions hidden [G, T] in attention."""

    def hook(module, positional, named):
        lowest = torch.finfo(torch.float32).min
        own = torch.zeros(layer.q.shape[0], 1, named["attention_mask"].shape[-1])
        own[:, 0, : hidden.shape[1]].masked_fill_(hidden.repeat_interleave(layer.group, 0), lowest)
        return positional, named | {"attention_mask": (named["attention_mask"] + own[None]).clamp_min(lowest)}

    return hook
