// What commands ask of the machine and of other processes: a backend by name, threads, ranks; and the files that they
// write for people and for kvpress.
#include "formats/npy.h"
#include "formats/sha256.h"
#include "study_help.h"
#include "test_runtime_cases.h"
#include "tools/device.h"
#include "tools/json_print.h"
#include "tools/memory.h"
#include "tools/ranks.h"
#include "tools/report/compare_report.h"
#include "tools/report/table_npy.h"
#include "tools_help.h"
#include <omp.h>
#include <sys/resource.h>

static const cli_command COMMAND = {"try", "try", "Tries", NULL, NULL};

UNIT_TEST(backends_by_name)
{
    ck_assert_ptr_eq(device_find(&COMMAND, "ref", "f32"), backend_find("ref"));
    ck_assert_ptr_eq(device_find(&COMMAND, "cpu", "bf16"), backend_find_compute("cpu", "bf16"));
    ck_assert(!device_find(&COMMAND, "ref", "bf16") && !device_find(&COMMAND, "abacus", "f32"));
}

UNIT_TEST(threads)
{
    ck_assert_int_eq(device_take_threads(&COMMAND, 3), EXIT_DONE);
    ck_assert_int_eq(omp_get_max_threads(), 3);
    ck_assert_int_eq(device_take_threads(&COMMAND, 0), EXIT_DONE);
    ck_assert_int_eq(omp_get_max_threads(), 3);
    ck_assert_int_eq(device_take_threads(&COMMAND, DEVICE_THREADS_MAX + 1), EXIT_USAGE);
    ck_assert_int_eq(omp_get_max_threads(), 3);
    struct rlimit was, less; // too little address space for 200 threads is reported in advance
    ck_assert_int_eq(getrlimit(RLIMIT_AS, &was), 0);
    less = was;
    FILE *f = fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    ck_assert(f && fscanf(f, "%lu", &pages) == 1);
    fclose(f);
    less.rlim_cur = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + ((rlim_t)256 << 20);
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &less), 0);
    int few = device_take_threads(&COMMAND, 2), many = device_take_threads(&COMMAND, 200);
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &was), 0);
    unit_numbers(few, EXIT_DONE, many, EXIT_FAILED);
}

// A process that no launcher started is rank 0 of 1, and what all ranks agree on are its own values.
UNIT_TEST(one_rank)
{
    static const char *const launchers[] = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"};
    for (int i = 0; i < 3; i++) unsetenv(launchers[i]);
    ck_assert(!ranks_launched());
    setenv("PMI_RANK", "1", 1);
    ck_assert(ranks_launched());
    unsetenv("PMI_RANK");
    ranks r;
    int who = 7;
    double values[2] = {1.5, -2};
    char text[] = "mine";
    help_ok(ranks_begin(&r, err));
    ck_assert(r.rank == 0 && r.size == 1 && r.local_rank == 0 && r.local_size == 1);
    ck_assert_int_eq(ranks_agree(&r, KVB_IO, &who), KVB_IO);
    ck_assert_int_eq(who, 0);
    ck_assert_int_eq(ranks_agree(&r, KVB_OK, NULL), KVB_OK);
    ranks_sum(&r, values, 2);
    ranks_largest(&r, values, 2);
    ranks_broadcast(&r, text, sizeof text);
    ck_assert(values[0] == 1.5 && values[1] == -2);
    ck_assert_str_eq(text, "mine");
    ranks_end();
}

// Allocators are a setting of the results, and tables among them inputs.
UNIT_TEST(allocators_are_named)
{
    allocator all[2] = {{.label = "uniform", .identity = "uniform"},
                        {.label = "mine", .identity = "table 12ab", .kind = ALLOCATOR_TABLE}};
    const compared with = {.allocators = all, .n_allocators = 2};
    results r = results_begin("eval");
    add_allocators(&r, &with);
    const cJSON *list = cJSON_GetObjectItem(r.settings, "allocators"), *mine = cJSON_GetArrayItem(list, 1);
    ck_assert_int_eq(cJSON_GetArraySize(list), 2);
    unit_strings(cJSON_GetObjectItem(mine, "label")->valuestring, "mine",
                 cJSON_GetObjectItem(mine, "identity")->valuestring, "table 12ab");
    ck_assert_int_eq(cJSON_GetArraySize(r.inputs), 1);
    char *text = cJSON_PrintUnformatted(r.inputs);
    ck_assert_msg(strstr(text, "\"12ab\"") && strstr(text, "\"mine\""), "%s", text);
    free(text);
    results_free(&r);
}

// A record that was read is an input with the hash of its bytes, and the document is printed unchanged.
UNIT_TEST(results_of_a_record)
{
    const case_context one = {.id = "a", .n_tokens = 12, .n_questions = 1, .questions = {{9, {1, 0}, NULL}}};
    results r;
    char sha256[65], *text = shown_text;
    case_select(&from, case_record("one.h5", &one, 1));
    help_ok(sha256_file_hex(from.path, sha256, err));
    r = results_begin("solve");
    help_ok(results_record(&r, &from, err));
    SHOWN(1, help_ok(results_give(&r, true, NULL, err)));
    cJSON *back = cJSON_Parse(text);
    ck_assert_msg(cJSON_Compare(back, r.document, 1), "%s", text);
    ck_assert(strstr(text, sha256) && strstr(text, "one.h5") && strstr(text, RESULTS_SCHEMA));
    cJSON_Delete(back);
    results_free(&r);
    selection_close(&from);
}

// The array and its side file: the ratios, and the press for the metric.
UNIT_TEST(curves_for_kvpress)
{
    static double ratios[99 * 2 * 3];
    for (int i = 0; i < 99 * 6; i++) ratios[i] = i / 600.0;
    table_case c = case_default();
    c.n_layers = 2, c.n_kv_heads = 3, c.prune_ratio = ratios;
    kvb_table *table = case_open(&c);
    cJSON *metadata = cJSON_Parse("{\"metric\":\"keydiff\",\"metric_parameters\":\"{}\"}");
    size_t n;
    rank_content none;
    const table_content content = table_content_of(table, metadata, &none);
    help_ok(write_table_npy(help_path("curve.npy"), &content, err));
    kvb_table_close(table);
    unsigned char *bytes = help_slurp(help_path("curve.npy"), &n);
    npy_array a;
    double back[99 * 6];
    help_ok(npy_parse(&a, bytes, n, "curve.npy", err));
    ck_assert(a.n_dims == 3 && a.shape[0] == 99 && a.shape[1] == 2 && a.shape[2] == 3);
    help_ok(npy_to_f64(&a, back, "curve.npy", err));
    ck_assert_mem_eq(back, ratios, sizeof back);
    free(bytes);
    char *side = (char *)help_slurp(help_path("curve.json"), &n);
    ck_assert_ptr_nonnull(memmem(side, n, "KeyDiffPress", 12));
    free(side);
    cJSON_Delete(metadata);
}

UNIT_MAIN_EACH("tools: work", help_setup, help_teardown)
