// kvbudget runtime: loads a table of per-head KV-cache budgets and hands them out.
//
// This folder is made to be copied: it needs libc, libm and cJSON only, compiles as C99 or later, and its header is
// usable from C++. No function prints, keeps global state, or allocates memory outside
// kvb_table_open*, kvb_ranking_open* and their close. A kvb_table is immutable once opened: any number of threads may
// use one table at the same time without locks.
//
// Words: T = n_tokens is the length of the prefilled context, sinks and window included. A *prune ratio* r is the
// share of a head's T tokens that is evicted; `keep` counts are the tokens that stay. Heads are KV heads, counted
// layer-major: head (l, g) of [n_layers, n_kv_heads] has index l * n_kv_heads + g.
#ifndef KVBUDGET_H
#define KVBUDGET_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVB_API __attribute__((visibility("default")))
#else
#define KVB_API
#endif

// Every function that can fail returns a kvb_status; KVB_OK is 0. kvb_status_name() gives the name in this list as
// text.
#define KVB_STATUS_LIST(X)                                                              \
    X(OK, "done")                                                                       \
    X(ARGUMENT, "an argument is NULL, NaN or out of range")                             \
    X(IO, "the operating system refused to open, read or write a file")                 \
    X(FORMAT, "a file is truncated, damaged, or not of the expected kind")              \
    X(VERSION, "a file was written by a newer, unknown version of its format")          \
    X(MISMATCH, "two things that belong together differ: model, metric, shape, tokens") \
    X(UNSUPPORTED, "valid, but something that this program does not do")                \
    X(MEMORY, "not enough memory")                                                      \
    X(CAPACITY, "the caller's buffer is too small")                                     \
    X(NUMERIC, "NaN or infinity where a finite number is needed")                       \
    X(INTERRUPTED, "stopped by the user; what was finished is on disk")

typedef enum kvb_status {
#define KVB_STATUS_ENUM(name, text) KVB_##name,
    KVB_STATUS_LIST(KVB_STATUS_ENUM)
#undef KVB_STATUS_ENUM
} kvb_status;

// Filled by a failing function when the caller passes one (NULL is allowed everywhere). Untouched on success.
// The message is one line that names the file or argument, the place, what was expected, what was found, what to do.
// Control characters and bytes that are not UTF-8 stand as '?' in it. One that is too long, as with a path of
// 500 bytes, has " ... " in the place of its middle; to cut it so, malloc is called.
typedef struct kvb_error {
    kvb_status status;
    char message[512];
} kvb_error;

// The name of a status as written in the list above, e.g. "FORMAT"; "UNKNOWN" for any other number. Never NULL, never
// to be freed.
KVB_API const char *kvb_status_name(kvb_status status);

// The version of this library, e.g. "0.1.0". A string constant.
KVB_API const char *kvb_version(void);

// The version of the budget arithmetic. Two builds that return the same number give the same integers from
// kvb_budgets() for the same table, ratio, n_tokens and options; so an engine that caches budgets, or splits one
// model over several machines, compares this number and nothing else. It is the KVB_BUDGETS_VERSION that the library
// was built with.
#define KVB_BUDGETS_VERSION \
    3 // 2: tables with constraints, and with ratios of the user's choice; 3: with bounded layers
KVB_API uint32_t kvb_budgets_version(void);

// ---- Tables -------------------------------------------------------------------------------------

// One profile: for each of 99 global prune ratios, or for fewer of the user's choice, the share of its tokens that
// every KV head gives up. Opaque, immutable.
typedef struct kvb_table kvb_table;

// The most KV heads that one layer may have, so that kvb_budgets() can keep a layer's fractions on the stack (8 KiB).
#define KVB_MAX_KV_HEADS 1024

// Options of opening. Opening takes at most 48 times the file's bytes and 64 KiB of memory, whatever the file says; for
// what `kvbudget solve` writes it is about 3 times. All zero, or NULL in place of the struct, means the defaults.
typedef struct kvb_table_options {
    size_t max_bytes; // a larger file is refused before it is read to the end; 0 = 64 MiB, room for 40,000 heads
} kvb_table_options;

// Reads the table file at `path`. Every tensor, every number of the metadata and every shape is checked before the
// table is handed out, so the functions below never meet a damaged table.
// On KVB_OK *out is the table, to be freed with kvb_table_close(). On failure *out is NULL and nothing stays
// allocated. Fails with
//   KVB_IO           the file cannot be read
//   KVB_FORMAT       not a table, truncated or damaged; the message names the tensor or the metadata key
//   KVB_VERSION      written in a newer version of the format
//   KVB_UNSUPPORTED  over max_bytes, or more than KVB_MAX_KV_HEADS heads in a layer
//   KVB_NUMERIC      NaN or infinity in a tensor
//   KVB_MEMORY       not enough memory
//   KVB_ARGUMENT     `out` or `path` is NULL
KVB_API kvb_status kvb_table_open(kvb_table **out, const char *path, const kvb_table_options *opt, kvb_error *err);

// The same from `size` bytes at `data`, which are copied: the caller may free them as soon as this returns. They need
// no alignment. `name` stands for the file name in messages; NULL gives "<memory>".
KVB_API kvb_status kvb_table_open_memory(kvb_table **out, const void *data, size_t size, const char *name,
                                         const kvb_table_options *opt, kvb_error *err);

// Frees a table and everything that was got from it (info, rows, ratios, metadata). NULL is allowed and does nothing.
// No other thread may still be using the table.
KVB_API void kvb_table_close(kvb_table *table);

// What a table says about itself. Strings are UTF-8 and never NULL ("" = the file leaves it open). Strings and arrays
// are owned by the table.
typedef struct kvb_info {
    uint32_t n_rows;     // R = 99, row i belonging to the global prune ratio (i + 1) / 100; a table that was solved
                         // for chosen ratios has R = 1 .. 99 rows, whose ratios kvb_table_row() tells
    uint32_t n_layers;   // L
    uint32_t n_heads;    // query heads in a layer; a multiple of n_kv_heads
    uint32_t n_kv_heads; // G, the heads that have a cache
    uint32_t head_dim;   // elements of one key
    uint32_t sink;       // the first `sink` tokens were never evicted during calibration...
    uint32_t window;     // ...nor the last `window`; hand both to kvb_select()

    const char *metric;            // canonical name of the scorer that the table is for, e.g. "snapkv:kvpress"
    const char *metric_parameters; // its parameters, text of a JSON object: {"window":64,"kernel":5,"pool":"avg"}
    const char *architecture;      // e.g. "llama"
    const char *model_id;          // a name for people, not an identity
    const char *model_sha256;      // identity of the weights: 64 hexadecimal digits, or ""
    const char *tokenizer_sha256;  // the same for the tokenizer

    const char *scope;     // "global": one budget over all layers; "layer": each layer meets the ratio by itself
    const char *aggregate; // "mean_ratio" or "mean_loss": how the calibration pairs were merged into one table
    const char *hull;      // "feasible" or "full": the range over which the loss curves were made convex
    double max_prune;      // no head was pruned beyond this share, e.g. 0.99

    const uint32_t *calibration_tokens; // lengths T of the calibration contexts
    uint32_t n_calibration_tokens;      // elements of calibration_tokens, at least 1
    uint32_t n_contexts;                // contexts and questions that the table was averaged over
    uint32_t n_questions;
    uint32_t n_queries_min; // fewest and most decode queries that were recorded for a question
    uint32_t n_queries_max;
    const char *calibration_sha256; // of the calibration text
    const char *record_sha256;      // of the record that was solved
    const char *tool_version;       // of the program that wrote the table

    // Layers whose cache does not grow with the text, such as those with a sliding window, are not budgeted: their
    // prune ratios are 0, kvb_budgets() leaves them all tokens (the engine's own window bounds them), and no total
    // counts them.
    const uint8_t *bounded; // [n_layers] 1: such a layer; NULL: there is none
    uint32_t n_budgeted;    // B, how many layers are not bounded
} kvb_info;

// Never NULL for a table that was opened; NULL for NULL. Valid until kvb_table_close().
KVB_API const kvb_info *kvb_table_info(const kvb_table *table);

// The text of one metadata entry exactly as in the file, also of entries that this version does not know.
// NULL when there is no such key or an argument is NULL. Owned by the table.
KVB_API const char *kvb_table_metadata(const kvb_table *table, const char *key);

// All prune ratios, [n_rows, n_layers, n_kv_heads], each in [0, 1]. Owned by the table; NULL for NULL.
KVB_API const double *kvb_table_prune_ratios(const kvb_table *table);

// Those of the layers that are budgeted, side by side: [n_rows, n_budgeted, n_kv_heads]. Owned by the table; NULL for
// NULL.
KVB_API const double *kvb_table_budgeted_ratios(const kvb_table *table);

// One row of the table: what the solver found for one global ratio. Losses are shares of each problem's total oracle
// mass, averaged over the solved problems.
typedef struct kvb_row {
    double ratio;              // global prune ratio asked for, ascending from row to row
    double effective_ratio;    // mean of the row's prune ratios over the heads of layers that are budgeted; below
                               // `ratio` when saturated
    double loss;               // loss of the greedy allocation
    double lower_bound;        // certified: no allocation of this size loses less than this
    double lambda;             // multiplier of that certificate: what one more token would save
    double table_loss;         // loss of this very table, rounded to tokens, on the calibration pairs
    int saturated;             // not 0: heads stopped at their floor, so that the row prunes less than it says
    const double *prune_ratio; // [n_layers, n_kv_heads], owned by the table
    const double *std;         // [n_layers, n_kv_heads], deviation over the calibration pairs, owned by the table
} kvb_row;

// Fills *out with row `row`, 0 .. n_rows - 1. Fails with KVB_ARGUMENT when an argument is NULL or out of range; *out
// is then untouched.
KVB_API kvb_status kvb_table_row(const kvb_table *table, uint32_t row, kvb_row *out, kvb_error *err);

// What an engine knows about itself. Zero and NULL mean "do not check this".
typedef struct kvb_expectation {
    uint32_t n_layers, n_heads, n_kv_heads, head_dim;
    const char *model_sha256; // compared without regard to case
    const char *metric;       // compared exactly
    int has_protection;       // not 0: sink and window below are compared too (there, 0 has a meaning)
    uint32_t sink, window;
} kvb_expectation;

// Tells whether the table belongs to this model, scorer and protection. The table of another model often has the
// right shape and does silent damage, so every engine should call this once after opening.
// Fails with KVB_MISMATCH; the message names the first field that differs, what was expected and what the table says.
KVB_API kvb_status kvb_table_check(const kvb_table *table, const kvb_expectation *expected, kvb_error *err);

// What an engine knows of weights that it holds as Hugging Face publishes them, where it has no `model_sha256`, which
// is kvbudget's own hash over all files. Zero and NULL mean "do not check this".
typedef struct kvb_weights {
    const char *const *file_sha256; // [n_files] SHA-256 of every file that holds weights (*.safetensors), in any order,
    uint32_t n_files;               // without regard to case; the hub shows them, and a hub cache names its blobs so
    const char *hf_id;              // "organisation/name"; compared exactly
    const char *hf_revision;        // the commit; compared exactly
} kvb_weights;

// Tells whether the table was made with these weights (metadata model_files, hf_id, hf_revision; formats/README.md).
// Equal hashes are proof. A name alone is not: a folder that was fine-tuned may still name the model it began from. A
// table that was made from a GGUF file of the same model has that file's hash, so only names can be compared. Does not
// allocate. Fails with KVB_MISMATCH, which names what differs or that the table says nothing; KVB_ARGUMENT: NULL.
KVB_API kvb_status kvb_table_check_weights(const kvb_table *table, const kvb_weights *mine, kvb_error *err);

// ---- Budgets ------------------------------------------------------------------------------------

// How shares become whole tokens. A head with prune ratio r ideally keeps (1 - r) T.
typedef enum kvb_rounding {
    // kvpress 0.5.5 on a CPU, to the bit: float32 arithmetic; each layer's total is the rounded sum of its ideals,
    // and the heads with the largest remainders get the tokens that flooring left over.
    KVB_ROUND_LAYER_LR = 0,
    // floor((1 - r) T), the paper's formula: loses up to one token per head. A product less than 1e-6 below a whole
    // number counts as that number, since (1 - 0.8) * 1000 is 199.99999999999997 in doubles.
    KVB_ROUND_FLOOR = 1,
    // Largest remainder over all heads of the model, in double (tie: lower index): the total is rint of the sum of
    // all ideals exactly. A head that would get nothing is given one token of the largest head's.
    KVB_ROUND_GLOBAL_LR = 2
} kvb_rounding;

// Which row serves a ratio that is not a whole per cent.
typedef enum kvb_lookup {
    // Row rint(100 ratio) - 1, half to even on the double product, clamped to 0 .. 98: as kvpress does it. In a table
    // of chosen ratios the row with the nearest one, of two the lower.
    KVB_LOOKUP_NEAREST = 0,
    // Between the neighbouring rows, with r = 0 at ratio 0 and the last row beyond its ratio. Keeps "mean of r =
    // ratio".
    KVB_LOOKUP_LINEAR = 1
} kvb_lookup;

// All zero, or NULL in place of the struct, gives what kvpress gives.
typedef struct kvb_budget_options {
    kvb_rounding rounding;
    kvb_lookup lookup;

    // Not 0: no head gets fewer than min(T, sink + window) tokens. What is missing is taken one token at a time from
    // the head that has the most above that floor (tie: lower index), so the total stays. When the total is too small
    // for that, every head gets exactly its floor, and the total grows to n_layers * n_kv_heads * min(T, sink +
    // window).
    int strict;

    // 0 or 1: single tokens. Else, for paged caches, every count is a multiple of `block`, or T. The model gets
    // rint(total / block) blocks (half up): each head its whole ones, the rest to the largest remainders (tie: lower
    // index). Each head gets at least one block, with `strict` as many as its floor needs, taken from the others as
    // `strict` takes tokens. A last block that reaches beyond T counts as T tokens.
    uint32_t block;
} kvb_budget_options;

// How many tokens each head keeps of a context of n_tokens, sinks and window included.
//   ratio     the share of all cached tokens that should go, below 1. 0 or less keeps everything; NaN, infinities and
//             1 or more are refused
//   n_tokens  T, at least 1
//   opt       NULL = kvpress's numbers
//   keep      [n_layers, n_kv_heads], written by this call; each count is in 1 .. T, and T in a layer that is bounded
//             (kvb_info). Everything below is about the other layers.
//   cap       elements of `keep`; fewer than n_layers * n_kv_heads is KVB_CAPACITY
// Does not allocate and takes microseconds. On failure `keep` is untouched.
//
// A table that was solved under constraints (metadata "constraints": whole pages, few budgets per layer, equal totals
// of tensor-parallel ranks, caps per layer, floors and ceilings of heads; formats/README.md) gives budgets that keep to
// all of them, for every ratio and T. `rounding` then has no say: the total is the whole pages in the sum of (1 - r) T,
// never more unless lower limits demand it, handed out to layers and then to heads by largest remainder. `strict` is
// one more lower limit; `block` must divide the table's page, or is used if the table has none. Takes up to a
// millisecond and 40 KiB of stack. KVB_UNSUPPORTED when nothing fits at this T, e.g. a ceiling below one page; the
// message has the numbers, and the contents of `keep` are then undefined. A ratio of 0 or less keeps everything.
KVB_API kvb_status kvb_budgets(const kvb_table *table, double ratio, uint32_t n_tokens, const kvb_budget_options *opt,
                               uint32_t *keep, size_t cap, kvb_error *err);

// Reasons for a second look at a set of budgets, bits of kvb_budget_summary.warnings.
enum {
    KVB_WARN_PROTECTED = 1, // a head keeps fewer than min(T, sink + window) tokens: some protected ones are lost
    KVB_WARN_SATURATED = 2, // a row in use is saturated: less is pruned than was asked for
    KVB_WARN_LENGTH = 4,    // T is under half the shortest or over twice the longest calibration context
    KVB_WARN_CLAMPED = 8,   // no row within half a per cent of the ratio; the first or last one was used
    KVB_WARN_EFFECTIVE = 16 // what is really pruned differs from the ratio by over one per cent of the cache
};

typedef struct kvb_budget_summary {
    double requested_ratio;
    double effective_ratio; // 1 - total / (n_budgeted * n_kv_heads * n_tokens): what these integers really prune
    uint64_t total;         // sum of all counts of layers that are budgeted; the rest is about them too
    uint32_t keep_min, keep_max;
    uint32_t heads_below_protected; // heads that keep fewer than min(T, sink + window) tokens

    // The table's rows in use, counted from 1 on, which is their ratio in per cent unless the table was solved for
    // chosen ratios; 0 for "nothing pruned". The ratios used
    // are (1 - weight) * row_below + weight * row_above. A nearest lookup has equal rows and weight 0.
    uint32_t row_below, row_above;
    double weight;

    unsigned warnings; // KVB_WARN_* bits
} kvb_budget_summary;

// Sums up what a call of kvb_budgets() with the same table, ratio, n_tokens and opt has written to `keep` (cap as
// there). Fails as kvb_budgets() does; *out is then untouched.
KVB_API kvb_status kvb_budgets_summarize(const kvb_table *table, double ratio, uint32_t n_tokens,
                                         const kvb_budget_options *opt, const uint32_t *keep, size_t cap,
                                         kvb_budget_summary *out, kvb_error *err);

// ---- Selection ----------------------------------------------------------------------------------

// Picks the tokens that one head keeps. Order of preference: the protected positions [0, sink) and [T - window, T) by
// ascending position, then all others by score, highest first, equal scores by position, lowest first (-0 equals +0).
// The first `keep` in that order stay. So with keep < sink + window the newest tokens of the window are lost, as in
// kvpress; kvb_budgets() with `strict` avoids that.
//   scores     [n_tokens], higher = keep; infinities are ordered as numbers. Protected positions' scores are not read
//   keep       tokens to keep; n_tokens or more keeps all without looking at any score; 0 keeps none
//   positions  receives min(keep, n_tokens) positions in ascending order
//   cap        elements of `positions`; fewer than that is KVB_CAPACITY
// Fails with KVB_NUMERIC when a score is NaN; the message says where. Does not allocate: four passes over the scores
// and 8 KiB of stack, whatever n_tokens is. On failure `positions` is untouched.
KVB_API kvb_status kvb_select(const float *scores, uint32_t n_tokens, uint32_t keep, uint32_t sink, uint32_t window,
                              uint32_t *positions, size_t cap, kvb_error *err);

// kvb_select() for n_heads heads at once (a layer, or the whole model), into one ragged array: the positions of head
// h are positions[offsets[h]] .. positions[offsets[h + 1] - 1], and offsets[n_heads] is the number of all kept
// tokens.
//   scores   [n_heads, n_tokens]
//   keep     [n_heads], e.g. from kvb_budgets()
//   offsets  [n_heads + 1], written by this call
//   cap      elements of `positions`, at least the sum of min(keep[h], n_tokens)
// Fails as kvb_select() does, the message names the head; the contents of both outputs are then undefined.
KVB_API kvb_status kvb_select_all(const float *scores, size_t n_heads, uint32_t n_tokens, const uint32_t *keep,
                                  uint32_t sink, uint32_t window, size_t *offsets, uint32_t *positions, size_t cap,
                                  kvb_error *err);

// ---- Growing caches, and batches ----------------------------------------------------------------

// kvb_select() for a head that was cut before and has grown since: picks again among the rows that it still has.
// Tokens that are gone stay gone. runtime/SERVING.md says when to call it and what for.
//   scores    [n_rows], higher = keep, of the head's rows
//   places    [n_rows], the position in the text of each row's token: strictly ascending, all below n_tokens
//   n_tokens  tokens seen so far, those that are gone included; the window is the last `window` of them
//   keep      rows to keep, e.g. from kvb_budgets() for n_tokens, or for a fixed length as a cap; n_rows or more keeps
//             all
//   rows      receives min(keep, n_rows) row numbers 0 .. n_rows - 1, ascending: what to gather into the new cache
//   cap       elements of `rows`; fewer than that is KVB_CAPACITY
// With all tokens still there (places 0 .. n_tokens - 1) it is kvb_select(). KVB_ARGUMENT when places do not ascend;
// else fails as kvb_select() does. Does not allocate. On failure `rows` is untouched.
KVB_API kvb_status kvb_reselect(const float *scores, const uint32_t *places, uint32_t n_rows, uint32_t n_tokens,
                                uint32_t keep, uint32_t sink, uint32_t window, uint32_t *rows, size_t cap,
                                kvb_error *err);

// kvb_reselect() for n_heads heads at once. What head h has now are elements old_offsets[h] .. old_offsets[h + 1] - 1
// of scores and places, as kvb_select_all() has laid them out; what it keeps are rows[offsets[h]] ..
// rows[offsets[h + 1] - 1], counted from the head's own first row.
//   keep         [n_heads]
//   old_offsets  [n_heads + 1], read; offsets [n_heads + 1], written; they must not be the same array
//   cap          elements of `rows`, at least the sum of min(keep[h], rows of h)
// Fails as kvb_reselect() does, the message names the head; the contents of both outputs are then undefined.
KVB_API kvb_status kvb_reselect_all(const float *scores, const uint32_t *places, size_t n_heads,
                                    const size_t *old_offsets, uint32_t n_tokens, const uint32_t *keep, uint32_t sink,
                                    uint32_t window, size_t *offsets, uint32_t *rows, size_t cap, kvb_error *err);

// Where n sequences begin and end that lie behind one another, as attention kernels for sequences of many lengths want
// it (cu_seqlens, indptr): sequence i has rows cu[i] .. cu[i + 1] - 1. Here a sequence is one KV head of one request:
// n = heads of a layer times requests.
//   lengths  [n] rows in use, e.g. what kvb_budgets() gave
//   slack    free rows behind each, for tokens to come; kernels are then told `lengths` too (seqused)
//   block    0 or 1: cu counts rows. Else it counts pages of `block` rows, each sequence beginning on a new one
//   cu       [n + 1], written by this call; cap: its elements, fewer is KVB_CAPACITY
// KVB_UNSUPPORTED when the end is beyond 2^31 - 1; `cu` is then undefined. Does not allocate.
KVB_API kvb_status kvb_cu_seqlens(const uint32_t *lengths, size_t n, uint32_t slack, uint32_t block, int32_t *cu,
                                  size_t cap, kvb_error *err);

// ---- Learned rankings ----------------------------------------------------------------------------

// What `kvbudget learn` fits, in its own file or a table's: per KV head a linear form of features. Opaque, immutable.
typedef struct kvb_ranking kvb_ranking;
#define KVB_RANK_FEATURES_MAX 16

// Strings and arrays are owned by the ranking.
typedef struct kvb_ranking_info {
    const char *name; // "learned:" and the first 12 digits of its hash: the metric of tables made with it
    uint32_t n_layers, n_kv_heads;
    uint32_t n_features; // F, 1 .. KVB_RANK_FEATURES_MAX
    uint32_t n_columns;  // P = 2 F + 2 weights of a head: of every feature's z and z|z|, of recency, and a constant;
                         // 3 F + 2 with layer_mean: behind the z|z| those of every feature's mean over the heads
    const char *const *metrics; // [F] canonical names of the metrics whose scores kvb_rank() takes, in this order
    const int *logarithm;       // [F] not 0: the score's logarithm is the feature
    uint32_t sink;              // first tokens that take no part in means and deviations; hand it to kvb_select() too
    const char *model_sha256;   // of the weights that it was fitted for, or ""
    const char *about;          // how it was fitted, text of a JSON object
    const double *weights;      // [n_layers, n_kv_heads, P]
    int layer_mean;             // not 0: a head's scores also depend on the other KV heads of its layer
} kvb_ranking_info;

// Reads the file that `kvbudget learn` wrote, or the ranking in a table; the second from memory, which is copied. Fail
// as kvb_table_open() and kvb_table_open_memory() do.
KVB_API kvb_status kvb_ranking_open(kvb_ranking **out, const char *path, kvb_error *err);
KVB_API kvb_status kvb_ranking_open_memory(kvb_ranking **out, const void *data, size_t size, const char *name,
                                           kvb_error *err);
// Not for what kvb_table_ranking() returns. Both take NULL, and the second then returns NULL.
KVB_API void kvb_ranking_close(kvb_ranking *ranking);
KVB_API const kvb_ranking_info *kvb_ranking_about(const kvb_ranking *ranking);
// The ranking that the table was made with, owned by the table; NULL when it is for a plain metric.
KVB_API const kvb_ranking *kvb_table_ranking(const kvb_table *table);

// Scores of one head's tokens for kvb_select(), by the table's ranking. With x the score of feature f (or its
// logarithm, not below 1e-12), z = (x - mean) / deviation over tokens sink .. T - 1, 0 for the sinks:
//     out[j] = sum over f of w_f z + w'_f z |z|  -  w_r log(T - j)  +  w_1
//   features  [F] pointers to [n_tokens] scores of the ranking's metrics, in its order; out [n_tokens] is none of them
// Does not allocate; O(F n_tokens). Fails with KVB_ARGUMENT (a NULL, a head out of range, a table without a ranking)
// and KVB_NUMERIC for a score that is not finite, naming feature and token; `out` is then undefined. For rankings
// without layer_mean; KVB_ARGUMENT for others.
KVB_API kvb_status kvb_rank(const kvb_table *table, uint32_t layer, uint32_t head, const float *const *features,
                            uint32_t n_tokens, float *out, kvb_error *err);

// The same for all KV heads of a layer at once, and for every ranking. With layer_mean
//     out[g,j] = ... + sum over f of u_f (mean over the layer's heads of z_f[.,j])
// is added: what all heads find a token to be worth. Tensor-parallel ranks need each other's scores for that.
//   features  [F] pointers to [n_kv_heads, n_tokens]; out [n_kv_heads, n_tokens] is none of them
// Does not allocate, takes 16 KiB of stack. Fails as kvb_rank() does.
KVB_API kvb_status kvb_rank_layer(const kvb_table *table, uint32_t layer, const float *const *features,
                                  uint32_t n_tokens, float *out, kvb_error *err);

#ifdef __cplusplus
}
#endif
#endif
