// What the tests of the profiler's upper half share: random numbers with a fixed seed, comparisons that say where, and
// the tiny model.
#pragma once
#include "formats_help.h"
#include "profiler/metric/scorer.h"
#include "profiler/model/forward.h"
#include "profiler/text/model_text.h"
#include <spawn.h>
#include <sys/wait.h>

extern char **environ;

enum { CASES_SEED = 20261121 };

// Uniform in [-1, 1); every test process starts from CASES_SEED.
static inline double case_uniform(void)
{
    static uint64_t state = CASES_SEED;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) * 0x1p-52 - 1.0;
}

static inline float *case_floats(size_t n, double scale, double offset)
{
    float *p = malloc((n + 1) * sizeof *p);
    ck_assert_ptr_nonnull(p);
    for (size_t i = 0; i < n; i++) p[i] = (float)(case_uniform() * scale + offset);
    return p;
}

static inline void *case_alloc(size_t n, size_t size)
{
    void *p = calloc(n + 1, size);
    ck_assert_ptr_nonnull(p);
    return p;
}

// Checks that |got - want| <= tolerance everywhere. Checks come after the loops, since each one sends a message to
// Check's parent process.
static inline void case_near(const char *what, const float *got, const float *want, size_t n, double tolerance)
{
    size_t i = 0;
    while (i < n && fabs((double)got[i] - want[i]) <= tolerance) i++;
    ck_assert_msg(i == n, "%s: element %zu of %zu is %.9g, expected %.9g", what, i, n, i < n ? (double)got[i] : 0,
                  i < n ? (double)want[i] : 0);
}

static inline void case_same(const char *what, const float *got, const float *want, size_t n)
{
    size_t i = 0;
    while (i < n && memcmp(&got[i], &want[i], sizeof *got) == 0) i++;
    ck_assert_msg(i == n, "%s: element %zu of %zu is %.9g, expected the bits of %.9g", what, i, n,
                  i < n ? (double)got[i] : 0, i < n ? (double)want[i] : 0);
}

// Returns the largest |got - want| of any row of T, relative to that row's largest |want|; INFINITY if not finite.
static inline double case_row_error(const float *got, const float *want, size_t rows, size_t T)
{
    double worst = 0;
    for (size_t r = 0; r < rows; r++) {
        double top = 0, error = 0;
        for (size_t j = r * T; j < (r + 1) * T; j++) {
            if (!isfinite(got[j])) return INFINITY;
            top = fmax(top, fabs((double)want[j]));
            error = fmax(error, fabs((double)got[j] - want[j]));
        }
        if (error > 0) worst = fmax(worst, error / top);
    }
    return worst;
}

// Writes the model of tests/tiny_model.c to `path`; options end with NULL.
static inline void case_tiny_model(const char *path, const char *const *options)
{
    const char *build = getenv("KVB_BUILD");
    char program[512];
    const char *argv[16] = {program};
    int n = 1, code;
    snprintf(program, sizeof program, "%s/tests/tiny_model", build ? build : "build");
    while (options && *options && n < 14) argv[n++] = *options++;
    argv[n++] = path;
    pid_t child;
    code = posix_spawn(&child, program, NULL, NULL, (char *const *)(const void *)argv, environ);
    ck_assert_msg(code == 0, "%s: %s; build it with `make %s`", program, strerror(code), program);
    ck_assert_int_eq(waitpid(child, &code, 0), child);
    ck_assert_msg(WIFEXITED(code) && WEXITSTATUS(code) == 0, "%s failed", program);
}

// Makes a folder with such a model, tiny.gguf; help_teardown() removes it.
static inline void case_tiny_setup(void)
{
    help_setup();
    case_tiny_model(help_path("tiny.gguf"), NULL);
}

// Writes such a model to tiny.gguf and returns its tokenizer, which the caller frees.
static inline tokenizer *case_tiny_tokenizer(void)
{
    gguf_file file;
    tokenizer *t;
    case_tiny_model(help_path("tiny.gguf"), NULL);
    help_ok(gguf_open(&file, help_path("tiny.gguf"), err));
    help_ok(tokenizer_from_gguf(&t, &file, NULL, err));
    gguf_close(&file);
    return t;
}

static inline model *case_open(const char *path, const backend *device)
{
    model *m = NULL;
    help_ok(model_open(&m, path, device, NULL, err));
    return m;
}

// Returns the logits of n fixed tokens, [n, vocabulary], which the caller frees.
static inline float *case_logits(const model *m, uint32_t n)
{
    forward *f = NULL;
    int32_t *ids = case_alloc(n, sizeof *ids);
    float *logits = case_alloc((size_t)n * m->config.vocabulary, sizeof *logits);
    for (uint32_t i = 0; i < n; i++) ids[i] = (int32_t)(i * 37 % m->config.vocabulary);
    help_ok(forward_open(&f, m, &(forward_plan){n, 1, 1, false, false, 1}, err));
    help_ok(forward_prefill(f, ids, n, NULL, NULL, logits, err));
    forward_close(f), free(ids);
    return logits;
}

// Opens a model's text side; the caller closes it.
static inline model_text case_text(const model *m)
{
    model_text t;
    help_ok(model_text_open(&t, m->source, m->config.vocabulary, NULL, err));
    return t;
}

// Opens a device with scratch memory for these limits; NULL: without any.
static inline backend_device *case_device(const backend *b, const backend_limits *limits)
{
    backend_device *on = NULL;
    help_ok(b->open(&on, b, limits, err));
    return on;
}

static inline metric case_metric(const char *text)
{
    metric m;
    help_ok(metric_parse(&m, text, err));
    return m;
}

// Returns the scores [G, T] of the metric named `text`, which the caller frees.
static inline float *case_score(const char *text, const layer_view *v)
{
    metric m = case_metric(text);
    size_t n = (size_t)v->n_kv_heads * v->n_tokens;
    float *s = case_alloc(n, sizeof *s);
    for (size_t i = 0; i < n; i++) s[i] = NAN; // the metric must write every score
    help_ok(metric_score(&m, v, s, err));
    return s;
}
