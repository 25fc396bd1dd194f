"""Regenerates tokens.json: pieces of text and the ids that the Hugging Face tokenizers give for them.

usage: make_tokens.py [OUT]     (run `make all` first; gets the default model; needs tests/golden/requirements.txt)
One case per line: {"model": "tiny" or "smollm2", "pre", "special", "hex": the text's bytes, "ids"}; ids have no BOS.
tiny: the vocabulary of tests/tiny_vocab.h in a `tokenizers` pipeline built here, once per pre-tokenizer.
smollm2: transformers' tokenizer of the default model's GGUF, with the pre-tokenizer of SmolLM2's own tokenizer.json
("smollm") and with the one that transformers gives it ("gpt-2").
"""
import json
import os
import random
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "tests", "peer"))

from gguf import GGUFReader
from tokenizers import AddedToken, pre_tokenizers
from transformers import AutoTokenizer

from compare_tokens import generated, library_tokenizer

PIECES = [
    b"",
    b" ",
    b"  ",
    b"a",
    b" a",
    b"The cache holds 1234 keys, and the other 56 of it.",
    b"the\n\n12 then\n\n  12  \n",
    b"it's they'll IT'S 'S '",
    b"\r\n\r\nline\r\n \t tab\t\tx ",
    b"12 123 1234 12345 1 11",
    b"   1    2\n 3",
    "你好，世界。你好吗？你 奥".encode(),
    "naïve façade Straße ſ 'ſ ﬁ Ǆ".encode(),
    "e\u0301 \u0301x क्षि กำ 각".encode(),
    "a\u00a0b\u3000c\u200bd\u2003 \u2028e\u0085f\u180eg\ufeff".encode(),
    "👩‍👩‍👧 👍🏽 🇺🇸 1️⃣".encode(),
    "½ ²³ ٣٤ Ⅷ １２ 𝟘 \U00011de0".encode(),
    "\u1c89\U00031350\U0002ebf0 \U00010d40x".encode(),  # letters and numbers that Unicode 15 and 16 added
    b"\xff\xc3(\xe2\x82\xf0\x9f\x98 \xed\xa0\x80\xc0\xaf\xf4\x90\x80\x80\x80",
    b"\xe2\x82",
    b"nul\0in\0 \0side",
    bytes(range(256)),
    b"<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    b"<|im_start|><|im_start|> <|im_start",
    b"x<tool> y<tool><|im_end|>",
    b" cache cache caches",
    b"    if (x >= 10) { return a->b[12]; } // done\n",
    b"a" * 50 + b" " * 50 + b"b" * 3 + b"!" * 40,
    b"ininininining tthehe ==> the",
    b"lllllll'll'll",
]


def write_cases(out, model, pre, tokenizer, pieces):
    for special in (True, False):
        tokenizer.encode_special_tokens = not special  # "special" off: control tokens in the text are text
        for piece in pieces:
            ids = tokenizer.encode(piece.decode("utf-8", errors="replace"), add_special_tokens=False).ids
            if not special and b"<" not in piece: continue  # would equal the case with special tokens
            out.append({"model": model, "pre": pre, "special": special, "hex": piece.hex(), "ids": ids})


def tiny_tokenizer(path, pre):
    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    t = library_tokenizer({text: i for i, text in enumerate(tokens)}, types, merges, pre)
    t.add_tokens([AddedToken(text, normalized=False) for text, kind in zip(tokens, types) if kind == 4])
    return t


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "tokens.json")
    build = os.environ.get("BUILD", os.path.join(ROOT, "build"))
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        tiny = os.path.join(folder, "tiny.gguf")
        subprocess.run([os.path.join(build, "tests", "tiny_model"), "--vocab-only", "yes", tiny], check=True,
                       stdout=subprocess.DEVNULL)
        for pre in ("smollm", "llama-bpe", "qwen2", "gpt-2"):
            write_cases(cases, "tiny", pre, tiny_tokenizer(tiny, pre), PIECES)

    model = subprocess.run([os.path.join(ROOT, "tools", "scripts", "get-model.sh")], check=True, capture_output=True,
                           text=True).stdout.strip()
    random_text = b"".join(generated(random.Random(seed)) for seed in range(12))[:6000]
    loaded = AutoTokenizer.from_pretrained(os.path.dirname(model), gguf_file=os.path.basename(model))
    write_cases(cases, "smollm2", "gpt-2", loaded.backend_tokenizer, [random_text])
    loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    ])
    write_cases(cases, "smollm2", "smollm", loaded.backend_tokenizer, [*PIECES, random_text])

    with open(path, "w", encoding="ascii") as out:
        out.write("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n")
    print(f"{path}: {len(cases)} cases")


main()
