#include "tools/report/page.h"
#include "formats/atomic_file.h"
#include "runtime/fail.h"
#include "tools/report/html.h"
#include "tools/report/page_parts.h"
#include "tools/report/page_sections.h"
#include <string.h>

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

void page_put_name(const page_writer *w, const page_table *t)
{
    const char *metric = kvb_table_info(t->file)->metric;
    size_t same = 0;
    for (size_t i = 0; i < w->p->n_tables; i++)
        same += strcmp(kvb_table_info(w->p->tables[i].file)->metric, metric) == 0;
    html_put(w->out, metric);
    if (same > 1) html_putf(w->out, " (%s)", base_name(t->path));
}

static const char *model_of(const page *p)
{
    const char *first = kvb_table_info(p->tables[0].file)->model_id;
    for (size_t i = 1; i < p->n_tables; i++)
        if (strcmp(kvb_table_info(p->tables[i].file)->model_id, first) != 0) return "several models";
    return *first ? first : "a model without a name";
}

static void put_lines(FILE *out, const char *const *lines)
{
    for (; *lines; lines++) fputs(*lines, out);
}

// Nothing may be loaded, whatever a text inside says: the policy allows only what stands in the page.
static void put_head(page_writer *w)
{
    fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
          "<meta name=\"color-scheme\" content=\"light dark\">\n"
          "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
          "script-src 'unsafe-inline'; img-src data:\">\n<title>KV-cache budgets: ",
          w->out);
    html_put(w->out, model_of(w->p));
    fputs("</title>\n<style>\n", w->out);
    put_lines(w->out, page_css);
    fputs("</style>\n</head>\n<body>\n<header><h1>KV-cache budgets</h1><p>", w->out);
    html_put(w->out, model_of(w->p));
    fputs("</p></header>\n<main>\n", w->out);
}

// Data stand in an element of their own, so that the script holds nothing that came from outside.
static void put_tail(page_writer *w)
{
    cJSON *data = page_map_data(w->p);
    fputs("</main>\n<footer><p>Made by kvbudget ", w->out);
    html_put(w->out, kvb_version());
    fputs(" report. Methods: LU-KV, arXiv 2602.08585.</p></footer>\n"
          "<script type=\"application/json\" id=\"data\">",
          w->out);
    html_json(w->out, data);
    fputs("</script>\n<script>\n", w->out);
    put_lines(w->out, page_js);
    fputs("</script>\n</body>\n</html>\n", w->out);
    cJSON_Delete(data);
}

static void put_page(const page *p, FILE *out)
{
    page_writer w = {.p = p, .out = out};
    put_head(&w);
    page_put_verdicts(&w);
    page_put_worth(&w);
    page_put_maps(&w);
    page_put_losses(&w);
    page_put_holdout(&w);
    page_put_unsure(&w);
    page_put_bytes(&w);
    page_put_origin(&w);
    page_put_use(&w);
    page_put_repeat(&w);
    put_tail(&w);
}

kvb_status page_write(const page *p, const char *path, kvb_error *err)
{
    atomic_file file;
    kvb_status status = atomic_file_begin(&file, path, err);
    if (status != KVB_OK) return status;
    put_page(p, file.stream);
    long size = ftell(file.stream);
    if (size > PAGE_BYTES_MAX)
        status =
            kvb_fail(err, KVB_UNSUPPORTED,
                     "%s: the report would take %ld bytes, expected at most %d; make one of fewer tables or results",
                     path, size, PAGE_BYTES_MAX);
    if (status == KVB_OK) return atomic_file_commit(&file, err);
    atomic_file_abandon(&file);
    return status;
}
