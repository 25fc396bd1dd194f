// Records that grow: attributes of records of one model that become one, and the writer that adds to a finished record.
//
// What belongs together has equal attributes but for these: `metrics` (JSON text of an object, one member per metric),
// `calibration_sha256` and `calibration_files` (which texts), `given_answers` (questions with answers in them),
// `max_questions`, and `tokenizer_sha256`, which one of two may lack.
#pragma once
#include "formats/record.h"

// How the texts of a second record, or of what is added, stand to those of the first.
typedef enum record_relation {
    RECORD_SAME_TEXTS, // one record's are among the other's
    RECORD_ALL_TEXTS,  // the second's are all of the first's and more: what it says of texts and answers counts
    RECORD_NEW_TEXTS,  // no text is in both: `given_answers` are added up
} record_relation;

// Sets in `to` which calibration files a record is made of: `files` is the SHA-256 of each, 64 digits, commas between.
// `calibration_sha256` becomes that of a single file, so that `sha256sum FILE` shows it, and of several the SHA-256 of
// their digits one after the other; `calibration_files` becomes `files` where there are several, unless that is longer
// than an attribute can be. KVB_MEMORY.
kvb_status record_set_calibration(cJSON *to, const char *files, kvb_error *err);

// Which of them it is, by the lists of calibration files: RECORD_SAME_TEXTS or RECORD_NEW_TEXTS. KVB_MISMATCH when each
// has files that the other lacks, and others that it has.
kvb_status record_relate(record_relation *out, const char *first_name, const cJSON *first, const char *second_name,
                         const cJSON *second, kvb_error *err);

// The attributes of a record of all that `first` and `second` have; *out is the caller's. Metrics stay in the order of
// their first mention. KVB_MISMATCH, with both names, when anything else differs or one metric has two settings.
kvb_status record_join_attributes(cJSON **out, const char *first_name, const cJSON *first, const char *second_name,
                                  const cJSON *second, record_relation relation, kvb_error *err);
