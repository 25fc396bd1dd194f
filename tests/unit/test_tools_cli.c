// Options, numbers and progress of the command line.
#include "folder_help.h"
#include "tools/cli.h"
#include "tools/terminal.h"
#include "tools_help.h"
#include <signal.h>
#include <sys/wait.h>

static const cli_command COMMAND = {"try", "try [OPTION]...", "Tries options", "Details.\n", NULL};

typedef struct values {
    bool flag;
    const char *text;
    uint64_t count, seed;
    double real;
    cli_list list;
    int first;
} values;

// Parses words up to a NULL. What is printed about wrong options goes to the test's log.
static int parse(values *v, const char *const *words)
{
    const cli_option options[] = {{"flag", 'f', CLI_FLAG, &v->flag, NULL, "A flag."},
                                  {"text", 't', CLI_TEXT, &v->text, "WORD", "A word."},
                                  {"count", 'n', CLI_COUNT, &v->count, "N", "A count."},
                                  {"real", 'r', CLI_REAL, &v->real, "X", "A number."},
                                  {"list", 'l', CLI_LIST, &v->list, "ITEM", "An item."},
                                  {"seed", 's', CLI_SEED, &v->seed, "N", "A seed."},
                                  {0}};
    static char copies[16][64]; // texts and lists point into them
    char *argv[16] = {0};
    int argc = 0;
    for (; words[argc]; argc++) argv[argc] = strcpy(copies[argc], words[argc]);
    *v = (values){.count = 7, .real = 0.25};
    return cli_parse(&COMMAND, options, argc, argv, &v->first);
}
#define PARSE(v, ...) parse(v, (const char *const[]){"try", __VA_ARGS__, NULL})

UNIT_TEST(options_of_every_kind)
{
    values v;
    ck_assert_int_eq(
        PARSE(&v, "a", "-f", "--text=x", "b", "-n", "12", "--real", "-1.5e-3", "-l", "p", "-lq", "--", "-c"), 0);
    ck_assert(v.flag);
    ck_assert_str_eq(v.text, "x");
    ck_assert_uint_eq(v.count, 12);
    ck_assert_double_eq(v.real, -1.5e-3);
    ck_assert_uint_eq(v.list.count, 2);
    ck_assert_int_eq(v.first, 11); // three operands are left: a, b, -c
    cli_list_free(&v.list);
    ck_assert_ptr_null(v.list.items);
    ck_assert_int_eq(PARSE(&v, "a"), 0); // state of the last call is gone
    unit_numbers(v.first, 1, v.count, 7);
    ck_assert_int_eq(PARSE(&v, "--help"), -1);
    ck_assert_int_eq(PARSE(&v, "-h"), -1);
}

UNIT_TEST(wrong_options)
{
    values v;
    static const char *const wrong[] = {"--nothing", "-x", "--text", "-t", "--flag=1", "--help=1"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) ck_assert_int_eq(PARSE(&v, wrong[i]), EXIT_USAGE);
}

UNIT_TEST(numbers_are_strict)
{
    values v;
    ck_assert_int_eq(PARSE(&v, "-n", "4294967295", "-r", ".5", "-s", "18446744073709551615"), 0);
    ck_assert(v.count == UINT32_MAX && v.real == 0.5 && v.seed == UINT64_MAX);
    ck_assert_int_eq(PARSE(&v, "-s", "18446744073709551616"), EXIT_USAGE);
    static const char *const counts[] = {"", " 1", "1 ", "+1", "-1", "0x10", "1e3", "1.0", "4k", "4294967296"};
    static const char *const reals[] = {"",      " 1",  "1 ",    "nan", "inf",   "-inf",
                                        "0x1p3", "1,5", "1e999", "e5",  "1.2.3", "--1"};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        ck_assert_int_eq(PARSE(&v, "-n", counts[i]), EXIT_USAGE);
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++) ck_assert_int_eq(PARSE(&v, "-r", reals[i]), EXIT_USAGE);
}

UNIT_TEST(ratios_are_shares_or_per_cent)
{
    double r = 0;
    ck_assert(cli_ratio(&r, "0.8") && r == 0.8 && cli_ratio(&r, "80%") && r == 0.8 && cli_ratio(&r, "0") && r == 0);
    const char *const wrong[] = {"1", "-0.1", "100%", "80", "0.8x", "80%%", "", "nan"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) ck_assert_msg(!cli_ratio(&r, wrong[i]), "%s", wrong[i]);
}

UNIT_TEST(protected_tokens_stay_a_count)
{
    ck_assert_int_eq(cli_check_protected(&COMMAND, UINT32_MAX / 4, UINT64_MAX), EXIT_DONE);
    ck_assert_int_eq(cli_check_protected(&COMMAND, UINT64_MAX, UINT32_MAX / 4 + 1), EXIT_USAGE);
}

// If a folder is named, no other one is looked at.
UNIT_TEST(test_program_folder)
{
    char *folder = NULL;
    kvb_error err;
    setenv("KVB_TEST_FOLDER", "/tmp", 1);
    ck_assert_int_eq(cli_program_folder(&folder, "KVB_TEST_FOLDER", "tables", "tables", &err), KVB_OK);
    ck_assert_str_eq(folder, "/tmp");
    free(folder);
    setenv("KVB_TEST_FOLDER", "/dev/null", 1);
    ck_assert_int_eq(cli_program_folder(&folder, "KVB_TEST_FOLDER", "tables", "tables", &err), KVB_IO);
    ck_assert_str_eq(err.message, "/dev/null: there is no folder of tables; name it in KVB_TEST_FOLDER");
    ck_assert_ptr_null(folder);
    unsetenv("KVB_TEST_FOLDER");
    ck_assert_int_eq(cli_program_folder(&folder, "KVB_TEST_FOLDER", "no such", "things", &err), KVB_IO);
    ck_assert_msg(strstr(err.message, "/../no such: there is no folder of things, nor at ") &&
                      strstr(err.message, "/../share/kvbudget/no such; name it in KVB_TEST_FOLDER"),
                  "%s", err.message);
    ck_assert_int_eq(cli_make_folder("/tmp", &err), KVB_OK); // it is there
    ck_assert_int_eq(cli_make_folder("/dev/null/x", &err), KVB_IO);
    ck_assert_str_eq(err.message, "/dev/null/x: Not a directory");
}

// Returns what `say` writes to standard error or standard output; valid until the next call.
static const char *said(int stream, void (*say)(void))
{
    SHOWN(stream, say());
    return shown_text;
}

// Work that is fast at first and then stalls: the time left was given as about 9 s and must not grow.
static void slow_down(void)
{
    progress bar, *p = &bar;
    progress_begin(p, "work", false);
    p->start -= 1.5;
    progress_update(p, 0, 100, "steps"); // from here on it counts
    p->start = seconds_now() - 2, p->last_shown = -1e9;
    progress_update(p, 20, 100, "steps");
    p->start -= 100;
    p->last_shown = -1e9;
    progress_update(p, 21, 100, NULL);
    progress_end(p, "%d steps", 21);
}

UNIT_TEST(what_is_left_never_grows)
{
    const char *text = said(STDERR_FILENO, slow_down);
    int first = -1, second = -1, took = -1; // a fifth took at least 2 s, so 8 s or more are left
    const char *at[] = {strstr(text, "20/100 steps"), strstr(text, "work:  21 %"), strstr(text, "work: 21 steps (")};
    ck_assert_msg(at[0] && sscanf(at[0], "20/100 steps %d s left", &first) == 1 && first >= 8, "%s", text);
    ck_assert_msg(at[1] && sscanf(at[1], "work: 21 %% %d s left", &second) == 1 && second <= first, "%s", text);
    ck_assert_msg(at[2] && sscanf(at[2], "work: 21 steps (%d", &took) == 1 && took >= 1, "%s", text);
}

// Hashing counts gigabytes, ends without a message, and stops on request.
static void hash_models(void)
{
    progress bar, *p = &bar;
    progress_begin(p, "work", false);
    p->last_shown = -1e9;
    ck_assert(progress_hashed(p, 4e9, 16e9));
    progress_clear(p); // nothing is removed from a log
    cli_stop_requested = 1;
    ck_assert(!progress_hashed(p, 5e9, 16e9));
    cli_stop_requested = 0;
    p->terminal = true;
    progress_clear(p);
}

UNIT_TEST(hashing_is_shown)
{
    ck_assert_str_eq(said(STDERR_FILENO, hash_models), "work:  25 %  4/16 GB\n\r\033[K");
}

UNIT_TEST(a_file_has_no_width)
{
    int no_terminal = open("/dev/null", O_RDWR);
    ck_assert_int_eq(cli_terminal_width(no_terminal, 77), 77);
    close(no_terminal);
}

static void say_usage(void)
{
    ck_assert_int_eq(cli_usage_error(&COMMAND, "%d is odd", 3), EXIT_USAGE);
}

static void say_failure(void)
{
    kvb_error error = {.status = KVB_IO, .message = "f: cannot open"}, silent = {.status = KVB_MEMORY};
    ck_assert_int_eq(cli_failed(&COMMAND, &error), EXIT_FAILED);
    ck_assert_int_eq(cli_failed(&COMMAND, &silent), EXIT_FAILED);
}

static void say_manual(void)
{
    const cli_option options[] = {{"list", 'l', CLI_LIST, NULL, "ITEM", "An item\nof two lines."}, {0}};
    cli_print_manual(&COMMAND, options);
}

UNIT_TEST(messages)
{
    ck_assert_str_eq(said(STDERR_FILENO, say_usage), "kvbudget try: 3 is odd\nTry 'kvbudget help try'.\n");
    ck_assert_str_eq(said(STDERR_FILENO, say_failure), "kvbudget try: f: cannot open\nkvbudget try: MEMORY\n");
    const char *printed = said(STDOUT_FILENO, say_manual);
    static const char *const parts[] = {
        "kvbudget try: Tries options", "Usage: kvbudget try [OPTION]...",
        "  -l, --list ITEM             An item\n                              of two lines.", "  -h, --help ",
        "Details."};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) ck_assert_msg(strstr(printed, parts[i]), "%s", printed);
    const char *metrics = said(STDOUT_FILENO, print_metrics_help);
    ck_assert(strstr(metrics, "snapkv:lukv") && strstr(metrics, "arXiv 2510.00636"));
}

static void say_progress(void)
{
    progress bar;
    double before = seconds_now();
    progress_begin(&bar, "work", false);
    progress_update(&bar, 1, 4, "tokens"); // too early for a line
    bar.last_shown = bar.start -= 20;
    progress_update(&bar, 2, 4, "tokens");
    progress_end(&bar, "%d done", 4);
    ck_assert(seconds_now() >= before);
    progress_begin(&bar, "quiet", true);
    bar.last_shown -= 20;
    progress_update(&bar, 2, 4, "tokens");
    progress_end(&bar, "done");
}

// In a log: a line after its interval, with share, rate and the time that is left, then a closing one; none when quiet.
UNIT_TEST(progress_in_a_log)
{
    setenv("TERM", "dumb", 1);
    const char *text = said(STDERR_FILENO, say_progress);
    ck_assert_msg(strstr(text, "work: ") == text && strstr(text, "2/4 tokens") && strstr(text, " left"), "%s", text);
    ck_assert_msg(!strstr(text, "1/4") && strstr(text, "work: 4 done (") && !strstr(text, "quiet"), "%s", text);
}

// Returns how many of `threads` compute threads a stop could interrupt: dnnl_sgemm has no stack for a signal handler.
static int interruptible(int threads)
{
    int found = 0;
#pragma omp parallel num_threads(threads) reduction(+ : found)
    {
        sigset_t blocked;
        sigemptyset(&blocked);
        pthread_sigmask(SIG_BLOCK, NULL, &blocked);
        found += !sigismember(&blocked, SIGINT) || !sigismember(&blocked, SIGTERM);
    }
    return found;
}

// Inputs, outputs and the first operand as an output. --force, which is not in the table, lets a file of another kind
// be replaced, and nothing lets an input be replaced.
UNIT_TEST(files_that_are_named)
{
    const char *in = help_path("in"), *out = help_path("out.csv"), *notes = help_path("notes");
    help_spew(in, "a note, or two", 14);
    help_spew(notes, "a note, or two", 14);
    char *text = NULL;
    size_t size = 0;
    kvb_error err;
    ck_assert(cli_read_text(&text, &size, in, &err) == KVB_OK && size == 14 && strcmp(text, "a note, or two") == 0);
    free(text);
    const char *read = NULL, *csv = NULL;
    const cli_option options[] = {{"read", 'r', CLI_INPUT, &read, "FILE", "What is read."},
                                  {"csv", 'c', CLI_WRITES(FILE_CSV), &csv, "FILE", "What is written."},
                                  {0}};
    const struct {
        const char *words[6];
        bool first;
        int code;
    } cases[] = {{{"try", "-r", in, "-c", out}, false, EXIT_DONE},
                 {{"try", "-r", in, "-c", in}, false, EXIT_FAILED},
                 {{"try", "--force", "-r", in, "-c", in}, false, EXIT_FAILED},
                 {{"try", in, "-c", in}, false, EXIT_FAILED},
                 {{"try", "-c", notes}, false, EXIT_FAILED},
                 {{"try", "--force", "-c", notes}, false, EXIT_DONE},
                 {{"try", "-c", ""}, false, EXIT_FAILED},
                 {{"try", out, "-c", out}, true, EXIT_FAILED},
                 {{"try", out, "-r", in}, true, EXIT_DONE},
                 {{"try", notes, "-r", in}, true, EXIT_FAILED}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *argv[7] = {0};
        int argc = 0, first;
        read = csv = NULL;
        for (; argc < 6 && cases[i].words[argc]; argc++) argv[argc] = (char *)(uintptr_t)cases[i].words[argc];
        int code = cases[i].first ? cli_parse_output(&COMMAND, options, FILE_CSV, argc, argv, &first)
                                  : cli_parse(&COMMAND, options, argc, argv, &first);
        ck_assert_msg(code == cases[i].code, "case %zu: %d", i, code);
    }
    // What only a command knows: a file for each metric.
    named_files_begin(false);
    named_input(in);
    ck_assert_int_eq(named_output("{metric}.csv", "--csv", FILE_CSV | FILE_PER_METRIC, NULL), KVB_OK);
    ck_assert_int_eq(named_output(help_folder, "--csv", FILE_CSV | FILE_PER_METRIC, NULL), KVB_OK);
    ck_assert_int_eq(named_output(out, "--csv", FILE_CSV, NULL), KVB_OK);
    ck_assert_int_eq(named_output(out, "--csv", FILE_CSV, NULL), KVB_OK);
    ck_assert_int_eq(named_output(out, "--output", FILE_CSV, NULL), KVB_ARGUMENT);
    ck_assert_int_eq(named_output(in, "--output", FILE_ANY, NULL), KVB_ARGUMENT);
    named_files_begin(false);
}

// Puts what a guarded standard output shows of `pieces`, each written by itself, in `out`.
static void shown(char *out, size_t size, const char *const *pieces)
{
    int ends[2];
    ck_assert_int_eq(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDOUT_FILENO);
        terminal_guard_streams();
        for (; *pieces; pieces++) {
            fputs(*pieces, stdout);
            fflush(stdout);
        }
        terminal_sequence(stdout, "\033[%dm", 1);
        _exit(terminal_output_failure() ? 1 : 0);
    }
    close(ends[1]);
    int status;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(status, 0);
    ssize_t n = read(ends[0], out, size - 1);
    out[n > 0 ? n : 0] = '\0';
    close(ends[0]);
}

// Outside text cannot command a terminal or reverse a line; characters that buffers cut in two stay whole.
UNIT_TEST(terminal_shows)
{
    static const struct {
        const char *pieces[5], *shown;
    } cases[] = {
        {{"a\tb\n"}, "a\tb\n"},
        {{"\033[31m\r\x7f\a"}, "\\u001b[31m\\u000d\\u007f\\u0007"},
        {{"\xc2\x9b\xe2\x80\xae\xe2\x81\xa9\xd8\x9c\xe2\x80\xa8"}, "\\u009b\\u202e\\u2069\\u061c\\u2028"},
        {{"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"}, "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"},
        {{"\xe2", "\x82", "\xac", "\xf0\x9f"}, "\xe2\x82\xac\\xf0\\x9f"},
        {{"\xe2\x80", "\xae", "\xe2", "x\xff"}, "\\u202e\\xe2x\\xff"},
        {{"\xc2", "\xc2\x9b", "\x80"}, "\\xc2\\u009b\\x80"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char out[256], expected[256];
        shown(out, sizeof out, cases[i].pieces);
        snprintf(expected, sizeof expected, "%s\033[1m", cases[i].shown);
        ck_assert_msg(strcmp(out, expected) == 0, "case %zu: %s", i, out);
    }
}

// The first signal asks to stop and interrupts no compute thread; the program then ends by that signal. Without a
// signal, nothing happens.
UNIT_TEST(signals)
{
    cli_end_by_signal();
    cli_watch_signals();
    cli_catch_signals();
    ck_assert_int_eq(cli_stop_requested, 0);
    ck_assert_int_eq(interruptible(4), 0);
    kill(getpid(), SIGTERM);
    while (!cli_stop_requested) usleep(10000);
    ck_assert_int_eq(cli_stop_requested, SIGTERM);
    pid_t child = fork();
    if (child == 0) {
        cli_end_by_signal();
        _exit(0);
    }
    int status;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
}

UNIT_MAIN_EACH("tools_cli", help_setup, help_teardown)
