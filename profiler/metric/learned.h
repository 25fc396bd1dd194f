// A learned ranking as a metric: its features are metrics, and the linear form of them is the runtime's kvb_rank(). So
// the profiler and the evaluator rank as an engine does.
//
// Such a metric is not written in a name alone: it is opened, from the file that `kvbudget learn` wrote or out of a
// table that was made with it. Its name, learned:0123456789ab, is the ranking's hash.
#pragma once
#include "profiler/metric/scorer.h"

#define LEARNED_FILE "learned=" // what stands in front of the file's path on a command line

// The rankings that a command has opened; zero it first. Metrics point into it, so it is closed after them.
typedef struct learned_list {
    struct learned_ranking **items;
    size_t n;
} learned_list;

void learned_list_close(learned_list *l);

// metric_parse(), and learned=FILE. Errors also: those of kvb_ranking_open(); KVB_ARGUMENT for a ranking of a metric
// that is not known here, or whose order depends on the budget.
kvb_status learned_parse(metric *out, const char *text, learned_list *l, kvb_error *err);

// The metric that a table is for: a plain one by its name, or the ranking that it carries. The table must outlive the
// list.
kvb_status learned_of_table(metric *out, const kvb_table *table, learned_list *l, kvb_error *err);

// The same ranking with the weights of one of its folds (kvb_ranking_fold).
metric learned_fold(const metric *m, uint32_t fold);

// NULL for a plain metric.
const kvb_ranking *learned_ranking_of(const metric *m);

// Refuses a ranking of another model: KVB_MISMATCH. Plain metrics, and rankings that do not know their weights, pass.
kvb_status learned_check_model(const metric *m, uint32_t n_layers, uint32_t n_kv_heads, const char *model_sha256,
                               kvb_error *err);
