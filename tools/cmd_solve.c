// kvbudget solve: a record in, a table of budgets out. Reads the record pair by pair and hands the arrays to solver/.
#include "runtime/fail.h"
#include "tools/solve_job.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- What to solve --------------------------------------------------------------------------------------------------

// --contexts a,b,c in the given order; without it all, in calibration order.
static kvb_status select_contexts(solve_command *s, kvb_error *err)
{
    size_t count = record_context_count(s->r);
    s->selected = calloc(count ? count : 1, sizeof *s->selected);
    if (!s->selected) return kvb_fail(err, KVB_MEMORY, "no memory for %zu contexts", count);
    if (!s->contexts)
        for (; s->n_selected < count; s->n_selected++) s->selected[s->n_selected] = s->n_selected;
    for (const char *text = s->contexts; text;) {
        size_t length = strcspn(text, ","), i = 0;
        for (; i < count; i++) {
            const char *id = record_context(s->r, i)->id;
            if (strlen(id) == length && memcmp(id, text, length) == 0) break;
        }
        if (i == count)
            return kvb_fail(err, KVB_ARGUMENT, "--contexts: %s has no context '%.*s'; `kvbudget inspect` lists them",
                            s->path, (int)length, text);
        for (size_t k = 0; k < s->n_selected; k++)
            if (s->selected[k] == i)
                return kvb_fail(err, KVB_ARGUMENT, "--contexts: '%.*s' is given twice", (int)length, text);
        s->selected[s->n_selected++] = i;
        text = text[length] ? text + length + 1 : NULL;
    }
    if (s->n_selected == 0) return kvb_fail(err, KVB_FORMAT, "%s: the record holds no context", s->path);
    return KVB_OK;
}

static void list_metrics(const record_context_info *c, char *out, size_t size)
{
    size_t used = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < c->n_metrics && used < size; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%s", i ? ", " : "", c->metrics[i]);
}

// A full name, or the beginning of exactly one up to a ':'.
static kvb_status find_metric(const char **out, const record_context_info *c, const char *name, kvb_error *err)
{
    char known[256];
    size_t length = strlen(name), found = 0;
    for (uint32_t i = 0; i < c->n_metrics; i++) {
        const char *metric = c->metrics[i];
        if (strncmp(metric, name, length) != 0 || (metric[length] && metric[length] != ':')) continue;
        *out = metric;
        found++;
        if (!metric[length]) return KVB_OK;
    }
    if (found == 1) return KVB_OK;
    list_metrics(c, known, sizeof known);
    return kvb_fail(err, KVB_ARGUMENT, "--metric %s: %s; the record has %s", name,
                    found ? "several metrics begin like this" : "not in the record", known);
}

static bool has_metric(const record_context_info *c, const char *metric)
{
    for (uint32_t i = 0; i < c->n_metrics; i++)
        if (strcmp(c->metrics[i], metric) == 0) return true;
    return false;
}

static kvb_status add_metric(solve_command *s, const char *metric, kvb_error *err)
{
    for (size_t j = 0; j < s->n_metrics; j++)
        if (s->metrics[j] == metric) return KVB_OK; // named twice, or by `all` too
    for (size_t k = 0; k < s->n_selected; k++) {
        const record_context_info *c = record_context(s->r, s->selected[k]);
        if (!has_metric(c, metric))
            return kvb_fail(err, KVB_MISMATCH, "%s: context %s has no scores of %s; leave it out with --contexts",
                            s->path, c->id, metric);
    }
    if (s->n_metrics == METRICS_MAX) return kvb_fail(err, KVB_UNSUPPORTED, "at most %d metrics at once", METRICS_MAX);
    s->metrics[s->n_metrics++] = metric;
    return KVB_OK;
}

static kvb_status select_metrics(solve_command *s, kvb_error *err)
{
    const record_context_info *first = record_context(s->r, s->selected[0]);
    kvb_status status = KVB_OK;
    for (size_t k = 0; k < s->metric_names.count && status == KVB_OK; k++) {
        const char *name = s->metric_names.items[k], *metric = NULL;
        if (strcmp(name, "all") != 0) {
            status = find_metric(&metric, first, name, err);
            if (status == KVB_OK) status = add_metric(s, metric, err);
            continue;
        }
        for (uint32_t i = 0; i < first->n_metrics && status == KVB_OK; i++)
            status = add_metric(s, first->metrics[i], err);
    }
    if (status == KVB_OK && s->n_metrics == 0)
        return kvb_fail(err, KVB_FORMAT, "%s: context %s has no scores of any metric", s->path, first->id);
    return status;
}

// The record's parameters of a metric: in the root attribute `metrics`, one object by name, or in `metric_<name>`.
// NULL: not there.
static cJSON *metric_parameters(const record *r, const char *metric)
{
    char name[160];
    snprintf(name, sizeof name, "metric_%s", metric);
    const cJSON *attributes = record_attributes(r), *own = cJSON_GetObjectItemCaseSensitive(attributes, name);
    if (cJSON_IsString(own)) return cJSON_Parse(own->valuestring);
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(attributes, "metrics");
    cJSON *all = cJSON_IsString(text) ? cJSON_Parse(text->valuestring) : NULL;
    cJSON *found = all ? cJSON_DetachItemFromObjectCaseSensitive(all, metric) : NULL;
    cJSON_Delete(all);
    return found;
}

static void read_count(const cJSON *parameters, const char *key, uint32_t *out)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(parameters, key);
    if (cJSON_IsNumber(item) && item->valuedouble >= 0 && item->valuedouble <= UINT32_MAX / 4)
        *out = (uint32_t)item->valuedouble;
}

// Protected tokens: what the command line says, else what the record says of the metric, else the defaults of
// methods.md 2.8: 4 sinks, and the last token or SnapKV's observation window.
static kvb_status read_protection(const solve_command *s, metric_job *job, kvb_error *err)
{
    cJSON *parameters = metric_parameters(s->r, job->metric);
    uint32_t window = 32;
    read_count(parameters, "window", &window);
    job->sink = 4;
    job->window = strncmp(job->metric, "snapkv", 6) == 0 ? window : 1;
    read_count(parameters, "protect_sink", &job->sink);
    read_count(parameters, "protect_window", &job->window);
    if (s->sink != NOT_GIVEN) job->sink = (uint32_t)s->sink;
    if (s->window != NOT_GIVEN) job->window = (uint32_t)s->window;
    job->parameters = cJSON_IsObject(parameters) ? cJSON_PrintUnformatted(parameters) : strdup("{}");
    cJSON_Delete(parameters);
    return job->parameters ? KVB_OK : kvb_fail(err, KVB_MEMORY, "no memory for the parameters of %s", job->metric);
}

// Counts the pairs and checks that each leaves something to choose.
static kvb_status count_pairs(const solve_command *s, metric_job *job, kvb_error *err)
{
    job->fewest_queries = UINT32_MAX;
    for (size_t k = 0; k < s->n_selected; k++) {
        const record_context_info *c = record_context(s->r, s->selected[k]);
        uint32_t before = job->n_pairs;
        for (uint32_t q = 0; q < c->n_questions; q++) {
            uint32_t queries = c->questions[q].n_queries;
            job->n_skipped += queries == 0 && q < s->max_questions;
            if (!is_selected(s, &c->questions[q], q)) continue;
            job->n_pairs++;
            if (queries < job->fewest_queries) job->fewest_queries = queries;
            if (queries > job->most_queries) job->most_queries = queries;
        }
        if (job->n_pairs == before) continue;
        job->n_contexts++;
        if (c->n_tokens > job->longest) job->longest = c->n_tokens;
        if ((uint64_t)job->sink + job->window >= c->n_tokens)
            return kvb_fail(err, KVB_ARGUMENT,
                            "%s: context %s: %s protects %u + %u of its %u tokens, so there is nothing to choose; "
                            "leave it out with --contexts, or lower --sink and --window",
                            s->path, c->id, job->metric, job->sink, job->window, c->n_tokens);
    }
    if (job->n_pairs == 0)
        return kvb_fail(err, KVB_ARGUMENT, "%s: no question with recorded queries is selected; nothing to solve",
                        s->path);
    return KVB_OK;
}

static void warn(const metric_job *job)
{
    if (job->n_skipped)
        fprintf(stderr, "warning: %u questions without recorded queries are left out (decoding ended at once)\n",
                job->n_skipped);
    if (job->fewest_queries != job->most_queries)
        fprintf(stderr,
                "warning: questions with %u to %u recorded queries are mixed; importance is a maximum over queries, so "
                "longer answers look more demanding (profile --ignore-eos makes them equal)\n",
                job->fewest_queries, job->most_queries);
}

// ---- Solving --------------------------------------------------------------------------------------------------------

// Does one thing with every pair of a context; `p` is made for the context's shape, its curves are filled.
typedef kvb_status pair_action(solve_command *s, metric_job *job, problem *p, kvb_error *err);

static kvb_status visit_questions(solve_command *s, metric_job *job, size_t index, pair_action *action, problem *p,
                                  const metric_order *order, uint32_t *done, kvb_error *err)
{
    const record_context_info *c = record_context(s->r, index);
    kvb_status status = KVB_OK;
    for (uint32_t q = 0; q < c->n_questions && status == KVB_OK; q++) {
        if (!is_selected(s, &c->questions[q], q)) continue;
        if (cli_stop_requested) return kvb_fail(err, KVB_INTERRUPTED, "stopped; no table was written");
        status = record_read_oracle(s->r, index, q, job->oracle, err);
        if (status != KVB_OK) return status; // names file and question itself
        kvb_error inner = {0};
        status = loss_curves_fill(&p->curves, order, job->oracle, &inner);
        if (status == KVB_OK) status = action(s, job, p, &inner);
        if (status != KVB_OK)
            kvb_fail(err, status, "%s: context %s, question %u: %s", s->path, c->id, c->questions[q].number,
                     inner.message);
        progress_update(&s->bar, ++*done, 2.0 * job->n_pairs, "problems"); // every pair is visited twice
    }
    return status;
}

static kvb_status walk(solve_command *s, metric_job *job, pair_action *action, uint32_t *done, kvb_error *err)
{
    record_shape model = record_get_shape(s->r);
    kvb_status status = KVB_OK;
    for (size_t k = 0; k < s->n_selected && status == KVB_OK; k++) {
        const record_context_info *c = record_context(s->r, s->selected[k]);
        cache_shape shape = {model.n_layers, model.n_kv_heads, c->n_tokens, job->sink, job->window};
        metric_order order = {0};
        problem p = {0};
        bool any = false;
        for (uint32_t q = 0; q < c->n_questions; q++) any |= is_selected(s, &c->questions[q], q);
        if (!any) continue;
        status = record_read_scores(s->r, s->selected[k], job->metric, job->scores, err);
        if (status == KVB_OK) status = metric_order_make(&order, &shape, job->scores, err);
        if (status == KVB_OK) status = problem_init(&p, &shape, &s->options, err);
        if (status == KVB_OK) status = visit_questions(s, job, s->selected[k], action, &p, &order, done, err);
        problem_free(&p);
        metric_order_free(&order);
    }
    return status;
}

static kvb_status solve_pair(solve_command *s, metric_job *job, problem *p, kvb_error *err)
{
    double start = seconds_now();
    kvb_status status = problem_solve(p, err);
    if (status != KVB_OK) return status;
    job->solve_seconds += seconds_now() - start;
    const allocation *a = &p->allocation;
    size_t cells = (size_t)ROWS * a->n_heads;
    for (size_t i = 0; job->pair_budgets && i < cells; i++)
        job->pair_budgets[job->spread.count * cells + i] = (int32_t)a->keep[i];
    ratio_mean_add(&job->spread, a, p->curves.shape.n_tokens);
    if (s->mean_loss) return loss_mean_add(&job->merged, &p->curves, err);
    for (int r = 0; r < ROWS; r++) {
        job->loss[r] += p->loss[r] / job->n_pairs;
        job->bound[r] += p->bound[r] / job->n_pairs;
        job->lambda[r] += p->lambda[r] / job->n_pairs;
        job->saturated[r] |= a->saturated[r];
    }
    return KVB_OK;
}

static kvb_status evaluate_pair(solve_command *s, metric_job *job, problem *p, kvb_error *err)
{
    (void)s;
    uint32_t *keep = malloc(p->allocation.n_heads * sizeof *keep);
    if (!keep) return kvb_fail(err, KVB_MEMORY, "no memory for %u heads", p->allocation.n_heads);
    table_loss_add(job->table_loss, &p->curves, ROWS, job->prune_ratio, keep);
    table_loss_add(job->uniform_loss, &p->curves, ROWS, job->uniform, keep);
    free(keep);
    return KVB_OK;
}

// The table from the average problem.
static kvb_status solve_merged(solve_command *s, metric_job *job, kvb_error *err)
{
    problem p = {0};
    loss_mean_finish(&job->merged);
    const loss_curves *curves = &job->merged.curves;
    kvb_status status = problem_init(&p, &curves->shape, &s->options, err);
    if (status == KVB_OK) status = problem_solve_curves(&p, curves, err);
    for (int r = 0; status == KVB_OK && r < ROWS; r++) {
        // The average of shares has a total of 1, or less when there are pairs that cannot lose anything.
        job->loss[r] = p.loss[r] * curves->total;
        job->bound[r] = p.bound[r] * curves->total;
        job->lambda[r] = p.lambda[r] * curves->total;
        job->saturated[r] = p.allocation.saturated[r];
        for (uint32_t h = 0; h < p.allocation.n_heads; h++) {
            size_t i = (size_t)r * p.allocation.n_heads + h;
            job->prune_ratio[i] = 1.0 - (double)p.allocation.keep[i] / curves->shape.n_tokens;
        }
    }
    problem_free(&p);
    return status;
}

static kvb_status job_begin(solve_command *s, metric_job *job, kvb_error *err)
{
    record_shape model = record_get_shape(s->r);
    kvb_status status = read_protection(s, job, err);
    if (status == KVB_OK) status = count_pairs(s, job, err);
    if (status != KVB_OK) return status;
    cache_shape shape = {model.n_layers, model.n_kv_heads, job->longest, job->sink, job->window};
    status = cache_shape_check(&shape, err);
    if (status != KVB_OK) return status;
    size_t heads = shape_heads(&shape), cells = ROWS * heads, numbers = heads * job->longest, bytes = 0;
    if (__builtin_mul_overflow(cells, (size_t)job->n_pairs, &bytes) ||
        __builtin_mul_overflow(bytes, sizeof *job->pair_budgets, &bytes))
        return kvb_fail(err, KVB_UNSUPPORTED, "%u problems of %zu heads are too many", job->n_pairs, heads);
    job->scores = malloc(numbers * sizeof *job->scores);
    job->oracle = malloc(numbers * sizeof *job->oracle);
    job->prune_ratio = malloc(cells * sizeof *job->prune_ratio);
    job->std = malloc(cells * sizeof *job->std);
    job->uniform = malloc(cells * sizeof *job->uniform);
    job->pair_budgets = s->budgets ? malloc(bytes) : NULL;
    if (!job->scores || !job->oracle || !job->prune_ratio || !job->std || !job->uniform ||
        (s->budgets && !job->pair_budgets))
        return kvb_fail(err, KVB_MEMORY, "no memory for %zu heads of %u tokens", heads, job->longest);
    for (size_t i = 0; i < cells; i++) job->uniform[i] = s->ratios[i / heads];
    status = ratio_mean_init(&job->spread, ROWS, (uint32_t)heads, err);
    if (status == KVB_OK && s->mean_loss) status = loss_mean_init(&job->merged, &shape, err);
    return status;
}

static kvb_status job_solve(solve_command *s, metric_job *job, kvb_error *err)
{
    uint32_t done = 0, heads = job->spread.n_heads;
    progress_begin(&s->bar, job->metric, s->quiet);
    kvb_status status = walk(s, job, solve_pair, &done, err);
    ratio_mean_get(&job->spread, job->prune_ratio, job->std);
    if (status == KVB_OK && s->mean_loss) status = solve_merged(s, job, err);
    if (status == KVB_OK) status = walk(s, job, evaluate_pair, &done, err);
    if (status != KVB_OK) {
        progress_end(&s->bar, status == KVB_INTERRUPTED ? "stopped" : "failed");
        return status;
    }
    for (int r = 0; r < ROWS; r++) {
        job->table_loss[r] /= job->n_pairs;
        job->uniform_loss[r] /= job->n_pairs;
        for (uint32_t h = 0; h < heads; h++) job->effective[r] += job->prune_ratio[(size_t)r * heads + h] / heads;
    }
    progress_end(&s->bar, "%u problems solved for %d ratios and certified, %.2f ms each", job->n_pairs, ROWS,
                 1e3 * job->solve_seconds / job->n_pairs);
    return KVB_OK;
}

static void job_free(metric_job *job)
{
    ratio_mean_free(&job->spread);
    loss_mean_free(&job->merged);
    free(job->parameters);
    free(job->pair_budgets);
    free(job->scores);
    free(job->oracle);
    free(job->prune_ratio);
    free(job->std);
    free(job->uniform);
}

// ---- The command ----------------------------------------------------------------------------------------------------

static kvb_status solve_metric(solve_command *s, const char *metric, cJSON *list, kvb_error *err)
{
    metric_job *job = calloc(1, sizeof *job);
    if (!job) return kvb_fail(err, KVB_MEMORY, "no memory for metric %s", metric);
    job->metric = metric;
    kvb_status status = job_begin(s, job, err);
    if (status == KVB_OK && metric == s->metrics[0]) warn(job);
    if (status == KVB_OK) status = job_solve(s, job, err);
    if (status == KVB_OK) status = write_results(s, job, err);
    if (status == KVB_OK && list) status = add_results_json(list, s, job, err);
    if (status == KVB_OK && !list) print_results(s, job);
    job_free(job);
    free(job);
    return status;
}

// Everything that can be refused before any work is done.
static kvb_status prepare(solve_command *s, kvb_error *err)
{
    kvb_status status = record_open(&s->r, s->path, err);
    if (status != KVB_OK) return status;
    record_shape shape = record_get_shape(s->r);
    if (s->output && (shape.n_heads == 0 || shape.head_dim == 0))
        return kvb_fail(err, KVB_MISMATCH,
                        "%s: the record does not say how many query heads of what size the model has, which a table "
                        "must; import it again with --model-heads and --head-dim, or write --npy only",
                        s->path);
    status = select_contexts(s, err);
    if (status == KVB_OK) status = select_metrics(s, err);
    char path[PATH_SIZE];
    const char *const patterns[] = {s->output, s->npy, s->budgets};
    for (int i = 0; i < 3 && status == KVB_OK; i++)
        if (patterns[i]) status = output_path(path, patterns[i], s->metrics[0], "", s->n_metrics > 1, err);
    return status;
}

static kvb_status solve_all(solve_command *s, kvb_error *err)
{
    cJSON *list = s->json ? cJSON_CreateArray() : NULL;
    kvb_status status = s->json && !list ? kvb_fail(err, KVB_MEMORY, "no memory for the JSON text") : KVB_OK;
    if (status == KVB_OK) status = prepare(s, err);
    for (size_t i = 0; i < s->n_metrics && status == KVB_OK; i++) status = solve_metric(s, s->metrics[i], list, err);
    if (status == KVB_OK && list) {
        char *text = cJSON_Print(list);
        if (text) puts(text);
        else status = kvb_fail(err, KVB_MEMORY, "no memory for the JSON text");
        cJSON_free(text);
    }
    cJSON_Delete(list);
    if (status == KVB_OK && !s->output && !s->npy && !s->budgets && !s->quiet)
        fprintf(stderr, "no file was written; -o FILE.safetensors writes the table\n");
    return status;
}

// Index of a word in a pair of words, or -1.
static int find_word(const char *word, const char *first, const char *second)
{
    return strcmp(word, first) == 0 ? 0 : strcmp(word, second) == 0 ? 1 : -1;
}

static int check_options(solve_command *s)
{
    int scope = find_word(s->scope_name, "global", "layer"), hull = find_word(s->hull_name, "feasible", "full");
    int aggregate = find_word(s->aggregate_name, "mean_ratio", "mean_loss");
    if (scope < 0) return cli_usage_error(s->self, "--scope: expected global or layer, found '%s'", s->scope_name);
    if (hull < 0) return cli_usage_error(s->self, "--hull: expected feasible or full, found '%s'", s->hull_name);
    if (aggregate < 0)
        return cli_usage_error(s->self, "--aggregate: expected mean_ratio or mean_loss, found '%s'", s->aggregate_name);
    if (s->metric_names.count == 0)
        return cli_usage_error(s->self, "--metric M is missing: for which eviction metric (or all)?");
    if ((s->sink != NOT_GIVEN && s->sink > UINT32_MAX / 4) || (s->window != NOT_GIVEN && s->window > UINT32_MAX / 4))
        return cli_usage_error(s->self, "--sink or --window is out of range");
    if (s->max_questions == 0) return cli_usage_error(s->self, "--questions: expected at least 1");
    const char *const paths[] = {s->output, s->npy, s->budgets};
    for (int i = 0; i < 3; i++)
        if (paths[i] && !*paths[i]) return cli_usage_error(s->self, "a file name is empty");
    table_ratios(s->ratios);
    s->options = (solve_options){hull == 1 ? HULL_FULL : HULL_FEASIBLE, scope == 1 ? SCOPE_LAYER : SCOPE_GLOBAL,
                                 s->ratios, ROWS};
    s->mean_loss = aggregate == 1;
    return EXIT_DONE;
}

static int run_solve(const cli_command *self, int argc, char **argv)
{
    solve_command s = {.self = self,
                       .aggregate_name = "mean_ratio",
                       .scope_name = "global",
                       .hull_name = "feasible",
                       .sink = NOT_GIVEN,
                       .window = NOT_GIVEN,
                       .max_questions = NOT_GIVEN};
    const cli_option options[] = {
        {"metric", 'm', CLI_LIST, &s.metric_names, "M",
         "eviction metric that the table is for, repeatable; 'all': every one of the\nrecord; 'snapkv' is enough when "
         "only one begins like this"},
        {"output", 'o', CLI_TEXT, &s.output, "FILE",
         "the table to write (.safetensors); for several metrics a folder, or a name\nwith {metric} in it"},
        {"npy", 0, CLI_TEXT, &s.npy, "FILE", "also write the prune ratios for kvpress, with a JSON side-car"},
        {"aggregate", 'a', CLI_TEXT, &s.aggregate_name, "HOW",
         "mean_ratio (default): average the best ratios of all questions, as the\npaper does; mean_loss: the ratios "
         "with the least average loss"},
        {"scope", 0, CLI_TEXT, &s.scope_name, "SCOPE",
         "global (default): layers share one budget; layer: each meets the ratio"},
        {"hull", 0, CLI_TEXT, &s.hull_name, "RANGE", "feasible (default), or full: as the published code, to compare"},
        {"sink", 0, CLI_COUNT, &s.sink, "N", "first tokens that always stay (default: as recorded with the metric)"},
        {"window", 0, CLI_COUNT, &s.window, "N", "last tokens that always stay (default: as recorded with the metric)"},
        {"contexts", 'c', CLI_TEXT, &s.contexts, "IDS", "use only these contexts, commas between"},
        {"questions", 'q', CLI_COUNT, &s.max_questions, "N", "use only the first N questions of every context"},
        {"budgets", 0, CLI_TEXT, &s.budgets, "FILE",
         "also write every question's own optimum: tokens kept, an int32 .npy\n[questions, 99, layers, KV heads]"},
        {"json", 0, CLI_FLAG, &s.json, NULL, "print all 99 rows as JSON instead of the short table"},
        {"quiet", 0, CLI_FLAG, &s.quiet, NULL, "no progress, no file names"},
        {0},
    };
    int first, code = cli_parse(self, options, argc, argv, &first);
    if (code == EXIT_DONE && argc - first != 1)
        code =
            cli_usage_error(self, "expected one record, found %d operands: kvbudget %s", argc - first, self->synopsis);
    if (code == EXIT_DONE) code = check_options(&s);
    if (code == EXIT_DONE) {
        kvb_error err = {0};
        s.path = argv[first];
        cli_catch_signals();
        if (solve_all(&s, &err) != KVB_OK) code = cli_failed(self, &err);
    }
    record_close(s.r);
    free(s.selected);
    cli_list_free(&s.metric_names);
    return code < 0 ? EXIT_DONE : code;
}

const cli_command cmd_solve = {
    "solve",
    "solve RUN.h5 --metric M -o M.safetensors [OPTION]...",
    "turn a record into a table: the best split of the cache over all heads",
    "For every question and every ratio from 1 % to 99 % pruned it finds how many tokens each KV head should\n"
    "keep so that, with this metric choosing which, the least oracle importance is lost; then it averages\n"
    "over the questions.\n"
    "\n"
    "It prints, each as a share of all importance that can be lost, averaged over the questions:\n"
    "  loss     of every question's own best budgets (mean_ratio), or of the common ones (mean_loss)\n"
    "  bound    no budgets of this size can lose less: proved for every question by a multiplier\n"
    "  gap      how much of the loss the best possible budgets could save at most\n"
    "  table    loss of the table itself, rounded to whole tokens, on these questions\n"
    "  uniform  the same when all heads keep equally many\n"
    "Rows at which all heads have reached their floor, 1 % or sinks and window, are saturated: they prune less\n"
    "than they say.\n"
    "\n"
    "Examples:\n"
    "  kvbudget solve run.h5 --metric snapkv:kvpress -o snapkv.safetensors\n"
    "  kvbudget solve run.h5 --metric all -o 'tables/{metric}.safetensors' --npy tables\n"
    "  kvbudget solve run.h5 --metric keydiff --aggregate mean_loss --json\n",
    run_solve,
};
