// The record of a profiling run: for every context its tokens and every metric's scores, for every question the oracle
// importance. One HDF5 file; formats/README.md gives the layout. While a run is under way its results are in the folder
// PATH.parts/, one small HDF5 file per context and per question, each written atomically, so that a kill at any moment
// loses only what is in flight.
//
// Words: L = n_layers, G = n_kv_heads, T = tokens of one context. Arrays [L,G,T] are float32, C order: element (l, g,
// t) has index (l * G + g) * T + t. Scores: higher means keep. Oracle importance: >= 0, dimensionless (LU-KV eq. 4,
// normalised per layer).
//
// Context ids match [A-Za-z0-9_.-]{1,64} and are neither "." nor ".."; metric names are 1 to 128 printable ASCII
// characters without space and '/', and not ".". The functions of one record or writer must not run in two threads at
// once (nor those of two records, because not every HDF5 build is thread-safe).
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RECORD_FORMAT "kvbudget-record"
#define RECORD_FORMAT_VERSION 2

typedef struct record_shape {
    // n_heads and head_dim may be 0: unknown (imported arrays do not tell).
    uint32_t n_layers, n_heads, n_kv_heads, head_dim;
} record_shape;

// ---- Writing ----

typedef struct record_writer record_writer;

typedef enum record_start {
    RECORD_NEW,
    RECORD_RESUME,
    RECORD_REPLACE,
    RECORD_JOIN,
    RECORD_ADD,
    RECORD_ADD_ANEW,
    RECORD_ADD_JOIN
} record_start;

// What evicting tokens does to the model's output (docs/objective.md), for one question. A curve has
// RECORD_CURVE_LEVELS errors per head: the mean square of how far the head's output moves when it keeps the best
// record_curve_tokens(level) tokens of a metric. Gains are RECORD_GAIN_KINDS pairs per layer: the KL of the model's
// output, and the squared movement of the layer's attention that caused it (kinds: profiler/model/loss_pass.h).
enum { RECORD_CURVE_LEVELS = 15, RECORD_GAIN_KINDS = 3 };
#define RECORD_GAIN_ORDER "keydiff" // the metric by which the layers were cut; the same in all records
// Packings are the errors of storing all of a head's keys, or values: keys as int8, int4, int2, then values as these.
enum { RECORD_PACKINGS = 6 };
#define RECORD_PACKING_KIND "groups-of-32" // kvb_pack()'s
typedef struct record_losses {
    const char *const *metrics; // [n] of the curves
    const float *const *curves; // [n] of [L, G, RECORD_CURVE_LEVELS], finite and >= 0
    size_t n;
    const float *gains;    // [L, RECORD_GAIN_KINDS, 2], finite and >= 0; NULL: none
    const float *packings; // [L, G, RECORD_PACKINGS], finite and >= 0; NULL: none
} record_losses;

typedef struct record_question {
    // [L,G,T], finite and >= 0; NULL exactly when n_queries is 0 (nothing was decoded, e.g. EOS came first).
    const float *oracle;
    const int32_t *suffix_ids; // tokens of question + answer prefix, as they follow the context
    uint32_t n_suffix;
    const int32_t *answer_ids; // generated or given answer tokens
    uint32_t n_answer;
    uint32_t n_queries;          // decode queries that went into the oracle
    const record_losses *losses; // NULL: none, or record_put_losses() stored them before
} record_question;

// Returns how many of n_tokens tokens a level keeps, at least the `protect` that every level keeps.
uint32_t record_curve_tokens(uint32_t level, uint32_t n_tokens, uint32_t protect);

// Opens the folder of parts for the record `path`, making it if it is not there.
// attributes: flat object of strings, numbers and booleans that says how the run was made (copied). They become HDF5
// attributes of the root. Names: [A-Za-z0-9_.-]{1,64}, not those of the format itself (format, format_version,
// n_layers, n_heads, n_kv_heads, head_dim). Numbers must be finite; put an integer beyond 2^53 into a string.
// RECORD_NEW: fails with KVB_MISMATCH if the record or the folder of parts exists; the message says what to do.
// RECORD_REPLACE: starts again without them; an existing record stays until record_finish replaces it.
// RECORD_RESUME: continues where the last run stopped. If the record is finished already, all that it holds is done.
//   If the shape or any attribute differs, it fails with KVB_MISMATCH and names the attribute and both values.
// RECORD_JOIN: adds to the folder that another process of the same run has opened; such a writer cannot finish the
//   record. Parts are files of their own, put in place atomically, so writers do not disturb each other.
// RECORD_ADD: adds to the finished record at `path`, which must exist and stays until record_finish puts the larger one
//   in its place; an addition that was stopped is resumed. `attributes` are those of the larger record
//   (record_growth.h). A context of the finished record counts as done if it has scores of all metrics that these
//   attributes name; scores that are put for such a context are added to those it has.
// RECORD_ADD_JOIN: RECORD_JOIN for such a run.
// RECORD_ADD_ANEW: RECORD_ADD, but first deletes what another run left in the folder of parts.
// A folder that another process is writing to is refused (KVB_IO). On failure *out is NULL.
kvb_status record_begin(record_writer **out, const char *path, const record_shape *shape, const cJSON *attributes,
                        record_start start, kvb_error *err);

bool record_writer_has_context(const record_writer *w, const char *id);
bool record_writer_has_question(const record_writer *w, const char *id, uint32_t question);

// Stores one context: token_ids [n_tokens] (>= 0, or -1 for an unknown token) and scores[m], each [L,G,n_tokens]
// without NaN. Replaces what was stored under this id. When the function returns KVB_OK, the data are on the disk.
kvb_status record_put_context(record_writer *w, const char *id, const int32_t *token_ids, uint32_t n_tokens,
                              const char *const *metrics, const float *const *scores, size_t n_metrics, kvb_error *err);

// Stores one question of a context that was stored before, whose T it uses.
kvb_status record_put_question(record_writer *w, const char *id, uint32_t question, const record_question *q,
                               kvb_error *err);

// Stores losses apart from their question. With RECORD_ADD, they are added to those that the finished record has of it.
kvb_status record_put_losses(record_writer *w, const char *id, uint32_t question, const record_losses *l,
                             kvb_error *err);

// Assembles the record from all parts, contexts in the given order, questions by number; puts it in place atomically,
// then removes the folder of parts. The bytes depend on the content only, not on interruptions or on the order in which
// parts were stored. The list must name exactly the contexts that were stored. On failure the parts stay: another
// record_begin with RECORD_RESUME and record_finish may try again.
kvb_status record_finish(record_writer *w, const char *const *context_ids_in_order, size_t n, kvb_error *err);

// Closes; without record_finish the folder of parts stays for a later resume. NULL is allowed.
void record_writer_free(record_writer *w);

// ---- Reading ----

typedef struct record record;

typedef struct record_question_info {
    uint32_t number;    // as put; ascending within a context, not always 0..n-1
    uint32_t n_queries; // 0: skipped, has no oracle
    uint32_t n_suffix, n_answer;
} record_question_info;

typedef struct record_context_info {
    const char *id;
    uint32_t n_tokens; // T
    uint32_t n_questions;
    const record_question_info *questions; // [n_questions]
    uint32_t n_metrics;
    const char *const *metrics; // [n_metrics], in ASCII order
} record_context_info;

// Opens and checks the whole structure (types, shapes, checksums of the metadata); the numbers themselves are checked
// when they are read. Errors name the file and the HDF5 path: KVB_IO, KVB_FORMAT, KVB_VERSION, KVB_UNSUPPORTED (HDF5
// superblock other than 2 or 3, for example); a run that is not finished (only PATH.parts/ exists) is KVB_IO with a
// message that says how to resume.
kvb_status record_open(record **out, const char *path, kvb_error *err);
void record_close(record *r); // NULL is allowed

const char *record_path(const record *r); // as given to record_open; belongs to the record
record_shape record_get_shape(const record *r);
const cJSON *record_attributes(const record *r);            // what was given to record_begin; belongs to the record
const char *record_text(const record *r, const char *name); // a text attribute, or "" if there is none
size_t record_context_count(const record *r);
// Computes the SHA-256 of the open file, as sha256sum shows it, even if its name leads to another file by now. Fails
// with KVB_IO if the file was changed since it was opened, so the hash belongs to everything that was read before.
kvb_status record_file_sha256(const record *r, char out[65], kvb_error *err);
// Contexts are in calibration order; NULL when i is out of range.
const record_context_info *record_context(const record *r, size_t i);
// Returns the index of the context with this id, or record_context_count() if there is none.
size_t record_find(const record *r, const char *id);
bool record_has_metric(const record_context_info *c, const char *metric);

// All of these read into the caller's array and check the numbers: NaN in scores, and NaN, infinity or a negative value
// in an oracle, are KVB_NUMERIC; a damaged chunk is KVB_FORMAT. `question_index` counts 0..n_questions-1 (it is not the
// question's number).
kvb_status record_read_tokens(record *r, size_t i, int32_t *out /* [T] */, kvb_error *err);
kvb_status record_read_scores(record *r, size_t i, const char *metric, float *out /* [L,G,T] */, kvb_error *err);
kvb_status record_read_oracle(record *r, size_t i, size_t question_index, float *out /* [L,G,T] */, kvb_error *err);
kvb_status record_read_suffix(record *r, size_t i, size_t question_index, int32_t *out /* [n_suffix] */,
                              kvb_error *err);
kvb_status record_read_answer(record *r, size_t i, size_t question_index, int32_t *out /* [n_answer] */,
                              kvb_error *err);

// The losses of a question; older records have none. record_has_curves() without a `metric` asks for those of any.
bool record_has_curves(record *r, size_t i, size_t question_index, const char *metric);
bool record_has_gains(record *r, size_t i, size_t question_index);
bool record_has_packings(record *r, size_t i, size_t question_index);
kvb_status record_read_curves(record *r, size_t i, size_t question_index, const char *metric,
                              float *out /* [L,G,RECORD_CURVE_LEVELS] */, kvb_error *err);
kvb_status record_read_gains(record *r, size_t i, size_t question_index, float *out /* [L,RECORD_GAIN_KINDS,2] */,
                             kvb_error *err);

kvb_status record_read_packings(record *r, size_t i, size_t question_index, float *out /* [L,G,RECORD_PACKINGS] */,
                                kvb_error *err);

// ---- Shards: records of one run that was divided among processes which cannot see each other's files ----

// A context of the whole run, in calibration order; its questions are 0 .. n_questions - 1.
typedef struct record_whole {
    const char *id;
    uint32_t n_questions;
} record_whole;

// Adds to the attributes of a shard its number (1 .. n_shards) and the list of all contexts, so that record_merge knows
// what is missing. KVB_UNSUPPORTED when the list of contexts does not fit into an attribute (1 MiB of text).
kvb_status record_mark_shard(cJSON *attributes, uint32_t shard, uint32_t n_shards, const record_whole *all, size_t n,
                             kvb_error *err);
const char *record_shard(const record *r); // "3/8", or NULL: not a shard

// Merges records. From shards it makes, to the byte, the record that one process would have written. From whole records
// of one model and one set of options, of different texts or of the same texts with different metrics, it makes that of
// one run over all texts with all metrics, in this order. What two of them both contain must be equal bit by bit.
// Fails with KVB_MISMATCH if shards are of different runs; models, options or contents differ; texts of one name come
// from different files; a context lacks a metric; anything else is missing (the message names it); or `path` exists and
// `replace` is false. If no input is a shard, a missing text cannot be noticed. On failure nothing is left behind.
kvb_status record_merge(const char *path, const char *const *inputs, size_t n, bool replace, kvb_error *err);
