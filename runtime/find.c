// Finds the table of a model among those in a folder, such as the ready tables that come with kvbudget.
#include "fail.h"
#include "table.h"
#include "text.h"
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

enum { PATH_SIZE = 4096, NO_FIT = 0, FITS_BY_NAME = 1, FITS_BY_HASH = 2 };

typedef struct folder_search {
    const kvb_expectation *mine;
    const kvb_weights *weights;                 // never NULL
    char best[PATH_SIZE], near_path[PATH_SIZE]; // the best table so far; the first that comes close
    char reason[320];                           // why that one does not fit
    int fit;                                    // how well the best one fits
    unsigned n_tables;
} folder_search;

static int lower_case(char c)
{
    return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c;
}

// What may follow a model's name: nothing, or the end of a GGUF file's name, "-Q8_0.gguf", ".iq3_xs.gguf", ".gguf".
static bool ends_name(const char *rest)
{
    char small[24] = "";
    size_t n = strlen(rest);
    if (n >= sizeof small) return false;
    for (size_t i = 0; i < n; i++) small[i] = (char)lower_case(rest[i]);
    if (n == 0 || strcmp(small, ".gguf") == 0) return true;
    const char *format = small + 1 + (small[1] == 'i' || small[1] == 'b');
    return kvb_ends_with(small, ".gguf") && (*small == '-' || *small == '.') && (*format == 'q' || *format == 'f') &&
           format[1] >= '1' && format[1] <= '8' && !strchr(small + 1, '-');
}

// Whether `name` is in a list separated by commas. A name without '/' is compared with what follows the '/' of theirs.
static bool is_in_names(const char *names, const char *name)
{
    while (names && *names) {
        size_t length = strcspn(names, ","), from = 0, same = 0;
        for (size_t i = 0; i < length && !strchr(name, '/'); i++)
            if (names[i] == '/') from = i + 1;
        while (from + same < length && lower_case(names[from + same]) == lower_case(name[same])) same++;
        if (from + same == length && same && ends_name(name + same)) return true;
        names += length + (names[length] == ',');
    }
    return false;
}

static int fit_of_weights(const folder_search *s, const kvb_table *t)
{
    const kvb_weights files = {.file_sha256 = s->weights->file_sha256, .n_files = s->weights->n_files};
    const char *hash = s->mine->model_sha256, *name = s->weights->hf_id;
    if ((hash && *hash && kvb_same_hash(hash, t->info.model_sha256)) ||
        (files.n_files && kvb_table_check_weights(t, &files, NULL) == KVB_OK))
        return FITS_BY_HASH;
    bool named = name && (is_in_names(kvb_table_metadata(t, "hf_id"), name) ||
                          is_in_names(kvb_table_metadata(t, "model_names"), name));
    return named ? FITS_BY_NAME : NO_FIT;
}

static void look_at_table(folder_search *s, const kvb_table *t, const char *path)
{
    kvb_expectation others = *s->mine;
    kvb_error why;
    const char *names = kvb_table_metadata(t, "model_names");
    int fit = fit_of_weights(s, t);
    others.model_sha256 = NULL;
    bool agrees = kvb_table_check(t, &others, &why) == KVB_OK;
    s->n_tables++;
    if (agrees && (fit > s->fit || (fit && fit == s->fit && strcmp(path, s->best) < 0))) {
        s->fit = fit;
        memcpy(s->best, path, strlen(path) + 1);
    }
    if ((!agrees && !fit) || (*s->near_path && strcmp(path, s->near_path) > 0)) return;
    memcpy(s->near_path, path, strlen(path) + 1);
    if (!agrees) snprintf(s->reason, sizeof s->reason, "%.300s", why.message);
    else
        snprintf(s->reason, sizeof s->reason,
                 "%.90s has this shape and is for %.120s; if your weights are those, give its path", t->name,
                 names ? names : "other weights");
}

// Skips damaged files and files that are not tables.
static kvb_status look_at_file(folder_search *s, const char *folder, const char *name, kvb_error *err)
{
    char path[PATH_SIZE];
    kvb_table *table;
    int n = snprintf(path, sizeof path, "%s/%s", folder, name);
    if (n < 0 || (size_t)n >= sizeof path)
        return kvb_fail(err, KVB_ARGUMENT, "%s: expected a path of at most %d bytes", folder, PATH_SIZE - 1);
    kvb_error why = {KVB_OK, ""};
    if (kvb_table_open(&table, path, NULL, &why) == KVB_OK) look_at_table(s, table, path);
    kvb_table_close(table);
    return why.status == KVB_MEMORY ? kvb_fail(err, KVB_MEMORY, "%s", why.message) : KVB_OK;
}

static kvb_status fail_not_found(const folder_search *s, const char *folder, kvb_error *err)
{
    const kvb_expectation *m = s->mine;
    char others[240];
    snprintf(others, sizeof others, "none of the %u tables in %.150s is", s->n_tables, folder);
    return kvb_fail(err, KVB_MISMATCH,
                    "no table for \"%.80s\", %u layers with %u query and %u KV heads of %u numbers: %s; "
                    "`kvbudget tune` makes one",
                    s->weights->hf_id ? s->weights->hf_id : "", (unsigned)m->n_layers, (unsigned)m->n_heads,
                    (unsigned)m->n_kv_heads, (unsigned)m->head_dim, *s->near_path ? s->reason : others);
}

kvb_status kvb_table_find(char *path, size_t cap, const char *folder, const kvb_expectation *mine,
                          const kvb_weights *weights, kvb_error *err)
{
    static const kvb_weights nothing;
    folder_search s = {.mine = mine, .weights = weights ? weights : &nothing};
    kvb_status status = KVB_OK;
    if (!path || !folder || !mine || (s.weights->n_files && !s.weights->file_sha256) || !mine->n_layers ||
        !mine->n_heads || !mine->n_kv_heads || !mine->head_dim)
        return kvb_fail(err, KVB_ARGUMENT,
                        "kvb_table_find: path, folder, mine and hashes must not be NULL, nor a number of the shape 0");
    DIR *open = opendir(folder);
    if (!open)
        return kvb_fail(err, KVB_IO,
                        "%s: opening the folder: %s; expected a folder of tables (kvbudget tables --add makes one)",
                        folder, strerror(errno));
    for (const struct dirent *d; !status && (d = readdir(open));)
        if (kvb_ends_with(d->d_name, ".safetensors")) status = look_at_file(&s, folder, d->d_name, err);
    (void)closedir(open);
    if (status) return status;
    if (!s.fit) return fail_not_found(&s, folder, err);
    if (strlen(s.best) >= cap)
        return kvb_fail(err, KVB_CAPACITY, "%s: its path needs room for %zu bytes, found %zu", s.best,
                        strlen(s.best) + 1, cap);
    memcpy(path, s.best, strlen(s.best) + 1);
    return KVB_OK;
}
