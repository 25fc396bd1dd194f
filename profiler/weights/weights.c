#include "formats/json_file.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "profiler/weights/gguf.h"
#include "profiler/weights/weights_internal.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const weight_names[N_WEIGHT_KEYS][2] = {
#define WEIGHT_NAMES(name, gguf, hf) [WEIGHT_##name] = {gguf, hf},
    WEIGHT_KEYS(WEIGHT_NAMES) WEIGHT_TEXTS(WEIGHT_NAMES) WEIGHT_LISTS(WEIGHT_NAMES)
#undef WEIGHT_NAMES
};

uint32_t weights_default_type(const weights *w)
{
    static const weight_key keys[] = {WEIGHT_DTYPE, WEIGHT_OLD_DTYPE};
    for (int i = 0; i < 2; i++) {
        char name[32];
        kvb_error unread;
        if (weights_text(w, keys[i], name, sizeof name, &unread) != KVB_OK || !name[0]) continue;
        return strcmp(name, "float32") == 0   ? GGUF_TENSOR_F32
               : strcmp(name, "float16") == 0 ? GGUF_TENSOR_F16
                                              : GGUF_TENSOR_BF16;
    }
    return GGUF_TENSOR_BF16;
}

void weights_close(weights *w)
{
    if (!w) return;
    if (w->kind) w->kind->close(w);
    for (size_t i = 0; i < w->n_names; i++) free(w->names[i].name);
    free_all(w->names, w->files);
    origin_free(&w->origin);
    free(w);
}

const char *weights_key_name(const weights *w, weight_key key, char text[96])
{
    const char *name = weight_names[key][w->is_gguf ? 0 : 1];
    bool prefixed = w->is_gguf && name[0] != '/';
    snprintf(text, 96, "%s%s%s", prefixed ? w->architecture : "", prefixed ? "." : "",
             name + (name[0] == '/' || name[0] == '@' || name[0] == '~'));
    return text;
}

kvb_status weights_number(const weights *w, weight_key key, double *out, bool *found, kvb_error *err)
{
    *found = false;
    return weight_names[key][w->is_gguf ? 0 : 1][0] ? w->kind->number(w, key, out, found, err) : KVB_OK;
}

kvb_status weights_text(const weights *w, weight_key key, char *out, size_t size, kvb_error *err)
{
    out[0] = '\0';
    return weight_names[key][w->is_gguf ? 0 : 1][0] ? w->kind->text(w, key, out, size, err) : KVB_OK;
}

kvb_status weights_list(const weights *w, weight_key key, double *out, size_t max, size_t *n, kvb_error *err)
{
    *n = 0;
    return weight_names[key][w->is_gguf ? 0 : 1][0] ? w->kind->list(w, key, out, max, n, err) : KVB_OK;
}

static int name_compare(const void *a, const void *b)
{
    return strcmp(((const weight_name *)a)->name, ((const weight_name *)b)->name);
}

void weights_add_name(weights *w, const char *name, size_t file)
{
    w->names = need_one_more(w->names, w->n_names, sizeof *w->names, "names of tensors");
    w->names[w->n_names++] = (weight_name){need_text("%s", name), file, false};
}

kvb_status weights_sort_names(weights *w, kvb_error *err)
{
    if (w->n_names) qsort(w->names, w->n_names, sizeof *w->names, name_compare);
    for (size_t i = 1; i < w->n_names; i++)
        if (strcmp(w->names[i - 1].name, w->names[i].name) == 0)
            return kvb_fail(err, KVB_FORMAT, "%s: tensor %.100s is in it twice; the files are damaged", w->name,
                            w->names[i].name);
    return KVB_OK;
}

bool weights_find(weights *w, const char *name, weight_tensor *out)
{
    weight_name wanted = {(char *)(uintptr_t)name, 0, false};
    weight_name *found = w->n_names ? bsearch(&wanted, w->names, w->n_names, sizeof *w->names, name_compare) : NULL;
    if (!found || !name[0]) return false;
    found->claimed = true;
    *out = (weight_tensor){.file = w->name};
    snprintf(out->name, sizeof out->name, "%s", name);
    return w->kind->tensor(w, found, out);
}

const char *weights_unclaimed(const weights *w)
{
    for (size_t i = 0; i < w->n_names; i++)
        if (!w->names[i].claimed && !(w->kind->may_be_left && w->kind->may_be_left(w->names[i].name)))
            return w->names[i].name;
    return NULL;
}

// The state of hashing all files of a source; done and total are bytes.
typedef struct hashing {
    weights_origin *origin;
    sha256_state *all; // over all names and hashes
    const weights_watch *watch;
    uint64_t done, total;
} hashing;

// Hashes a file in pieces, and calls the watch after each of them.
static kvb_status hash_pieces(hashing *h, const char *name, const file_view *map, char out[65], kvb_error *err)
{
    const size_t piece = 64 << 20;
    sha256_state *one = sha256_begin();
    kvb_status status = KVB_OK;
    for (size_t at = 0; status == KVB_OK && at < map->size; at += piece) {
        size_t n = map->size - at < piece ? map->size - at : piece;
        sha256_add(one, map->data + at, n);
        h->done += n;
        if (h->watch && !h->watch->hashed(h->watch->context, (double)h->done, (double)h->total))
            status = kvb_fail(err, KVB_INTERRUPTED, "%s: stopped while it was hashed", name);
    }
    if (status == KVB_OK) sha256_end(one, out);
    else sha256_free(one);
    return status;
}

// Hashes a file, adds it to the origin, and releases the memory of its pages.
static kvb_status hash_file(hashing *h, const weight_file *file, kvb_error *err)
{
    char one[65];
    const char *end = strrchr(file->path, '/'), *name = end ? end + 1 : file->path;
    kvb_status status = hash_pieces(h, name, file->map, one, err);
    file_forget(file->map);
    if (status != KVB_OK) return status;
    sha256_add(h->all, name, strlen(name) + 1);
    sha256_add(h->all, one, 64);
    origin_add_file(h->origin, name, one);
    return KVB_OK;
}

kvb_status weights_identify(weights *w, const weights_watch *watch, char sha256[65], kvb_error *err)
{
    hashing h = {.origin = &w->origin, .all = sha256_begin(), .watch = watch};
    origin_free(&w->origin);
    char *text = w->kind->describe(w, &w->origin);
    kvb_status status = KVB_OK;
    if (text) sha256_add(h.all, text, strlen(text) + 1);
    for (size_t i = 0; i < w->n_files; i++) h.total += w->files[i].map->size;
    for (size_t i = 0; status == KVB_OK && i < w->n_files; i++) status = hash_file(&h, &w->files[i], err);
    if (status == KVB_OK) sha256_end(h.all, sha256);
    else sha256_free(h.all);
    bool one_gguf = status == KVB_OK && w->is_gguf && w->n_files == 1; // then the file's own hash
    if (one_gguf) memcpy(sha256, w->origin.files[0].sha256, sizeof w->origin.files[0].sha256);
    cJSON_free(text);
    return status;
}

void weights_add_file(weights *w, const char *path, const file_view *map)
{
    w->files = need_more(w->files, w->n_files + 1, sizeof *w->files, "files of weights");
    w->files[w->n_files++] = (weight_file){path, map};
}

kvb_status weights_check(const weights *w, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; status == KVB_OK && i < w->n_files; i++)
        status = file_check(w->files[i].map, w->files[i].path, err);
    return status;
}

void weights_forget(const weights *w)
{
    for (size_t i = 0; i < w->n_files; i++) file_forget(w->files[i].map);
}

// ---- Where weights came from ----

static bool is_plain_name(const char *text, size_t size)
{
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    return size > 0 && size < 97 && text[0] != '.' && strspn(text, allowed) >= size;
}

bool origin_is_id(const char *text)
{
    const char *slash = strchr(text, '/');
    return slash && is_plain_name(text, (size_t)(slash - text)) && is_plain_name(slash + 1, strlen(slash + 1));
}

static bool is_commit(const char *text, size_t size)
{
    return size >= 40 && size <= 64 && strspn(text, "0123456789abcdef") >= size;
}

bool origin_from_path(char id[200], char revision[65], const char *folder)
{
    static const char models[] = "/models--", snapshots[] = "/snapshots/";
    const char *name = NULL, *cut = NULL;
    for (const char *at = strstr(folder, models); at; at = strstr(at + 1, models)) name = at + sizeof models - 1;
    const char *end = name ? strchr(name, '/') : NULL;
    if (!end || strncmp(end, snapshots, sizeof snapshots - 1) != 0) return false;
    const char *commit = end + sizeof snapshots - 1;
    size_t size = strcspn(commit, "/"), length = (size_t)(end - name);
    if (!is_plain_name(name, length) || !is_commit(commit, size)) return false;
    cut = strstr(name, "--");
    if (cut && cut < end) snprintf(id, 200, "%.*s/%.*s", (int)(cut - name), name, (int)(end - cut - 2), cut + 2);
    else snprintf(id, 200, "%.*s", (int)length, name);
    snprintf(revision, 65, "%.*s", (int)size, commit);
    return true;
}

bool origin_from_url(char id[200], const char *url)
{
    static const char hub[] = "https://huggingface.co/";
    char text[200];
    if (strncmp(url, hub, sizeof hub - 1) != 0) return false;
    snprintf(text, sizeof text, "%s", url + sizeof hub - 1);
    char *slash = strchr(text, '/');
    if (slash) slash[1 + strcspn(slash + 1, "/?#")] = '\0';
    if (!origin_is_id(text)) return false;
    snprintf(id, 200, "%s", text);
    return true;
}

// Reads the first line of a file, at most size - 1 bytes of it. Returns false if there is none.
static bool first_line(char *out, size_t size, const char *path)
{
    FILE *file = fopen(path, "r");
    bool read = file && fgets(out, (int)size, file);
    if (file) (void)fclose(file); // only read
    if (read) out[strcspn(out, "\r\n")] = '\0';
    return read;
}

void origin_of_folder(weights_origin *o, const char *folder, const char *file)
{
    char *whole = realpath(folder, NULL), path[4096], line[80];
    bool found = whole && origin_from_path(o->hf_id, o->hf_revision, whole);
    free(whole);
    if (found ||
        (size_t)snprintf(path, sizeof path, "%s/.cache/huggingface/download/%s.metadata", folder, file) >= sizeof path)
        return;
    if (first_line(line, sizeof line, path) && is_commit(line, strlen(line)))
        snprintf(o->hf_revision, sizeof o->hf_revision, "%.64s", line);
}

void origin_add_file(weights_origin *o, const char *path, const char sha256[65])
{
    o->files = need_one_more(o->files, o->n_files, sizeof *o->files, "files of weights");
    const char *slash = strrchr(path, '/');
    weights_file *f = &o->files[o->n_files++];
    snprintf(f->name, sizeof f->name, "%s", slash ? slash + 1 : path);
    for (char *p = f->name; *p; p++)
        if (*p < ' ' || *p > '~') *p = '?';
    memcpy(f->sha256, sha256, sizeof f->sha256);
}

void origin_free(weights_origin *o)
{
    free(o->files);
    *o = (weights_origin){0};
}

void origin_describe(const weights_origin *o, cJSON *attributes)
{
    cJSON *all = cJSON_CreateObject();
    for (size_t i = 0; i < o->n_files; i++) cJSON_AddStringToObject(all, o->files[i].name, o->files[i].sha256);
    char *text = cJSON_PrintUnformatted(all);
    json_put(attributes, "model_container %s model_files %s", o->container, text);
    if (o->hf_id[0]) cJSON_AddStringToObject(attributes, "hf_id", o->hf_id);
    if (o->hf_revision[0]) cJSON_AddStringToObject(attributes, "hf_revision", o->hf_revision);
    cJSON_free(text);
    cJSON_Delete(all);
}
