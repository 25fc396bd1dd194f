#include "tools/report/html.h"
#include "formats/need.h"
#include "runtime/text.h"
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static const char REPLACEMENT[] = "\xEF\xBF\xBD"; // U+FFFD

static void put_byte(FILE *out, unsigned char c)
{
    static const char *const escapes[] = {
        ['&'] = "&amp;", ['<'] = "&lt;", ['>'] = "&gt;", ['"'] = "&quot;", ['\''] = "&#39;"};
    const char *escape = c < sizeof escapes / sizeof *escapes ? escapes[c] : NULL;
    if (escape) fputs(escape, out);
    else fputc((c < 0x20 && c != '\n') || c == 0x7f ? '?' : c, out);
}

void html_put(FILE *out, const char *text)
{
    const unsigned char *p = (const unsigned char *)text;
    for (size_t left = strlen(text); left > 0;) {
        size_t size = kvb_utf8_size((const char *)p, left);
        if (size == 1) put_byte(out, *p);
        else if (!kvb_is_shown((const char *)p, size)) fputs(REPLACEMENT, out);
        else fwrite(p, 1, size, out);
        if (size == 0) size = 1;
        p += size;
        left -= size;
    }
}

void html_fill(FILE *out, const char *markup, ...)
{
    va_list texts;
    va_start(texts, markup);
    for (const char *gap; (gap = strstr(markup, "%s")); markup = gap + 2) {
        fwrite(markup, 1, (size_t)(gap - markup), out);
        html_put(out, va_arg(texts, const char *));
    }
    fputs(markup, out);
    va_end(texts);
}

void html_shell_word(FILE *out, const char *word)
{
    static const char PLAIN[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-+=:,./@%";
    if (*word && strspn(word, PLAIN) == strlen(word)) {
        html_put(out, word);
        return;
    }
    html_put(out, "'");
    for (size_t n; *word; word += n) {
        n = *word == '\'' ? 1 : strcspn(word, "'");
        char *part = *word == '\'' ? need_text("'\\''") : need_text("%.*s", (int)n, word);
        html_put(out, part);
        free(part);
    }
    html_put(out, "'");
}
