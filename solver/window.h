// Costs of sums of units, in a range that moves and grows: what layered.c joins, part by part.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Costs of the sums low .. low + count - 1; INFINITY: none, or beyond theta.
typedef struct window {
    int64_t low;
    size_t count, room;
    double *at;
} window;

// What all windows of one solution share: how far they look, and what they may take.
typedef struct window_limits {
    double theta; // dearer sums are left out
    uint64_t max_work, max_bytes;
    uint64_t work; // relaxations
    size_t bytes;  // of all windows
    bool failed;   // no memory
    bool given_up; // more work or bytes than allowed
} window_limits;

// Makes a window of `count` sums from `low` on that holds nothing yet; its memory is used again. False: no memory, or
// given up.
bool window_open(window_limits *l, window *x, int64_t low, size_t count);
// Gives its memory back; windows_free() that of an array made with calloc (NULL: nothing), and the array.
void window_close(window_limits *l, window *x);
void windows_free(window_limits *l, window *at, size_t n);

// Cuts what holds nothing off both ends.
void window_trim(window *x);

// Opens `out` with all sums of one element of a and one of b, up to theta and up to `most` units. False as above.
bool window_join(window_limits *l, window *out, const window *a, const window *b, int64_t most);

// The sum of b such that it and one of a give, bit for bit, what window_join() has put at x.
int64_t window_trace(const window *out, const window *a, const window *b, int64_t x);
