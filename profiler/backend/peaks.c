#include "profiler/backend/peaks.h"
#include "formats/need.h"
#include "profiler/backend/linalg.h"
#include "profiler/backend/meter.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

double peak_products(precision p)
{
    enum { M = 256, N = 512, K = 512, PASSES = 5 };
    const product *one = product_find(p, M, N, K, false);
    int threads = omp_get_max_threads(), failures = 0;
    double best = 0;
    for (int pass = 0; one && pass < PASSES; pass++) { // the best of some: others may use the machine
        double slowest = 0;
#pragma omp parallel reduction(max : slowest) reduction(+ : failures)
        {
            int repeats = p == PRECISION_F32 ? 20 : 60;
            void *a = aligned_alloc(64, operand_bytes(p, M, K)), *b = aligned_alloc(64, packed_bytes(p, K, N));
            float *x = need((size_t)N * K, sizeof *x, "operands"), *c = aligned_alloc(64, M * N * sizeof *c),
                  *temp = need(packed_temp_floats(K, N), sizeof *temp, "operands");
            bool ok = a && b && c && packed_store(p, b, x, K, true, K, N, temp);
            if (ok) operand_split(p, a, x, K, M, 0, M, K, 1.0f);
            ok = ok && product_run(one, a, b, c);
            failures += !ok;
#pragma omp barrier
            double start = meter_now();
            for (int i = 0; ok && i < repeats; i++) ok = product_run(one, a, b, c);
            slowest = (meter_now() - start) / repeats;
            free(a), free(b), free(x), free(c), free(temp);
        }
        if (failures || slowest <= 0) return 0;
        double rate = 2.0 * M * N * K * threads / slowest;
        best = rate > best ? rate : best;
    }
    return best;
}

double peak_sgemm(void)
{
    enum { N = 512, PASSES = 5, REPEATS = 10 };
    int threads = omp_get_max_threads(), failures = 0;
    double best = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        double slowest = 0;
#pragma omp parallel reduction(max : slowest) reduction(+ : failures)
        {
            float *all = need(3 * (size_t)N * N, sizeof *all, "operands");
#pragma omp barrier
            double start = meter_now();
            for (int i = 0; i < REPEATS; i++)
                failures += !gemm(false, true, N, N, N, 1.0f, all, N, all + N * N, N, 0.0f, all + 2 * N * N, N);
            slowest = (meter_now() - start) / REPEATS;
            free(all);
        }
        if (failures || slowest <= 0) return 0;
        double rate = 2.0 * N * N * N * threads / slowest;
        best = rate > best ? rate : best;
    }
    return best;
}

double peak_reading(void)
{
    enum { FLOATS = 32 << 20, PASSES = 3 }; // 128 MiB for each thread
    int threads = omp_get_max_threads();
    size_t each = FLOATS;
    float *values = malloc(each * (size_t)threads * sizeof *values), kept = 0;
    if (!values) return 0;
    double best = 0;
    for (int pass = 0; pass <= PASSES; pass++) {
        double start = meter_now();
#pragma omp parallel reduction(+ : kept)
        {
            float *mine = values + each * (size_t)omp_get_thread_num(), sum = 0;
            if (pass == 0) memset(mine, 0, each * sizeof *mine);
#pragma omp simd reduction(+ : sum)
            for (size_t i = 0; i < each; i++) sum += mine[i];
            kept += sum;
        }
        double rate = (double)each * threads * sizeof *values / (meter_now() - start);
        if (pass > 0 && rate > best) best = rate;
    }
    free(values);
    return kept == 0 ? best : 0; // the sum is used, so that the compiler keeps it
}
