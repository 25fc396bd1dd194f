// Times the solver on made-up problems of known sizes, as CSV: bench_solver [sizes|growth|large]...
//   sizes   the models that matter, on one core and on all (default)
//   growth  exact solution as heads, tokens and the metric's noise grow
//   large   512 heads x 131,072 tokens, which take 6 GB
// Columns: heads, tokens, importance, noise, scope, threads, then seconds (the least of several runs): `order` sorts
// the scores, once for all questions of a context; for each question `curves` gathers the gains, `greedy` makes hulls
// and sweeps 99 ratios, `certificate` adds the bounds, `exact` finds 99 optima; relaxations of the exact solution, rows
// proved and rows nested, and the peak memory so far in MB.
#include "solver/exact.h"
#include "solver/problem.h"
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

typedef enum importance { PARETO, LOGNORMAL } importance;
static const char *const NAMES[] = {"pareto", "lognormal"};

typedef struct bench_case {
    uint32_t layers, heads, tokens;
    importance kind;
    double noise; // of the logarithm of the importance, as the metric sees it
    solve_scope scope;
    int threads; // 0: all
} bench_case;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t state = 1;

static double uniform(void)
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return ((double)((z ^ z >> 31) >> 11) + 0.5) * 0x1p-53;
}

static double normal(void)
{
    return sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform());
}

// Heads differ in their mass and in how evenly it is spread, as those of real models do.
static void fill_arrays(const bench_case *b, float *scores, float *oracle)
{
    for (uint32_t h = 0; h < b->layers * b->heads; h++) {
        double mass = exp(normal()), shape = 0.5 + 1.5 * uniform(), sum = 0;
        float *a = oracle + (size_t)h * b->tokens, *s = scores + (size_t)h * b->tokens;
        for (uint32_t i = 0; i < b->tokens; i++) {
            a[i] = (float)(b->kind == PARETO ? pow(uniform(), -1 - shape / 2) * 1e-6 : exp(1.5 * shape * normal()));
            sum += (double)a[i];
        }
        for (uint32_t i = 0; i < b->tokens; i++) {
            a[i] = (float)((double)a[i] * mass / sum);
            s[i] = (float)(log((double)a[i]) + b->noise * normal());
        }
    }
}

static void must(kvb_status status, const kvb_error *err)
{
    if (status == KVB_OK) return;
    fprintf(stderr, "bench_solver: %s\n", err->message);
    exit(1);
}

typedef struct seconds {
    double order, curves, greedy, certificate, exact;
} seconds;

static void keep_least(double *least, double start)
{
    double took = now() - start;
    if (!(*least <= took)) *least = took;
}

static void time_problem(const bench_case *b, problem *p, metric_order *order, exact_result *x, const float *scores,
                         const float *oracle, seconds *t)
{
    kvb_error err = {0};
    int runs = (size_t)p->allocation.n_heads * b->tokens > 20000000 ? 1 : 5;
    for (int i = 0; i < runs; i++) {
        double start = now();
        metric_order_free(order);
        must(metric_order_make(order, &p->curves.shape, scores, &err), &err);
        keep_least(&t->order, start);
        start = now();
        must(loss_curves_fill(&p->curves, order, oracle, &err), &err);
        keep_least(&t->curves, start);
        start = now();
        must(hulls_fill(&p->hulls, &p->curves, HULL_FEASIBLE, &err), &err);
        must(greedy_sweep(&p->allocation, &p->curves, &p->hulls, p->options.ratios, &err), &err);
        keep_least(&t->greedy, start);
        start = now();
        must(certificate_rows(&p->curves, TABLE_ROWS, p->allocation.n_groups, p->allocation.keep, p->allocation.lambda,
                              p->loss, p->bound, &err),
             &err);
        keep_least(&t->certificate, start);
        start = now();
        must(exact_solve(x, &p->curves, &p->allocation, NULL, &err), &err);
        keep_least(&t->exact, start);
    }
}

static void run(const bench_case *b)
{
    cache_shape shape = {b->layers, b->heads, b->tokens, 4, 32};
    double ratios[TABLE_ROWS];
    size_t numbers = (size_t)shape_heads(&shape) * b->tokens;
    float *scores = malloc(numbers * sizeof *scores), *oracle = malloc(numbers * sizeof *oracle);
    problem p;
    exact_result x;
    metric_order order = {0};
    kvb_error err = {0};
    seconds t = {INFINITY, INFINITY, INFINITY, INFINITY, INFINITY};
    if (!scores || !oracle) exit(1);
    omp_set_num_threads(b->threads ? b->threads : omp_get_num_procs());
    fill_arrays(b, scores, oracle);
    table_ratios(ratios);
    must(problem_init(&p, &shape, &(solve_options){HULL_FEASIBLE, b->scope, ratios, TABLE_ROWS, NULL}, &err), &err);
    must(exact_init(&x, &shape, b->scope, TABLE_ROWS, &err), &err);
    time_problem(b, &p, &order, &x, scores, oracle, &t);
    int proved = 0, nested = 0;
    for (int r = 0; r < TABLE_ROWS; r++) {
        proved += x.proved[r];
        nested += x.nested[r];
    }
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    printf("%u,%u,%s,%g,%s,%d,%.5f,%.5f,%.5f,%.5f,%.4f,%.3g,%d,%d,%ld\n", shape_heads(&shape), b->tokens,
           NAMES[b->kind], b->noise, b->scope == SCOPE_LAYER ? "layer" : "global", omp_get_max_threads(), t.order,
           t.curves, t.greedy, t.certificate, t.exact, (double)x.work, proved, nested, usage.ru_maxrss / 1000);
    fflush(stdout);
    exact_free(&x);
    metric_order_free(&order);
    problem_free(&p);
    free(scores);
    free(oracle);
}

static void run_sizes(void)
{
    static const uint32_t shapes[][3] = {{30, 3, 4125}, {32, 8, 4096}};
    for (int i = 0; i < 2; i++)
        for (int threads = 1; threads >= 0; threads--)
            for (int kind = PARETO; kind <= LOGNORMAL; kind++)
                for (int scope = SCOPE_GLOBAL; scope <= SCOPE_LAYER; scope++)
                    run(&(bench_case){shapes[i][0], shapes[i][1], shapes[i][2], (importance)kind, 2, (solve_scope)scope,
                                      threads});
}

static void run_growth(void)
{
    for (uint32_t layers = 4; layers <= 64; layers *= 2)
        run(&(bench_case){layers, 8, 2048, LOGNORMAL, 2, SCOPE_GLOBAL, 1});
    for (uint32_t tokens = 512; tokens <= 16384; tokens *= 2)
        run(&(bench_case){16, 8, tokens, LOGNORMAL, 2, SCOPE_GLOBAL, 1});
    for (double noise = 0; noise <= 4; noise += 0.5) run(&(bench_case){16, 8, 2048, LOGNORMAL, noise, SCOPE_GLOBAL, 1});
}

int main(int argc, char **argv)
{
    puts("heads,tokens,importance,noise,scope,threads,order,curves,greedy,certificate,exact,relaxations,proved,nested,"
         "MB");
    if (argc == 1) run_sizes();
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "sizes") == 0) run_sizes();
        else if (strcmp(argv[i], "growth") == 0) run_growth();
        else if (strcmp(argv[i], "large") == 0) run(&(bench_case){64, 8, 131072, LOGNORMAL, 2, SCOPE_GLOBAL, 0});
        else return fprintf(stderr, "bench_solver: expected sizes, growth or large, found '%s'\n", argv[i]), 2;
    }
    return 0;
}
