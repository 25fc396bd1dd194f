#include "solver/radix.h"
#include <string.h>

enum { DIGIT_BITS = 11, BUCKETS = 1 << DIGIT_BITS, MAX_PASSES = 6 };

static void count_digits(uint32_t counts[][BUCKETS], unsigned passes, const keyed *items, size_t n)
{
    memset(counts, 0, passes * sizeof *counts);
    for (size_t i = 0; i < n; i++)
        for (unsigned p = 0; p < passes; p++) counts[p][items[i].key >> (p * DIGIT_BITS) & (BUCKETS - 1)]++;
}

// Turns the number of items in every bucket into where the bucket begins.
static void make_starts(uint32_t counts[BUCKETS])
{
    uint32_t start = 0;
    for (unsigned b = 0; b < BUCKETS; b++) {
        uint32_t count = counts[b];
        counts[b] = start;
        start += count;
    }
}

// For so few items that the histograms would cost more than they save.
static void insertion_sort(keyed *items, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        keyed x = items[i];
        size_t j = i;
        for (; j > 0 && items[j - 1].key > x.key; j--) items[j] = items[j - 1];
        items[j] = x;
    }
}

void radix_sort(keyed *items, keyed *scratch, size_t n, unsigned key_bits)
{
    if (n < 48) {
        insertion_sort(items, n);
        return;
    }
    uint32_t counts[MAX_PASSES][BUCKETS];
    unsigned passes = (key_bits + DIGIT_BITS - 1) / DIGIT_BITS;
    count_digits(counts, passes, items, n);
    keyed *from = items, *to = scratch;
    for (unsigned p = 0; p < passes; p++) {
        unsigned shift = p * DIGIT_BITS;
        if (counts[p][from[0].key >> shift & (BUCKETS - 1)] == n) continue; // all equal in this digit
        make_starts(counts[p]);
        for (size_t i = 0; i < n; i++) to[counts[p][from[i].key >> shift & (BUCKETS - 1)]++] = from[i];
        keyed *swap = from;
        from = to;
        to = swap;
    }
    if (from != items) memcpy(items, from, n * sizeof *items);
}

// Adding +0 turns -0 into +0. Then: negative numbers have all bits flipped, others the sign bit.
uint32_t key_from_float(float x)
{
    uint32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

uint64_t key_from_double(double x)
{
    uint64_t bits;
    x += 0.0;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 63 ? ~bits : bits | 0x8000000000000000u;
}

double double_from_key(uint64_t key)
{
    double x;
    key &= 0x7fffffffffffffffu;
    memcpy(&x, &key, sizeof x);
    return x;
}
