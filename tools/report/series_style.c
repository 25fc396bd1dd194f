#include "tools/report/series_style.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    BLUE = 0x0072B2,
    VERMILION = 0xD55E00,
    GREEN = 0x009E73,
    PURPLE = 0xCC79A7,
    ORANGE = 0xE69F00,
    SKY = 0x56B4E9,
    WINE = 0xAA4499,
    GREY = 0x888888
};

static const struct {
    const char *name;
    series_style style;
} KNOWN[] = {
    // What eval, task and the studies compare.
    {"kvbudget", {BLUE, MARK_DOT, 0}},
    {"uniform", {VERMILION, MARK_SQUARE, 0}},
    {"pyramid", {GREEN, MARK_UP, 4}},
    {"ada", {PURPLE, MARK_DIAMOND, 4}},
    {"ada-original", {PURPLE, MARK_DIAMOND, 2}},
    {"ada-global", {PURPLE, MARK_DIAMOND, 8}},
    {"lukv", {SKY, MARK_RING, 6}},
    {"mean_ratio", {SKY, MARK_RING, 6}},
    // Ways to make one table of many questions; the first is the default.
    {"mean_loss, shrink 0.1", {BLUE, MARK_DOT, 0}},
    {"mean_loss", {BLUE, MARK_UP, 2}},
    {"worst", {WINE, MARK_DOWN, 4}},
    {"cvar", {ORANGE, MARK_DIAMOND, 4}},
    {"question's optimum", {GREEN, MARK_CROSS, 2}},
    {"headkv", {ORANGE, MARK_DOWN, 4}},
    {"duo", {WINE, MARK_CROSS, 4}},
    {"oracle", {GREY, MARK_CROSS, 2}},
    {"full cache", {GREY, MARK_RING, 2}},
    // Losses of one table.
    {"this table", {BLUE, MARK_DOT, 0}},
    {"even split", {VERMILION, MARK_SQUARE, 0}},
    {"as solved", {SKY, MARK_RING, 6}},
    {"optimum", {GREEN, MARK_UP, 4}},
    {"lower bound", {GREY, MARK_CROSS, 2}},
};
enum { N_KNOWN = sizeof KNOWN / sizeof *KNOWN };

// FNV-1a: the same letters get the same style in every run.
static uint32_t letters(const char *name)
{
    uint32_t h = 2166136261u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 16777619u;
    return h;
}

series_style series_style_of(const char *name)
{
    static const unsigned others[] = {ORANGE, WINE, SKY, GREEN};
    static const series_mark marks[] = {MARK_DOWN, MARK_RING, MARK_CROSS, MARK_UP, MARK_SQUARE};
    size_t best = N_KNOWN, length = 0;
    for (size_t i = 0; i < N_KNOWN; i++) {
        size_t n = strlen(KNOWN[i].name);
        if (strcmp(name, KNOWN[i].name) == 0) return KNOWN[i].style;
        // "kvbudget-strict", "kvbudget:strict": the family's colour
        if (n > length && strncmp(name, KNOWN[i].name, n) == 0 && strchr("-:_, ", name[n])) {
            best = i;
            length = n;
        }
    }
    uint32_t h = letters(name);
    series_style style = {others[h % 4], marks[(h >> 8) % 5], 2 + 2 * ((h >> 16) % 4)};
    if (best < N_KNOWN) style.colour = KNOWN[best].style.colour;
    return style;
}

static bool is_taken(const series_style *styles, size_t n, series_style s)
{
    for (size_t i = 0; i < n; i++)
        if (styles[i].mark == s.mark && styles[i].dash == s.dash) return true;
    return false;
}

void series_styles(const char *const *names, size_t n, series_style *out)
{
    for (size_t i = 0; i < n; i++) {
        out[i] = series_style_of(names[i]);
        for (int tries = 0; tries < N_MARKS && is_taken(out, i, out[i]); tries++)
            out[i].mark = (series_mark)((out[i].mark + 1) % N_MARKS);
    }
}
