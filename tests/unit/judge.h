// The judge of backends (test_profiler_backend.c) runs every operation on the backend that is judged and on the plain-C
// reference, with the same inputs. The Makefile links test_profiler_backend.c once for each backend, with
// JUDGE_OF=backend_NAME, and compiles the others once for those that differ in precision alone; -DEMULATED is for the
// emulated CUDA device (tests/cuda), -DEMULATED_TILES for the emulated tile unit (tests/tiles).
#pragma once
#include "profiler/backend/backend.h"
#include "unit.h"
#include <omp.h>

#ifdef EMULATED
#include "tests/cuda/emulator.h"
#endif
extern const backend *const judged_backend;
#define JUDGED (*judged_backend)

enum { QUESTIONS = 5, TAIL = 9 };
enum { N_SHAPES = 7, N_TOKENS = 4 };
extern const attention_shape SHAPES[N_SHAPES];
extern const uint32_t TOKENS[N_TOKENS];
// Slow builds run one in JUDGE_SLOW of the long cases.
#if defined(EMULATED) || defined(EMULATED_TILES) || defined(__SANITIZE_ADDRESS__)
enum { LONG = 290, LONGER = 300, LONGEST_SHAPE = 1, ROWS_STEP = 6, JUDGE_SLOW = 3 };
#else
enum { LONG = 530, LONGER = 700, LONGEST_SHAPE = 1, ROWS_STEP = 3, JUDGE_SLOW = 1 };
#endif
// Rows of stored matrices: more than backends take at a time; fewer for a sanitiser, which only checks memory.
#if defined(__SANITIZE_ADDRESS__)
enum { STORED_ROWS = 112 };
#else
enum { STORED_ROWS = 336 };
#endif

// The two devices; `judged` has scratch memory for the limits of the last `reserve`.
extern backend_device *judged, *reference;
void reserve(uint32_t tokens, attention_shape s);
void check_judged(void); // no operation may have failed

// Returns how far products may be off beyond float32's tolerance, relative to the sum of their terms' magnitudes.
float product_error(const backend *b);

float uniform(void);                         // in [-1, 1)
void seed_uniform(uint64_t seed);            // every process starts from the same seed
float *random_floats(size_t n, float scale); // the caller frees them

dev put(backend_device *on, const float *values, size_t n);
float *fetch(dev from, size_t n); // n floats of the judged backend's memory, which the caller frees
float *take(dev from, size_t n);  // the same, and releases it

void close_to(const char *what, const float *got, const float *want, size_t n, float absolute, float relative);
void same_bits(const char *what, const float *a, const float *b, size_t n);

// Runs `...` on both backends with the same inputs and compares n floats of y. `terms` bounds the sum of the magnitudes
// of a product's terms; the product's precision is relative to that.
#define BOTH(what, y, n, absolute, relative, terms, ...)                                                    \
    do {                                                                                                    \
        float *results[2];                                                                                  \
        backend_device *const pair[2] = {reference, judged};                                                \
        for (int which = 0; which < 2; which++) {                                                           \
            backend_device *on = pair[which];                                                               \
            __VA_ARGS__;                                                                                    \
            results[which] = malloc((n) * sizeof(float));                                                   \
            on->b->download(on, results[which], y, n);                                                      \
            on->b->release(on, y);                                                                          \
        }                                                                                                   \
        close_to(what, results[1], results[0], n, (absolute) + product_error(&JUDGED) * (terms), relative); \
        free(results[0]), free(results[1]);                                                                 \
    } while (0)

// Puts the keys and values of a context on a device, packed if the backend wants that.
prefix_kv context_on(backend_device *on, const float *k, const float *v, uint32_t T, attention_shape s);
void context_release(backend_device *on, prefix_kv *kv);

// Inputs that the tests below share: rows of several questions at several tail positions, some of them observed.
typedef struct decode_case {
    attention_shape s;
    uint32_t T, n_rows;
    bool sum; // the oracle sums over queries instead of taking the maximum
    decode_row rows[QUESTIONS * TAIL];
    float *k, *v, *tail_k, *tail_v, *q, *weights, *best;
    size_t kv_size, tail_size, q_size, weights_size, best_size;
} decode_case;

decode_case decode_case_make(attention_shape s, uint32_t T, uint32_t rows_each);
void decode_case_free(decode_case *c);
// Runs rows [first, first + n). Returns their output, followed by the importance of all questions.
dev run_rows(backend_device *on, const decode_case *c, uint32_t first, uint32_t n);
// Returns the importance alone, after all rows.
dev run_importance(backend_device *on, const decode_case *c);

// The tests of each file, which ends with JUDGE_PART(its name).
TCase *judge_rows(void);
TCase *judge_weights(void);
TCase *judge_attention(void);
TCase *judge_sums(void);
TCase *judge_bits(void);
TCase *judge_shapes(void);
TCase *judge_rules(void);
#define JUDGE_PART(name)    \
    TCase *name(void)       \
    {                       \
        return unit_case(); \
    }
