"""Tiny random models of many families, which have different names for the same things in transformers."""

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
ALTERNATE = ["sliding_attention", "full_attention"] * 2
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
MHA = dict(num_key_value_heads=4)
#: families whose tiny model needs no other entries
PLAIN = (
    "llama=Llama qwen2=Qwen2 qwen3=Qwen3 gemma=Gemma cohere=Cohere olmo2=Olmo2 stablelm=StableLm granite=Granite "
    "glm=Glm glm4=Glm4 nemotron=Nemotron smollm3=SmolLM3 helium=Helium ernie4.5=Ernie4_5 seed-oss=SeedOss "
    "arcee=Arcee"
)
#: family: (config class, entries that differ, attention that the model has)
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    **{name: (kind, {}, "sdpa") for name, _, kind in (word.partition("=") for word in PLAIN.split())},
    "mistral": ("Mistral", dict(sliding_window=None), "sdpa"),
    "mixtral": ("Mixtral", dict(sliding_window=None, num_local_experts=4), "sdpa"),
    "qwen2 7:1": ("Qwen2", dict(num_attention_heads=7, num_key_value_heads=1, hidden_size=112), "sdpa"),
    "qwen2 moe": ("Qwen2Moe", EXPERTS, "sdpa"),
    "qwen3 moe": ("Qwen3Moe", EXPERTS, "sdpa"),
    "phi": ("Phi", MHA, "sdpa"),
    "phi3": ("Phi3", dict(sliding_window=None), "sdpa"),
    "gemma2": ("Gemma2", dict(sliding_window=8, layer_types=ALTERNATE, attn_logit_softcapping=5.0), "eager"),
    "gemma3": ("Gemma3Text", dict(sliding_window=8, layer_types=ALTERNATE), "sdpa"),
    "cohere2": ("Cohere2", dict(sliding_window=8, layer_types=ALTERNATE), "sdpa"),
    "olmo": ("Olmo", MHA, "sdpa"),
    "olmo3": ("Olmo3", dict(sliding_window=8, layer_types=ALTERNATE), "sdpa"),
    "starcoder2": ("Starcoder2", dict(sliding_window=None), "sdpa"),
    "gpt-neox": ("GPTNeoX", MHA, "sdpa"),
    "gpt-oss": ("GptOss", dict(sliding_window=8, layer_types=ALTERNATE, num_local_experts=4), "eager"),
    "lfm2": ("Lfm2", dict(layer_types=["conv", "full_attention"] * 2), "sdpa"),
    "exaone4": ("Exaone4", dict(sliding_window=8, layer_types=ALTERNATE), "sdpa"),
    "gpt2": ("GPT2", MHA | dict(n_embd=64, n_layer=4, n_head=4), "sdpa"),
    "opt": ("OPT", MHA | dict(ffn_dim=96, word_embed_proj_dim=64), "sdpa"),
}


def build(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Returns a random model, or None if this transformers does not know the family."""
    name, entries, attention = FAMILIES[family]
    name = name.removesuffix("Text")
    config_class = getattr(transformers, f"{FAMILIES[family][0]}Config", None)
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model_class = getattr(transformers, name + suffix, None)
    if config_class is None or model_class is None:
        return None
    torch.manual_seed(0)
    config = config_class(**(SIZES | entries | more))
    config._attn_implementation = attention
    model = model_class(config).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():  # larger than at the start of a training, so that attention is not flat
            p.add_(torch.randn_like(p), alpha=0.05)
    return model


def tokenizer() -> Any:
    """Returns a tokenizer in which the words w2 .. w95 are tokens 2 .. 95."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1} | {f"w{i}": i for i in range(2, 96)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", pad_token="<pad>")
