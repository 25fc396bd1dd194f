// Which weights a table was made with: kvb_table_check_weights against hashes, names and commits, and damaged entries.
// And kvb_table_find: which table in a folder belongs to a model, and what the refusal says if none does.
#include "folder_help.h"
#include "test_runtime_cases.h"

// Metadata of a table with two files; each hash is one digit, repeated 64 times.
#define HASH(c)                                                                                                       \
    c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c \
        c c c c c c c
#define FILES(second)                                                                                      \
    "\"model_container\":\"safetensors\",\"hf_id\":\"org/name\",\"hf_revision\":\"0123\",\"model_files\":" \
    "\"{\\\"1.safetensors\\\":\\\"" HASH("a") "\\\",\\\"2.safetensors\\\":" second "}\",\"note\""
#define TWO_FILES FILES("\\\"" HASH("b") "\\\"")

static void weights_differ(const kvb_table *t, kvb_weights mine, const char *message)
{
    help_fails(kvb_table_check_weights(t, &mine, err), KVB_MISMATCH, message);
}

UNIT_TEST(test_check_weights)
{
    table_case c = case_default();
    kvb_table *nothing = case_open(&c);
    c.edit_from = "\"note\"", c.edit_to = TWO_FILES;
    kvb_table *t = case_open(&c);
    const char *const same[] = {HASH("B"), HASH("a")}, *const other[] = {HASH("a"), HASH("c")};
    kvb_weights mine = {same, 2, "org/name", "0123"};
    help_ok(kvb_table_check_weights(t, &mine, err));
    help_ok(kvb_table_check_weights(nothing, &(kvb_weights){0}, err));
    ck_assert_str_eq(kvb_table_metadata(t, "hf_id"), "org/name");
    weights_differ(t, (kvb_weights){other, 2, NULL, NULL}, "file 1 has SHA-256 cccc");
    const char *const twice[] = {HASH("a"), HASH("A")};
    weights_differ(t, (kvb_weights){twice, 2, NULL, NULL}, "as 2 of those given have, and 1 of the table's 2");
    weights_differ(t, (kvb_weights){NULL, 0, "", NULL}, "hf_id: expected a name, got none, the table says org/name");
    weights_differ(nothing, (kvb_weights){NULL, 0, NULL, ""}, "hf_revision: expected a name");
    weights_differ(t, (kvb_weights){same, 1, NULL, NULL}, "expected the hashes of 1 files, the table has 2");
    weights_differ(nothing, (kvb_weights){same, 2, NULL, NULL}, "the table has 0 (container: not known)");
    weights_differ(t, (kvb_weights){NULL, 0, "org/other", NULL}, "hf_id: expected org/other, the table says org/name");
    weights_differ(t, (kvb_weights){NULL, 0, "org/name", "4567"}, "hf_revision: expected 4567, the table says 0123");
    weights_differ(nothing, (kvb_weights){NULL, 0, "org/name", NULL},
                   "hf_id: expected org/name, the table says nothing");
    ck_assert_int_eq(kvb_table_check_weights(t, NULL, NULL), KVB_ARGUMENT);
    ck_assert_int_eq(kvb_table_check_weights(t, &(kvb_weights){.n_files = 1}, NULL), KVB_ARGUMENT);
    const char *const missing[] = {HASH("a"), NULL};
    ck_assert_int_eq(kvb_table_check_weights(t, &(kvb_weights){missing, 2, NULL, NULL}, NULL), KVB_ARGUMENT);
    kvb_table_close(t);
    kvb_table_close(nothing);
}

UNIT_TEST(test_damaged_files)
{
    static const char *const damages[][2] = {
        {FILES("3"), "file \"2.safetensors\": expected 64 hexadecimal digits, found \"\""},
        {FILES("\\\"xyz\\\""), "expected 64 hexadecimal digits, found \"xyz\""},
        {"\"model_files\":\"[]\",\"note\"", "metadata \"model_files\""},
    };
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        table_case c = case_default();
        c.edit_from = "\"note\"", c.edit_to = damages[i][0];
        size_t size;
        unsigned char *bytes = case_bytes(&c, &size, NULL);
        kvb_table *t;
        kvb_error err;
        unit_refuses(kvb_table_open_memory(&t, bytes, size, "case", NULL, &err), KVB_FORMAT, damages[i][1]);
        free(bytes);
    }
}

// ---- Finding ----

#define NAMES(names) "\"model_names\":\"" names "\",\"note\""

static void put_table(const char *name, uint32_t n_layers, const char *edit)
{
    table_case c = case_default();
    size_t size;
    c.n_layers = n_layers, c.edit_from = "\"note\"", c.edit_to = edit;
    unsigned char *bytes = case_bytes(&c, &size, NULL);
    help_spew(help_path("%s", name), bytes, size);
    free(bytes);
}

static void setup(void)
{
    help_setup();
    put_table("b-base.safetensors", 3, NAMES("Org/Base-1B,Org/Base-1B-GGUF"));
    put_table("c-files.safetensors", 3, TWO_FILES);
    put_table("d-other.safetensors", 5, NAMES("Org/Deep"));
    put_table("e-base.safetensors", 3, NAMES("Org/Base-1B"));
    help_spew(help_path("a-broken.safetensors"), "{}", 2);
    help_spew(help_path("notes.txt"), "x", 1);
}

// What is known of a model, and the table that is found, or what the refusal says.
static const struct {
    const char *name, *found;
    uint32_t n_layers;
    const char *says[2];
} looked[] = {
    {"Org/Base-1B", "b-base", 3, {0}},
    {"org/base-1b-gguf", "b-base", 3, {0}},
    {"Base-1B", "b-base", 3, {0}},
    {"base-1b.Q4_K_M.gguf", "b-base", 3, {0}},
    {"Base-1B-IQ3_XS.gguf", "b-base", 3, {0}},
    {"Base-1B-BF16.GGUF", "b-base", 3, {0}},
    {"Base-1B.gguf", "b-base", 3, {0}},
    {"org/name", "c-files", 3, {0}},
    {"Deep", "d-other", 5, {0}},
    {"Org/Base-1B-Tuned",
     NULL,
     3,
     {"\"Org/Base-1B-Tuned\"", "b-base.safetensors has this shape and is for Org/Base-1B,"}},
    {"Else/Base-1B", NULL, 3, {"if your weights are those, give its path"}},
    {"Base-1B-chat.gguf", NULL, 3, {"has this shape"}},
    {"Base-1B-Quick.gguf", NULL, 3, {"has this shape"}},
    {"Base-1", NULL, 3, {"has this shape"}},
    {"", NULL, 3, {"has this shape"}},
    {"Org/Base-1B", NULL, 4, {"n_layers: expected 4, the table says 3"}},
    {"Org/New", NULL, 4, {"none of the 4 tables in /tmp/", "4 layers with 6 query and 2 KV heads of 64 numbers"}},
};

UNIT_TEST(test_find)
{
    char path[128], wanted[128];
    kvb_error err;
    for (size_t i = 0; i < sizeof looked / sizeof *looked; i++) {
        kvb_expectation mine = {looked[i].n_layers, 6, 2, 64, .metric = "snapkv:kvpress"};
        kvb_weights weights = {.hf_id = looked[i].name};
        strcpy(path, "unchanged");
        kvb_status status = kvb_table_find(path, sizeof path, help_folder, &mine, &weights, &err);
        ck_assert_msg(status == (looked[i].found ? KVB_OK : KVB_MISMATCH), "%s: %s", looked[i].name, err.message);
        snprintf(wanted, sizeof wanted, "%s/%s.safetensors", help_folder, looked[i].found);
        ck_assert_str_eq(path, looked[i].found ? wanted : "unchanged");
        for (int k = 0; k < 2 && looked[i].says[k]; k++)
            ck_assert_msg(strstr(err.message, looked[i].says[k]), "%s: %s", looked[i].name, err.message);
    }
}

// A hash takes precedence over a name, and the engine's ranking metric must match too.
UNIT_TEST(test_find_by_hash)
{
    static const char *const same[] = {HASH("B"), HASH("a")}, *const other[] = {HASH("a"), HASH("c")};
    const kvb_expectation mine = {3, 6, 2, 64, .metric = NULL};
    char path[128];
    kvb_weights weights = {same, 2, "Org/Base-1B", NULL};
    help_ok(kvb_table_find(path, sizeof path, help_folder, &mine, &weights, err));
    ck_assert_msg(strstr(path, "/c-files.safetensors"), "%s", path);
    help_fails(kvb_table_find(path, 20, help_folder, &mine, &weights, err), KVB_CAPACITY, "");
    weights.file_sha256 = other;
    help_ok(kvb_table_find(path, sizeof path, help_folder, &mine, &weights, err));
    ck_assert_msg(strstr(path, "/b-base.safetensors"), "%s", path);
    kvb_expectation hashed = mine;
    hashed.model_sha256 = "0000000000000000000000000000000000000000000000000000000000000007";
    help_ok(kvb_table_find(path, sizeof path, help_folder, &hashed, NULL, err));
    ck_assert_msg(strstr(path, "/b-base.safetensors"), "%s", path);
    hashed.metric = "keydiff";
    help_fails(kvb_table_find(path, sizeof path, help_folder, &hashed, NULL, err), KVB_MISMATCH,
               "metric: expected keydiff");
    help_fails(kvb_table_find(path, sizeof path, help_folder, &mine, NULL, err), KVB_MISMATCH, "");
    help_fails(kvb_table_find(path, sizeof path, "/tmp/no such folder", &mine, NULL, err), KVB_IO, "no such folder");
    ck_assert_int_eq(kvb_table_find(NULL, 0, help_folder, &mine, NULL, NULL), KVB_ARGUMENT);
    ck_assert_int_eq(kvb_table_find(path, 9, help_folder, &(kvb_expectation){.n_layers = 3}, NULL, NULL), KVB_ARGUMENT);
    ck_assert_int_eq(kvb_table_find(path, 9, help_folder, &mine, &(kvb_weights){.n_files = 1}, NULL), KVB_ARGUMENT);
}

UNIT_MAIN_EACH("runtime_origin", setup, help_teardown)
