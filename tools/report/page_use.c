// How to load a table, and how to make all of the page again.
#include "formats/need.h"
#include "formats/table_export.h"
#include "tools/report/html.h"
#include "tools/report/page_sections.h"
#include "tools/report/table_npy.h"
#include <stdlib.h>
#include <string.h>

// ---- Use ------------------------------------------------------------------------------------------------------------

// A literal of Python and C alike.
static void put_literal(FILE *out, const char *text)
{
    cJSON *item = cJSON_CreateString(text);
    char *literal = cJSON_PrintUnformatted(item);
    html_put(out, literal);
    cJSON_free(literal);
    cJSON_Delete(item);
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static void put_kvpress(page_writer *w, const page_table *t)
{
    cJSON *press = press_of_table(t->metadata);
    const char *base = base_name(t->path), *dot = strrchr(base, '.');
    char npy[300];
    size_t stem = dot ? (size_t)(dot - base) : strlen(base);
    snprintf(npy, sizeof npy, "%.*s.npy", stem < 280 ? (int)stem : 280, base);
    char *code = table_kvpress_code(npy, t->metadata, press);
    fputs("<h4>kvpress</h4>\n<pre>kvbudget export ", w->out);
    html_shell_word(w->out, t->path);
    fputs(" --format npy -o ", w->out);
    html_shell_word(w->out, npy);
    fputs("</pre>\n<pre>", w->out);
    html_put(w->out, needed(code, "lines of code"));
    fputs("</pre>\n", w->out);
    if (kvb_table_info(t->file)->n_rows != 99)
        fputs(
            "<p class=\"note\">kvpress wants a row for every per cent, and this table has chosen ratios: it cannot be "
            "used there.</p>\n",
            w->out);
    free(code);
    cJSON_Delete(press);
}

static void put_use(page_writer *w, const page_table *t)
{
    const kvb_info *info = kvb_table_info(t->file);
    fputs("<details><summary>", w->out);
    page_put_name(w, t);
    fputs("</summary>\n<h4>What an engine gets</h4>\n<pre>kvbudget budgets ", w->out);
    html_shell_word(w->out, t->path);
    fputs(
        " --ratio 80% --tokens 4096</pre>\n<h4>transformers (the memory is really freed)</h4>\n<pre>import kvbudget\n\n"
        "with kvbudget.compress(model, ",
        w->out);
    put_literal(w->out, t->path);
    fputs(", 0.8) as run:\n    model.generate(**inputs, max_new_tokens=200)\nprint(run.report())</pre>\n", w->out);
    put_kvpress(w, t);
    fputs("<h4>C, C++ (libkvbudget)</h4>\n<pre>kvb_table *table;\nkvb_error err;\nkvb_table_open(&amp;table, ", w->out);
    put_literal(w->out, t->path);
    fprintf(w->out,
            ", NULL, &amp;err);\nuint32_t keep[%u * %u];   // tokens per KV head, layer by layer\n"
            "kvb_budgets(table, 0.8, n_tokens, NULL, keep, %u, &amp;err);\n"
            "kvb_select(scores, n_tokens, keep[head], %u, %u, positions, n_tokens, &amp;err);</pre>\n",
            info->n_layers, info->n_kv_heads, info->n_layers * info->n_kv_heads, info->sink, info->window);
    fputs("<h4>Anything else</h4>\n<pre>kvbudget budgets ", w->out);
    html_shell_word(w->out, t->path);
    fputs(" --ratio 80% --tokens 4096 --csv budgets.csv</pre>\n</details>\n", w->out);
}

void page_put_use(page_writer *w)
{
    fputs("<section id=\"use\"><h2>How to use it</h2>\n", w->out);
    for (size_t i = 0; i < w->p->n_tables; i++) put_use(w, &w->p->tables[i]);
    fputs("</section>\n", w->out);
}

// ---- Repeat ---------------------------------------------------------------------------------------------------------

static void put_file(FILE *out, const char *kind, const char *path, const char *sha256)
{
    fprintf(out, "<tr><th>%s</th><td class=\"text\">", kind);
    html_put(out, path);
    fputs("</td><td class=\"text\"><code>", out);
    html_put(out, *sha256 ? sha256 : "not known");
    fputs("</code></td></tr>\n", out);
}

// The words of a flat object, with a heading; nested ones stay text of JSON.
static void put_object(FILE *out, const char *title, const cJSON *object)
{
    const cJSON *item;
    fputs("<details><summary>", out);
    html_put(out, title);
    fputs("</summary><div class=\"wide\"><table>\n", out);
    cJSON_ArrayForEach(item, object)
    {
        char *text = cJSON_IsString(item) ? NULL : cJSON_PrintUnformatted(item);
        fputs("<tr><th>", out);
        html_put(out, item->string ? item->string : "");
        fputs("</th><td class=\"text\">", out);
        html_put(out, cJSON_IsString(item) ? item->valuestring : text ? text : "");
        fputs("</td></tr>\n", out);
        cJSON_free(text);
    }
    fputs("</table></div></details>\n", out);
}

static void put_inputs(FILE *out, const results_document *r)
{
    const cJSON *input;
    cJSON_ArrayForEach(input, r->inputs)
    {
        fputs("<tr><th>", out);
        html_put(out, results_text(input, "kind"));
        fputs("</th><td class=\"text\">", out);
        html_put(out, results_text(input, "name"));
        fputs("</td><td class=\"text\"><code>", out);
        html_put(out, results_text(input, "sha256"));
        fputs("</code></td></tr>\n", out);
    }
}

// Where the weights are in several files, or in one that is not what the model's hash is of.
static void put_weight_files(FILE *out, const kvb_table *table)
{
    const char *text = kvb_table_metadata(table, "model_files");
    cJSON *files = text ? cJSON_Parse(text) : NULL;
    const cJSON *file;
    cJSON_ArrayForEach(file, files) if (cJSON_IsString(file) &&
                                        strcmp(file->valuestring, kvb_table_info(table)->model_sha256) != 0)
        put_file(out, "its weights", file->string, file->valuestring);
    cJSON_Delete(files);
}

static void put_files(page_writer *w)
{
    const page *p = w->p;
    fputs("<h3>Files</h3>\n<div class=\"wide\"><table><thead><tr><th>what</th><th class=\"text\">name</th>"
          "<th class=\"text\">SHA-256</th></tr></thead><tbody>\n",
          w->out);
    for (size_t i = 0; i < p->n_tables; i++) {
        const kvb_info *info = kvb_table_info(p->tables[i].file);
        put_file(w->out, "table", p->tables[i].path, p->tables[i].sha256);
        put_file(w->out, "its model", info->model_id, info->model_sha256);
        put_weight_files(w->out, p->tables[i].file);
        put_file(w->out, "its calibration texts", "", info->calibration_sha256);
        put_file(w->out, "its record", p->tables[i].from ? p->tables[i].from->path : "", info->record_sha256);
    }
    for (size_t i = 0; i < p->n_results; i++) put_inputs(w->out, &p->results[i]);
    fputs("</tbody></table></div>\n", w->out);
}

// An option with its value, where the value is not the usual one.
static void put_option(FILE *out, const char *option, const cJSON *from, const char *key, const char *usual)
{
    const char *value = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(from, key));
    if (!value || strcmp(value, usual) == 0) return;
    fprintf(out, " %s ", option);
    html_shell_word(out, value);
}

// The solve that makes a table, from its metadata.
static void put_solve(page_writer *w, const page_table *t)
{
    fputs("kvbudget solve ", w->out);
    html_shell_word(w->out, t->from ? t->from->path : "RUN.h5");
    fputs(" --metric ", w->out);
    html_shell_word(w->out, kvb_table_info(t->file)->metric);
    put_option(w->out, "--aggregate", t->metadata, "aggregate", "mean_loss");
    put_option(w->out, "--shrink", t->metadata, "shrink", "0.10000000000000001");
    put_option(w->out, "--min-keep", t->metadata, "min_keep", "0");
    put_option(w->out, "--scope", t->metadata, "scope", "global");
    put_option(w->out, "--hull", t->metadata, "hull", "feasible");
    put_option(w->out, "--order", t->metadata, "order", "metric");
    const char *solver = kvb_table_metadata(t->file, "solver");
    if (solver) fputs(" --exact", w->out);
    fputs(" -o ", w->out);
    html_shell_word(w->out, t->path);
    fputs("\n", w->out);
    if (kvb_table_metadata(t->file, "constraints") || kvb_table_info(t->file)->n_rows != 99)
        fputs("#   with the ratios and constraints above\n", w->out);
}

static void put_commands(page_writer *w)
{
    const page *p = w->p;
    fputs("<h3>Commands</h3>\n<p>Of kvbudget ", w->out);
    html_put(w->out, kvb_version());
    fputs(". The same inputs give the same bytes on the same kind of processor.</p>\n<pre>", w->out);
    for (size_t i = 0; i < p->n_records; i++) {
        fputs("kvbudget profile MODEL CALIB... -o ", w->out);
        html_shell_word(w->out, p->records[i].path);
        fputs("   # with the settings of the record below\n", w->out);
    }
    for (size_t i = 0; i < p->n_tables; i++) put_solve(w, &p->tables[i]);
    for (size_t i = 0; i < p->n_results; i++) {
        const cJSON *word;
        fputs("kvbudget ", w->out);
        html_shell_word(w->out, p->results[i].command);
        cJSON_ArrayForEach(word, p->results[i].arguments)
        {
            fputs(" ", w->out);
            html_shell_word(w->out, cJSON_IsString(word) ? word->valuestring : "");
        }
        fputs("   # gave ", w->out);
        html_put(w->out, p->results[i].name);
        fputs("\n", w->out);
    }
    fputs("</pre>\n", w->out);
}

void page_put_repeat(page_writer *w)
{
    const page *p = w->p;
    fputs("<section id=\"repeat\"><h2>How to repeat it</h2>\n", w->out);
    put_commands(w);
    put_files(w);
    fputs("<h3>Settings</h3>\n", w->out);
    for (size_t i = 0; i < p->n_tables; i++) put_object(w->out, p->tables[i].path, p->tables[i].metadata);
    for (size_t i = 0; i < p->n_records; i++)
        put_object(w->out, p->records[i].path, record_attributes(p->records[i].file));
    for (size_t i = 0; i < p->n_results; i++) put_object(w->out, p->results[i].name, p->results[i].settings);
    fputs("</section>\n", w->out);
}
