// Attention of layers with more than plain attention: windows, capped scores and sinks, alone and together.
#include "judge.h"

typedef struct rule {
    uint32_t window;
    float softcap;
    bool sinks;
} rule;

// Windows shorter than a tail or a tile of keys, longer than a tile, and longer than the contexts.
static const rule RULES[] = {{1, 0, false},    {5, 0, false}, {64, 0, false}, {270, 0, false},
                             {4000, 0, false}, {0, 3, false}, {0, 50, false}, {0, 0, true},
                             {0, 2, true},     {5, 2, true},  {100, 3, true}};
enum { N_RULES = sizeof RULES / sizeof *RULES, N_RULE_SHAPES = 3, N_RULE_TOKENS = 4 };

static attention_shape shape_with(backend_device *on, int shape, const rule *r, const float *sinks)
{
    static const uint32_t heads[N_RULE_SHAPES][3] = {{7, 1, 16}, {6, 2, 64}, {2, 2, 128}};
    attention_shape s = attention_heads(heads[shape][0], heads[shape][1], heads[shape][2]);
    s.window = r->window, s.softcap = r->softcap;
    if (r->sinks && on) s.sinks = put(on, sinks, s.n_heads);
    return s;
}

static void judge_prefix_rule(attention_shape plain, int shape, const rule *r, uint32_t T, const float *sinks)
{
    size_t row = (size_t)plain.n_heads * plain.head_dim, kv_size = (size_t)plain.n_kv_heads * T * plain.head_dim,
           lines = (size_t)plain.n_heads * T;
    uint32_t first = T / 3, n = T - first;
    float *k = random_floats(kv_size, 2), *v = random_floats(kv_size, 1), *q = random_floats(T * row, 2);
    dev y;
    BOTH("attend_prefix", y, n * row, 2e-6f, 3e-5f, 4, {
        attention_shape s = shape_with(on, shape, r, sinks);
        y = on->b->alloc(on, n * row);
        dev dq = put(on, q + first * row, n * row);
        prefix_kv kv = context_on(on, k, v, T, s);
        on->b->attend_prefix(on, y, dq, &kv, first, n, s);
        on->b->release(on, dq), on->b->release(on, s.sinks), context_release(on, &kv);
    });
    // As for importance, the tolerance is relative: an error in a score changes a probability in proportion.
    if (!r->window)
        BOTH("column_sums", y, lines, 1e-6f, 4e-5f + product_error(&JUDGED) * 8, 0, {
            attention_shape s = shape_with(on, shape, r, sinks);
            y = on->b->alloc(on, lines);
            dev dq = put(on, q, T * row), row_log = on->b->alloc(on, lines);
            prefix_kv kv = context_on(on, k, v, T, s);
            on->b->column_sums(on, y, row_log, dq, &kv, first, s);
            on->b->release(on, dq), on->b->release(on, s.sinks), on->b->release(on, row_log);
            context_release(on, &kv);
        });
    free(k);
    free(v);
    free(q);
}

// Judges rows of several questions and, for a layer without a window, their importance.
static void judge_rows_rule(attention_shape plain, int shape, const rule *r, uint32_t T, const float *sinks)
{
    decode_case c = decode_case_make(plain, T, 7);
    dev y;
    BOTH("attend_rows", y, c.q_size, 2e-6f, 4e-5f, 4, {
        c.s = shape_with(on, shape, r, sinks);
        y = run_rows(on, &c, 0, c.n_rows);
        on->b->release(on, c.s.sinks);
    });
    if (!r->window)
        BOTH("importance", y, c.best_size, 2e-6f, 4e-5f + product_error(&JUDGED) * 8, 0, {
            c.s = shape_with(on, shape, r, sinks);
            y = run_importance(on, &c);
            on->b->release(on, c.s.sinks);
        });
    decode_case_free(&c);
}

UNIT_TEST(test_attention_rules)
{
    static const uint32_t tokens[N_RULE_TOKENS] = {3, 17, LONG, LONGER};
    for (int shape = 0; shape < N_RULE_SHAPES; shape++)
        for (int t = 0; t < N_RULE_TOKENS; t++)
            for (int i = 0; i < N_RULES; i++) {
                if (t >= 2 && (i + shape + t) % (3 * JUDGE_SLOW) != 0) continue; // the judge is slow
                attention_shape plain = shape_with(NULL, shape, &RULES[i], NULL);
                float *sinks = random_floats(plain.n_heads, 4);
                reserve(tokens[t], plain);
                judge_prefix_rule(plain, shape, &RULES[i], tokens[t], sinks);
                judge_rows_rule(plain, shape, &RULES[i], tokens[t], sinks);
                free(sinks);
            }
    check_judged();
}

// With equal keys and values of 1, the output is the share of the weight that the sink leaves.
UNIT_TEST(test_sink_share)
{
    enum { T = 3, D = 16 };
    float k[T * D] = {0}, v[T * D], q[D] = {0}, sink = logf(5);
    for (int i = 0; i < T * D; i++) v[i] = 1;
    attention_shape s = attention_heads(1, 1, D);
    reserve(T, s);
    s.sinks = put(judged, &sink, 1);
    prefix_kv kv = context_on(judged, k, v, T, s);
    dev o = JUDGED.alloc(judged, D), dq = put(judged, q, D);
    JUDGED.attend_prefix(judged, o, dq, &kv, T - 1, 1, s);
    float *got = take(o, D);
    for (int c = 0; c < D; c++) ck_assert_double_eq_tol(got[c], 3.0 / 8, 1e-6);
    free(got);
    JUDGED.release(judged, dq), JUDGED.release(judged, s.sinks), context_release(judged, &kv);
    check_judged();
}

JUDGE_PART(judge_rules)
