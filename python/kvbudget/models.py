"""What the package needs to know about a transformers model: attention layers, queries, rotations, output weights."""

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ._library import KVBudgetError, MismatchError


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module of the decoder. ``index`` is its place in the cache and its row of the table."""

    index: int
    module: Any  # an nn.Module; which projections and norms it has differs by family
    rotary: nn.Module | None  # the model's rotary embedding; None: positions are not rotated
    post_norm: Any = None  # the norm of the module's output, before it is added; None: there is none

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def n_heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def n_kv_heads(self) -> int:
        return int(getattr(self.config, "num_key_value_heads", None) or self.n_heads)

    @property
    def query_scale(self) -> float:
        """The factor on queries that makes q . k / sqrt(d) the model's attention logit."""
        scaling, d = getattr(self.module, "scaling", None), getattr(self.module, "head_dim", None)
        return float(scaling * d**0.5) if isinstance(scaling, (int, float)) and isinstance(d, int) else 1.0

    @property
    def softcap(self) -> float | None:
        """Attention logits become softcap * tanh(logit / softcap); None: unchanged. Only eager attention applies it."""
        return getattr(self.module, "attn_logit_softcapping", None) if self._is_eager else None

    @property
    def sinks(self) -> Tensor | None:
        """[Hq] a logit per query head that belongs to no position; None: none. Only eager attention applies them."""
        return getattr(self.module, "sinks", None) if self._is_eager else None

    @property
    def needs_eager(self) -> bool:
        """Whether it has a softcap or sinks, which sdpa leaves out."""
        return any(getattr(self.module, name, None) is not None for name in ("attn_logit_softcapping", "sinks"))

    @property
    def _is_eager(self) -> bool:
        return str(getattr(self.config, "_attn_implementation", "")).endswith("eager")

    @property
    def name(self) -> str:
        return f"layer {self.index} ({type(self.module).__name__})"

    def queries(self, hidden: Tensor) -> Tensor:
        """Returns the queries before rotation, [B, Hq, n, d], of the module's input [B, n, D]."""
        module, (batch, n, _) = self.module, hidden.shape

        def unseen(why: str) -> KVBudgetError:
            said = f"{self.name}: {why}, so expected attention cannot see its queries; use keydiff, knorm or snapkv"
            return KVBudgetError(said, "UNSUPPORTED")

        if hasattr(module, "q_proj"):
            q: Tensor = module.q_proj(hidden)
        elif hasattr(module, "qkv_proj"):  # Phi-3: the queries come first
            q = module.qkv_proj(hidden)[..., : self.n_heads * module.head_dim]
        else:
            raise unseen("has neither q_proj nor qkv_proj")
        if q.shape[-1] != self.n_heads * module.head_dim:
            raise unseen(f"expected {self.n_heads} queries of {module.head_dim} numbers, found {q.shape[-1]} numbers")
        norm = next((getattr(module, name) for name in ("q_norm", "q_layernorm") if hasattr(module, name)), None)
        if norm is not None and not isinstance(getattr(norm, "weight", None), Tensor):
            raise unseen(f"its norm of queries, {type(norm).__name__}, is not known")
        over_heads = norm is not None and norm.weight.numel() == q.shape[-1] and norm.weight.dim() == 1
        if norm is not None and over_heads:  # OLMo 2 normalises all heads as one
            q = norm(q)
        if getattr(self.config, "clip_qkv", None) is not None:  # OLMo and OLMoE
            q = q.clamp(-self.config.clip_qkv, self.config.clip_qkv)
        q = q.view(batch, n, self.n_heads, module.head_dim)
        if norm is not None and not over_heads:
            q = norm(q)
        return q.transpose(1, 2)

    def mean_rotation(self, first: int, count: int, like: Tensor) -> Tensor | None:
        """Returns R [d, d], the mean rotation over positions first .. first + count - 1: a row x becomes x R^T.

        The model's own function rotates the unit vectors, so it may use any layout of pairs and rotate only a part of
        a head. The mean is over whole matrices, as in kvpress, so that the sums round alike.
        """
        if self.rotary is None or self._rotate is None or not _rotates(self.module):
            return None
        d = self.module.head_dim
        part = getattr(self.module, "rotary_ndims", d)  # Phi and StableLM pass only that part of a head
        places = torch.arange(first, first + count, device=like.device)
        cos, sin = (x.float()[:, None].expand(count, part, -1) for x in self.angles(like, places))
        mean: Tensor = torch.eye(d, dtype=like.dtype, device=like.device)
        unit = torch.eye(part, device=like.device).expand(count, 1, part, part)
        mean[:part, :part] = self._rotate(unit, unit, cos, sin)[0][:, 0].transpose(1, 2).contiguous().mean(0)
        return mean

    @property
    def _rotate(self) -> Any:
        return getattr(sys.modules[type(self.module).__module__], "apply_rotary_pos_emb", None)

    def angles(self, like: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines [n, ...] of positions [n], by the model's own rotary embedding."""
        assert self.rotary is not None
        cos, sin = self.rotary(like, places[None], **_layer_type(self.rotary, self.module))
        return cos[0], sin[0]

    def turns(self) -> bool:
        """Whether queries are rotated by position. Raises KVBudgetError if they are and cannot be rotated back."""
        if self.rotary is None or not _rotates(self.module):
            return False
        if self._rotate is None:
            raise KVBudgetError(f"{self.name}: has a rotary embedding without apply_rotary_pos_emb", "UNSUPPORTED")
        return True

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates [H, n, d] by angles [n, ...]; with minus the sines, back. The result is scaled as the angles are."""
        part = getattr(self.module, "rotary_ndims", x.shape[-1])
        turned = self._rotate(x[None, ..., :part], x[None, ..., :part], cos[None], sin[None])[0][0]
        return torch.cat([turned, x[..., part:]], -1)

    def output_weights(self) -> Tensor:
        """Returns W_O by query head, [Hq, dv, D]; if a norm follows, W_O diag(w), right up to the norm's scale."""
        for name in ("o_proj", "out_proj", "dense", "c_proj", "wo"):
            layer = getattr(self.module, name, None)
            if layer is not None:
                break
        else:
            raise KVBudgetError(f"{self.name}: no output projection was found", "UNSUPPORTED")
        weight = layer.weight if type(layer).__name__ == "Conv1D" else layer.weight.T  # Conv1D: GPT-2's, [in, out]
        if weight.shape[0] % self.n_heads:
            raise KVBudgetError(
                f"{self.name}: the output projection reads {weight.shape[0]} numbers, not a multiple of "
                f"{self.n_heads} heads",
                "UNSUPPORTED",
            )
        found: Tensor = weight.detach().reshape(self.n_heads, -1, weight.shape[1])
        if self.post_norm is None:
            return found
        with torch.no_grad():  # the norm of ones is w, whichever way the family writes it
            weighted: Tensor = found * self.post_norm(torch.ones_like(found[0, 0])).to(found.dtype)
            return weighted


def _rotates(module: Any) -> bool:
    """Whether a layer rotates: some families have layers that do not, and each says so in its own way."""
    if type(module).__name__ == "Cohere2Attention":
        return module.sliding_window is not None
    if type(module).__name__ == "Exaone4Attention":
        return module.sliding_window is None or bool(module.is_sliding)
    return bool(getattr(module, "use_rope", True))


def _layer_type(rotary: nn.Module, module: Any) -> dict[str, str]:
    """Returns the argument that names the layer's kind to a rotary embedding that serves several kinds of layers."""
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return {}
    return {"layer_type": getattr(module, "layer_type", None) or "full_attention"}


def has_window(layer: AttentionLayer) -> bool:
    """Whether this layer sees only the last tokens. Its cache is small by itself, and a budget means nothing to it."""
    config = layer.config
    types = getattr(config, "layer_types", None)
    if types and layer.index < len(types):
        return types[layer.index] in ("sliding_attention", "chunked_attention")
    window = getattr(layer.module, "sliding_window", getattr(config, "sliding_window", None))
    return isinstance(window, int) and window < getattr(config, "max_position_embeddings", window + 1)


def only_windows(name: str, config: Any) -> KVBudgetError:
    """Returns the error for a model in which every layer has a window."""
    return KVBudgetError(
        f"every layer of {name} has a sliding window (config.sliding_window = "
        f"{getattr(config, 'sliding_window', None)}), so there is nothing to share out or to cut; set it to None "
        "if the contexts are shorter than the window",
        "UNSUPPORTED",
    )


def decoder_of(model: nn.Module) -> nn.Module:
    """Returns the text decoder of a model that may also have a head or a vision tower."""
    get: Any = getattr(model, "get_decoder", None)
    found = get() if get is not None else None
    for name in ("language_model", "text_model"):
        found = getattr(found, name, found)
    return found if isinstance(found, nn.Module) else getattr(model, "base_model", model)


def _post_norm(layer: nn.Module) -> Any:
    """Returns the norm after a decoder layer's attention (Gemma 2 and 3, OLMo 2; GLM 4), or None."""
    name = "post_attention_layernorm" if hasattr(layer, "post_feedforward_layernorm") else "post_self_attn_layernorm"
    return getattr(layer, name, None)


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """Returns the decoder's attention modules in the order of layers; layers without attention have none."""
    decoder = decoder_of(model)
    rotary = getattr(decoder, "rotary_emb", None)
    norms = {id(getattr(m, "self_attn", None)): _post_norm(m) for m in decoder.modules()}
    found: dict[int, AttentionLayer] = {}
    for module in decoder.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "Attention" in type(module).__name__ and hasattr(module, "config"):
            own = getattr(module, "rotary_emb", rotary)
            found.setdefault(index, AttentionLayer(index, module, own, norms.get(id(module))))
    if not found:
        raise KVBudgetError(
            f"{type(model).__name__}: no attention layer was found; expected a decoder of transformers", "UNSUPPORTED"
        )
    return [found[i] for i in sorted(found)]


def check_model(model: Any) -> None:
    """Refuses what would silently give wrong numbers."""
    meta = next((name for name, p in model.named_parameters() if p.device.type == "meta"), None)
    if meta is not None:
        raise KVBudgetError(f"{type(model).__name__}: {meta} is on the meta device; load the weights first")
    config = model.config.get_text_config(decoder=True)
    parameters, theta = getattr(config, "rope_parameters", None), getattr(config, "rope_theta", None)
    if int(transformers.__version__.split(".")[0]) < 5 and isinstance(parameters, dict):
        if parameters.get("rope_theta", theta) != theta:
            raise MismatchError(
                f"config.rope_theta: transformers {transformers.__version__} reads {theta}, but rope_parameters, of "
                f"transformers 5, says {parameters['rope_theta']}; set rope_theta in config.json or use transformers 5"
            )
