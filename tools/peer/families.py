"""Every family of models against transformers: a small random model, saved as safetensors and as GGUF.

usage: families.py KVBUDGET [--only NAME,...] [--tokens 300] [--compute f32] [--keep FOLDER]
Compares logits of all positions (within 1e-3 and 1e-4 of their range), of both files, and oracle importance (within
1e-4 of each head's maximum), on token ids. The contexts reach past the original length of scaled rotary positions.
Ends with PASS or FAIL.
Needs torch, transformers >= 5.2, numpy, h5py, gguf.
"""

import argparse
import copy
import json
import pathlib
import subprocess
import sys
import tempfile

import gguf_families
import h5py
import numpy as np
import torch
import transformers

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("kvbudget")
p.add_argument("--only", default="", help="names, commas between")
p.add_argument("--tokens", type=int, default=300)
p.add_argument("--compute", default="f32")
p.add_argument("--keep", help="write the models here")
p.add_argument("--fixtures", help="write the tiny models of tests/unit/test_profiler_families.c here, and no more")
a = p.parse_args()

VOCABULARY, SUFFIX, ANSWER = 199, 7, 9
small = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)


def heads(n, groups, d):
    return dict(num_attention_heads=n, num_key_value_heads=groups, head_dim=d)


def rope(kind, **more):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **more))


even = [1.0 + 0.05 * i for i in range(8)]
MODELS = {  # name: (model type, settings)
    "llama": ("llama", heads(4, 4, 16)),
    "llama-bias": ("llama", dict(attention_bias=True, mlp_bias=True, **heads(6, 2, 24))),
    "llama3": (
        "llama",
        dict(
            **heads(8, 1, 16),
            **rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
            ),
        ),
    ),
    "llama-linear": ("llama", dict(**heads(4, 1, 16), **rope("linear", factor=4.0))),
    "llama-yarn": ("llama", dict(**heads(5, 1, 24), **rope("yarn", factor=8.0, original_max_position_embeddings=64))),
    "llama-dynamic": ("llama", dict(**heads(4, 2, 16), **rope("dynamic", factor=4.0), max_position_embeddings=128)),
    "mistral": ("mistral", dict(sliding_window=None, **heads(6, 2, 24))),
    "mistral-window": ("mistral", dict(sliding_window=40, **heads(6, 2, 24))),
    "qwen2-window": (
        "qwen2",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=4,
            use_sliding_window=True,
            sliding_window=40,
            max_window_layers=2,
        ),
    ),
    "qwen2": ("qwen2", dict(num_attention_heads=4, num_key_value_heads=2)),
    "qwen3": ("qwen3", heads(7, 1, 24)),
    "phi3": ("phi3", dict(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, sliding_window=None)),
    "phi3-longrope": (
        "phi3",
        dict(
            num_attention_heads=4,
            num_key_value_heads=1,
            pad_token_id=0,
            sliding_window=None,
            original_max_position_embeddings=64,
            **rope("longrope", short_factor=even, long_factor=[4 * x for x in even]),
        ),
    ),
    "phi4-mini": (
        "phi3",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            sliding_window=None,
            **rope("default", partial_rotary_factor=0.75),
        ),
    ),
    "granite": (
        "granite",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.1,
            logits_scaling=8.0,
        ),
    ),
    "smollm3": (
        "smollm3",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=5,
            pad_token_id=0,
            use_sliding_window=False,
            no_rope_layer_interval=2,
        ),
    ),
    "smollm3-fourth": (
        "smollm3",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=5,
            pad_token_id=0,
            use_sliding_window=False,
            no_rope_layer_interval=4,
        ),
    ),
    "qwen3-moe": (
        "qwen3_moe",
        dict(
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            num_hidden_layers=3,
            **heads(4, 1, 16),
        ),
    ),
    "mixtral": (
        "mixtral",
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=None,
            num_attention_heads=6,
            num_key_value_heads=2,
            hidden_size=96,
        ),
    ),
    "olmoe": (
        "olmoe",
        dict(num_experts=6, num_experts_per_tok=3, norm_topk_prob=False, num_attention_heads=4, num_key_value_heads=2),
    ),
    "gpt-oss": (
        "gpt_oss",
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=40,
            num_hidden_layers=4,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=150000.0,
                factor=32.0,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=False,
                original_max_position_embeddings=64,
            ),
            **heads(8, 1, 16),
        ),
    ),
    "gemma2": (
        "gemma2",
        dict(
            sliding_window=40,
            num_hidden_layers=4,
            query_pre_attn_scalar=24,
            tie_word_embeddings=True,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
            **heads(6, 2, 24),
        ),
    ),
    "gemma3": (
        "gemma3_text",
        dict(
            sliding_window=40,
            sliding_window_pattern=2,
            num_hidden_layers=4,
            query_pre_attn_scalar=24,
            tie_word_embeddings=True,
            **heads(4, 2, 24),
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
                sliding_attention=dict(rope_type="default", rope_theta=10000.0),
            ),
        ),
    ),
    "glm4": (
        "glm4",
        dict(attention_bias=True, pad_token_id=0, **heads(6, 2, 16), **rope("default", partial_rotary_factor=0.5)),
    ),
    "exaone4": ("exaone4", dict(sliding_window=40, sliding_window_pattern=4, num_hidden_layers=4, **heads(5, 1, 16))),
    "cohere": (
        "cohere",
        dict(num_attention_heads=4, num_key_value_heads=2, logit_scale=0.25, pad_token_id=0, tie_word_embeddings=True),
    ),
    "cohere2": (
        "cohere2",
        dict(
            sliding_window=40,
            num_hidden_layers=4,
            logit_scale=0.25,
            pad_token_id=0,
            tie_word_embeddings=True,
            **heads(4, 2, 16),
        ),
    ),
    "olmo3": (
        "olmo3",
        dict(
            sliding_window=40,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            hidden_size=96,
            pad_token_id=0,
        ),
    ),
    "olmo2": ("olmo2", dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=96)),
}


# What the container cannot say, or our reader refuses there: biases of queries, keys and values where the architecture
# has none of its own, which layers are without experts, and which do not rotate, if it is not every fourth.
NOT_IN_GGUF = {"glm4", "llama-bias", "qwen3-moe", "smollm3"}


def make(kind, settings, folder, dtype=torch.float32):
    config = transformers.AutoConfig.for_model(kind, **{**small, **settings})
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    m = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, w in m.named_parameters():
            if name.endswith("bias") or "sinks" in name:
                w.normal_(0, 0.3)
            elif "norm" in name:
                w.add_(0.2 * torch.randn_like(w))
            else:
                w.normal_(
                    0, (1.6 if "q_proj" in name or "k_proj" in name or "qkv" in name else 1.0) * w.shape[-1] ** -0.5
                )
            w.copy_(w.to(dtype))  # what is saved is what is compared
    copy.deepcopy(m).to(dtype).save_pretrained(folder)
    return m


def run(*arguments):
    done = subprocess.run([a.kvbudget, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, arguments))}: {done.stderr.strip()}")


def value_weights(layer, v):
    """w [H,T] of values v [G,T,d]: the norm of v W_O over the layer's sum, W_O diag(w) before a norm."""
    w_o, (G, T, d) = layer.self_attn.o_proj.weight.double(), v.shape
    gemma = "Gemma" in type(layer).__name__
    norm = getattr(layer, "post_self_attn_layernorm", None) or (
        layer.post_attention_layernorm if hasattr(layer, "post_feedforward_layernorm") else None
    )
    if norm is not None:
        w_o = (norm.weight.double() + gemma)[:, None] * w_o
    H = w_o.shape[1] // d
    n = torch.stack([(v[h // (H // G)].double() @ w_o[:, h * d : (h + 1) * d].T).norm(dim=-1) for h in range(H)])
    return n / (n.sum() + 1e-9)


def full_layers(m):
    """Layers without a window: those that are budgeted."""
    kinds = (
        getattr(m.config, "layer_types", None)
        or ["sliding_attention" if getattr(m.config, "sliding_window", None) else "full_attention"]
        * m.config.num_hidden_layers
    )
    return [l for l, kind in enumerate(kinds) if kind == "full_attention"]


def oracle(m, ids, T, first):
    """I [B,G,T] of the layers that are budgeted, of the rows from `first` to the last but one."""
    out = m(ids[None], output_attentions=True, use_cache=True)
    best = []
    for l in full_layers(m):
        layer = m.model.layers[l]
        v = out.past_key_values.layers[l].values[0][:, :T]
        x = out.attentions[l][0, :, first:-1, :T].double().amax(1) * value_weights(layer, v)
        best.append(x.reshape(v.shape[0], -1, T).amax(1))
    return torch.stack(best)


def compare(name, kind, settings, folder):
    m = make(kind, settings, folder)
    T = a.tokens
    ids = torch.randint(1, VOCABULARY, (T + SUFFIX + ANSWER,), generator=torch.Generator().manual_seed(2))
    np.save(folder / "ids.npy", ids[:T].numpy().astype(np.int32))
    run("logits", folder, folder / "ids.npy", "-o", folder / "logits.npy", "--compute", a.compute)
    theirs = m(ids[None, :T]).logits[0].numpy()
    difference = np.abs(np.load(folder / "logits.npy") - theirs).max()
    span = theirs.max() - theirs.min()
    in_gguf = name not in NOT_IN_GGUF and gguf_families.write(m, folder / "model.gguf")
    if in_gguf:
        run("logits", folder / "model.gguf", folder / "ids.npy", "-o", folder / "gguf.npy", "--compute", a.compute)
        difference = max(difference, np.abs(np.load(folder / "gguf.npy") - theirs).max())
    shown = f"{name:16s} folder{' and GGUF' if in_gguf else ''}: logits {difference:.1e} of a range of {span:.1f}"
    if not full_layers(m):  # nothing to budget
        good = difference <= 1e-3 and difference <= 1e-4 * span
        print(
            f"{shown}, every layer has a window: {'same' if good else 'DIFFERENT'}",
            flush=True,
        )
        return good
    line = {
        "sample_id": "one",
        "context_ids": ids[:T].tolist(),
        "question_ids": [ids[T : T + SUFFIX].tolist()],
        "answer_ids": [ids[T + SUFFIX :].tolist()],
    }
    (folder / "calib.jsonl").write_text(json.dumps(line) + "\n")
    run(
        "profile",
        folder,
        folder / "calib.jsonl",
        "-o",
        folder / "run.h5",
        "--force",
        "--quiet",
        "-m",
        "keydiff",
        "--compute",
        a.compute,
    )
    with h5py.File(folder / "run.h5") as f:
        ours = torch.from_numpy(f["contexts/one/questions/0/oracle"][:]).double()
    relative = 0.0
    if (
        name != "llama-dynamic"
    ):  # its angles change with every token: transformers rotates cached keys and queries differently
        wanted = oracle(m, ids, T, T + SUFFIX)
        relative = ((ours - wanted).abs() / wanted.amax(-1, keepdim=True)).max().item()
    good = difference <= 1e-3 and difference <= 1e-4 * span and relative <= 1e-4
    print(
        f"{shown}, oracle {relative:.1e}: {'same' if good else 'DIFFERENT'}",
        flush=True,
    )
    return good


FIXTURES = [
    "llama",
    "mistral",
    "qwen2-window",
    "qwen3",
    "phi3",
    "granite",
    "smollm3",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "qwen3-moe",
    "mixtral",
    "olmoe",
    "glm4",
    "exaone4",
    "cohere",
    "cohere2",
]
TINY = dict(hidden_size=32, intermediate_size=16, vocab_size=61)


def write_fixture(name, folder):
    """A model in bfloat16, the last logits of 100 tokens, and the oracle of 6 answer tokens behind 3 more, float32."""
    kind, settings = MODELS[name]
    tiny = {**settings, **TINY}
    if "head_dim" in tiny or kind in ("llama", "qwen3"):
        tiny["head_dim"] = 8
    if "moe_intermediate_size" in tiny:
        tiny["moe_intermediate_size"] = 16
    if "num_attention_heads" in tiny and "head_dim" not in tiny:
        tiny["num_attention_heads"], tiny["num_key_value_heads"] = 4, 2  # a divisor of the width
    m = make(kind, tiny, folder, torch.bfloat16)
    T = 100
    ids = torch.tensor([(i * 37 + i * i % 11) % 60 + 1 for i in range(T + 9)])
    np.save(folder / "logits.npy", m(ids[None, :T]).logits[0, -8:].numpy())
    np.save(folder / "oracle.npy", oracle(m, ids, T, T + 3).float().numpy())
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)


if a.fixtures:
    with torch.no_grad():
        for name in FIXTURES:
            folder = pathlib.Path(a.fixtures) / name
            folder.mkdir(parents=True, exist_ok=True)
            write_fixture(name, folder)
    sys.exit()

good = True
with torch.no_grad(), tempfile.TemporaryDirectory() as scratch:
    for name, (kind, settings) in MODELS.items():
        if a.only and name not in a.only.split(","):
            continue
        folder = pathlib.Path(a.keep or scratch) / name
        folder.mkdir(parents=True, exist_ok=True)
        good &= compare(name, kind, settings, folder)
print("PASS" if good else "FAIL")
sys.exit(not good)
