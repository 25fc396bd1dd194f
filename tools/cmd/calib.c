// kvbudget calib: calibration data from texts that nobody has written questions for.
#include "formats/atomic_file.h"
#include "formats/file_read.h"
#include "profiler/calib_make.h"
#include "profiler/text/model_text.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include "tools/cli.h"
#include <inttypes.h>
#include <stdio.h>

typedef struct calib_command {
    const cli_command *self;
    calib_recipe recipe;
    const char *output;
    bool quiet;
    tokenizer *tokens;
    calib_file made;
} calib_command;

static kvb_status open_tokenizer(calib_command *c, const char *path, kvb_error *err)
{
    weights *w = NULL;
    kvb_status status = weights_open(&w, path, false, err);
    if (status == KVB_OK) status = tokenizer_open(&c->tokens, w, NULL, err);
    if (status == KVB_OK) status = weights_check(w, err);
    weights_close(w);
    return status;
}

static kvb_status add_calibration(calib_command *c, const char *path, kvb_error *err)
{
    calib_file from;
    kvb_status status = calib_load(&from, path, err);
    if (status != KVB_OK) return status;
    for (size_t i = 0; status == KVB_OK && i < from.count; i++)
        status = calib_make_of_context(&c->made, &c->recipe, c->tokens, path, &from.contexts[i], err);
    calib_free(&from);
    return status;
}

static kvb_status add_plain_text(calib_command *c, const char *path, kvb_error *err)
{
    const calib_recipe *r = &c->recipe;
    file_view view;
    if (!(r->n_lines || r->n_continued))
        return kvb_fail(err, KVB_ARGUMENT, "%s: is a text without questions; give --lines or --continue", path);
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    kvb_file_kind kind = kvb_kind_of_file(view.data, view.size);
    if (kind != KVB_FILE_OTHER)
        status = kvb_fail(err, KVB_FORMAT, "%s: expected a text, found %s; the model comes first", path,
                          kvb_kind_name(kind));
    if (status == KVB_OK)
        status = calib_make_of_text(&c->made, r, c->tokens, path, (const char *)view.data, view.size, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    return status;
}

static kvb_status write_lines(const calib_command *c, kvb_error *err)
{
    atomic_file file;
    kvb_status status = atomic_file_begin(&file, c->output, err);
    if (status != KVB_OK) return status;
    for (size_t i = 0; i < c->made.count; i++) calib_write_line(file.stream, &c->made.contexts[i]);
    return atomic_file_commit(&file, err);
}

static void print_summary(const calib_command *c)
{
    size_t questions = 0, given = 0, least = SIZE_MAX, most = 0;
    for (size_t i = 0; i < c->made.count; i++) {
        const calib_context *one = &c->made.contexts[i];
        questions += one->n_questions;
        for (size_t q = 0; q < one->n_questions; q++) given += one->questions[q].answer_ids != NULL;
        if (one->n_context_ids < least) least = one->n_context_ids;
        if (one->n_context_ids > most) most = one->n_context_ids;
    }
    fprintf(stderr, "%s: %zu contexts of %zu", c->output, c->made.count, least);
    if (most > least) fprintf(stderr, " to %zu", most);
    fprintf(stderr, " tokens, %zu questions, %zu of them with an answer\n", questions, given);
}

static kvb_status run_calib(calib_command *c, char **operands, size_t n, kvb_error *err)
{
    kvb_status status = open_tokenizer(c, operands[0], err);
    for (size_t i = 1; status == KVB_OK && i < n; i++)
        status = kvb_ends_with(operands[i], ".jsonl") ? add_calibration(c, operands[i], err)
                                                      : add_plain_text(c, operands[i], err);
    if (status == KVB_OK) status = write_lines(c, err);
    if (status == KVB_OK && !c->quiet) print_summary(c);
    return status;
}

static int check(const calib_command *c, int n_operands)
{
    const calib_recipe *r = &c->recipe;
    if (n_operands < 2 || !c->output || !*c->output)
        return cli_usage_error(c->self, "expected a model, texts and -o FILE: kvbudget %s", c->self->synopsis);
    if (r->n_tokens < CALIB_LEAST_CONTEXT || r->n_tokens > INT32_MAX)
        return cli_usage_error(c->self, "--tokens: expected at least %d, found %" PRIu64, CALIB_LEAST_CONTEXT,
                               r->n_tokens);
    if (r->n_answer < 2 || r->n_answer > INT32_MAX)
        return cli_usage_error(c->self, "--answer-tokens: expected at least 2, found %" PRIu64, r->n_answer);
    const uint64_t made[] = {r->n_lines, r->n_continued, r->n_contexts};
    static const char *const names[] = {"lines", "continue", "contexts"};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        if (made[i] > CALIB_MOST_MADE)
            return cli_usage_error(c->self, "--%s: expected at most %d, found %" PRIu64, names[i], CALIB_MOST_MADE,
                                   made[i]);
    return EXIT_DONE;
}

static int calib_main(const cli_command *self, int argc, char **argv)
{
    calib_command c = {.self = self,
                       .recipe = {.n_tokens = 2048, .n_contexts = 1, .n_own = UINT64_MAX, .n_answer = 64, .seed = 1}};
    calib_recipe *r = &c.recipe;
    const cli_option options[] = {
        {"output", 'o', CLI_WRITES(FILE_LINES), &c.output, "FILE", "the calibration data to write (.jsonl)"},
        {"tokens", 't', CLI_COUNT, &r->n_tokens, "N", "tokens of a context (2048)"},
        {"contexts", 'c', CLI_COUNT, &r->n_contexts, "N",
         "contexts to take from each plain text, one after the other (1); 0: as many as fit"},
        {"lines", 0, CLI_COUNT, &r->n_lines, "N", "ask for N lines of each context by their first words, drawn evenly"},
        {"continue", 0, CLI_COUNT, &r->n_continued, "N",
         "add N pieces of the text that follows each context, as answers without a question"},
        {"answer-tokens", 'n', CLI_COUNT, &r->n_answer, "N",
         "tokens of a piece, and at most of the rest of a line (64); a profile records N - 1 queries"},
        {"questions", 'q', CLI_COUNT, &r->n_own, "N",
         "keep only the first N questions of each context that has some; 0: none"},
        {"ignore-answers", 0, CLI_FLAG, &r->ignore_answers, NULL,
         "drop the answers of those questions, so that `profile` samples them"},
        {"seed", 's', CLI_SEED, &r->seed, "N", "seed for drawing the lines (1)"},
        {"quiet", 0, CLI_FLAG, &c.quiet, NULL, "no summary"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code == EXIT_DONE) code = check(&c, argc - first);
    kvb_error err = {0};
    if (code == EXIT_DONE && run_calib(&c, argv + first, (size_t)(argc - first), &err) != KVB_OK)
        code = cli_failed(self, &err);
    calib_free(&c.made);
    tokenizer_free(c.tokens);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_calib = {
    .name = "calib",
    .synopsis = "calib MODEL TEXT... -o CALIB.jsonl [OPTION]...",
    .summary = "make calibration data from plain texts: questions that the texts answer themselves",
    .details =
        "Makes questions that the text itself answers, so that nobody has to write any. Only the tokenizer of MODEL "
        "(a\nGGUF file, or a Hugging Face folder) is read. TEXT is a plain text in UTF-8, or calibration data\n"
        "(.jsonl), whose own questions come first; if a question has no answer, `profile` samples one.\n"
        "\n"
        "  --lines     \"The line of the text above that begins with \"...\" is: ...\", answered with the rest of the\n"
        "              line: shows what single tokens are worth to a question about them, as retrieval needs\n"
        "  --continue  the text's own next tokens, without a question, as in kvbudget eval\n"
        "\n"
        "Lines of 30 to 220 characters (longer ones sentence by sentence) are used if no other line of the "
        "context\nbegins like them. Contexts, questions and answers are written as tokens: a continuation begins "
        "exactly where its\n"
        "context ends, and `profile --chat` refuses them. The same seed and files give the same bytes.\n"
        "\n"
        "Examples:\n"
        "  kvbudget calib model.gguf book.txt manual.txt -o calib.jsonl --lines 8 --continue 4\n"
        "  kvbudget calib model.gguf book.txt -o calib.jsonl --contexts 0 --tokens 4096 --continue 2\n"
        "  kvbudget calib model.gguf logs.jsonl -o calib.jsonl --questions 15 --ignore-answers --lines 6\n"
        "  kvbudget profile model.gguf calib.jsonl -o run.h5\n",
    .run = calib_main,
};
