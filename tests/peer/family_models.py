"""Small random models of every family, made with transformers: unusual shapes, weights of realistic size, untrained.

Used by families.py, which compares them, and for the tiny ones in tests/golden/families. Together they have groups of
1, 3, 4, 5, 7 and 8 query heads, head sizes other than width / heads, and windows and original lengths below 100
positions.
"""

import copy
import json

import safetensors.torch
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

VOCABULARY = 199
COMMON = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
TINY = dict(hidden_size=32, intermediate_size=16, vocab_size=61)
# Seeds with which no row of a fixture is so close to a tie of two experts that bfloat16 chooses another.
FAR_FROM_TIES = {"mixtral": 17, "gpt-oss": 5}


def small(model_type, heads, kv_heads, head_dim=None, **settings):
    """Returns (model type, settings); head_dim None: width / heads, without an entry for it."""
    shape = dict(num_attention_heads=heads, num_key_value_heads=kv_heads)
    return model_type, shape | (dict(head_dim=head_dim) if head_dim else {}) | settings


def rope(kind, theta=10000.0, **more):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **more))


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
SHORT = [1.0 + 0.05 * i for i in range(8)]
LONGROPE = rope("longrope", short_factor=SHORT, long_factor=[4 * x for x in SHORT])
OSS_ROPE = dict(factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=64)
OSS = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=40, num_hidden_layers=4)
MINISTRAL_ROPE = dict(mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=64)
GEMMA3_ROPE = dict(
    full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
    sliding_attention=dict(rope_type="default", rope_theta=10000.0),
)
WINDOWS = dict(sliding_window=40, num_hidden_layers=4)
QWEN3_MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=40, norm_topk_prob=True)
SMOLLM3 = dict(num_hidden_layers=5, use_sliding_window=False)
COHERE = dict(logit_scale=2.0, tie_word_embeddings=True)
GEMMA2 = dict(query_pre_attn_scalar=24, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)
MODELS = {
    "llama": small("llama", 4, 4, 16),
    "llama-bias": small("llama", 6, 2, 24, attention_bias=True, mlp_bias=True),
    "llama3": small("llama", 8, 1, 16, **LLAMA3),
    "llama-linear": small("llama", 4, 1, 16, **rope("linear", factor=4.0)),
    "llama-yarn": small("llama", 5, 1, 24, **rope("yarn", factor=8.0, original_max_position_embeddings=64)),
    "llama-dynamic": small("llama", 4, 2, 16, **rope("dynamic", factor=4.0), max_position_embeddings=256),
    "mistral": small("mistral", 6, 2, 24, sliding_window=None),
    "mistral-window": small("mistral", 6, 2, 24, sliding_window=40),
    "ministral3": small(
        "ministral3", 6, 2, 24, **rope("yarn", 1000000.0, factor=16.0, llama_4_scaling_beta=0.1, **MINISTRAL_ROPE)
    ),
    "qwen2": small("qwen2", 4, 2),
    "qwen2-window": small("qwen2", 4, 2, use_sliding_window=True, max_window_layers=2, **WINDOWS),
    "qwen3": small("qwen3", 7, 1, 24),
    "phi3": small("phi3", 4, 2, sliding_window=None),
    "phi3-longrope": small("phi3", 4, 1, sliding_window=None, original_max_position_embeddings=64, **LONGROPE),
    "phi4-mini": small("phi3", 4, 2, sliding_window=None, **rope("default", partial_rotary_factor=0.75)),
    "granite": small(
        "granite",
        4,
        2,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
        logits_scaling=0.25,
    ),
    "smollm3": small("smollm3", 4, 2, no_rope_layer_interval=2, **SMOLLM3),
    "smollm3-fourth": small("smollm3", 4, 2, no_rope_layer_interval=4, **SMOLLM3),
    "qwen3-moe": small("qwen3_moe", 4, 1, 16, mlp_only_layers=[1], **(QWEN3_MOE | dict(num_hidden_layers=3))),
    "qwen3-moe-all": small("qwen3_moe", 4, 1, 16, **QWEN3_MOE),
    "mixtral": small("mixtral", 6, 2, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, hidden_size=96),
    "olmoe": small("olmoe", 4, 2, num_experts=6, num_experts_per_tok=3, norm_topk_prob=False),
    "olmoe-clip": small("olmoe", 4, 2, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False, clip_qkv=0.7),
    "gpt-oss": small("gpt_oss", 8, 1, 16, **OSS, **rope("yarn", 150000.0, **OSS_ROPE)),
    "gpt-oss-mxfp4": small("gpt_oss", 8, 1, 16, **OSS, **rope("yarn", 150000.0, **OSS_ROPE)),
    "gemma2": small("gemma2", 6, 2, 24, tie_word_embeddings=True, **GEMMA2, **WINDOWS),
    "gemma3": small(
        "gemma3_text",
        4,
        2,
        24,
        sliding_window_pattern=2,
        query_pre_attn_scalar=24,
        tie_word_embeddings=True,
        rope_parameters=GEMMA3_ROPE,
        **WINDOWS,
    ),
    "glm4": small("glm4", 6, 2, 16, attention_bias=True, **rope("default", partial_rotary_factor=0.5)),
    "seed-oss": small("seed_oss", 6, 2, 16),
    "exaone4": small("exaone4", 5, 1, 16, sliding_window_pattern=4, **WINDOWS),
    "cohere": small("cohere", 4, 2, **COHERE),
    "cohere-norm": small("cohere", 8, 2, use_qk_norm=True, **COHERE),
    "cohere2": small("cohere2", 4, 2, 16, **COHERE, **WINDOWS),
    "olmo2": small("olmo2", 6, 2, hidden_size=96),
    "olmo3": small("olmo3", 6, 2, hidden_size=96, **WINDOWS),
}

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 14)
HEAD_SIZES = (8, 16, 24, 40, 64, 80)  # three quarters of each are even, for partial rotary positions
OWN_HEAD_SIZE = ("llama", "mistral", "qwen3", "qwen3_moe", "seed_oss")  # may have head_dim where MODELS has none


def draw_shape(name, rng):
    """Returns sizes to replace those of MODELS, for make(): heads, groups, widths, windows and experts, drawn by `rng`
    (random.Random). The structure is kept: layers, switches and rotary positions."""
    kind, settings = MODELS[name]
    kv_heads, group, head = rng.choice((1, 2, 3)), rng.choice(GROUPS), rng.choice(HEAD_SIZES)
    heads = kv_heads * group
    drawn = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=rng.randrange(70, 400))
    has_experts = any("experts" in key for key in settings)
    wide = 32 if name.endswith("mxfp4") else 4 if has_experts else 1  # whole blocks; torch's products of experts
    drawn["intermediate_size"] = wide * rng.randrange(1, 130 // wide)
    if "head_dim" in settings or kind in OWN_HEAD_SIZE:
        drawn |= dict(head_dim=head, hidden_size=wide * rng.randrange(1 + 8 // wide, 161 // wide))
    else:
        drawn["hidden_size"] = heads * head
    if "query_pre_attn_scalar" in settings:
        drawn["query_pre_attn_scalar"] = head  # a GGUF cannot hold another value
    if settings.get("sliding_window"):
        drawn["sliding_window"] = rng.randrange(5, 70)
    if "moe_intermediate_size" in settings:
        drawn["moe_intermediate_size"] = 4 * rng.randrange(2, 20)
    for key in ("num_experts", "num_local_experts"):
        if key in settings:
            drawn[key] = rng.randrange(2, 12)
            drawn["num_experts_per_tok"] = rng.randrange(1, drawn[key] + 1)
    if name == "phi3-longrope":
        short = [1.0 + rng.random() for _ in range(head // 2)]
        factors = dict(short_factor=short, long_factor=[4 * x for x in short])
        drawn["rope_parameters"] = settings["rope_parameters"] | factors
    return drawn


def make(name, changes=None, dtype=torch.float32, seed=1):
    """Returns the model in float32 with numbers rounded to dtype, so that saving in dtype loses nothing."""
    model_type, settings = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **settings, **(changes or {})})
    config._attn_implementation = "eager"  # the only one with softcaps and sinks
    torch.manual_seed(seed)
    m = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter, w in m.named_parameters():
            if parameter.endswith("bias") or "sinks" in parameter:
                w.normal_(0, 0.3)
            elif "norm" in parameter:
                w.add_(0.2 * torch.randn_like(w))
            else:
                peaked = any(part in parameter for part in ("q_proj", "k_proj", "qkv"))  # attention far from uniform
                w.normal_(0, (1.6 if peaked else 1.0) * w.shape[-1] ** -0.5)
            w.copy_(w.to(dtype))
    m.packed, m.quantisation = {}, None
    if name.endswith("mxfp4"):
        m.packed, m.quantisation = pack_experts(m), {"quant_method": "mxfp4", "modules_to_not_convert": []}
    return m


def pack_experts(m):
    """Returns random experts in the format of gpt-oss, {name: bytes}: blocks of 32 numbers of 4 bits, and their scales.
    The model gets the numbers to which transformers decodes them."""
    packed = {}
    for name, w in m.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, terms, rows = w.shape
        blocks = torch.randint(0, 256, (experts, rows, terms // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 124, (experts, rows, terms // 32), dtype=torch.uint8)  # exponents, 127 is 1
        w.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return packed


def make_tiny(name):
    """Returns the model of that name, small enough to be kept with the sources, in bfloat16."""
    kind, settings = MODELS[name]
    tiny = dict(TINY)
    if "head_dim" in settings or kind in ("llama", "qwen3"):
        tiny["head_dim"] = 8
    else:
        tiny |= dict(num_attention_heads=4, num_key_value_heads=2)  # a divisor of the width
    if "moe_intermediate_size" in settings:
        tiny["moe_intermediate_size"] = 16
    if name.endswith("mxfp4"):
        tiny["intermediate_size"] = 32  # whole blocks
    return make(name, tiny, torch.bfloat16, FAR_FROM_TIES.get(name, 1))


def save(m, folder, dtype=torch.float32):
    """Saves a model as transformers does, but without a generation config, which would change sampling."""
    copy.deepcopy(m).to(dtype).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    weights = folder / "model.safetensors"
    if m.packed:
        plain = {name.rsplit("_", 1)[0] for name in m.packed}
        others = {name: w for name, w in safetensors.torch.load_file(weights).items() if name not in plain}
        safetensors.torch.save_file(others | m.packed, weights, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = m.quantisation
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights.chmod(0o644)
