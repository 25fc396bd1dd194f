#include "tools/report/output.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

kvb_status output_path(char out[PATH_SIZE], const char *pattern, const char *metric, const char *extension,
                       bool several, kvb_error *err)
{
    static const char MARK[] = "{metric}";
    char name[160];
    size_t n = 0, length = strlen(pattern);
    for (; metric[n] && n + 1 < sizeof name; n++) name[n] = strchr(":=", metric[n]) ? '_' : metric[n];
    name[n] = '\0';
    struct stat info;
    const char *mark = strstr(pattern, MARK);
    bool folder = stat(pattern, &info) == 0 && S_ISDIR(info.st_mode);
    if (several && !mark && !folder)
        return kvb_fail(err, KVB_ARGUMENT,
                        "%s: with several metrics, expected an existing folder or a name with {metric} in it", pattern);
    int used =
        mark     ? snprintf(out, PATH_SIZE, "%.*s%s%s", (int)(mark - pattern), pattern, name, mark + sizeof MARK - 1)
        : folder ? snprintf(out, PATH_SIZE, "%s%s%s%s", pattern, pattern[length - 1] == '/' ? "" : "/", name, extension)
                 : snprintf(out, PATH_SIZE, "%s", pattern);
    return used < PATH_SIZE ? KVB_OK : kvb_fail(err, KVB_ARGUMENT, "%s: the path is too long", pattern);
}

kvb_status output_check(const char *pattern, const output_form *form, const char *const *metrics, size_t n,
                        kvb_error *err)
{
    char path[PATH_SIZE], other[PATH_SIZE];
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < n && status == KVB_OK; i++) {
        status = output_path(path, pattern, metrics[i], form->ending, n > 1, err);
        for (size_t k = 0; k < i && status == KVB_OK; k++) {
            status = output_path(other, pattern, metrics[k], form->ending, true, err);
            if (status == KVB_OK && strcmp(path, other) == 0)
                status = kvb_fail(err, KVB_ARGUMENT,
                                  "%s: metrics %s and %s would be written to the same file; solve one after the other",
                                  path, metrics[k], metrics[i]);
        }
        if (status == KVB_OK) status = named_output(path, form->option, form->kind, err);
    }
    return status;
}
