// Which pairs of a record a command works on, and reading them one by one: shared by solve and validate.
#include "runtime/fail.h"
#include "solver/constrained.h"
#include "tools/solve_job.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

solve_command solve_command_make(const cli_command *self)
{
    return (solve_command){.self = self,
                           .shrink = NAN,
                           .min_keep = NAN,
                           .seed = 1,
                           .scope_name = "global",
                           .hull_name = "feasible",
                           .order_name = "metric",
                           .sink = NOT_GIVEN,
                           .window = NOT_GIVEN,
                           .max_questions = NOT_GIVEN};
}

void solve_command_free(solve_command *s)
{
    record_close(s->r);
    free(s->selected);
    cli_list_free(&s->metric_names);
    wishes_free(&s->wishes);
    kvb_limits_free(&s->limits);
}

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

void warn_of_pairs(const metric_job *job)
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

kvb_status select_from_record(solve_command *s, kvb_error *err)
{
    kvb_status status = record_open(&s->r, s->path, err);
    if (status == KVB_OK && record_shard(s->r))
        status =
            kvb_fail(err, KVB_MISMATCH, "%s: is shard %.20s of a run; put all shards together first (kvbudget merge)",
                     s->path, record_shard(s->r));
    if (status == KVB_OK) status = select_contexts(s, err);
    if (status == KVB_OK) status = select_metrics(s, err);
    return status;
}

const char *attribute_text(const record *r, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(record_attributes(r), name);
    return cJSON_IsString(item) ? item->valuestring : "";
}

kvb_status require_model(const solve_command *s, const char *sha256, const char *other, kvb_error *err)
{
    const char *own = attribute_text(s->r, "model_sha256");
    if (!*own || !*sha256 || strcasecmp(own, sha256) == 0) return KVB_OK;
    return kvb_fail(err, KVB_MISMATCH,
                    "%s and %s are of different models: the weights have SHA-256 %.16s... and %.16s...", s->path, other,
                    own, sha256);
}

// One mean for every context, on a grid that does not grow with their length.
static kvb_status prepare_texts(const solve_command *s, metric_job *job, const cache_shape *longest, kvb_error *err)
{
    kvb_status status = KVB_OK;
    job->texts = calloc(s->n_selected, sizeof *job->texts);
    job->text_weights = calloc(ROWS * s->n_selected, sizeof *job->text_weights);
    if (!job->texts || !job->text_weights)
        return kvb_fail(err, KVB_MEMORY, "no memory for %zu contexts", s->n_selected);
    for (size_t k = 0; k < s->n_selected && status == KVB_OK; k++, job->n_texts++)
        status = loss_mean_init_coarse(&job->texts[k], longest, STUDY_GRID, err);
    return status;
}

kvb_status prepare_pairs(const solve_command *s, metric_job *job, cache_shape *longest, kvb_error *err)
{
    record_shape model = record_get_shape(s->r);
    kvb_status status = read_protection(s, job, err);
    if (status == KVB_OK) status = count_pairs(s, job, err);
    if (status != KVB_OK) return status;
    *longest = (cache_shape){model.n_layers, model.n_kv_heads, job->longest, job->sink, job->window};
    status = cache_shape_check(longest, err);
    if (status != KVB_OK) return status;
    size_t numbers = (size_t)shape_heads(longest) * longest->n_tokens;
    job->scores = malloc(numbers * sizeof *job->scores);
    job->oracle = malloc(numbers * sizeof *job->oracle);
    if (!job->scores || !job->oracle)
        return kvb_fail(err, KVB_MEMORY, "no memory for %u heads of %u tokens", shape_heads(longest), job->longest);
    if (s->aggregate == AGGREGATE_TAIL) return prepare_texts(s, job, longest, err);
    return s->mean_loss ? loss_mean_init(&job->merged, longest, err) : KVB_OK;
}

void release_pairs(metric_job *job)
{
    loss_mean_free(&job->merged);
    for (size_t k = 0; k < job->n_texts; k++) loss_mean_free(&job->texts[k]);
    free(job->texts);
    free(job->text_weights);
    free(job->parameters);
    free(job->scores);
    free(job->oracle);
}

kvb_status merge_pair(const solve_command *s, metric_job *job, const loss_curves *c, kvb_error *err)
{
    bool tail = s->aggregate == AGGREGATE_TAIL;
    return loss_mean_add(tail ? &job->texts[job->context] : &job->merged, c, err);
}

void merge_finish(const solve_command *s, metric_job *job)
{
    if (s->mean_loss) {
        loss_mean_finish(&job->merged);
        loss_curves_shrink(&job->merged.curves, s->shrink);
    }
    // Contexts without a question leave no gap.
    size_t used = 0;
    for (size_t k = 0; k < job->n_texts; k++) {
        if (job->texts[k].count == 0) {
            loss_mean_free(&job->texts[k]);
            continue;
        }
        loss_mean_finish(&job->texts[k]);
        loss_curves_shrink(&job->texts[k].curves, s->shrink);
        loss_mean text = job->texts[k];
        job->texts[k] = (loss_mean){0};
        job->texts[used++] = text;
    }
    job->n_texts = used;
}

kvb_status judge_table(double *sum, const loss_curves *c, const kvb_limits *limits, uint32_t n_rows,
                       const double *prune_ratio, kvb_error *err)
{
    uint32_t n = shape_heads(&c->shape), *keep = malloc(n * sizeof *keep);
    if (!keep) return kvb_fail(err, KVB_MEMORY, "no memory for %u heads", n);
    kvb_status status = KVB_OK;
    if (limits) status = constrained_loss_add(sum, c, limits, n_rows, prune_ratio, keep, err);
    else table_loss_add(sum, c, n_rows, prune_ratio, keep);
    free(keep);
    return status;
}

// ---- Reading --------------------------------------------------------------------------------------------------------

static kvb_status visit_questions(solve_command *s, metric_job *job, size_t index, pair_action *action, problem *p,
                                  const metric_order *order, uint32_t *done, kvb_error *err)
{
    const record_context_info *c = record_context(s->r, index);
    kvb_status status = KVB_OK;
    for (uint32_t q = 0; q < c->n_questions && status == KVB_OK; q++) {
        if (!is_selected(s, &c->questions[q], q)) continue;
        job->question = q;
        if (cli_stop_requested) return kvb_fail(err, KVB_INTERRUPTED, "stopped; nothing was written");
        status = record_read_oracle(s->r, index, q, job->oracle, err);
        if (status != KVB_OK) return status; // names file and question itself
        kvb_error inner = {0};
        status = loss_curves_fill(&p->curves, order, job->oracle, &inner);
        if (status == KVB_OK) status = action(s, job, p, &inner);
        if (status != KVB_OK)
            kvb_fail(err, status, "%s: context %s, question %u: %s", s->path, c->id, c->questions[q].number,
                     inner.message);
        progress_update(&s->bar, ++*done, (double)job->n_visits * job->n_pairs, "problems");
    }
    return status;
}

kvb_status walk_pairs(solve_command *s, metric_job *job, pair_action *action, uint32_t *done, kvb_error *err)
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
        job->context = k;
        status = record_read_scores(s->r, s->selected[k], job->metric, job->scores, err);
        if (status == KVB_OK) status = metric_order_make(&order, &shape, job->scores, err);
        if (status == KVB_OK) status = problem_init(&p, &shape, &s->options, err);
        uint32_t least = (uint32_t)ceil(s->min_keep * shape.n_tokens);
        if (status == KVB_OK && p.curves.floor < least) p.curves.floor = least;
        if (status == KVB_OK) status = visit_questions(s, job, s->selected[k], action, &p, &order, done, err);
        problem_free(&p);
        metric_order_free(&order);
    }
    return status;
}

// ---- The command line -----------------------------------------------------------------------------------------------

// Index of a word in a pair of words, or -1.
static int find_word(const char *word, const char *first, const char *second)
{
    return strcmp(word, first) == 0 ? 0 : strcmp(word, second) == 0 ? 1 : -1;
}

bool read_aggregate(solve_command *s)
{
    const char *name = s->aggregate_name;
    char *end;
    s->tail = 0;
    if (strcmp(name, "mean_ratio") == 0) s->aggregate = AGGREGATE_MEAN_RATIO;
    else if (strcmp(name, "mean_loss") == 0) s->aggregate = AGGREGATE_MEAN_LOSS;
    else if (strcmp(name, "worst") == 0) s->aggregate = AGGREGATE_TAIL;
    else if (strncmp(name, "cvar:", 5) == 0 && name[5]) {
        s->aggregate = AGGREGATE_TAIL;
        s->tail = strtod(name + 5, &end);
        if (*end || !(s->tail > 0 && s->tail <= 1)) return false;
    } else return false;
    s->mean_loss = s->aggregate == AGGREGATE_MEAN_LOSS;
    return true;
}

// What --aggregate, --paper, --shrink and --min-keep make together. An exit code.
static int check_aggregation(solve_command *s)
{
    if (s->paper && s->aggregate_name)
        return cli_usage_error(s->self, "--paper is --aggregate mean_ratio; give one of them");
    if (s->paper && (!isnan(s->shrink) || !isnan(s->min_keep)))
        return cli_usage_error(s->self, "--paper takes neither --shrink nor --min-keep: the paper has none");
    if (!s->aggregate_name) s->aggregate_name = s->paper ? "mean_ratio" : "mean_loss";
    if (!read_aggregate(s))
        return cli_usage_error(
            s->self, "--aggregate: expected mean_ratio, mean_loss, worst or cvar:A with 0 < A <= 1, found '%s'",
            s->aggregate_name);
    if (isnan(s->shrink)) s->shrink = s->mean_loss ? DEFAULT_SHRINK : 0;
    if (isnan(s->min_keep)) s->min_keep = 0;
    if (!(s->shrink >= 0 && s->shrink <= 1)) return cli_usage_error(s->self, "--shrink: expected 0 to 1");
    if (!(s->min_keep >= 0 && s->min_keep < 1))
        return cli_usage_error(s->self, "--min-keep: expected 0 to less than 1");
    if (s->aggregate == AGGREGATE_TAIL && s->exact)
        return cli_usage_error(s->self, "--exact solves one problem; %s is found by solving many greedily",
                               s->aggregate_name);
    return EXIT_DONE;
}

int check_solve_options(solve_command *s)
{
    int scope = find_word(s->scope_name, "global", "layer"), hull = find_word(s->hull_name, "feasible", "full");
    if (scope < 0) return cli_usage_error(s->self, "--scope: expected global or layer, found '%s'", s->scope_name);
    if (hull < 0) return cli_usage_error(s->self, "--hull: expected feasible or full, found '%s'", s->hull_name);
    int order = find_word(s->order_name, "metric", "oracle");
    if (order < 0) return cli_usage_error(s->self, "--order: expected metric or oracle, found '%s'", s->order_name);
    s->oracle_order = order == 1;
    int code = check_aggregation(s);
    if (code != EXIT_DONE) return code;
    if (s->monotone && !s->exact)
        return cli_usage_error(s->self, "--monotone is for --exact: greedy's budgets are nested anyway");
    if (s->exact && hull == 1)
        return cli_usage_error(s->self, "--hull full is a form of greedy; the exact solution uses no hulls");
    if (s->metric_names.count == 0)
        return cli_usage_error(s->self, "--metric M is missing: for which eviction metric (or all)?");
    if ((s->sink != NOT_GIVEN && s->sink > UINT32_MAX / 4) || (s->window != NOT_GIVEN && s->window > UINT32_MAX / 4))
        return cli_usage_error(s->self, "--sink or --window is out of range");
    if (s->max_questions == 0) return cli_usage_error(s->self, "--questions: expected at least 1");
    const char *const paths[] = {s->output, s->npy, s->budgets};
    for (int i = 0; i < 3; i++)
        if (paths[i] && !*paths[i]) return cli_usage_error(s->self, "a file name is empty");
    table_ratios(s->ratios);
    s->n_rows = ROWS;
    bool limited = wishes_limit(&s->wishes);
    if (limited && s->aggregate == AGGREGATE_TAIL)
        return cli_usage_error(s->self,
                               "%s mixes the budgets of several problems, which breaks constraints; use "
                               "mean_loss or mean_ratio",
                               s->aggregate_name);
    if (limited && s->monotone)
        return cli_usage_error(s->self, "--monotone cannot be had with constraints: rows are solved one by one");
    if (limited && hull == 1)
        return cli_usage_error(s->self, "--hull full is the published form of greedy, which knows no constraints");
    if (s->npy && (limited || s->wishes.ratios))
        return cli_usage_error(s->self, "--npy: kvpress expects 99 rows, and keeps to no constraints");
    s->options = (solve_options){hull == 1 ? HULL_FULL : HULL_FEASIBLE, scope == 1 ? SCOPE_LAYER : SCOPE_GLOBAL,
                                 s->ratios, ROWS, NULL};
    return EXIT_DONE;
}
