// Damaged and hostile records: an error that names the file, never a crash, and no wrong number without an error.
#include "formats/sha256.h"
#include "formats_record_help.h"
#include <hdf5.h>

static unsigned char *make_record(size_t *size)
{
    help_ok(small_write(help_path("run.h5"), false, err));
    return help_slurp(help_path("run.h5"), size);
}

// Whether all numbers that are read from the record are those that small_write wrote.
static bool is_intact(record *r)
{
    static float array[SMALL_MAX];
    if (record_context_count(r) != SMALL_CONTEXTS) return false;
    for (size_t c = 0; c < SMALL_CONTEXTS; c++) {
        const record_context_info *info = record_context(r, c);
        if (strcmp(info->id, small_ids[c]) != 0 || info->n_tokens != small_tokens(c)) return false;
        if (info->n_metrics != 2 || info->n_questions != SMALL_QUESTIONS) return false;
        size_t count = (size_t)SMALL_L * SMALL_G * small_tokens(c);
        for (size_t m = 0; m < 2; m++) {
            if (record_read_scores(r, c, small_metrics[m], array, NULL) != KVB_OK) return false;
            for (size_t i = 0; i < count; i++)
                if (array[i] != small_score(c, m, i)) return false;
        }
        for (size_t q = 0; q < SMALL_QUESTIONS; q += 2) {
            if (record_read_oracle(r, c, q, array, NULL) != KVB_OK) return false;
            for (size_t i = 0; i < count; i++)
                if (array[i] != small_oracle(c, q, i)) return false;
        }
    }
    return true;
}

// Opening 20,000 files takes HDF5 a while, so one byte in 21 is tried, others in each run. KVB_DAMAGE=all tries every
// one (tests/cli/long_judge.sh).
static size_t sampled(void)
{
    const char *wish = getenv("KVB_DAMAGE");
    return wish && strcmp(wish, "all") == 0 ? 1 : 21;
}

UNIT_TEST(flipped_bits)
{
    size_t step = sampled(), size, start = help_seed() % step, refused = 0, unused = 0;
    unsigned char *data = make_record(&size);
    const char *path = help_path("run.h5");
    for (size_t i = start; i < size; i += step) {
        record *r;
        kvb_error e = {0};
        unsigned char bit = (unsigned char)(1 << i * 5 % 8);
        data[i] ^= bit;
        help_spew(path, data, size);
        kvb_status status = record_open(&r, path, &e);
        if (status == KVB_OK) status = small_read_all(r, &e);
        if (status == KVB_OK) {
            ck_assert_msg(is_intact(r), "byte %zu: other numbers and no error", i);
            unused++;
        } else {
            refused++;
            ck_assert_msg(strstr(e.message, "run.h5") != NULL, "byte %zu: %s", i, e.message);
        }
        record_close(r);
        data[i] ^= bit;
    }
    printf("%zu bytes, one in %zu: %zu flips refused, %zu in unused bytes\n", size, step, refused, unused);
    ck_assert_uint_gt(refused, size / step / 2);
    free(data);
}

UNIT_TEST(truncated)
{
    size_t size, step = sampled(), start = help_seed() % step;
    unsigned char *data = make_record(&size);
    const char *cut = help_path("cut.h5");
    for (size_t n = 0; n < size; n += n < 512 ? 1 : n == 512 ? start + 1 : step) {
        record *r;
        kvb_error e = {0};
        help_spew(cut, data, n);
        ck_assert_int_ne(record_open(&r, cut, &e), KVB_OK);
        ck_assert_msg(strstr(e.message, cut) != NULL, "%s", e.message);
    }
    free(data);
}

// ---- Well-formed HDF5 that is no record ----

typedef struct hostile {
    hid_t file, context, question;
} hostile;

static void put_number(hid_t object, const char *name, uint32_t value)
{
    hid_t space = H5Screate(H5S_SCALAR), a;
    if (H5Aexists(object, name) > 0) H5Adelete(object, name);
    a = H5Acreate2(object, name, H5T_STD_U32LE, space, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(a, H5T_NATIVE_UINT32, &value);
    H5Aclose(a);
    H5Sclose(space);
}

static void put_array(hid_t group, const char *name, hid_t type, int rank, const hsize_t *dims, const hsize_t *chunk,
                      bool checksum, bool write)
{
    static const char zeros[4096];
    hid_t space = H5Screate_simple(rank, dims, NULL), list = H5Pcreate(H5P_DATASET_CREATE);
    if (H5Lexists(group, name, H5P_DEFAULT) > 0) H5Ldelete(group, name, H5P_DEFAULT);
    if (chunk) H5Pset_chunk(list, rank, chunk);
    if (chunk && checksum) H5Pset_fletcher32(list);
    hid_t set = H5Dcreate2(group, name, type, space, H5P_DEFAULT, list, H5P_DEFAULT);
    ck_assert_int_ge(set, 0);
    if (write) ck_assert_int_ge(H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, zeros), 0);
    H5Dclose(set);
    H5Pclose(list);
    H5Sclose(space);
}

static const hsize_t three[3] = {2, 3, 7}, layer[3] = {1, 3, 7};

static void edit_superblock(hostile *h) // does nothing: the test reads another file
{
    (void)h;
}
static void edit_attribute(hostile *h) // variable length
{
    hid_t space = H5Screate(H5S_SCALAR), type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, H5T_VARIABLE);
    hid_t a = H5Acreate2(h->file, "note", type, space, H5P_DEFAULT, H5P_DEFAULT);
    const char *text = "hello";
    H5Awrite(a, type, &text);
    H5Aclose(a);
    H5Tclose(type);
    H5Sclose(space);
}
static void edit_other_numbers(hostile *h) // valid HDF5 with right checksums, but not the numbers that were written
{
    static const float zeros[42];
    hid_t set = H5Dopen2(h->context, "scores/keydiff", H5P_DEFAULT);
    H5Dwrite(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, zeros);
    H5Dclose(set);
}
static void edit_other_ids(hostile *h)
{
    static const int zeros[7];
    hid_t set = H5Dopen2(h->context, "token_ids", H5P_DEFAULT);
    H5Dwrite(set, H5T_NATIVE_INT, H5S_ALL, H5S_ALL, H5P_DEFAULT, zeros);
    H5Dclose(set);
}
// Writes other numbers, with the checksum that belongs to them.
static void put_numbers(hid_t group, const char *name, const float values[42])
{
    char hash[65];
    hid_t set = H5Dopen2(group, name, H5P_DEFAULT), sum = H5Aopen(set, "sha256", H5P_DEFAULT), type = H5Aget_type(sum);
    sha256_hex(values, 42 * sizeof *values, hash);
    H5Dwrite(set, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values);
    H5Awrite(sum, type, hash);
    H5Tclose(type);
    H5Aclose(sum);
    H5Dclose(set);
}
static void edit_nan(hostile *h)
{
    put_numbers(h->context, "scores/keydiff", (const float[42]){[41] = __builtin_nanf("")});
}
static void edit_negative(hostile *h)
{
    put_numbers(h->question, "oracle", (const float[42]){[20] = -1e-9F});
}

#define SCORES "contexts/zeta/scores/keydiff"
#define QUESTION "contexts/zeta/questions/0"
static const hsize_t huge[1] = {UINT64_C(1) << 40}, page[1] = {1 << 20}, many[1] = {1 << 28};
typedef enum change { BY_HAND, NUMBER, NO_ATTRIBUTE, NO_LINK, MOVED, SOFT, EXTERNAL, GROUP, ARRAY } change;
typedef enum element { F32, F64, I32 } element; // HDF5's own types are not constants

static const struct {
    kvb_status status;
    const char *message;
    change how;
    const char *at, *name; // an object, and its attribute or another path
    uint32_t number;
    struct {
        element type;
        int rank;
        const hsize_t *dims, *chunk;
        bool no_checksum, not_stored;
    } array;
    void (*by_hand)(hostile *);
} edits[] = {
    {KVB_OK, .message = ""},
    {KVB_VERSION, "newer kvbudget", NUMBER, ".", "format_version", .number = 3},
    {KVB_VERSION, "record format 1, this program reads 2; profile again", NUMBER, ".", "format_version", .number = 1},
    {KVB_FORMAT, "impossible shape", NUMBER, ".", "n_layers", .number = 0},
    {KVB_FORMAT, "/contexts/zeta/scores/keydiff: expected shape [3,3,7]", NUMBER, ".", "n_layers", .number = 3},
    {KVB_FORMAT, "multiple", NUMBER, ".", "n_heads", .number = 10},
    {KVB_FORMAT, "some other HDF5 file", NO_ATTRIBUTE, ".", .name = "format"},
    {KVB_FORMAT, "order", NUMBER, "contexts/zeta", "order", .number = 1},
    {KVB_FORMAT, "/contexts/zeta/order", NO_ATTRIBUTE, "contexts/zeta", .name = "order"},
    {KVB_FORMAT, "/contexts/zeta/token_ids: is missing", NO_LINK, .at = "contexts/zeta/token_ids"},
    {KVB_FORMAT, "ze ta", MOVED, "contexts/zeta", .name = "contexts/ze ta"},
    {KVB_UNSUPPORTED, "link to elsewhere", SOFT, "contexts/zeta/token_ids", .name = "/contexts/zeta/scores/keydiff"},
    {KVB_UNSUPPORTED, "link to elsewhere", EXTERNAL, "contexts/zeta/scores", .name = "/etc/passwd"},
    {KVB_FORMAT, "expected a dataset", GROUP, .at = "contexts/zeta/token_ids"},
    {KVB_FORMAT, "type float32", ARRAY, SCORES, .array = {F64, 3, three, .chunk = layer}},
    {KVB_FORMAT, "type float32", ARRAY, SCORES, .array = {I32, 3, three, .chunk = layer}},
    {KVB_FORMAT, "3 dimensions", ARRAY, SCORES, .array = {F32, 2, three, .chunk = layer}},
    {KVB_FORMAT, "one chunk per layer", ARRAY, SCORES, .array = {F32, 3, three, .chunk = NULL}},
    {KVB_FORMAT, "Fletcher-32", ARRAY, SCORES, .array = {F32, 3, three, .chunk = layer, .no_checksum = true}},
    {KVB_FORMAT, "one chunk per layer", ARRAY, SCORES, .array = {F32, 3, three, .chunk = three}},
    {KVB_FORMAT, "number of bytes stored", ARRAY, SCORES, .array = {F32, 3, three, .chunk = layer, .not_stored = true}},
    {KVB_FORMAT, "one chunk", ARRAY, "contexts/zeta/token_ids",
     .array = {I32, 1, huge, .chunk = page, .not_stored = true}},
    // Reading this would make up 1 GiB of zeros.
    {KVB_FORMAT, "number of bytes stored", ARRAY, "contexts/zeta/token_ids",
     .array = {I32, 1, many, .chunk = many, .not_stored = true}},
    {KVB_FORMAT, "questions/0/oracle", NUMBER, QUESTION, "n_queries", .number = 0},
    {KVB_FORMAT, "questions/0/oracle: is missing", NO_LINK, .at = QUESTION "/oracle"},
    {KVB_FORMAT, "expected numbers", MOVED, QUESTION, .name = "contexts/zeta/questions/00"},
    {KVB_FORMAT, "expected numbers", MOVED, QUESTION, .name = "contexts/zeta/questions/-1"},
    {KVB_FORMAT, "/contexts/zeta/scores/keydiff: has no attribute sha256", NO_ATTRIBUTE, SCORES, .name = "sha256"},
    {KVB_UNSUPPORTED, "superblock version 0", .by_hand = edit_superblock},
    {KVB_FORMAT, "/note", .by_hand = edit_attribute},
    {KVB_FORMAT, "/contexts/zeta/scores/keydiff: damaged: its SHA-256", .by_hand = edit_other_numbers},
    {KVB_FORMAT, "/contexts/zeta/token_ids: damaged: its SHA-256", .by_hand = edit_other_ids},
    {KVB_NUMERIC, "/contexts/zeta/scores/keydiff: layer 1, KV head 2, token 6: found nan", .by_hand = edit_nan},
    {KVB_NUMERIC, "/contexts/zeta/questions/0/oracle: layer 0, KV head 2, token 6: found -1e-09",
     .by_hand = edit_negative},
};

static void make_edit(hostile *h, size_t i)
{
    const hid_t types[] = {[F32] = H5T_IEEE_F32LE, [F64] = H5T_IEEE_F64LE, [I32] = H5T_STD_I32LE};
    const char *at = edits[i].at, *name = edits[i].name;
    if (edits[i].by_hand) edits[i].by_hand(h);
    if (edits[i].how == NUMBER || edits[i].how == NO_ATTRIBUTE) {
        hid_t object = H5Oopen(h->file, at, H5P_DEFAULT);
        if (edits[i].how == NUMBER) put_number(object, name, edits[i].number);
        else ck_assert_int_ge(H5Adelete(object, name), 0);
        H5Oclose(object);
    }
    if (edits[i].how == MOVED) ck_assert_int_ge(H5Lmove(h->file, at, h->file, name, H5P_DEFAULT, H5P_DEFAULT), 0);
    if (edits[i].how == ARRAY)
        put_array(h->file, at, types[edits[i].array.type], edits[i].array.rank, edits[i].array.dims,
                  edits[i].array.chunk, !edits[i].array.no_checksum, !edits[i].array.not_stored);
    if (edits[i].how < NO_LINK || edits[i].how == MOVED || edits[i].how == ARRAY) return;
    ck_assert_int_ge(H5Ldelete(h->file, at, H5P_DEFAULT), 0); // then most edits put something else there
    if (edits[i].how == SOFT) H5Lcreate_soft(name, h->file, at, H5P_DEFAULT, H5P_DEFAULT);
    if (edits[i].how == EXTERNAL) H5Lcreate_external(name, "/", h->file, at, H5P_DEFAULT, H5P_DEFAULT);
    if (edits[i].how == GROUP) H5Gclose(H5Gcreate2(h->file, at, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
}

// Edits a good record of one context with HDF5 itself, then reads it.
UNIT_ROUNDS(no_records, sizeof edits / sizeof edits[0])
{
    const char *path = help_path("run.h5"), *old = help_path("old.h5");
    record_writer *w;
    record *r;
    help_ok(small_begin(&w, path, false, err));
    help_ok(small_put_context(w, 0, err));
    help_ok(small_put_question(w, 0, 0, err));
    help_ok(record_finish(w, small_ids, 1, err));
    record_writer_free(w);
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    hid_t fapl = H5Pcreate(H5P_FILE_ACCESS);
    H5Pset_libver_bounds(fapl, H5F_LIBVER_V110, H5F_LIBVER_V110);
    hostile h;
    h.file = H5Fopen(path, H5F_ACC_RDWR, fapl);
    h.context = H5Gopen2(h.file, "contexts/zeta", H5P_DEFAULT);
    h.question = H5Gopen2(h.file, "contexts/zeta/questions/0", H5P_DEFAULT);
    make_edit(&h, (size_t)_i);
    H5Gclose(h.question);
    H5Gclose(h.context);
    H5Fclose(h.file);
    H5Pclose(fapl);
    if (edits[_i].by_hand == edit_superblock) {
        H5Fclose(H5Fcreate(old, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT));
        path = old;
    }
    kvb_error e = {0};
    kvb_status status = record_open(&r, path, &e);
    if (status == KVB_OK) status = small_read_all(r, &e);
    record_close(r);
    ck_assert_msg(status == edits[_i].status, "%s: %s", kvb_status_name(status), e.message);
    ck_assert_msg(strstr(e.message, edits[_i].message) != NULL, "no \"%s\" in: %s", edits[_i].message, e.message);
    ck_assert(status == KVB_OK || strstr(e.message, path) != NULL);
}

UNIT_TEST(other_files)
{
    record *r;
    help_fails(record_open(&r, help_path("none.h5"), err), KVB_IO, "none.h5");
    help_fails(record_open(&r, help_folder, err), KVB_ARGUMENT, "folder");
    help_spew(help_path("text"), "this is a text, and certainly no file that HDF5 would like", 58);
    help_fails(record_open(&r, help_path("text"), err), KVB_FORMAT, "signature");
}

// HDF5 prints its own errors unless it is told not to; the caller's setting must come back.
UNIT_TEST(quiet)
{
    int out[2];
    char text[64];
    ck_assert_int_eq(pipe(out), 0);
    fflush(stderr);
    int saved = dup(2);
    dup2(out[1], 2);
    record *r;
    size_t size;
    unsigned char *data = make_record(&size);
    data[size / 2] ^= 4;
    for (size_t n = 60; n < size; n += 500) {
        help_spew(help_path("cut.h5"), data, n);
        record_open(&r, help_path("cut.h5"), NULL);
    }
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    ck_assert_int_eq(read(out[0], text, sizeof text), -1);
    H5Fclose(-5); // a call that is not ours prints HDF5's errors again
    fflush(stderr);
    ck_assert_int_gt(read(out[0], text, sizeof text), 0);
    dup2(saved, 2);
    free(data);
}

UNIT_MAIN_EACH("formats_damage", help_setup, help_teardown)
