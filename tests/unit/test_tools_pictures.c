// The parts of pictures: text, cells, colours, lines, and the files that they go to.
#include "tools/report/output.h"
#include "tools/report/series_style.h"
#include "tools/report/svg.h"
#include "tools/report/viridis.h"
#include "unit.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

START_TEST(parts_of_pictures)
{
    char text[500] = "";
    FILE *file = fmemopen(text, sizeof text, "w");
    svg_escape(file, "a<b> & \"c\"");
    fputc('\n', file);
    svg_text(file, 1, 2.5, "name", "<&");
    fclose(file);
    char *end = strchr(text, '\n');
    ck_assert_ptr_nonnull(end);
    *end = 0;
    ck_assert(!strpbrk(text, "<>") && strstr(text, "&lt;b&gt; &amp; "));
    ck_assert(strstr(end + 1, "<text ") && strstr(end + 1, "class=\"name\"") && strstr(end + 1, "&lt;&amp;</text>"));
}
END_TEST

// A cell for every value: its colour by the value, its number as asked for, names beside it; zero is darkest.
START_TEST(matrices)
{
    static char text[8000];
    const double values[4] = {0, 1, 0.25, 1};
    const char *const rows[2] = {"first", "second"};
    for (int decimals = -1; decimals < 3; decimals += 3) {
        FILE *file = fmemopen(text, sizeof text, "w");
        const svg_matrix m = {.title = "a <title>",
                              .n_rows = 2,
                              .n_columns = 2,
                              .row_names = rows,
                              .values = values,
                              .most = 1,
                              .decimals = decimals};
        svg_matrix_put(file, &m, 10, 20, 300, 100);
        fclose(file);
        int cells = 0;
        for (const char *at = text; (at = strstr(at, "<rect ")); at++) cells++;
        ck_assert_int_eq(cells, 4);
        ck_assert(strstr(text, "a &lt;title&gt;") && strstr(text, ">second</text>"));
        ck_assert((strstr(text, ">0.25</text>") != NULL) == (decimals == 2));
        const char *first = strstr(text, "fill="), *second = strstr(first + 1, "fill=");
        ck_assert_msg(strncmp(first, second, 14) != 0, "zero and the most have one colour: %.14s", first);
    }
}
END_TEST

START_TEST(colours)
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
END_TEST

// A chart of two lines as text; valid until the next call.
static const char *chart_of(const double *x, size_t n, bool logarithmic)
{
    static char text[20000];
    static const double rising[40] = {0.1, 0.2, 0.4, 0.8, 0.9}, falling[40] = {0.9, 0.8, 0.4, 0.2, 0.1};
    const svg_series series[] = {{.name = "uniform", .y = rising, .low = falling, .high = rising},
                                 {.name = "kvbudget", .y = falling}};
    const svg_chart chart = {
        .title = "T", .x_label = "x", .x = x, .n = n, .n_series = 2, .series = series, .logarithmic = logarithmic};
    memset(text, 0, sizeof text);
    FILE *file = fmemopen(text, sizeof text - 1, "w");
    svg_begin_sized(file, 600, 400, 300, 200, "T", NULL);
    svg_chart_put(file, &chart, 0, 0, 600, 400);
    svg_end(file);
    fclose(file);
    return text;
}

START_TEST(charts_have_ticks_where_measured)
{
    const double few[] = {0.5, 0.65, 0.8, 0.9, 0.95};
    double many[40];
    for (int i = 0; i < 40; i++) many[i] = (i + 1) / 50.0;
    const char *text = chart_of(few, 5, false);
    ck_assert(strstr(text, ">65</text>") && strstr(text, ">95</text>") && !strstr(text, ">70</text>"));
    ck_assert_ptr_nonnull(strstr(text, "viewBox=\"0 0 600 400\" width=\"300\" height=\"200\""));
    ck_assert(strstr(text, "stroke=\"#0072b2\"") && strstr(text, "stroke=\"#d55e00\"")); // their own, in any order
    text = chart_of(many, 40, false);
    ck_assert(strstr(text, ">10</text>") && !strstr(text, ">65</text>"));
    text = chart_of(few, 5, true);
    ck_assert(strstr(text, ">10 %</text>") && strstr(text, ">100 %</text>")); // whole powers of ten
}
END_TEST

START_TEST(lines_of_a_picture_differ)
{
    static const char *const names[] = {"a", "b", "c", "d", "e", "uniform", "kvbudget", "f"};
    series_style styles[SVG_SERIES_MAX];
    series_styles(names, SVG_SERIES_MAX, styles);
    for (int i = 0; i < SVG_SERIES_MAX; i++)
        for (int k = 0; k < i; k++)
            ck_assert_msg(styles[i].mark != styles[k].mark || styles[i].dash != styles[k].dash, "%s and %s", names[i],
                          names[k]);
    ck_assert_uint_eq(styles[5].colour, series_style_of("uniform").colour);
}
END_TEST

START_TEST(pictures_are_svg)
{
    static const char *const wrong[] = {"x", "x.jpg", ".svg", "x.svg2", "x.SVG", "x.pdf", "x.png"};
    kvb_error err;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ck_assert_msg(picture_check(wrong[i], &err) == KVB_ARGUMENT, "%s", wrong[i]);
        ck_assert(strstr(err.message, "rsvg-convert"));
    }
    ck_assert_int_eq(picture_check("x.svg", &err), KVB_OK);
    const char *metrics[] = {"m"};
    ck_assert_int_eq(output_check_pictures("/tmp/x.gif", "-o", metrics, 1, &err), KVB_ARGUMENT);
}
END_TEST

// Values that differ in the last bit, or not at all, still make an axis with few ticks and no coordinate that is none.
START_TEST(equal_values_make_an_axis)
{
    static char text[20000];
    const double x[2] = {0.5, 0.8},
                 pairs[][2] = {{9.0, 9.000000000000002}, {9, 9}, {0, 0}, {1e-300, 1e-300}, {NAN, NAN}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (int how = 0; how < 4; how++) {
            const svg_series line = {.name = "a", .y = pairs[i]};
            const svg_chart chart = {.title = "T",
                                     .x_label = "x",
                                     .x = x,
                                     .n = how == 3 ? 1 : 2, // a single value
                                     .n_series = 1,
                                     .series = &line,
                                     .logarithmic = how == 1,
                                     .from_low = how == 2,
                                     .y_unit = SVG_NUMBERS};
            memset(text, 0, sizeof text);
            FILE *file = fmemopen(text, sizeof text - 1, "w");
            svg_chart_put(file, &chart, 0, 0, 600, 400);
            ck_assert_msg(fclose(file) == 0 && strlen(text) < 8000, "pair %zu, axis %d: %zu bytes", i, how,
                          strlen(text));
            ck_assert_msg(!strstr(text, "nan") && !strstr(text, "inf"), "pair %zu, axis %d: %s", i, how, text);
        }
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, parts_of_pictures);
    tcase_add_test(tc, matrices);
    tcase_add_test(tc, colours);
    tcase_add_test(tc, charts_have_ticks_where_measured);
    tcase_add_test(tc, lines_of_a_picture_differ);
    tcase_add_test(tc, pictures_are_svg);
    tcase_add_test(tc, equal_values_make_an_axis);
}

UNIT_MAIN("tools/pictures", fill)
