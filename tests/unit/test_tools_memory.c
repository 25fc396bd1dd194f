// Sizes on the command line, memory as Linux reports it, and JSON on standard output if memory is lacking.
#include "tools/json_print.h"
#include "tools/memory.h"
#include "tools_help.h"
#include <sys/resource.h>

UNIT_TEST(sizes)
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

UNIT_TEST(memory_of_this_process)
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

// A limit of the address space is seen, and memory_free never promises more than it leaves.
UNIT_TEST(room_of_the_address_space)
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
    ck_assert(available <= spare && none == 0);
}

UNIT_TEST(json_to_stdout)
{
    const char *text = shown_text;
    cJSON *document = cJSON_Parse("{\"a\": [1, true], \"b\": \"x\"}");
    SHOWN(1, json_print(document));
    ck_assert(strchr(text, '\n') != strrchr(text, '\n') && text[strlen(text) - 1] == '\n');
    cJSON *again = cJSON_Parse(text);
    ck_assert(cJSON_Compare(document, again, 1));
    cJSON_Delete(again);
    cJSON_Delete(document);
}

#ifndef __SANITIZE_ADDRESS__ // a sanitiser's own allocator ends the program if there is no address space
// If cJSON lacks memory, the program says what was asked for and ends with status 1.
START_TEST(json_without_memory)
{
    char *large = malloc(64 << 20);
    memset(large, 'x', (64 << 20) - 1);
    large[(64 << 20) - 1] = '\0';
    json_needs_memory();
    struct rlimit less = {1 << 20, RLIM_INFINITY};
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &less), 0);
    cJSON_CreateString(large);
}
END_TEST
#endif

int main(void)
{
#ifndef __SANITIZE_ADDRESS__
    tcase_add_exit_test(unit_case(), json_without_memory, 1);
#endif
    return unit_run("tools/memory", UNIT_CASES(unit_case()));
}
