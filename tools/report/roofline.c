#include "tools/report/roofline.h"
#include "profiler/backend/meter.h"
#include "profiler/backend/peaks.h"
#include <omp.h>
#include <stdio.h>
#include <string.h>

void roofline_print(const backend *device, double wall)
{
    if (strcmp(device->name, "cpu") != 0) {
        fprintf(stderr, "the roofline table is of backend cpu\n");
        return;
    }
    meter_sum sums[METER_PHASES];
    meter_read(sums);
    double flops = peak_products(precision_named(device->compute)), bytes = peak_reading(),
           threads = omp_get_max_threads(), told = 0;
    fprintf(stderr,
            "measured now on %.0f threads: %.0f GFLOP/s in %s products, %.0f in SGEMM of the float32 units, %.1f GB/s "
            "read from memory\n",
            threads, flops / 1e9, device->compute, peak_sgemm() / 1e9, bytes / 1e9);
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
