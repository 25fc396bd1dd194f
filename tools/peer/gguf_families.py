"""The models of families.py as GGUF files, written with the gguf package.

Names and the order of rows are those of llama.cpp's converter."""

import gguf
import numpy as np

ARCHITECTURES = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "exaone4": "exaone4",
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
PAIRED = ("llama", "granite", "smollm3")  # rows of queries and keys stand in pairs
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


def permute(w, heads):
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def layer_tensors(arch, c, name, w):
    """(GGUF name behind blk.N., values) of one tensor of a layer."""
    stem, kind = name.rsplit(".", 1) if name.endswith((".weight", ".bias")) else (name, "weight")
    if stem == "self_attn.sinks":
        return [("attn_sinks.weight", w)]
    if stem.startswith("mlp.experts."):
        part = stem.split(".")[-1]
        bias = part.endswith("_bias")
        part, kind = part.removesuffix("_bias"), "bias" if bias else "weight"
        if arch == "gpt-oss" and not bias:
            w = w.swapaxes(1, 2)  # [E, in, out] in transformers
        if part == "down_proj":
            return [(f"ffn_down_exps.{kind}", w)]
        half = w.shape[1] // 2
        gate, up = (w[:, ::2], w[:, 1::2]) if arch == "gpt-oss" else (w[:, :half], w[:, half:])
        return [(f"ffn_gate_exps.{kind}", gate), (f"ffn_up_exps.{kind}", up)]
    if arch in PAIRED and stem == "self_attn.q_proj":
        w = permute(w, c.num_attention_heads)
    if arch in PAIRED and stem == "self_attn.k_proj":
        w = permute(w, c.num_key_value_heads)
    if "norm" in stem and arch.startswith("gemma"):
        w = w + 1
    return [(f"{NORM_NAMES.get(arch, {}).get(stem) or NAMES[stem]}.{kind}", w)]


def add_numbers(g, arch, c):
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    r = c.rope_parameters.get("full_attention", c.rope_parameters)
    g.add_block_count(c.num_hidden_layers)
    g.add_context_length(c.max_position_embeddings)
    g.add_embedding_length(c.hidden_size)
    g.add_feed_forward_length(c.intermediate_size)
    g.add_head_count(c.num_attention_heads)
    g.add_head_count_kv(c.num_key_value_heads)
    g.add_key_length(head)
    g.add_value_length(head)
    g.add_rope_dimension_count(int(head * (r.get("partial_rotary_factor") or 1)))
    g.add_rope_freq_base(r["rope_theta"])
    if hasattr(c, "rms_norm_eps"):
        g.add_layer_norm_rms_eps(c.rms_norm_eps)
    else:
        g.add_layer_norm_eps(c.layer_norm_eps)
    if r["rope_type"] in ("linear", "yarn"):
        g.add_rope_scaling_type(gguf.RopeScalingType(r["rope_type"]))
        g.add_rope_scaling_factor(r["factor"])
        if "original_max_position_embeddings" in r:
            g.add_rope_scaling_orig_ctx_len(r["original_max_position_embeddings"])
    window = getattr(c, "sliding_window", None)
    if window and getattr(c, "use_sliding_window", True):
        g.add_sliding_window(window)
        g.add_sliding_window_pattern([k != "full_attention" for k in c.layer_types])
    experts = getattr(c, "num_experts", None) or getattr(c, "num_local_experts", None)
    if experts:
        g.add_expert_count(experts)
        g.add_expert_used_count(c.num_experts_per_tok)
        g.add_expert_feed_forward_length(getattr(c, "moe_intermediate_size", None) or c.intermediate_size)
    if getattr(c, "attn_logit_softcapping", None):
        g.add_attn_logit_softcapping(c.attn_logit_softcapping)
        g.add_final_logit_softcapping(c.final_logit_softcapping)
    if hasattr(c, "logit_scale"):
        g.add_logit_scale(c.logit_scale)
    if arch == "granite":
        g.add_embedding_scale(c.embedding_multiplier)
        g.add_residual_scale(c.residual_multiplier)
        g.add_attention_scale(c.attention_multiplier)
        g.add_logit_scale(c.logits_scaling)


def write(m, path):
    """False where the container does not have the family, or this writer not its rotary factors."""
    c = m.config
    arch = ARCHITECTURES.get(c.model_type)
    kind = c.rope_parameters.get("full_attention", c.rope_parameters)["rope_type"]
    if not arch or kind not in ("default", "linear", "yarn"):
        return False
    g = gguf.GGUFWriter(path, arch)
    g.add_name("families")
    add_numbers(g, arch, c)
    for name, w in m.state_dict().items():
        w = w.float().numpy()
        if name.startswith("model.layers."):
            layer, rest = name.removeprefix("model.layers.").split(".", 1)
            for own, values in layer_tensors(arch, c, rest, w):
                g.add_tensor(f"blk.{layer}.{own}", np.ascontiguousarray(values))
        elif name == "model.embed_tokens.weight":
            g.add_tensor("token_embd.weight", w)
        elif name == "model.norm.weight":
            g.add_tensor("output_norm.weight", w + 1 if arch.startswith("gemma") else w)
        elif not c.tie_word_embeddings:
            g.add_tensor("output.weight", w)
    g.write_header_to_file()
    g.write_kv_data_to_file()
    g.write_tensors_to_file()
    g.close()
    return True
