#include "json_file.h"
#include "atomic_file.h"
#include "runtime/fail.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

kvb_status json_write(const char *path, const cJSON *value, kvb_error *err)
{
    char *text = value ? cJSON_Print(value) : NULL;
    if (!text) return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", path);
    atomic_file f;
    kvb_status status = atomic_file_begin(&f, path, err);
    if (status == KVB_OK && fprintf(f.stream, "%s\n", text) < 0) {
        status = kvb_fail(err, KVB_IO, "%s: cannot write: %s; nothing was changed", path, strerror(errno));
        atomic_file_abandon(&f);
    } else if (status == KVB_OK) {
        status = atomic_file_commit(&f, err);
    }
    free(text);
    return status;
}
