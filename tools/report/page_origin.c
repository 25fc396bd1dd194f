// What each table is for and what it was made from.
#include "tools/report/html.h"
#include "tools/report/page_sections.h"
#include <string.h>

static void put_fact(FILE *out, const char *name, const char *value)
{
    if (!value || !*value) return;
    fprintf(out, "<dt>%s</dt><dd>", name);
    html_put(out, value);
    fputs("</dd>\n", out);
}

static void put_lengths(FILE *out, const kvb_info *info)
{
    uint32_t least = UINT32_MAX, most = 0;
    for (uint32_t i = 0; i < info->n_calibration_tokens; i++) {
        uint32_t t = info->calibration_tokens[i];
        if (t < least) least = t;
        if (t > most) most = t;
    }
    fprintf(out, "<dt>calibrated on</dt><dd>%u text%s of ", info->n_contexts, info->n_contexts == 1 ? "" : "s");
    if (least == most) fprintf(out, "%u tokens", most);
    else fprintf(out, "%u to %u tokens", least, most);
    fprintf(out, ", %u question%s", info->n_questions, info->n_questions == 1 ? "" : "s");
    if (info->n_queries_min == info->n_queries_max) fprintf(out, ", %u decoded tokens each", info->n_queries_max);
    else fprintf(out, ", %u to %u decoded tokens each", info->n_queries_min, info->n_queries_max);
    fprintf(out, "; it serves contexts of %u to %u tokens best</dd>\n", least / 2, 2 * most);
}

static void put_texts(FILE *out, const page_record *r)
{
    fputs("<details><summary>The texts of the record</summary><div class=\"wide\"><table><thead><tr><th>text</th>"
          "<th>tokens</th><th>questions</th><th>decoded tokens</th></tr></thead><tbody>\n",
          out);
    for (size_t i = 0; i < record_context_count(r->file); i++) {
        const record_context_info *c = record_context(r->file, i);
        uint64_t queries = 0;
        for (uint32_t q = 0; q < c->n_questions; q++) queries += c->questions[q].n_queries;
        fputs("<tr><th>", out);
        html_put(out, c->id);
        fprintf(out, "</th><td>%u</td><td>%u</td><td>%llu</td></tr>\n", c->n_tokens, c->n_questions,
                (unsigned long long)queries);
    }
    fputs("</tbody></table></div></details>\n", out);
}

static void put_origin(page_writer *w, const page_table *t)
{
    const kvb_info *info = kvb_table_info(t->file);
    fputs("<article class=\"card\"><h3>", w->out);
    page_put_name(w, t);
    fputs("</h3>\n<dl>\n", w->out);
    put_fact(w->out, "model", *info->model_id ? info->model_id : "not named");
    put_fact(w->out, "at Hugging Face", kvb_table_metadata(t->file, "hf_id"));
    put_fact(w->out, "commit there", kvb_table_metadata(t->file, "hf_revision"));
    put_fact(w->out, "weights from", kvb_table_metadata(t->file, "model_container"));
    fprintf(w->out, "<dt>shape</dt><dd>%u layers, %u KV heads each for %u query heads, %u numbers per key</dd>\n",
            info->n_layers, info->n_kv_heads, info->n_heads, info->head_dim);
    put_fact(w->out, "metric", info->metric);
    fprintf(w->out,
            "<dt>protected</dt><dd>sink %u, window %u: so many of the first and the last tokens stay in every head "
            "whose budget has room for them</dd>\n",
            info->sink, info->window);
    put_lengths(w->out, info);
    put_fact(w->out, "constraints", kvb_table_metadata(t->file, "constraints"));
    fprintf(w->out, "<dt>ratios</dt><dd>%u, from %.4g to %.4g&nbsp;%% pruned</dd>\n", info->n_rows,
            100 * page_row_near(t->file, 0).ratio, 100 * page_row_near(t->file, 1).ratio);
    fputs("</dl>\n", w->out);
    if (t->from) put_texts(w->out, t->from);
    fputs("</article>\n", w->out);
}

void page_put_origin(page_writer *w)
{
    fputs("<section id=\"origin\"><h2>What for, and from what</h2>\n"
          "<p>A table is for one model, one metric and its parameters. The loader checks all three; with another model "
          "of the same shape it would do silent harm.</p>\n<div class=\"cards\">\n",
          w->out);
    for (size_t i = 0; i < w->p->n_tables; i++) put_origin(w, &w->p->tables[i]);
    fputs("</div></section>\n", w->out);
}
