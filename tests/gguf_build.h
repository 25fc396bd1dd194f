// Builds a GGUF file in memory, for the tests and for tiny_model.c. Not a general writer: it trusts its
// caller, and it ends the program when memory runs out. Order of calls: gguf_build_begin, the metadata, the tensors'
// entries, build_pad, then each tensor's data followed by build_pad.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct gguf_build {
    unsigned char *data;
    size_t size, room;
    size_t data_offset; // of the next tensor, from the start of the data section
    uint32_t n_values, n_tensors;
} gguf_build;

enum { BUILD_ALIGNMENT = 32 };

static inline void build_bytes(gguf_build *b, const void *bytes, size_t n)
{
    if (b->size + n > b->room) {
        b->room = (b->size + n) * 2;
        b->data = realloc(b->data, b->room);
        if (!b->data) {
            fprintf(stderr, "not enough memory\n");
            exit(1);
        }
    }
    if (n) memcpy(b->data + b->size, bytes, n);
    b->size += n;
}

static inline void build_u32(gguf_build *b, uint32_t v)
{
    unsigned char le[4] = {(unsigned char)v, (unsigned char)(v >> 8), (unsigned char)(v >> 16),
                           (unsigned char)(v >> 24)};
    build_bytes(b, le, sizeof le);
}

static inline void build_u64(gguf_build *b, uint64_t v)
{
    build_u32(b, (uint32_t)v);
    build_u32(b, (uint32_t)(v >> 32));
}

static inline void build_f32(gguf_build *b, float v)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    build_u32(b, bits);
}

static inline void build_string(gguf_build *b, const char *s)
{
    build_u64(b, strlen(s));
    build_bytes(b, s, strlen(s));
}

// The two counts in the header are filled in as entries are added.
static inline void build_count(gguf_build *b, size_t at, uint32_t count)
{
    for (int i = 0; i < 4; i++) b->data[at + (size_t)i] = (unsigned char)(count >> 8 * i);
}

static inline void gguf_build_begin(gguf_build *b, uint32_t version)
{
    *b = (gguf_build){0};
    build_bytes(b, "GGUF", 4);
    build_u32(b, version);
    build_u64(b, 0);
    build_u64(b, 0);
}

static inline void build_key(gguf_build *b, const char *key, uint32_t type)
{
    build_count(b, 16, ++b->n_values);
    build_string(b, key);
    build_u32(b, type);
}

static inline void build_key_u32(gguf_build *b, const char *key, uint32_t v)
{
    build_key(b, key, 4);
    build_u32(b, v);
}

static inline void build_key_f32(gguf_build *b, const char *key, float v)
{
    build_key(b, key, 6);
    build_f32(b, v);
}

static inline void build_key_bool(gguf_build *b, const char *key, int v)
{
    build_key(b, key, 7);
    build_bytes(b, v ? "\1" : "\0", 1);
}

static inline void build_key_string(gguf_build *b, const char *key, const char *v)
{
    build_key(b, key, 8);
    build_string(b, v);
}

// The caller adds the elements with build_u32, build_string, ...
static inline void build_key_array(gguf_build *b, const char *key, uint32_t element, uint64_t count)
{
    build_key(b, key, 9);
    build_u32(b, element);
    build_u64(b, count);
}

// dims are in ggml's order: the contiguous one first. `bytes` is the size of the tensor's data, which is added later.
static inline void build_tensor(gguf_build *b, const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type,
                                size_t bytes)
{
    build_count(b, 8, ++b->n_tensors);
    build_string(b, name);
    build_u32(b, n_dims);
    for (uint32_t i = 0; i < n_dims; i++) build_u64(b, dims[i]);
    build_u32(b, type);
    build_u64(b, b->data_offset);
    b->data_offset += (bytes + BUILD_ALIGNMENT - 1) / BUILD_ALIGNMENT * BUILD_ALIGNMENT;
}

// Pads to the alignment. To be called after the entries and after every tensor's data.
static inline void build_pad(gguf_build *b)
{
    static const unsigned char zeros[BUILD_ALIGNMENT];
    build_bytes(b, zeros, (BUILD_ALIGNMENT - b->size % BUILD_ALIGNMENT) % BUILD_ALIGNMENT);
}
