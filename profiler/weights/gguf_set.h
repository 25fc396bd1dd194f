// A model's GGUF files: one, or the parts that llama.cpp's gguf-split and the gguf package write,
// NAME-00001-of-00003.gguf and on. Each part says which one it is (split.no, from 0), how many there are (split.count)
// and how many tensors they have together (split.tensors.count); the first one has all other metadata.
#pragma once
#include "profiler/weights/gguf.h"

typedef struct gguf_set {
    gguf_file *files; // [n] in the order of the parts; metadata is the first one's
    char **paths;     // [n]
    size_t n;
} gguf_set;

// `path` is a whole model or any of its parts; the others stand beside it. All stay mapped until gguf_set_close.
// Errors are gguf_open's, and KVB_FORMAT: a part that has another name than its numbers, another number or count than
// its name, and parts that do not have as many tensors as they should. On failure *out is zero.
kvb_status gguf_set_open(gguf_set *out, const char *path, kvb_error *err);
// Were all files whole and the same since gguf_set_open? KVB_IO otherwise.
kvb_status gguf_set_check(const gguf_set *s, kvb_error *err);
void gguf_set_close(gguf_set *s); // leaves it zero; a zero one is allowed
