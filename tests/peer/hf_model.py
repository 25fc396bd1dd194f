"""Loads a model for transformers from the same file that kvbudget reads: a GGUF, or a Hugging Face folder."""
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
import torch
import tqdm.auto
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def load(path, attention="sdpa", tokenizer=True):
    """(model in float32 on the CPU, tokenizer or None)."""
    if path.endswith(".gguf"):
        folder, kw = os.path.dirname(os.path.abspath(path)), {"gguf_file": os.path.basename(path)}
    else:
        folder, kw = path, {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention,
                                                 **kw).eval()
    return model, AutoTokenizer.from_pretrained(folder, **kw) if tokenizer else None
