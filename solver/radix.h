// A stable sort of 64-bit keys in linear time: for the order of tokens by score and of hull blocks by slope.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct keyed {
    uint64_t key;
    uint32_t a, b; // payload
} keyed;

// Sorts items[n] by key, smallest first; equal keys stay in the order in which they came. scratch[n] is overwritten.
// Only the lowest key_bits (1..64) of the keys may differ from 0: fewer bits take fewer passes.
void radix_sort(keyed *items, keyed *scratch, size_t n, unsigned key_bits);

// Keys that order as the numbers do; -0 equals +0. NaN has no place in an order: the caller refuses it before.
uint32_t key_from_float(float x);
uint64_t key_from_double(double x);
double double_from_key(uint64_t key); // of numbers that are not negative
