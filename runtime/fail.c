#include "fail.h"
#include <stdio.h>

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

kvb_status kvb_fail(kvb_error *err, kvb_status status, const char *format, ...)
{
    if (err) {
        va_list args;
        va_start(args, format);
        vsnprintf(err->message, sizeof err->message, format, args);
        va_end(args);
        err->status = status;
    }
    return status;
}
