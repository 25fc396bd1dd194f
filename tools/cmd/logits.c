// kvbudget logits: next-token logits of every position of a text, to hold the forward pass against other engines.
#include "formats/file_read.h"
#include "formats/need.h"
#include "formats/npy.h"
#include "profiler/model/forward.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include "tools/cmd/opened_model.h"
#include "tools/device.h"
#include <stdlib.h>
#include <string.h>

typedef struct logits_command {
    const char *output;
    const backend *device;
    bool bos;
    uint64_t max_tokens;
} logits_command;

// The text as token ids; a .npy file of integers is taken as ids.
static kvb_status read_ids(int32_t **ids, size_t *n, const opened_model *from, const char *path,
                           const logits_command *o, kvb_error *err)
{
    const model *m = from->m;
    file_view view;
    npy_array array;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    if (kvb_ends_with(path, ".npy")) {
        status = npy_parse(&array, view.data, view.size, path, err);
        *ids = need(status == KVB_OK ? array.count : 0, sizeof **ids, "token ids");
        if (status == KVB_OK) status = npy_to_i32(&array, *ids, path, err);
        *n = status == KVB_OK ? array.count : 0;
    } else {
        status = model_text_encode(&from->text, TEXT_ALONE, (const char *)view.data, view.size, ids, n, err);
        if (status == KVB_OK && o->bos) {
            *ids = need_more(*ids, *n + 1, sizeof **ids, "token ids");
            memmove(*ids + 1, *ids, *n * sizeof **ids);
            (*ids)[0] = from->text.special.bos;
            ++*n;
        }
    }
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    if (status == KVB_OK && o->max_tokens && *n > o->max_tokens) *n = o->max_tokens;
    if (status == KVB_OK && (*n == 0 || *n > m->config.context_length))
        status = kvb_fail(err, KVB_ARGUMENT, "%s: %zu tokens, expected 1 to %u; --max-tokens N cuts", path, *n,
                          m->config.context_length);
    return status;
}

static kvb_status write_logits(const logits_command *o, const char *model_path, const char *text_path, kvb_error *err)
{
    opened_model opened = {.m = NULL};
    forward *f = NULL;
    int32_t *ids = NULL;
    float *logits = NULL;
    size_t n = 0;
    const opened_wishes wishes = {.text = {.without_tokenizer = kvb_ends_with(text_path, ".npy")}};
    kvb_status status = opened_model_open(&opened, model_path, o->device, &wishes, err);
    const model *m = opened.m;
    if (status == KVB_OK) status = read_ids(&ids, &n, &opened, text_path, o, err);
    if (status == KVB_OK) {
        forward_plan plan = {(uint32_t)n, 1, 1, false, false};
        status = forward_open(&f, m, &plan, err);
    }
    if (status == KVB_OK) {
        logits = need(n * m->config.vocabulary, sizeof *logits, "logits");
        status = forward_prefill(f, ids, (uint32_t)n, NULL, NULL, logits, err);
    }
    if (status == KVB_OK)
        status = npy_write(o->output, NPY_F32, 2, (const uint64_t[]){n, m->config.vocabulary}, logits, err);
    free(logits);
    free(ids);
    forward_close(f);
    opened_model_close(&opened);
    return status;
}

static int run_logits(const cli_command *self, int argc, char **argv)
{
    logits_command o = {0};
    const char *backend_name = "cpu", *compute = "f32";
    const cli_option options[] = {
        {"output", 'o', CLI_WRITES(FILE_ARRAY), &o.output, "FILE",
         "the array [tokens, vocabulary] to write, float32 (.npy)"},
        {"max-tokens", 0, CLI_COUNT, &o.max_tokens, "N", "use only the first N tokens"},
        {"bos", 0, CLI_FLAG, &o.bos, NULL, "begin a text with BOS; token ids are taken as they are"},
        {"backend", 'b', CLI_TEXT, &backend_name, "NAME", "cpu, or ref (plain C, slow, the judge)"},
        {"compute", 0, CLI_TEXT, &compute, "KIND", DEVICE_COMPUTE_HELP},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code != EXIT_DONE) return code < 0 ? EXIT_DONE : code;
    if (argc - first != 2 || !o.output) return cli_usage_error(self, "expected: kvbudget %s", self->synopsis);
    if (!(o.device = device_find(self, backend_name, compute))) return EXIT_USAGE;
    if ((code = device_take_threads(self, 0)) != EXIT_DONE) return code;
    kvb_error err = {0};
    return write_logits(&o, argv[first], argv[first + 1], &err) == KVB_OK ? EXIT_DONE : cli_failed(self, &err);
}

const cli_command cmd_logits = {
    "logits",
    "logits MODEL TEXT|IDS.npy -o LOGITS.npy [OPTION]...",
    "write the next-token logits of every position, to compare with other engines",
    "Runs the text (or token ids, from a .npy file of integers) through the model and writes the logits of\n"
    "all positions. tests/peer/compare_logits.py compares them with transformers.\n"
    "\n"
    "Example:\n"
    "  kvbudget logits model.gguf story.txt -o logits.npy --max-tokens 1500\n",
    run_logits,
};
