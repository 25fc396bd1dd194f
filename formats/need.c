#include "formats/need.h"
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void (*_Atomic before_stopping)(void);

void need_before_stopping(void (*clean)(void))
{
    before_stopping = clean;
}

static _Noreturn void stop(size_t count, size_t size, const char *what)
{
    char each[80] = "";
    if (count) snprintf(each, sizeof each, ", %zu of %zu bytes each", count, size);
    fprintf(stderr,
            "kvbudget: no memory for %s%s; close other programs, give less data or fewer threads, or run it on a "
            "machine with more memory\n",
            what, each);
    void (*clean)(void) = before_stopping;
    if (clean) clean();
    _exit(1); // exit() would run what other threads may still be using
}

void *need_more(void *old, size_t count, size_t size, const char *what)
{
    if (size && count > SIZE_MAX / size) stop(count, size, what);
    size_t bytes = count * size;
    void *p = realloc(old, bytes ? bytes : 1);
    if (!p) stop(count, size, what);
    return p;
}

void *need_one_more(void *old, size_t n, size_t size, const char *what)
{
    return n & (n - 1) ? old : need_more(old, n ? 2 * n : 1, size, what);
}

void *need(size_t count, size_t size, const char *what)
{
    void *p = calloc(count ? count : 1, size ? size : 1); // checks the product itself
    if (!p) stop(count, size, what);
    return p;
}

void *need_copy(const void *from, size_t count, size_t size, const char *what)
{
    void *p = need_more(NULL, count, size, what);
    if (count && size) memcpy(p, from, count * size);
    return p;
}

void *needed(void *p, const char *what)
{
    if (!p) stop(0, 0, what);
    return p;
}

void free_each(void *const *blocks, size_t n)
{
    for (size_t i = 0; i < n; i++) free(blocks[i]);
}

char *need_text(const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    char *text = need(n < 0 ? 1 : (size_t)n + 1, 1, "characters");
    if (n >= 0) vsnprintf(text, (size_t)n + 1, format, again);
    va_end(again);
    va_end(args);
    return text;
}
