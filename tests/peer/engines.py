"""Runs a table in another engine, OpenVINO's CPU runtime, with one cache per KV head, each of its own length.

usage: engines.py MODEL TABLE [--ratios 0.5 0.8] [--tokens 2048] [--new 32] [--text FILE...] [--pairs 3]
MODEL (a GGUF or a Hugging Face folder of the Llama or Qwen2 kind) becomes an OpenVINO model whose state is a key and a
value array [rows, d] for each KV head. The engine prefills the text; the table's budgets and KeyDiff or key norms of
the engine's own keys choose rows; the states are replaced by those rows, so the memory is freed; and the engine goes on
decoding. PASS: logits of --new forced tokens equal those of kvbudget.compress in transformers to 1e-3, and every state
has the table's rows. Also printed: bytes of all states before and after, and the median step of the cut caches relative
to that of the full ones, in turns. Needs openvino, gguf, and the package kvbudget in PYTHONPATH with KVBUDGET_LIBRARY.
"""
import argparse
import statistics
import sys
import time

import hf_model
import kvbudget
import numpy as np
import openvino as ov
import torch
from openvino._offline_transformations import apply_make_stateful_transformation
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

CHUNK = 256


class Steps(torch.nn.Module):
    """Passes tokens through all layers, with a cache of its own length per KV head: ids [1, n], positions [1, n], then
    keys and values [rows, d] of every head. Returns the last token's logits and the caches with the new rows."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def attend(self, layer, q, k, v, past):
        groups = q.shape[1] // k.shape[1]
        out, grown = [], []
        for g in range(k.shape[1]):
            keys, values = torch.cat([past[2 * g], k[0, g]]), torch.cat([past[2 * g + 1], v[0, g]])
            rows, new = keys.shape[0], q.shape[2]
            seen = torch.arange(rows)[None] <= torch.arange(new)[:, None] + rows - new
            scores = q[0, g * groups : (g + 1) * groups] @ keys.T * layer.self_attn.scaling
            out.append(torch.where(seen[None], scores, -torch.inf).softmax(-1) @ values)
            grown += [keys, values]
        return torch.cat(out), grown

    def forward(self, ids, positions, *past):
        core = self.model.model
        x, grown = core.embed_tokens(ids), []
        cos, sin = core.rotary_emb(x, positions)
        for n, layer in enumerate(core.layers):
            a, y = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (p(y).unflatten(-1, (-1, a.head_dim)).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            heads = 2 * k.shape[1]
            o, now = self.attend(layer, q, k, v, past[n * heads : (n + 1) * heads])
            grown += now
            x = x + a.o_proj(o.transpose(0, 1).flatten(1)[None])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(core.norm(x[:, -1])), *grown


class Engine:
    def __init__(self, model):
        c = model.config
        self.layers, self.heads = c.num_hidden_layers, c.num_key_value_heads
        self.dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        names = [f"{side}.{n}.{g}" for n in range(self.layers) for g in range(self.heads) for side in "kv"]
        example = [torch.zeros(1, 3, dtype=torch.long), torch.arange(3)[None]]
        example += [torch.zeros(2, self.dim) for _ in names]
        with torch.no_grad():
            made = ov.convert_model(Steps(model), example_input=tuple(example))
        for i, port in enumerate(made.inputs):
            port.get_tensor().set_names({(["ids", "positions"] + names)[i]})
        for i, port in enumerate(made.outputs):
            port.get_tensor().set_names({(["logits"] + [f"new.{name}" for name in names])[i]})
        made.reshape({i: [1, -1] if i < 2 else [-1, self.dim] for i in range(2 + len(names))})
        apply_make_stateful_transformation(made, {name: f"new.{name}" for name in names})
        self.request = ov.Core().compile_model(made, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
        self.names = names

    def clear(self):
        self.put({name: np.zeros((0, self.dim), np.float32) for name in self.names})

    def states(self):
        return {state.name.split("new.")[0]: state for state in self.request.query_state()}  # names are joined

    def put(self, arrays):
        for name, state in self.states().items():
            state.state = ov.Tensor(np.ascontiguousarray(arrays[name]))

    def take(self):
        return {name: state.state.data.copy() for name, state in self.states().items()}

    def rows(self):
        states = self.states()
        return np.array([[states[f"k.{n}.{g}"].state.shape[0] for g in range(self.heads)] for n in range(self.layers)])

    def bytes(self):
        return sum(state.state.byte_size for state in self.states().values())

    def run(self, ids, first):
        out = self.request.infer({"ids": np.array([ids], np.int64),
                                  "positions": np.arange(first, first + len(ids), dtype=np.int64)[None]})
        return out["logits"][0].copy()

    def prefill(self, ids):
        self.clear()
        for first in range(0, len(ids), CHUNK):
            self.run(ids[first : first + CHUNK], first)

    def cut(self, arrays, table, ratio, tokens):
        """Replaces every head's state by the rows that it keeps according to the table."""
        keep, kept = table.keep(ratio, tokens, strict=True), {}
        for n in range(self.layers):
            for g in range(self.heads):
                keys = arrays[f"k.{n}.{g}"]
                places = kvbudget.select(score(table, keys), int(keep[n, g]), table.info.sink, table.info.window)
                for side in "kv":
                    kept[f"{side}.{n}.{g}"] = arrays[f"{side}.{n}.{g}"][places]
        self.put(kept)
        return keep


def score(table, keys):
    norms = np.linalg.norm(keys, axis=1, keepdims=True)
    if table.info.metric.startswith("knorm"):
        return -norms[:, 0]
    unit = keys / np.maximum(norms, 1e-12)
    anchor = unit.mean(0)
    return -(unit @ (anchor / np.linalg.norm(anchor)))


def forced(step, ids, first):
    """Returns the logits after each of the ids, and the median time of a step."""
    rows, times = [], []
    for i, one in enumerate(ids):
        start = time.perf_counter()
        rows.append(step([one], first + i))
        times.append(time.perf_counter() - start)
    return np.stack(rows), statistics.median(times)


def of_transformers(model, ids, new, table, ratio):
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), kvbudget.compress(model, table, ratio) as run:
        model(torch.tensor([ids]), past_key_values=cache)
        rows = [model(torch.tensor([[one]]), past_key_values=cache).logits[0, -1] for one in new]
    return torch.stack(rows).numpy(), run.report()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("table")
    p.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.8])
    p.add_argument("--tokens", type=int, default=2048)
    p.add_argument("--new", type=int, default=32)
    p.add_argument("--text", nargs="+", default=["LICENSE"], help="one behind the other; repeated if too short")
    p.add_argument("--pairs", type=int, default=3, help="turns of both caches, of --new steps each")
    a = p.parse_args()
    table = kvbudget.Table(a.table)
    if not table.info.metric.startswith(("keydiff", "knorm")):
        sys.exit(f"{a.table}: expected a table for keydiff or knorm, which need the engine's keys alone, found one for "
                 f"{table.info.metric}")
    model, tokenizer = hf_model.load(a.model)
    if model.config.model_type not in ("llama", "qwen2"):
        sys.exit(f"{a.model}: expected a model of the kind llama or qwen2, found {model.config.model_type}")
    text = "".join(open(name, encoding="utf-8").read() for name in a.text)
    text = tokenizer(text, add_special_tokens=False).input_ids
    while len(text) < a.tokens + a.new:
        text += text
    ids, new = text[: a.tokens], text[a.tokens : a.tokens + a.new]
    engine = Engine(model)
    engine.prefill(ids)
    whole, full = engine.take(), engine.bytes()
    failed = 0
    for ratio in a.ratios:
        times = {"full": [], "cut": []}
        for _ in range(a.pairs):
            engine.put(whole)
            times["full"].append(forced(engine.run, new, a.tokens)[1])
            keep = engine.cut(whole, table, ratio, a.tokens)
            wrong, cut = int((engine.rows() != keep).sum()), engine.bytes()
            logits, step = forced(engine.run, new, a.tokens)
            times["cut"].append(step)
        ours, report = of_transformers(model, ids, new, a.table, ratio)
        apart, same = float(np.abs(ours - logits).max()), float((ours.argmax(1) == logits.argmax(1)).mean())
        good = apart < 1e-3 and wrong == 0
        failed += not good
        share = statistics.median(c / f for c, f in zip(times["cut"], times["full"]))
        print(f"{'PASS' if good else 'FAIL'} ratio {ratio}: logits within {apart:.1e}, likeliest tokens "
              f"{100 * same:.0f} % the same; {wrong} heads have other rows than the table's ({keep.min()} to "
              f"{keep.max()} of {a.tokens}); {full / 2**20:.1f} MiB of states become {cut / 2**20:.1f} "
              f"({report.saved:.3f} saved in transformers); a step takes "
              f"{1e3 * statistics.median(times['full']):.1f} ms with the full cache, {share:.2f} of that with the cut "
              "one", flush=True)
    print(f"{len(a.ratios) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
