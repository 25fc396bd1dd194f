// Replays files through a fuzz target without libFuzzer: each argument is a file or a folder of files.
// Every input is also run cut short and with single bits flipped, so that a plain gcc build also tries inputs close to
// each seed.
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static size_t runs;

// Runs a copy of exactly `size` bytes, so that AddressSanitizer reports a read of the first byte after the input.
static void run_copy(const uint8_t *data, size_t size, size_t flip_bit)
{
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy) abort();
    if (size) memcpy(copy, data, size);
    if (flip_bit / 8 < size) copy[flip_bit / 8] ^= (uint8_t)(1u << flip_bit % 8);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
    runs++;
}

static void run_input(const uint8_t *data, size_t size)
{
    enum { VARIANTS = 64 };
    run_copy(data, size, SIZE_MAX);
    for (size_t i = 0; i < VARIANTS; i++) {
        run_copy(data, size * i / VARIANTS, SIZE_MAX);
        // Headers are at the front: half of the flips fall into the first 256 bytes. The factor 40503 spreads them
        // without a random generator.
        size_t range = i % 2 && size > 256 ? 256 : size;
        if (range) run_copy(data, size, i * 40503 % (8 * range));
    }
}

static int run_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    struct stat info;
    if (!file || fstat(fileno(file), &info) != 0) {
        perror(path);
        if (file) fclose(file);
        return 1;
    }
    size_t size = (size_t)info.st_size;
    uint8_t *data = malloc(size ? size : 1);
    int failed = !data || fread(data, 1, size, file) != size;
    if (failed) fprintf(stderr, "%s: could not be read\n", path);
    else run_input(data, size);
    free(data);
    fclose(file);
    return failed;
}

static int run_path(const char *path)
{
    DIR *folder = opendir(path);
    if (!folder) return run_file(path);
    int failed = 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        char file[4096];
        int length = snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] == '.') continue;
        failed |= length >= (int)sizeof file || run_file(file);
    }
    closedir(folder);
    return failed;
}

int main(int argc, char **argv)
{
    int failed = 0;
    for (int i = 1; i < argc; i++) failed |= run_path(argv[i]);
    printf("%zu inputs\n", runs);
    return failed || runs == 0;
}
