// kvbudget statistics: means and covariances of queries, over texts of their own, for Expected Attention with stored
// statistics.
#include "formats/calib.h"
#include "formats/file_read.h"
#include "profiler/model/forward.h"
#include "profiler/text/utf8.h"
#include "runtime/fail.h"
#include "tools/cmd/opened_model.h"
#include "tools/device.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

typedef struct statistics_command {
    const char *output;
    uint64_t n_texts, characters, skip, threads;
    opened_model opened;
    forward *f;
    query_gather *gather;
    uint64_t done; // texts
    progress bar;
} statistics_command;

// Bytes of the first n characters of UTF-8, or of all when there are fewer.
static size_t first_characters(const char *text, size_t size, uint64_t n)
{
    size_t at = 0;
    while (at < size && n > 0) {
        at++;
        while (at < size && ((unsigned char)text[at] & 0xC0) == 0x80) at++;
        n--;
    }
    return at;
}

static kvb_status add_piece(statistics_command *c, const char *text, size_t size, kvb_error *err)
{
    int32_t *ids = NULL;
    size_t n = 0;
    kvb_status status = model_text_encode(&c->opened.text, TEXT_ALONE, text, size, &ids, &n, err);
    layer_observer observer = query_gather_observer(c->gather);
    if (status == KVB_OK && n > 0) status = forward_prefill(c->f, ids, (uint32_t)n, &observer, NULL, NULL, err);
    free(ids);
    c->done += status == KVB_OK;
    progress_update(&c->bar, (double)c->done, (double)c->n_texts, "texts");
    if (status == KVB_OK && cli_stop_requested) status = kvb_fail(err, KVB_INTERRUPTED, "stopped");
    return status;
}

// Cuts a text into pieces of that many characters; an end that is shorter is left out unless it is all there is.
static kvb_status add_text_pieces(statistics_command *c, const char *text, size_t size, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t at = 0; at < size && c->done < c->n_texts && status == KVB_OK;) {
        size_t n = first_characters(text + at, size - at, c->characters);
        if (at && at + n == size && first_characters(text + at, n, c->characters - 1) == n) break;
        status = add_piece(c, text + at, n, err);
        at += n;
    }
    return status;
}

static kvb_status add_file(statistics_command *c, const char *path, kvb_error *err)
{
    size_t length = strlen(path);
    kvb_status status;
    if (length > 6 && strcmp(path + length - 6, ".jsonl") == 0) {
        calib_file file;
        status = calib_load(&file, path, err);
        for (size_t i = 0; status == KVB_OK && i < file.count; i++)
            if (file.contexts[i].context)
                status = add_text_pieces(c, file.contexts[i].context, strlen(file.contexts[i].context), err);
        calib_free(&file);
        return status;
    }
    file_view view;
    status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = utf8_check_text(path, (const char *)view.data, view.size, err);
    if (status == KVB_OK) status = add_text_pieces(c, (const char *)view.data, view.size, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    return status;
}

static kvb_status gather_statistics(statistics_command *c, char **paths, size_t n, kvb_error *err)
{
    const model_config *m = &c->opened.m->config;
    // A character is at most four bytes, and a byte at most a token.
    uint64_t longest = c->characters * 4 < m->context_length ? c->characters * 4 : m->context_length;
    forward_plan plan = {(uint32_t)longest, 1, 1, false, false};
    kvb_status status = forward_open(&c->f, c->opened.m, &plan, err);
    if (status == KVB_OK) c->gather = query_gather_open(m->n_layers, m->n_heads, m->head_dim, (uint32_t)c->skip);
    for (size_t i = 0; i < n && status == KVB_OK; i++) status = add_file(c, paths[i], err);
    return status;
}

static kvb_status run_statistics(statistics_command *c, const backend *device, char **operands, size_t n, bool quiet,
                                 kvb_error *err)
{
    query_statistics *found = NULL;
    kvb_status status = opened_model_open(&c->opened, operands[0], device, NULL, err);
    progress_begin(&c->bar, "statistics", quiet);
    if (status == KVB_OK) status = gather_statistics(c, operands + 1, n - 1, err);
    uint64_t queries = c->gather ? query_gather_count(c->gather) : 0;
    if (status == KVB_OK) status = query_gather_finish(c->gather, &found, err);
    if (status == KVB_OK) memcpy(found->model_sha256, c->opened.m->sha256, sizeof found->model_sha256);
    if (status == KVB_OK) status = query_statistics_write(found, c->output, c->done, queries, err);
    progress_end(&c->bar, "%" PRIu64 " texts, %" PRIu64 " queries of every head", c->done, queries);
    query_statistics_free(found);
    query_gather_close(c->gather);
    forward_close(c->f);
    opened_model_close(&c->opened);
    return status;
}

static int statistics_main(const cli_command *self, int argc, char **argv)
{
    statistics_command c = {.n_texts = 100, .characters = 1000, .skip = 4};
    const char *backend_name = "cpu", *compute = "f32";
    bool quiet = false;
    const cli_option options[] = {
        {"output", 'o', CLI_WRITES(FILE_STATISTICS), &c.output, "FILE", "the statistics to write (.safetensors)"},
        {"texts", 'n', CLI_COUNT, &c.n_texts, "N", "use at most N pieces of text (100)"},
        {"characters", 'c', CLI_COUNT, &c.characters, "N", "characters of a piece (1000)"},
        {"sinks", 0, CLI_COUNT, &c.skip, "N", "leave out the first N queries of every piece (4)"},
        {"backend", 'b', CLI_TEXT, &backend_name, "NAME", "cpu, ref or cuda"},
        {"compute", 0, CLI_TEXT, &compute, "KIND", DEVICE_COMPUTE_HELP},
        {"threads", 0, CLI_COUNT, &c.threads, "N", "OpenMP threads (default: all cores)"},
        {"quiet", 'q', CLI_FLAG, &quiet, NULL, "no progress"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    kvb_error err = {0};
    if (code == EXIT_DONE && (argc - first < 2 || !c.output))
        code = cli_usage_error(self, "expected: kvbudget %s", self->synopsis);
    if (code == EXIT_DONE && (c.n_texts < 1 || c.characters < 1 || c.characters > 1 << 24 || c.skip > 1 << 20))
        code =
            cli_usage_error(self, "--texts: expected 1 or more; --characters: 1 to 16777216; --sinks: at most 1048576");
    const backend *device = code == EXIT_DONE ? device_find(self, backend_name, compute) : NULL;
    if (code == EXIT_DONE && !device) code = EXIT_USAGE;
    if (code == EXIT_DONE) cli_catch_signals();
    if (code == EXIT_DONE) code = device_take_threads(self, c.threads);
    if (code == EXIT_DONE && run_statistics(&c, device, argv + first, (size_t)(argc - first), quiet, &err) != KVB_OK)
        code = cli_failed(self, &err);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_statistics = {
    .name = "statistics",
    .synopsis = "statistics MODEL TEXT... -o FILE.safetensors [OPTION]...",
    .summary = "store means and covariances of queries, for Expected Attention on any context",
    .details =
        "Expected Attention predicts the attention of future queries. As published it uses mean and covariance of the\n"
        "context's own queries; with stored statistics it takes those of other texts, and scores tokens without\n"
        "any query: metric `ea:stored=1` with --query-statistics FILE in profile, eval and task.\n"
        "\n"
        "Texts (any text file, or .jsonl with contexts) are cut into pieces of --characters, the first --texts pieces "
        "are\n"
        "prefilled one by one, and the queries before RoPE are gathered, without each piece's first --sinks. The file "
        "holds\n"
        "query_mean [layers, heads, size] and query_cov [layers, heads, size, size], as kvpress's\n"
        "ExpectedAttentionStats does, so either program reads the other's files.\n"
        "\n"
        "Examples:\n"
        "  kvbudget statistics model.gguf book.txt -o queries.safetensors\n"
        "  kvbudget profile model.gguf calib.jsonl -o run.h5 --metric ea:stored=1 --query-statistics "
        "queries.safetensors\n",
    .run = statistics_main,
};
