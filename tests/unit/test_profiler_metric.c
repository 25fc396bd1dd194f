// The names of metrics: what they are read as, what is wrong with others, what records keep of them; and the table of
// scorers itself.
#include "test_profiler_cases.h"

UNIT_TEST(test_metric_names)
{
    static const struct {
        const char *text, *spec;
        uint32_t sink, window;
    } cases[] = {
        {"snapkv", "snapkv:kvpress", 4, 64},
        {"snapkv:kvpress", "snapkv:kvpress", 4, 64},
        {"snapkv:lukv", "snapkv:lukv", 4, 32},
        {"keydiff", "keydiff", 4, 1},
        {"ea", "ea:kvpress", 4, 1},
        {"ea:lukv", "ea:lukv", 4, 1},
        {"snapkv:window=32", "snapkv:kvpress:window=32", 4, 32},
        {"snapkv:kvpress:window=64:kernel=5", "snapkv:kvpress", 4, 64},
        {"snapkv:kernel=7:window=16:max_pool=1", "snapkv:kvpress:window=16:kernel=7:max_pool=1", 4, 16},
        {"ea:epsilon=0", "ea:kvpress:epsilon=0", 4, 1},
        {"ea:epsilon=2e-2", "ea:kvpress", 4, 1},
        {"ea:lukv:epsilon=0.5:sinks=0", "ea:lukv:sinks=0:epsilon=0.5", 4, 1},
        {"ea:sinks_in_softmax=1", "ea:kvpress:sinks_in_softmax=1", 4, 1},
        {"keydiff:similarity=euclid:anchor=median", "keydiff:anchor=median:similarity=euclid", 4, 1},
        {"keydiff:anchor=mean", "keydiff", 4, 1},
        {"lagkv", "lagkv:kvpress", 4, 1},
        {"lagkv:paper:lag=128:mode=local:cross=1", "lagkv:paper:lag=128:mode=local:cross=1", 16, 1},
        {"h2o", "h2o", 4, 32},
        {"h2o:window=8", "h2o:window=8", 4, 8},
        {"h2o:kvpress", "h2o:kvpress", 4, 1},
        {"morphkv:fusion=max", "morphkv:fusion=max", 4, 32},
        {"critical+snapkv:window=16", "critical+snapkv:kvpress:window=16", 4, 16},
        {"critical:share=0+lagkv:paper", "critical:share=0+lagkv:paper", 16, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        metric m = case_metric(cases[i].text), again = case_metric(m.spec);
        unit_strings(m.spec, cases[i].spec, again.spec, m.spec);
        ck_assert_ptr_eq(again.kind, m.kind);
        ck_assert_mem_eq(&again.set, &m.set, sizeof m.set);
        ck_assert_uint_eq(metric_protect_sink(&m), cases[i].sink);
        ck_assert_uint_eq(metric_protect_window(&m), cases[i].window);
    }
    metric m = case_metric("ea:epsilon=0.125:future=64");
    ck_assert_double_eq(metric_value(&m, "epsilon", 0), 0.125);
    ck_assert_double_eq(metric_value(&m, "future", 0), 64);
    ck_assert_double_eq(metric_value(&m, "sinks", 0), 4);
    ck_assert_double_eq(metric_value(&m, "window", -1), -1);
    metric_set_value(&m, "future", 9);
    ck_assert_double_eq(metric_value(&m, "future", 0), 9);
    // The plus sign of a number is not that of a wrapped metric.
    m = case_metric("random:seed=1000000000000000");
    ck_assert_str_eq(m.spec, "random:seed=1e+15");
    m = case_metric(m.spec);
    ck_assert_double_eq(metric_value(&m, "seed", 0), 1e15);
    ck_assert_str_eq(case_metric("critical+random:seed=1e+15").spec, "critical+random:seed=1e+15");
}

static void refuse_metric(const char *text, const char *message)
{
    metric m;
    help_fails(metric_parse(&m, text, err), KVB_ARGUMENT, message);
}

UNIT_TEST(test_names_that_are_none)
{
    static const char *const cases[][2] = {
        {"", "snapkv:kvpress, snapkv:lukv, snapkv:adakv, "},
        {"", "streaming:kvpress, random, critical+METRIC, with"},
        {"snap", "'snap' is unknown"},
        {"snapkvx", "unknown"},
        {"snapkv:other", "unknown"},
        {"keydiff:kvpress", "'kvpress' is not parameter=value"},
        {"Keydiff", "unknown"},
        {"knorm:", "parameters of knorm: none"},
        {"knorm:window=3", "character 7: 'window=3' is not parameter=value; parameters of knorm: none"},
        {"snapkv:", "parameters of snapkv:kvpress: window, kernel, max_pool, group_first, group_max"},
        {"keydiff:anchor=mode", "anchor expects one of mean|raw|median (of the normalised keys"},
        {"keydiff+snapkv", "keydiff wraps no other metric"},
        {"critical", "write critical+METRIC"},
        {"critical+", "write critical+METRIC"},
        {"critical+snap", "metric 'snap', character 10, is unknown"},
        {"critical+snapkv:window=0", "metric 'critical+snapkv:window=0', character 24: window expects an integer"},
        {"critical+snapkv:kernel=4", "kernel must be odd"},
        {"critical+h2o:half", "cannot be wrapped"},
        {"critical+critical+knorm", "unknown"},
        {"critical+ea", "add :value_norm=0"},
        {"critical:share=1.5+knorm", "share expects a number from 0 to 1"},
        {"rocketkv:kernel=62", "kernel must be odd"},
        {"snapkv:lukv:windows=3",
         "character 13: 'windows=3' is not parameter=value; parameters of snapkv:lukv: window, kernel, max_pool"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) refuse_metric(cases[i][0], cases[i][1]);
}

UNIT_TEST(test_values_that_are_none)
{
    static const char *const cases[][2] = {
        {"snapkv:window=0", "found '0'"},
        {"snapkv:window=65537", "found '65537'"},
        {"snapkv:window=-1", "found '-1'"},
        {"snapkv:window=8:window=9", "character 17: window is given twice"},
        {"snapkv:window=8\033[2J", "found '8?[2J'"},
        {"snap\033[2Jkv", "'snap?[2Jkv' is unknown"},
        {"snapkv:kernel=4", "kernel must be odd"},
        {"snapkv:kernel=257", "from 1 to 255"},
        {"ea:epsilon=-0.1", "epsilon expects a number from 0"},
        {"ea:sinks=4097", "sinks expects an integer from 0 to 4096"},
        {"ea:kvpress:future=1000000:sinks=4096:epsilon=0.000123456789123456:covariance=0:value_norm=0:"
         "sinks_in_softmax=1+knorm",
         "ea wraps no other metric"},
        {"critical:share=0.123456789012345:epsilon=0.000123456789123456+"
         "ea:future=1000000:sinks=4096:epsilon=0.000123456789123456:covariance=0:value_norm=0:sinks_in_softmax=1",
         "characters, at most 127 fit"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) refuse_metric(cases[i][0], cases[i][1]);
}

// Different numbers must never share a name, because the record keeps scores by name.
UNIT_TEST(test_metric_names_tell_values_apart)
{
    static const char *const texts[] = {"ea:epsilon=0.02000000001", "ea:epsilon=0.1234567890123", "ea:epsilon=1e-300",
                                        "ea:epsilon=0.30000000000000004"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        metric m = case_metric(texts[i]), again = case_metric(m.spec);
        ck_assert_msg(metric_value(&m, "epsilon", 0) == metric_value(&again, "epsilon", 1), "%s is written as %s",
                      texts[i], m.spec);
    }
}

UNIT_TEST(test_metric_json)
{
    static const char *const cases[][2] = {
        {"snapkv", "{\"window\":64,\"kernel\":5,\"max_pool\":0,\"group_first\":0,\"group_max\":0,"
                   "\"protect_sink\":4,\"protect_window\":64,\"kin\":\"snapkv\",\"kvpress\":{\"press\":"
                   "\"SnapKVPress\",\"arguments\":{\"window_size\":64,\"kernel_size\":5}}}"},
        {"snapkv:lukv:window=8",
         "{\"window\":8,\"kernel\":7,\"max_pool\":1,\"group_first\":0,"
         "\"group_max\":0,\"protect_sink\":4,\"protect_window\":8,\"kin\":\"snapkv\",\"kvpress\":{\"press\":"
         "\"SnapKVPress\",\"arguments\":{\"window_size\":8,\"kernel_size\":7},\"warning\":\"kvpress has no SnapKV "
         "with max pooling: its ranking differs from the one that was calibrated\"}}"},
        {"keydiff:similarity=cos", "{\"anchor\":\"mean\",\"similarity\":\"cos\",\"protect_sink\":4,\"protect_window\":"
                                   "1,\"kin\":\"keydiff\","
                                   "\"kvpress\":{\"press\":\"KeyDiffPress\",\"arguments\":{}}}"},
        {"keydiff:anchor=raw",
         "{\"anchor\":\"raw\",\"similarity\":\"cos\",\"protect_sink\":4,\"protect_window\":1,\"kin\":"
         "\"keydiff\",\"kvpress\":{\"press\":"
         "\"KeyDiffPress\",\"arguments\":{},\"warning\":\"kvpress's KeyDiff has the mean anchor and the cosine: its "
         "ranking differs from the one that was calibrated\"}}"},
        {"knorm", "{\"protect_sink\":4,\"protect_window\":1,\"kin\":\"knorm\",\"kvpress\":{\"press\":"
                  "\"KnormPress\",\"arguments\":{}}}"},
        {"critical:share=0+tova",
         "{\"share\":0,\"epsilon\":0.0001,\"wraps\":\"tova\",\"parameters\":{\"scope\":\"layer\"},"
         "\"protect_sink\":4,\"protect_window\":1,\"kin\":\"tova\",\"kvpress\":{}}"},
        {"ea:epsilon=0.30000000000000004",
         "{\"future\":512,\"sinks\":4,\"epsilon\":0.30000000000000004,\"covariance\":1,\"value_norm\":1,"
         "\"sinks_in_softmax\":0,\"protect_sink\":4,\"protect_window\":1,\"kin\":\"ea\","
         "\"kvpress\":{"
         "\"press\":\"ExpectedAttentionPress\",\"arguments\":{\"n_future_positions\":512,\"n_sink\":4,"
         "\"use_covariance\":true,\"use_vnorm\":true,\"epsilon\":0.30000000000000004}}}"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        metric m = case_metric(cases[i][0]);
        cJSON *o = metric_to_json(&m);
        char *text = cJSON_PrintUnformatted(o);
        ck_assert_str_eq(text, cases[i][1]);
        cJSON_free(text);
        cJSON_Delete(o);
    }
}

// The table itself: every scorer can be named, its defaults are in range, and its canonical name fits a record.
UNIT_TEST(test_scorer_table)
{
    for (size_t i = 0; i < scorer_count; i++) {
        const scorer *s = scorer_list[i];
        char text[64];
        size_t length = spec_name(text, sizeof text, &s->spec);
        if (s->wraps) snprintf(text + length, sizeof text - length, "+snapkv:kvpress");
        metric m = case_metric(text);
        ck_assert_ptr_eq(m.kind, s);
        ck_assert_str_eq(m.spec, text);
        ck_assert(s->score && *s->summary && *s->source && *s->formula && !s->why_not_nested == !s->rank);
        for (const spec_parameter *p = s->spec.parameters; p->name; p++) {
            ck_assert(p->low <= p->value && p->value <= p->high);
            ck_assert_uint_le(p->offset + sizeof(double), METRIC_SETTINGS_BYTES);
        }
        // It names a press exactly if the scorer has one.
        cJSON *press = metric_press(&m);
        ck_assert(press && !s->press == !cJSON_GetObjectItem(press, "press"));
        cJSON_Delete(press);
    }
}

// Kin follow from the name, except for RocketKV and wrappers.
UNIT_TEST(test_metric_kin)
{
    static const char *const cases[][2] = {{"streaming", "streaming"},   {"random", "random"},
                                           {"keydiff", "keydiff"},       {"knorm", "knorm"},
                                           {"lagkv:paper", "lagkv"},     {"ea:lukv", "ea"},
                                           {"snapkv:factory", "snapkv"}, {"rocketkv", "snapkv"},
                                           {"morphkv", "morphkv"},       {"tova", "tova"},
                                           {"h2o:kvpress", "h2o"},       {"critical:share=0+rocketkv", "snapkv"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        metric m = case_metric(cases[i][0]);
        ck_assert_str_eq(metric_kin(&m), cases[i][1]);
    }
}

UNIT_TEST(test_usual_metrics)
{
    static const char *const names[] = {"snapkv:kvpress", "keydiff", "ea:kvpress"};
    metric m;
    for (size_t i = 0; i < 3; i++) {
        ck_assert(metric_usual(&m, i));
        metric named = case_metric(names[i]);
        ck_assert_str_eq(m.spec, names[i]);
        ck_assert_mem_eq(&m, &named, sizeof m);
    }
    ck_assert(!metric_usual(&m, 3));
}

UNIT_MAIN("profiler metric")
