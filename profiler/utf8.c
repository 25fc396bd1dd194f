#include "profiler/utf8.h"
#include "runtime/fail.h"
#include <stdlib.h>
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

kvb_status utf8_repair(const char *text, size_t size, const char **out, size_t *out_size, char **owned, kvb_error *err)
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
    if (broken == 0) return KVB_OK;

    char *w = *owned = malloc(repaired);
    if (!w) return kvb_fail(err, KVB_MEMORY, "not enough memory for %zu bytes of text", repaired);
    for (size_t at = 0, step; at < size; at += step) {
        step = utf8_step(p + at, size - at, &valid);
        if (valid) w = (char *)memcpy(w, p + at, step) + step;
        else w = (char *)memcpy(w, replacement, sizeof replacement) + sizeof replacement;
    }
    *out = *owned;
    *out_size = repaired;
    return KVB_OK;
}
