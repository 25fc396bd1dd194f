// Finds lines of a text that can be asked for by their beginning. The text itself gives the answers, so no person or
// model has to write them.
#pragma once
#include <stdbool.h>
#include <stddef.h>

// Lengths of the shortest and longest line, the shortest beginning, and the shortest rest (the answer). In characters,
// where one of three or more bytes of UTF-8 (Chinese, for example) counts as three.
enum { TEXT_LINE_MIN = 30, TEXT_LINE_MAX = 220, TEXT_LINE_HEAD = 14, TEXT_LINE_REST = 8 };

// Bytes [begin, head) of the text are what the question gives, [head, end) is the answer. Surrounding blanks are left
// out.
typedef struct text_line {
    size_t begin, head, end;
} text_line;

// Finds the lines of `text` (UTF-8) that are of good length and begin as no other line does; a line that is too long is
// taken as its sentences. The beginning is TEXT_LINE_HEAD letters and the rest of the word in which they end. A line
// that ends with the text is left out, since the text may have been cut there. The result is malloc'd, in the order of
// the text, and not NULL even when *n is 0.
text_line *text_lines_find(size_t *n, const char *text, size_t size);

// Whether at least half of the text's characters are Han characters; then questions are asked in Chinese.
bool text_line_is_han(const char *text, size_t size);
