#include "tools/cmd/solve_line.h"
#include "runtime/fail.h"
#include "solver/constrained.h"
#include "tools/memory.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool wishes_limit(const constraint_wishes *w)
{
    return w->block > 1 || w->levels || w->ranks > 1 || w->caps.count || w->floors.count || w->ceilings.count ||
           w->pins.count || w->bytes;
}

bool wishes_ratios(const constraint_wishes *w)
{
    return w->ratios || w->bytes;
}

static void wishes_free(constraint_wishes *w)
{
    cli_list_free(&w->caps);
    cli_list_free(&w->floors);
    cli_list_free(&w->ceilings);
    cli_list_free(&w->pins);
}

// ---- Limits ---------------------------------------------------------------------------------------------------------

// Limits hold only the budgeted layers, while command lines count all layers of the model.
typedef struct limit_target {
    kvb_limits *limits;
    const layer_map *layers;
} limit_target;

// Parses LAYER or LAYER.HEAD into the heads first .. end - 1.
static kvb_status read_place(const char *option, const char *entry, const char *text, const limit_target *m,
                             size_t *first, size_t *end, kvb_error *err)
{
    uint32_t heads = m->limits->n_kv_heads;
    char *rest;
    unsigned long layer = strtoul(text, &rest, 10), head = 0;
    bool ok = rest != text && strchr("0123456789", *text), one = false;
    if (ok && *rest == '.') {
        const char *digits = rest + 1;
        head = strtoul(digits, &rest, 10);
        ok = rest != digits && strchr("0123456789", *digits);
        one = true;
    }
    if (!ok || *rest)
        return kvb_fail(err, KVB_ARGUMENT, "--%s %s: expected LAYER or LAYER.HEAD, such as 3 or 3.1, found '%s'",
                        option, entry, text);
    if (layer >= m->layers->n_layers || head >= heads)
        return kvb_fail(err, KVB_ARGUMENT, "--%s %s: the model has layers 0..%u with KV heads 0..%u", option, entry,
                        m->layers->n_layers - 1, heads - 1);
    uint32_t place = layer_map_place(m->layers, (uint32_t)layer);
    if (place == UINT32_MAX)
        return kvb_fail(err, KVB_ARGUMENT,
                        "--%s %s: the cache of layer %lu is bounded by its window, so nothing of it is budgeted",
                        option, entry, layer);
    *first = (size_t)place * heads + head;
    *end = one ? *first + 1 : *first + heads;
    return KVB_OK;
}

// Parses SHARE or SHARE@PLACE into the share and the heads first .. end - 1.
static kvb_status read_share(const char *option, const char *entry, const limit_target *m, double *share, size_t *first,
                             size_t *end, kvb_error *err)
{
    char *rest;
    *share = strtod(entry, &rest);
    *first = 0;
    *end = (size_t)m->limits->n_layers * m->limits->n_kv_heads;
    if (rest == entry || (*rest && *rest != '@') || !(*share >= 0 && *share <= 1))
        return kvb_fail(err, KVB_ARGUMENT, "--%s %s: expected a share from 0 to 1, with @LAYER or @LAYER.HEAD or alone",
                        option, entry);
    return *rest ? read_place(option, entry, rest + 1, m, first, end, err) : KVB_OK;
}

static kvb_status apply_shares(const char *option, const cli_list *list, const limit_target *m, double *shares,
                               kvb_error *err)
{
    for (size_t i = 0; i < list->count; i++) {
        double share;
        size_t first, end;
        kvb_status status = read_share(option, list->items[i], m, &share, &first, &end, err);
        if (status != KVB_OK) return status;
        for (size_t h = first; h < end; h++) shares[h] = share;
    }
    return KVB_OK;
}

static kvb_status apply_caps(const cli_list *list, const limit_target *m, kvb_error *err)
{
    uint32_t heads = m->limits->n_kv_heads;
    for (size_t i = 0; i < list->count; i++) {
        double share;
        size_t first, end;
        kvb_status status = read_share("layer-cap", list->items[i], m, &share, &first, &end, err);
        if (status != KVB_OK) return status;
        if ((end - first) % heads)
            return kvb_fail(err, KVB_ARGUMENT, "--layer-cap %s: a cap is for a whole layer; --ceiling is for heads",
                            list->items[i]);
        for (size_t l = first / heads; l < end / heads; l++) m->limits->cap[l] = share;
    }
    return KVB_OK;
}

static kvb_status apply_pins(const cli_list *list, const limit_target *m, kvb_error *err)
{
    for (size_t i = 0; i < list->count; i++) {
        size_t first, end;
        kvb_status status = read_place("pin", list->items[i], list->items[i], m, &first, &end, err);
        if (status != KVB_OK) return status;
        for (size_t h = first; h < end; h++) m->limits->least[h] = m->limits->most[h] = 1;
    }
    return KVB_OK;
}

// Makes the limits for L x G heads; for each head the last entry that names it counts. On failure *out is zero.
static kvb_status wishes_to_limits(const constraint_wishes *w, const layer_map *layers, uint32_t n_kv_heads,
                                   solve_scope scope, kvb_limits *out, kvb_error *err)
{
    const limit_target to = {out, layers};
    kvb_status status = kvb_limits_init(out, layers->n_budgeted, n_kv_heads, err);
    if (status != KVB_OK) return status;
    const struct {
        const char *option;
        uint64_t value;
        uint32_t most, *out;
    } counts[] = {{"block", w->block, 1 << 20, &out->block},
                  {"levels", w->levels, KVB_MAX_KV_HEADS, &out->levels},
                  {"ranks", w->ranks, KVB_MAX_KV_HEADS, &out->ranks}};
    for (int i = 0; i < 3 && status == KVB_OK; i++)
        if (counts[i].value > counts[i].most)
            status = kvb_fail(err, KVB_ARGUMENT, "--%s: expected at most %u", counts[i].option, counts[i].most);
        else if (counts[i].value > 0) *counts[i].out = (uint32_t)counts[i].value;
    out->by_layer = scope == SCOPE_LAYER;
    if (status == KVB_OK) status = apply_caps(&w->caps, &to, err);
    if (status == KVB_OK) status = apply_shares("floor", &w->floors, &to, out->least, err);
    if (status == KVB_OK) status = apply_shares("ceiling", &w->ceilings, &to, out->most, err);
    if (status == KVB_OK) status = apply_pins(&w->pins, &to, err);
    if (status == KVB_OK) status = kvb_limits_check(out, err);
    if (status != KVB_OK) kvb_limits_free(out);
    return status;
}

// ---- Ratios ---------------------------------------------------------------------------------------------------------

// Parses 0.3,0.5,0.8 or 0.5:0.9:0.05, both ends included.
static kvb_status read_ratios(const char *text, double *ratios, uint32_t *n, kvb_error *err)
{
    double number[TABLE_ROWS];
    uint32_t count = 0;
    char separator = strchr(text, ':') ? ':' : ',';
    const char *at = text;
    for (bool more = true; more; at++) {
        char *end;
        if (count == TABLE_ROWS)
            return kvb_fail(err, KVB_ARGUMENT, "--ratios %.60s...: expected at most %d", text, TABLE_ROWS);
        number[count++] = strtod(at, &end);
        more = *end == separator;
        if (end == at || (*end && !more))
            return kvb_fail(err, KVB_ARGUMENT,
                            "--ratios %.60s: expected numbers such as 0.3,0.5,0.8, or FIRST:LAST:STEP", text);
        at = end;
    }
    *n = count;
    memcpy(ratios, number, count * sizeof *ratios);
    if (separator == ':') {
        double steps = count == 3 ? (number[1] - number[0]) / number[2] : -1;
        if (!(steps >= 0 && steps < TABLE_ROWS + 1e-6 - 1) || !(number[2] > 0))
            return kvb_fail(err, KVB_ARGUMENT,
                            "--ratios %.60s: expected FIRST:LAST:STEP with at most %d ratios, such as 0.5:0.9:0.05",
                            text, TABLE_ROWS);
        *n = (uint32_t)(steps + 1e-6) + 1;
        // Rounded to 12 places, so that 0.5 + 6 * 0.05 is 0.8.
        for (uint32_t i = 0; i < *n; i++) ratios[i] = rint((number[0] + i * number[2]) * 1e12) / 1e12;
    }
    for (uint32_t i = 0; i < *n; i++)
        if (!(ratios[i] > (i > 0 ? ratios[i - 1] : 0) && ratios[i] < 1))
            return kvb_fail(err, KVB_ARGUMENT,
                            "--ratios %.60s: expected ascending prune ratios between 0 and 1, found %g", text,
                            ratios[i]);
    return KVB_OK;
}

// Computes the bytes of one key or value of head_dim elements.
static kvb_status row_bytes(const char *dtype, uint32_t head_dim, double *bytes, kvb_error *err)
{
    static const struct {
        const char *name;
        double bytes;
    } types[] = {{"f32", 4}, {"f16", 2}, {"bf16", 2}, {"fp8", 1}, {"q8_0", 34.0 / 32}, {"q4_0", 18.0 / 32}};
    if (!dtype) dtype = "f16";
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(dtype, types[i].name) == 0) {
            *bytes = types[i].bytes * head_dim;
            return KVB_OK;
        }
    return kvb_fail(err, KVB_ARGUMENT, "--dtype %s: expected f32, f16, bf16, fp8, q8_0 or q4_0", dtype);
}

// Computes the prune ratio that leaves at most --bytes of all heads' T tokens.
static kvb_status ratio_of_bytes(const constraint_wishes *w, uint32_t n_heads, uint32_t head_dim, double *ratio,
                                 kvb_error *err)
{
    uint64_t bytes = 0;
    double row = 0;
    if (w->tokens == 0) return kvb_fail(err, KVB_ARGUMENT, "--bytes needs --tokens T, the length of the context");
    if (head_dim == 0)
        return kvb_fail(err, KVB_MISMATCH,
                        "--bytes: the record does not say how large a head is; import it again with --head-dim, or use "
                        "--ratios");
    if (!memory_parse(w->bytes, &bytes))
        return kvb_fail(err, KVB_ARGUMENT, "--bytes %s: expected a size such as 2GiB, 900MB or 1048576", w->bytes);
    kvb_status status = row_bytes(w->dtype, head_dim, &row, err);
    if (status != KVB_OK) return status;
    double keep = floor((double)bytes / (2 * row)), all = (double)n_heads * (double)w->tokens; // a key and a value
    *ratio = 1 - keep / all;
    if (*ratio > 0 && keep >= n_heads) return KVB_OK;
    return kvb_fail(err, KVB_ARGUMENT,
                    *ratio > 0
                        ? "a cache of %.0f tokens is too small: %u KV heads keep at least one each (%.0f in all)"
                        : "a cache of %.0f tokens holds all tokens of %u KV heads (%.0f): nothing needs to be pruned",
                    keep, n_heads, all);
}

// Finds the ratios to solve for: those of --ratios, or the one that --bytes stands for, or 1 % to 99 %. The first
// *n_rows of ratios [TABLE_ROWS] count, and the others repeat the last one.
static kvb_status wishes_to_ratios(const constraint_wishes *w, uint32_t n_heads, uint32_t head_dim, double *ratios,
                                   uint32_t *n_rows, kvb_error *err)
{
    kvb_status status = KVB_OK;
    *n_rows = w->bytes ? 1 : TABLE_ROWS;
    if (w->ratios && w->bytes) return kvb_fail(err, KVB_ARGUMENT, "--ratios and --bytes exclude each other");
    if ((w->dtype || w->tokens) && !w->bytes)
        return kvb_fail(err, KVB_ARGUMENT, "--%s is for --bytes", w->dtype ? "dtype" : "tokens");
    if (w->ratios) status = read_ratios(w->ratios, ratios, n_rows, err);
    else if (w->bytes) status = ratio_of_bytes(w, n_heads, head_dim, ratios, err);
    else table_ratios(ratios);
    for (uint32_t i = *n_rows; status == KVB_OK && i < TABLE_ROWS; i++) ratios[i] = ratios[*n_rows - 1];
    return status;
}

// ---- Both -----------------------------------------------------------------------------------------------------------

// Ends a table for every per cent at the highest ratio that floors and pins allow.
static kvb_status cut_rows(study_options *o, kvb_error *err)
{
    double demand = constrained_demand(o->limits);
    while (o->n_rows > 0 && o->ratios[o->n_rows - 1] > 1 - demand + 1e-9) o->n_rows--;
    if (o->n_rows == 0)
        return kvb_fail(err, KVB_ARGUMENT,
                        "floors and pins demand at least %.4g %% of the cache, so that not even 1 %% can be pruned; "
                        "lower them",
                        100 * demand);
    for (uint32_t i = o->n_rows; i < ROWS; i++) o->ratios[i] = o->ratios[o->n_rows - 1];
    return KVB_OK;
}

kvb_status wishes_apply(const constraint_wishes *w, const record_shape *shape, const layer_map *layers,
                        study_options *o, kvb_limits *limits, kvb_error *err)
{
    kvb_status status =
        wishes_to_ratios(w, shape->n_layers * shape->n_kv_heads, shape->head_dim, o->ratios, &o->n_rows, err);
    o->own_ratios = wishes_ratios(w);
    if (status != KVB_OK || !wishes_limit(w) || o->n_packings) return status;
    status = wishes_to_limits(w, layers, shape->n_kv_heads, o->scope, limits, err);
    if (status != KVB_OK) return status;
    o->limits = limits;
    return o->own_ratios ? KVB_OK : cut_rows(o, err);
}

// Warns if a table for every per cent ends before 99 %.
static void warn_of_rows(const study_options *o)
{
    if (!o->limits || o->own_ratios || o->n_rows == ROWS) return;
    fprintf(stderr,
            "warning: floors and pins demand at least %.4g %% of the cache: the table ends at %g %% pruned (%u "
            "rows)\n",
            100 * constrained_demand(o->limits), 100 * o->ratios[o->n_rows - 1], o->n_rows);
}

kvb_status solve_line_open(solve_line *l, selection *from, const char *path, kvb_error *err)
{
    kvb_status status = selection_open(from, path, &l->wanted, err);
    if (status != KVB_OK) return status;
    record_shape shape = record_get_shape(from->r);
    layer_map layers;
    status = layer_map_read(&layers, from->r, err);
    if (status == KVB_OK) status = wishes_apply(&l->wishes, &shape, &layers, &l->options, &l->limits, err);
    layer_map_free(&layers);
    if (status == KVB_OK) warn_of_rows(&l->options);
    return status;
}

// ---- The command line ----------------------------------------------------------------------------------------------

solve_line solve_line_make(const cli_command *self)
{
    solve_line l = {.self = self, .wanted = {.max_questions = UINT64_MAX}, .options = study_options_make()};
    l.options.shrink = l.options.min_keep = NAN;
    return l;
}

void solve_line_free(solve_line *l)
{
    cli_list_free(&l->metrics);
    wishes_free(&l->wishes);
    kvb_limits_free(&l->limits);
}

static bool is(const char *given, const char *word)
{
    return given && strcmp(given, word) == 0;
}

static int check_words(solve_line *l)
{
    study_options *o = &l->options;
    const option_words *w = &l->words;
    o->scope = is(w->scope, "layer") ? SCOPE_LAYER : SCOPE_GLOBAL;
    o->hull = is(w->hull, "full") ? HULL_FULL : HULL_FEASIBLE;
    o->oracle_order = is(w->order, "oracle");
    if (w->paper && is(w->loss, "output"))
        return cli_usage_error(l->self, "--paper minimises importance; leave out --loss output");
    o->loss = is(w->loss, "output") || (w->formats && !w->loss) ? LOSS_OUTPUT : LOSS_BEST;
    if (w->paper || is(w->loss, "importance")) o->loss = LOSS_IMPORTANCE;
    kvb_error err = {0};
    if (w->formats && study_options_packings(o, w->formats, &err) != KVB_OK)
        return cli_usage_error(l->self, "--formats: %s", err.message);
    return EXIT_DONE;
}

// Combines --aggregate, --paper, --shrink and --min-keep. Returns an exit code.
static int check_aggregation(solve_line *l, const char *otherwise)
{
    kvb_error err = {0};
    study_options *o = &l->options;
    const char *given = l->words.aggregate;
    if (l->words.paper && given) return cli_usage_error(l->self, "--paper is --aggregate mean_ratio; give one of them");
    if (l->words.paper && (!isnan(o->shrink) || !isnan(o->min_keep)))
        return cli_usage_error(l->self, "--paper takes neither --shrink nor --min-keep: the paper has none");
    if (study_options_aggregate(o, given ? given : l->words.paper ? "mean_ratio" : otherwise, &err) != KVB_OK)
        return cli_usage_error(l->self, "--aggregate: %s", err.message);
    l->words.shrink = !isnan(o->shrink);
    if (isnan(o->shrink)) o->shrink = o->aggregate == AGGREGATE_MEAN_LOSS && !o->n_packings ? DEFAULT_SHRINK : 0;
    if (isnan(o->min_keep)) o->min_keep = 0;
    if (!(o->shrink >= 0 && o->shrink <= 1)) return cli_usage_error(l->self, "--shrink: expected 0 to 1");
    if (!(o->min_keep >= 0 && o->min_keep < 1))
        return cli_usage_error(l->self, "--min-keep: expected 0 to less than 1");
    return EXIT_DONE;
}

static int check_selection(solve_line *l)
{
    const study_options *o = &l->options;
    if (l->metrics.count == 0)
        return cli_usage_error(l->self, "--metric M is missing: for which eviction metric (or all)?");
    if (cli_check_protected(l->self, o->sink, o->window) != EXIT_DONE) return EXIT_USAGE;
    if (l->wanted.max_questions == 0) l->wanted.max_questions = UINT64_MAX;
    l->wanted.metrics = l->metrics.items;
    l->wanted.n_metrics = l->metrics.count;
    return EXIT_DONE;
}

int refuse_first(const cli_command *self, const refusal *all, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (all[i].when) return cli_usage_error(self, "%s", all[i].why);
    return EXIT_DONE;
}

// Refuses options that exclude each other.
static int check_together(const solve_line *l)
{
    const study_options *o = &l->options;
    const solve_outputs *out = &l->outputs;
    constraint_wishes but_size = l->wishes;
    but_size.bytes = NULL;
    bool tail = o->aggregate == AGGREGATE_TAIL, full = o->hull == HULL_FULL,
         limited = wishes_limit(o->n_packings ? &but_size : &l->wishes);
    const refusal refusals[] = {
        {tail && o->exact, "--exact solves one problem; worst and cvar are found by solving many greedily"},
        {o->exact && full, "--hull full is a form of greedy; the exact solution uses no hulls"},
        {(out->table && !*out->table) || (out->budgets && !*out->budgets) || (out->csv && !*out->csv),
         "a file name is empty"},
        {o->n_packings && (o->loss != LOSS_OUTPUT || o->aggregate != AGGREGATE_MEAN_LOSS),
         "--formats weighs eviction and formats in nats: leave out --loss importance, with --aggregate mean_loss"},
        {o->n_packings &&
             (limited || o->exact || full || o->scope != SCOPE_GLOBAL || l->words.shrink || o->oracle_order),
         "--formats goes together neither with constraints nor with --exact, --hull, --scope, --shrink or --order"},
        {o->n_packings && l->wishes.dtype, "--dtype is for caches of one type; --formats chooses them"},
        {o->n_packings && out->budgets, "--budgets are of tokens alone; leave out --formats"},
        {limited && tail,
         "worst and cvar mix the budgets of several problems, which breaks constraints; use mean_loss or mean_ratio"},
        {limited && full, "--hull full is the published form of greedy, which knows no constraints"}};
    return refuse_first(l->self, refusals, sizeof refusals / sizeof *refusals);
}

int solve_line_check(solve_line *l, const char *aggregate)
{
    int code = check_words(l);
    if (code == EXIT_DONE) code = check_aggregation(l, aggregate);
    if (code == EXIT_DONE) code = check_selection(l);
    return code == EXIT_DONE ? check_together(l) : code;
}

static bool show(void *to, double done, double total)
{
    progress_update(to, done, total, "problems");
    return !cli_stop_requested;
}

study_progress progress_on(progress *bar)
{
    return (study_progress){.update = show, .to = bar};
}
