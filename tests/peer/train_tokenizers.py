"""Trains tokenizers of every kind on mixed text and compares the ids of tokens.c with those of their libraries on
another 1 MB (English, code, Chinese, emoji, odd spaces, special tokens, broken UTF-8), and on single strings that are
hard to split.

usage: train_tokenizers.py KVBUDGET [--out FOLDER] [--kinds NAME...]     (needs: pip install tokenizers sentencepiece
       gguf numpy)
Compares tokenizer.json of ten byte-level kinds and five with byte fallback with Hugging Face's tokenizers, and
SentencePiece's BPE in GGUF files with sentencepiece. The long text's ids are also decoded, by `--decode`, and compared
with the libraries' decoding. Prints a line for each, and PASS or FAIL.
"""

import argparse
import json
import os
import random
import subprocess
import tempfile

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def cased(contraction, number):
    front = r"[^\r\n\p{L}\p{N}]?"
    words = f"{front}{UPPER}*{LOWER}+{contraction}|{front}{UPPER}+{LOWER}*{contraction}"
    return words + rf"|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|" + END


O200K, TEKKEN = cased(CONTRACTION + "?", r"\p{N}{1,3}"), cased("", r"\p{N}")
ODD = (
    "😀👩‍👩‍👧‍👦🇩🇪 日本語テキスト 中文分词 한국어 العربية हिन्दी ไทย Ελληνικά Русский é é ﬁ ① ½ Ⅷ ǅ ʰ ª 　 nbsp \u200b\ufeff İi̇ ßẞ "
    "123456789 1,234.5 "
    "٣٤٥ 𝟙𝟚 it's I'LL don'T 'sS 'ſ HTTPServer camelCase ALLCAPSWord éÀ ñandú x²y³ a_b-c//d\\e"
)
HARD = [
    "",
    " ",
    "  ",
    "\n",
    " \n",
    "\n ",
    "a  b",
    "a   1",
    "  1",
    "\n\n1.",
    "don't",
    "DON'T",
    "'ll'LL",
    "\t\tif",
    "\r\n\r\nx",
    "1234567",
    "a1b22c333d4444",
    "...!!!",
    " ...",
    "x/\n/y",
    "\u00a0x",
    "\u3000日本",
    "e\u0301",
    "\u0301",
    "ǅabc",
    "ʰABC",
    "a\u200db",
    "\u180ex",
    "\x85y",
    "\x1cz",
    "<s>",
    " </s>x",
    "<|special|>",
    "a <|special|>  b",
    "<|user_tok|>x",
    "x<|user_tok|>",
    "▁",
    " ▁ ",
    "\0",
    "a\0b",
    "🇩🇪🇫🇷",
    "½⅓①",
    "₁²³",
    "٣٤",
    "कि",
    "ﬃ",
    "Å",
    "가각",
]


def documents(source):
    found = []
    for folder in ("calib-data", "docs", "profiler", "solver", "tests/golden"):
        for name in sorted(os.listdir(os.path.join(source, folder))):
            if name.endswith((".md", ".c", ".h", ".jsonl", ".py")):
                found.append(open(os.path.join(source, folder, name), "rb").read()[:80000])
    return found


def mixed(texts, size, rng):
    out = b""
    while len(out) < size:
        text = rng.choice(texts)
        at = rng.randrange(max(1, len(text) - 2000))
        out += text[at : at + rng.randrange(20, 2000)]
        kind = rng.random()
        if kind < 0.3:
            out += ODD.encode()
        if kind < 0.2:
            out += (" " * rng.randrange(1, 30) + "\n" * rng.randrange(5) + "\t \r\n  \u3000\u00a0 ").encode()
        if kind < 0.1:
            out += bytes(rng.randrange(256) for _ in range(20))
        if 0.4 < kind < 0.45:
            out += b" <|special|> <|user_tok|>\n  x<s>y </s> z"
    return out[:size]


class Trainer:
    def __init__(self, texts, vocabulary=3000):
        self.texts, self.vocabulary = texts, vocabulary

    def byte_level(self, pre, normalizer=None, ignore_merges=False):
        t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
        if normalizer:
            t.normalizer = normalizer
        t.pre_tokenizer, t.decoder = pre, decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        t.train_from_iterator(
            self.texts, trainers.BpeTrainer(vocab_size=self.vocabulary, initial_alphabet=alphabet, show_progress=False)
        )
        t.add_special_tokens([AddedToken("<|special|>", special=True)])
        t.add_tokens([AddedToken("<|user_tok|>", normalized=False)])
        return t

    def split(self, pattern, **options):
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level]
        return self.byte_level(pre_tokenizers.Sequence(steps), **options)

    def byte_fallback(self, normalizer, pre, added=(), fuse=True):
        """Returns BPE over characters: trained on words, as in SentencePiece, then set up as the converter does."""
        trained = Tokenizer(models.BPE(unk_token="<unk>"))
        trained.normalizer = normalizer
        trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocabulary, limit_alphabet=600, special_tokens=special, show_progress=False
        )
        trained.train_from_iterator([line for text in self.texts for line in text.split("\n")], trainer)
        t = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=fuse))
        t.normalizer = normalizer
        if pre:
            t.pre_tokenizer = pre
        source, target = json.loads(trained.to_str()), json.loads(t.to_str())
        target["model"]["vocab"], target["model"]["merges"] = source["model"]["vocab"], source["model"]["merges"]
        target["added_tokens"] = [{**token, "normalized": False} for token in source["added_tokens"][:3]]
        t = Tokenizer.from_str(json.dumps(target))
        for token in added:
            (t.add_special_tokens if token.special else t.add_tokens)([token])
        return t


def json_kinds(train):
    n, p = normalizers, pre_tokenizers
    legacy = n.Sequence([n.Prepend("▁"), n.Replace(" ", "▁")])
    digits = p.Sequence([p.Digits(individual_digits=True), p.ByteLevel(add_prefix_space=False)])
    special = {"special": True, "normalized": False}
    return {
        "llama3": lambda: train.split(LLAMA3, ignore_merges=True),
        "olmo2": lambda: train.split(LLAMA3),
        "qwen2": lambda: train.split(QWEN2, normalizer=n.NFC()),
        "qwen35": lambda: train.split(QWEN35, normalizer=n.NFC()),
        "o200k": lambda: train.split(O200K),
        "tekken": lambda: train.split(TEKKEN, ignore_merges=True),
        "gpt2": lambda: train.byte_level(p.ByteLevel(add_prefix_space=False)),
        "gpt2-prefix": lambda: train.byte_level(p.ByteLevel(add_prefix_space=True)),
        "smollm": lambda: train.byte_level(digits),
        "removed": lambda: train.byte_level(
            p.Sequence([p.Split(Regex(r"\s+"), "removed"), p.ByteLevel(add_prefix_space=False)])
        ),
        "llama2": lambda: train.byte_fallback(legacy, None, [AddedToken("<|special|>", rstrip=True, **special)]),
        "phi3": lambda: train.byte_fallback(
            legacy,
            None,
            [
                AddedToken("<|special|>", rstrip=True, lstrip=True, **special),
                AddedToken("<|user_tok|>", normalized=True),
            ],
        ),
        "gemma": lambda: train.byte_fallback(
            n.Replace(" ", "▁"),
            p.Split(" ", "merged_with_previous"),
            [AddedToken("\n\n", normalized=False), AddedToken("<|user_tok|>", normalized=False)],
        ),
        "mistral": lambda: train.byte_fallback(None, p.Metaspace(prepend_scheme="first", split=False)),
        "metaspace": lambda: train.byte_fallback(None, p.Metaspace(prepend_scheme="always", split=True), fuse=False),
    }


def sentencepiece_gguf(folder, texts, prefix):
    """Trains with sentencepiece and writes the vocabulary as GGUF. Returns its path, an encoder and a decoder."""
    import gguf
    import sentencepiece

    corpus = os.path.join(folder, "corpus.txt")
    with open(corpus, "w", encoding="utf-8") as file:
        file.write("\n".join(text.replace("\0", "") for text in texts))
    stem = os.path.join(folder, "spm-prefix" if prefix else "spm")
    sentencepiece.SentencePieceTrainer.train(
        input=corpus,
        model_prefix=stem,
        model_type="bpe",
        vocab_size=3000,
        byte_fallback=True,
        character_coverage=0.995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<|user_tok|>"],
        minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=stem + ".model")
    writer = gguf.GGUFWriter(stem + ".gguf", "llama")
    n = model.vocab_size()
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(i) for i in range(n)])
    writer.add_token_scores([model.get_score(i) for i in range(n)])
    kinds = [(model.is_unknown, 2), (model.is_control, 3), (model.is_byte, 6), (model.is_unused, 5)]
    user = {"<|user_tok|>"}
    writer.add_token_types(
        [next((k for f, k in kinds if f(i)), 4 if model.id_to_piece(i) in user else 1) for i in range(n)]
    )
    writer.add_bos_token_id(model.bos_id())
    writer.add_unk_token_id(model.unk_id())
    writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stem + ".gguf", model.encode, model.decode


def tokens(program):
    return os.path.join(os.path.dirname(program), "tests/tokens")


def ids_of(program, model, path):
    out = path + ".npy"
    run = [tokens(program), model, path, "--special", "--bos", "no", "--npy", out]
    done = subprocess.run(run, capture_output=True, text=True)
    return np.load(out) if done.returncode == 0 else done.stderr.strip()


def text_of(program, model, ids, folder):
    path = os.path.join(folder, "ids.npy")
    np.save(path, np.array(ids, dtype=np.int32))
    return subprocess.run([tokens(program), model, path, "--decode"], capture_output=True).stdout


def compare(name, program, model, encode, decode, text, folder, hard=HARD):
    """Compares the ids of the long text and of each hard one, and the decoding of the long text's ids."""
    path = os.path.join(folder, "text.bin")
    different, total = 0, 0
    for number, piece in enumerate([text] + [h.encode() for h in hard]):
        with open(path, "wb") as file:
            file.write(piece)
        expected, found = np.array(encode(piece.decode("utf-8", "replace")), dtype=np.int32), ids_of(
            program, model, path
        )
        total += len(expected)
        if isinstance(found, str) or not np.array_equal(expected, found):
            different += 1
            what = found if isinstance(found, str) else f"{len(expected)} ids expected, {len(found)} found"
            print(f"{name}: {'the long text' if number == 0 else ascii(hard[number - 1])} differs: {what}")
    ids = encode(text.decode("utf-8", "replace"))
    same = text_of(program, model, ids, folder) == decode(ids).encode()
    print(
        f"{name}: {total} ids of {len(hard) + 1} texts, {different} texts differ; decoded "
        f"{'the same' if same else 'DIFFERENTLY'}"
    )
    return different == 0 and same


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--out", help="keep the tokenizers in this folder")
    parser.add_argument("--kinds", nargs="*", default=[])
    options = parser.parse_args()
    folder = options.out or tempfile.mkdtemp()
    rng = random.Random(5)
    texts = documents(ROOT)
    training = [mixed(texts, 400000, rng).decode("utf-8", "replace") for _ in range(3)]
    text = mixed(texts, 1000000, rng)
    good = True
    for name, make in json_kinds(Trainer(training)).items():
        if options.kinds and name not in options.kinds:
            continue
        place = os.path.join(folder, name)
        os.makedirs(place, exist_ok=True)
        tokenizer = make()
        if tokenizer.decoder is None:  # as the models of these kinds have it
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            front = [decoders.Strip(" ", 1, 0)] if name in ("llama2", "phi3", "mistral", "metaspace") else []
            tokenizer.decoder = decoders.Sequence(steps + front)
        tokenizer.save(os.path.join(place, "tokenizer.json"))
        good &= compare(
            name,
            options.program,
            place,
            lambda s, t=tokenizer: t.encode(s, add_special_tokens=False).ids,
            lambda ids, t=tokenizer: t.decode(ids, skip_special_tokens=False),
            text,
            folder,
        )
    # sentencepiece leaves out NUL, and has no control tokens in texts.
    plain = text.replace(b"\0", b"").replace(b"<s>", b"").replace(b"</s>", b"")
    for prefix in (True, False):
        name = "sentencepiece-prefix" if prefix else "sentencepiece"
        if options.kinds and name not in options.kinds:
            continue
        model, encode, decode = sentencepiece_gguf(folder, training, prefix)
        hard = [h for h in HARD if "s>" not in h and "\0" not in h]
        good &= compare(name, options.program, model, encode, decode, plain, folder, hard)
    print("PASS" if good else "FAIL")
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
