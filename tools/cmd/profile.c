// kvbudget profile: calibration texts and a model in, a record out.
#include "formats/need.h"
#include "runtime/fail.h"
#include "study/record_metric.h"
#include "tools/cmd/profile_command.h"
#include "tools/device.h"
#include "tools/memory.h"
#include "tools/report/roofline.h"
#include <inttypes.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_listed(const profile_command *p, const char *spec)
{
    for (size_t i = 0; i < p->options.n_metrics; i++)
        if (strcmp(p->metrics[i].spec, spec) == 0) return true;
    return false;
}

static int read_metric(profile_command *p, const char *name)
{
    kvb_error err = {0};
    metric *m = &p->metrics[p->options.n_metrics];
    if (learned_parse(m, name, &p->learned, &err) != KVB_OK || metric_check_nested(m, &err) != KVB_OK)
        return cli_usage_error(p->self, "%s", err.message);
    bool held = p->base && record_context(p->base, 0) && record_has_metric(record_context(p->base, 0), m->spec);
    if (is_listed(p, m->spec) && !held) return cli_usage_error(p->self, "metric %s is asked for twice", m->spec);
    bool own = p->sink != UINT64_MAX || p->window != UINT64_MAX;
    if (own) {
        uint32_t sink = p->sink == UINT64_MAX ? metric_protect_sink(m) : (uint32_t)p->sink,
                 window = p->window == UINT64_MAX ? metric_protect_window(m) : (uint32_t)p->window;
        m->protects = true, m->sink = sink, m->window = window;
    }
    p->options.n_metrics += !is_listed(p, m->spec);
    return EXIT_DONE;
}

// A metric of the record, with the tokens that it keeps there in any case.
static int take_held(profile_command *p, const char *name)
{
    kvb_error err = {0};
    record_metric about;
    metric *m = &p->metrics[p->options.n_metrics];
    if (metric_parse(m, name, NULL) != KVB_OK) return EXIT_DONE;
    if (record_metric_read(&about, p->base, name, &err) != KVB_OK) return cli_failed(p->self, &err);
    m->protects = about.sink != metric_protect_sink(m) || about.window != metric_protect_window(m);
    m->sink = about.sink, m->window = about.window;
    record_metric_free(&about);
    p->options.n_metrics++;
    return EXIT_DONE;
}

// The metrics of the record that is added to come first, but for learned rankings, of which it has the name alone.
static int read_metrics(profile_command *p)
{
    const record_context_info *held = p->base ? record_context(p->base, 0) : NULL;
    size_t n_held = held ? held->n_metrics : 0, n = p->metric_names.count;
    bool by_default = !n && !p->base;
    int code = EXIT_DONE;
    p->metrics = need(n_held + n + scorer_count, sizeof *p->metrics, "metrics");
    p->options.metrics = p->metrics;
    for (size_t i = 0; i < n_held && code == EXIT_DONE; i++) code = take_held(p, held->metrics[i]);
    for (size_t i = 0; i < n && code == EXIT_DONE; i++) code = read_metric(p, p->metric_names.items[i]);
    for (size_t i = 0; by_default && metric_usual(&p->metrics[i], i); i++) p->options.n_metrics++;
    return code;
}

static bool parse_shard(profile_command *p)
{
    char rest;
    if (sscanf(p->shard, "%7" SCNu32 "/%7" SCNu32 "%c", &p->shard_index, &p->n_shards, &rest) != 2) return false;
    return p->shard_index-- >= 1 && p->shard_index < p->n_shards && p->n_shards <= 1000000;
}

static bool parse_weights(profile_command *p)
{
    static const char *const names[] = {[WEIGHTS_KEEP] = "keep", [WEIGHTS_WIDE] = "f32", [WEIGHTS_HALF] = "bf16"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(p->weights, names[i]) == 0) {
            p->form = (weight_form)i;
            return true;
        }
    return false;
}

// Ranks of one machine share its cores, unless the launcher gave each its own.
static int share_cores(const profile_command *p)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN) / p->ranks.local_size, mine = omp_get_num_procs();
    bool shares = !p->threads && p->ranks.local_size > 1 && !getenv("OMP_NUM_THREADS");
    int code = device_take_threads(p->self, shares ? (uint64_t)(cores < 1      ? 1
                                                                : cores < mine ? cores
                                                                               : mine)
                                                   : p->threads);
    bool all = ranks_agree(&p->ranks, code == EXIT_DONE ? KVB_OK : KVB_MEMORY, NULL) == KVB_OK;
    return code == EXIT_DONE && !all ? EXIT_FAILED : code;
}

static int check_options(profile_command *p)
{
    profile_options *o = &p->options;
    if (!p->output && !p->plan) return cli_usage_error(p->self, "-o RUN.h5 is missing: where should the record go?");
    if (p->new_tokens + p->include_first < 2 || p->new_tokens > 1 << 20)
        return cli_usage_error(p->self,
                               "--new-tokens: expected 2 to 1048576 (the first token comes out of the prefill and is "
                               "no query), found %llu",
                               (unsigned long long)p->new_tokens);
    if (!p->greedy && !(p->temperature > 0))
        return cli_usage_error(p->self, "--temperature: expected a number above 0, or --greedy");
    if (p->max_tokens > UINT32_MAX || p->max_questions > UINT32_MAX || p->batch > 65536 || p->layers > UINT32_MAX)
        return cli_usage_error(p->self, "--max-tokens, --questions, --batch or --layers is out of range");
    if (p->memory && !memory_parse(p->memory, &p->memory_bytes))
        return cli_usage_error(p->self, "--memory: expected a size such as 4GiB or 800MB, found '%s'", p->memory);
    if (!parse_weights(p))
        return cli_usage_error(p->self, "--weights: expected keep, f32 or bf16, found '%s'", p->weights);
    if (strcmp(p->bos, "auto") != 0 && strcmp(p->bos, "yes") != 0 && strcmp(p->bos, "no") != 0)
        return cli_usage_error(p->self, "--bos: expected auto, yes or no, found '%s'", p->bos);
    p->device = device_find(p->self, p->backend_name, p->compute);
    if (!p->device) return EXIT_USAGE;
    if (strcmp(p->oracle, "lukv") != 0 && strcmp(p->oracle, "output") != 0)
        return cli_usage_error(p->self, "--oracle: expected lukv or output, found '%s'", p->oracle);
    if (strcmp(p->oracle, "output") == 0 && !p->device->sums_importance)
        return cli_usage_error(p->self, "--oracle output: the backend %s does not sum importance; use -b cpu",
                               p->backend_name);
    if (p->shard && !parse_shard(p))
        return cli_usage_error(p->self, "--shard: expected I/N, 1 <= I <= N <= 1000000, such as 3/8; found '%s'",
                               p->shard);
    o->draw = (sampler){p->greedy, p->temperature, p->seed};
    o->new_tokens = (uint32_t)p->new_tokens;
    o->ignore_eos = p->ignore_eos;
    o->ignore_answers = p->ignore_answers;
    o->include_first = p->include_first;
    o->oracle = strcmp(p->oracle, "output") == 0 ? ORACLE_OUTPUT : ORACLE_LUKV;
    o->bos = strcmp(p->bos, "yes") == 0 ? BOS_YES : strcmp(p->bos, "no") == 0 ? BOS_NO : BOS_AS_MODEL;
    o->max_tokens = (uint32_t)p->max_tokens;
    o->max_questions = (uint32_t)p->max_questions;
    o->batch = (uint32_t)p->batch;
    o->beyond_trained = p->beyond_trained;
    o->keep_after = p->keep_after;
    o->grows = p->base;
    o->loss_queries = p->curves ? (uint32_t)p->curve_queries : 0;
    o->gain_rows = (uint32_t)p->gain_rows;
    return read_metrics(p);
}

static void warn_of_inputs(const profile_command *p)
{
    if (p->job.n_short && p->ranks.rank == 0)
        fprintf(stderr,
                "note: %llu of %llu given answers have fewer than two tokens with this model's tokenizer, too few to "
                "record a query; the model answers these questions itself\n",
                (unsigned long long)p->job.n_short, (unsigned long long)(p->job.n_given + p->job.n_short));
    if (p->job.n_beyond && p->ranks.rank == 0)
        fprintf(
            stderr,
            "warning: %u of %zu contexts reach beyond the %u positions that the model was trained for, with what is "
            "decoded after them; what is recorded there is not what the model can do\n",
            p->job.n_beyond, p->job.n_contexts, p->m->config.context_length);
    if (p->layers && p->ranks.rank == 0)
        fprintf(stderr, "warning: --layers %llu: what these layers record is good for measuring time and memory only\n",
                (unsigned long long)p->layers);
    if (p->m->n_held <= p->m->config.n_layers && p->ranks.rank == 0 && !p->plan)
        fprintf(stderr,
                "note: the weights of %u of %u layers are not held in memory: %.2f GiB are read from the file each "
                "time, which changes no number\n",
                p->m->config.n_layers - (p->m->n_held ? p->m->n_held - 1 : 0), p->m->config.n_layers,
                (double)model_mapped_bytes(p->m, p->m->n_held) / 0x1p30);
}

// What each metric cost; the column sums of H2O and the output norms of CriticalKV are made once for all that need
// them.
static void print_scorers(const profile_command *p, const profile_times *times)
{
    fprintf(stderr, "scorers:");
    for (size_t i = 0; i < p->options.n_metrics; i++)
        fprintf(stderr, " %s %.2f s,", p->metrics[i].spec, times->each[i]);
    fprintf(stderr, " shared %.2f s\n", times->extras);
}

// A rank that failed says why; of the others rank 0 says that one did.
static int report_failure(const profile_command *p, const kvb_error *err)
{
    if (p->peer_failed && p->ranks.rank > 0) return EXIT_FAILED;
    if (p->ranks.size == 1 || p->peer_failed) return cli_failed(p->self, err);
    kvb_error named = {.status = err->status};
    snprintf(named.message, sizeof named.message, "rank %d: %.480s", p->ranks.rank, err->message);
    return cli_failed(p->self, &named);
}

static int run_command(profile_command *p, char **operands, size_t n)
{
    kvb_error err = {0};
    profile_times times = {0};
    kvb_status status = profile_agree(p, profile_open_inputs(p, operands, n, &err), &err);
    if (status == KVB_OK) warn_of_inputs(p);
    if (status == KVB_OK && p->plan) {
        if (p->ranks.rank == 0) status = profile_print_plan(p, &err);
        return status == KVB_OK ? EXIT_DONE : report_failure(p, &err);
    }
    double start = seconds_now();
    if (status == KVB_OK) status = profile_make_record(p, &times, &err);
    if (status != KVB_OK) return report_failure(p, &err);
    double peak = (double)memory_peak();
    ranks_largest(&p->ranks, &peak, 1);
    double wall = seconds_now() - start;
    if (!p->quiet && p->ranks.rank == 0) {
        fprintf(stderr,
                "%.2f s: prefill %.2f, scorers %.2f, decoding %.2f, curves %.2f, gains %.2f, writing %.2f; peak memory "
                "%.3f GiB "
                "(planned %.3f)\n",
                wall, times.prefill, times.scorers + times.extras, times.decode, times.curves, times.gains,
                times.writing, peak / 0x1p30, (double)profile_expected_peak(p) / 0x1p30);
        print_scorers(p, &times);
    }
    if (p->roofline && p->ranks.rank == 0) roofline_print(p->device, wall);
    return EXIT_DONE;
}

#define WEIGHTS_HELP                                                                                                   \
    "how weights stand in memory: keep (as few bits as the file has, where products can\ntake them so; default), f32 " \
    "(as products take them: faster, more memory), bf16 (rounded\nto 16 bits: changes numbers unless the file has no " \
    "more). Layers that do not fit are\nread from the file each time"
#define HELD_HELP                                                                                                     \
    "hold the weights of N layers in memory and read the others' from the file each time\n(default: as many as fit; " \
    "0: not even the embedding); changes no number"

// An exit code, or -1 when the manual was printed.
static int parse_profile(profile_command *p, int argc, char **argv, int *first)
{
    const cli_option options[] = {
        {"output", 'o', CLI_WRITES(FILE_RECORD), &p->output, "FILE", "the record to write (.h5)"},
        {"metric", 'm', CLI_INPUTS, &p->metric_names, "M",
         "eviction metric to record, repeatable: `kvbudget help metrics` lists them;\ndefault snapkv:kvpress, keydiff "
         "and ea:kvpress"},
        {"new-tokens", 'n', CLI_COUNT, &p->new_tokens, "N",
         "tokens to generate per question (64); N - 1 queries are recorded"},
        {"temperature", 't', CLI_REAL, &p->temperature, "T", "temperature of the seeded sampling (0.7)"},
        {"seed", 's', CLI_COUNT, &p->seed, "N", "seed of the sampling (1)"},
        {"greedy", 0, CLI_FLAG, &p->greedy, NULL, "take the likeliest token instead of sampling"},
        {"ignore-eos", 0, CLI_FLAG, &p->ignore_eos, NULL,
         "ignore end tokens, so that every question records N - 1 queries"},
        {"ignore-answers", 0, CLI_FLAG, &p->ignore_answers, NULL,
         "generate answers even where the calibration data has some"},
        {"include-first", 0, CLI_FLAG, &p->include_first, NULL,
         "also record the last prompt token's query, which emits the first token"},
        {"curves", 0, CLI_FLAG, &p->curves, NULL,
         "also record what evicting tokens does to the model's output, for solve --loss output"},
        {"curve-queries", 0, CLI_COUNT, &p->curve_queries, "N",
         "with --curves, queries of every question that this is measured on (4)"},
        {"gain-rows", 0, CLI_COUNT, &p->gain_rows, "N",
         "with --curves, tokens of each context's shortest question that the layers' gains are\nmeasured on (4)"},
        {"sink", 0, CLI_COUNT, &p->sink, "N", "first tokens that are always kept, of the metrics named here"},
        {"window", 0, CLI_COUNT, &p->window, "N",
         "last tokens that are always kept (default of both: each metric's own)"},
        {"oracle", 0, CLI_TEXT, &p->oracle, "KIND",
         "what makes a token important: lukv (default), the most that any query takes from it,\nto solve tables from; "
         "output, how far outputs move without it, to fit rankings to\n(learn)"},
        {"chat", 0, CLI_FLAG, &p->chat, NULL,
         "wrap context and question in the model's own chat template (ChatML, Llama 3, Mistral,\nGemma, Phi, gpt-oss); "
         "an answer_prefix is added only where the line has one"},
        {"special", 0, CLI_FLAG, &p->special, NULL,
         "take \"<|im_start|>\" and the like in the texts as the tokens that they name"},
        {"bos", 0, CLI_TEXT, &p->bos, "WHEN", "begin contexts with BOS: auto (as the model file says), yes, no"},
        {"pre", 0, CLI_TEXT, &p->pre, "NAME",
         "split words as this pre-tokenizer does instead of the file's: smollm, llama-bpe,\nqwen2, gpt-2 (as "
         "transformers reads SmolLM2's GGUF)"},
        {"max-tokens", 0, CLI_COUNT, &p->max_tokens, "N", "cut contexts to their first N tokens"},
        {"questions", 'q', CLI_COUNT, &p->max_questions, "N",
         "use only the first N questions of every context; 0: all"},
        {"beyond-trained", 0, CLI_FLAG, &p->beyond_trained, NULL,
         "allow contexts longer than the model was trained for"},
        {"batch", 0, CLI_COUNT, &p->batch, "N", "decode N questions at a time (default: by memory); changes no number"},
        {"memory", 0, CLI_TEXT, &p->memory, "SIZE",
         "memory that this process may use, such as 4GiB (default: what is free); changes no\nnumber"},
        {"weights", 0, CLI_TEXT, &p->weights, "KIND", WEIGHTS_HELP},
        {"held", 0, CLI_COUNT, &p->held, "N", HELD_HELP},
        {"layers", 0, CLI_COUNT, &p->layers, "N", "run only the first N layers, to measure time and memory"},
        {"backend", 'b', CLI_TEXT, &p->backend_name, "NAME", "cpu (oneDNN), or ref (plain C, slow, the judge)"},
        {"compute", 0, CLI_TEXT, &p->compute, "KIND", DEVICE_COMPUTE_HELP},
        QUERY_STATISTICS_OPTION(p->statistics),
        {"threads", 0, CLI_COUNT, &p->threads, "N", "OpenMP threads (default: all cores); changes no number"},
        {"shard", 0, CLI_TEXT, &p->shard, "I/N",
         "run only the I-th of N shares of the work, as one element of a job array; `kvbudget\nmerge` joins the "
         "shards"},
        {"resume", 0, CLI_FLAG, &p->resume, NULL,
         "continue a run that was stopped; the record has the same bytes as that of one that was\nnot"},
        {"keep-after", 0, CLI_REAL, &p->keep_after, "S",
         "after Ctrl-C or SIGTERM, keep the finished layers of a prefill that has run for S\nseconds (10), so that "
         "--resume continues with the next layer"},
        {"force", 0, CLI_FLAG, &p->force, NULL,
         "start again although the record exists; the old record stays until the new one is\ncomplete. With --add: "
         "throw "
         "away what another addition that was stopped has left"},
        {"add", 0, CLI_FLAG, &p->add, NULL,
         "add metrics, texts or questions to the finished RUN.h5, with its settings"},
        {"plan", 0, CLI_FLAG, &p->plan, NULL, "print how much work, memory and time it would take, and stop"},
        {"roofline", 0, CLI_FLAG, &p->roofline, NULL,
         "print at the end where the time went, compared with this machine's measured peaks"},
        {"quiet", 0, CLI_FLAG, &p->quiet, NULL, "no progress, no summary"},
        {0},
    };
    return cli_parse(p->self, options, argc, argv, first);
}

// With --add twice: the second time over the settings of the record that is added to.
static int read_command_line(profile_command *p, int argc, char **argv, int *first)
{
    int code = parse_profile(p, argc, argv, first);
    if (code != EXIT_DONE || !p->add) return code;
    code = profile_add_open(p);
    if (code != EXIT_DONE) return code;
    cli_list_free(&p->metric_names);
    p->metric_names = (cli_list){0};
    code = parse_profile(p, argc, argv, first);
    return code == EXIT_DONE ? profile_add_check(p) : code;
}

static int run_profile(const cli_command *self, int argc, char **argv)
{
    profile_command p = {.self = self,
                         .backend_name = "cpu",
                         .compute = "f32",
                         .bos = "auto",
                         .oracle = "lukv",
                         .weights = "keep",
                         .held = UINT64_MAX,
                         .new_tokens = 64,
                         .curve_queries = 4,
                         .gain_rows = 4,
                         .sink = UINT64_MAX,
                         .window = UINT64_MAX,
                         .temperature = 0.7,
                         .keep_after = 10,
                         .seed = 1};
    int first, code = read_command_line(&p, argc, argv, &first);
    kvb_error err = {0};
    // Shards do not know each other, whoever started them: srun sets a launcher's variables for elements of a job
    // array.
    p.ranks = (ranks){0, 1, 0, 1};
    if (code == EXIT_DONE) cli_catch_signals();
    if (code == EXIT_DONE && !p.shard && ranks_begin(&p.ranks, &err) != KVB_OK) code = cli_failed(self, &err);
    if (code == EXIT_DONE && argc - first < 2 - p.add)
        code =
            cli_usage_error(self, "a model and at least one calibration file are needed: kvbudget %s", self->synopsis);
    if (code == EXIT_DONE) code = check_options(&p);
    if (code == EXIT_DONE && p.force && p.resume)
        code = cli_usage_error(self, "--force throws away what --resume would go on with; give one of them");
    if (code == EXIT_DONE) code = share_cores(&p);
    if (code == EXIT_DONE) code = run_command(&p, argv + first, (size_t)(argc - first));
    profile_job_free(&p.job);
    model_text_close(&p.text);
    query_statistics_free(p.stored);
    model_free(p.m);
    for (size_t i = 0; i < p.n_files; i++) calib_free(&p.files[i]);
    free(p.files);
    free(p.metrics);
    learned_list_close(&p.learned);
    cli_list_free(&p.metric_names);
    record_close(p.base);
    ranks_end();
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_profile = {
    "profile",
    "profile MODEL CALIB.jsonl... -o RUN.h5 [OPTION]...",
    "watch the model decode with its full cache; record what every head needed",
    "Prefills each context once and decodes all its questions over the shared keys and values. For every KV\n"
    "head it records each context token's oracle importance (how much any decoded query would lose without it)\n"
    "and each metric's score of it. `kvbudget solve` turns the record into tables.\n"
    "MODEL is a GGUF file or a folder of Hugging Face; with --plan its config.json is enough.\n"
    "\n"
    "Calibration files have one JSON object per line:\n"
    "  {\"sample_id\": \"story\", \"context\": \"...\", \"questions\": [\"...\"], \"answers\": [\"...\"], "
    "\"answer_prefix\": \"\\nAnswer:\"}\n"
    "With answers, decoding follows them, all steps in one pass; without, the model's own are sampled.\n"
    "context_ids, question_ids and answer_ids give tokens instead of text.\n"
    "\n"
    "--add adds to a finished record. For a metric, contexts are prefilled again and nothing is decoded. For\n"
    "texts, and for further questions of a text, only these are run. The record then has the bytes of one\n"
    "profile over everything. Model and settings must be the record's, and scores that are computed again must\n"
    "be equal bit by bit. The old record stays until the new one is complete; repeat the command to continue an\n"
    "--add that was stopped.\n"
    "\n"
    "Results are in RUN.h5.parts/ until the end; --resume continues a run that was stopped. Under `mpirun -n N`\n"
    "the ranks divide contexts and questions among themselves and write to one RUN.h5.parts/ on a common file\n"
    "system; the record has the same bytes as that of one process. Without MPI or a common file system,\n"
    "--shard I/N runs one share, and `kvbudget merge` does the rest.\n"
    "\n"
    "Examples:\n"
    "  kvbudget profile model.gguf calib-data/narrative-en.jsonl -o run.h5\n"
    "  kvbudget profile model.gguf logs.jsonl -o run.h5 --metric snapkv:kvpress:window=32 --metric keydiff\n"
    "  kvbudget profile model.gguf long.jsonl -o run.h5 --plan\n"
    "  kvbudget profile model.gguf --add -o run.h5 --metric tova                # another metric\n"
    "  kvbudget profile model.gguf more.jsonl --add -o run.h5                   # more texts\n"
    "  mpirun -n 8 kvbudget profile model.gguf calib.jsonl -o run.h5\n",
    run_profile,
};
