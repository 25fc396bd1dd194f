// kvbudget inspect: any file of the project as text or as JSON. Each kind of file becomes a JSON document, and one
// printer shows every document as text.
#include "formats/calib.h"
#include "formats/file_read.h"
#include "formats/json_file.h"
#include "formats/record.h"
#include "formats/table_export.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include "study/interval.h"
#include "study/layer_losses.h"
#include "tools/cli.h"
#include "tools/json_print.h"
#include "tools/report/inspect_files.h"
#include <string.h>

// ---- Kinds of files ----

static void add_question(cJSON *list, const record_question_info *q)
{
    cJSON *one = cJSON_CreateObject();
    cJSON_AddItemToArray(list, one);
    json_put(one, "number %u n_queries %u n_suffix %u n_answer %u", q->number, q->n_queries, q->n_suffix, q->n_answer);
}

// For metrics with curves, adds each layer's gain, and its predicted loss with equal budgets at 80 % pruned, in nats.
static void add_layers(cJSON *doc, const char *path, const record_context_info *c)
{
    cJSON *layers = NULL;
    for (uint32_t m = 0; m < c->n_metrics; m++) {
        layer_losses found;
        if (layer_losses_read(&found, path, c->metrics[m], 0.8, NULL) == KVB_OK) {
            bool first = !layers;
            if (first) layers = cJSON_AddArrayToObject(doc, "predicted_loss_at_80_percent");
            for (uint32_t l = 0; l < found.n_layers; l++) {
                if (first) cJSON_AddItemToArray(layers, cJSON_CreateObject());
                cJSON *one = cJSON_GetArrayItem(layers, (int)l);
                if (first) cJSON_AddNumberToObject(one, "layer", found.layer[l]);
                if (first) cJSON_AddNumberToObject(one, "gain", found.gain[l]);
                cJSON_AddNumberToObject(one, c->metrics[m], found.loss[l]);
            }
        }
        layer_losses_free(&found);
    }
}

static kvb_status inspect_record(cJSON *doc, const char *path, kvb_error *err)
{
    record *r;
    kvb_status status = record_open(&r, path, err);
    if (status != KVB_OK) return status;
    record_shape s = record_get_shape(r);
    json_put(doc, "format_version %u n_layers %u n_heads %u n_kv_heads %u head_dim %u", RECORD_FORMAT_VERSION,
             s.n_layers, s.n_heads, s.n_kv_heads, s.head_dim);
    cJSON_AddItemToObject(doc, "attributes", cJSON_Duplicate(record_attributes(r), 1));
    cJSON *contexts = cJSON_AddArrayToObject(doc, "contexts");
    for (size_t i = 0; i < record_context_count(r); i++) {
        const record_context_info *c = record_context(r, i);
        cJSON *one = cJSON_CreateObject();
        cJSON_AddItemToArray(contexts, one);
        json_put(one, "id %s n_tokens %u", c->id, c->n_tokens);
        cJSON_AddItemToObject(one, "metrics", cJSON_CreateStringArray(c->metrics, (int)c->n_metrics));
        cJSON *questions = cJSON_AddArrayToObject(one, "questions");
        for (uint32_t q = 0; q < c->n_questions; q++) add_question(questions, &c->questions[q]);
    }
    if (record_context_count(r) > 0) add_layers(doc, path, record_context(r, 0));
    record_close(r);
    return KVB_OK;
}

static kvb_status add_row(cJSON *rows, const kvb_table *table, uint32_t index, kvb_error *err)
{
    kvb_row row;
    kvb_status status = kvb_table_row(table, index, &row, err);
    if (status != KVB_OK) return status;
    const kvb_info *info = kvb_table_info(table);
    const char *unknown = kvb_table_metadata(table, "unknown");
    cJSON *one = cJSON_CreateObject();
    cJSON_AddItemToArray(rows, one);
    json_put(one, "ratio %g effective_ratio %g loss %g lower_bound %g table_loss %g lambda %g", row.ratio,
             row.effective_ratio, row.loss, row.lower_bound, row.table_loss, row.lambda);
    if (!unknown || !strstr(unknown, "std"))
        cJSON_AddNumberToObject(one, "unsure_heads",
                                flag_heads(row.prune_ratio, row.std, info->n_layers * info->n_kv_heads, NULL));
    cJSON_AddBoolToObject(one, "saturated", row.saturated);
    return KVB_OK;
}

static kvb_status inspect_table(cJSON *doc, const char *path, kvb_error *err)
{
    static const uint32_t per_cent[] = {50, 80, 90};
    kvb_table *table;
    cJSON *metadata = NULL;
    kvb_status status = kvb_table_open(&table, path, NULL, err);
    if (status != KVB_OK) return status;
    status = table_metadata_read(&metadata, path, err);
    cJSON_AddItemToObject(doc, "metadata", metadata);
    uint32_t n_rows = kvb_table_info(table)->n_rows;
    // A table that was solved for chosen ratios has n_rows in its metadata; all of its rows are shown.
    bool chosen = kvb_table_metadata(table, "n_rows") != NULL;
    uint32_t n_shown = chosen ? n_rows : sizeof per_cent / sizeof *per_cent;
    cJSON_AddNumberToObject(doc, "n_rows", n_rows);
    cJSON *rows = cJSON_AddArrayToObject(doc, "rows");
    for (uint32_t i = 0; i < n_shown && status == KVB_OK; i++)
        status = add_row(rows, table, chosen ? i : per_cent[i] - 1, err);
    kvb_table_close(table);
    return status;
}

static double count_characters(const char *text)
{
    size_t n = 0;
    for (; *text; text++) n += ((unsigned char)*text & 0xc0) != 0x80; // all but continuation bytes of UTF-8
    return (double)n;
}

static kvb_status inspect_calib(cJSON *doc, const char *path, kvb_error *err)
{
    calib_file file;
    kvb_status status = calib_load(&file, path, err);
    if (status != KVB_OK) return status;
    cJSON_AddStringToObject(doc, "sha256", file.sha256);
    cJSON *contexts = cJSON_AddArrayToObject(doc, "contexts");
    for (size_t i = 0; i < file.count; i++) {
        const calib_context *c = &file.contexts[i];
        size_t answers = 0;
        for (size_t q = 0; q < c->n_questions; q++) answers += c->questions[q].answer || c->questions[q].answer_ids;
        cJSON *one = cJSON_CreateObject();
        cJSON_AddItemToArray(contexts, one);
        cJSON_AddStringToObject(one, "id", c->sample_id);
        if (c->context) cJSON_AddNumberToObject(one, "characters", count_characters(c->context));
        else cJSON_AddNumberToObject(one, "tokens", (double)c->n_context_ids);
        json_put(one, "questions %g answers %g answer_prefix %s", (double)c->n_questions, (double)answers,
                 c->answer_prefix);
    }
    calib_free(&file);
    return KVB_OK;
}

// ---- Recognising ----

static bool is_record(const file_view *view)
{
    return kvb_kind_of_file(view->data, view->size) == KVB_FILE_RECORD;
}

// A safetensors file begins with eight bytes of header length, then a JSON object.
static bool is_table(const file_view *view)
{
    uint64_t length = 0;
    for (int i = 7; i >= 0 && view->size > 8; i--) length = length << 8 | view->data[i];
    return view->size > 8 && view->data[8] == '{' && length <= view->size - 8;
}

// A learned ranking says so in its header.
static bool is_ranking(const file_view *view)
{
    static const char format[] = "\"format\":\"kvbudget-rank\"";
    return is_table(view) && memmem(view->data, view->size, format, sizeof format - 1) != NULL;
}

// JSON lines begin with an object, perhaps after a UTF-8 byte order mark or blank lines.
static bool is_json(const file_view *view)
{
    size_t i = view->size >= 3 && memcmp(view->data, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    while (i < view->size && strchr(" \t\r\n", view->data[i]) && view->data[i]) i++;
    return i < view->size && view->data[i] == '{';
}

static const struct {
    const char *kind;
    bool (*is)(const file_view *view);
    kvb_status (*inspect)(cJSON *doc, const char *path, kvb_error *err);
} KINDS[] = {{"record", is_record, inspect_record},
             {"ranking", is_ranking, inspect_ranking}, // before tables, which have the same form
             {"table", is_table, inspect_table},
             {"calibration", is_json, inspect_calib}};

static kvb_status inspect_view(cJSON *doc, const file_view *view, const char *path, kvb_error *err)
{
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++) {
        if (!KINDS[i].is(view)) continue;
        cJSON_AddStringToObject(doc, "kind", KINDS[i].kind);
        return KINDS[i].inspect(doc, path, err);
    }
    return kvb_fail(err, KVB_FORMAT,
                    "%s: expected a record (.h5), a table or ranking (.safetensors) or calibration lines (.jsonl), "
                    "found %s",
                    path, kvb_kind_name(kvb_kind_of_file(view->data, view->size)));
}

// ---- The command ----

static kvb_status inspect(const char *path, bool json, kvb_error *err)
{
    file_view view;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    cJSON *doc = cJSON_CreateObject();
    cJSON_AddStringToObject(doc, "path", path);
    status = inspect_view(doc, &view, path, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    if (status == KVB_OK) json ? json_print(doc) : document_print(doc);
    cJSON_Delete(doc);
    file_unmap(&view);
    return status;
}

static int run_inspect(const cli_command *self, int argc, char **argv)
{
    bool json = false;
    const cli_option options[] = {{"json", 0, CLI_FLAG, &json, NULL, "print one JSON object instead of text"}, {0}};
    int first = 0;
    int code = cli_parse(self, options, argc, argv, &first);
    if (code != EXIT_DONE) return code < 0 ? EXIT_DONE : code;
    if (argc - first != 1) return cli_usage_error(self, "expected one file");
    kvb_error err;
    return inspect(argv[first], json, &err) == KVB_OK ? EXIT_DONE : cli_failed(self, &err);
}

const cli_command cmd_inspect = {
    .name = "inspect",
    .synopsis = "inspect FILE [--json]",
    .summary = "show the contents of a record, a table, a ranking or a calibration file",
    .details =
        "Recognises a file by its content, checks it, and prints what it holds:\n  record             attributes, "
        "contexts, metrics, questions and, if it has curves, each layer's gain and\n                     predicted "
        "loss\n  table              metadata, and the rows at 50, 80 and 90 % or all that it was solved for "
        "(unsure_heads: for\n                     how many heads the questions disagree by more than the head keeps)\n "
        " ranking            its features and how much they weigh\n  calibration lines  contexts and questions\n"
        "\n"
        "Examples:\n"
        "  kvbudget inspect run.h5\n"
        "  kvbudget inspect --json keydiff.safetensors\n",
    .run = run_inspect,
};
