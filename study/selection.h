// Which part of a record is worked on: contexts, questions, metrics.
//
// A pair is one question of one context. From the record to a table an array of the oracle goes one way:
//     read (pairs.h) -> curves (pairs.h) -> aggregate (gather.h) -> allocate (table.h) -> write (table.h)
#pragma once
#include "formats/record.h"

enum { METRICS_MAX = 64 };

// What is asked for.
typedef struct selection_request {
    // [n_metrics] full names, beginnings up to a ':' that one metric has, "all", or learned=RANK.safetensors
    const char *const *metrics;
    size_t n_metrics;
    const char *contexts;       // ids in the wanted order, commas between; NULL: all, in calibration order
    uint64_t max_questions;     // the first so many of every context; UINT64_MAX: all
    const kvb_ranking *carried; // NULL, or the ranking of a table, which its name among the metrics then means
} selection_request;

// What there is of it.
typedef struct selection {
    const char *path;  // of the record; the caller's
    record *r;         // owned
    size_t *contexts;  // [n_contexts] indices in the record; owned
    size_t n_contexts; // at least 1
    uint64_t max_questions;
    const char *metrics[METRICS_MAX]; // [n_metrics] each once, at least one; they belong to the record or a ranking
    size_t n_metrics;
    const kvb_ranking *rankings[METRICS_MAX]; // [n_metrics] NULL: the record has the scores
    kvb_ranking *opened[METRICS_MAX];         // [n_opened] those of files; owned
    size_t n_opened;
} selection;

// Opens the record at `path`, which must stay as it is, and finds what is asked for. Errors: those of record_open();
// KVB_MISMATCH a shard, or a context without scores of a metric; KVB_ARGUMENT an unknown context or metric, or a
// context given twice; KVB_FORMAT nothing in the record; for learned=FILE those of kvb_ranking_open() and
// learned_scores_check(). The caller closes it, also after a failure.
kvb_status selection_open(selection *s, const char *path, const selection_request *wanted, kvb_error *err);
void selection_close(selection *s);

// The ranking that one of the selection's metrics is; NULL for a metric of the record.
const kvb_ranking *selection_ranking(const selection *s, const char *metric);

const record_context_info *selection_context(const selection *s, size_t k);
// Whether question number `index` of a context takes part: it is among the first ones and has recorded queries.
bool selection_has(const selection *s, const record_question_info *q, uint32_t index);
uint32_t selection_count(const selection *s, size_t k); // questions of the k-th context that take part

// A text that the record says about itself; "" where it does not.
const char *record_text(const record *r, const char *name);
// Refuses another model than the record's: sha256 is that of the weights of the file `other`. Who does not know the
// weights, "", is not refused. KVB_MISMATCH.
kvb_status selection_require_model(const selection *s, const char *sha256, const char *other, kvb_error *err);
