// Pictures: text, colours, lines, head maps, and charts of results.
#include "formats_help.h"
#include "tools/report/heatmap.h"
#include "tools/report/results_chart.h"

static char text[1 << 20];

static FILE *begin_picture(void)
{
    memset(text, 0, sizeof text);
    return fmemopen(text, sizeof text - 1, "w");
}

static size_t occurrences(const char *what)
{
    size_t n = 0;
    for (const char *at = text; (at = strstr(at, what)); at += strlen(what)) n++;
    return n;
}

UNIT_TEST(parts_of_pictures)
{
    FILE *file = begin_picture();
    svg_text(file, 1, 2.5, "name", "<&\x01");
    fclose(file);
    ck_assert(strstr(text, "<text ") && strstr(text, "class=\"name\"") && strstr(text, "&lt;&amp;?</text>"));
}

UNIT_TEST(colours)
{
    // The ends and the middle of viridis: #440154, #21918c, #fde725.
    const viridis_rgb want[] = {{0x44, 0x01, 0x54}, {0x21, 0x91, 0x8c}, {0xfd, 0xe7, 0x25}};
    for (int i = 0; i < 3; i++) {
        viridis_rgb c = viridis_at(0.5 * i);
        ck_assert_msg(abs(c.r - want[i].r) <= 3 && abs(c.g - want[i].g) <= 3 && abs(c.b - want[i].b) <= 3,
                      "%d: %d %d %d", i, c.r, c.g, c.b);
    }
    viridis_rgb low = viridis_at(-1), high = viridis_at(2), dark = viridis_at(0), light = viridis_at(1);
    ck_assert(memcmp(&low, &dark, sizeof low) == 0 && memcmp(&high, &light, sizeof high) == 0);
    ck_assert(viridis_is_light(light) && !viridis_is_light(dark));
}

// ---- Head maps ------------------------------------------------------------------------------------------------------

// Draws a table at three ratios.
static void draw_map(uint32_t layers, uint32_t heads)
{
    static const double ratios[] = {0.5, 0.8, 0.9};
    size_t n = 3 * (size_t)layers * heads;
    double *kept = calloc(n, sizeof *kept);
    for (size_t i = 0; i < n; i++) kept[i] = (double)(i % 101) / 100;
    const heatmap map = {
        .n_layers = layers, .n_heads = heads, .n_ratios = 3, .title = "first <&>", .ratios = ratios, .kept = kept};
    FILE *out = begin_picture();
    heatmap_svg(&map, out);
    fclose(out);
    free(kept);
}

UNIT_TEST(maps_of_any_shape)
{
    static const uint32_t shapes[][2] = {{1, 1}, {1, 128}, {80, 8}, {3, 40}, {200, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        size_t cells = 3 * (size_t)shapes[i][0] * shapes[i][1];
        draw_map(shapes[i][0], shapes[i][1]);
        unit_numbers(occurrences("80 % pruned"), 1, occurrences(" fill=\"#"), cells);
        ck_assert(strstr(text, "<title>first &lt;&amp;&gt;</title>") && strstr(text, "</svg>\n"));
        ck_assert(occurrences("<title>") == 1 && !strstr(text, "<style>"));
    }
}

// ---- Charts ---------------------------------------------------------------------------------------------------------

static void draw_chart(const svg_chart *chart)
{
    FILE *file = begin_picture();
    svg_begin(file, 600, 400, "T", NULL);
    svg_chart_put(file, chart, 0, 0, 600, 400);
    svg_end(file);
    fclose(file);
}

UNIT_TEST(charts_have_ticks_where_measured)
{
    static const double rising[40] = {0.1, 0.2, 0.4, 0.8, 0.9}, falling[40] = {0.9, 0.8, 0.4, 0.2, 0.1};
    const svg_series series[] = {{.name = "uniform", .y = rising, .low = falling, .high = rising},
                                 {.name = "kvbudget", .y = falling}};
    const double few[] = {0.5, 0.65, 0.8, 0.9, 0.95};
    double many[40];
    for (int i = 0; i < 40; i++) many[i] = (i + 1) / 50.0;
    svg_chart chart = {.title = "T", .x = few, .n = 5, .n_series = 2, .series = series};
    draw_chart(&chart);
    ck_assert(strstr(text, ">65</text>") && strstr(text, ">95</text>") && !strstr(text, ">70</text>"));
    ck_assert(strstr(text, "stroke=\"#0072b2\"") && strstr(text, "stroke=\"#d55e00\"")); // their own, in any order
    chart.logarithmic = true;
    draw_chart(&chart);
    ck_assert(strstr(text, ">10 %</text>") && strstr(text, ">100 %</text>")); // whole powers of ten
    chart = (svg_chart){.title = "T", .x = many, .n = 40, .n_series = 2, .series = series};
    draw_chart(&chart);
    ck_assert(strstr(text, ">10</text>") && !strstr(text, ">65</text>"));
}

// Returns the part of the key that distinguishes a line; valid until the next call.
static const char *key_of(const svg_chart *chart, size_t series)
{
    FILE *out = begin_picture();
    svg_chart_key(out, chart, series, 0, 0);
    fclose(out);
    return text;
}

// No two lines of a picture look alike, even without colours, and uniform always has the same colour.
UNIT_TEST(lines_have_styles)
{
    static const char *const names[][SVG_SERIES_MAX] = {
        {"kvbudget", "uniform", "pyramid", "ada", "lukv", "lava", "cake", "oracle"},
        {"a", "b", "c", "d", "e", "uniform", "kvbudget-exact", "f"},
        {"mean_loss", "mean_loss, shrink 0.1", "mean_loss, shrink 0.2", "worst", "cvar", "oracle", "uniform", "mine"}};
    char keys[SVG_SERIES_MAX][1000];
    for (size_t k = 0; k < 3; k++) {
        svg_series series[SVG_SERIES_MAX];
        for (int i = 0; i < SVG_SERIES_MAX; i++) series[i] = (svg_series){.name = names[k][i]};
        const svg_chart chart = {.n_series = SVG_SERIES_MAX, .series = series};
        for (size_t i = 0; i < SVG_SERIES_MAX; i++) {
            snprintf(keys[i], sizeof keys[i], "%.999s", key_of(&chart, i));
            if (strcmp(names[k][i], "uniform") == 0) ck_assert_ptr_nonnull(strstr(keys[i], "\"#d55e00\""));
            if (strncmp(names[k][i], "kvbudget", 8) == 0) ck_assert_ptr_nonnull(strstr(keys[i], "\"#0072b2\""));
            for (char *at = keys[i]; (at = strchr(at, '#')); at += 7) memset(at, '#', 7); // no colours
            for (size_t j = 0; j < i; j++) ck_assert_str_ne(keys[i], keys[j]);
        }
    }
}

// Values that differ in the last bit, or not at all, still make an axis with few ticks and finite coordinates.
UNIT_TEST(equal_values_make_an_axis)
{
    const double x[2] = {0.5, 0.8},
                 pairs[][2] = {{9.0, 9.000000000000002}, {9, 9}, {0, 0}, {1e-300, 1e-300}, {NAN, NAN}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (int how = 0; how < 3; how++) {
            const svg_series line = {.name = "a", .y = pairs[i]};
            draw_chart(&(svg_chart){.title = "T",
                                    .x = x,
                                    .n = how == 2 ? 1 : 2, // a single value
                                    .n_series = 1,
                                    .series = &line,
                                    .logarithmic = how == 1,
                                    .y_unit = SVG_NUMBERS});
            ck_assert_msg(strlen(text) < 9000, "pair %zu, axis %d: %zu bytes", i, how, strlen(text));
            ck_assert_msg(!strstr(text, "nan") && !strstr(text, "inf"), "pair %zu, axis %d: %s", i, how, text);
        }
}

// ---- Charts of results ----------------------------------------------------------------------------------------------

// A chart per method, task and column. Rows of the full cache belong to none, and rows without protection count if a
// method has no others.
UNIT_TEST(results_become_charts)
{
    cJSON *rows =
        cJSON_Parse("[{\"metric\":\"m\",\"allocator\":\"uniform\",\"ratio\":0.8,\"kl\":0.4,\"top1\":0.5,\"loss\":1},"
                    "{\"metric\":\"m\",\"allocator\":\"ada\",\"ratio\":0.5,\"kl\":0.2,\"kl_low\":0.1,\"kl_high\":0.3},"
                    "{\"metric\":\"m\",\"allocator\":\"ada\",\"ratio\":0.5,\"kl\":9,\"sink\":0,\"window\":0},"
                    "{\"metric\":\"bare\",\"allocator\":\"ada\",\"ratio\":0.5,\"kl\":3,\"sink\":0,\"window\":0},"
                    "{\"task\":\"t\",\"metric\":\"full\",\"allocator\":\"\",\"ratio\":0,\"score\":0.75},"
                    "{\"task\":\"t\",\"metric\":\"m\",\"allocator\":\"ada\",\"ratio\":0.5,\"score\":0.5},"
                    "{\"metric\":\"held\",\"allocator\":\"worst\",\"ratio\":0.5,\"loss\":0.1,\"change\":0}]");
    static const char *const titles[] = {"m: KL ", "m: likeliest", "t, m: share solved", "held: loss",
                                         "bare, nothing protected: KL "};
    chart_list all = {.n = 0};
    static filled_chart one;
    charts_add(&all, rows);
    ck_assert_uint_eq(all.n, 5);
    for (size_t i = 0; i < all.n; i++) {
        chart_fill(&one, &all.items[i]);
        ck_assert_msg(strncmp(one.title, titles[i], strlen(titles[i])) == 0, "%zu: %s", i, one.title);
        if (i == 2) ck_assert_ptr_nonnull(strstr(one.title, "full cache: 75 %"));
    }
    chart_fill(&one, &all.items[0]);
    ck_assert(one.chart.logarithmic && one.chart.n == 2 && one.chart.n_series == 2);
    ck_assert(one.chart.series[1].y[0] == 0.2 && one.chart.series[1].low[0] == 0.1 && isnan(one.chart.series[1].y[1]));
    help_ok(charts_write(&all, help_path("all.svg"), "x.json", err));
    size_t n;
    char *drawn = (char *)help_slurp(help_path("all.svg"), &n);
    ck_assert(memmem(drawn, n, "held: loss", 10) && memmem(drawn, n, "</svg>", 6));
    free(drawn);
    all.n = 0;
    help_fails(charts_write(&all, help_path("none.svg"), "x.json", err), KVB_ARGUMENT,
               "x.json: no row of an allocator");
    cJSON_Delete(rows);
}

UNIT_MAIN_EACH("tools/pictures", help_setup, help_teardown)
