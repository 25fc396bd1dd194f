// One line per tensor: role and field of struct model_layer, GGUF name (after "blk.N."), Hugging Face name (after
// "model.layers.N."), rows, columns, and the switches (family.h) that decide whether a model has it: all of `with` and
// none of `without`. Sizes: queries = H*d, keys = G*d, width = D, ffn = F, head = d, heads = H, kv_heads = G, experts =
// E. Layers with experts have no gate, up and down of their own, and only they have a router; model_tensors.c handles
// the experts' own tensors.
#pragma once

// Matrices. The oracle and CriticalKV need W_O's rows.
#define LAYER_MATRICES(X)                                                                  \
    X(WQ, wq, "attn_q.weight", "self_attn.q_proj.weight", queries, width, 0, FUSED_QKV)    \
    X(WK, wk, "attn_k.weight", "self_attn.k_proj.weight", keys, width, 0, FUSED_QKV)       \
    X(WV, wv, "attn_v.weight", "self_attn.v_proj.weight", keys, width, 0, FUSED_QKV)       \
    X(GATE, gate, "ffn_gate.weight", "mlp.gate_proj.weight", ffn, width, 0, FUSED_GATE_UP) \
    X(UP, up, "ffn_up.weight", "mlp.up_proj.weight", ffn, width, 0, FUSED_GATE_UP)         \
    X(DOWN, down, "ffn_down.weight", "mlp.down_proj.weight", width, ffn, 0, 0)             \
    X(WO, wo, "attn_output.weight", "self_attn.o_proj.weight", width, queries, 0, 0)       \
    X(ROUTER, router, "ffn_gate_inp.weight", "mlp.gate.weight", experts, width, EXPERTS, 0)

// Matrices that hold the rows of several of the above, one after the other.
#define LAYER_FUSED(X)                                                                               \
    X(WQKV, "attn_qkv.weight", "self_attn.qkv_proj.weight", queries + 2 * keys, width, FUSED_QKV, 0) \
    X(GATE_UP, "ffn_up.weight", "mlp.gate_up_proj.weight", 2 * ffn, width, FUSED_GATE_UP, 0)

#define LAYER_VECTORS(X)                                                                                              \
    X(ATTN_NORM, attn_norm, "attn_norm.weight", "input_layernorm.weight", 1, width, 0, NO_PRE_NORMS)                  \
    X(FFN_NORM, ffn_norm, "ffn_norm.weight", "post_attention_layernorm.weight", 1, width, 0, NO_PRE_NORMS | PARALLEL) \
    X(ATTN_POST, attn_post, "post_attention_norm.weight", "post_attention_layernorm.weight", 1, width, POST_NORMS, 0) \
    X(FFN_POST, ffn_post, "post_ffw_norm.weight", "post_feedforward_layernorm.weight", 1, width, POST_NORMS, 0)       \
    X(Q_BIAS, q_bias, "attn_q.bias", "self_attn.q_proj.bias", 1, queries, QKV_BIAS, 0)                                \
    X(K_BIAS, k_bias, "attn_k.bias", "self_attn.k_proj.bias", 1, keys, QKV_BIAS, 0)                                   \
    X(V_BIAS, v_bias, "attn_v.bias", "self_attn.v_proj.bias", 1, keys, QKV_BIAS, 0)                                   \
    X(O_BIAS, o_bias, "attn_output.bias", "self_attn.o_proj.bias", 1, width, O_BIAS, 0)                               \
    X(Q_NORM, q_norm, "attn_q_norm.weight", "self_attn.q_norm.weight", 1, head, QK_NORM, 0)                           \
    X(K_NORM, k_norm, "attn_k_norm.weight", "self_attn.k_norm.weight", 1, head, QK_NORM, 0)                           \
    X(Q_ROW_NORM, q_row_norm, "attn_q_norm.weight", "self_attn.q_norm.weight", 1, queries, QK_ROW_NORM, 0)            \
    X(K_ROW_NORM, k_row_norm, "attn_k_norm.weight", "self_attn.k_norm.weight", 1, keys, QK_ROW_NORM, 0)               \
    X(Q_HEAD_NORM, q_head_norm, "attn_q_norm.weight", "self_attn.q_norm.weight", heads, head, QK_HEAD_NORM, 0)        \
    X(K_HEAD_NORM, k_head_norm, "attn_k_norm.weight", "self_attn.k_norm.weight", kv_heads, head, QK_HEAD_NORM, 0)     \
    X(GATE_BIAS, gate_bias, "ffn_gate.bias", "mlp.gate_proj.bias", 1, ffn, MLP_BIAS, 0)                               \
    X(UP_BIAS, up_bias, "ffn_up.bias", "mlp.up_proj.bias", 1, ffn, MLP_BIAS, 0)                                       \
    X(DOWN_BIAS, down_bias, "ffn_down.bias", "mlp.down_proj.bias", 1, width, MLP_BIAS, 0)                             \
    X(SINKS, sinks, "attn_sinks.weight", "self_attn.sinks", 1, heads, SINKS, 0)                                       \
    X(ROUTER_BIAS, router_bias, "ffn_gate_inp.bias", "mlp.router.bias", 1, experts, EXPERT_BIAS, 0)

typedef enum tensor_role {
#define ROLE(role, ...) TENSOR_##role,
    LAYER_MATRICES(ROLE) LAYER_FUSED(ROLE) LAYER_VECTORS(ROLE)
#undef ROLE
        N_TENSOR_ROLES
} tensor_role;
