#include "solver/window.h"
#include "solver/exact_core.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

void window_close(window_limits *l, window *x)
{
    l->bytes -= x->room * sizeof *x->at;
    free(x->at);
    *x = (window){0};
}

void windows_free(window_limits *l, window *at, size_t n)
{
    for (size_t i = 0; at && i < n; i++) window_close(l, &at[i]);
    free(at);
}

bool window_open(window_limits *l, window *x, int64_t low, size_t count)
{
    if (count > x->room || !x->at) {
        size_t room = count + count / 2 + 16, bytes;
        if (__builtin_mul_overflow(room, sizeof *x->at, &bytes)) return !(l->failed = true);
        if (l->bytes + bytes - x->room * sizeof *x->at > l->max_bytes) return !(l->given_up = true);
        double *fresh = realloc(x->at, bytes);
        if (!fresh) return !(l->failed = true);
        l->bytes += bytes - x->room * sizeof *x->at;
        x->at = fresh;
        x->room = room;
    }
    x->low = low;
    x->count = count;
    for (size_t i = 0; i < count; i++) x->at[i] = INFINITY;
    return true;
}

void window_trim(window *x)
{
    size_t begin = 0;
    while (x->count > 0 && x->at[x->count - 1] == INFINITY) x->count--;
    while (begin < x->count && x->at[begin] == INFINITY) begin++;
    if (begin == 0) return;
    memmove(x->at, x->at + begin, (x->count - begin) * sizeof *x->at);
    x->low += (int64_t)begin;
    x->count -= begin;
}

bool window_join(window_limits *l, window *out, const window *a, const window *b, int64_t most)
{
    int64_t low = a->low + b->low, high = low + (int64_t)a->count + (int64_t)b->count - 2;
    if (high > most) high = most;
    if (a->count == 0 || b->count == 0 || high < low) return window_open(l, out, low, 0);
    if (!window_open(l, out, low, (size_t)(high - low + 1))) return false;
    for (size_t j = 0; j < b->count; j++) {
        if (b->at[j] == INFINITY || j >= out->count) continue;
        size_t n = a->count < out->count - j ? a->count : out->count - j;
        core_relax(out->at + j, a->at, n, b->at[j]);
        l->work += n;
    }
    if (l->work > l->max_work) return !(l->given_up = true);
    for (size_t i = 0; i < out->count; i++)
        if (out->at[i] > l->theta) out->at[i] = INFINITY;
    window_trim(out);
    return true;
}

int64_t window_trace(const window *out, const window *a, const window *b, int64_t x)
{
    double value = out->at[x - out->low];
    for (size_t j = 0; j < b->count; j++) {
        int64_t before = x - (b->low + (int64_t)j) - a->low;
        if (b->at[j] == INFINITY || before < 0 || before >= (int64_t)a->count) continue;
        if (a->at[before] + b->at[j] == value) return b->low + (int64_t)j;
    }
    return b->low; // not reached: the sum came from somewhere
}
