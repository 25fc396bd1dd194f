// Opens weights as the kind of source that a path leads to.
#include "formats/need.h"
#include "profiler/weights/weights_internal.h"
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

// Writes to `folder` the folder that `path` is, or whose config.json it is. Returns false for anything else.
static bool folder_of(const char *path, char *folder, size_t size)
{
    static const char config[] = "config.json";
    size_t n = strlen(path), m = sizeof config - 1;
    bool named = n >= m && strcmp(path + n - m, config) == 0 && (n == m || path[n - m - 1] == '/');
    struct stat st;
    if (!named && (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))) return false;
    if (named) n = n > m ? n - m - 1 : 0;
    return (size_t)snprintf(folder, size, "%.*s", (int)(n ? n : 1), n ? path : ".") < size;
}

kvb_status weights_open(weights **out, const char *path, bool config_suffices, kvb_error *err)
{
    char folder[4096];
    *out = NULL;
    weights *w = need(1, sizeof *w, "models");
    snprintf(w->name, sizeof w->name, "%s", path);
    kvb_status status = folder_of(path, folder, sizeof folder) ? weights_open_folder(w, folder, config_suffices, err)
                                                               : weights_open_gguf(w, path, err);
    if (status == KVB_OK) *out = w;
    else weights_close(w);
    return status;
}
