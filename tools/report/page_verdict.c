// What the page says first: whether a table is worth anything, in words.
#include "study/interval.h"
#include "tools/report/html.h"
#include "tools/report/page_sections.h"
#include <math.h>
#include <string.h>

enum { WORTH_MAX = 100, FEW_TEXTS = 5 };

static const double HEADLINE = 0.8, SAME_ENOUGH = 0.95;

typedef enum verdict { BETTER, OPEN, WORSE, N_VERDICTS } verdict;

// Against uniform: certain when the whole interval lies on one side.
static verdict judge(const worth *x)
{
    if (x->to_uniform.high < 1) return BETTER;
    return x->to_uniform.low > 1 ? WORSE : OPEN;
}

// "50, 80 and 90 %" of the rows with this verdict.
static void put_ratios(FILE *out, const worth *x, size_t n, verdict which)
{
    size_t left = 0;
    for (size_t i = 0; i < n; i++) left += judge(&x[i]) == which;
    for (size_t i = 0, put = 0; i < n; i++) {
        if (judge(&x[i]) != which) continue;
        fprintf(out, "%s%.4g", put == 0 ? "" : left == 1 ? " and " : ", ", 100 * x[i].ratio);
        put++;
        left--;
    }
    fputs("&nbsp;%", out);
}

static void put_headline(FILE *out, const worth *x, size_t n)
{
    static const char *const words[N_VERDICTS] = {"better than an even split at ", "not certain at ",
                                                  "worse than an even split at "};
    bool first = true;
    fputs("<p class=\"badge\">", out);
    for (verdict v = BETTER; v < N_VERDICTS; v++) {
        size_t count = 0;
        for (size_t i = 0; i < n; i++) count += judge(&x[i]) == v;
        if (count == 0) continue;
        fprintf(out, "%s%s", first ? "" : "; ", words[v]);
        put_ratios(out, x, n, v);
        first = false;
    }
    fputs(" pruned</p>\n", out);
}

static void put_numbers(FILE *out, const worth *x)
{
    fprintf(out, "<p>With %.4g&nbsp;%% of the cache thrown away,", 100 * x->ratio);
    if (!isnan(x->agree.value))
        fprintf(out, " the model's likeliest next token is still the same at <b>%.0f of 100</b> places",
                100 * x->agree.value);
    if (!isnan(x->agree.value) && !isnan(x->uniform_agree.value))
        fprintf(out, " (with an even split at %.0f)", 100 * x->uniform_agree.value);
    fprintf(out, "%s its predictions move by <b>%.3g</b> nats per token (KL divergence; less is better)",
            isnan(x->agree.value) ? "" : ", and", x->kl.value);
    if (!isnan(x->uniform_kl.value)) fprintf(out, ", with an even split by %.3g", x->uniform_kl.value);
    if (!isnan(x->to_uniform.low))
        fprintf(out, ": %.2f times as far, 95&nbsp;%% interval %.2f to %.2f", x->to_uniform.value, x->to_uniform.low,
                x->to_uniform.high);
    fputs(".", out);
    if (isfinite(x->texts)) fprintf(out, " Measured on %.0f text%s.", x->texts, x->texts == 1 ? "" : "s");
    if (x->texts < FEW_TEXTS) fprintf(out, " <b>So few texts say little about others: take %d or more.</b>", FEW_TEXTS);
    fputs("</p>\n", out);
}

static void put_how_much(FILE *out, const worth *x, size_t n)
{
    double most = -1;
    for (size_t i = 0; i < n; i++)
        if (x[i].agree.value >= SAME_ENOUGH) most = fmax(most, x[i].ratio);
    if (most >= 0)
        fprintf(out, "<p>Up to %.4g&nbsp;%% can go while at least %.0f of 100 next tokens stay the same.</p>\n",
                100 * most, 100 * SAME_ENOUGH);
    else
        fprintf(out, "<p>At every ratio that was tried more than %.0f of 100 next tokens change.</p>\n",
                100 - 100 * SAME_ENOUGH);
}

static void put_advice(FILE *out)
{
    fputs("<p>Where it is worse or not certain, do not use it yet. What helps most, in this order: calibrate on texts "
          "like those that you serve, and as long; keep sinks and window in every head "
          "(<code>budgets --strict</code>, <code>TABLE.safetensors:strict</code> in <code>eval</code>); prune "
          "less.</p>\n",
          out);
}

static void put_untried(page_writer *w, const page_table *t)
{
    kvb_row row = page_row_near(t->file, HEADLINE);
    fputs("<p class=\"badge\">not tried yet</p>\n", w->out);
    double even = page_find_uniform_loss(w->p, t, row.ratio);
    if (t->knows_losses) {
        fprintf(w->out,
                "<p>On the texts that it was made from, %.4g&nbsp;%% pruned loses <b>%.3g&nbsp;%%</b> of what later "
                "tokens looked at",
                100 * row.ratio, 100 * row.table_loss);
        if (!isnan(even)) fprintf(w->out, ", an even split %.3g&nbsp;%%", 100 * even);
        fputs(". What that means for the model's answers nobody has measured.</p>\n", w->out);
    } else fputs("<p>Nothing is known about its losses, and nobody has measured what it does.</p>\n", w->out);
    fputs(
        "<p>To see what it is worth on texts that it has not seen, and then again this report:</p>\n<pre>kvbudget eval "
        "MODEL ",
        w->out);
    html_shell_word(w->out, t->path);
    fputs(" TEXT... -o worth\nkvbudget report ", w->out);
    html_shell_word(w->out, t->path);
    fputs(" --results worth.json -o report.html</pre>\n", w->out);
}

static void put_warnings(page_writer *w, const page_table *t)
{
    const kvb_info *info = kvb_table_info(t->file);
    uint32_t heads = info->n_layers * info->n_kv_heads;
    kvb_row row = page_row_near(t->file, HEADLINE);
    uint32_t unsure = t->knows_deviation ? flag_heads(row.prune_ratio, row.std, heads, NULL) : 0;
    bool few = info->n_contexts > 0 && info->n_contexts < 4;
    if (!few && unsure == 0 && t->knows_deviation) return;
    fputs("<ul>\n", w->out);
    if (few)
        fprintf(w->out, "<li>Made from %u text%s only: heads that none of them needed may be cut too far.</li>\n",
                info->n_contexts, info->n_contexts == 1 ? "" : "s");
    if (unsure > 0)
        fprintf(w->out,
                "<li>%u of %u heads are not certain at %.4g&nbsp;%%: <a href=\"#unsure\">which, and what to do</a>."
                "</li>\n",
                unsure, heads, 100 * row.ratio);
    if (!t->knows_deviation)
        fputs("<li>Nothing is known about how certain its heads are: one question, or an imported table.</li>\n",
              w->out);
    fputs("</ul>\n", w->out);
}

// Returns how the table stands at its worst ratio.
static verdict put_verdict(page_writer *w, const page_table *t)
{
    static const char *const classes[N_VERDICTS] = {"good", "open", "bad"};
    worth all[WORTH_MAX];
    size_t n = page_find_worth(w->p, t, all, WORTH_MAX), near = 0;
    verdict worst = n ? BETTER : OPEN;
    for (size_t i = 0; i < n; i++) {
        if (judge(&all[i]) > worst) worst = judge(&all[i]);
        if (fabs(all[i].ratio - HEADLINE) < fabs(all[near].ratio - HEADLINE)) near = i;
    }
    fprintf(w->out, "<article class=\"card %s\"><h3>", classes[worst]);
    page_put_name(w, t);
    fputs("</h3>\n", w->out);
    if (n == 0) put_untried(w, t);
    else {
        put_headline(w->out, all, n);
        put_numbers(w->out, &all[near]);
        put_how_much(w->out, all, n);
    }
    put_warnings(w, t);
    fputs("</article>\n", w->out);
    return n ? worst : BETTER;
}

static void put_agreement_row(page_writer *w, const page_table *t, const worth *columns, size_t n_columns)
{
    worth own[WORTH_MAX];
    size_t n = page_find_worth(w->p, t, own, WORTH_MAX);
    fputs("<tr><th>", w->out);
    page_put_name(w, t);
    fputs("</th>", w->out);
    for (size_t k = 0; k < n_columns; k++) {
        size_t i = 0;
        while (i < n && fabs(own[i].ratio - columns[k].ratio) > 1e-9) i++;
        if (i == n || isnan(own[i].agree.value)) {
            fputs("<td>–</td>", w->out);
            continue;
        }
        fprintf(w->out, "<td><b>%.0f</b>", 100 * own[i].agree.value);
        if (!isnan(own[i].uniform_agree.value))
            fprintf(w->out, " <small>(%.0f)</small>", 100 * own[i].uniform_agree.value);
        fputs("</td>", w->out);
    }
    fputs("</tr>\n", w->out);
}

// All tables side by side, at the ratios of the first one that was tried.
static void put_agreement(page_writer *w)
{
    worth columns[WORTH_MAX];
    size_t n = 0;
    for (size_t t = 0; t < w->p->n_tables && n == 0; t++)
        n = page_find_worth(w->p, &w->p->tables[t], columns, WORTH_MAX);
    if (n == 0) return;
    fputs("<h3>Of 100 next tokens, how many stay the same (in brackets: with an even split)</h3>\n<div class=\"wide\">"
          "<table><thead><tr><th>pruned</th>",
          w->out);
    for (size_t k = 0; k < n; k++) fprintf(w->out, "<th>%.4g&nbsp;%%</th>", 100 * columns[k].ratio);
    fputs("</tr></thead><tbody>\n", w->out);
    for (size_t t = 0; t < w->p->n_tables; t++) put_agreement_row(w, &w->p->tables[t], columns, n);
    fputs("</tbody></table></div>\n", w->out);
}

void page_put_verdicts(page_writer *w)
{
    fputs("<section id=\"verdict\"><h2>In short</h2>\n"
          "<p>A language model keeps keys and values of every token that it has read, in every attention head: the KV "
          "cache. Throwing a part of it away saves memory and time. A <em>metric</em> says which tokens a head should "
          "keep; a <em>table</em> says how many, head by head, since heads differ in what they need. The measure of a "
          "table is whether it does less harm than an even split, where every head keeps equally many.</p>\n"
          "<div class=\"cards\">\n",
          w->out);
    verdict worst = BETTER;
    for (size_t i = 0; i < w->p->n_tables; i++) {
        verdict one = put_verdict(w, &w->p->tables[i]);
        if (one > worst) worst = one;
    }
    fputs("</div>\n", w->out);
    if (worst != BETTER) put_advice(w->out);
    put_agreement(w);
    fputs("</section>\n", w->out);
}
