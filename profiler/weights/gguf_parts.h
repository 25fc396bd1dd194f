// What gguf.c, the parser, and gguf_values.c share.
#pragma once
#include "profiler/weights/gguf.h"

uint64_t gguf_load(const unsigned char *p, size_t bytes); // little-endian
size_t gguf_value_size(uint32_t type);                    // bytes of a scalar; 0: its length stands in the file
int gguf_string_compare(gguf_string a, gguf_string b);    // below, at or above 0, as memcmp
