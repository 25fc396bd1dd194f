#include "tools/report/promise_report.h"
#include "formats/json_file.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const promise_row *row_of(const promise_report *r, uint32_t criterion, uint32_t ratio)
{
    return &r->rows[(size_t)criterion * r->task->n_ratios + ratio];
}

// Returns how many texts like these it takes to promise a ratio under all limits; 0: more would not help.
static uint32_t texts_needed(const promise_report *r, uint32_t ratio)
{
    const promise_task *t = r->task;
    double *loss = need(t->n_texts, sizeof *loss, "texts");
    uint32_t most = 1;
    for (uint32_t c = 0; c < t->n_criteria; c++) {
        const promise_criterion *one = &t->criteria[c];
        for (uint32_t i = 0; i < t->n_texts; i++)
            loss[i] = fmin(fmax(one->values[(size_t)ratio * t->n_texts + i], 0), one->cap) / one->cap;
        uint32_t n = promise_texts_needed(loss, t->n_texts, one->limit / one->cap, t->error);
        most = n == 0 || most == 0 ? 0 : n > most ? n : most;
    }
    free(loss);
    return most;
}

// Counts the bytes of keys and values of `length` tokens: of all, at two bytes an element, and of what the ratio keeps.
static kvb_status count_bytes(const promise_report *r, double ratio, double *all, double *stays, kvb_error *err)
{
    const kvb_info *info = kvb_table_info(r->table);
    size_t heads = (size_t)info->n_layers * info->n_kv_heads;
    uint32_t *keep = need(heads, sizeof *keep, "heads");
    uint8_t *formats = need(2 * heads, sizeof *formats, "heads");
    kvb_status status =
        kvb_budgets(r->table, ratio, r->length, &(kvb_budget_options){.strict = r->strict, .lookup = KVB_LOOKUP_LINEAR},
                    keep, heads, err);
    if (status == KVB_OK) status = kvb_formats(r->table, ratio, formats, 2 * heads, err);
    *all = 2 * (double)kvb_packed_bytes(KVB_PACK_BF16, KVB_KEYS, r->length, info->head_dim) * (double)heads;
    *stays = 0;
    for (size_t i = 0; i < 2 * heads && status == KVB_OK; i++)
        *stays += (double)kvb_packed_bytes(formats[i], i % 2 ? KVB_VALUES : KVB_KEYS, keep[i / 2], info->head_dim);
    free_all(keep, formats);
    return status;
}

static void print_rows(const promise_report *r)
{
    const promise_task *t = r->task;
    printf("%u texts of %u + %u tokens\n\npruned", t->n_texts, r->n_tokens, r->n_next);
    for (uint32_t c = 0; c < t->n_criteria; c++) printf("  %14s     clipped         p", t->criteria[c].name);
    printf("\n");
    for (uint32_t i = 0; i < t->n_ratios; i++) {
        printf("%4.3g %%", 100 * r->ratios[i]);
        for (uint32_t c = 0; c < t->n_criteria; c++)
            printf("  %14.4f  %10.4f  %8.2g", row_of(r, c, i)->mean, row_of(r, c, i)->clipped, row_of(r, c, i)->p);
        printf("  %s\n", i < r->n_passed ? "promised" : i == r->n_passed ? "not" : "");
    }
}

static kvb_status print_promise(const promise_report *r, kvb_error *err)
{
    const promise_task *t = r->task;
    double all, stays, ratio = r->ratios[r->n_passed - 1];
    kvb_status status = count_bytes(r, ratio, &all, &stays, err);
    if (status != KVB_OK) return status;
    printf(
        "\nPrune %.4g %%. With probability %.4g over the draw of these texts, on texts drawn like them the mean of\n",
        100 * ratio, r->confidence);
    for (uint32_t c = 0; c < t->n_criteria; c++)
        printf("  %s is below %g (a text counts as at most %g)\n", t->criteria[c].name, t->criteria[c].limit,
               t->criteria[c].cap);
    printf("(Learn then Test with fixed-sequence testing, arXiv 2110.01052; p-values by betting).\n");
    printf("At %u tokens that saves %.1f of %.1f MiB (two bytes an element).\n", r->length, (all - stays) / 0x1p20,
           all / 0x1p20);
    return KVB_OK;
}

static void print_next(const promise_report *r)
{
    if (r->n_passed == r->task->n_ratios) {
        printf("That is the highest ratio that was tried.\n");
        return;
    }
    uint32_t n = texts_needed(r, r->n_passed);
    if (n) printf("%.4g %% would take about %u texts like these.\n", 100 * r->ratios[r->n_passed], n);
    else printf("More texts would not help at %.4g %%: their mean is above the limit.\n", 100 * r->ratios[r->n_passed]);
}

kvb_status promise_report_print(const promise_report *r, kvb_error *err)
{
    print_rows(r);
    kvb_status status = KVB_OK;
    if (r->n_passed) status = print_promise(r, err);
    if (r->n_passed && status == KVB_OK) print_next(r);
    return status;
}

kvb_status promise_report_refusal(const promise_report *r, kvb_error *err)
{
    uint32_t n = texts_needed(r, 0);
    if (n)
        return kvb_fail(err, KVB_UNSUPPORTED,
                        "%u texts promise nothing: even %.4g %% pruned takes about %u texts like these; give more "
                        "texts, begin at a lower --ratio, or ask for less",
                        r->task->n_texts, 100 * r->ratios[0], n);
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "nothing can be promised: at %.4g %% pruned the mean damage is above the limit already; begin at a "
                    "lower --ratio, or allow more",
                    100 * r->ratios[0]);
}

static void add_row(const promise_report *r, results *to, uint32_t criterion, uint32_t ratio)
{
    const promise_task *t = r->task;
    const promise_criterion *limit = &t->criteria[criterion];
    const promise_row *found = row_of(r, criterion, ratio);
    cJSON *o = results_row(to), *about = results_detail(to);
    json_put(o, "ratio %g measure %s limit %g cap %g mean %g clipped %g p %g promised %d", r->ratios[ratio],
             limit->measure, limit->limit, limit->cap, found->mean, found->clipped, found->p, ratio < r->n_passed);
    cJSON_AddNumberToObject(about, "row", (double)ratio * t->n_criteria + criterion);
    cJSON_AddItemToObject(about, "texts",
                          cJSON_CreateDoubleArray(limit->values + (size_t)ratio * t->n_texts, (int)t->n_texts));
}

static kvb_status add_promise(const promise_report *r, cJSON *to, kvb_error *err)
{
    double all = 0, stays = 0;
    uint32_t n = r->n_passed < r->task->n_ratios ? texts_needed(r, r->n_passed) : 0;
    kvb_status status = KVB_OK;
    if (r->n_passed) status = count_bytes(r, r->ratios[r->n_passed - 1], &all, &stays, err);
    if (status != KVB_OK) return status;
    json_put(to, "promised_ratio %g bytes %g bytes_saved %g texts_for_next_ratio %g",
             r->n_passed ? r->ratios[r->n_passed - 1] : NAN, r->n_passed ? all : NAN, r->n_passed ? all - stays : NAN,
             n ? n : NAN); // NaN becomes null
    return KVB_OK;
}

kvb_status promise_report_fill(const promise_report *r, results *to, kvb_error *err)
{
    cJSON *all = to->settings;
    json_put(all, "method %s p_value %s confidence %g n_texts %u n_tokens %u n_next %u length %u",
             "learn then test, fixed sequence (arXiv 2110.01052)", "betting", r->confidence, r->task->n_texts,
             r->n_tokens, r->n_next, r->length);
    kvb_status status = add_promise(r, all, err);
    for (uint32_t i = 0; i < r->task->n_ratios; i++)
        for (uint32_t c = 0; c < r->task->n_criteria; c++) add_row(r, to, c, i);
    return status;
}
