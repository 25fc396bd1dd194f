// Heads that are not certain, and memory at lengths.
#include "formats/need.h"
#include "study/interval.h"
#include "tools/report/html.h"
#include "tools/report/page_sections.h"
#include <stdlib.h>

static const double RATIOS[] = {0.5, 0.8, 0.9};
enum { N_RATIOS = sizeof RATIOS / sizeof *RATIOS, LISTED = 16, BYTES_OF_A_NUMBER = 2 };

// ---- Not certain ----------------------------------------------------------------------------------------------------

static void put_flags(page_writer *w, const page_table *t, double ratio)
{
    const kvb_info *info = kvb_table_info(t->file);
    uint32_t heads = info->n_layers * info->n_kv_heads, listed = 0;
    kvb_row row = page_row_near(t->file, ratio);
    uint8_t *flags = need(heads, sizeof *flags, "heads");
    uint32_t n = flag_heads(row.prune_ratio, row.std, heads, flags);
    fputs("<tr><th>", w->out);
    page_put_name(w, t);
    fprintf(w->out, "</th><td>%.4g&nbsp;%%</td><td>%u of %u</td><td class=\"text\">", 100 * row.ratio, n, heads);
    for (uint32_t h = 0; h < heads && listed < LISTED; h++)
        if (flags[h]) fprintf(w->out, "%s%u.%u", listed++ ? ", " : "", h / info->n_kv_heads, h % info->n_kv_heads);
    fprintf(w->out, "%s</td></tr>\n", n > LISTED ? ", ..." : "");
    free(flags);
}

void page_put_unsure(page_writer *w)
{
    fputs(
        "<section id=\"unsure\"><h2>Heads that are not certain</h2>\n"
        "<p>Every question has budgets of its own that would have been best for it. Where these differ, from question "
        "to question, by more than what the head is given (the standard deviation is larger than the share kept), "
        "the texts do not agree about that head.</p>\n"
        "<p>What to do: profile more texts and more questions of the kind that you serve (<code>profile</code>); "
        "until then guard such heads with <code>solve --shrink 0.3</code> or <code>--min-keep</code>, or look after "
        "the texts that lose most with <code>solve --aggregate worst</code>.</p>\n"
        "<div class=\"wide\"><table><thead><tr><th>table</th><th>pruned</th><th>not certain</th>"
        "<th class=\"text\">layer.head</th></tr></thead><tbody>\n",
        w->out);
    for (size_t i = 0; i < w->p->n_tables; i++) {
        const page_table *t = &w->p->tables[i];
        for (size_t r = 0; r < N_RATIOS && t->knows_deviation; r++) put_flags(w, t, RATIOS[r]);
        if (t->knows_deviation) continue;
        fputs("<tr><th>", w->out);
        page_put_name(w, t);
        fputs("</th><td>–</td><td>not known</td><td class=\"text\">one question, or an imported table</td></tr>\n",
              w->out);
    }
    fputs("</tbody></table></div></section>\n", w->out);
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

static void put_size(FILE *out, double bytes)
{
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
    size_t u = 0;
    for (bytes /= 1024; bytes >= 1024 && u < 3; u++) bytes /= 1024;
    fprintf(out, "<td>%.3g&nbsp;%s", bytes, units[u]);
}

// One cell: the cache's bytes at a ratio, and how many heads have less room than sinks and window take.
static void put_memory(FILE *out, const page_table *t, double ratio, uint32_t tokens, uint32_t *keep, size_t heads)
{
    const kvb_info *info = kvb_table_info(t->file);
    kvb_budget_summary sum;
    if (kvb_budgets(t->file, ratio, tokens, NULL, keep, heads, NULL) != KVB_OK ||
        kvb_budgets_summarize(t->file, ratio, tokens, NULL, keep, heads, &sum, NULL) != KVB_OK) {
        fputs("<td>–</td>", out); // constraints that do not fit into this length
        return;
    }
    put_size(out, (double)sum.total * info->head_dim * 2 * BYTES_OF_A_NUMBER);
    if (sum.heads_below_protected > 0 && ratio > 0)
        fprintf(out, " <small>%u heads below sinks + window</small>", sum.heads_below_protected);
    fputs("</td>", out);
}

static void put_table_memory(page_writer *w, const page_table *t)
{
    static const uint32_t lengths[] = {1024, 4096, 8192, 32768, 131072};
    const kvb_info *info = kvb_table_info(t->file);
    size_t heads = (size_t)info->n_layers * info->n_kv_heads;
    uint32_t *keep = need(heads, sizeof *keep, "heads");
    fputs("<h3>", w->out);
    page_put_name(w, t);
    fputs("</h3>\n<div class=\"wide\"><table><thead><tr><th>tokens</th><th>whole cache</th>", w->out);
    for (size_t r = 0; r < N_RATIOS; r++) fprintf(w->out, "<th>%.0f&nbsp;%% pruned</th>", 100 * RATIOS[r]);
    fputs("</tr></thead><tbody>\n", w->out);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        fprintf(w->out, "<tr><th>%u</th>", lengths[i]);
        put_memory(w->out, t, 0, lengths[i], keep, heads);
        for (size_t r = 0; r < N_RATIOS; r++) put_memory(w->out, t, RATIOS[r], lengths[i], keep, heads);
        fputs("</tr>\n", w->out);
    }
    fputs("</tbody></table></div>\n", w->out);
    free(keep);
}

void page_put_bytes(page_writer *w)
{
    fputs("<section id=\"bytes\"><h2>Memory</h2>\n"
          "<p>Keys and values of one sequence in 16-bit numbers, as an engine needs them that really compacts its "
          "cache. Heads with less room than the protected first and last tokens take lose the newest of them; "
          "<code>--strict</code> (in C: <code>.strict = 1</code>) takes that room from other heads.</p>\n",
          w->out);
    for (size_t i = 0; i < w->p->n_tables; i++) put_table_memory(w, &w->p->tables[i]);
    fputs("</section>\n", w->out);
}
