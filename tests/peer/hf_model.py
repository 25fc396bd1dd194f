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


def place(path):
    """Returns the arguments of from_pretrained() for a GGUF or a folder."""
    if not path.endswith(".gguf"):
        return path, {}
    return os.path.dirname(os.path.abspath(path)), {"gguf_file": os.path.basename(path)}


def tokenizer_of(path):
    folder, kw = place(path)
    return AutoTokenizer.from_pretrained(folder, **kw)


def load(path, attention="sdpa", tokenizer=True, dtype=torch.float32):
    """Returns (model on the CPU, tokenizer or None)."""
    folder, kw = place(path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention, **kw).eval()
    return model, tokenizer_of(path) if tokenizer else None
