// kvbudget profile --add: the finished record, whose settings are those of what is added unless the command line says
// otherwise; saying otherwise is then refused where the record's attributes are compared.
#include "formats/record.h"
#include "runtime/fail.h"
#include "tools/cmd/profile_command.h"
#include <stdlib.h>
#include <string.h>

static void take_text(const char **out, const cJSON *attributes, const char *name)
{
    const cJSON *a = cJSON_GetObjectItemCaseSensitive(attributes, name);
    if (cJSON_IsString(a)) *out = a->valuestring;
}

static void take_count(uint64_t *out, const cJSON *attributes, const char *name)
{
    const cJSON *a = cJSON_GetObjectItemCaseSensitive(attributes, name);
    if (cJSON_IsNumber(a) && a->valuedouble >= 0 && a->valuedouble <= UINT32_MAX) *out = (uint64_t)a->valuedouble;
}

static void take_flag(bool *out, const cJSON *attributes, const char *name)
{
    *out = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(attributes, name));
}

static void take_settings(profile_command *p, const cJSON *from)
{
    const char *sampling = "", *seed = NULL, *oracle = "";
    const cJSON *temperature = cJSON_GetObjectItemCaseSensitive(from, "temperature");
    take_text(&p->backend_name, from, "backend");
    take_text(&p->compute, from, "compute");
    take_text(&p->bos, from, "bos");
    take_text(&p->weights, from, "weights");
    take_text(&sampling, from, "sampling");
    take_text(&seed, from, "seed");
    take_count(&p->new_tokens, from, "new_tokens");
    take_count(&p->max_tokens, from, "max_tokens");
    take_count(&p->max_questions, from, "max_questions");
    take_flag(&p->ignore_eos, from, "ignore_eos");
    take_flag(&p->ignore_answers, from, "ignore_answers");
    take_flag(&p->include_first, from, "include_first");
    take_text(&oracle, from, "oracle");
    p->greedy = strcmp(sampling, "greedy") == 0;
    p->oracle = strncmp(oracle, "mean", 4) == 0 ? "output" : "lukv";
    p->chat = cJSON_GetObjectItemCaseSensitive(from, "chat") != NULL;
    p->special = cJSON_GetObjectItemCaseSensitive(from, "special") != NULL;
    if (seed) p->seed = strtoull(seed, NULL, 10);
    if (cJSON_IsNumber(temperature) && !p->greedy) p->temperature = temperature->valuedouble;
}

int profile_add_open(profile_command *p)
{
    kvb_error err = {0};
    if (!p->output) return cli_usage_error(p->self, "--add: -o RUN.h5 is missing: which record should be added to?");
    if (p->shard)
        return cli_usage_error(p->self, "--add has no shards: profile what is new with --shard into a record of its "
                                        "own, and `kvbudget merge` both");
    if (record_open(&p->base, p->output, &err) != KVB_OK) return cli_failed(p->self, &err);
    const cJSON *a = record_attributes(p->base);
    if (record_shard(p->base)) {
        kvb_fail(&err, KVB_MISMATCH, "%s: is shard %s of a run; merge its shards first", p->output,
                 record_shard(p->base));
        return cli_failed(p->self, &err);
    }
    if (!cJSON_GetObjectItemCaseSensitive(a, "model_sha256") || !cJSON_GetObjectItemCaseSensitive(a, "seed")) {
        kvb_fail(&err, KVB_MISMATCH,
                 "%s: does not say which model made it with which options (it was not written by "
                 "`kvbudget profile`), so nothing can be added",
                 p->output);
        return cli_failed(p->self, &err);
    }
    take_settings(p, a);
    return EXIT_DONE;
}

int profile_add_check(const profile_command *p)
{
    if (cJSON_GetObjectItemCaseSensitive(record_attributes(p->base), "query_statistics_sha256") && !p->statistics)
        return cli_usage_error(p->self, "%s was made with stored query statistics: give them with --query-statistics",
                               p->output);
    return EXIT_DONE;
}
