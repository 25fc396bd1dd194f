#include "profiler/text/utf8.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <string.h>

// The table of well-formed sequences in the Unicode standard (3-7): only the second byte's range depends on the first.
size_t utf8_step(const unsigned char *p, size_t n, bool *valid)
{
    unsigned char lead = p[0], low = 0x80, high = 0xbf;
    size_t length = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
    if (lead == 0xe0) low = 0xa0;       // shorter forms exist
    else if (lead == 0xed) high = 0x9f; // surrogates
    else if (lead == 0xf0) low = 0x90;  // shorter forms exist
    else if (lead == 0xf4) high = 0x8f; // beyond U+10FFFF
    *valid = length == 1;
    if (length <= 1) return 1;
    for (size_t i = 1; i < length; i++, low = 0x80, high = 0xbf)
        if (i >= n || p[i] < low || p[i] > high) return i;
    *valid = true;
    return length;
}

void utf8_repair(const char *text, size_t size, const char **out, size_t *out_size, char **owned)
{
    static const char replacement[3] = "\xef\xbf\xbd"; // U+FFFD
    const unsigned char *p = (const unsigned char *)text;
    size_t repaired = 0, broken = 0;
    bool valid;
    for (size_t at = 0, step; at < size; at += step) {
        step = utf8_step(p + at, size - at, &valid);
        repaired += valid ? step : sizeof replacement;
        broken += !valid;
    }
    *owned = NULL;
    *out = text;
    *out_size = size;
    if (broken == 0) return;

    char *w = *owned = need(repaired, 1, "bytes of text");
    for (size_t at = 0, step; at < size; at += step) {
        step = utf8_step(p + at, size - at, &valid);
        if (valid) w = (char *)memcpy(w, p + at, step) + step;
        else w = (char *)memcpy(w, replacement, sizeof replacement) + sizeof replacement;
    }
    *out = *owned;
    *out_size = repaired;
}

kvb_status utf8_check_text(const char *name, const char *text, size_t size, kvb_error *err)
{
    bool valid = true;
    for (size_t at = 0, step; at < size; at += step) {
        step = utf8_step((const unsigned char *)text + at, size - at, &valid);
        if (!valid || !text[at])
            return kvb_fail(err, KVB_FORMAT,
                            "%s: byte %zu is 0x%02x, expected UTF-8 text without NUL; iconv converts other encodings",
                            name, at, (unsigned char)text[at]);
    }
    return KVB_OK;
}

// Returns the bytes of the space character at `text`, as Python's str.strip() defines it; 0 if there is none.
static size_t space_size(const char *text, size_t size)
{
    static const char *const wide[] = {"\xC2\x85",     "\xC2\xA0",     "\xE1\x9A\x80", "\xE2\x80\xA8",
                                       "\xE2\x80\xA9", "\xE2\x80\xAF", "\xE2\x81\x9F", "\xE3\x80\x80"};
    if (!size) return 0;
    if (*text && strchr(" \t\n\v\f\r\x1c\x1d\x1e\x1f", *text)) return 1;
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
        size_t n = strlen(wide[i]);
        if (size >= n && memcmp(text, wide[i], n) == 0) return n;
    }
    bool quad = size >= 3 && memcmp(text, "\xE2\x80", 2) == 0; // U+2000 to U+200A
    return quad && (unsigned char)text[2] >= 0x80 && (unsigned char)text[2] <= 0x8A ? 3 : 0;
}

size_t utf8_spaces_before(const char *text, size_t size)
{
    size_t n = 0;
    for (size_t one; (one = space_size(text + n, size - n)); n += one) continue;
    return n;
}

size_t utf8_spaces_behind(const char *text, size_t size)
{
    size_t n = 0, one;
    do {
        for (one = 3; one > 0; one--)
            if (size - n >= one && space_size(text + size - n - one, one) == one) break;
        n += one;
    } while (one);
    return n;
}
