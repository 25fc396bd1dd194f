#include "profiler/text/text_lines.h"
#include "formats/need.h"
#include "profiler/text/utf8.h"
#include "runtime/text.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct line_list {
    text_line *lines;
    size_t n;
} line_list;

static const char *const ENDS[] = {"。", "！", "？", ".", "!", "?"}; // of sentences; a blank follows the last three
enum { N_ENDS = sizeof ENDS / sizeof *ENDS, N_WIDE_ENDS = 3 };

// Returns the bytes of the character at `at`; 1 for a byte that begins none.
static size_t step(const char *at, size_t left)
{
    size_t bytes = kvb_utf8_size(at, left);
    return bytes ? bytes : 1;
}

static size_t letters_of(size_t bytes)
{
    return bytes < 3 ? 1 : 3;
}

static size_t count_letters(const char *text, size_t size)
{
    size_t letters = 0;
    for (size_t at = 0, bytes; at < size; at += bytes) letters += letters_of(bytes = step(text + at, size - at));
    return letters;
}

// Whether a sentence ends with the character of `bytes` bytes at text[at].
static bool ends_sentence(const char *text, size_t at, size_t bytes, size_t end)
{
    for (size_t i = 0; i < N_ENDS; i++)
        if (strlen(ENDS[i]) == bytes && memcmp(text + at, ENDS[i], bytes) == 0)
            return i < N_WIDE_ENDS || (at + 1 < end && text[at + 1] == ' ');
    return false;
}

// Adds text[begin, end) without its outer blanks, unless it is all blank.
static void add_text_line(line_list *to, const char *text, size_t begin, size_t end)
{
    begin += utf8_spaces_before(text + begin, end - begin);
    end -= utf8_spaces_behind(text + begin, end - begin);
    if (begin == end) return;
    to->lines = need_one_more(to->lines, to->n, sizeof *to->lines, "lines of a text");
    to->lines[to->n++] = (text_line){begin, end, end};
}

static void add_sentences(line_list *to, const char *text, size_t begin, size_t end)
{
    for (size_t at = begin, bytes; at < end; at += bytes) {
        bytes = step(text + at, end - at);
        if (!ends_sentence(text, at, bytes, end)) continue;
        add_text_line(to, text, begin, at + bytes);
        begin = at + bytes;
    }
    add_text_line(to, text, begin, end);
}

static void add_all(line_list *to, const char *text, size_t size)
{
    for (size_t begin = 0, end; begin < size; begin = end + 1) {
        const char *newline = memchr(text + begin, '\n', size - begin);
        end = newline ? (size_t)(newline - text) : size;
        bool whole = count_letters(text + begin, end - begin) <= TEXT_LINE_MAX;
        (whole ? add_text_line : add_sentences)(to, text, begin, end);
    }
}

// Returns where the question stops and the answer begins: behind the word that was begun, unless it ends the line.
static size_t head_end(const char *text, const text_line *line)
{
    size_t at = line->begin, letters = 0, bytes;
    for (; at < line->end && letters < TEXT_LINE_HEAD; at += bytes) {
        bytes = step(text + at, line->end - at);
        letters += letters_of(bytes);
    }
    size_t word = at;
    while (word < line->end && text[word] != ' ' && (bytes = step(text + word, line->end - word)) < 3) word += bytes;
    return word < line->end ? word : at;
}

// For qsort_r: lines by their bytes, equal ones by their place.
static int compare_lines(const void *a, const void *b, void *text)
{
    const text_line *x = a, *y = b;
    size_t of_x = x->end - x->begin, of_y = y->end - y->begin;
    int order = memcmp((const char *)text + x->begin, (const char *)text + y->begin, of_x < of_y ? of_x : of_y);
    if (order == 0) order = (of_x > of_y) - (of_x < of_y);
    return order ? order : (x->begin > y->begin) - (x->begin < y->begin);
}

static int compare_places(const void *a, const void *b)
{
    const text_line *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

static bool begins_like(const char *text, const text_line *line, const text_line *other)
{
    size_t head = line->head - line->begin;
    return other->end - other->begin >= head && memcmp(text + line->begin, text + other->begin, head) == 0;
}

// Whether a line can be asked for. Lines are sorted by their bytes, so those that begin alike are neighbours.
static bool is_good(const char *text, size_t size, const line_list *sorted, size_t i)
{
    const text_line *line = &sorted->lines[i];
    size_t letters = count_letters(text + line->begin, line->end - line->begin);
    if (letters < TEXT_LINE_MIN || letters > TEXT_LINE_MAX) return false;
    if (line->end + utf8_spaces_before(text + line->end, size - line->end) == size) return false;
    if (count_letters(text + line->head, line->end - line->head) < TEXT_LINE_REST) return false;
    if (i > 0 && begins_like(text, line, line - 1)) return false;
    return i + 1 == sorted->n || !begins_like(text, line, line + 1);
}

text_line *text_lines_find(size_t *n, const char *text, size_t size)
{
    line_list all = {0};
    *n = 0;
    add_all(&all, text, size);
    text_line *found = need(all.n, sizeof *found, "lines of a text");
    for (size_t i = 0; i < all.n; i++) all.lines[i].head = head_end(text, &all.lines[i]);
    if (all.n) qsort_r(all.lines, all.n, sizeof *all.lines, compare_lines, (void *)(uintptr_t)text);
    for (size_t i = 0; i < all.n; i++)
        if (is_good(text, size, &all, i)) found[(*n)++] = all.lines[i];
    qsort(found, *n, sizeof *found, compare_places);
    free(all.lines);
    return found;
}

bool text_line_is_han(const char *text, size_t size)
{
    static const char first[] = "\xe4\xb8\x80", last[] = "\xe9\xbf\xbf"; // U+4E00, U+9FFF
    size_t han = 0, all = 0;
    for (size_t at = 0, bytes; at < size; at += bytes, all++) {
        bytes = step(text + at, size - at);
        han += bytes == 3 && memcmp(text + at, first, 3) >= 0 && memcmp(text + at, last, 3) <= 0;
    }
    return 2 * han >= all;
}
