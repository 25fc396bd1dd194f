#include "profiler/profile_kept.h"
#include "formats/kept_file.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { PIECE = 1 << 20 }; // floats that are moved at a time

// A hash of all that the floats depend on and the head of the parts does not say, or says of all contexts.
static kvb_status make_key(char key[65], const kept_prefill *k, kvb_error *err)
{
    const backend *b = k->m->device->b;
    sha256_state *sum = NULL;
    kvb_status status = sha256_begin(&sum, err);
    if (status == KVB_OK) status = sha256_add(sum, b->name, strlen(b->name) + 1, err);
    if (status == KVB_OK) status = sha256_add(sum, b->compute, strlen(b->compute) + 1, err);
    for (size_t i = 0; status == KVB_OK && i < k->o->n_metrics; i++)
        if (profile_scores_metric(k->job, k->c, i))
            status = sha256_add(sum, k->o->metrics[i].spec, strlen(k->o->metrics[i].spec) + 1, err);
    if (status == KVB_OK) status = sha256_add(sum, k->c->ids, k->c->n_tokens * sizeof *k->c->ids, err);
    if (status == KVB_OK) status = sha256_end(sum, key, err);
    sha256_free(sum);
    return status;
}

// Floats of one metric's scores of the first `layers` layers.
static uint64_t score_floats(const kept_prefill *k, uint32_t layers)
{
    const model_config *c = &k->m->config;
    return (uint64_t)model_budgeted(c, layers) * c->n_kv_heads * k->c->n_tokens;
}

static uint64_t count_floats(const kept_prefill *k, uint32_t layers, const forward_stretch *stretches)
{
    uint64_t floats = 0;
    for (int i = 0; i < FORWARD_STRETCHES; i++) floats += stretches[i].floats;
    for (size_t i = 0; i < k->o->n_metrics; i++)
        if (profile_scores_metric(k->job, k->c, i)) floats += score_floats(k, layers);
    return floats;
}

// ---- Writing ----

static kvb_status check_space(uint64_t bytes, const char *path, kvb_error *err)
{
    struct statvfs fs;
    char folder[4096];
    const char *end = strrchr(path, '/');
    snprintf(folder, sizeof folder, "%.*s", end ? (int)(end - path) : 1, end ? path : ".");
    if (statvfs(folder, &fs) != 0) return KVB_OK; // writing it will tell
    uint64_t left = (uint64_t)fs.f_bavail * fs.f_frsize;
    if (bytes <= left / 2) return KVB_OK;
    return kvb_fail(err, KVB_IO, "it would take %.2f GiB, more than half of the %.2f GiB that are free",
                    (double)bytes / 0x1p30, (double)left / 0x1p30);
}

static kvb_status put_stretch(kept_file *file, const kept_prefill *k, const forward_stretch *s, float *buffer,
                              kvb_error *err)
{
    backend_device *on = k->m->device;
    kvb_status status = KVB_OK;
    for (uint64_t at = 0; status == KVB_OK && at < s->floats; at += PIECE) {
        uint64_t n = s->floats - at < PIECE ? s->floats - at : PIECE;
        on->b->download(on, buffer, dev_at(s->memory, at), n);
        status = kept_file_put(file, buffer, n, err);
    }
    return status;
}

static kvb_status write_kept(uint64_t *bytes, const kept_prefill *k, uint32_t layers, const char *path, kvb_error *err)
{
    forward_stretch stretches[FORWARD_STRETCHES];
    kept_header header = {.layers = layers};
    kept_file *file = NULL;
    kvb_status status = forward_stretches(k->f, layers, stretches, err);
    if (status != KVB_OK) return status;
    header.floats = count_floats(k, layers, stretches);
    *bytes = kept_file_bytes(header.floats);
    status = check_space(*bytes, path, err);
    if (status == KVB_OK) status = make_key(header.key, k, err);
    float *buffer = need(PIECE, sizeof *buffer, "floats of a buffer");
    if (status == KVB_OK) status = kept_file_create(&file, path, &header, err);
    for (int i = 0; status == KVB_OK && i < FORWARD_STRETCHES; i++)
        status = put_stretch(file, k, &stretches[i], buffer, err);
    for (size_t i = 0; status == KVB_OK && i < k->o->n_metrics; i++)
        if (profile_scores_metric(k->job, k->c, i))
            status = kept_file_put(file, k->scores[i], score_floats(k, layers), err);
    free(buffer);
    return kept_file_end(file, status, err);
}

kvb_status profile_keep(const kept_prefill *k, uint32_t layers, const kvb_error *stopped, kvb_error *err)
{
    char *path = needed(record_writer_kept_path(k->record, k->c->id), "the name of a file");
    kvb_error why = {0};
    uint64_t bytes = 0;
    kvb_status status = write_kept(&bytes, k, layers, path, &why);
    free(path);
    if (status != KVB_OK)
        return kvb_fail(err, KVB_INTERRUPTED, "%s; its prefill is not kept: %s", stopped->message, why.message);
    return kvb_fail(err, KVB_INTERRUPTED, "%s; %u of %u layers of its prefill are kept (%.1f MB)", stopped->message,
                    layers, k->m->config.n_layers, (double)bytes / 1e6);
}

void profile_drop_kept(const kept_prefill *k)
{
    char *path = needed(record_writer_kept_path(k->record, k->c->id), "the name of a file");
    (void)unlink(path);
    free(path);
}

// ---- Reading ----

// The header against what this run would write, and the first layer's keys, which forward_prefill_first has made,
// against those of the file, which begin its floats: another kind of processor, whose numbers must not be mixed with
// these, has other ones. `buffer` [PIECE].
static kvb_status check_header(const kept_file *file, const kept_prefill *k, const char *path, kvb_error *err)
{
    const kept_header *header = kept_file_header(file);
    forward_stretch stretches[FORWARD_STRETCHES];
    char key[65];
    kvb_status status = make_key(key, k, err);
    if (status != KVB_OK) return status;
    if (strcmp(key, header->key) != 0)
        return kvb_fail(err, KVB_MISMATCH, "%s: is of another text, other metrics or another device", path);
    if (header->layers == 0 || header->layers > k->m->config.n_layers)
        return kvb_fail(err, KVB_FORMAT, "%s: has %u layers, expected 1 to %u", path, header->layers,
                        k->m->config.n_layers);
    status = forward_stretches(k->f, header->layers, stretches, err);
    if (status != KVB_OK || count_floats(k, header->layers, stretches) == header->floats) return status;
    return kvb_fail(err, KVB_MISMATCH, "%s: comes from another kind of processor, which packs keys in another way",
                    path);
}

// Takes one stretch; of the first `known` floats the device has them already, and they must be the same.
static kvb_status take_stretch(kept_file *file, const kept_prefill *k, const forward_stretch *s, uint64_t known,
                               float *buffer, const char *path, kvb_error *err)
{
    backend_device *on = k->m->device;
    float *own = buffer + PIECE;
    kvb_status status = KVB_OK;
    for (uint64_t at = 0, n; status == KVB_OK && at < s->floats; at += n) {
        uint64_t end = at < known ? known : s->floats;
        n = end - at < PIECE ? end - at : PIECE;
        status = kept_file_get(file, buffer, n, err);
        if (status == KVB_OK && at < known) {
            on->b->download(on, own, dev_at(s->memory, at), n);
            if (memcmp(own, buffer, n * sizeof *own) != 0)
                status = kvb_fail(err, KVB_MISMATCH,
                                  "%s: the first layer's keys are computed with other bits here: it is damaged or "
                                  "comes from another kind of processor",
                                  path);
        } else if (status == KVB_OK) {
            on->b->upload(on, dev_at(s->memory, at), buffer, n);
        }
    }
    return status;
}

static kvb_status read_kept(uint32_t *layers, const kept_prefill *k, const char *path, kvb_error *err)
{
    forward_stretch stretches[FORWARD_STRETCHES];
    kept_file *file = NULL;
    float *buffer = need(2 * PIECE, sizeof *buffer, "floats of a buffer");
    kvb_status status = kept_file_open(&file, path, err);
    if (status == KVB_OK) status = forward_prefill_first(k->f, k->c->ids, k->c->n_tokens, err);
    if (status == KVB_OK) status = check_header(file, k, path, err);
    if (status == KVB_OK) {
        *layers = kept_file_header(file)->layers;
        status = forward_stretches(k->f, *layers, stretches, err);
    }
    for (int i = 0; status == KVB_OK && i < FORWARD_STRETCHES; i++)
        status = take_stretch(file, k, &stretches[i], i == 0 ? forward_first_floats(k->f) : 0, buffer, path, err);
    for (size_t i = 0; status == KVB_OK && i < k->o->n_metrics; i++)
        if (profile_scores_metric(k->job, k->c, i))
            status = kept_file_get(file, k->scores[i], score_floats(k, *layers), err);
    free(buffer);
    return kept_file_end(file, status, err);
}

kvb_status profile_take_kept(uint32_t *layers, const kept_prefill *k, kvb_error *err)
{
    char *path = needed(record_writer_kept_path(k->record, k->c->id), "the name of a file"),
         text[sizeof(kvb_error) + 100];
    kvb_error why = {0};
    *layers = 0;
    kvb_status status = access(path, F_OK) == 0 ? read_kept(layers, k, path, &why) : KVB_OK;
    free(path);
    if (status == KVB_OK) return KVB_OK;
    if (status == KVB_MEMORY) return kvb_fail(err, status, "%s", why.message);
    *layers = 0;
    snprintf(text, sizeof text, "%s; the prefill of sample %s starts again", why.message, k->c->id);
    if (k->watch) k->watch->message(k->watch->context, text);
    return KVB_OK;
}
