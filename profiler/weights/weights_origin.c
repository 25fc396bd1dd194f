#include "profiler/weights/weights_origin.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_name(const char *text, size_t size)
{
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    return size > 0 && size < 97 && text[0] != '.' && strspn(text, allowed) >= size;
}

bool origin_is_id(const char *text)
{
    const char *slash = strchr(text, '/');
    return slash && is_name(text, (size_t)(slash - text)) && is_name(slash + 1, strlen(slash + 1));
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
    if (!is_name(name, length) || !is_commit(commit, size)) return false;
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

// The first line of a file, at most size - 1 bytes of it; false where there is none.
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
    if (o->n_files == o->room) {
        o->room = o->room ? 2 * o->room : 4;
        o->files = need_more(o->files, o->room, sizeof *o->files, "files of weights");
    }
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
    cJSON_AddStringToObject(attributes, "model_container", o->container);
    cJSON_AddStringToObject(attributes, "model_files", text);
    if (o->hf_id[0]) cJSON_AddStringToObject(attributes, "hf_id", o->hf_id);
    if (o->hf_revision[0]) cJSON_AddStringToObject(attributes, "hf_revision", o->hf_revision);
    cJSON_free(text);
    cJSON_Delete(all);
}
