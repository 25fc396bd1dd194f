// Split GGUF files (tests/golden/split, by the gguf package): any part opens the whole, which is bit for bit the model
// of one file; parts that are missing, of another model, renamed or damaged are errors that name file and fault.
#include "formats/sha256.h"
#include "profiler/weights/gguf.h"
#include "profiler/weights/weights.h"
#include "test_profiler_cases.h"

enum { T = 24, PARTS = 3, VOCABULARY = 300 };
static const char FORM[] = "tiny-%05d-of-00003.gguf";

static const char *part_path(int part)
{
    static char names[PARTS][40];
    snprintf(names[part], sizeof names[part], FORM, part + 1);
    return help_path("%s", names[part]);
}

// Copies the golden parts to the test's folder.
static void setup(void)
{
    help_setup();
    for (int i = 0; i < PARTS; i++) {
        char path[128] = "tests/golden/split/";
        size_t size;
        snprintf(path + strlen(path), 64, FORM, i + 1);
        unsigned char *bytes = help_slurp(path, &size);
        help_spew(part_path(i), bytes, size);
        free(bytes);
    }
    case_tiny_model(help_path("tiny.gguf"), (const char *const[]){"--type", "q8_0", NULL});
}

// Overwrites the low byte of a number in a part's metadata.
static void set_number(int part, const char *key, unsigned char value)
{
    size_t size, n = strlen(key);
    unsigned char *bytes = help_slurp(part_path(part), &size), *at = memmem(bytes, size, key, n);
    ck_assert_ptr_nonnull(at);
    at[n + sizeof(uint32_t)] = value; // after the type
    help_spew(part_path(part), bytes, size);
    free(bytes);
}

UNIT_ROUNDS(any_part_opens_the_whole, PARTS)
{
    model *whole = case_open(help_path("tiny.gguf"), &backend_cpu), *m = case_open(part_path(_i), &backend_cpu);
    float *want = case_logits(whole, T), *got = case_logits(m, T);
    case_same("logits", got, want, (size_t)T * VOCABULARY);
    const weights_origin *from = &m->source->origin;
    model_text text = case_text(m);
    ck_assert_ptr_nonnull(text.tokens);
    model_text_close(&text);
    ck_assert_str_eq(m->config.name, whole->config.name);
    ck_assert_uint_eq(from->n_files, PARTS);
    for (int i = 0; i < PARTS; i++) {
        char name[40], hash[65];
        snprintf(name, sizeof name, FORM, i + 1);
        help_ok(sha256_file_hex(part_path(i), hash, err));
        unit_strings(from->files[i].name, name, from->files[i].sha256, hash);
        ck_assert_str_ne(m->sha256, hash);
    }
    model *other = case_open(part_path((_i + 1) % PARTS), &backend_cpu);
    ck_assert_str_eq(m->sha256, other->sha256);
    help_ok(sha256_file_hex(help_path("tiny.gguf"), m->sha256, err));
    ck_assert_str_eq(whole->sha256, m->sha256);
    free(want);
    free(got);
    model_free(whole);
    model_free(m);
    model_free(other);
}

static void fails(kvb_status status, const char *part)
{
    gguf_set set;
    help_fails(gguf_set_open(&set, part_path(0), err), status, part);
    ck_assert(set.n == 0 && !set.files && !set.paths);
}

typedef struct told {
    int calls, stop_at;
    double done, total;
} told;

static bool hashed(void *context, double done, double total)
{
    told *t = context;
    ck_assert_double_gt(done, t->done);
    t->done = done, t->total = total;
    return ++t->calls != t->stop_at;
}

// The watcher is told after each file, with the bytes of all of them, and may stop.
UNIT_TEST(hashing_tells_how_far_it_is)
{
    told t = {.stop_at = 0};
    model *m = NULL;
    double bytes = 0;
    const weights_watch watch = {hashed, &t};
    for (int i = 0; i < PARTS; i++) {
        size_t size;
        free(help_slurp(part_path(i), &size));
        bytes += (double)size;
    }
    help_ok(model_open(&m, part_path(0), &backend_cpu, &(model_options){.watch = &watch}, err));
    ck_assert(t.calls == PARTS && t.done == bytes && t.total == bytes);
    model_free(m);
    t = (told){.stop_at = 2};
    help_fails(model_open(&m, part_path(0), &backend_cpu, &(model_options){.watch = &watch}, err), KVB_INTERRUPTED,
               "tiny-00002-of-00003.gguf: stopped while it was hashed");
    ck_assert(t.calls == 2 && !m);
}

UNIT_TEST(a_missing_part_is_named)
{
    remove(part_path(1));
    fails(KVB_IO, "tiny-00002-of-00003.gguf: cannot open");
    fails(KVB_IO, "(part 2 of 3 of the model)");
}

UNIT_TEST(parts_of_other_models_are_refused)
{
    set_number(2, "split.no", 1);
    fails(KVB_FORMAT, "tiny-00003-of-00003.gguf: expected part 3 of 3, found part 2 of 3");
    set_number(2, "split.no", 2);
    set_number(1, "split.count", 4);
    fails(KVB_FORMAT, "tiny-00002-of-00003.gguf: expected part 2 of 3, found part 2 of 4");
    set_number(1, "split.count", 3);
    set_number(1, "split.tensors.count", 21);
    fails(KVB_FORMAT, "tiny-00002-of-00003.gguf: split.tensors.count: expected 20 tensors in all parts");
    for (int i = 0; i < PARTS; i++) set_number(i, "split.tensors.count", 21);
    fails(KVB_FORMAT, "expected 21 tensors in all 3 parts, found 20");
    for (int i = 0; i < PARTS; i++) set_number(i, "split.tensors.count", 20);
    set_number(1, "split.no", 7);
    fails(KVB_FORMAT, "split.no 7 of split.count 3 is no possible part");
}

UNIT_TEST(a_renamed_part_is_refused)
{
    gguf_set set;
    rename(part_path(0), help_path("first.gguf"));
    help_fails(gguf_set_open(&set, help_path("first.gguf"), err), KVB_FORMAT,
               "first.gguf: is part 1 of 3 of a model, expected a name that ends with -00001-of-00003.gguf");
}

// Part 3 in place of part 2, with part 2's number: some tensors are there twice, others are missing.
UNIT_TEST(a_tensor_that_stands_in_two_parts_is_refused)
{
    size_t size;
    model *m = NULL;
    unsigned char *bytes = help_slurp(part_path(2), &size);
    help_spew(part_path(1), bytes, size);
    set_number(1, "split.no", 1);
    for (int i = 0; i < PARTS; i++) set_number(i, "split.tensors.count", 16);
    help_fails(model_open(&m, part_path(0), &backend_cpu, NULL, err), KVB_FORMAT,
               "tensor blk.1.ffn_down.weight is in it twice");
    free(bytes);
}

// A missing tensor is named, and one that is cut short is named with its part.
UNIT_TEST(faults_name_the_part)
{
    size_t size;
    model *m = NULL;
    unsigned char *bytes = help_slurp(part_path(1), &size);
    memcpy(memmem(bytes, size, "blk.1.attn_norm", 15), "blk.1.attn_morn", 15);
    help_spew(part_path(1), bytes, size);
    help_fails(model_open(&m, part_path(0), &backend_cpu, NULL, err), KVB_FORMAT,
               "tensor blk.1.attn_norm.weight is missing");
    help_spew(part_path(1), bytes, size - 100);
    fails(KVB_FORMAT, "tiny-00002-of-00003.gguf: tensor blk.1.ffn_norm.weight: expected 256 bytes");
    free(bytes);
}

UNIT_TEST(a_part_that_changes_is_found)
{
    weights *w;
    help_ok(weights_open(&w, part_path(0), false, err));
    help_ok(weights_check(w, err));
    set_number(2, "split.no", 1);
    truncate(part_path(2), 100);
    help_fails(weights_check(w, err), KVB_IO, "tiny-00003-of-00003.gguf");
    weights_close(w);
}

UNIT_MAIN_EACH("profiler split", setup, help_teardown)
