// Two walks over every record: the first sums up each text at each length, the second judges every pair by tables that
// have not seen its text, whatever the length.
#include "tools/solve_lengths.h"
#include "runtime/fail.h"
#include "solver/study.h"
#include "tools/svg.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTHS_MAX = 8, TEXTS_MAX = 16, CUTS_MAX = LENGTHS_MAX * TEXTS_MAX };

struct lengths;

// One record: all texts at one length.
typedef struct cut {
    metric_job job; // first: actions get its address
    struct lengths *all;
    solve_command s;   // its own record, contexts and metric; the rest is the user's
    study_part *texts; // [n_texts]
    uint32_t pairs[TEXTS_MAX];
    uint32_t tokens; // of its longest context
    char name[16];
    uint32_t fitted;                 // text that `tables` have not seen; n_texts: none yet
    double *tables[LENGTHS_MAX + 2]; // [R, N] from each length, from all, and from all but this one
} cut;

typedef struct lengths {
    cut *cuts; // [n_cuts]
    uint32_t n_cuts, n_texts, n_pairs;
    size_t cells; // R N
    solve_options options;
    double *own;                                     // [n_cuts, n_texts, R, N] table of one text at one length
    double loss[LENGTHS_MAX + 2][LENGTHS_MAX][ROWS]; // [from][on]: mean over the pairs of a record
    double *transfer; // [R, cuts x texts, cuts x texts] losses of single texts' tables; a text's lengths stand together
    char names[CUTS_MAX][24];
} lengths;

// Rows and columns of the transfer matrix.
static uint32_t place(const lengths *x, uint32_t cut_at, uint32_t text)
{
    return text * x->n_cuts + cut_at;
}

static const char *text_name(const lengths *x, uint32_t text)
{
    const solve_command *s = &x->cuts[0].s;
    return record_context(s->r, s->selected[text])->id;
}

// ---- Walks ----------------------------------------------------------------------------------------------------------

static kvb_status collect_pair(solve_command *s, metric_job *job, problem *p, kvb_error *err)
{
    cut *c = (cut *)job;
    (void)s;
    kvb_status status = problem_solve(p, err);
    if (status == KVB_OK) status = study_part_add(&c->texts[job->context], p, err);
    c->pairs[job->context]++;
    return status;
}

// From the texts but `held` of all lengths that `from` says: a length, n_cuts for all, n_cuts + 1 for all but `on`.
static kvb_status fit(lengths *x, uint32_t from, uint32_t on, uint32_t held, double *table, kvb_error *err)
{
    const study_part *parts[CUTS_MAX];
    uint32_t n = 0;
    for (uint32_t k = 0; k < x->n_cuts; k++) {
        bool in = from < x->n_cuts ? k == from : from == x->n_cuts || k != on;
        for (uint32_t t = 0; t < x->n_texts && in; t++)
            if (t != held) parts[n++] = &x->cuts[k].texts[t];
    }
    return study_mean_loss(table, parts, n, DEFAULT_SHRINK, &x->options, err);
}

static kvb_status judge_pair(solve_command *s, metric_job *job, problem *p, kvb_error *err)
{
    cut *c = (cut *)job;
    lengths *x = c->all;
    uint32_t text = (uint32_t)job->context, on = (uint32_t)(c - x->cuts), side = x->n_cuts * x->n_texts;
    kvb_status status = KVB_OK;
    (void)s;
    for (uint32_t from = 0; from < x->n_cuts + 2 && status == KVB_OK; from++) {
        double loss[ROWS] = {0};
        if (c->fitted != text) status = fit(x, from, on, text, c->tables[from], err);
        if (status == KVB_OK) status = judge_table(loss, &p->curves, NULL, ROWS, c->tables[from], err);
        for (uint32_t r = 0; r < ROWS; r++) x->loss[from][on][r] += loss[r] / job->n_pairs;
    }
    c->fitted = text;
    for (uint32_t i = 0; i < side && status == KVB_OK; i++) {
        double loss[ROWS] = {0};
        status = judge_table(loss, &p->curves, NULL, ROWS, x->own + i * x->cells, err);
        for (uint32_t r = 0; r < ROWS; r++)
            x->transfer[((size_t)r * side + i) * side + place(x, on, text)] += loss[r] / c->pairs[text];
    }
    return status;
}

static kvb_status run_walks(lengths *x, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (uint32_t k = 0; k < x->n_cuts && status == KVB_OK; k++) {
        cut *c = &x->cuts[k];
        uint32_t done = 0;
        progress_begin(&c->s.bar, c->name, c->s.quiet);
        status = walk_pairs(&c->s, &c->job, collect_pair, &done, err);
        progress_end(&c->s.bar, status == KVB_OK ? "read" : "stopped");
    }
    for (uint32_t k = 0; k < x->n_cuts; k++)
        for (uint32_t t = 0; t < x->n_texts && status == KVB_OK; t++) {
            const study_part *part = &x->cuts[k].texts[t];
            status = study_mean_loss(x->own + place(x, k, t) * x->cells, &part, 1, DEFAULT_SHRINK, &x->options, err);
        }
    for (uint32_t k = 0; k < x->n_cuts && status == KVB_OK; k++) {
        cut *c = &x->cuts[k];
        uint32_t done = 0;
        progress_begin(&c->s.bar, c->name, c->s.quiet);
        status = walk_pairs(&c->s, &c->job, judge_pair, &done, err);
        progress_end(&c->s.bar, status == KVB_OK ? "judged" : "stopped");
    }
    return status;
}

// ---- Records --------------------------------------------------------------------------------------------------------

// Leaves in every record the contexts of the first one, in its order.
static kvb_status match_contexts(lengths *x, kvb_error *err)
{
    const solve_command *first = &x->cuts[0].s;
    x->n_texts = (uint32_t)first->n_selected;
    if (x->n_texts < 2 || x->n_texts > TEXTS_MAX)
        return kvb_fail(err, KVB_ARGUMENT, "--lengths: expected 2 to %d contexts in %s, found %zu (--contexts chooses)",
                        TEXTS_MAX, first->path, first->n_selected);
    for (uint32_t k = 1; k < x->n_cuts; k++) {
        solve_command *s = &x->cuts[k].s;
        size_t order[TEXTS_MAX] = {0};
        for (uint32_t t = 0; t < x->n_texts; t++) {
            size_t i = 0, n = s->n_selected;
            while (i < n && strcmp(record_context(s->r, s->selected[i])->id, text_name(x, t)) != 0) i++;
            if (i == n)
                return kvb_fail(err, KVB_MISMATCH,
                                "%s: has no context %s, which is in %s; profile the same calibration data at every "
                                "length (--max-tokens)",
                                s->path, text_name(x, t), first->path);
            order[t] = s->selected[i];
        }
        memcpy(s->selected, order, x->n_texts * sizeof *order);
        s->n_selected = x->n_texts;
    }
    return KVB_OK;
}

static kvb_status open_record(cut *c, const solve_command *s, const char *path, const char *metric, kvb_error *err)
{
    c->s = *s;
    c->s.path = path;
    c->s.r = NULL;
    c->s.selected = NULL;
    c->s.n_selected = c->s.n_metrics = 0;
    c->s.metric_names = (cli_list){&metric, 1};
    kvb_status status = select_from_record(&c->s, err);
    c->s.metric_names = (cli_list){0};
    if (status != KVB_OK) return status;
    // The pairs' own problems are solved as the paper does; the tables pull their curves together themselves.
    c->s.aggregate = AGGREGATE_MEAN_RATIO;
    c->s.mean_loss = false;
    c->job.metric = c->s.metrics[0];
    c->job.n_visits = 1;
    return KVB_OK;
}

static kvb_status check_cut(const lengths *x, const cut *c, const cache_shape *shape, kvb_error *err)
{
    record_shape first = record_get_shape(x->cuts[0].s.r);
    if (shape->n_layers != first.n_layers || shape->n_kv_heads != first.n_kv_heads)
        return kvb_fail(err, KVB_MISMATCH, "%s: expected %u layers x %u KV heads as in %s, found %u x %u", c->s.path,
                        first.n_layers, first.n_kv_heads, x->cuts[0].s.path, shape->n_layers, shape->n_kv_heads);
    if (c->job.n_contexts != x->n_texts)
        return kvb_fail(err, KVB_ARGUMENT, "%s: %u of %u contexts have no question with recorded queries", c->s.path,
                        x->n_texts - c->job.n_contexts, x->n_texts);
    return require_model(&c->s, attribute_text(x->cuts[0].s.r, "model_sha256"), x->cuts[0].s.path, err);
}

static kvb_status prepare_cuts(lengths *x, kvb_error *err)
{
    cache_shape longest = {0}, shape = {0};
    kvb_status status = match_contexts(x, err);
    for (uint32_t k = 0; k < x->n_cuts && status == KVB_OK; k++) {
        cut *c = &x->cuts[k];
        status = prepare_pairs(&c->s, &c->job, &shape, err);
        if (status == KVB_OK) status = check_cut(x, c, &shape, err);
        if (shape.n_tokens > longest.n_tokens) longest = shape;
        c->tokens = c->job.longest;
        c->fitted = x->n_texts;
        x->n_pairs += c->job.n_pairs;
        snprintf(c->name, sizeof c->name, "%u", c->tokens);
    }
    x->cells = ROWS * (size_t)shape_heads(&longest);
    size_t side = (size_t)x->n_cuts * x->n_texts;
    if (status != KVB_OK) return status;
    x->own = malloc(side * x->cells * sizeof *x->own);
    x->transfer = calloc(ROWS * side * side, sizeof *x->transfer);
    bool ok = x->own && x->transfer;
    for (uint32_t k = 0; k < x->n_cuts && status == KVB_OK && ok; k++) {
        cut *c = &x->cuts[k];
        c->texts = calloc(x->n_texts, sizeof *c->texts);
        ok = c->texts != NULL;
        for (uint32_t from = 0; from < x->n_cuts + 2; from++)
            ok = (c->tables[from] = malloc(x->cells * sizeof **c->tables)) && ok;
        for (uint32_t t = 0; t < x->n_texts && status == KVB_OK && ok; t++) {
            snprintf(x->names[place(x, k, t)], sizeof *x->names, "%.9s %u", text_name(x, t), c->tokens);
            status = study_part_init(&c->texts[t], &longest, STUDY_GRID, ROWS, err);
        }
    }
    return ok ? status : kvb_fail(err, KVB_MEMORY, "no memory for %u texts at %u lengths", x->n_texts, x->n_cuts);
}

static void lengths_free(lengths *x)
{
    for (uint32_t k = 0; k < x->n_cuts; k++) {
        cut *c = &x->cuts[k];
        for (uint32_t t = 0; t < x->n_texts && c->texts; t++) study_part_free(&c->texts[t]);
        for (uint32_t from = 0; from < x->n_cuts + 2; from++) free(c->tables[from]);
        free(c->texts);
        release_pairs(&c->job);
        free(c->s.selected);
        record_close(c->s.r);
    }
    free(x->cuts);
    free(x->own);
    free(x->transfer);
    free(x);
}

// ---- What comes out -------------------------------------------------------------------------------------------------

// What tables from elsewhere lose more than those from the length itself.
static double change(const lengths *x, uint32_t from, uint32_t on, uint32_t row)
{
    double own = x->loss[on][on][row];
    return own > 0 ? x->loss[from][on][row] / own - 1 : 0;
}

// What the table of one text at one length loses more on another than the other's own, which has seen it.
static double regret(const lengths *x, uint32_t from, uint32_t to, uint32_t row)
{
    size_t side = (size_t)x->n_cuts * x->n_texts;
    const double *loss = x->transfer + row * side * side;
    double own = loss[to * side + to];
    return own > 0 ? loss[from * side + to] / own - 1 : 0;
}

static const char *source_name(const lengths *x, uint32_t from)
{
    return from < x->n_cuts ? x->cuts[from].name : from == x->n_cuts ? "all lengths" : "all but this";
}

static void print_lengths(const solve_command *s, const lengths *x)
{
    static const uint32_t shown[] = {50, 80, 90};
    const metric_job *job = &x->cuts[0].job;
    printf("%s: %u questions on %u texts at %u lengths, each text held out, sink %u, window %u, %s\n", job->metric,
           x->n_pairs, x->n_texts, x->n_cuts, job->sink, job->window,
           s->options.scope == SCOPE_LAYER ? "layer by layer" : "over all layers");
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++) {
        uint32_t row = shown[i] - 1;
        printf("  %u %% pruned: loss %% with tables from the same length, and how many per cent more with others:\n",
               shown[i]);
        printf("  %-22s", "table from \\ used on");
        for (uint32_t on = 0; on < x->n_cuts; on++) printf(" %9s", x->cuts[on].name);
        printf("\n  %-22s", "the same length");
        for (uint32_t on = 0; on < x->n_cuts; on++) printf(" %9.4f", 100 * x->loss[on][on][row]);
        printf("\n");
        for (uint32_t from = 0; from < x->n_cuts + 2; from++) {
            printf("  %-22s", source_name(x, from));
            for (uint32_t on = 0; on < x->n_cuts; on++) printf(" %+9.2f", 100 * change(x, from, on, row));
            printf("\n");
        }
    }
}

static bool add_json(cJSON *list, const lengths *x)
{
    cJSON *item = cJSON_CreateObject(), *tokens, *names, *from_list, *transfer;
    uint32_t side = x->n_cuts * x->n_texts;
    bool ok =
        item && cJSON_AddItemToArray(list, item) && cJSON_AddStringToObject(item, "metric", x->cuts[0].job.metric) &&
        cJSON_AddNumberToObject(item, "n_texts", x->n_texts) &&
        cJSON_AddNumberToObject(item, "n_questions", x->n_pairs) &&
        (tokens = cJSON_AddArrayToObject(item, "lengths")) && (names = cJSON_AddArrayToObject(item, "cuts")) &&
        (from_list = cJSON_AddArrayToObject(item, "tables")) && (transfer = cJSON_AddArrayToObject(item, "transfer"));
    for (uint32_t k = 0; k < x->n_cuts && ok; k++)
        ok = cJSON_AddItemToArray(tokens, cJSON_CreateNumber(x->cuts[k].tokens));
    for (uint32_t i = 0; i < side && ok; i++) ok = cJSON_AddItemToArray(names, cJSON_CreateString(x->names[i]));
    for (uint32_t from = 0; from < x->n_cuts + 2 && ok; from++) {
        cJSON *one = cJSON_CreateObject(), *losses;
        ok = one && cJSON_AddItemToArray(from_list, one) &&
             cJSON_AddStringToObject(one, "from", source_name(x, from)) &&
             (losses = cJSON_AddArrayToObject(one, "loss"));
        for (uint32_t on = 0; on < x->n_cuts && ok; on++)
            ok = cJSON_AddItemToArray(losses, cJSON_CreateDoubleArray(x->loss[from][on], ROWS));
    }
    for (uint32_t row = 9; row < ROWS && ok; row += 10) {
        cJSON *one = cJSON_CreateObject(),
              *loss = cJSON_CreateDoubleArray(x->transfer + (size_t)row * side * side, (int)(side * side));
        ok = one && cJSON_AddItemToArray(transfer, one) && cJSON_AddNumberToObject(one, "ratio", (row + 1) / 100.0) &&
             loss && cJSON_AddItemToObject(one, "loss", loss);
    }
    return ok;
}

static int draw_changes(const lengths *x, uint32_t row, int top, FILE *out)
{
    enum { WIDTH = 820 };
    double values[(LENGTHS_MAX + 2) * LENGTHS_MAX], most = 1;
    const char *rows[LENGTHS_MAX + 2], *columns[LENGTHS_MAX];
    char title[120];
    int height = 40 + 24 * (int)(x->n_cuts + 2);
    for (uint32_t from = 0; from < x->n_cuts + 2; from++) {
        rows[from] = source_name(x, from);
        for (uint32_t on = 0; on < x->n_cuts; on++) {
            columns[on] = x->cuts[on].name;
            most = fmax(most, values[from * x->n_cuts + on] = 100 * change(x, from, on, row));
        }
    }
    snprintf(title, sizeof title,
             "Held-out loss at %u %% pruned: per cent more than with tables from the column's own length", row + 1);
    svg_matrix_put(out,
                   &(svg_matrix){.title = title,
                                 .n_rows = x->n_cuts + 2,
                                 .n_columns = x->n_cuts,
                                 .row_names = rows,
                                 .column_names = columns,
                                 .values = values,
                                 .most = most,
                                 .decimals = 1},
                   SVG_MARGIN, top, WIDTH, height);
    return top + height + 30;
}

static void draw_lengths(const solve_command *s, const void *what, FILE *out)
{
    enum { WIDTH = 820, TOP = 78 };
    const lengths *x = what;
    uint32_t side = x->n_cuts * x->n_texts;
    int top = TOP, blocks = 40 + 24 * (int)(x->n_cuts + 2) + 30, last = 40 + 20 * (int)side;
    char title[160], subtitle[160];
    static double values[CUTS_MAX * CUTS_MAX];
    const char *names[CUTS_MAX];
    double most = 1;
    (void)s;
    snprintf(title, sizeof title, "Tables at other lengths: %.110s", x->cuts[0].job.metric);
    snprintf(subtitle, sizeof subtitle, "%u questions on %u texts at %u lengths; each text left out in turn",
             x->n_pairs, x->n_texts, x->n_cuts);
    svg_begin(out, 2 * SVG_MARGIN + WIDTH, TOP + 2 * blocks + last + SVG_MARGIN, title, subtitle);
    top = draw_changes(x, 49, top, out);
    top = draw_changes(x, 79, top, out);
    for (uint32_t from = 0; from < side; from++) {
        names[from] = x->names[from];
        for (uint32_t to = 0; to < side; to++)
            most = fmax(most, values[from * side + to] = 100 * regret(x, from, to, 79));
    }
    svg_matrix_put(out,
                   &(svg_matrix){.title = "Regret in per cent at 80 % pruned: the table of a row's text and length, "
                                          "used on a column's (same order)",
                                 .n_rows = side,
                                 .n_columns = side,
                                 .row_names = names,
                                 .values = values,
                                 .most = most,
                                 .decimals = side <= 16 ? 0 : -1},
                   SVG_MARGIN, top, WIDTH, last);
    svg_end(out);
}

kvb_status solve_lengths(solve_command *s, const char *metric, cJSON *list, kvb_error *err)
{
    if (s->n_records < 2 || s->n_records > LENGTHS_MAX)
        return kvb_fail(err, KVB_ARGUMENT, "--lengths: expected 2 to %d records, one for each length, found %zu",
                        LENGTHS_MAX, s->n_records);
    lengths *x = calloc(1, sizeof *x);
    if (x) x->cuts = calloc(s->n_records, sizeof *x->cuts);
    if (!x || !x->cuts) {
        free(x);
        return kvb_fail(err, KVB_MEMORY, "no memory for metric %s", metric);
    }
    x->options = s->options;
    kvb_status status = KVB_OK;
    for (size_t k = 0; k < s->n_records && status == KVB_OK; k++) {
        x->n_cuts++;
        x->cuts[k].all = x;
        status = open_record(&x->cuts[k], s, s->records[k], metric, err);
    }
    if (status == KVB_OK) status = prepare_cuts(x, err);
    if (status == KVB_OK) status = run_walks(x, err);
    if (status == KVB_OK && s->picture) status = write_picture(s, s->picture, metric, draw_lengths, x, err);
    if (status == KVB_OK && list && !add_json(list, x))
        status = kvb_fail(err, KVB_MEMORY, "no memory for the JSON text");
    if (status == KVB_OK && !list) print_lengths(s, x);
    lengths_free(x);
    return status;
}
