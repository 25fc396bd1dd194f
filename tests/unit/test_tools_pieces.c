// Sizes on the command line, memory as Linux tells it, JSON on standard output, and the parts of pictures.
#include "tools/json_print.h"
#include "tools/memory.h"
#include "tools/report/output.h"
#include "tools/report/series_style.h"
#include "tools/report/svg.h"
#include "tools/report/viridis.h"
#include "unit.h"
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

START_TEST(sizes)
{
    const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {{"1", 1},
                {"8000000000", 8000000000},
                {"4GiB", (uint64_t)4 << 30},
                {"512M", 512000000},
                {"1.5 GB", 1500000000},
                {"2Ki", 2048},
                {"3tib", (uint64_t)3 << 40},
                {"7b", 7}};
    uint64_t bytes;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        ck_assert_msg(memory_parse(good[i].text, &bytes), "%s", good[i].text);
        ck_assert_msg(bytes == good[i].bytes, "%s: %llu", good[i].text, (unsigned long long)bytes);
    }
    const char *bad[] = {"",     "0", "-1", "+1", "0.5", "1x", "1 GiBx", "GiB", "inf", "nan", "0x10", "9999999999999T",
                         "1e400"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) ck_assert_msg(!memory_parse(bad[i], &bytes), "%s", bad[i]);
}
END_TEST

START_TEST(memory_of_this_process)
{
    enum { SIZE = 64 << 20 };
    uint64_t before = memory_resident();
    char *block = malloc(SIZE);
    for (size_t i = 0; i < SIZE; i += 1024) *(volatile char *)(block + i) = 1; // so that it is really written
    uint64_t with = memory_resident();
    ck_assert_msg(with >= before + SIZE * 9 / 10, "%llu after %llu", (unsigned long long)with,
                  (unsigned long long)before);
    free(block);
    ck_assert(memory_peak() + SIZE / 10 >= with); // Linux counts pages in batches
    ck_assert(memory_free() > 0);
}
END_TEST

// A limit of the address space is seen, and memory_free never promises more than it leaves.
START_TEST(room_of_the_address_space)
{
    ck_assert(memory_address_room() == UINT64_MAX);
    struct rlimit was, less;
    ck_assert_int_eq(getrlimit(RLIMIT_AS, &was), 0);
    FILE *f = fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    ck_assert(f && fscanf(f, "%lu", &pages) == 1);
    fclose(f);
    uint64_t used = (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE), spare = (uint64_t)128 << 20;
    less = was;
    less.rlim_cur = used + spare;
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &less), 0);
    uint64_t room = memory_address_room(), available = memory_free();
    less.rlim_cur = used / 2;
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &less), 0);
    uint64_t none = memory_address_room();
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &was), 0);
    ck_assert_msg(room <= spare && room >= spare / 2, "%llu left of %llu", (unsigned long long)room,
                  (unsigned long long)spare);
    ck_assert(available <= spare);
    ck_assert(none == 0);
}
END_TEST

// What `print` puts on standard output; valid until the next call.
static const char *printed(kvb_status (*print)(const cJSON *, kvb_error *), const cJSON *document, kvb_status want)
{
    static char text[1000];
    fflush(stdout);
    int shown = dup(STDOUT_FILENO);
    FILE *file = tmpfile();
    dup2(fileno(file), STDOUT_FILENO);
    kvb_error err;
    kvb_status status = print(document, &err);
    fflush(stdout);
    dup2(shown, STDOUT_FILENO);
    close(shown);
    rewind(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    ck_assert_int_eq(status, want);
    return text;
}

START_TEST(json_to_stdout)
{
    cJSON *document = cJSON_Parse("{\"a\": [1, true], \"b\": \"x\"}");
    const char *text = printed(json_print, document, KVB_OK);
    ck_assert(strchr(text, '\n') != strrchr(text, '\n') && text[strlen(text) - 1] == '\n');
    cJSON *again = cJSON_Parse(text);
    ck_assert(cJSON_Compare(document, again, 1));
    cJSON_Delete(again);
    cJSON_Delete(document);
    ck_assert_str_eq(printed(json_print, NULL, KVB_MEMORY), "");
}
END_TEST

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

START_TEST(pictures_by_their_ending)
{
    static const char *const wrong[] = {"x", "x.jpg", ".svg", "x.svg2", "x.SVG", "x.pdf.gz"};
    kvb_error err;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ck_assert_msg(picture_check(wrong[i], &err) == KVB_ARGUMENT, "%s", wrong[i]);
        ck_assert(strstr(err.message, ".svg, .pdf or .png"));
    }
    ck_assert_int_eq(picture_check("x.svg", &err), KVB_OK);
    const char *metrics[] = {"m"};
    ck_assert_int_eq(output_check_pictures("/tmp/x.gif", metrics, 1, &err), KVB_ARGUMENT);

    char folder[] = "/tmp/kvb-picture-XXXXXX", path[64];
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/x.svg", folder);
    picture p;
    ck_assert_int_eq(picture_open(&p, path, &err), KVB_OK);
    fputs("<svg/>", p.svg);
    picture_abandon(&p);
    picture_abandon(&p);
    ck_assert_int_ne(access(path, F_OK), 0);
    ck_assert_int_eq(picture_begin(&p, path, "m", false, &err), KVB_OK);
    fputs("<svg/>", p.svg);
    ck_assert_int_eq(picture_end(&p, true, &err), KVB_OK);
    ck_assert_int_eq(picture_open(&p, path, &err), KVB_OK);
    ck_assert_int_eq(picture_close(&p, &err), KVB_OK); // replaced by an empty one
    FILE *file = fopen(path, "r");
    ck_assert_int_eq(fgetc(file), EOF);
    fclose(file);
    ck_assert_int_eq(remove(path), 0);
    ck_assert_int_eq(rmdir(folder), 0); // nothing else was left
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_test(tc, sizes);
    tcase_add_test(tc, memory_of_this_process);
    tcase_add_test(tc, room_of_the_address_space);
    tcase_add_test(tc, json_to_stdout);
    tcase_add_test(tc, parts_of_pictures);
    tcase_add_test(tc, matrices);
    tcase_add_test(tc, colours);
    tcase_add_test(tc, charts_have_ticks_where_measured);
    tcase_add_test(tc, lines_of_a_picture_differ);
    tcase_add_test(tc, pictures_by_their_ending);
}

UNIT_MAIN("tools_pieces", fill)
