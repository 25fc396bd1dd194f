// Texts x methods x allocators x ratios: every text is prefilled once for all of them, and results are kept in a log,
// so that a stopped sweep can resume.
#pragma once
#include "evaluator/fidelity.h"
#include "evaluator/log_file.h"
#include "evaluator/method.h"
#include "study/interval.h"

typedef struct sweep_text {
    char name[128];
    int32_t *ids; // context and continuation
    uint32_t n_ids;
    char sha256[65]; // of the ids
} sweep_text;

typedef struct sweep_cell {
    uint32_t text, column;
    double ratio;
    bool done;    // measured, or taken from the log
    char key[65]; // SHA-256 of all that the result depends on
    fidelity_cell result;
} sweep_cell;

typedef struct sweep_options {
    uint32_t n_tokens, n_next; // context and continuation, tokens
    uint32_t batch;            // cells decoded together
    const char *log;           // results so far, one JSON object per line; NULL: none
    const char *kept;          // JSON lines with the kept positions of every cell; NULL: none
    uint32_t refit;            // reference queries per KV head for refitting the caches; 0: no refitting
} sweep_options;

typedef struct sweep {
    const model *m;
    sweep_options o;
    const sweep_text *texts;
    uint32_t n_texts;
    method_list methods;
    sweep_cell *cells; // text-major: [texts, columns, ratios]; owned
    size_t n_cells;
    log_file *log;                                                      // NULL: none; owned
    double prefill_seconds, score_seconds, cell_seconds, refit_seconds; // of this run
    size_t n_measured;                                                  // cells of this run
} sweep;

// Lists the cells and takes results from the log, unless kept positions are wanted. Everything passed in must outlive
// the sweep. Errors: KVB_ARGUMENT if a text is too short (named, with its length), KVB_FORMAT if the log is not one.
kvb_status sweep_open(sweep *s, const double *ratios, size_t n_ratios, kvb_error *err);
void sweep_close(sweep *s);
// Takes results from the log; the second half of sweep_open().
kvb_status sweep_take(sweep *s, kvb_error *err);

// Reports progress; returns false to stop (KVB_INTERRUPTED). The unit is a cell; a prefill shows as part of a cell.
typedef struct sweep_watch {
    bool (*progress)(void *context, double done, double total);
    void *context;
} sweep_watch;

// Measures the missing cells. Every finished batch of cells is in the log before the next begins.
kvb_status sweep_run(sweep *s, const sweep_watch *watch, kvb_error *err);

// One column, a method with its allocator, at one ratio, over all texts.
typedef struct sweep_summary {
    uint32_t column;
    double ratio;
    interval kl;    // nats per token
    interval agree; // share of positions at which the likeliest token is that of the full cache
    interval nll;   // of the true next token, nats
    // kl divided by the kl of another allocator for the same metric and ratio, text by text; NaN if there is none:
    interval to_uniform, to_ada, to_published; // published: a table of the paper's kind, mean_ratio without shrinkage
    double full_nll;                           // of the full cache
    double loss;                               // evicted share of the oracle importance
    double looked;           // share of the context's entries that a policy attends to per step; NaN without one
    double effective;        // share that was really pruned
    double bytes, allocated; // per text
    double seconds;          // per run
} sweep_summary;

// Returns *n = columns * ratios summaries in the order of the cells, all of which must be done. The caller frees it.
sweep_summary *sweep_summarize(const sweep *s, size_t *n);
