"""Keys and values in fewer bits: kvb_pack() and kvb_unpack() of the library in torch, where the cache is (docs/bits.md).

32 numbers share a least number and a step, both bfloat16: keys over neighbouring tokens of a channel, values over
neighbouring channels of a token. Bytes equal the library's, except that a least number of 0 may have the other sign.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _library as lib
from ._library import KVBudgetError

BITS = {"bf16": 16, "int8": 8, "int4": 4, "int2": 2}
GROUP = 32  # KVB_PACK_GROUP
HEAD = 4  # bytes before a group's codes


def _narrow(x: Tensor, up: Tensor) -> Tensor:
    """Rounds float32 to bfloat16, away from 0 where ``up``, else towards it."""
    bits = x.contiguous().view(torch.int32) + 0xFFFF * up.to(torch.int32)
    return (bits & -0x10000).view(torch.float32).bfloat16()


def _pack_groups(x: Tensor, bits: int) -> Tensor:
    """Packs groups [a, b, n] of float32 into bytes [a, b, 4 + ceil(n bits / 8)]; a group's range covers its numbers."""
    most, each = 2**bits - 1, 8 // bits
    least = x.amin(-1, keepdim=True)
    low = _narrow(least, least < 0)
    span = x.amax(-1, keepdim=True) / most - low.float() / most
    step = _narrow(span, torch.ones_like(span))
    if not bool(low.isfinite().all() and step.isfinite().all()):
        raise KVBudgetError("keys or values of the cache are not finite, or too large for bfloat16", "NUMERIC")
    codes = torch.where(step > 0, (x - low.float()) / step.float(), 0).round().clamp(0, most).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each)).reshape(*codes.shape[:-1], -1, each)
    whole = (codes << bits * torch.arange(each, dtype=torch.uint8, device=x.device)).sum(-1, dtype=torch.uint8)
    return torch.cat([low.view(torch.uint8), step.view(torch.uint8), whole], -1)


def _unpack_groups(packed: Tensor, n: int, bits: int) -> Tensor:
    """Unpacks groups to float32 [a, b, n]."""
    head = packed[..., :HEAD].contiguous().view(torch.bfloat16).float()
    codes = packed[..., HEAD:]
    if bits < 8:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        codes = (codes[..., None] >> shifts & 2**bits - 1).flatten(-2)[..., :n]
    return torch.addcmul(head[..., :1], head[..., 1:], codes.float())


def pack(rows: Tensor, form: str, keys: bool) -> Tensor:
    """Packs rows [n, d] into the bytes of kvb_pack(), uint8 [bytes]; in 16 bits into [n, d], bfloat16 or float16."""
    if BITS[form] == 16:
        return rows.to(rows.dtype if rows.dtype == torch.float16 else torch.bfloat16, copy=True)
    if not len(rows):
        return rows.new_empty(0, dtype=torch.uint8)
    lines = (rows.T if keys else rows).float()  # groups lie along them
    whole = lines.shape[1] // GROUP * GROUP
    groups = [lines[:, :whole].reshape(len(lines), whole // GROUP, GROUP), lines[:, None, whole:]]
    packed = [_pack_groups(x, BITS[form]) for x in groups if x.numel()]
    if keys:  # group of tokens after group, and in each the channels
        return torch.cat([x.transpose(0, 1).flatten() for x in packed])
    return torch.cat([x.flatten(1) for x in packed], 1).flatten()


def unpack(packed: Tensor, form: str, keys: bool, n: int, d: int) -> Tensor:
    """Returns the rows [n, d] that pack() packed, in float32; those in 16 bits as they are."""
    bits = BITS[form]
    if bits == 16 or not n:
        return packed.view(n, d)
    if packed.device.type == "cpu":  # one call in place of some fifteen operations
        found = torch.empty(n, d, dtype=torch.float32, device="cpu")
        lib.call("kvb_unpack", list(BITS).index(form), 0 if keys else 1, packed.data_ptr(), n, d, found.data_ptr())
        return found
    return _unpack_by_torch(packed, bits, keys, n, d)


def _unpack_by_torch(packed: Tensor, bits: int, keys: bool, n: int, d: int) -> Tensor:
    along, size = n if keys else d, HEAD + 4 * bits
    whole, rest = along // GROUP, along % GROUP
    at, last = whole * size, HEAD + (rest * bits + 7) // 8 if rest else 0
    if keys:
        groups = [packed[: at * d].view(whole, d, size), packed[at * d :].view(1, d, last)]
    else:
        packed = packed.view(n, -1)
        groups = [packed[:, :at].view(n, whole, size), packed[:, None, at:]]
    found = [_unpack_groups(x, m, bits) for x, m in zip(groups, (GROUP, rest)) if m]
    if keys:
        return torch.cat([x.transpose(1, 2).flatten(0, 1) for x in found])
    return torch.cat([x.flatten(1) for x in found], 1)


@dataclass(frozen=True)
class Segment:
    """What one head of a sequence kept at a cut."""

    formats: Sequence[str]  # of keys and values
    stored: tuple[Tensor, Tensor]
    places: Tensor
    sizes: tuple[int, int]  # numbers in a key and in a value

    @classmethod
    def of(cls, rows: tuple[Tensor, Tensor, Tensor], formats: Sequence[str]) -> "Segment":
        k, v, places = rows
        stored = pack(k, formats[0], True), pack(v, formats[1], False)
        return cls(formats, stored, places.clone(), (k.shape[1], v.shape[1]))

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self.stored)

    def rows(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Returns keys, values and places."""
        n, given = len(self.places), zip(self.stored, self.formats, (True, False), self.sizes)
        k, v = (unpack(x, form, keys, n, d).to(dtype) for x, form, keys, d in given)
        return k, v, self.places

    def to(self, device: Any) -> "Segment":
        k, v = (x.to(device) for x in self.stored)
        return Segment(self.formats, (k, v), self.places.to(device), self.sizes)
