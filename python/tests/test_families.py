"""In every family a cut cache gives the same as a full cache that hides the evicted tokens."""

import sys
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, build
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import kvbudget
from kvbudget.models import attention_layers
from kvbudget.ragged import RaggedLayer

T, NEW = 40, 6


def hiding(base: str) -> Any:
    """Returns the family's own attention with a mask per head: a module's `hidden` [B, Hkv, T] tokens are not seen."""

    def forward(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **kwargs: Any) -> Any:
        hidden = module.__dict__.get("hidden")
        if hidden is not None and key.shape[2] > hidden.shape[2]:
            n, total = query.shape[2], key.shape[2]
            seen = torch.ones(n, total, dtype=torch.bool).tril(total - n)
            seen = seen.expand(query.shape[0], query.shape[1], -1, -1).clone()
            if mask is not None:
                visible = mask if mask.dtype == torch.bool else mask == 0
                seen &= visible[..., :total]
            seen[..., : hidden.shape[2]] &= ~hidden.repeat_interleave(query.shape[1] // hidden.shape[1], 1)[:, :, None]
            mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)
        if base == "sdpa":
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, dropout=dropout, **kwargs)
        return sys.modules[type(module).__module__].eager_attention_forward(
            module, query, key, value, mask, dropout=dropout, **kwargs
        )

    return forward


for base in ("sdpa", "eager"):
    AttentionInterface.register(f"hiding_{base}", hiding(base))
    AttentionMaskInterface.register(f"hiding_{base}", ALL_MASK_ATTENTION_FUNCTIONS[base])


@torch.no_grad()
def decode(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the logits of a question: NEW - 3 tokens at once, then 3 tokens one by one."""
    out, cuts = [], [0, *range(NEW - 3, NEW + 1)]
    for a, b in zip(cuts, cuts[1:]):
        places = torch.arange(T + a, T + b)[None].expand(ids.shape[0], -1)
        if mask is not None:
            places = places - (mask[:, :T] == 0).sum(1, keepdim=True)
        seen = None if mask is None else mask[:, : T + b]
        out.append(model(ids[:, a:b], past_key_values=cache, position_ids=places, attention_mask=seen).logits)
    return torch.cat(out, 1)


def hide_what_was_cut(model: Any, cache: Any, padding: list[int]) -> None:
    for layer in attention_layers(model):
        ragged = cache.layers[layer.index]
        if isinstance(ragged, RaggedLayer):
            hidden = torch.ones(ragged.n_sequences, ragged.n_heads, T, dtype=torch.bool)
            for s in range(len(ragged.lengths)):
                places = ragged.segment(s)[2].long()
                hidden[divmod(s, ragged.n_heads)][places[places < T]] = False
            for b, n in enumerate(padding):
                hidden[b, :, :n] = False
            layer.module.__dict__["hidden"] = hidden


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_equals_a_full_cache_with_hidden_tokens(family: str, padded: bool, make_table: Any) -> None:
    """Decoding over a cut cache gives the logits of a full one that hides the evicted tokens."""
    model = build(family)
    if model is None:
        pytest.skip(f"transformers {transformers.__version__} does not have {family}")
    if "conv" in str(FAMILIES[family][1]) and not hasattr(DynamicCache(config=model.config).layers[0], "conv_states"):
        pytest.skip(f"{family} brings a cache of its own in transformers {transformers.__version__}")
    batch, base = (2 if padded else 1), model.config._attn_implementation
    ids = torch.randint(2, 96, (batch, T + NEW), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(batch, T + NEW, dtype=torch.long)
    mask[1:, :9] = 0
    padding = [0, 9][:batch]
    shape = kvbudget.ModelShape.of(model.config)
    table = make_table(shape.n_layers, shape.n_heads, shape.n_kv_heads, shape.head_dim)
    cut, full = DynamicCache(config=model.config), DynamicCache(config=model.config)
    given = {"attention_mask": mask[:, :T]} if padded else {}
    try:
        with torch.no_grad(), kvbudget.compress(model, str(table), 0.6) as run:
            first = model(ids[:, :T], past_key_values=cut, **given).logits
    except kvbudget.KVBudgetError as refusal:
        assert refusal.status == "UNSUPPORTED" and "attention interface" in str(refusal)
        pytest.skip(f"refused: {refusal}")
    report = run.report()
    assert report.effective_ratio == pytest.approx(0.6, abs=0.15) and report.layers_cut >= 2
    ours = decode(model, cut, ids[:, T:], mask if padded else None)
    hide_what_was_cut(model, cut, padding)
    for layer in attention_layers(model):
        layer.config._attn_implementation = f"hiding_{base}"
    with torch.no_grad():
        assert torch.allclose(first, model(ids[:, :T], past_key_values=full, **given).logits, atol=1e-5)
    theirs = decode(model, full, ids[:, T:], mask if padded else None)
    assert float((ours - theirs).abs().max()) < 2e-5 * max(1.0, float(theirs.abs().max()))
    for layer in attention_layers(model):
        layer.module.__dict__.pop("hidden", None)
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :T], past_key_values=plain, **given)
    uncut = decode(model, plain, ids[:, T:], mask if padded else None)
    assert float((uncut - theirs).abs().max()) > 1e-3, "hiding tokens must matter, or the test shows nothing"
