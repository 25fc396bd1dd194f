// The page of `kvbudget report`: texts that would be markup, documents of results, lines over the ratio, and a whole
// page of a table in which every text is hostile.
#include "formats/table_export.h"
#include "formats/table_write.h"
#include "formats_help.h"
#include "tools/report/html.h"
#include "tools/report/page.h"
#include "tools/report/table_npy.h"

static char text[4096];

static FILE *begin(void)
{
    memset(text, 0, sizeof text);
    return fmemopen(text, sizeof text - 1, "w");
}

UNIT_TEST(texts_are_escaped)
{
    static const struct {
        void (*put)(FILE *, const char *);
        const char *from, *to;
    } cases[] = {{html_put, "a<b>&\"'", "a&lt;b&gt;&amp;&quot;&#39;"},
                 {html_put, "gr\xc3\xbc\xc3\x9f", "gr\xc3\xbc\xc3\x9f"},
                 {html_put, "a\x01\x7f\nb", "a??\nb"},
                 {html_put, "\xff\xc0\xaf", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"}, // not UTF-8; an overlong form
                 {html_put, "a\xe2\x80\xae.", "a\xEF\xBF\xBD."},                     // turns the direction of writing
                 {html_shell_word, "a-b_1.safetensors", "a-b_1.safetensors"},
                 {html_shell_word, "", "&#39;&#39;"},
                 {html_shell_word, "a b", "&#39;a b&#39;"},
                 {html_shell_word, "it's", "&#39;it&#39;\\&#39;&#39;s&#39;"},
                 {html_shell_word, "$(x)`", "&#39;$(x)`&#39;"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        FILE *out = begin();
        cases[i].put(out, cases[i].from);
        fclose(out);
        ck_assert_str_eq(text, cases[i].to);
    }
    FILE *out = begin();
    html_fill(out, "<b>%s</b> %s", "<", "7");
    fclose(out);
    ck_assert_str_eq(text, "<b>&lt;</b> 7");
}

// ---- Documents of results -------------------------------------------------------------------------------------------

#define HEAD "{\"schema\":\"kvbudget-results\",\"schema_version\":1,\"command\":\"eval\",\"rows\":"

UNIT_TEST(documents_are_checked)
{
    const struct {
        const char *from;
        kvb_status want;
        const char *says;
    } cases[] = {{HEAD "[]}", KVB_OK, ""},
                 {"[]", KVB_FORMAT, "r.json: "},
                 {"{}", KVB_FORMAT, "schema: expected \"kvbudget-results\""},
                 {"{\"schema\":\"kvbudget-results\",\"schema_version\":9}", KVB_VERSION, "schema_version 9"},
                 {"{\"schema\":\"kvbudget-results\",\"schema_version\":1}", KVB_FORMAT, "command"},
                 {HEAD "{}}", KVB_FORMAT, "rows: expected a list"},
                 {HEAD "[{},3]}", KVB_FORMAT, "rows[1]: expected an object"},
                 {HEAD "[{\"kl\":[1]}]}", KVB_FORMAT, "rows[0].kl"},
                 {HEAD "[{\"kl\":1,\"kl\":2}]}", KVB_FORMAT, "r.json: "}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        results_document r;
        kvb_error err = {0};
        ck_assert_int_eq(results_parse(&r, cases[i].from, strlen(cases[i].from), "r.json", &err), cases[i].want);
        ck_assert_msg(strstr(err.message, cases[i].says) != NULL, "%zu: %s", i, err.message);
        ck_assert(!r.document == (cases[i].want != KVB_OK));
        results_close(&r);
    }
    results_document r;
    kvb_error err;
    ck_assert_int_eq(results_open(&r, "/nonexistent/r.json", &err), KVB_IO);
    ck_assert_ptr_null(r.document);
}

static const char ROWS[] =
    HEAD "[{\"metric\":\"m\",\"allocator\":\"uniform\",\"ratio\":0.8,\"kl\":0.4,\"kl_low\":0.3,\"kl_high\":0.5},"
         "{\"metric\":\"m\",\"allocator\":\"uniform\",\"ratio\":0.5,\"kl\":0.2},"
         "{\"metric\":\"m\",\"allocator\":\"kvbudget\",\"ratio\":0.8,\"kl\":0.1,\"sink\":4,\"window\":1},"
         "{\"metric\":\"m\",\"allocator\":\"kvbudget\",\"ratio\":0.8,\"kl\":9,\"sink\":0,\"window\":0},"
         "{\"metric\":\"other\",\"allocator\":\"ada\",\"ratio\":0.9,\"kl\":7},"
         "{\"task\":\"t\",\"method\":\"m\",\"allocator\":\"ada\",\"ratio\":0.9,\"kl\":7}]}";

UNIT_TEST(rows_become_lines)
{
    results_document r;
    help_ok(results_parse(&r, ROWS, sizeof ROWS - 1, "r.json", err));
    grid_rows from = {.rows = r.rows, .method = "m"};
    static results_grid filled;
    results_grid *g = &filled;
    results_grid_fill(g, &from, "kl");
    unit_numbers(g->n_names, 2, g->n_ratios, 2);
    ck_assert_double_eq(g->ratios[0], 0.5); // ascending, though the rows are not
    enum { UNIFORM, OWN };                  // in the order of the rows
    ck_assert(strcmp(g->names[UNIFORM], "uniform") == 0 && strcmp(g->names[OWN], "kvbudget") == 0);
    ck_assert_double_eq(g->value[UNIFORM][1], 0.4);
    ck_assert_double_eq(g->low[UNIFORM][1], 0.3);
    ck_assert_double_eq(g->value[OWN][1], 0.1); // not that of the row without protection
    ck_assert(isnan(g->value[OWN][0]) && isnan(g->low[UNIFORM][0]) && g->has_intervals);
    from.bare = true;
    results_grid_fill(g, &from, "kl");
    ck_assert(g->n_names == 1 && g->value[0][0] == 9);
    const cJSON *task = cJSON_GetArrayItem(r.rows, 5);
    ck_assert_str_eq(results_method(task), "m");
    ck_assert(!grid_has_row(&from, task) && isnan(results_number(task, "nothing")) && !*results_text(task, "kl"));
    ck_assert(isnan(results_interval_at(task, "kl").low) && results_interval_at(task, "kl").value == 7);
    results_close(&r);
}

// ---- A page ---------------------------------------------------------------------------------------------------------

enum { R = 99 };
#define EVIL "\"><script>alert(1)</script>\xe2\x80\xae'&"
#define SHA "00000000000000000000000000000000000000000000000000000000000000aa"

// Metadata with markup wherever any text is allowed.
static cJSON *hostile_metadata(uint32_t layers, uint32_t heads)
{
    // clang-format off
    static const char *const metadata[] = {
        "format", "kvbudget-table", "format_version", "1", "tool_version", EVIL, "architecture", EVIL,
        "model_id", EVIL, "model_sha256", "", "tokenizer_sha256", "", "calibration_sha256", "",
        "record_sha256", SHA, "head_dim", "16", "metric", "<b>&\"'",
        "metric_parameters", "{\"<i>\":\"</pre>\"}", "sink", "4", "window", "1", "scope", "global",
        "aggregate", "mean_loss", "hull", "feasible", "max_prune", "0.99", "calibration_tokens", "100,200",
        "n_contexts", "2", "n_questions", "4", "n_queries", "5,9", EVIL, EVIL};
    // clang-format on
    cJSON *m = cJSON_CreateObject();
    for (size_t i = 0; i < sizeof metadata / sizeof *metadata; i += 2)
        cJSON_AddStringToObject(m, metadata[i], metadata[i + 1]);
    const char *const shape[] = {"n_layers", "n_heads", "n_kv_heads"};
    for (int i = 0; i < 3; i++) {
        char count[16];
        snprintf(count, sizeof count, "%u", i == 0 ? layers : heads);
        cJSON_AddStringToObject(m, shape[i], count);
    }
    return m;
}

// Writes a table with equal heads; only the last one's questions disagree.
static void write_table(const char *path, uint32_t layers, uint32_t heads)
{
    size_t n = (size_t)layers * heads;
    double *prune = calloc(R * n, sizeof *prune), *deviation = calloc(R * n, sizeof *deviation), ratio[R];
    uint8_t saturated[R] = {0};
    ck_assert(prune && deviation);
    for (size_t r = 0; r < R; r++) {
        ratio[r] = (double)(r + 1) / 100;
        for (size_t h = 0; h < n; h++) prune[r * n + h] = ratio[r];
        deviation[r * n + n - 1] = 0.5;
    }
    cJSON *m = hostile_metadata(layers, heads);
    const table_content t = {R,     layers, heads, prune,     ratio, deviation, ratio, ratio,
                             ratio, ratio,  ratio, saturated, NULL,  NULL,      m};
    help_ok(table_write(path, &t, err));
    cJSON_Delete(m);
    free(deviation);
    free(prune);
}

// Returns the whole page, which the caller frees.
static char *page_of(const page_paths *paths, const char *name)
{
    page p;
    help_ok(page_open(&p, paths, err));
    help_ok(page_write(&p, name, err));
    page_free(&p);
    file_view view;
    help_ok(file_map(&view, name, err));
    char *whole = strndup((const char *)view.data, view.size);
    file_unmap(&view);
    return whole;
}

UNIT_TEST(hostile_texts_stay_texts)
{
    const char *table = help_path("a'<img src=x>.safetensors"), *out = help_path("page.html");
    write_table(table, 2, 2);
    const char *tables[] = {table};
    char *whole = page_of(&(page_paths){.tables = tables, .n_tables = 1}, out);
    ck_assert(!strstr(whole, "alert(1)</script>") && !strstr(whole, "<img") && !strstr(whole, "<i>"));
    ck_assert_ptr_null(strstr(whole, "\xe2\x80\xae"));
    ck_assert_ptr_nonnull(strstr(whole, "&lt;b&gt;&amp;&quot;&#39;")); // the metric's name
    ck_assert_ptr_nonnull(strstr(whole, "not tried yet"));
    // Half a deviation is more than the 20 % that the head keeps at 80 %.
    ck_assert(strstr(whole, "1 of 4 heads are not certain at 80&nbsp;%") && strstr(whole, "default-src 'none'"));
    ck_assert(strstr(whole, page_css[0]) && !strstr(whole, "<script"));
    free(whole);
}

UNIT_TEST(verdicts_follow_the_intervals)
{
    static const struct {
        double low, high;
        const char *says;
    } cases[] = {{0.3, 0.7, "better than an even split at 80&nbsp;% pruned"},
                 {0.7, 1.3, "not certain at 80&nbsp;% pruned"},
                 {1.2, 1.6, "worse than an even split at 80&nbsp;% pruned"}};
    char document[1200];
    const char *table = help_path("t.safetensors"), *found = help_path("r.json"), *out = help_path("page.html");
    write_table(table, 2, 2);
    const char *tables[] = {table}, *documents[] = {found};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        page p;
        help_ok(page_open(&p, &(page_paths){.tables = tables, .n_tables = 1}, err));
        int size =
            snprintf(document, sizeof document,
                     "{\"schema\":\"kvbudget-results\",\"schema_version\":1,\"command\":\"eval\",\"inputs\":[{\"kind\":"
                     "\"text\"}],"
                     "\"settings\":{\"allocators\":[{\"label\":\"x\",\"identity\":\"table %s\"}]},\"rows\":["
                     "{\"metric\":\"<b>&\\\"'\",\"allocator\":\"uniform\",\"ratio\":0.8,\"kl\":0.2,\"top1\":0.8},"
                     "{\"metric\":\"<b>&\\\"'\",\"allocator\":\"x\",\"ratio\":0.8,\"kl\":0.1,\"top1\":0.97,"
                     "\"kl_to_uniform\":0.5,\"kl_to_uniform_low\":%g,\"kl_to_uniform_high\":%g}]}",
                     p.tables[0].sha256, cases[i].low, cases[i].high);
        page_free(&p);
        help_ok(atomic_write(found, document, (size_t)size, err));
        char *whole =
            page_of(&(page_paths){.tables = tables, .n_tables = 1, .results = documents, .n_results = 1}, out);
        ck_assert(strstr(whole, cases[i].says) && strstr(whole, "<b>97 of 100</b>"));
        ck_assert(strstr(whole, "Up to 80&nbsp;% can go") && strstr(whole, "Measured on 1 text."));
        free(whole);
    }
}

UNIT_TEST(large_models_fit)
{
    const char *tables[4], *out = help_path("page.html");
    for (int i = 0; i < 4; i++) write_table(tables[i] = help_path("%d.safetensors", i), 80, 8);
    char *whole = page_of(&(page_paths){.tables = tables, .n_tables = 4}, out);
    ck_assert_uint_lt(strlen(whole), PAGE_BYTES_MAX);
    for (int k = 0; k < 2; k++) { // one table has all three maps, four have the one of 80 % each
        size_t maps = 0;
        for (const char *at = whole; (at = strstr(at, " % pruned, kept ")); at++) maps++;
        ck_assert_uint_eq(maps, k ? 3 : 4);
        free(whole);
        whole = page_of(&(page_paths){.tables = tables, .n_tables = 1}, out);
    }
    free(whole);
}

UNIT_TEST(too_much_is_refused)
{
    const char *table = help_path("t.safetensors"), *out = help_path("page.html");
    write_table(table, 2500, 8); // a cell of its head map alone takes 60 bytes and more
    const char *tables[] = {table, table};
    page p;
    kvb_error problem = {0};
    help_ok(page_open(&p, &(page_paths){.tables = tables, .n_tables = 2}, err));
    ck_assert_int_eq(page_write(&p, out, &problem), KVB_UNSUPPORTED);
    ck_assert(strstr(problem.message, "expected at most 2000000") && !help_exists(out));
    page_free(&p);
}

UNIT_TEST(what_does_not_belong_is_refused)
{
    const char *table = help_path("t.safetensors"), *none = help_path("none.h5");
    write_table(table, 2, 2);
    const char *tables[] = {table}, *records[] = {none};
    page p;
    kvb_error problem = {0};
    ck_assert_int_eq(page_open(&p, &(page_paths){0}, &problem), KVB_ARGUMENT);
    page_free(&p);
    ck_assert_int_eq(
        page_open(&p, &(page_paths){.tables = tables, .n_tables = 1, .records = records, .n_records = 1}, &problem),
        KVB_IO);
    page_free(&p);
    help_ok(page_open(&p, &(page_paths){.tables = tables, .n_tables = 1}, err));
    ck_assert_int_eq(page_write(&p, "/nonexistent/x.html", &problem), KVB_IO);
    page_free(&p);
}

UNIT_TEST(lines_for_kvpress)
{
    cJSON *metadata = cJSON_Parse("{\"metric\": \"keydiff\", \"sink\": \"4\", \"window\": \"1\"}");
    cJSON *press = press_of_table(metadata);
    char *code = table_kvpress_code("a\"b.npy", metadata, press);
    ck_assert_ptr_nonnull(
        strstr(code, "kvpress.LUKVPress(kvpress.KeyDiffPress(), compression_ratio=0.8, sink=4, window=1"));
    ck_assert_ptr_nonnull(strstr(code, "numpy.load(\"a\\\"b.npy\")"));
    free(code);
    cJSON_Delete(press);
    cJSON_Delete(metadata);
}

UNIT_MAIN_EACH("tools_report", help_setup, help_teardown)
