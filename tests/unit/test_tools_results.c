// The form that all results have: rows that are the same numbers in JSON and CSV, intervals, texts that need quotes.
#include "formats_help.h"
#include "tools/json_print.h"
#include "tools/report/results.h"

static void enter_folder(void)
{
    help_setup();
    ck_assert_int_eq(chdir(help_folder), 0);
}

static results two_rows(void)
{
    static char *words[] = {"run.h5", "--csv"};
    results_remember(2, words);
    results r = results_begin("solve");
    results_input(&r, "record", "run.h5", "ab");
    cJSON *row = results_row(&r);
    cJSON_AddStringToObject(row, "metric", "a,\"b\"\n");
    cJSON_AddNumberToObject(row, "loss", 0.1);
    cJSON_AddBoolToObject(row, "saturated", true);
    row = results_row(&r);
    cJSON_AddStringToObject(row, "metric", "plain");
    results_interval(row, "kl", (interval){0.25, NAN, 1.0 / 3});
    cJSON_AddNumberToObject(results_detail(&r), "row", 1);
    return r;
}

UNIT_TEST(csv_has_every_column_once_and_quotes_what_needs_it)
{
    results r = two_rows();
    help_ok(results_write_csv(&r, "results.csv", err));
    size_t n;
    char *text = (char *)help_slurp("results.csv", &n);
    ck_assert_str_eq(text, "metric,loss,saturated,kl,kl_low,kl_high\n"
                           "\"a,\"\"b\"\"\n\",0.1,true,,,\n"
                           "plain,,,0.25,,0.33333333333333331\n");
    free(text);
    results_free(&r);
    ck_assert_ptr_null(r.document);
}

UNIT_TEST(json_has_schema_command_inputs_and_the_same_rows)
{
    results r = two_rows();
    help_ok(results_write_pair(&r, "pair", err));
    size_t n;
    char *text = (char *)help_slurp("pair.json", &n);
    cJSON *read = cJSON_Parse(text);
    free(text);
    ck_assert_ptr_nonnull(read);
    ck_assert(cJSON_Compare(read, r.document, true) == 0); // NaN is null in the file
    ck_assert_str_eq(cJSON_GetStringValue(cJSON_GetObjectItem(read, "schema")), RESULTS_SCHEMA);
    ck_assert_int_eq((int)cJSON_GetNumberValue(cJSON_GetObjectItem(read, "schema_version")), RESULTS_VERSION);
    unit_strings(cJSON_GetStringValue(cJSON_GetObjectItem(read, "command")), "solve",
                 cJSON_GetStringValue(cJSON_GetArrayItem(cJSON_GetObjectItem(read, "arguments"), 1)), "--csv");
    const cJSON *input = cJSON_GetArrayItem(cJSON_GetObjectItem(read, "inputs"), 0),
                *second = cJSON_GetArrayItem(cJSON_GetObjectItem(read, "rows"), 1);
    ck_assert_str_eq(cJSON_GetStringValue(cJSON_GetObjectItem(input, "sha256")), "ab");
    ck_assert(cJSON_IsNull(cJSON_GetObjectItem(second, "kl_low")));
    ck_assert_double_eq(cJSON_GetNumberValue(cJSON_GetObjectItem(second, "kl")), 0.25);
    cJSON_Delete(read);
    results_free(&r);
}

UNIT_TEST(files_have_the_hash_of_their_bytes)
{
    results r = results_begin("validate");
    help_spew("input", "abc", 3);
    help_ok(results_file(&r, "table", "input", err));
    const cJSON *input = cJSON_GetArrayItem(r.inputs, 0);
    ck_assert_str_eq(cJSON_GetStringValue(cJSON_GetObjectItem(input, "sha256")),
                     "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    unlink("input");
    help_fails(results_file(&r, "table", "input", err), KVB_IO, "");
    ck_assert_int_eq(cJSON_GetArraySize(r.inputs), 1);
    results_free(&r);
}

UNIT_TEST(a_file_that_cannot_be_written_is_an_error)
{
    results r = two_rows();
    help_fails(results_write(&r, "no/such/folder.json", err), KVB_IO, "");
    help_fails(results_give(&r, false, "no/such/folder.csv", err), KVB_IO, "");
    help_ok(results_give(&r, false, NULL, err));
    results_free(&r);
}

UNIT_MAIN_EACH("tools_results", enter_folder, help_teardown)
