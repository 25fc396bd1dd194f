// The program: finds the subcommand and runs it.
#include "formats/atomic_file.h"
#include "tools/cli.h"
#include "tools/device.h"
#include "tools/json_print.h"
#include "tools/report/results.h"
#include "tools/terminal.h"
#include <cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <gsl/gsl_version.h>
#include <hdf5.h>
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#define LIST_COMMAND(name) &cmd_##name,
static const cli_command *const COMMANDS[] = {ALL_COMMANDS(LIST_COMMAND)};
enum { COMMAND_COUNT = sizeof COMMANDS / sizeof *COMMANDS };

static const char INTRODUCTION[] =
    "kvbudget finds out how much KV cache each attention head of a model needs, and writes it down as a table\n"
    "that an inference engine looks up: profile-guided optimisation for KV caches.\n"
    "\n"
    "Usage: kvbudget COMMAND [OPTION]... [FILE]...\n"
    "       kvbudget help COMMAND\n"
    "       kvbudget help metrics         the eviction metrics, their parameters and sources (--json for programs)\n"
    "       kvbudget --version\n";

static const char WORKFLOW[] =
    "\n"
    "From a model to its best table and a report, by one command:\n"
    "       kvbudget tune model.gguf -o tuned\n"
    "\n"
    "Step by step:\n"
    "  1. Watch the model decode with its full cache, and record which positions mattered to each head:\n"
    "       kvbudget profile model.gguf calib-data/narrative-en.jsonl -o run.h5\n"
    "  2. Solve for the best split of the cache over all heads, for every compression ratio from 1 % to 99 %,\n"
    "     for the eviction metric that your engine uses:\n"
    "       kvbudget solve run.h5 --metric snapkv:kvpress -o snapkv.safetensors\n"
    "  3. Look at it, as a page with pictures and as the numbers that an engine gets:\n"
    "       kvbudget report snapkv.safetensors -o snapkv.html\n"
    "       kvbudget budgets snapkv.safetensors --ratio 0.8 --tokens 4096\n"
    "  4. Use it: from C with the library libkvbudget (runtime/kvbudget.h), or in kvpress with\n"
    "       kvbudget export snapkv.safetensors --format npy -o snapkv.npy\n"
    "  5. See what it is worth on texts that it has not seen, by really evicting:\n"
    "       kvbudget eval model.gguf snapkv.safetensors some-text.txt\n"
    "\n"
    "A model is a GGUF file, or a folder of Hugging Face: config.json, safetensors, tokenizer.json (docs/models.md).\n"
    "Stop long work with Ctrl-C; the same command continues it (profile: with --resume). `kvbudget inspect "
    "FILE`\nexplains its files.\n"
    "Exit status: 0 done, 1 failed, 2 wrong usage, 130 after Ctrl-C.\n";

static void print_help(void)
{
    printf("%s\nCommands:\n", INTRODUCTION);
    for (int i = 0; i < COMMAND_COUNT; i++) printf("  %-10s %s\n", COMMANDS[i]->name, COMMANDS[i]->summary);
    printf("%s", WORKFLOW);
}

static const char *isa_name(dnnl_cpu_isa_t isa)
{
    static const struct {
        dnnl_cpu_isa_t isa;
        const char *name;
    } names[] = {{dnnl_cpu_isa_sse41, "SSE4.1"},
                 {dnnl_cpu_isa_avx, "AVX"},
                 {dnnl_cpu_isa_avx2, "AVX2"},
                 {dnnl_cpu_isa_avx2_vnni, "AVX2 VNNI"},
                 {dnnl_cpu_isa_avx512_core, "AVX-512"},
                 {dnnl_cpu_isa_avx512_core_vnni, "AVX-512 VNNI"},
                 {dnnl_cpu_isa_avx512_core_bf16, "AVX-512 BF16"},
                 {dnnl_cpu_isa_avx512_core_amx, "AMX"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].isa == isa) return names[i].name;
    return "not named by this version";
}

static void print_version(void)
{
    unsigned major = 0, minor = 0, patch = 0;
    H5get_libversion(&major, &minor, &patch);
    const dnnl_version_t *dnnl = dnnl_version();
    char pcre2[64] = "";
    pcre2_config(PCRE2_CONFIG_VERSION, pcre2);
    printf("kvbudget %s\n", KVBUDGET_VERSION);
    printf("compiler  %s %s\n",
#ifdef __clang__
           "clang", __clang_version__
#else
           "gcc", __VERSION__
#endif
    );
    printf("oneDNN    %d.%d.%d, vector units in use: %s\n", dnnl->major, dnnl->minor, dnnl->patch,
           isa_name(dnnl_get_effective_cpu_isa()));
    printf("HDF5      %u.%u.%u\n", major, minor, patch);
    printf("cJSON     %s\n", cJSON_Version());
    printf("GSL       %s\n", gsl_version);
    printf("PCRE2     %s\n", pcre2);
    printf("OpenSSL   %s\n", OpenSSL_version(OPENSSL_FULL_VERSION_STRING));
}

static const cli_command *find_command(const char *name)
{
    for (int i = 0; i < COMMAND_COUNT; i++)
        if (strcmp(COMMANDS[i]->name, name) == 0) return COMMANDS[i];
    return NULL;
}

static int unknown_command(const char *name)
{
    return cli_usage_error(NULL, "unknown command '%s'", name);
}

// A file opened while a standard stream is closed would get its number, and messages would go into the file. So closed
// ones are opened on /dev/null, in the wrong direction: using such a stream is then an error and not a silent loss.
static void take_standard_streams(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF &&
            open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
            _exit(EXIT_FAILED); // there is no stream for a message
}

// Limits OMP_NUM_THREADS, since OpenMP's library takes any number. Every team must also have as many threads as are
// announced: scratch memory, and oneDNN's work, are divided by that number.
static void bound_threads(void)
{
    omp_set_dynamic(0);
    if (omp_get_thread_limit() < omp_get_max_threads()) omp_set_num_threads(omp_get_thread_limit());
    if (omp_get_max_threads() <= DEVICE_THREADS_MAX) return;
    fprintf(stderr, "warning: OMP_NUM_THREADS: %d threads; %d are taken\n", omp_get_max_threads(), DEVICE_THREADS_MAX);
    omp_set_num_threads(DEVICE_THREADS_MAX);
}

// Runs `kvbudget help WORD`.
static int explain(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[2], "metrics") == 0 && strcmp(argv[3], "--json") == 0) {
        print_metrics_json();
        return EXIT_DONE;
    }
    if (argc > 3) return cli_usage_error(NULL, "help: expected one command, found %d words", argc - 2);
    if (strcmp(argv[2], "help") == 0) {
        print_help();
        return EXIT_DONE;
    }
    if (strcmp(argv[2], "metrics") == 0) {
        print_metrics_help();
        return EXIT_DONE;
    }
    const cli_command *command = find_command(argv[2]);
    if (!command) return unknown_command(argv[2]);
    // The options are known inside the command only, so that they are next to the variables that they fill.
    char option[] = "--help", *words[] = {argv[2], option, NULL};
    return command->run(command, 2, words);
}

static int run_command(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "kvbudget: a command is missing\nTry 'kvbudget help'.\n");
        return EXIT_USAGE;
    }
    const char *name = argv[1];
    bool help = strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0;
    if (help && argc == 2) {
        print_help();
        return EXIT_DONE;
    }
    if (help) return explain(argc, argv);
    if (strcmp(name, "--version") == 0 || strcmp(name, "version") == 0) {
        print_version();
        return EXIT_DONE;
    }
    const cli_command *command = find_command(name);
    if (!command) return unknown_command(name);
    return command->run(command, argc - 1, argv + 1);
}

static bool has_returned;

// Libraries may call exit() by themselves, as HDF5 does, without a message, if there is no memory.
static void explain_exit(void)
{
    static const char text[] = "kvbudget: a library ended the program, most likely because memory ran out\n";
    if (has_returned) return;
    atomic_files_remove();
    ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    (void)written; // nothing sensible can be done about it here
    _exit(EXIT_FAILED);
}

// Idle OpenMP threads spin for milliseconds by default. On shared processors that keeps the thread they wait for from
// running: six times slower beside one busy neighbour. libgomp reads its environment before main, so the program starts
// itself again, once. It does not under a preloaded library (a debugger's, a test's) or an explicit loader, which
// /proc/self/exe would name in place of the program.
static void wait_briefly(char **argv)
{
    char path[4096];
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY") || getenv("LD_PRELOAD")) return;
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n <= 0) return;
    path[n] = '\0';
    const char *name = strrchr(path, '/');
    if (!name || strcmp(name + 1, program_invocation_short_name) != 0) return;
    if (setenv("GOMP_SPINCOUNT", "2000", 1) == 0) execv(path, argv);
}

int main(int argc, char **argv)
{
    wait_briefly(argv);
    take_standard_streams();
    terminal_guard_streams();
    cli_watch_signals();
    atexit(explain_exit);
    json_needs_memory();
    bound_threads();
    if (argc > 2) results_remember(argc - 2, argv + 2);
    int code = run_command(argc, argv);
    // A full disk behind `> file` shows up here at the latest; silence would leave half a file and exit status 0.
    const char *failure = terminal_output_failure();
    if (failure) {
        fprintf(stderr, "kvbudget: standard output: %s\n", failure);
        code = code == EXIT_DONE ? EXIT_FAILED : code;
    }
    if (code == EXIT_FAILED) cli_end_by_signal();
    has_returned = true;
    return code;
}
