// Memory of opening a table: proportional to the file, whatever that says, and all of it is freed; and each allocation
// that fails gives KVB_MEMORY and nothing else. The linker leads the runtime's malloc and its relatives to the
// functions here, hooks those of cJSON.
#include "folder_help.h"
#include "runtime/json.h"
#include "runtime/limits.h"
#include "test_runtime_cases.h"
#include <cjson/cJSON.h>
#include <errno.h>
#include <malloc.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *old, size_t size);
void __real_free(void *p);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *old, size_t size);
void __wrap_free(void *p);

// Check allocates too, but its allocations are neither counted nor made to fail.
static struct {
    bool counting;
    size_t calls, fails_at; // fails_at 0: none
    size_t bytes, peak, live;
} heap;

static bool fails(void)
{
    if (!heap.counting || ++heap.calls != heap.fails_at) return false;
    errno = ENOMEM;
    return true;
}

static void *count(void *p)
{
    if (!p || !heap.counting) return p;
    heap.bytes += malloc_usable_size(p);
    heap.peak = heap.bytes > heap.peak ? heap.bytes : heap.peak;
    ++heap.live;
    return p;
}

static void uncount(void *p)
{
    if (!p || !heap.counting) return;
    heap.bytes -= malloc_usable_size(p);
    --heap.live;
}

void *__wrap_malloc(size_t size)
{
    return fails() ? NULL : count(__real_malloc(size));
}

void *__wrap_calloc(size_t n, size_t size)
{
    return fails() ? NULL : count(__real_calloc(n, size));
}

void *__wrap_realloc(void *old, size_t size)
{
    if (fails()) return NULL;
    size_t before = old ? malloc_usable_size(old) : 0;
    void *grown = __real_realloc(old, size);
    if (!grown || !heap.counting) return grown;
    heap.bytes -= before;
    heap.live -= old != NULL;
    return count(grown);
}

void __wrap_free(void *p)
{
    uncount(p);
    __real_free(p);
}

// A table with constraints, so that every part of the reader is asked for memory.
static unsigned char *constrained(size_t *size)
{
    table_case c = case_default();
    c.edit_from = "\"note\":\"unknown keys are kept\"";
    c.edit_to = "\"constraints\":\"{\\\"block\\\":16,\\\"least\\\":[0,0.5,0,0,0,0]}\"";
    return case_bytes(&c, size, NULL);
}

typedef struct task {
    const unsigned char *bytes;
    size_t size;
    const char *path;
} task;

static kvb_status open_bytes(const task *it, kvb_error *err)
{
    kvb_table *t = NULL;
    kvb_status status = kvb_table_open_memory(&t, it->bytes, it->size, "some/table", NULL, err);
    bool right = (t != NULL) == (status == KVB_OK);
    kvb_table_close(t);
    return right ? status : KVB_ARGUMENT;
}

static kvb_status open_file(const task *it, kvb_error *err)
{
    kvb_table *t = NULL;
    kvb_status status = kvb_table_open(&t, it->path, NULL, err);
    bool right = (t != NULL) == (status == KVB_OK);
    kvb_table_close(t);
    return right ? status : KVB_ARGUMENT;
}

static kvb_status open_ranking(const task *it, kvb_error *err)
{
    kvb_ranking *r = NULL;
    kvb_status status = kvb_ranking_open_memory(&r, it->bytes, it->size, "some/table", err);
    bool right = (r != NULL) == (status == KVB_OK);
    kvb_ranking_close(r);
    return right ? status : KVB_ARGUMENT;
}

// Returns the file of a ranking with one feature, one head and 4 weights, which the caller frees.
static unsigned char *ranking_bytes(size_t *size)
{
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"kvbudget-rank\",\"format_version\":\"1\",\"ranking\":\"{"
        "\\\"features\\\":[{\\\"metric\\\":\\\"knorm\\\",\\\"log\\\":false}],"
        "\\\"sink\\\":4,\\\"folds\\\":[],\\\"name\\\":\\\"learned:4c7e23d2510d\\\"}\"},"
        "\"rank_weights\":{\"dtype\":\"F64\",\"shape\":[1,1,1,4],\"data_offsets\":[0,32]}}";
    size_t n = sizeof header - 1;
    unsigned char *bytes = calloc(8 + n + 32, 1);
    ck_assert_ptr_nonnull(bytes);
    bytes[0] = (unsigned char)n;
    bytes[1] = (unsigned char)(n >> 8);
    memcpy(bytes + 8, header, n);
    *size = 8 + n + 32;
    return bytes;
}

static kvb_status parse_limits(const task *it, kvb_error *err)
{
    (void)it;
    kvb_limits m;
    kvb_status status = kvb_limits_parse(&m, "{\"ranks\":2,\"layer_cap\":[1,0.5,1]}", 3, 2, "some/table", err);
    if (!status) kvb_limits_free(&m);
    return status;
}

static kvb_status parse_json(const task *it, kvb_error *err)
{
    (void)it;
    static const char text[] = "{\"a\":[1,{\"b\":\"c\",\"d\":null}],\"e\":{\"f\":1,\"g\":2}}";
    cJSON *tree;
    kvb_status status = kvb_json_object(&tree, text, sizeof text - 1, "some/table", "place", err);
    bool right = (tree != NULL) == (status == KVB_OK);
    cJSON_Delete(tree);
    return right ? status : KVB_ARGUMENT;
}

// Calls `run` with allocation number fails_at failing, and counts allocations.
static kvb_status run_counted(kvb_status (*run)(const task *, kvb_error *), const task *it, size_t fails_at,
                              kvb_error *err)
{
    memset(&heap, 0, sizeof heap);
    heap.fails_at = fails_at, heap.counting = true;
    kvb_status status = run(it, err);
    heap.counting = false;
    return status;
}

// Makes every allocation fail, one after the other. Returns how many there were.
static size_t walk(kvb_status (*run)(const task *, kvb_error *), const task *it)
{
    for (size_t at = 1;; at++) {
        kvb_error err = {KVB_OK, ""};
        kvb_status status = run_counted(run, it, at, &err);
        ck_assert_msg(heap.live == 0 && heap.bytes == 0, "allocation %zu: %zu were not freed", at, heap.live);
        if (heap.calls < at) {
            ck_assert_int_eq(status, KVB_OK);
            return at - 1;
        }
        ck_assert_msg(status == KVB_MEMORY && strstr(err.message, "memory"), "allocation %zu: %s \"%s\"", at,
                      kvb_status_name(status), err.message);
        ck_assert_msg(it->path ? strncmp(err.message, it->path, strlen(it->path)) == 0
                               : strncmp(err.message, "some/table: ", 12) == 0,
                      "%s", err.message);
    }
}

UNIT_TEST(test_every_allocation)
{
    const char *path = help_path("t.safetensors");
    task it = {0};
    unsigned char *bytes = constrained(&it.size);
    it.bytes = bytes;
    help_spew(path, bytes, it.size);
    size_t points = walk(open_bytes, &it) + walk(parse_limits, &it) + walk(parse_json, &it);
    it.path = path;
    points += walk(open_file, &it);
    task ranking = {0};
    unsigned char *of_ranking = ranking_bytes(&ranking.size);
    ranking.bytes = of_ranking;
    points += walk(open_ranking, &ranking);
    free(of_ranking);
    printf("test_every_allocation: %zu allocations failed\n", points);
    ck_assert_uint_gt(points, 500);
    free(bytes);
}

// An error allocates nothing, however long its path; a path that is too long loses its middle.
UNIT_TEST(test_message_without_memory)
{
    char path[2000];
    kvb_error err;
    task it = {NULL, 0, path};
    memset(path, 'a', sizeof path - 1);
    path[sizeof path - 1] = 0;
    ck_assert_int_eq(run_counted(open_file, &it, 1, &err), KVB_IO);
    unit_numbers(heap.calls, 0, strlen(err.message), sizeof err.message - 1);
    ck_assert(err.message[0] == 'a' && strstr(err.message, " ... ") && strstr(err.message, ": opening: "));
}

// Returns the limit that kvbudget.h promises for kvb_table_open*.
static size_t allowed(size_t size)
{
    return 48 * size + (64 << 10);
}

static void check_peak(const unsigned char *bytes, size_t size, kvb_status expected)
{
    task it = {bytes, size, NULL};
    kvb_error err = {KVB_OK, ""};
    kvb_status status = run_counted(open_bytes, &it, 0, &err);
    ck_assert_msg(status == expected, "%s: %s", kvb_status_name(status), err.message);
    ck_assert_msg(heap.peak <= allowed(size), "%zu bytes take %zu, allowed are %zu", size, heap.peak, allowed(size));
    ck_assert_uint_eq(heap.live, 0);
}

// Numbers that claim gigabytes, in a file of some kilobytes.
UNIT_TEST(test_claimed_sizes)
{
    table_case c = case_default();
    size_t size;
    c.n_kv_heads = 1, c.edit_from = "\"n_layers\":\"3\",\"n_heads\":\"3\",\"n_kv_heads\":\"1\"";
    c.edit_to = "\"constraints\":\"{}\",\"n_layers\":\"1000000\",\"n_heads\":\"1024\",\"n_kv_heads\":\"1024\"";
    unsigned char *bytes = case_bytes(&c, &size, NULL);
    check_peak(bytes, size, KVB_FORMAT);
    free(bytes);
    bytes = constrained(&size);
    check_peak(bytes, size, KVB_OK);
    free(bytes);
}

// Headers full of the smallest items, for which cJSON allocates the most.
UNIT_TEST(test_dense_headers)
{
    static const struct {
        const char *begin, *repeated, *end;
    } headers[] = {{"{\"a\":[1", ",1", "]}"},      {"{\"a\":[[]", ",[]", "]}"},
                   {"{\"a\":[{}", ",{}", "]}"},    {"{\"a\":{\"\":1", ",\"\":1", "}}"},
                   {"{\"\":1", ",\"\":1", "}"},    {"{\"__metadata__\":{\"\":\"\"", ",\"\":\"\"", "}}"},
                   {"{\"a\":[\"\"", ",\"\"", "]}"}};
    enum { SIZE = 1 << 18 };
    char *text = malloc(SIZE + 64);
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
        size_t n = strlen(strcpy(text + 8, headers[i].begin)), step = strlen(headers[i].repeated);
        for (; n + step < SIZE; n += step) memcpy(text + 8 + n, headers[i].repeated, step);
        strcpy(text + 8 + n, headers[i].end);
        n = strlen(text + 8);
        for (int k = 0; k < 8; k++) text[k] = (char)((uint64_t)n >> 8 * k & 255);
        check_peak((const unsigned char *)text, n + 8, KVB_FORMAT);
    }
    free(text);
}

int main(void)
{
    static cJSON_Hooks hooks = {__wrap_malloc, __wrap_free};
    cJSON_InitHooks(&hooks);
    return unit_run("runtime_memory", UNIT_CASES(unit_case()));
}
