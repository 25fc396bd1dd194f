// Why this file: budgets that differ from kvpress's by one token in one head are a bug report, and equal prune ratios
// (heads at their floor, uniform rows) are common, so "any largest fraction will do" is not enough.
//
// torch.topk on a CPU copies (value, index) pairs and runs std::nth_element on them, or std::partial_sort when 64 k
// <= n, comparing values only. PyTorch's Linux builds use libstdc++, whose nth_element is introselect: quickselect
// with the median of three as pivot, falling back to a heap when it degenerates. Neither is stable, so which of
// several equal values comes first depends on every swap; the functions below make the same swaps. "before" = larger.
//
// Facts established against torch 2.x with tests/golden/make_topk.py; no code was taken from either project.
#include "torch_topk.h"
#include <float.h>

#if defined(__FAST_MATH__)
#error "kvbudget's runtime promises sums to the bit: compile it without -ffast-math"
#endif
#if FLT_EVAL_METHOD == 1 || FLT_EVAL_METHOD == 2
#error \
    "kvbudget's runtime promises sums to the bit: floats must not be computed with more digits; try -msse2 -mfpmath=sse"
#endif

static int before(kvb_topk_item a, kvb_topk_item b)
{
    return a.value > b.value;
}

static void swap_items(kvb_topk_item *a, kvb_topk_item *b)
{
    kvb_topk_item t = *a;
    *a = *b;
    *b = t;
}

// The heap's root is the item that would leave a top list first.
// Puts `item` into the hole at `hole`: the hole sinks to a leaf along the children that come last, then the item
// rises. (A textbook sift-down would stop early and leave equal items in other places.)
static void heap_fill(kvb_topk_item *heap, size_t hole, size_t n, kvb_topk_item item)
{
    size_t top = hole, child = hole;
    while (2 * child + 2 < n) {
        child = 2 * child + 2;
        if (before(heap[child], heap[child - 1])) --child;
        heap[hole] = heap[child];
        hole = child;
    }
    if (2 * child + 2 == n) {
        heap[hole] = heap[n - 1];
        hole = n - 1;
    }
    while (hole > top && before(heap[(hole - 1) / 2], item)) {
        heap[hole] = heap[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap[hole] = item;
}

// Moves the `middle` first items of the order to the front, in heap order; the root is the last of them.
static void heap_select(kvb_topk_item *items, size_t middle, size_t n)
{
    for (size_t parent = middle / 2; parent-- > 0;) heap_fill(items, parent, middle, items[parent]);
    for (size_t i = middle; i < n; i++) {
        if (before(items[i], items[0])) {
            kvb_topk_item item = items[i];
            items[i] = items[0];
            heap_fill(items, 0, middle, item);
        }
    }
}

static void median_to_front(kvb_topk_item *front, kvb_topk_item *a, kvb_topk_item *b, kvb_topk_item *c)
{
    if (before(*a, *b)) swap_items(front, before(*b, *c) ? b : before(*a, *c) ? c : a);
    else swap_items(front, before(*a, *c) ? a : before(*b, *c) ? c : b);
}

// Splits items[first .. last - 1] around the median of three, which it leaves at `first`. Returns the start of the
// second part. Items equal to the pivot stop both scans and are swapped: that is what makes ties move.
static size_t partition(kvb_topk_item *items, size_t first, size_t last)
{
    size_t left = first + 1, right = last, pivot = first;
    median_to_front(items + first, items + first + 1, items + first + (last - first) / 2, items + last - 1);
    for (;;) {
        while (before(items[left], items[pivot])) ++left;
        --right;
        while (before(items[pivot], items[right])) --right;
        if (left >= right) return left;
        swap_items(items + left, items + right);
        ++left;
    }
}

static void insertion_sort(kvb_topk_item *items, size_t first, size_t last)
{
    for (size_t i = first + 1; i < last; i++) {
        kvb_topk_item item = items[i];
        size_t j = i;
        for (; j > first && before(item, items[j - 1]); --j) items[j] = items[j - 1];
        items[j] = item;
    }
}

// Afterwards items[nth] is where a full sort would put it, with nothing after it that belongs before it.
static void nth_element(kvb_topk_item *items, size_t nth, size_t n)
{
    size_t first = 0, last = n;
    unsigned depth = 0;
    for (size_t m = n; m > 1; m /= 2) depth += 2;
    while (last - first > 3) {
        if (depth-- == 0) {
            heap_select(items + first, nth + 1 - first, last - first);
            swap_items(items + first, items + nth);
            return;
        }
        size_t cut = partition(items, first, last);
        if (cut <= nth) first = cut;
        else last = cut;
    }
    insertion_sort(items, first, last);
}

void kvb_torch_topk(kvb_topk_item *items, size_t n, size_t k)
{
    if (k == 0) return;
    if (k * 64 <= n) heap_select(items, k, n); // partial_sort then only orders the k among themselves
    else nth_element(items, k - 1, n);
}

// torch adds with four accumulators over consecutive groups of four "rows", where a row is one float if n < 8 and a
// vector of 8 floats otherwise. Long inputs cascade: after every `step` groups an accumulator is emptied into one of
// the next level, so that no partial sum grows too long.

enum { lanes_max = 8, chains = 4, levels = 4 };

// Cascaded sum of n_groups groups of `chains` rows of `lanes` floats; total[chain][lane] receives the result.
static void sum_groups(const float *values, size_t n_groups, size_t lanes, float total[chains][lanes_max])
{
    float level[levels][chains][lanes_max] = {{{0}}};
    unsigned power = 0;
    while (((size_t)1 << power) < n_groups) ++power;
    power = power / levels > 4 ? power / levels : 4;
    size_t step = (size_t)1 << power, mask = step - 1;

    for (size_t i = 0; i < n_groups;) {
        for (size_t c = 0; c < chains; c++)
            for (size_t j = 0; j < lanes; j++) level[0][c][j] += values[(i * chains + c) * lanes + j];
        ++i;
        if ((i & mask) != 0) continue;
        for (unsigned up = 1; up < levels; up++) {
            for (size_t c = 0; c < chains; c++) {
                for (size_t j = 0; j < lanes; j++) {
                    level[up][c][j] += level[up - 1][c][j];
                    level[up - 1][c][j] = 0;
                }
            }
            if ((i & (mask << (up * power))) != 0) break;
        }
    }
    for (size_t c = 0; c < chains; c++) {
        for (size_t j = 0; j < lanes; j++) {
            total[c][j] = level[0][c][j];
            for (unsigned up = 1; up < levels; up++) total[c][j] += level[up][c][j];
        }
    }
}

float kvb_torch_sum(const float *values, size_t n)
{
    size_t lanes = n < lanes_max ? 1 : lanes_max;
    size_t n_rows = n / lanes, n_groups = n_rows / chains;
    float total[chains][lanes_max] = {{0}}, sum = 0;

    sum_groups(values, n_groups, lanes, total);
    for (size_t row = n_groups * chains; row < n_rows; row++)
        for (size_t j = 0; j < lanes; j++) total[0][j] += values[row * lanes + j];
    for (size_t j = 0; j < lanes; j++) total[0][j] = ((total[0][j] + total[1][j]) + total[2][j]) + total[3][j];
    for (size_t i = n_rows * lanes; i < n; i++) sum += values[i];
    for (size_t j = 0; j < lanes; j++) sum += total[0][j];
    return sum;
}
