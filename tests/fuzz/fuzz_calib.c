// The reader of calibration lines: lines that it accepts must have valid contents.
#include "formats/calib.h"
#include "tests/fuzz/fuzz.h"

static void check(int holds)
{
    if (!holds) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    calib_file file;
    kvb_error err;
    if (calib_parse(&file, data, size, "fuzz.jsonl", &err) != KVB_OK) {
        check(file.contexts == NULL && strncmp(err.message, "fuzz.jsonl: ", 12) == 0);
        return 0;
    }
    check(file.count > 0 && strlen(file.sha256) == 64);
    for (size_t i = 0; i < file.count; i++) {
        const calib_context *c = &file.contexts[i];
        check(c->sample_id && c->answer_prefix && c->n_questions > 0 && !c->context == !!c->context_ids);
        for (size_t q = 0; q < c->n_questions; q++) check(!c->questions[q].text == !!c->questions[q].ids);
    }
    calib_free(&file);
    return 0;
}
