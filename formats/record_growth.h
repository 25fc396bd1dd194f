// Records that grow: merging the attributes of two records of one model, for merging files and for adding to a finished
// record.
// Records that belong together have equal attributes except these: `metrics` (JSON text of an object, one member per
// metric), `calibration_sha256` and `calibration_files` (which texts), `given_answers` (questions with answers in
// them), `max_questions`, and `tokenizer_sha256`, which one of two may lack.
#pragma once
#include "formats/record.h"

// How the texts of a second record, or those that are added, relate to the texts of the first.
typedef enum record_relation {
    RECORD_SAME_TEXTS, // one record's texts are among the other's
    RECORD_ALL_TEXTS,  // the second has all texts of the first and more: its attributes about texts and answers count
    RECORD_NEW_TEXTS,  // no text is in both: `given_answers` are added up
} record_relation;

// Sets in `to` which calibration files a record is made of: `files` is the SHA-256 of each, 64 digits, commas between.
// `calibration_sha256` becomes that of a single file, so that `sha256sum FILE` shows it, and of several the SHA-256 of
// their digits one after the other; `calibration_files` becomes `files` where there are several, unless that is longer
// than an attribute can be.
void record_set_calibration(cJSON *to, const char *files);

// Finds the relation by the lists of calibration files: RECORD_SAME_TEXTS or RECORD_NEW_TEXTS. Fails with KVB_MISMATCH
// if the lists overlap but each has files that the other lacks.
kvb_status record_relate(record_relation *out, const char *first_name, const cJSON *first, const char *second_name,
                         const cJSON *second, kvb_error *err);

// Makes the attributes of a record that holds all that `first` and `second` hold; the caller frees *out. Metrics stay
// in the order of their first mention. Fails with KVB_MISMATCH, naming both files, if anything else differs or one
// metric has two settings.
kvb_status record_join_attributes(cJSON **out, const char *first_name, const cJSON *first, const char *second_name,
                                  const cJSON *second, record_relation relation, kvb_error *err);
