// What the reader, the writer and the assembler of records share. formats/README.md gives the layout.
#pragma once
#include "formats/atomic_file.h"
#include "formats/h5.h"
#include "formats/names.h"
#include "formats/record.h"

typedef struct context_entry {
    record_context_info info; // its pointers lead to the fields below
    char *id;
    uint32_t order; // place in the calibration
    record_question_info *questions;
    char **metrics; // NULL-terminated
} context_entry;

struct record {
    h5_file file; // its name is `path`
    char *path;
    record_shape shape;
    cJSON *attributes;
    size_t n;
    context_entry *contexts; // [n]
};

kvb_status record_shape_check(const record_shape *shape, const char *name, kvb_error *err);

// Whether [L,G,n_tokens] can be stored: HDF5 keeps a chunk, here one layer, below 2^32 bytes.
kvb_status record_tokens_check(const record_shape *shape, uint64_t n_tokens, const char *name, kvb_error *err);

// Check, write and read a record's root, or that of a folder of parts: format, version, shape, the caller's attributes.
kvb_status record_attributes_check(const cJSON *attributes, const char *name, kvb_error *err);
kvb_status record_root_write(const h5_file *f, const record_shape *shape, const cJSON *attributes, kvb_error *err);
kvb_status record_root_read(const h5_file *f, record_shape *shape, cJSON **attributes, kvb_error *err);

// The first thing in which two roots differ.
typedef struct root_difference {
    char name[80], held[80], given[80];
} root_difference;
bool record_root_differs(root_difference *out, const record_shape *held_shape, const cJSON *held,
                         const record_shape *given_shape, const cJSON *given);

// ---- The folder of parts of an unfinished run ----

#define RECORD_HEAD "head.h5"              // the root; without it the folder holds nothing that counts
char *parts_path(const char *record_path); // malloc'd
bool parts_have_head(const char *folder);

const record_context_info *record_find_context(const record *r, const char *id); // NULL if it has none

// Checks for RECORD_ADD that the base's attributes can be merged into `attributes` without a different model, option or
// metric. *metrics receives the metrics of `attributes`, one member each; the caller frees it.
kvb_status record_check_base(cJSON **metrics, const record *base, const cJSON *attributes, kvb_error *err);
// Whether the context has scores of every member of `metrics`; always true if `metrics` is NULL.
bool record_has_metrics(const record_context_info *c, const cJSON *metrics);
// ---- What contexts and questions hold (record_pieces.c) ----

// In the order in which they are written: first those of a context, then those of a question.
typedef enum piece_kind {
    PIECE_TOKENS,
    PIECE_SCORES,
    PIECE_SUFFIX,
    PIECE_ANSWER,
    PIECE_ORACLE,
    PIECE_CURVES,
    PIECE_GAINS,
    PIECE_PACKINGS,
    RECORD_PIECES
} piece_kind;

typedef struct record_piece {
    const char *name;                                      // of the dataset or group
    enum { PIECE_IDS, PIECE_ARRAY, PIECE_BY_METRIC } form; // a list, an array, or a group of arrays
    bool optional;                                         // a question may lack the group
    bool positive;                                         // numbers are finite and >= 0; else only no NaN
    uint32_t rows, columns;                                // of an array's layer; 0: KV heads, tokens
} record_piece;
extern const record_piece record_pieces[RECORD_PIECES];

// Fails with KVB_NUMERIC if a number is not allowed in this piece; `where` begins the message.
kvb_status piece_check(const record_shape *s, piece_kind kind, uint32_t n_tokens, const float *values,
                       const char *where, kvb_error *err);
kvb_status piece_write(const h5_file *f, const record_shape *s, hid_t group, const char *name, piece_kind kind,
                       uint32_t n_tokens, const float *values, kvb_error *err);
// Bytes of one array and of what HDF5 keeps about it.
uint64_t piece_bytes(const record_shape *s, piece_kind kind, uint64_t n_tokens);

// Opens /contexts/<id>, or /contexts/<id>/questions/<number> when a number is given, for reading.
kvb_status record_open_group(hid_t *out, const h5_file *f, const char *id, const uint32_t *number, kvb_error *err);
// Checks the structure of a piece in such a group. *count receives the number of ids or of arrays, *names the names of
// the arrays, which the caller frees; both may be NULL.
kvb_status piece_scan(const record *r, hid_t group, piece_kind kind, uint32_t n_tokens, uint32_t *count, char ***names,
                      kvb_error *err);
// Read and check the numbers themselves; `group` holds the dataset.
kvb_status piece_read_array(const record *r, hid_t group, const char *name, piece_kind kind, uint32_t n_tokens,
                            float *out, kvb_error *err);
kvb_status piece_read_ids(const h5_file *f, hid_t group, const char *name, uint32_t n, int32_t *out, kvb_error *err);

// ---- One record out of pieces of other files ----

typedef struct record_output {
    atomic_file file;
    h5_file h5;
    record_shape shape;
    hid_t contexts, context, questions; // the groups that are open; the last two of the context under way
    uint32_t n_tokens, n_contexts;      // T of the context under way; contexts so far
} record_output;

// `bytes` is the size of all that will be copied; it is reserved on the disk first. Call record_output_end afterwards,
// even after a failure: it puts the record in place if `status` is KVB_OK, and otherwise leaves nothing behind.
kvb_status record_output_begin(record_output *out, const char *path, const record_shape *shape, const cJSON *attributes,
                               uint64_t bytes, kvb_error *err);
kvb_status record_output_end(record_output *out, kvb_status status, kvb_error *err);
// Copies context `id`, which becomes the next one, from the n >= 1 files that have it; then its questions, by number.
// Each piece, and each metric's array, comes from the first file that has it.
kvb_status record_output_context(record_output *out, const char *id, const h5_file *const *from, size_t n,
                                 kvb_error *err);
kvb_status record_output_question(record_output *out, const char *id, uint32_t number, const h5_file *const *from,
                                  size_t n, kvb_error *err);

// Compares what two records hold of a context of n_tokens tokens, or of a question if a number is given, bit by bit;
// metrics that only one has are ignored. Fails with KVB_MISMATCH and names what differs.
kvb_status record_compare(const record *a, const record *b, const char *id, uint32_t n_tokens, const uint32_t *number,
                          kvb_error *err);
