// A learned ranking as a metric: its features are metrics, and the runtime's kvb_rank() combines them, so the profiler
// and the evaluator rank exactly as an engine does.
// A name alone does not define such a metric: it is opened from the file that `kvbudget learn` wrote, or from a table
// that was made with it. Its name, learned:0123456789ab, contains the ranking's hash.
#pragma once
#include "profiler/metric/scorer.h"

#define LEARNED_FILE "learned=" // the prefix of the file's path on a command line

// The rankings that a command has opened; zero it first. Metrics point into it, so close it after them.
typedef struct learned_list {
    struct learned_ranking **items;
    size_t n;
} learned_list;

void learned_list_close(learned_list *l);

// Like metric_parse(), but also accepts learned=FILE. Further errors: those of kvb_ranking_open(); KVB_ARGUMENT if a
// feature of the ranking is an unknown metric, or one whose order depends on the budget.
kvb_status learned_parse(metric *out, const char *text, learned_list *l, kvb_error *err);

// The metric that a table is for: a plain one by its name, or the ranking that it carries. The table must outlive the
// list.
kvb_status learned_of_table(metric *out, const kvb_table *table, learned_list *l, kvb_error *err);

// The same ranking with the weights of one of its folds (kvb_ranking_fold).
metric learned_fold(const metric *m, uint32_t fold);

// Returns the metric's ranking, or NULL for a plain metric.
const kvb_ranking *learned_ranking_of(const metric *m);

// Fails with KVB_MISMATCH if the metric is a ranking for another model. Accepts plain metrics, and rankings that do not
// say what model they are for.
kvb_status learned_check_model(const metric *m, uint32_t n_layers, uint32_t n_kv_heads, const char *model_sha256,
                               kvb_error *err);
