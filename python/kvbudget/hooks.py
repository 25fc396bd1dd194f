"""Hooking into a model and out of it: the registered attention, replaced methods, and what a batch's mask says."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from . import attention
from ._library import KVBudgetError
from .models import AttentionLayer
from .ragged import eager

_LOCK = threading.Lock()


class Around:
    """Replaces a method of an object, in the object's __dict__: a call becomes around(method, ...)."""

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]):
        self.owner, self.name, self.around = owner, name, around
        self.before = owner.__dict__.get(name)  # accelerate puts functions of its own there
        self.method = self.__wrapped__ = getattr(owner, name)
        owner.__dict__[name] = self

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.method, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the owner, or a pickled one, has its plain method
        return _itself, (self.method,)

    def leave(self) -> None:
        if self.owner.__dict__.get(self.name) is self:
            del self.owner.__dict__[self.name]
            if self.before is not None:
                self.owner.__dict__[self.name] = self.before


def _itself(method: Any) -> Any:
    return method


def join(layers: Sequence[AttentionLayer], around: Callable[..., Any]) -> list[Around]:
    """Replaces each attention module's forward by around(layer, forward, ...); only one block at a time may do so."""
    with _LOCK:
        if any(isinstance(layer.module.__dict__.get("forward"), Around) for layer in layers):
            raise KVBudgetError(
                "this model is inside of a block of compress or of a recording already, here or in another thread; "
                "leave that block first. One block serves any number of caches and threads"
            )
        use_registered_attention(layers)
        return [Around(layer.module, "forward", partial(around, layer)) for layer in layers]


@contextlib.contextmanager
def joined(layers: Sequence[AttentionLayer], around: Callable[..., Any]) -> Iterator[None]:
    standing = join(layers, around)
    try:
        yield
    finally:
        for one in standing:
            one.leave()


def inputs_of(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Cache | None, Tensor, Any]:
    """Returns what an attention module is called with: the cache, hidden states [B, n, D], cosines and sines."""
    cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
    return cache, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], kwargs.get("position_embeddings")


def not_watched(layer: AttentionLayer) -> KVBudgetError:
    """Returns an error that says why a module's attention did not pass through this package."""
    name = layer.config._attn_implementation
    if name not in attention.REPLACES.values():
        return KVBudgetError(f"the model's attention implementation was changed to {name!r} inside of the block")
    return KVBudgetError(
        f"{layer.name}: does not compute attention through transformers' attention interface", "UNSUPPORTED"
    )


def use_registered_attention(layers: Sequence[AttentionLayer]) -> None:
    """Lets the model compute attention through this package; refuses implementations that it cannot stand in for.

    torch's sdpa has flash kernels of its own, so it takes the place of flash attention; softcaps and sinks need eager.
    """
    for layer in layers:
        name = layer.config._attn_implementation or "eager"
        if "flash" in name and "paged" not in name:
            name = "eager" if layer.needs_eager else "sdpa"
        if name not in attention.REPLACES:
            raise KVBudgetError(
                f'attention implementation {name!r} is not supported; load the model with attn_implementation="sdpa", '
                '"eager" or "flash_attention_2"',
                "UNSUPPORTED",
            )
        layer.config._attn_implementation = attention.REPLACES[name]


def refuse_presses(module: Any) -> None:
    """Refuses a press of kvpress around the model: it would cut the same cache by other rules."""
    for hook in module._forward_hooks.values():
        press = type(getattr(hook, "__self__", None))
        if any(base.__module__.startswith("kvpress.") for base in press.__mro__):
            raise KVBudgetError(f"{press.__name__} of kvpress would cut the same cache; leave its block first")


def padding_of(mask: Tensor | None, n_sequences: int, n: int) -> list[int]:
    """Returns how many positions come before each sequence's first token, by the last query's row of the mask."""
    if mask is None:
        return [0] * n_sequences
    row = mask[:, 0, -1, :n]
    visible = (row if row.dtype == torch.bool else row == 0).expand(n_sequences, -1)
    count = visible.sum(1)
    if not bool((visible == (torch.arange(n, device=row.device) >= n - count[:, None])).all()):
        raise KVBudgetError('padding must be on the left (tokenizer.padding_side = "left")')
    return [n - int(c) for c in count]
