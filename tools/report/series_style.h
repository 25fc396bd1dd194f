// One colour and one mark per allocator, the same in every picture and page. They differ for colour-blind readers
// (Okabe and Ito's colours), and without any colour by mark and dashes.
#pragma once
#include <stddef.h>

typedef enum series_mark { MARK_DOT, MARK_SQUARE, MARK_DIAMOND, MARK_UP, MARK_DOWN, MARK_CROSS, MARK_RING } series_mark;
enum { N_MARKS = MARK_RING + 1 };

typedef struct series_style {
    unsigned colour; // 0xRRGGBB, to be read on white and on black
    series_mark mark;
    unsigned dash; // length of a dash and of the gap behind it, pixels; 0: a solid line
} series_style;

// The style of what is drawn under this name: of the allocator that it names or begins with ("kvbudget-exact" looks
// like no other, but is as blue as "kvbudget"). Names that are not known get one of the remaining by their letters.
series_style series_style_of(const char *name);

// Of the lines of one picture: those of series_style_of(), but where two unknown names got the same one, the later has
// another mark.
void series_styles(const char *const *names, size_t n, series_style *out);
