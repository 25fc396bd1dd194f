// The kvbudget runtime library. It loads a table that says how much of the KV cache each attention head deserves, and
// tells an engine how many tokens each head keeps, and which.
//
// You may copy this folder into your own tree. It needs libc, libm and cJSON, compiles as C99 or later, and this header
// can be included from C++. No function prints anything or keeps global state. Only the functions that open a table or
// a ranking leave memory allocated, which the matching close function frees. A kvb_table never changes once it is open,
// so any number of threads may use one table at the same time without locks.
//
// Words used below. T, or n_tokens, is the length of the context after prefill, including the sinks (the first tokens)
// and the window (the last ones). A prune ratio is the share of a head's T tokens that is evicted. A "keep" count is
// the number of tokens that stay. "Head" always means a KV head. Arrays over heads have the shape [n_layers,
// n_kv_heads] in C order: head g of layer l has the index l * n_kv_heads + g.
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

// Every function that can fail returns one of these. KVB_OK is 0.
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

// What went wrong, in words. Every function that can fail takes a pointer to one as its last argument, which may be
// NULL. On failure it is filled in; on success it is left alone.
// The message is a single line. It names the file or the argument, the place in it, what was expected, what was found,
// and what you can do about it. Control characters, and bytes that are not valid UTF-8, are replaced by '?'. If the
// line does not fit, which only happens with very long paths, its middle is replaced by " ... ".
typedef struct kvb_error {
    kvb_status status;
    char message[512];
} kvb_error;

// Returns the name of a status as it stands in the list above, such as "FORMAT", or "UNKNOWN" for any other number. The
// string is a constant; do not free it.
KVB_API const char *kvb_status_name(kvb_status status);

// Returns the version of this library, such as "0.1.0". The string is a constant; do not free it.
KVB_API const char *kvb_version(void);

// Returns the version of the budget arithmetic, the KVB_BUDGETS_VERSION that the library was built with. Two builds
// that return the same number return the same counts from kvb_budgets() for the same table, ratio, n_tokens and
// options. If your engine stores budgets, or splits a model over several machines, this is the number to compare.
#define KVB_BUDGETS_VERSION 3 // 2 added tables with constraints and tables for chosen ratios; 3 added bounded layers
KVB_API uint32_t kvb_budgets_version(void);

// ---- Tables -------------------------------------------------------------------------------------

// A table of budgets. It has one row for each of 99 global prune ratios, or for a smaller number of ratios that were
// chosen when it was made, and a row holds the prune ratio of every head.
typedef struct kvb_table kvb_table;

// The largest number of KV heads in a layer. It is limited so that kvb_budgets() can work on the stack (8 KiB).
#define KVB_MAX_KV_HEADS 1024

// Options for opening a table. A struct that is all zero, or a NULL pointer, means the defaults.
typedef struct kvb_table_options {
    // A larger file is refused before it has been read to its end. 0 means 64 MiB, enough for 40,000 heads. Opening
    // never takes more memory than 48 times the file's size plus 64 KiB, whatever the file contains. For files that
    // `kvbudget solve` has written it takes about 3 times their size.
    size_t max_bytes;
} kvb_table_options;

// Reads the table file at `path`. Everything is checked first: the file's own SHA-256 (older files have none), and
// every tensor, shape and metadata entry. So none of the functions below has to deal with a damaged table. On success,
// *out is the table; free it with kvb_table_close(). On failure, *out is NULL and all memory has been freed. Fails with
//   KVB_IO           if the file cannot be read
//   KVB_FORMAT       if it is not a table, or is truncated or damaged; the message names the tensor or metadata key
//   KVB_VERSION      if it was written in a newer version of the format
//   KVB_UNSUPPORTED  if it is larger than max_bytes, or a layer has more than KVB_MAX_KV_HEADS heads
//   KVB_NUMERIC      if a tensor contains NaN or infinity
//   KVB_MEMORY       if there is not enough memory
//   KVB_ARGUMENT     if `out` or `path` is NULL
KVB_API kvb_status kvb_table_open(kvb_table **out, const char *path, const kvb_table_options *opt, kvb_error *err);

// Like kvb_table_open(), but reads the table from `size` bytes of memory at `data`, which need no alignment. The bytes
// are copied, so you may free them as soon as this returns. `name` is used as the file name in messages; NULL stands
// for "<memory>".
KVB_API kvb_status kvb_table_open_memory(kvb_table **out, const void *data, size_t size, const char *name,
                                         const kvb_table_options *opt, kvb_error *err);

// Frees a table, and with it everything that the functions below returned pointers to: info, rows, ratios, metadata and
// ranking. No other thread may still be using it. If `table` is NULL, this does nothing.
KVB_API void kvb_table_close(kvb_table *table);

// What a table says about itself. Strings are UTF-8 and never NULL; an empty string means that the file does not say.
// The table owns the strings and arrays.
typedef struct kvb_info {
    uint32_t n_rows;   // R. With 99 rows, row i is for the global prune ratio (i + 1) / 100. A table for chosen ratios
                       // has 1 to 99 rows; kvb_table_row() gives their ratios
    uint32_t n_layers; // L
    uint32_t n_heads;  // query heads in a layer; a multiple of n_kv_heads
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

    // Some layers have a cache that does not grow with the text, for example those with a sliding window. They have no
    // budget: their prune ratios are 0, kvb_budgets() says that their heads keep all T tokens (the engine's own window
    // limits them), and they are not part of any total.
    const uint8_t *bounded; // [n_layers], 1 for such a layer; NULL if there are none
    uint32_t n_budgeted;    // B, the number of layers that do have a budget
} kvb_info;

// Returns what the table says about itself; valid until kvb_table_close(). Returns NULL only if `table` is NULL.
KVB_API const kvb_info *kvb_table_info(const kvb_table *table);

// Returns the text of a metadata entry exactly as it is in the file. This also works for entries that this version of
// the library does not know. Returns NULL if there is no such key, or an argument is NULL. The table owns the string.
KVB_API const char *kvb_table_metadata(const kvb_table *table, const char *key);

// Returns all prune ratios, [n_rows, n_layers, n_kv_heads], each from 0 to 1. The table owns the array. Returns NULL
// only if `table` is NULL.
KVB_API const double *kvb_table_prune_ratios(const kvb_table *table);

// The same without the layers that have no budget: [n_rows, n_budgeted, n_kv_heads].
KVB_API const double *kvb_table_budgeted_ratios(const kvb_table *table);

// One row of a table: what the solver found for one global prune ratio. A loss is the share of the total importance
// that is lost with the evicted tokens, averaged over the questions that the table was made from.
typedef struct kvb_row {
    double ratio;           // the global prune ratio that the row is for; ascends from row to row
    double effective_ratio; // the mean of the row's prune ratios over all heads that have a budget. It is smaller than
                            // `ratio` if the row is saturated
    double loss;            // loss of the solver's allocation
    double lower_bound;     // proven: no allocation of this size loses less
    double lambda;          // the multiplier of that proof: what one more token would save
    double table_loss;      // loss of this row of the table, rounded to whole tokens
    int saturated;          // nonzero if heads stopped at their floor, so that the row prunes less than `ratio`
    const double *prune_ratio; // [n_layers, n_kv_heads], owned by the table
    const double *std;         // [n_layers, n_kv_heads], standard deviation over the questions, owned by the table
} kvb_row;

// Fills in *out with row `row`, which is 0 to n_rows - 1. Fails with KVB_ARGUMENT if `row` is out of range or a pointer
// is NULL; *out is then left alone.
KVB_API kvb_status kvb_table_row(const kvb_table *table, uint32_t row, kvb_row *out, kvb_error *err);

// What you know about your model and your engine. A field that is 0 or NULL is not checked.
typedef struct kvb_expectation {
    uint32_t n_layers, n_heads, n_kv_heads, head_dim;
    const char *model_sha256; // compared without regard to case; "" matches no table
    const char *metric;       // compared exactly
    int has_protection;       // nonzero: check `sink` and `window` too, which may then be 0
    uint32_t sink, window;
} kvb_expectation;

// Checks that the table was made for your model, scorer and protected tokens. Call this once after opening a table: a
// table of another model often has the right shape, and using it does damage that goes unnoticed. Fails with
// KVB_MISMATCH if something differs; the message names the first such field and both values.
KVB_API kvb_status kvb_table_check(const kvb_table *table, const kvb_expectation *expected, kvb_error *err);

// What you know about weights in the form in which Hugging Face publishes them. Use this if you do not have the
// `model_sha256`, which is kvbudget's own hash over all files. A field that is 0 or NULL is not checked.
typedef struct kvb_weights {
    const char *const *file_sha256; // [n_files] the SHA-256 of every file that holds weights (*.safetensors), in any
    uint32_t n_files;               // order and case. The hub shows them, and a hub cache uses them as file names
    const char *hf_id;              // "organisation/name"; compared exactly
    const char *hf_revision;        // the commit; compared exactly
} kvb_weights;

// Checks that the table was made with these weights, by its metadata model_files, hf_id and hf_revision
// (formats/README.md). Equal hashes prove it; each must occur as often as it does in the table. An equal name does not
// prove it, since the files of a fine-tuned model may still carry the name of the model it was made from. A table that
// was made from a GGUF file has the hash of that file, so there only the names can be compared.
// Fails with KVB_MISMATCH if something differs or the table does not say it, and with KVB_ARGUMENT if a pointer is
// NULL.
KVB_API kvb_status kvb_table_check_weights(const kvb_table *table, const kvb_weights *mine, kvb_error *err);

// Finds the table for your model among the *.safetensors files of a folder: the ready tables that come with kvbudget
// (share/kvbudget/tables; those with formats are in share/kvbudget/tables/packed), or your own. A table fits if it
// passes kvb_table_check() with every field of `mine` except model_sha256, and if one of these shows that it was made
// for your weights; a hash counts for more than a name:
//   - a hash: model_sha256 of `mine`, or all hashes of `weights`
//   - a name: weights->hf_id is the table's hf_id or is listed in its metadata model_names (separated by commas). Case
//     is ignored. A name without '/', such as that of a folder or a GGUF file, is compared with the part of the table's
//     name after the '/'. The end of a GGUF file's name, such as ".gguf", "-Q8_0.gguf" or ".q4_k_m.gguf", is ignored
// If several tables fit equally well, the one whose name comes first by strcmp() is taken. Files that are not valid
// tables are skipped. hf_revision is not compared.
//   path     [cap] bytes, the result: the file's path, for kvb_table_open()
//   mine     n_layers, n_heads, n_kv_heads and head_dim are needed
//   weights  may be NULL
// Opens every table in the folder, and needs 20 KiB of stack. On failure `path` is left alone. Fails with
//   KVB_MISMATCH  if no table fits. The message says what was looked for and, if a table came close, what is wrong with
//                 it or which names it accepts: a fine-tuned model has the shape of its base model
//   KVB_IO        if the folder cannot be read
//   KVB_CAPACITY  if the path is longer than cap - 1 bytes
//   KVB_ARGUMENT  if a pointer is NULL, a number of the shape is 0, or a path has 4,096 bytes or more
//   KVB_MEMORY    if there is not enough memory
KVB_API kvb_status kvb_table_find(char *path, size_t cap, const char *folder, const kvb_expectation *mine,
                                  const kvb_weights *weights, kvb_error *err);

// ---- Budgets ------------------------------------------------------------------------------------

// How shares become whole numbers of tokens. Ideally, a head with prune ratio r keeps (1 - r) T tokens.
typedef enum kvb_rounding {
    // What kvpress 0.5.5 computes on a CPU, to the bit, in float32. A layer's total is the rounded sum of its heads'
    // ideal counts; each head gets its count rounded down, and the tokens that are left go to the heads with the
    // largest remainders.
    KVB_ROUND_LAYER_LR = 0,
    // floor((1 - r) T), as in the paper; each head loses up to one token. A product that is less than 1e-6 below a
    // whole number counts as that number, because (1 - 0.8) * 1000 is 199.99999999999997 in double precision.
    KVB_ROUND_FLOOR = 1,
    // Largest remainders over all heads of the model, in double precision; of equal ones, the head with the lower index
    // is served first. The total is exactly the rounded sum of all ideal counts. A head that would get no token takes
    // one from the head that has the most.
    KVB_ROUND_GLOBAL_LR = 2
} kvb_rounding;

// Which row is used for a ratio that is not a whole per cent.
typedef enum kvb_lookup {
    // The row whose ratio is nearest. With 99 rows this is row rint(100 ratio) - 1, limited to 0 to 98, which is what
    // kvpress takes. In a table for chosen ratios, the lower one if two are equally near.
    KVB_LOOKUP_NEAREST = 0,
    // Linear interpolation between the two neighbouring rows. Below the first row it is between that row and "nothing
    // is pruned"; above the last row it is the last row. The mean of the prune ratios is then the ratio itself. In a
    // table with formats, each head's bytes are interpolated, and it has the formats of the nearest row.
    KVB_LOOKUP_LINEAR = 1
} kvb_lookup;

// Options for kvb_budgets(). A struct that is all zero, or a NULL pointer, gives the numbers of kvpress.
typedef struct kvb_budget_options {
    kvb_rounding rounding;
    kvb_lookup lookup;

    // If nonzero, every head keeps at least min(T, sink + window) tokens, so that no protected token is lost. The
    // tokens for that are taken one by one from the head that has the most above this floor (of equal ones, the one
    // with the lower index), so the total does not change. If the total is too small for all floors, every head gets
    // exactly its floor, and the total is n_layers * n_kv_heads * min(T, sink + window).
    int strict;

    // For paged caches: every count is a multiple of `block`, or T. 0 and 1 mean single tokens. The model gets total /
    // block blocks, rounded to nearest with halves up. Each head gets the blocks that it fills; the rest go to the
    // largest remainders (of equal ones, the lower index). A head has at least one block, and with `strict` as many as
    // its floor needs, taken from other heads as described there. If a head's last block reaches beyond T, the head
    // keeps T tokens.
    uint32_t block;
} kvb_budget_options;

// Computes how many tokens each head keeps of a context of n_tokens tokens, sinks and window included.
//   ratio     the share of all cached tokens to evict, below 1. A ratio of 0 or less keeps everything. NaN, infinities
//             and ratios of 1 or more are refused.
//   n_tokens  T, at least 1
//   opt       options, or NULL
//   keep      [n_layers, n_kv_heads], the result. Each count is from 1 to T. Layers without a budget (kvb_info.bounded)
//             get T; the rest of this comment is about the other layers.
//   cap       the number of elements that `keep` has room for; fails with KVB_CAPACITY if that is too few
// Takes microseconds. On failure `keep` is left alone, unless said otherwise below.
//
// A table may have been solved under constraints of an engine: whole pages, few different budgets in a layer, equal
// totals of tensor-parallel ranks, caps for layers, floors and ceilings for heads (metadata "constraints";
// formats/README.md). Its budgets then respect all of them, for every ratio and T. `rounding` is ignored: the total is
// the number of whole pages in the sum of (1 - r) T, or more if lower limits demand it, and is handed out by largest
// remainders, first to layers and then to heads. `strict` is one more lower limit. `block` must divide the table's page
// size, and is the page size if the table has none. This needs 40 KiB of stack. It usually takes 0.1 ms for 90 heads
// and 2 ms for 4,096, but up to 200 ms have been seen for large models, so call it once after a prefill and not per
// layer or token. Fails with KVB_UNSUPPORTED if the constraints cannot be met at this T, for example if a ceiling is
// smaller than a page; the contents of `keep` are then undefined.
KVB_API kvb_status kvb_budgets(const kvb_table *table, double ratio, uint32_t n_tokens, const kvb_budget_options *opt,
                               uint32_t *keep, size_t cap, kvb_error *err);

// Reasons to look twice at a set of budgets: bits of kvb_budget_summary.warnings.
enum {
    KVB_WARN_PROTECTED = 1, // a head keeps fewer than min(T, sink + window) tokens: some protected ones are lost
    KVB_WARN_SATURATED = 2, // a row in use is saturated: less is pruned than was asked for
    KVB_WARN_LENGTH = 4,    // T is under half the shortest or over twice the longest calibration context
    KVB_WARN_CLAMPED = 8,   // no row within half a per cent of the ratio; the first or last one was used
    KVB_WARN_EFFECTIVE = 16 // what is really pruned differs from the ratio by over one per cent of the cache
};

typedef struct kvb_budget_summary {
    double requested_ratio;
    double effective_ratio; // what these counts really prune: 1 - total / (n_budgeted * n_kv_heads * n_tokens)
    uint64_t total;         // sum of the counts of all layers that have a budget; the fields below are about them too
    uint32_t keep_min, keep_max;
    uint32_t heads_below_protected; // heads that keep fewer than min(T, sink + window) tokens

    // Which rows of the table were used, counted from 1, so that in a table of 99 rows they are per cents; 0 stands for
    // "nothing is pruned". The prune ratios are (1 - weight) * row_below + weight * row_above. With KVB_LOOKUP_NEAREST
    // both rows are the same and the weight is 0.
    uint32_t row_below, row_above;
    double weight;

    unsigned warnings; // KVB_WARN_* bits
} kvb_budget_summary;

// Sums up the counts that kvb_budgets() has written to `keep`. Pass the same table, ratio, n_tokens, opt and cap as you
// passed there. Fails as kvb_budgets() does; *out is then left alone.
KVB_API kvb_status kvb_budgets_summarize(const kvb_table *table, double ratio, uint32_t n_tokens,
                                         const kvb_budget_options *opt, const uint32_t *keep, size_t cap,
                                         kvb_budget_summary *out, kvb_error *err);

// ---- Selection ----------------------------------------------------------------------------------

// Picks the tokens that one head keeps. The protected positions, 0 to sink - 1 and T - window to T - 1, come first, in
// ascending order. Then come all others, those with the highest scores first; of equal scores (-0 equals +0), the lower
// position first. The first `keep` in this order are kept. This means that if `keep` is less than sink + window, the
// newest tokens of the window are lost, as in kvpress. Use `strict` in kvb_budgets() to avoid that.
//   scores     [n_tokens], higher means keep. Infinities are allowed. Scores of protected positions are not read.
//   keep       the number of tokens to keep. If it is n_tokens or more, all are kept and no score is read.
//   positions  the result: min(keep, n_tokens) positions in ascending order
//   cap        the number of elements that `positions` has room for; fails with KVB_CAPACITY if that is too few
// Fails with KVB_NUMERIC if a score is NaN; the message says which. Takes four passes over the scores and 8 KiB of
// stack, whatever n_tokens is. On failure `positions` is left alone.
KVB_API kvb_status kvb_select(const float *scores, uint32_t n_tokens, uint32_t keep, uint32_t sink, uint32_t window,
                              uint32_t *positions, size_t cap, kvb_error *err);

// Does what kvb_select() does for n_heads heads, a layer or the whole model, and puts the results one after the other
// into one array: those of head h are positions[offsets[h]] to positions[offsets[h + 1] - 1], and offsets[n_heads] is
// the number of tokens kept in all.
//   scores   [n_heads, n_tokens]
//   keep     [n_heads], for example from kvb_budgets()
//   offsets  [n_heads + 1], a result
//   cap      the number of elements that `positions` has room for, at least the sum of min(keep[h], n_tokens)
// Fails as kvb_select() does, with a message that names the head; the contents of both results are then undefined.
KVB_API kvb_status kvb_select_all(const float *scores, size_t n_heads, uint32_t n_tokens, const uint32_t *keep,
                                  uint32_t sink, uint32_t window, size_t *offsets, uint32_t *positions, size_t cap,
                                  kvb_error *err);

// ---- Growing caches, and batches ----------------------------------------------------------------

// Does what kvb_select() does for a head that was cut before and has grown since: picks again, among the rows that are
// still in its cache. Tokens that are gone stay gone. runtime/SERVING.md explains when to call this.
//   scores    [n_rows], one for each row, higher means keep
//   places    [n_rows], the position in the text of each row's token: strictly ascending, all below n_tokens
//   n_tokens  how many tokens have been seen so far, including those that are gone. The window is the last of these.
//   keep      the number of rows to keep, for example from kvb_budgets() for n_tokens, or for a fixed length, which
//             is then a limit. If it is n_rows or more, all are kept.
//   rows      the result: min(keep, n_rows) row numbers in ascending order, to gather into the new cache
//   cap       the number of elements that `rows` has room for; fails with KVB_CAPACITY if that is too few
// If no token is gone yet, this is the same as kvb_select(). Fails with KVB_ARGUMENT if `places` do not ascend, and
// otherwise as kvb_select() does. On failure `rows` is left alone.
KVB_API kvb_status kvb_reselect(const float *scores, const uint32_t *places, uint32_t n_rows, uint32_t n_tokens,
                                uint32_t keep, uint32_t sink, uint32_t window, uint32_t *rows, size_t cap,
                                kvb_error *err);

// Does what kvb_reselect() does for n_heads heads. The rows that head h has now are elements old_offsets[h] to
// old_offsets[h + 1] - 1 of `scores` and `places`, laid out as kvb_select_all() does. Those that it keeps are
// rows[offsets[h]] to rows[offsets[h + 1] - 1], as numbers that count from the head's own first row.
//   keep         [n_heads]
//   old_offsets  [n_heads + 1]
//   offsets      [n_heads + 1], a result; must not be the same array as old_offsets
//   cap          the number of elements that `rows` has room for, at least the sum of min(keep[h], rows of head h)
// Fails as kvb_reselect() does, with a message that names the head; the contents of both results are then undefined.
KVB_API kvb_status kvb_reselect_all(const float *scores, const uint32_t *places, size_t n_heads,
                                    const size_t *old_offsets, uint32_t n_tokens, const uint32_t *keep, uint32_t sink,
                                    uint32_t window, size_t *offsets, uint32_t *rows, size_t cap, kvb_error *err);

// The rule for when and how far to cut a cache that keeps growing: by chunks of a prefill, by turns, by answers. With
// an interval, no head holds more than its budget plus `buffer` rows between two passes, however long the text gets.
// The budgets themselves grow with the text (ratio), or stay the same on average (target_size). Fill in the fields (0
// means the default) and call kvb_growth_check(); one rule then serves any number of caches and threads. For each
// cache, or each layer if layers are cut one by one, you store one number, cut_at: how many tokens had been seen at its
// last cut, at first 0. If tokens are taken back, lower cut_at to the number of tokens left, if that is less.
typedef struct kvb_growth {
    double ratio;         // the share of all tokens so far that is evicted; ignored if target_size is set
    uint32_t target_size; // rows that a head keeps on average, shared out by the table's row for 1 - target_size / T
    uint32_t interval;    // cut once this many tokens are new. The default is 128 with a target_size and 0 without: cut
                          // only where a turn ends, and append answers uncut
    uint32_t buffer; // rows that a head may hold above its budget; by default the interval. If it is more, the newest
                     // buffer - interval tokens stay in every head, whatever their score
    uint32_t least;  // contexts of up to this many tokens stay whole, as some scorers cannot rank so few; raised to
                     // sink + window if it is less
    kvb_budget_options options; // with a target_size, `lookup` is always linear. With an interval, and at every cut
                                // after the first, budgets are always `strict`...
    int loose;                  // ...unless this is nonzero
    uint32_t sink, window;      // results of kvb_growth_check(): pass both to kvb_reselect() at every cut
} kvb_growth;

// Checks a rule and fills in its defaults. Fails with KVB_ARGUMENT if a number is out of range or a pointer is NULL,
// and with KVB_UNSUPPORTED if there is a target_size, which counts tokens, but the table has formats and so shares out
// bytes. On failure *growth is left alone.
KVB_API kvb_status kvb_growth_check(const kvb_table *table, kvb_growth *growth, kvb_error *err);

// Returns nonzero if a cache that has seen n_tokens tokens must be cut now: if at least `interval` tokens are new since
// cut_at or, without an interval, if turn_ends is nonzero. Call this after every pass, however many tokens it had.
KVB_API int kvb_growth_due(const kvb_growth *growth, uint32_t n_tokens, uint32_t cut_at, int turn_ends);

// Computes how many rows each head keeps at a cut, for kvb_reselect(): what kvb_budgets() gives, plus the newest
// `buffer` - `interval` rows. If all tokens are to stay, every count is n_tokens and the summary's requested_ratio is
// 0.
//   n_tokens  how many tokens have been seen so far, evicted ones included
//   cut_at    0 as long as no token has been evicted
//   keep      [n_layers, n_kv_heads], the result; cap is the number of elements that it has room for
//   out       NULL, or gets kvb_budgets_summarize() of the counts without the newest buffer - interval rows
// With a target_size, all heads together never keep more than it allows. Takes as long as kvb_budgets(), or a few calls
// of it, and fails as it does; `keep` is then undefined.
KVB_API kvb_status kvb_growth_budgets(const kvb_table *table, const kvb_growth *growth, uint32_t n_tokens,
                                      uint32_t cut_at, uint32_t *keep, size_t cap, kvb_budget_summary *out,
                                      kvb_error *err);

// Computes where n sequences that are stored one after the other begin and end, in the form that attention kernels for
// sequences of different lengths take (cu_seqlens, indptr): sequence i has the rows cu[i] to cu[i + 1] - 1. A sequence
// here is one KV head of one request, so n is the number of heads in a layer times the number of requests.
//   lengths  [n] how many rows each sequence uses, for example from kvb_budgets()
//   slack    how many free rows to leave after each sequence for tokens to come. Kernels must then be given `lengths`
//            too (seqused).
//   block    0 or 1 to count rows. Otherwise pages of `block` rows are counted, and each sequence begins a new page.
//   cu       [n + 1], the result
//   cap      the number of elements that `cu` has room for; fails with KVB_CAPACITY if that is too few
// Fails with KVB_UNSUPPORTED if the end is beyond 2^31 - 1; the contents of `cu` are then undefined.
KVB_API kvb_status kvb_cu_seqlens(const uint32_t *lengths, size_t n, uint32_t slack, uint32_t block, int32_t *cu,
                                  size_t cap, kvb_error *err);

// ---- Learned rankings ----------------------------------------------------------------------------

// A ranking that `kvbudget learn` has fitted, from a file of its own or from a table: for each KV head, a weighted sum
// of what several cheap metrics say about a token. It never changes once it is open.
typedef struct kvb_ranking kvb_ranking;
#define KVB_RANK_FEATURES_MAX 16

// What a ranking says about itself. The ranking owns the strings and arrays.
typedef struct kvb_ranking_info {
    const char *name; // "learned:" and 12 digits of its SHA-256: the metric of tables that were made with it
    uint32_t n_layers, n_kv_heads;
    uint32_t n_features; // F, 1 .. KVB_RANK_FEATURES_MAX
    uint32_t n_columns;  // P, the number of weights of a head: for z and z|z| of each feature; with layer_mean for the
                         // mean of z of each; if frozen, mean and 1 / deviation of each; for recency; and a constant
    const char *const *metrics; // [F] canonical names of the metrics whose scores kvb_rank() takes, in this order
    const int *logarithm;       // [F] nonzero if the feature is the logarithm of the score
    uint32_t sink;            // how many first tokens are left out of means and deviations; pass it to kvb_select() too
    const char *model_sha256; // of the weights that it was fitted for, or ""
    const char *about;        // how it was fitted, text of a JSON object
    const double *weights;    // [n_layers, n_kv_heads, P]
    int layer_mean;           // nonzero if a head's scores also depend on the other KV heads of its layer
    int frozen;               // nonzero if means and deviations are those of the calibration, so that a token's score
                              // stays the same when others are evicted
} kvb_ranking_info;

// Reads a ranking from the file that `kvbudget learn` wrote, or from a table that carries one. The second function
// reads it from memory, which is copied. Both check the content against the hash in the ranking's name, and fail as
// kvb_table_open() and kvb_table_open_memory() do.
KVB_API kvb_status kvb_ranking_open(kvb_ranking **out, const char *path, kvb_error *err);
KVB_API kvb_status kvb_ranking_open_memory(kvb_ranking **out, const void *data, size_t size, const char *name,
                                           kvb_error *err);
// Frees a ranking that was opened with one of these two functions. If `ranking` is NULL, this does nothing. Do not pass
// what kvb_table_ranking() returns, which belongs to the table.
KVB_API void kvb_ranking_close(kvb_ranking *ranking);
// Returns what a ranking says about itself; valid until it is closed. Returns NULL only if `ranking` is NULL.
KVB_API const kvb_ranking_info *kvb_ranking_about(const kvb_ranking *ranking);
// Returns the ranking that the table was made with, or NULL if the table is for a plain metric. The table owns it.
KVB_API const kvb_ranking *kvb_table_ranking(const kvb_table *table);

// Computes the scores of one head's tokens by the table's ranking, for kvb_select(). Let x be a token's score by metric
// f, or the logarithm of max(score, 1e-12), and z = (x - mean) / deviation, taken over the tokens sink to T - 1, or if
// the ranking is frozen over those of the calibration; z is 0 for the sinks. Then
//     out[j] = sum over f of (w_f z + w'_f z |z|)  -  w_r log(T - j)  +  w_1
//   features  [F] pointers to the scores [n_tokens] of the ranking's metrics, in its order
//   out       [n_tokens], the result; must not overlap the features
// Takes time in proportion to F n_tokens. Fails with KVB_ARGUMENT if a pointer is NULL, the head is out of range, the
// table has no ranking, or the ranking has layer_mean; and with KVB_NUMERIC if a score is not finite, with a message
// that names feature and token. The contents of `out` are then undefined.
KVB_API kvb_status kvb_rank(const kvb_table *table, uint32_t layer, uint32_t head, const float *const *features,
                            uint32_t n_tokens, float *out, kvb_error *err);

// Does the same for all KV heads of a layer. It takes every ranking; one with layer_mean adds what the layer's heads
// find the token to be worth on average:
//     out[g,j] = ... + sum over f of u_f (mean over the layer's heads of z_f[.,j])
//   features  [F] pointers to scores [n_kv_heads, n_tokens]
//   out       [n_kv_heads, n_tokens], the result; must not overlap the features
// With layer_mean, tensor-parallel ranks need each other's scores. Needs 16 KiB of stack. Fails as kvb_rank() does.
KVB_API kvb_status kvb_rank_layer(const kvb_table *table, uint32_t layer, const float *const *features,
                                  uint32_t n_tokens, float *out, kvb_error *err);

// ---- Refitting ----------------------------------------------------------------------------------

// After eviction, the kept slots need not hold what the model wrote: some can hold summaries of many evicted tokens,
// keys can attract the attention that went to evicted tokens, and values can stand in for evicted ones. kvb_refit()
// changes the kept keys and values of one KV head so that its output for reference queries comes near that of the full
// cache. The cache keeps its shape, so decoding costs nothing more (docs/refit.md).
typedef struct kvb_refit_head {
    uint32_t n_tokens;         // T
    uint32_t head_dim;         // d, at most 65536
    uint32_t n_kept;           // t, 1 to T
    uint32_t n_queries;        // n. With fewer than 4 the head is left "bare", as it is; 256 to 512 are usual
    const float *k, *v;        // [T, d] as cached, keys after RoPE
    const uint32_t *positions; // [t] that are kept, ascending, for example from kvb_select()
    const float *queries;      // [n, d] of all query heads of the group, already multiplied by the model's scale
                               // (usually 1 / sqrt(d)) and rotated to positions after the context. The context's own
                               // queries, taken before RoPE and rotated to positions T to T + 255, serve well
} kvb_refit_head;

enum {
    KVB_REFIT_KEYS = 1,     // keys were shifted, or with an explicit bias, the bias is not 0
    KVB_REFIT_VALUES = 2,   // values were changed
    KVB_REFIT_SUMMARIES = 4 // the slots with the least attention hold summaries of tokens that are not kept
};

typedef struct kvb_refit_result {
    int changed;                      // KVB_REFIT_* bits; 0: the head is bare, its kept keys and values are unchanged
    int judged;                       // nonzero if the errors below were measured
    double error_before, error_after; // mean square of the output's error over the queries that were left out of the
                                      // fit, divided by the variance of the full outputs; after <= before
} kvb_refit_result;

// Computes how many bytes of working memory kvb_refit() needs for a head of this shape. Does not read the pointers in
// `h`. The result for a layer's largest n_kept is enough for all of its heads. Fails with KVB_UNSUPPORTED if a size_t
// cannot hold the number, and with KVB_ARGUMENT if the shape is out of range or a pointer is NULL.
KVB_API kvb_status kvb_refit_bytes(const kvb_refit_head *h, size_t *bytes, kvb_error *err);

// Refits one head. Of every 64 queries the last 16 are left out, or the last of four equal blocks of fewer; so
// neighbouring queries should be of neighbouring tokens. With p_ij the full attention of query i, o_i its output, P_ij
// the attention over the kept slots, and A = Q'Q + 0.01 mean I:
//     summaries, in the 3t / 4, 3t / 8 or 3t / 16 slots whose tokens have the least max_i p_ij. These tokens and the
//     evicted ones are divided among as many centres: each token goes to the nearest, by (k - k_c)'A(k - k_c), and each
//     next centre is the token whose distance from the nearest one, times its mean p_ij, is largest. Of the tokens S of
//     a centre, k_S and v_S are means with weights mean_i p_ij, and
//         k'_S = k_S + A^-1 Q'(log sum over S of exp(q.k_j) - q.k_S)
//     w = argmin over w >= 0 of sum_i (sum_j p_ij w_j - 1)^2      beta_j = log w_j, limited to [-3, 3]
//     k''_j = k'_j + beta_j u,  u = A^-1 Q'1                      so that q.u is near 1
//     V' = V + (P'P + 0.03 mean I)^-1 P'(O - P V)                 no row moves by more than half of its length
// (the bias by Attention Matching, arXiv 2602.16284; p_ij in w are shares of the slots as they are by then). The
// left-out queries decide what is used: first how many summaries, if any, then whether shifted keys help, then
// whether changed values do. If nothing helps, or more than half of the tokens are kept, the head stays bare.
//   work    work_bytes bytes of working memory, with any alignment; fails with KVB_CAPACITY if that is too few
//   k, v    [t, d], the results; must not overlap the head's arrays
//   bias    NULL, or [t]: an additive bias of the attention scores instead of shifted keys, for engines that have a
//           mask; it is 0 where the head needs none. Summaries have keys of their own all the same
//   out     what was chosen
// Allocates nothing and starts no threads; any number of threads may call it, each with its own working memory. The
// same input gives the same bits on the same processor. Fails with KVB_NUMERIC if a number of the head is not finite;
// the results are then those of a bare head. Other failures leave the results alone.
KVB_API kvb_status kvb_refit(const kvb_refit_head *h, void *work, size_t work_bytes, float *k, float *v, float *bias,
                             kvb_refit_result *out, kvb_error *err);

// ---- Formats ------------------------------------------------------------------------------------

// How a KV head's keys, or its values, are stored; table files of version 2 use the same numbers. The integers are
// KIVI's (arXiv 2402.02750): a group of KVB_PACK_GROUP numbers shares a least number and a step. In keys a group is
// neighbouring tokens of one channel, in values neighbouring channels of one token.
typedef enum kvb_packing { KVB_PACK_BF16 = 0, KVB_PACK_INT8 = 1, KVB_PACK_INT4 = 2, KVB_PACK_INT2 = 3 } kvb_packing;
typedef enum kvb_side { KVB_KEYS = 0, KVB_VALUES = 1 } kvb_side;

#define KVB_PACKINGS 4
#define KVB_PACK_GROUP 32

// Returns "bf16", "int8", "int4" or "int2", and NULL for other numbers.
KVB_API const char *kvb_packing_name(kvb_packing packing);

// Computes how each head stores the tokens that it keeps, from the row of the table that is nearest to the ratio. It is
// bf16 everywhere for a table of version 1 or a ratio of 0 or less, and for layers without a budget.
//   formats  [n_layers, n_kv_heads, 2], the result: the kvb_packing of the head's keys, and that of its values
//   cap      the number of elements that `formats` has room for; fails with KVB_CAPACITY if that is too few
// If a table has formats, a row's ratio is the share of a full bfloat16 cache's bytes that is saved, and kvb_budgets()
// keeps more than the share 1 - ratio of the tokens. On failure `formats` is left alone.
KVB_API kvb_status kvb_formats(const kvb_table *table, double ratio, uint8_t *formats, size_t cap, kvb_error *err);
// Returns nonzero if the table has formats (version 2).
KVB_API int kvb_table_has_formats(const kvb_table *table);

// Returns how many bytes n_tokens rows of keys or values take, including what each group shares, or 0 for an unknown
// packing. The result cannot overflow if n_tokens * head_dim * 8 fits in a size_t.
KVB_API size_t kvb_packed_bytes(kvb_packing packing, kvb_side side, uint32_t n_tokens, uint32_t head_dim);

// Pack rows [n_tokens, head_dim] into kvb_packed_bytes() bytes, and unpack them. bf16 rounds to nearest; an integer is
// off by at most half its group's step. A group is stored as its least number, rounded down, and its step, rounded up,
// both as bfloat16, and then its codes, from the lowest bits of the first byte on; all little-endian. Groups are in the
// order of their tokens, then of their channels. Nothing is allocated. kvb_pack() fails with KVB_NUMERIC if a number
// that becomes an integer is not finite or too large for bfloat16; `packed` is then undefined. Both fail with
// KVB_ARGUMENT for NULL or an unknown packing.
KVB_API kvb_status kvb_pack(kvb_packing packing, kvb_side side, const float *rows, uint32_t n_tokens, uint32_t head_dim,
                            void *packed, kvb_error *err);
KVB_API kvb_status kvb_unpack(kvb_packing packing, kvb_side side, const void *packed, uint32_t n_tokens,
                              uint32_t head_dim, float *rows, kvb_error *err);

// ---- Attention ----------------------------------------------------------------------------------

// How the numbers of keys and values are stored: float, or the 16 bits of bfloat16 or IEEE half precision, in the
// machine's byte order and aligned as uint16_t.
typedef enum kvb_rows_format { KVB_ROWS_F32 = 0, KVB_ROWS_BF16 = 1, KVB_ROWS_F16 = 2 } kvb_rows_format;

#define KVB_ATTEND_GROUP_MAX 128
#define KVB_ATTEND_HEAD_DIM_MAX 512

// A cache as kvb_attend() reads it: n_heads sequences, each one KV head of one request, with a length of its own. You
// own all arrays, and may append between calls. Optional fields that are 0 or NULL take their defaults. Head h uses the
// rows of k and v from row begin[h] on, with room up to begin[h + 1]. With `pages`, its rows i * page_rows to (i + 1) *
// page_rows - 1 are instead page pages[begin[h] + i] of k and v. kvb_cu_seqlens() computes `begin` in either form.
typedef struct kvb_attend_cache {
    uint32_t n_heads;  // KV heads of a layer, times requests; or of all layers
    uint32_t group;    // query heads of one KV head, 1 to KVB_ATTEND_GROUP_MAX
    uint32_t head_dim; // d, a multiple of 8 up to KVB_ATTEND_HEAD_DIM_MAX
    kvb_rows_format format;
    const void *k, *v;       // [n_rows, d], keys after RoPE
    size_t n_rows;           // rows in k and v, in use or not; bounds are checked with it
    const int32_t *begin;    // [n_heads + 1], in rows or pages
    const uint32_t *lengths; // [n_heads] rows in use; 0 is allowed, and gives outputs of 0
    uint32_t page_rows;      // rows of a page; 0 without pages
    const int32_t *pages;    // [begin[n_heads]]; NULL without page_rows
    float scale;             // multiplies q . k; 0 means 1 / sqrt(d)
    float softcap;           // if not 0, scaled scores become softcap tanh(score / softcap) (Gemma 2: 50)
    const float *bias;       // [n_rows] added last to each row's score (kvb_refit()); NULL: none. -INFINITY hides a row
    const float *sinks;      // [n_heads, group] a score that takes weight but has no value (gpt-oss); NULL: none
} kvb_attend_cache;

// Computes the attention of one token, one decode step of one layer: softmax(scale q.k + bias) v over all rows of each
// head.
//   q            [n_heads, group, d]
//   first, last  the heads `first` to last - 1 are computed and others left alone. Threads can share a step by calling
//                this with ranges of their own; heads differ in length, so let them take one or a few at a time
//   out          [n_heads, group, d], the result; must not overlap other arrays
// Takes time in proportion to the rows, which are read once for the whole group. Allocates nothing, starts no threads
// and needs 40 KiB of stack. Sums are in float32. The bits of a head's output depend on its own rows, their order and
// the processor, not on pages. Fails with KVB_ARGUMENT if a shape, `begin` or a page is out of range; `out` is then
// left alone. Fails with KVB_NUMERIC if a head's output is not finite, because query, keys, values (even of hidden
// rows) or bias contain NaN or +infinity, or scores are beyond float32. The message names the head; the outputs of that
// head and those after it are undefined.
KVB_API kvb_status kvb_attend(const kvb_attend_cache *cache, const float *q, uint32_t first, uint32_t last, float *out,
                              kvb_error *err);

#ifdef __cplusplus
}
#endif
#endif
