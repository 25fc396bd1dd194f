"""A cut layer by itself: kernels that attend over it, and sequences that are reordered, copied and cropped."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from families import build
from test_eviction import T, prefill, prompt

import kvbudget
from kvbudget import attention


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture
def table(make_table: Any) -> kvbudget.Table:
    return kvbudget.Table(make_table(4, 4, 2, 16))


def reference_varlen(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, scale: Any = None) -> Any:
    """varlen_attn as torch documents it, in plain loops, with the arguments of torch 2.10."""
    assert q.shape[1] == k.shape[1] == v.shape[1] == 1 and len(cu_q) == len(cu_k)
    assert cu_q[-1] == len(q) and cu_k[-1] == len(k) == len(v)
    out = torch.full((q.shape[0], 1, v.shape[2]), float("nan"))
    for s in range(len(cu_q) - 1):
        rows, keys = slice(int(cu_q[s]), int(cu_q[s + 1])), slice(int(cu_k[s]), int(cu_k[s + 1]))
        assert 0 <= rows.stop - rows.start <= max_q and 0 <= keys.stop - keys.start <= max_k
        w = q[rows, 0] @ k[keys, 0].T * (q.shape[2] ** -0.5 if scale is None else scale)
        out[rows, 0] = w.softmax(-1) @ v[keys, 0]
    return out


@pytest.mark.parametrize("padded", [False, True])
def test_kernels(model: Any, table: kvbudget.Table, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """varlen's arguments are right, tested with a reference, since its kernels run only on CUDA."""
    monkeypatch.setattr(attention, "varlen_attn", reference_varlen)
    ids, more, mask = prompt(2), prompt(2, 5, seed=6), torch.ones(2, T + 5, dtype=torch.long)
    mask[1, :7] = 0
    mask[1, T + 1] = 0 if padded else 1  # a hole among the new tokens
    out = []
    for name in ("segments", "varlen"):
        with kvbudget.compress(model, table, 0.7, kernel=name):  # type: ignore[arg-type]
            cache = prefill(model, ids, attention_mask=mask[:, :T])
        with torch.no_grad():
            if padded and name == "varlen":
                with pytest.raises(kvbudget.KVBudgetError, match="padding"):
                    model(more, past_key_values=cache, attention_mask=mask)
                return
            first = model(more, past_key_values=cache, attention_mask=mask).logits
            last = model(
                more[:, :1], past_key_values=cache, attention_mask=torch.cat([mask, mask[:, :1] | 1], 1)
            ).logits
        keep = torch.tensor([[True] * 6, [not (padded and i == 1) for i in range(6)]])
        out.append(torch.cat([first, last], 1)[keep])
    assert torch.allclose(*out, atol=2e-5)


def test_torch_takes_our_varlen_call(model: Any, table: kvbudget.Table) -> None:
    """varlen_attn itself, on tensors without data, accepts our arguments and returns the expected shape."""
    if attention.varlen_attn is None:
        pytest.skip("torch before 2.10")
    with kvbudget.compress(model, table, 0.7):
        layer = prefill(model, prompt(2)).layers[0]
    bare = SimpleNamespace(n_heads=layer.n_heads, lengths=layer.lengths, starts=layer.starts)
    bare.flat_keys, bare.flat_values = (x.to("meta", torch.bfloat16) for x in (layer.flat_keys, layer.flat_values))
    query = torch.empty(2, 4, 1, 16, device="meta", dtype=torch.bfloat16)
    assert attention.by_varlen(cast(Any, bare), query, None).shape == (2, 1, 4, 16)


def test_rows_come_and_go(model: Any, table: kvbudget.Table) -> None:
    """The operations of beam search and cropping, on one layer."""
    with kvbudget.compress(model, table, 0.7):
        layer = prefill(model, prompt(3)).layers[1]

    def rows(b: int) -> list[list[float]]:
        return [layer.segment(b * 2 + h)[0].tolist() for h in range(2)]

    before = [rows(b) for b in range(3)]
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert [rows(b) for b in range(3)] == [before[i] for i in (2, 0, 0)]
    layer.batch_repeat_interleave(2)
    assert [rows(b) for b in range(6)] == [before[i] for i in (2, 2, 0, 0, 0, 0)]
    layer.batch_select_indices(torch.tensor([1, 2]))
    assert [rows(b) for b in range(2)] == [before[i] for i in (2, 0)] and layer.n_sequences == 2
    new = torch.arange(2 * 2 * 70 * 16, dtype=torch.float32).view(2, 2, 70, 16)
    layer.update(new, new)  # more than there are free rows
    assert layer.segment(3)[0][-70:].equal(new[1, 1]) and layer.seen == T + 70
    assert [r[: len(b)] for r, b in zip(rows(0), before[2])] == before[2]
    layer.crop(-70)
    assert [rows(b) for b in range(2)] == [before[i] for i in (2, 0)]
    places = [layer.segment(s)[2].tolist() for s in range(4)]
    layer.crop(-15)  # into what was cut
    assert [layer.segment(s)[2].tolist() for s in range(4)] == [[p for p in old if p < T - 15] for old in places]
    assert layer.get_seq_length() == T - 15 and layer.get_mask_sizes(3) == (3, T - 15)
    for refused in (layer.reset, layer.offload, lambda: setattr(layer, "keys", new)):
        with pytest.raises(kvbudget.KVBudgetError):
            refused()
