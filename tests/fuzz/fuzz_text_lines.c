// Any bytes as a text to make questions of: its lines are inside the text, in order, with correct lengths.
#include "profiler/text/text_lines.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    size_t n, last = 0;
    if (!text) return 0;
    if (size) memcpy(text, data, size);
    text_line *lines = text_lines_find(&n, text, size);
    for (size_t i = 0; i < n; i++) {
        const text_line *l = &lines[i];
        if (l->begin < last || l->head <= l->begin || l->end <= l->head || l->end >= size) abort();
        if (l->end - l->begin < TEXT_LINE_MIN / 3 || memchr(text + l->begin, '\n', l->end - l->begin)) abort();
        text_line_is_han(text + l->begin, l->end - l->begin);
        last = l->end;
    }
    free(lines);
    free(text);
    return 0;
}
