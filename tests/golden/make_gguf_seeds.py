"""Regenerates the seeds of tests/fuzz/corpus/{gguf,tokenizer}: small model files written by gguf-py, and odd texts.

usage: make_gguf_seeds.py     (needs tests/golden/requirements.txt; run `make all` first, for the tiny vocabulary)
"""
import os
import subprocess

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian, GGUFWriter

HERE = os.path.dirname(os.path.abspath(__file__))
CORPUS = os.path.join(os.path.dirname(HERE), "fuzz", "corpus")
BUILD = os.environ.get("BUILD", os.path.join(os.path.dirname(os.path.dirname(HERE)), "build"))
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]
TEXTS = {
    "english": b"\0The cache holds 1234 keys, and it's the other 56 that they'll evict.\r\n\r\n    return  12;\n",
    "chinese": "\1你好，世界！　缓存 ３２ 个。".encode(),
    "odd": "\2a\u00a0b\u3000\u200bc\u2028\u0085d\u180e e\u0301 👩‍👩‍👧 ſ 'ſ IT'S ½²٣Ⅷ \u1c89\U00031350".encode(),
    "broken": b"\3\xff\xc3(\xe2\x82\xf0\x9f\x98 \xed\xa0\x80\xc0\xaf\xf4\x90\x80\x80\0\x80",
    "special": b"\4<|im_start|>user\nHi<tool><|im_end|>\n<|im_<|endoftext|>",
    "plain_special": b"\1<|im_start|>user<tool> cache\n",
}


def writer(name, endian=GGUFEndian.LITTLE):
    return GGUFWriter(os.path.join(CORPUS, "gguf", name), "llama", endianess=endian)


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    random = np.random.default_rng(3)
    for folder in ("gguf", "tokenizer"):
        os.makedirs(os.path.join(CORPUS, folder), exist_ok=True)

    w = writer("metadata.gguf")
    w.add_uint8("m.u8", 255), w.add_int8("m.i8", -1), w.add_uint16("m.u16", 65535), w.add_int16("m.i16", -2)
    w.add_uint32("m.u32", 2**32 - 1), w.add_int32("m.i32", -3), w.add_uint64("m.u64", 2**63), w.add_int64("m.i64", -4)
    w.add_float32("m.f32", 0.5), w.add_float64("m.f64", 0.25), w.add_bool("m.bool",
                                                                          True), w.add_string("m.string", "text")
    w.add_array("m.strings", ["a", "", "ccc"]), w.add_array("m.ints", [1, 2, 3]), w.add_array("m.floats", [0.5, 1.5])
    w.add_array("m.nested", [[1, 2], [3]])
    finish(w)

    for name, alignment in (("tensors.gguf", None), ("aligned.gguf", 8)):
        w = writer(name)
        if alignment: w.add_custom_alignment(alignment)
        for kind in TYPES:
            values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
            data = random.integers(0, 64, (1, size * (1 if values > 1 else 3)), dtype=np.uint8)
            w.add_tensor(f"t.{kind}", data, raw_dtype=GGMLQuantizationType[kind])
        finish(w)

    finish(writer("big-endian.gguf", GGUFEndian.BIG))

    for folder, pre in (("gguf", "smollm"), ("tokenizer", "llama-bpe"), ("tokenizer", "qwen2")):
        out = os.path.join(CORPUS, folder, f"tiny-{pre}.gguf")
        subprocess.run([os.path.join(BUILD, "tests", "tiny_model"), "--vocab-only", "yes", "--pre", pre, out],
                       check=True, stdout=subprocess.DEVNULL)
    for name, text in TEXTS.items():
        with open(os.path.join(CORPUS, "tokenizer", name), "wb") as file:
            file.write(text)


main()
