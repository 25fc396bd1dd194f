"""Compares the ids that the program gives for texts (tokens.c) with Hugging Face tokenizers, on mixed text.

usage: compare_tokens.py MODEL.gguf [--kvbudget build/kvbudget] [--bytes 1000000] [--seed 1] [--save TEXT]
Needs: pip install "transformers>=4.56,<5.3" gguf torch      (tokenizers comes with transformers)

The default model's GGUF is compared in five ways, each on the same bytes:
  smollm, as trained        transformers' tokenizer from the GGUF, with the pre-tokenizer of SmolLM2's own
                            tokenizer.json (single digits, then GPT-2's expression), which transformers does not
                            read from a GGUF
  smollm, as loaded         transformers' tokenizer from the GGUF as it is (only GPT-2's expression), and `--pre gpt-2`
  llama-bpe, qwen2, gpt-2   the same vocabulary with a `tokenizers` pipeline built here (Llama 3 with ignore_merges),
                            and `--pre NAME` (no model with these is on PyPI, and only the expression differs)
Exit status 1 if any of them differs. The last lines say where the two ways of smollm differ.
"""
import argparse
import glob
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import unicodedata

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EXPRESSIONS = {"llama-bpe": CASELESS % r"\p{N}{1,3}", "qwen2": CASELESS % r"\p{N}"}

WORDS = """the of and a to in is it that was for on are with as be at one have this from by hot word but
what some we can out other were all there when up use your how said an each she which do their time if will
way about many then them write would like so these cache eviction attention head budget token Prüfung naïve
façade Ελληνικά русский текст العربية עברית हिन्दी ไทย 한국어 日本語 テスト 中文 测试 缓存 注意力 预算 𠮷野家 Ǆ ǅ ﬁn ﬂow Straße
ſtill K Å""".split()
SPACES = [
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\r\n\r\n", "\t", "\t\t", " \n", "\n ", "\u00a0", "\u3000", "\u2003",
    "\u200b", "\u202f", "\u2028", "\u0085", "\x0b", "\x0c", "\x1c", "\u180e", "\ufeff", "\u1680", " \u00a0 ", "\r",
    "        "
]
MARKS = list(".,;:!?-–—…'\"`“”‘’()[]{}<>/\\|@#$%^&*_+=~§°€£¥。，、！？《》「」") + [
    "...", "--", "->", "!=", "//", "/*", "*/", "```", "::", "=="
]
CONTRACTIONS = [
    "it's", "I'll", "we've", "don't", "they're", "I'd", "I'm", "IT'S", "We'Ve", "'S", "'ll'", "can’t", "rock'n'roll",
    "''s", "'ſ", "'LL"
]
EMOJI = ["😀", "👍🏽", "🇺🇸", "👩‍👩‍👧", "❤️", "🧑🏿‍💻", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🤯🤯", "1️⃣"]
MARKED = ["e\u0301", "n\u0303o", "a\u0308\u0323", "क्षि", "กำ", "Z\u0351\u036b\u0343\u036a", "\u0301x", "각", "ﷺ"]
NUMBERS = [
    "0", "7", "42", "1,000,000", "3.14159", "1475591", "0x1F", "²³", "½", "٣٤٥", "Ⅷ", "１２３", "1e-9", "2026-01-31",
    "#12", "v2.0", "𝟘𝟙", "〇"
]
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start", "<|im_start|><|im_end|>", "<file_sep>", "<repo_name>",
    "<|im_<|im_end|>"
]
BROKEN = [
    b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\x80\x80",
    b"\xe0\x80\x80", b"\xf1\x80", b"\xf8\x88\x80\x80\x80", b"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", b"\x00",
    b"\x01\x02\x03\x04", b"\xf1\x80\x80\x80", b"\xf3\xa0\x80\x81", b"\xfe"
]


def any_character(rng):
    while True:
        c = rng.choice([rng.randrange(0x250), rng.randrange(0x3000), rng.randrange(0x20000), rng.randrange(0x110000)])
        if not 0xD800 <= c < 0xE000:
            return chr(c)


def generated(rng):
    """Returns about one line of text: every kind of piece, in any order."""
    pieces = []
    for _ in range(rng.randrange(4, 60)):
        kind = rng.random()
        if kind < 0.5: pieces.append(rng.choice(WORDS))
        elif kind < 0.58: pieces.append(rng.choice(MARKS))
        elif kind < 0.66: pieces.append(rng.choice(NUMBERS))
        elif kind < 0.72: pieces.append(rng.choice(CONTRACTIONS))
        elif kind < 0.76: pieces.append(rng.choice(EMOJI))
        elif kind < 0.80: pieces.append(rng.choice(MARKED))
        elif kind < 0.81: pieces.append(rng.choice(SPECIAL))
        elif kind < 0.84: pieces.append(rng.choice(BROKEN))
        elif kind < 0.90: pieces.append("".join(any_character(rng) for _ in range(rng.randrange(1, 4))))
        elif kind < 0.91: pieces.append(rng.choice("ab 1\n.文'") * rng.randrange(1, 300))
        else: pieces.append(rng.choice(SPACES))
        if rng.random() < 0.7: pieces.append(" " if rng.random() < 0.85 else rng.choice(SPACES))
    return b"".join(p if isinstance(p, bytes) else p.encode() for p in pieces) + b"\n"


def project_text():
    """Returns the project's calibration texts and sources: natural English, Chinese and code."""
    parts = []
    for path in sorted(glob.glob(f"{ROOT}/calib-data/*.jsonl")):
        for line in open(path, encoding="utf-8"):
            entry = json.loads(line)
            parts += [
                entry.get("context", ""), *entry.get("questions", []), *[str(a) for a in entry.get("answers", [])]
            ]
    for pattern in ("profiler/*/*.[ch]", "tools/*.c", "tests/peer/*.py", "Makefile"):
        parts += [open(path, encoding="utf-8").read() for path in sorted(glob.glob(f"{ROOT}/{pattern}"))]
    return "\n".join(parts).encode()


def mixed_text(size, seed):
    rng = random.Random(seed)
    text = project_text()[: size // 2]
    while len(text) < size:
        text += generated(rng)
    return text[:size]  # may end inside a character, which is one more case of broken UTF-8


def kvbudget_ids(a, path, *options):
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "ids.npy")
        start = time.time()
        tokens = os.path.join(os.path.dirname(a.kvbudget), "tests/tokens")
        subprocess.run([tokens, a.model, path, "--special", "--npy", out, *options], check=True)
        return np.load(out).tolist(), time.time() - start


def library_tokenizer(vocabulary, types, merges, pre):
    t = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<|endoftext|>", fuse_unk=True, ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    if pre == "smollm":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif pre == "gpt-2":
        first = []
    else:
        first = [pre_tokenizers.Split(Regex(EXPRESSIONS[pre]), "isolated")]
    t.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    t.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text, i in vocabulary.items() if types[i] == 3])
    return t


def first_difference(ours, theirs):
    for i, (x, y) in enumerate(zip(ours, theirs)):
        if x != y: return i
    return min(len(ours), len(theirs)) if len(ours) != len(theirs) else -1


def report(name, ours, theirs, seconds, words):
    at = first_difference(ours, theirs)
    if at < 0:
        print(
            f"PASS  {name:26} {len(ours):7} ids equal        kvbudget {seconds[0]:5.2f} s, reference {seconds[1]:5.2f} "
            f"s"
        )
        return True
    print(f"FAIL  {name:26} at id {at}: kvbudget {len(ours)}, reference {len(theirs)} ids")
    for who, ids in (("before", ours[max(0, at - 8):at]), ("kvbudget", ours[at:at + 8]), ("reference",
                                                                                          theirs[at:at + 8])):
        print(f"      {who:10} {' '.join(f'{i}:{words.get(i)!r}' for i in ids)}")
    return False


def timed(function):
    start = time.time()
    result = function()
    return result, time.time() - start


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--kvbudget", default=os.path.join(ROOT, "build", "kvbudget"))
    p.add_argument("--bytes", type=int, default=1_000_000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--save", help="write the text here as well")
    a = p.parse_args()

    data = mixed_text(a.bytes, a.seed)
    path = a.save or tempfile.mkstemp()[1]
    with open(path, "wb") as file: file.write(data)
    text = data.decode("utf-8", errors="replace")
    print(
        f"{len(data)} bytes, {len(text)} characters, {len(set(text))} different, {text.count(chr(0xFFFD))} replaced, "
        f"seed {a.seed}, Unicode {unicodedata.unidata_version} in Python"
    )

    fields = GGUFReader(a.model).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {t: i for i, t in enumerate(tokens)}
    words = dict(enumerate(tokens))
    good = True

    loaded = AutoTokenizer.from_pretrained(os.path.dirname(os.path.abspath(a.model)),
                                           gguf_file=os.path.basename(a.model))
    as_loaded, t1 = timed(lambda: loaded(text).input_ids)
    ours, t0 = kvbudget_ids(a, path, "--bos", "yes", "--pre", "gpt-2")
    good &= report("smollm, as loaded", ours, as_loaded, (t0, t1), words)

    loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    ])
    as_trained, t1 = timed(lambda: loaded(text).input_ids)
    ours, t0 = kvbudget_ids(a, path, "--bos", "yes")
    good &= report("smollm, as trained", ours, as_trained, (t0, t1), words)

    for pre in ("llama-bpe", "qwen2", "gpt-2"):
        reference = library_tokenizer(vocabulary, types, merges, pre)
        theirs, t1 = timed(lambda: reference.encode(text, add_special_tokens=False).ids)
        ours, t0 = kvbudget_ids(a, path, "--bos", "no", "--pre", pre)
        good &= report(pre, ours, theirs, (t0, t1), words)

    at = first_difference(as_loaded, as_trained)
    print(f"as loaded {len(as_loaded)} ids, as trained {len(as_trained)} ids" +
          ("" if at < 0 else f"; they part first at id {at}:"))
    if at >= 0:
        for name, ids in (("as loaded", as_loaded), ("as trained", as_trained)):
            print(f"      {name:10} {' '.join(f'{i}:{words.get(i)!r}' for i in ids[max(0, at - 3) : at + 5])}")
    if not a.save: os.remove(path)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
