// Draws the CSV of tools/scripts/bench_memory.sh: peak memory against tokens, measured and planned. draw_memory IN.csv
// OUT.svg
#include "tools/report/svg.h"
#include <stdlib.h>

enum { MAX_ROWS = 64, WIDTH = 720, HEIGHT = 380 };

int main(int argc, char **argv)
{
    double tokens[MAX_ROWS], measured[MAX_ROWS], planned[MAX_ROWS], seconds;
    char line[256];
    size_t n = 0;
    unsigned layers = 0;
    FILE *in = argc == 3 ? fopen(argv[1], "r") : NULL, *out = in ? fopen(argv[2], "w") : NULL;
    if (!out) {
        fprintf(stderr, "usage: draw_memory IN.csv OUT.svg\n");
        if (in) fclose(in);
        return 2;
    }
    while (n < MAX_ROWS && fgets(line, sizeof line, in))
        n += sscanf(line, "%u,%lf,%lf,%lf,%lf", &layers, &tokens[n], &seconds, &measured[n], &planned[n]) == 5;
    char subtitle[96];
    snprintf(subtitle, sizeof subtitle,
             layers ? "SmolLM2-135M's shape, %u layers, one question" : "SmolLM2-135M, one question", layers);
    const svg_series series[] = {{.name = "measured (peak RSS)", .y = measured}, {.name = "--plan", .y = planned}};
    svg_chart chart = {.title = "GiB",
                       .x_label = "tokens of context",
                       .x = tokens,
                       .n = n,
                       .n_series = 2,
                       .series = series,
                       .x_unit = SVG_NUMBERS,
                       .y_unit = SVG_NUMBERS};
    svg_begin(out, WIDTH, HEIGHT, "Peak memory of a profile", subtitle);
    svg_chart_put(out, &chart, SVG_MARGIN, 70, WIDTH - 2 * SVG_MARGIN, HEIGHT - 90);
    svg_end(out);
    fclose(in);
    if (fclose(out) != 0) {
        perror(argv[2]);
        return 1;
    }
    return n ? 0 : 1;
}
