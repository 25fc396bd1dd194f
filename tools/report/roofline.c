#include "tools/report/roofline.h"
#include "profiler/backend/linalg.h"
#include "profiler/backend/meter.h"
#include "profiler/backend/packed.h"
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// FLOP/s of products that stay in the caches, each thread with its own: the peak of a matrix unit as oneDNN reaches it.
static double product_peak(precision p)
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
            float *x = calloc((size_t)N * K, sizeof *x), *c = aligned_alloc(64, M * N * sizeof *c),
                  *temp = malloc(packed_temp_floats(K, N) * sizeof *temp);
            bool ok = a && b && x && c && temp && packed_store(p, b, x, K, true, K, N, temp);
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

// The same of float32's own units, through SGEMM.
double roofline_sgemm(void)
{
    enum { N = 512, PASSES = 5, REPEATS = 10 };
    int threads = omp_get_max_threads(), failures = 0;
    double best = 0;
    for (int pass = 0; pass < PASSES; pass++) {
        double slowest = 0;
#pragma omp parallel reduction(max : slowest) reduction(+ : failures)
        {
            float *all = calloc(3 * (size_t)N * N, sizeof *all);
            failures += !all;
#pragma omp barrier
            double start = meter_now();
            for (int i = 0; all && i < REPEATS; i++)
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

// Bytes per second that all threads together read from memory, far beyond the caches.
static double memory_peak_rate(void)
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

static precision precision_of(const backend *device)
{
    for (precision p = PRECISION_F32; p <= PRECISION_BF16; p++)
        if (strcmp(precision_name(p), device->compute) == 0) return p;
    return PRECISION_F32;
}

double roofline_products(const backend *device)
{
    return product_peak(precision_of(device));
}

void roofline_print(const backend *device, double wall)
{
    if (strcmp(device->name, "cpu") != 0) {
        fprintf(stderr, "the roofline table is of backend cpu\n");
        return;
    }
    meter_sum sums[METER_PHASES];
    meter_read(sums);
    precision p = precision_of(device);
    double flops = product_peak(p), bytes = memory_peak_rate(), threads = omp_get_max_threads(), told = 0;
    fprintf(stderr,
            "measured now on %.0f threads: %.0f GFLOP/s in %s products, %.0f in SGEMM of the float32 units, %.1f GB/s "
            "read from memory\n",
            threads, flops / 1e9, device->compute, roofline_sgemm() / 1e9, bytes / 1e9);
    fprintf(stderr, "%-10s %9s %6s %10s %8s %9s %8s\n", "work", "seconds", "share", "GFLOP/s", "of peak", "GB/s",
            "of peak");
    for (int i = 0; i < METER_PHASES; i++) {
        double seconds = sums[i].seconds / threads;
        told += seconds;
        fprintf(stderr, "%-10s %9.3f %5.1f%%", meter_names[i], seconds, 100 * seconds / wall);
        if (sums[i].flops > 0 && seconds > 0)
            fprintf(stderr, " %10.1f %7.1f%%", sums[i].flops / seconds / 1e9, 100 * sums[i].flops / seconds / flops);
        else fprintf(stderr, " %10s %8s", "", "");
        if (sums[i].bytes > 0 && seconds > 0) fprintf(stderr, " %9.1f", sums[i].bytes / seconds / 1e9);
        if (sums[i].bytes > 0 && seconds > 0 && i == METER_LINEAR) // the others' bytes stay in the caches
            fprintf(stderr, " %7.1f%%", 100 * sums[i].bytes / seconds / bytes);
        fprintf(stderr, "\n");
    }
    fprintf(stderr, "%-10s %9.3f %5.1f%%\n", "other", wall - told, 100 * (wall - told) / wall);
}
