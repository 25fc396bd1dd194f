// The part of a record to work on: contexts, questions, metrics.
// A pair is one question of one context. On its way from the record to a table, an oracle array passes through:
//     read (pairs.h) -> curves (pairs.h) -> aggregate (gather.h) -> allocate (table.h) -> write (table.h)
#pragma once
#include "formats/record.h"

enum { METRICS_MAX = 64 };

// What the caller asks for.
typedef struct selection_request {
    // [n_metrics] full names, prefixes up to a ':' that match one metric, "all", or learned=RANK.safetensors
    const char *const *metrics;
    size_t n_metrics;
    const char *contexts;       // ids in the wanted order, separated by commas; NULL: all, in calibration order
    uint64_t max_questions;     // the first ones of every context; UINT64_MAX: all
    const kvb_ranking *carried; // NULL, or the ranking of a table: its name may then be among the metrics
} selection_request;

// What was found.
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

// Opens the record at `path`, which must not change, and selects what is asked for. Errors: those of record_open();
// KVB_MISMATCH if it is a shard, or a context lacks a metric's scores; KVB_ARGUMENT for an unknown context or metric,
// or a context given twice; KVB_FORMAT if the record is empty; for learned=FILE those of kvb_ranking_open() and
// selection_check_ranking(). The caller closes it, also after a failure.
kvb_status selection_open(selection *s, const char *path, const selection_request *wanted, kvb_error *err);
void selection_close(selection *s);

// Returns the ranking behind one of the selection's metrics, or NULL for a metric of the record.
const kvb_ranking *selection_ranking(const selection *s, const char *metric);

const record_context_info *selection_context(const selection *s, size_t k);
// Tells whether question `index` of a context is used: it is among the first max_questions and has recorded queries.
bool selection_has(const selection *s, const record_question_info *q, uint32_t index);
uint32_t selection_count(const selection *s, size_t k); // questions of the k-th context that are used

// Fails with KVB_MISMATCH unless the record is of the ranking's model and has the ranking's metrics in every selected
// context.
kvb_status selection_check_ranking(const selection *s, const kvb_ranking *r, kvb_error *err);
// Fails with KVB_MISMATCH if the file `other`, whose weights have the hash sha256, belongs to another model than the
// record. An empty hash on either side, "", is accepted.
kvb_status selection_require_model(const selection *s, const char *sha256, const char *other, kvb_error *err);
