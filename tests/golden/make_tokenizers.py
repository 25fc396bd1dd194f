"""Regenerates tokenizers.json: small tokenizers of every kind, as Hugging Face's tokenizers saves them, and the ids
that it gives for difficult texts.

usage: make_tokenizers.py [OUT]     (needs: pip install tokenizers==0.22.2)
A list of {"kind", "tokenizer": the text of tokenizer.json, "cases": [{"hex": text, "special": bool, "ids": [...],
"decoded": text}]}.
"""
import importlib.util
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.argv, out = ["train"], sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "tokenizers.json")
spec = importlib.util.spec_from_file_location("train",
                                              os.path.join(HERE, "..", "..", "tests", "peer", "train_tokenizers.py"))
train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)

WORDS = [
    "the cat sat on the mat and the other cats were there; it's what they'd do, don't they? THE END. HTTPServer "
    "camelCase",
    "def main(argc, argv):\n    return 12345 + 678\n\n\nif x == 1:\n\tpass  # comment //\n",
    "naïve café e\u0301 가각 한국 日本語 中文 Ελληνικά Русский ½ ٣",
]  # fmt: skip
KINDS = [
    "llama3", "qwen2", "o200k", "tekken", "gpt2-prefix", "smollm", "removed", "llama2", "phi3", "gemma", "mistral",
    "metaspace"
]


def main():
    result = []
    for kind, make in train.json_kinds(train.Trainer([text * 3 for text in WORDS], vocabulary=620)).items():
        if kind not in KINDS:
            continue
        tokenizer = make()
        cases = []
        for text in WORDS + train.HARD + [train.ODD]:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            cases.append({"hex": text.encode().hex(), "ids": ids})
        result.append({"kind": kind, "tokenizer": tokenizer.to_str(), "cases": cases})
    with open(out, "w", encoding="ascii") as file:
        json.dump(result, file, separators=(",", ":"))
        file.write("\n")
    print(f"{out}: {len(result)} kinds, {os.path.getsize(out)} bytes")


main()
