// Metrics, policies, allocators and tasks from text: what is parsed is printed so that it parses as the same again.
#include "evaluator/allocator.h"
#include "evaluator/policy.h"
#include "evaluator/task.h"
#include "tests/fuzz/fuzz.h"

static void try_metric(const char *text)
{
    metric m, again;
    kvb_error err;
    if (metric_parse(&m, text, &err) != KVB_OK) return;
    if (metric_parse(&again, m.spec, &err) != KVB_OK || again.kind != m.kind || again.base != m.base) abort();
    if (memcmp(&again.set, &m.set, sizeof m.set) != 0 || strcmp(again.spec, m.spec) != 0) abort();
    cJSON *said = metric_to_json(&m);
    if (!said) abort();
    cJSON_Delete(said);
}

static void try_others(const char *text)
{
    policy p, p_again;
    task t, t_again;
    allocator a, a_again;
    kvb_error err;
    if (policy_parse(&p, text, &err) == KVB_OK &&
        (policy_parse(&p_again, p.spec, &err) != KVB_OK || strcmp(p.spec, p_again.spec) != 0))
        abort();
    if (task_parse(&t, text, &err) == KVB_OK &&
        (task_parse(&t_again, t.spec, &err) != KVB_OK || strcmp(t.spec, t_again.spec) != 0))
        abort();
    const char *equals = strchr(text, '='), *colon = strchr(text, ':');
    if (!equals || !colon || equals < colon) return; // a file name
    if (allocator_parse(&a, text, &err) == KVB_OK &&
        (allocator_parse(&a_again, a.label, &err) != KVB_OK || strcmp(a.identity, a_again.identity) != 0))
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    if (!text) return 0;
    if (size) memcpy(text, data, size);
    text[size] = '\0';
    try_metric(text);
    try_others(text);
    free(text);
    return 0;
}
