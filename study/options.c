#include "study/options.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

study_options study_options_make(void)
{
    study_options o = {.aggregate_name = "mean_loss",
                       .aggregate = AGGREGATE_MEAN_LOSS,
                       .hull = HULL_FEASIBLE,
                       .scope = SCOPE_GLOBAL,
                       .sink = AS_RECORDED,
                       .window = AS_RECORDED,
                       .n_rows = ROWS};
    table_ratios(o.ratios);
    return o;
}

kvb_status study_options_packings(study_options *o, const char *names, kvb_error *err)
{
    bool good = *names != 0;
    o->n_packings = 0;
    for (const char *at = names; good && *at; at += *at == ',') {
        size_t length = strcspn(at, ",");
        kvb_packing p = 0;
        while (p < KVB_PACKINGS &&
               (strlen(kvb_packing_name(p)) != length || strncmp(kvb_packing_name(p), at, length) != 0))
            p++;
        good = p < KVB_PACKINGS;
        for (uint32_t i = 0; i < o->n_packings; i++) good = good && o->packings[i] != p;
        if (good) o->packings[o->n_packings++] = p;
        at += length;
    }
    if (good) return KVB_OK;
    return kvb_fail(err, KVB_ARGUMENT, "expected bf16, int8, int4 and int2, each once at most, found '%s'", names);
}

kvb_status study_options_aggregate(study_options *o, const char *name, kvb_error *err)
{
    char *end = "";
    o->aggregate_name = name;
    o->tail = 0;
    if (strcmp(name, "mean_ratio") == 0) o->aggregate = AGGREGATE_MEAN_RATIO;
    else if (strcmp(name, "mean_loss") == 0) o->aggregate = AGGREGATE_MEAN_LOSS;
    else o->aggregate = AGGREGATE_TAIL;
    if (o->aggregate != AGGREGATE_TAIL || strcmp(name, "worst") == 0) return KVB_OK;
    if (strncmp(name, "cvar:", 5) == 0) o->tail = strtod(name + 5, &end);
    if (!*end && o->tail > 0 && o->tail <= 1) return KVB_OK;
    return kvb_fail(err, KVB_ARGUMENT, "expected mean_ratio, mean_loss, worst or cvar:A with 0 < A <= 1, found '%s'",
                    name);
}

// Returns a number from 0 to 1 in the metadata; 0 if there is none, as in older tables.
static double metadata_share(const kvb_table *table, const char *key)
{
    const char *text = kvb_table_metadata(table, key);
    double value = text ? strtod(text, NULL) : 0;
    return value > 0 && value <= 1 ? value : 0;
}

static kvb_status take_ratios(study_options *o, const kvb_table *table, kvb_error *err)
{
    o->n_rows = kvb_table_info(table)->n_rows;
    for (uint32_t r = 0; r < ROWS; r++) { // rows that a shorter table lacks repeat its last one
        kvb_row row;
        kvb_status status = kvb_table_row(table, r < o->n_rows ? r : o->n_rows - 1, &row, err);
        if (status != KVB_OK) return status;
        o->ratios[r] = row.ratio;
    }
    return KVB_OK;
}

kvb_status study_options_from_table(study_options *o, kvb_limits *limits, const kvb_table *table, const char *path,
                                    kvb_error *err)
{
    const kvb_info *info = kvb_table_info(table);
    const char *constraints = kvb_table_metadata(table, "constraints"), *order = kvb_table_metadata(table, "order");
    *o = study_options_make();
    if (constraints) {
        kvb_status status = kvb_limits_parse(limits, constraints, info->n_budgeted, info->n_kv_heads, path, err);
        if (status != KVB_OK) return status;
        o->limits = limits;
    }
    o->scope = strcmp(info->scope, "layer") == 0 ? SCOPE_LAYER : SCOPE_GLOBAL;
    if (study_options_aggregate(o, info->aggregate, NULL) != KVB_OK)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: unknown aggregation '%s'; a newer kvbudget may know it", path,
                        info->aggregate);
    const char *loss = kvb_table_metadata(table, "loss"), *gains = kvb_table_metadata(table, "gains");
    o->loss = loss && strcmp(loss, "output") == 0 ? LOSS_OUTPUT : LOSS_IMPORTANCE;
    if (gains && strcmp(gains, "all") != 0)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: gains '%s', expected all; another version of kvbudget may know them",
                        path, gains);
    o->oracle_order = order && strcmp(order, "oracle") == 0;
    if (order && !o->oracle_order && strcmp(order, "metric") != 0)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: unknown order '%s'; a newer kvbudget may know it", path, order);
    o->shrink = metadata_share(table, "shrink");
    o->min_keep = metadata_share(table, "min_keep");
    o->sink = info->sink;
    o->window = info->window;
    const char *packings = kvb_table_metadata(table, "packings");
    if (packings && study_options_packings(o, packings, NULL) != KVB_OK)
        return kvb_fail(err, KVB_UNSUPPORTED, "%s: unknown packings '%s'; another version of kvbudget may know them",
                        path, packings);
    return take_ratios(o, table, err);
}

solve_options study_solve_options(const study_options *o)
{
    return (solve_options){o->hull, o->scope, o->ratios, ROWS, o->limits};
}

bool every_per_cent(const study_options *o)
{
    return !o->own_ratios && o->n_rows == ROWS;
}

const char *scope_name(solve_scope scope)
{
    return scope == SCOPE_LAYER ? "layer" : "global";
}

const char *hull_name(hull_range hull)
{
    return hull == HULL_FULL ? "full" : "feasible";
}

const char *order_name(bool oracle_order)
{
    return oracle_order ? "oracle" : "metric";
}
