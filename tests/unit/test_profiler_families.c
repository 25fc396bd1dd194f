// One tiny model of each family (tests/golden/families, made by tests/peer/families.py --fixtures), on every backend
// and precision, with -DEMULATED those of the emulated device (tests/cuda): logits and oracle importance are those that
// transformers has computed in float32.
#include "formats/npy.h"
#include "test_profiler_cases.h"

enum { T = 100, SUFFIX = 3, ANSWER = 6, TAIL = SUFFIX + ANSWER, ROWS = 8 };

// How far a precision may be off: logits relative to their range, importance to the head's maximum.
typedef struct accuracy {
    const backend *b;
    double logits, importance;
} accuracy;

#ifdef EMULATED
extern const backend backend_cuda_emulated, backend_cuda_bf16x3_emulated, backend_cuda_bf16_emulated;
static const accuracy ALL[] = {
#ifndef __SANITIZE_ADDRESS__ // precisions share their memory, and a sanitised emulator is slow
    {&backend_cuda_emulated, 1e-4, 1e-4},
    {&backend_cuda_bf16_emulated, 6e-2, 0.2},
#endif
    {&backend_cuda_bf16x3_emulated, 1e-3, 2e-3}};
#else
static const accuracy ALL[] = {{&backend_ref, 1e-4, 1e-4},
                               {&backend_cpu, 1e-4, 1e-4},
                               {&backend_cpu_bf16x3, 1e-3, 2e-3},
                               {&backend_cpu_bf16, 6e-2, 0.2}};
#endif

static float *read_floats(const char *name, const char *file, size_t *n)
{
    char path[256];
    file_view view;
    npy_array a;
    snprintf(path, sizeof path, "tests/golden/families/%s/%s", name, file);
    help_ok(file_map(&view, path, err));
    help_ok(npy_parse(&a, view.data, view.size, path, err));
    double *values = case_alloc(a.count, sizeof *values);
    float *out = case_alloc(a.count, sizeof *out);
    help_ok(npy_to_f64(&a, values, path, err));
    for (size_t i = 0; i < a.count; i++) out[i] = (float)values[i];
    *n = a.count;
    free(values);
    file_unmap(&view);
    return out;
}

static void compare_logits(const char *what, const float *got, const float *want, size_t n, double tolerance)
{
    double low = INFINITY, high = -INFINITY, worst = 0;
    for (size_t i = 0; i < n; i++) {
        low = fmin(low, want[i]), high = fmax(high, want[i]);
        worst = fmax(worst, fabs((double)got[i] - want[i]));
    }
    ck_assert_msg(worst <= tolerance * (high - low), "%s: logits are off by %g of a range of %g", what, worst,
                  high - low);
}

// Compares one family on one backend. Rows of the answer's tokens are observed, but for the last token.
static void run(const char *name, const accuracy *a)
{
    char path[256], what[128];
    int32_t ids[T + TAIL];
    decode_row rows[TAIL];
    model *m;
    forward *f;
    size_t n_logits, n_oracle;
    snprintf(path, sizeof path, "tests/golden/families/%s", name);
    snprintf(what, sizeof what, "%s, %s %s", name, a->b->name, a->b->compute);
    for (int i = 0; i < T + TAIL; i++) ids[i] = (i * 37 + i * i % 11) % 60 + 1;
    for (uint32_t i = 0; i < TAIL; i++) rows[i] = (decode_row){0, i, i >= SUFFIX};
    help_ok(model_open(&m, path, a->b, NULL, err));
    const model_config *c = &m->config;
    float *want = read_floats(name, "logits.npy", &n_logits), *oracle = read_floats(name, "oracle.npy", &n_oracle);
    size_t heads = (size_t)model_budgeted(c, c->n_layers) * c->n_kv_heads;
    ck_assert(n_logits == ROWS * c->vocabulary && n_oracle == heads * T && heads > 0);
    float *logits = case_alloc((size_t)T * c->vocabulary, sizeof *logits), *best = case_alloc(n_oracle, sizeof *best);
    help_ok(forward_open(&f, m, &(forward_plan){T, 1, TAIL, true, false, 1}, err));
    help_ok(forward_prefill(f, ids, T, NULL, NULL, logits, err));
    compare_logits(what, logits + (size_t)(T - ROWS) * c->vocabulary, want, n_logits, a->logits);
    forward_begin_questions(f, NULL, 1);
    help_ok(forward_rows(f, rows, ids + T, TAIL - 1, NULL, 0, NULL, err));
    help_ok(forward_importance(f, 0, best, err));
    double worst = case_row_error(best, oracle, heads, T);
    ck_assert_msg(worst <= a->importance, "%s: importance is off by %g of its head's maximum", what, worst);
    forward_close(f), model_free(m), free(logits), free(best), free(want), free(oracle);
}

static const char *const NAMES[] = {"llama",   "mistral",       "ministral3",  "qwen2-window", "qwen3",   "phi3",
                                    "granite", "smollm3",       "olmo2",       "olmo3",        "gemma2",  "gemma3",
                                    "glm4",    "cohere",        "cohere-norm", "cohere2",      "exaone4", "seed-oss",
                                    "gpt-oss", "gpt-oss-mxfp4", "qwen3-moe",   "mixtral",      "olmoe",   "olmoe-clip"};
enum { N_NAMES = sizeof NAMES / sizeof *NAMES };

UNIT_ROUNDS(families_as_in_transformers, sizeof ALL / sizeof *ALL)
{
    for (int i = 0; i < N_NAMES; i++) run(NAMES[i], &ALL[_i]);
}

UNIT_MAIN_EACH("profiler families", help_setup, help_teardown)
