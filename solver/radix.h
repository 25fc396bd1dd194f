// A stable sort of 64-bit keys in linear time: for the order of tokens by score and of hull blocks by slope.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct keyed {
    uint64_t key;
    uint32_t a, b; // payload
} keyed;

// Sorts items[n] by key, smallest first; items with equal keys keep their order. scratch[n] is overwritten. Only the
// lowest key_bits (1..64) of the keys may be set: fewer bits need fewer passes.
void radix_sort(keyed *items, keyed *scratch, size_t n, unsigned key_bits);

// Return keys that sort in the order of the numbers; -0 equals +0. The caller must refuse NaN beforehand.
uint32_t key_from_float(float x);
uint64_t key_from_double(double x);
double double_from_key(uint64_t key); // inverse of key_from_double(), for numbers that are not negative
