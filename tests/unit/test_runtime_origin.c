// Which weights a table was made with: kvb_table_check_weights against hashes, names and commits, and damaged entries.
#include "runtime/kvbudget.h"
#include "test_runtime_cases.h"

// Two files in a table, "a" to "f" 64 times each.
#define HASH(c)                                                                                                       \
    c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c c \
        c c c c c c c
#define FILES(second)                                                                                      \
    "\"model_container\":\"safetensors\",\"hf_id\":\"org/name\",\"hf_revision\":\"0123\",\"model_files\":" \
    "\"{\\\"1.safetensors\\\":\\\"" HASH("a") "\\\",\\\"2.safetensors\\\":" second "}\",\"note\""
#define TWO_FILES FILES("\\\"" HASH("b") "\\\"")

static void weights_differ(const kvb_table *t, kvb_weights mine, const char *message)
{
    kvb_error err;
    ck_assert_int_eq(kvb_table_check_weights(t, &mine, &err), KVB_MISMATCH);
    ck_assert_msg(strstr(err.message, message), "%s", err.message);
}

UNIT_TEST(test_check_weights)
{
    table_case c = case_default();
    kvb_table *nothing = case_open(&c);
    c.edit_from = "\"note\"", c.edit_to = TWO_FILES;
    kvb_table *t = case_open(&c);
    kvb_error err;
    const char *const same[] = {HASH("B"), HASH("a")}, *const other[] = {HASH("a"), HASH("c")};
    kvb_weights mine = {same, 2, "org/name", "0123"};
    ck_assert_msg(kvb_table_check_weights(t, &mine, &err) == KVB_OK, "%s", err.message);
    ck_assert_int_eq(kvb_table_check_weights(nothing, &(kvb_weights){0}, &err), KVB_OK);
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
    kvb_table_close(t), kvb_table_close(nothing);
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
        ck_assert_int_eq(kvb_table_open_memory(&t, bytes, size, "case", NULL, &err), KVB_FORMAT);
        ck_assert_msg(strstr(err.message, damages[i][1]), "%s", err.message);
        free(bytes);
    }
}

UNIT_MAIN("runtime_origin")
