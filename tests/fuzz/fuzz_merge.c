// Merging a file from anywhere: the bytes are a shard, merged alone and with a copy of itself.
#include "formats/record.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// HDF5 1.10 loses a buffer at every wrong checksum, which is what most inputs have.
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "detect_leaks=0";
}

static void write_file(const char *path, const uint8_t *data, size_t size)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f) != 0) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char folder[] = "/tmp/kvb-fuzz-merge-XXXXXX", paths[3][64];
    kvb_error err;
    if (!mkdtemp(folder)) abort();
    for (int i = 0; i < 3; i++) snprintf(paths[i], sizeof paths[i], "%s/%d.h5", folder, i);
    write_file(paths[0], data, size);
    write_file(paths[1], data, size);
    const char *inputs[] = {paths[0], paths[1]};
    for (size_t n = 1; n <= 2; n++) {
        if (record_merge(paths[2], inputs, n, true, &err) != KVB_OK) continue;
        record *r; // what merge writes, it must read
        if (record_open(&r, paths[2], &err) != KVB_OK || record_shard(r)) abort();
        record_close(r);
    }
    for (int i = 0; i < 3; i++) unlink(paths[i]);
    if (rmdir(folder) != 0) abort(); // nothing half-written may be left
    snprintf(folder, sizeof folder, "/tmp/kvb-fuzz-merge-XXXXXX");
    return 0;
}
