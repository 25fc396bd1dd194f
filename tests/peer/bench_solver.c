// Times the solver on made-up problems of known sizes, as CSV: bench_solver [sizes|greedy FILE]...
//   sizes   shapes of common models, on one core and on all (default)
//   greedy  one question of 90 heads x 4,125 tokens on one core, and 30 of 256 x 4,096 on all; the scores are sorted
//           once for all questions; writes the first problem to FILE for tests/peer/heap_solver.py
// Columns: heads, tokens, importance, noise, scope, threads, then seconds (the least of several runs): `order` sorts
// the scores, once for all questions of a context; for each question `curves` gathers the gains, `greedy` makes hulls
// and sweeps 99 ratios, `certificate` adds the bounds, `exact` finds 99 optima; relaxations of the exact solution, rows
// proved, and the peak memory so far in MB.
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
    double noise; // in the logarithm of the importance, from which scores are made
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

// Fills in scores and importance. As in real models, heads differ in their mass and in how evenly it is spread.
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
        exact_free(x);
        must(exact_solve(x, &p->curves, &p->allocation, &err), &err);
        keep_least(&t->exact, start);
    }
}

static void time_case(const bench_case *b)
{
    cache_shape shape = {b->layers, b->heads, b->tokens, 4, 32};
    double ratios[TABLE_ROWS];
    size_t numbers = (size_t)shape_heads(&shape) * b->tokens;
    float *scores = malloc(numbers * sizeof *scores), *oracle = malloc(numbers * sizeof *oracle);
    problem p;
    exact_result x = {0};
    metric_order order = {0};
    seconds t = {INFINITY, INFINITY, INFINITY, INFINITY, INFINITY};
    if (!scores || !oracle) exit(1);
    omp_set_num_threads(b->threads ? b->threads : omp_get_num_procs());
    fill_arrays(b, scores, oracle);
    table_ratios(ratios);
    problem_init(&p, &shape, &(solve_options){HULL_FEASIBLE, b->scope, ratios, TABLE_ROWS, NULL});
    time_problem(b, &p, &order, &x, scores, oracle, &t);
    int proved = 0;
    for (int r = 0; r < TABLE_ROWS; r++) proved += x.proved[r];
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    printf("%u,%u,%s,%g,%s,%d,%.5f,%.5f,%.5f,%.5f,%.4f,%.3g,%d,%ld\n", shape_heads(&shape), b->tokens, NAMES[b->kind],
           b->noise, b->scope == SCOPE_LAYER ? "layer" : "global", omp_get_max_threads(), t.order, t.curves, t.greedy,
           t.certificate, t.exact, (double)x.work, proved, usage.ru_maxrss / 1000);
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
                    time_case(&(bench_case){shapes[i][0], shapes[i][1], shapes[i][2], (importance)kind, 2,
                                            (solve_scope)scope, threads});
}

// Writes the file that heap_solver.py reads: sizes and every head's gains, best token first.
static void write_problem(const char *path, const loss_curves *c)
{
    FILE *out = fopen(path, "wb");
    const uint32_t sizes[] = {c->shape.n_layers, c->shape.n_kv_heads, c->shape.n_tokens, c->shape.sink,
                              c->shape.window};
    size_t cells = (size_t)shape_heads(&c->shape) * shape_middle(&c->shape);
    bool ok = out && fwrite(sizes, sizeof sizes, 1, out) == 1;
    for (size_t i = 0; ok && i < cells; i++) {
        float gain = (float)c->gain[i];
        ok = fwrite(&gain, sizeof gain, 1, out) == 1;
    }
    if (!out || fclose(out) || !ok) {
        perror(path);
        exit(1);
    }
}

// Times greedy budgets of `questions` questions: gains in the metric's order, hulls and sweep, without certificates.
static void run_greedy(const bench_case *b, int questions, int runs, const char *problem_file)
{
    cache_shape shape = {b->layers, b->heads, b->tokens, 4, 32};
    size_t numbers = (size_t)shape_heads(&shape) * b->tokens;
    float *scores = malloc(numbers * sizeof *scores), *oracle = malloc(numbers * sizeof *oracle);
    double ratios[TABLE_ROWS], order_took = INFINITY, took = INFINITY, sweep = INFINITY;
    metric_order order = {0};
    kvb_error err = {0};
    problem p;
    if (!scores || !oracle) exit(1);
    omp_set_num_threads(b->threads ? b->threads : omp_get_num_procs());
    fill_arrays(b, scores, oracle);
    table_ratios(ratios);
    problem_init(&p, &shape, &(solve_options){HULL_FEASIBLE, b->scope, ratios, TABLE_ROWS, NULL});
    for (int i = 0; i < runs; i++) {
        double start = now();
        metric_order_free(&order);
        must(metric_order_make(&order, &shape, scores, &err), &err);
        keep_least(&order_took, start);
        start = now();
        for (int q = 0; q < questions; q++) {
            must(loss_curves_fill(&p.curves, &order, oracle, &err), &err);
            double middle = now();
            must(hulls_fill(&p.hulls, &p.curves, HULL_FEASIBLE, &err), &err);
            must(greedy_sweep(&p.allocation, &p.curves, &p.hulls, ratios, &err), &err);
            keep_least(&sweep, middle);
        }
        keep_least(&took, start);
    }
    uint64_t sum = 0;
    for (uint32_t h = 0; h < p.allocation.n_heads; h++)
        sum += (h + 1ull) * p.allocation.keep[49 * (size_t)p.allocation.n_heads + h];
    printf(
        "greedy,%u,%u,%.5f,%d questions on %d threads; order of the scores %.4f s once; hulls and sweep %.5f s each; "
        "sum %llu\n",
        shape_heads(&shape), b->tokens, took, questions, omp_get_max_threads(), order_took, sweep,
        (unsigned long long)sum);
    fflush(stdout);
    if (problem_file) write_problem(problem_file, &p.curves);
    metric_order_free(&order);
    problem_free(&p);
    free(scores);
    free(oracle);
}

int main(int argc, char **argv)
{
    static const char columns[] = "heads,tokens,importance,noise,scope,threads,order,curves,greedy,certificate,exact,"
                                  "relaxations,proved,MB";
    if (argc == 1) {
        puts(columns);
        run_sizes();
    }
    for (int i = 1; i < argc; i++) {
        const char *file = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "sizes") == 0) {
            puts(columns);
            run_sizes();
        } else if (strcmp(argv[i], "greedy") == 0) {
            puts("solver,heads,tokens,seconds,note");
            run_greedy(&(bench_case){30, 3, 4125, LOGNORMAL, 2, SCOPE_GLOBAL, 1}, 1, 50, file);
            run_greedy(&(bench_case){32, 8, 4096, LOGNORMAL, 2, SCOPE_GLOBAL, 0}, 30, 3, NULL);
            i++;
        } else {
            return fprintf(stderr, "bench_solver: expected sizes or greedy, found '%s'\n", argv[i]), 2;
        }
    }
    return 0;
}
