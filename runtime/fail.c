#include "fail.h"
#include "text.h"
#include <stdio.h>
#include <string.h>

const char *kvb_status_name(kvb_status status)
{
    static const char *const names[] = {
#define KVB_STATUS_NAME(name, text) #name,
        KVB_STATUS_LIST(KVB_STATUS_NAME)
#undef KVB_STATUS_NAME
    };
    size_t i = (size_t)status;
    return i < sizeof names / sizeof names[0] ? names[i] : "UNKNOWN";
}

static size_t skip_continuation(const char *text, size_t at)
{
    while (((unsigned char)text[at] & 0xc0) == 0x80) ++at;
    return at;
}

// Messages begin with a path and end with what is wrong, so one that is too long loses its middle.
static void cut_middle(kvb_error *err, const char *whole, size_t size)
{
    static const char mark[] = " ... ";
    enum { ROOM = sizeof err->message - 1, HEAD = 160, TAIL = ROOM - HEAD - (sizeof mark - 1) };
    size_t head = HEAD, tail = skip_continuation(whole, size - TAIL);
    while (head > 0 && ((unsigned char)whole[head] & 0xc0) == 0x80) --head;
    memcpy(err->message, whole, head);
    memcpy(err->message + head, mark, sizeof mark - 1);
    memcpy(err->message + head + sizeof mark - 1, whole + tail, size - tail + 1); // with its NUL
}

kvb_status kvb_fail(kvb_error *err, kvb_status status, const char *format, ...)
{
    if (err) {
        va_list args, again;
        int size;
        va_start(args, format);
        va_copy(again, args);
        size = vsnprintf(err->message, sizeof err->message, format, args);
        if (size >= (int)sizeof err->message) {
            char whole[8192]; // on the stack, so that an error needs no memory: twice the longest path
            vsnprintf(whole, sizeof whole, format, again);
            cut_middle(err, whole, strlen(whole));
        }
        va_end(again);
        va_end(args);
        kvb_clean_text(err->message);
        err->status = status;
    }
    return status;
}
