// Sizes on the command line, memory as Linux tells it, JSON on standard output, and the parts of pictures.
#include "tools/json_print.h"
#include "tools/memory.h"
#include "tools/report/svg.h"
#include "tools/report/viridis.h"
#include "unit.h"
#include <stdio.h>
#include <string.h>
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

static void fill(TCase *tc)
{
    tcase_add_test(tc, sizes);
    tcase_add_test(tc, memory_of_this_process);
    tcase_add_test(tc, json_to_stdout);
    tcase_add_test(tc, parts_of_pictures);
    tcase_add_test(tc, colours);
}

UNIT_MAIN("tools_pieces", fill)
