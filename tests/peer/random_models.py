"""Compares logits of small random models of many shapes with transformers, in every precision.

usage: random_models.py KVBUDGET [--tokens 300] [--seed 1]
Models are made by transformers (llama architecture: MHA, GQA and MQA, odd head sizes, tied and own output
matrix, scaled RoPE, float32 and bfloat16 tensors) and written as GGUF. The reference is transformers in float64.
Allowed errors: for f32 4 times and for bf16x3 4 x 16 times that of transformers in float32, for bf16 1.5 times that of
transformers in bfloat16. Ends with PASS or FAIL. Needs torch, transformers >= 4.56, < 5.3, gguf, numpy.
"""
import argparse
import copy
import os
import subprocess
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import gguf_models
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128
}
SHAPES = {
    "gqa 3:1": dict(hidden_size=192, num_attention_heads=6, num_key_value_heads=2, intermediate_size=500),
    "mha, head size 80": dict(hidden_size=320, num_attention_heads=4, num_key_value_heads=4, intermediate_size=700),
    "mqa 8:1": dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=1, intermediate_size=333),
    "head size 128, not width / heads": dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2,
                                             head_dim=128, intermediate_size=512),
    "head size 6, five heads": dict(hidden_size=30, num_attention_heads=5, num_key_value_heads=5, intermediate_size=77),
    "own output matrix, theta 500000": dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2,
                                            intermediate_size=256, tie_word_embeddings=False, rope_theta=500000.0),
    "llama3 rope": dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256,
                        rope_theta=500000.0, rope_scaling=LLAMA3),
    "linear rope": dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256,
                        rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "one layer, wide": dict(hidden_size=1536, num_attention_heads=12, num_key_value_heads=4, intermediate_size=4096,
                            num_hidden_layers=1),
}
# times the error of transformers in that type
FACTORS = {"f32": (torch.float32, 4), "bf16x3": (torch.float32, 64), "bf16": (torch.bfloat16, 1.5)}


def logits_in(model, ids, kind):
    """Returns logits of transformers computed in `kind`, without changing the model."""
    clone = copy.deepcopy(model).to(kind)
    clone.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # its frequencies are float32 in every engine
    with torch.no_grad():
        return clone(ids).logits[0].double().numpy()


p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("program")
p.add_argument("--tokens", type=int, default=300)
p.add_argument("--seed", type=int, default=1)
a = p.parse_args()

torch.manual_seed(a.seed)
vocabulary, good = 1000, True
with tempfile.TemporaryDirectory() as folder:
    for name, shape in SHAPES.items():
        for bfloat16 in (False, True):
            shape = {"num_hidden_layers": 3, "tie_word_embeddings": True, **shape}
            # Large weights, so that attention is far from uniform.
            config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=2048, initializer_range=0.15, **shape)
            model = LlamaForCausalLM(config).eval()
            if bfloat16:
                for parameter in model.parameters():
                    parameter.data = parameter.data.to(torch.bfloat16).float()
            path = f"{folder}/random.gguf"
            gguf_models.write(model, path, torch.bfloat16 if bfloat16 else torch.float32)
            ids = torch.randint(20, vocabulary, (1, a.tokens))
            np.save(f"{folder}/ids.npy", ids[0].numpy().astype("<i4"))
            exact = logits_in(model, ids, torch.float64)
            error = {
                kind: np.abs(logits_in(model, ids, kind) - exact).max()
                for kind in (torch.float32, torch.bfloat16)
            }
            for compute, (kind, factor) in FACTORS.items():
                subprocess.run([
                    os.path.join(os.path.dirname(a.program), "tests/logits"), path, f"{folder}/ids.npy",
                    f"{folder}/logits.npy", "cpu", compute
                ], check=True)
                off = np.abs(np.load(f"{folder}/logits.npy") - exact).max()
                fine = bool(off <= factor * error[kind])
                good &= fine
                print(
                    f"{name:34} {'bf16' if bfloat16 else 'f32 '} weights, --compute {compute:6}: off by {off:.1e}, "
                    f"{off / error[kind]:5.2f} times "
                    f"transformers in {str(kind)[6:]}{'' if fine else '   FAIL'}", flush=True)
print("PASS" if good else "FAIL")
