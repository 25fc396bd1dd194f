"""Joining and leaving a model: the registered attention, hooks on attention modules, and what a batch's mask tells."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import attention
from ._library import KVBudgetError
from .models import AttentionLayer


@contextlib.contextmanager
def attached(layers: Sequence[AttentionLayer], watch: Any, after: Any) -> Iterator[None]:
    """The registered attention instead of the model's own, and hooks on all attention modules."""
    use_registered_attention(layers)
    hooks = []
    try:
        for layer in layers:
            layer.module.__dict__["kvb_watch"] = partial(watch, layer)
            hooks.append(layer.module.register_forward_hook(partial(after, layer), with_kwargs=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            layer.module.__dict__.pop("kvb_watch", None)


def use_registered_attention(layers: Sequence[AttentionLayer]) -> None:
    """Lets the model compute attention through this package; refuses implementations that it cannot stand in for."""
    configs = {id(layer.config): layer.config for layer in layers}
    for config in configs.values():
        name = config._attn_implementation or "eager"
        if name not in attention.REPLACES:
            raise KVBudgetError(
                f'attention implementation {name!r} is not supported; load the model with attn_implementation="sdpa" '
                'or "eager"',
                "UNSUPPORTED",
            )
        config._attn_implementation = attention.REPLACES[name]


def padding_of(mask: Tensor | None, n_sequences: int, n: int) -> list[int]:
    """How many positions before each sequence's first token; the last query's row of the mask shows them."""
    if mask is None:
        return [0] * n_sequences
    row = mask[:, 0, -1, :n]
    visible = (row if row.dtype == torch.bool else row == 0).expand(n_sequences, -1)
    count = visible.sum(1)
    if not bool((visible == (torch.arange(n, device=row.device) >= n - count[:, None])).all()):
        raise KVBudgetError('padding must stand on the left (tokenizer.padding_side = "left")')
    return [n - int(c) for c in count]
