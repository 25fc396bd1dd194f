"""Small models of transformers as GGUF files, for families.py and random_models.py, written with the gguf package.

Names, the order of rows and rotary factors are as in llama.cpp's converter."""

import gguf
import numpy as np
import torch

ARCHITECTURES = {
    "mistral": "llama",
    "ministral3": "mistral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "glm4": "glm4",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "mixtral": "llama",
    "llama": "llama",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "smollm3": "smollm3",
}
PAIRED = ("llama", "granite", "smollm3", "mistral3")  # rows of queries and keys are in pairs
NORM_NAMES = {
    "olmo2": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    "exaone4": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    "gemma2": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
}
NORM_NAMES["gemma3"] = NORM_NAMES["gemma2"]
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}


TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
CANNOT = ("dynamic",)  # rotary scaling that GGUF cannot describe


def permute(w, heads):
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def expert_tensors(arch, part, w):
    """Returns the tensors of experts; transformers has gate and up in one tensor."""
    bias = part.endswith("_bias")
    part, kind = part.removesuffix("_bias"), "bias" if bias else "weight"
    if arch == "gpt-oss" and not bias:
        w = w.swapaxes(1, 2)  # [E, in, out] in transformers
    if part == "down_proj":
        return [(f"ffn_down_exps.{kind}", w)]
    half = w.shape[1] // 2
    gate, up = (w[:, ::2], w[:, 1::2]) if arch == "gpt-oss" else (w[:, :half], w[:, half:])
    return [(f"ffn_gate_exps.{kind}", gate), (f"ffn_up_exps.{kind}", up)]


def layer_tensors(arch, c, name, w):
    """Returns [(GGUF name after blk.N., values)] for one tensor of a layer."""
    stem, kind = name.rsplit(".", 1) if name.endswith((".weight", ".bias")) else (name, "weight")
    if stem == "self_attn.sinks":
        return [("attn_sinks.weight", w)]
    if stem.startswith("mlp.experts."):
        return expert_tensors(arch, stem.split(".")[-1], w)
    if arch in PAIRED and stem == "self_attn.q_proj":
        w = permute(w, c.num_attention_heads)
    if arch in PAIRED and stem == "self_attn.k_proj":
        w = permute(w, c.num_key_value_heads)
    if "norm" in stem and arch.startswith("gemma"):
        w = w + 1
    return [(f"{NORM_NAMES.get(arch, {}).get(stem) or NAMES[stem]}.{kind}", w)]


def rope_of(c):
    """Returns rotary settings of the layers without a window in the form of transformers 5."""
    r = getattr(c, "rope_parameters", None) or dict(c.rope_scaling or {}, rope_theta=c.rope_theta)
    return {"rope_type": "default"} | r.get("full_attention", r)


def add_rope(g, c, head):
    r = rope_of(c)
    kind, turning = r["rope_type"], int(head * (r.get("partial_rotary_factor") or 1))
    g.add_rope_dimension_count(turning)
    g.add_rope_freq_base(r["rope_theta"])
    if kind in ("linear", "yarn", "longrope"):
        g.add_rope_scaling_type(gguf.RopeScalingType(kind))
        g.add_rope_scaling_factor(r.get("factor") or 1.0)
        original = r.get("original_max_position_embeddings") or getattr(c, "original_max_position_embeddings", None)
        if original:
            g.add_rope_scaling_orig_ctx_len(original)
    if "llama_4_scaling_beta" in r:
        g.add_attn_temperature_scale(r["llama_4_scaling_beta"])
        g.add_rope_scaling_yarn_log_mul(r["mscale_all_dim"])
    if kind == "longrope":
        for length in ("long", "short"):
            g.add_tensor(f"rope_factors_{length}.weight", np.array(r[f"{length}_factor"], np.float32))
    if kind == "llama3":
        plain = r["rope_theta"] ** -(np.arange(0, turning, 2) / turning)
        turns = r["original_max_position_embeddings"] * plain / (2 * np.pi)  # rotations within the original context
        low, high = r["low_freq_factor"], r["high_freq_factor"]
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        factors = 1 / ((1 - smooth) / r["factor"] + smooth)
        g.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def add_numbers(g, arch, c):
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    g.add_block_count(c.num_hidden_layers)
    g.add_context_length(c.max_position_embeddings)
    g.add_embedding_length(c.hidden_size)
    g.add_feed_forward_length(c.intermediate_size)
    g.add_head_count(c.num_attention_heads)
    g.add_head_count_kv(c.num_key_value_heads)
    g.add_key_length(head)
    g.add_value_length(head)
    add_rope(g, c, head)
    if hasattr(c, "rms_norm_eps"):
        g.add_layer_norm_rms_eps(c.rms_norm_eps)
    else:
        g.add_layer_norm_eps(c.layer_norm_eps)
    window = getattr(c, "sliding_window", None)
    if window and getattr(c, "use_sliding_window", True):
        kinds = getattr(c, "layer_types", None) or ["sliding_attention"] * c.num_hidden_layers
        g.add_sliding_window(window)
        g.add_sliding_window_pattern([kind != "full_attention" for kind in kinds])
    experts = getattr(c, "num_experts", None) or getattr(c, "num_local_experts", None)
    if experts:
        g.add_expert_count(experts)
        g.add_expert_used_count(c.num_experts_per_tok)
        g.add_expert_feed_forward_length(getattr(c, "moe_intermediate_size", None) or c.intermediate_size)
    if getattr(c, "attn_logit_softcapping", None):
        g.add_attn_logit_softcapping(c.attn_logit_softcapping)
        g.add_final_logit_softcapping(c.final_logit_softcapping)
    if getattr(c, "clip_qkv", None):
        g.add_clamp_kqv(c.clip_qkv)
    if hasattr(c, "logit_scale"):
        g.add_logit_scale(c.logit_scale)
    if arch == "granite":
        g.add_embedding_scale(c.embedding_multiplier)
        g.add_residual_scale(c.residual_multiplier)
        g.add_attention_scale(c.attention_multiplier)
        g.add_logit_scale(c.logits_scaling)


def write(m, path, dtype=torch.float32):
    """Writes a GGUF file, matrices in float32 or bfloat16. Returns False if GGUF lacks the family or its positions."""
    c = m.config
    arch = ARCHITECTURES.get(c.model_type)
    if not arch or rope_of(c)["rope_type"] in CANNOT:
        return False
    g = gguf.GGUFWriter(path, arch)
    g.add_name("random")
    add_numbers(g, arch, c)

    def add(name, values):
        values = torch.from_numpy(np.ascontiguousarray(values))
        if dtype == torch.bfloat16 and values.dim() > 1:
            stored = values.to(dtype).view(torch.int16).numpy().view(np.uint8)
            g.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            g.add_tensor(name, values.numpy())

    for name, w in m.state_dict().items():
        w = w.float().numpy()
        if name.startswith("model.layers."):
            layer, rest = name.removeprefix("model.layers.").split(".", 1)
            for own, values in layer_tensors(arch, c, rest, w):
                add(f"blk.{layer}.{own}", values)
        elif name != "lm_head.weight" or not c.tie_word_embeddings:
            stem = name.removesuffix(".weight")
            add(f"{TOP[stem]}.weight", w + 1 if stem == "model.norm" and arch.startswith("gemma") else w)
    g.write_header_to_file()
    g.write_kv_data_to_file()
    g.write_tensors_to_file()
    g.close()
    return True
