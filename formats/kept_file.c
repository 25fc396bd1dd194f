#include "formats/kept_file.h"
#include "formats/atomic_file.h"
#include "formats/file_read.h"
#include "formats/need.h"
#include "formats/sha256.h"
#include "runtime/fail.h"
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEPT_MAGIC "kvbudget-kept 1\n"

struct kept_file {
    kept_header header;
    char *path;
    uint64_t done; // floats that went through
    sha256_state *sum;
    atomic_file out; // of a file that is written; else zero
    file_view in;    // of one that is read; else zero
};

uint64_t kept_file_bytes(uint64_t floats)
{
    return KEPT_HEADER + floats * sizeof(float) + KEPT_SUM;
}

static void print_header(char text[KEPT_HEADER + 1], const kept_header *h)
{
    snprintf(text, KEPT_HEADER + 1, KEPT_MAGIC "%.64s\n%010" PRIu32 "\n%020" PRIu64 "\n", h->key, h->layers, h->floats);
}

kvb_status kept_header_read(kept_header *out, const void *data, size_t size, const char *name, kvb_error *err)
{
    char text[KEPT_HEADER + 1] = "", again[KEPT_HEADER + 1];
    *out = (kept_header){0};
    if (size >= KEPT_HEADER) memcpy(text, data, KEPT_HEADER);
    int n = sscanf(text, KEPT_MAGIC "%64[0-9a-f] %10" SCNu32 " %20" SCNu64, out->key, &out->layers, &out->floats);
    print_header(again, out); // sscanf is generous about spaces and signs
    if (n != 3 || memcmp(text, again, KEPT_HEADER) != 0)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: byte 0: expected a header of %d bytes: \"%.15s\", 64 hexadecimal digits, 10 digits of "
                        "layers, 20 of floats",
                        name, KEPT_HEADER, KEPT_MAGIC);
    if (out->floats > INT64_MAX / sizeof(float) - KEPT_HEADER || size != kept_file_bytes(out->floats))
        return kvb_fail(err, KVB_FORMAT, "%s: has %zu bytes, but its header says %" PRIu64 " floats", name, size,
                        out->floats);
    return KVB_OK;
}

static kvb_status make(kept_file **out, const char *path, kvb_error *err)
{
    kept_file *f = *out = need(1, sizeof *f, "files");
    f->path = need_text("%s", path);
    return sha256_begin(&f->sum, err);
}

static kvb_status write_bytes(kept_file *f, const void *data, size_t size, kvb_error *err)
{
    if (fwrite(data, 1, size, f->out.stream) == size) return KVB_OK;
    return kvb_fail(err, KVB_IO, "%s: cannot be written: %s", f->path, strerror(errno));
}

static kvb_status put(kept_file *f, const void *data, size_t size, kvb_error *err)
{
    kvb_status status = write_bytes(f, data, size, err);
    return status == KVB_OK ? sha256_add(f->sum, data, size, err) : status;
}

kvb_status kept_file_create(kept_file **out, const char *path, const kept_header *header, kvb_error *err)
{
    kvb_status status = make(out, path, err);
    kept_file *f = *out;
    if (status == KVB_OK) status = atomic_file_begin_own(&f->out, path, err);
    if (status == KVB_OK) {
        char text[KEPT_HEADER + 1];
        f->header = *header;
        print_header(text, header);
        status = put(f, text, KEPT_HEADER, err);
    }
    if (status == KVB_OK) return KVB_OK;
    *out = NULL;
    return kept_file_end(f, status, err);
}

kvb_status kept_file_put(kept_file *f, const float *from, uint64_t n, kvb_error *err)
{
    f->done += n;
    return put(f, from, n * sizeof *from, err);
}

kvb_status kept_file_open(kept_file **out, const char *path, kvb_error *err)
{
    kvb_status status = make(out, path, err);
    kept_file *f = *out;
    if (status == KVB_OK) status = file_map(&f->in, path, err);
    if (status == KVB_OK) status = kept_header_read(&f->header, f->in.data, f->in.size, path, err);
    if (status == KVB_OK) status = sha256_add(f->sum, f->in.data, KEPT_HEADER, err);
    if (status == KVB_OK) return KVB_OK;
    *out = NULL;
    return kept_file_end(f, status, err);
}

const kept_header *kept_file_header(const kept_file *f)
{
    return &f->header;
}

kvb_status kept_file_get(kept_file *f, float *to, uint64_t n, kvb_error *err)
{
    if (n > f->header.floats - f->done)
        return kvb_fail(err, KVB_FORMAT, "%s: %" PRIu64 " floats are wanted, but %" PRIu64 " are left", f->path, n,
                        f->header.floats - f->done);
    memcpy(to, f->in.data + KEPT_HEADER + f->done * sizeof *to, n * sizeof *to);
    f->done += n;
    return sha256_add(f->sum, to, n * sizeof *to, err);
}

// Puts the checksum behind what was written, or compares it with what was read.
static kvb_status end_sum(kept_file *f, kvb_error *err)
{
    char sum[65];
    if (f->done != f->header.floats)
        return kvb_fail(err, KVB_ARGUMENT, "%s: %" PRIu64 " of %" PRIu64 " floats went through", f->path, f->done,
                        f->header.floats);
    kvb_status status = sha256_end(f->sum, sum, err);
    if (status != KVB_OK) return status;
    if (f->out.stream) return write_bytes(f, sum, KEPT_SUM, err);
    if (memcmp(sum, f->in.data + f->in.size - KEPT_SUM, KEPT_SUM) != 0)
        return kvb_fail(err, KVB_FORMAT, "%s: is damaged: its checksum is not that of its bytes", f->path);
    return file_check(&f->in, f->path, err);
}

kvb_status kept_file_end(kept_file *f, kvb_status status, kvb_error *err)
{
    if (!f) return status;
    if (status == KVB_OK) status = end_sum(f, err);
    if (status == KVB_OK && f->out.stream) status = atomic_file_commit(&f->out, err);
    else atomic_file_abandon(&f->out);
    file_unmap(&f->in);
    sha256_free(f->sum);
    free(f->path);
    free(f);
    return status;
}
