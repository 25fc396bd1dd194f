// Option tables: one description of an option serves getopt_long, the checks of its value, and the manual.
#include "tools/cli.h"
#include "formats/file_read.h"
#include "formats/need.h"
#include "profiler/text/utf8.h"
#include "runtime/fail.h"
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OPTION_HELP = 1000, OPTIONS_MAX = 64, OPTION_FORCE = OPTION_HELP + OPTIONS_MAX + 1, HELP_COLUMN = 30 };

static void print_prefix(const cli_command *command)
{
    fprintf(stderr, "kvbudget%s%s: ", command ? " " : "", command ? command->name : "");
}

static int suggest_help(const cli_command *command)
{
    fprintf(stderr, "Try 'kvbudget help%s%s'.\n", command ? " " : "", command ? command->name : "");
    return EXIT_USAGE;
}

int cli_usage_error(const cli_command *command, const char *format, ...)
{
    print_prefix(command);
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    return suggest_help(command);
}

int cli_failed(const cli_command *command, const kvb_error *err)
{
    // What is done so far must be above the error when both streams go to one file.
    fflush(stdout);
    print_prefix(command);
    fprintf(stderr, "%s\n", err->message[0] ? err->message : kvb_status_name(err->status));
    return EXIT_FAILED;
}

void cli_list_free(cli_list *list)
{
    free(list->items);
    *list = (cli_list){0};
}

static void list_append(cli_list *list, const char *text)
{
    list->items = need_more(list->items, list->count + 1, sizeof *list->items, "values of an option");
    list->items[list->count++] = text;
}

// Digits only: strtoull alone would take " 5", "+5" and even "-1" (as 2^64-1).
static bool parse_count(const char *text, uint64_t *out)
{
    if (!*text || text[strspn(text, "0123456789")]) return false;
    errno = 0;
    unsigned long long value = strtoull(text, NULL, 10);
    if (errno || value > UINT64_MAX) return false;
    *out = value;
    return true;
}

// Plain decimal numbers only: strtod alone would take "nan", "inf", "0x1p3" and leading spaces.
static bool parse_real(const char *text, double *out)
{
    if (!*text || text[strspn(text, "+-.0123456789eE")]) return false;
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !isfinite(value)) return false;
    *out = value;
    return true;
}

static bool is_among(const char *text, const char *words)
{
    for (size_t n; *words; words += n + (words[n] == '|')) {
        n = strcspn(words, "|");
        if (strlen(text) == n && memcmp(text, words, n) == 0) return true;
    }
    return false;
}

static int store_count(const cli_command *command, const cli_option *option, const char *text)
{
    uint64_t value = 0, least = option->kind == CLI_POSITIVE, most = option->kind == CLI_SEED ? UINT64_MAX : UINT32_MAX;
    if (!parse_count(text, &value) || value < least || value > most)
        return cli_usage_error(command, "--%s: expected a whole number from %" PRIu64 " to %" PRIu64 ", found '%s'",
                               option->name, least, most, text);
    *(uint64_t *)option->value = value;
    return EXIT_DONE;
}

static int store(const cli_command *command, const cli_option *option, const char *text)
{
    switch (option->kind) {
    case CLI_FLAG:
        *(bool *)option->value = true;
        return EXIT_DONE;
    case CLI_COUNT:
    case CLI_POSITIVE:
    case CLI_SEED:
        return store_count(command, option, text);
    case CLI_REAL:
        if (parse_real(text, option->value)) return EXIT_DONE;
        return cli_usage_error(command, "--%s: expected a decimal number, found '%s'", option->name, text);
    case CLI_CHOICE:
        if (!is_among(text, option->metavar))
            return cli_usage_error(command, "--%s: expected %s, found '%s'", option->name, option->metavar, text);
        *(const char **)option->value = text;
        return EXIT_DONE;
    case CLI_LIST:
    case CLI_INPUTS:
        list_append(option->value, text);
        return EXIT_DONE;
    default:
        *(const char **)option->value = text;
        return EXIT_DONE;
    }
}

// ---- Options --------------------------------------------------------------------------------------------------------

static bool force_given; // if the command itself has no such option
static const cli_option force_option = {"force",      0,    CLI_FLAG,
                                        &force_given, NULL, "let outputs replace files that hold something else"};

// Returns --force for a command that writes files and has no such option in its table; NULL for others.
static const cli_option *own_force(const cli_option *options)
{
    bool writes = false;
    for (; options->name; options++) {
        if (strcmp(options->name, force_option.name) == 0) return NULL;
        writes |= options->kind >= CLI_OUTPUT;
    }
    return writes ? &force_option : NULL;
}

// Stores the values of the options that are given. Afterwards the operands begin at optind.
static int parse_options(const cli_command *command, const cli_option *options, int argc, char **argv)
{
    struct option longs[OPTIONS_MAX + 3] = {{"help", no_argument, NULL, OPTION_HELP}};
    char shorts[2 * OPTIONS_MAX + 4] = "h", *name = argv[0];
    size_t n = 0, length = strlen(shorts);
    for (; n < OPTIONS_MAX && options[n].name; n++) {
        bool flag = options[n].kind == CLI_FLAG;
        longs[n + 1] =
            (struct option){options[n].name, flag ? no_argument : required_argument, NULL, OPTION_HELP + 1 + (int)n};
        if (!options[n].short_name) continue;
        shorts[length++] = options[n].short_name;
        if (!flag) shorts[length++] = ':';
    }
    if (own_force(options)) longs[n + 1] = (struct option){force_option.name, no_argument, NULL, OPTION_FORCE};
    force_given = false;
    optind = 0;                                        // glibc: forget the state of an earlier call
    argv[0] = need_text("kvbudget %s", command->name); // getopt's messages begin with it
    int code = EXIT_DONE;
    for (int c; code == EXIT_DONE && (c = getopt_long(argc, argv, shorts, longs, NULL)) != -1;) {
        if (c == 'h' || c == OPTION_HELP) cli_print_manual(command, options);
        const cli_option *option = c == OPTION_FORCE ? &force_option : NULL;
        for (size_t i = 0; i < n && !option; i++)
            if (c == OPTION_HELP + 1 + (int)i || (options[i].short_name && c == options[i].short_name))
                option = &options[i];
        if (c == '?') code = suggest_help(command);
        else code = option ? store(command, option, optarg) : -1;
    }
    free(argv[0]);
    argv[0] = name;
    return code;
}

static void name_inputs(const cli_option *options, char **operands, int n)
{
    for (int i = 0; i < n; i++) named_input(operands[i]);
    for (const cli_option *o = options; o->name; o++) {
        if (o->kind == CLI_INPUT && *(const char **)o->value) named_input(*(const char **)o->value);
        const cli_list *list = o->kind == CLI_INPUTS ? o->value : &(cli_list){0};
        for (size_t i = 0; i < list->count; i++) named_input(list->items[i]);
    }
}

static kvb_status name_outputs(const cli_option *options, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (const cli_option *o = options; o->name && status == KVB_OK; o++) {
        const char *path = o->kind >= CLI_OUTPUT ? *(const char **)o->value : NULL;
        char option[64];
        snprintf(option, sizeof option, "--%s", o->name);
        if (path) status = named_output(path, option, o->kind - CLI_OUTPUT, err);
    }
    return status;
}

int cli_parse_output(const cli_command *command, const cli_option *options, file_kind written, int argc, char **argv,
                     int *first)
{
    int code = parse_options(command, options, argc, argv);
    if (code != EXIT_DONE) return code;
    *first = optind;
    bool force = force_given;
    for (const cli_option *o = options; o->name; o++)
        if (strcmp(o->name, force_option.name) == 0) force = *(const bool *)o->value;
    int from = written != FILE_ANY && optind < argc;
    kvb_error err;
    named_files_begin(force);
    name_inputs(options, argv + optind + from, argc - optind - from);
    kvb_status status = from ? named_output(argv[optind], argv[optind], written, &err) : KVB_OK;
    if (status == KVB_OK) status = name_outputs(options, &err);
    return status == KVB_OK ? EXIT_DONE : cli_failed(command, &err);
}

int cli_parse(const cli_command *command, const cli_option *options, int argc, char **argv, int *first)
{
    return cli_parse_output(command, options, FILE_ANY, argc, argv, first);
}

// ---- Help -----------------------------------------------------------------------------------------------------------

static void print_option(const cli_option *option)
{
    char left[128];
    char dash[8] = "    ";
    if (option->short_name) snprintf(dash, sizeof dash, "-%c, ", option->short_name);
    int used = snprintf(left, sizeof left, "  %s--%s%s%s", dash, option->name, option->metavar ? " " : "",
                        option->metavar ? option->metavar : "");
    printf("%s", left);
    if (used >= HELP_COLUMN) {
        putchar('\n');
        used = 0;
    }
    for (const char *line = option->help; line;) {
        const char *newline = strchr(line, '\n');
        int length = newline ? (int)(newline - line) : (int)strlen(line);
        printf("%*s%.*s\n", HELP_COLUMN - used, "", length, line);
        line = newline ? newline + 1 : NULL;
        used = 0;
    }
}

void cli_print_manual(const cli_command *command, const cli_option *options)
{
    printf("kvbudget %s: %s\n\nUsage: kvbudget %s\n\nOptions:\n", command->name, command->summary, command->synopsis);
    for (const cli_option *option = options; option->name; option++) print_option(option);
    if (own_force(options)) print_option(own_force(options));
    print_option(&(cli_option){.name = "help", .short_name = 'h', .help = "print this text"});
    if (command->details && *command->details) {
        printf("\n%s", command->details);
        if (command->details[strlen(command->details) - 1] != '\n') putchar('\n');
    }
}

int cli_terminal_width(int fd, int otherwise)
{
    struct winsize size;
    if (ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return otherwise;
    return size.ws_col;
}

bool cli_ratio(double *out, const char *text)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text) return false;
    if (*end == '%') {
        value /= 100;
        ++end;
    }
    *out = value;
    return *end == 0 && value >= 0 && value < 1;
}

int cli_check_protected(const cli_command *command, uint64_t sink, uint64_t window)
{
    const uint64_t most = UINT32_MAX / 4;
    if ((sink == UINT64_MAX || sink <= most) && (window == UINT64_MAX || window <= most)) return EXIT_DONE;
    return cli_usage_error(command, "--sink and --window: expected at most %" PRIu64, most);
}

// ---- Folders ----

static bool is_folder(const char *path)
{
    struct stat s;
    return stat(path, &s) == 0 && S_ISDIR(s.st_mode);
}

kvb_status cli_read_text(char **out, size_t *size, const char *path, kvb_error *err)
{
    file_view view;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    if (size) *size = view.size;
    *out = memcpy(need(view.size + 1, 1, "bytes of a text"), view.data, view.size);
    status = utf8_check_text(path, *out, view.size, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    return status;
}

kvb_status cli_program_folder(char **out, const char *variable, const char *name, const char *what, kvb_error *err)
{
    char self[4096];
    const char *named = getenv(variable);
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = '\0';
    char *slash = strrchr(self, '/');
    if (slash) *slash = '\0';
    char *places[] = {named ? need_text("%s", named) : need_text("%s/../%s", self, name),
                      need_text("%s/../share/kvbudget/%s", self, name)};
    *out = is_folder(places[0]) ? places[0] : !named && is_folder(places[1]) ? places[1] : NULL;
    kvb_status status = KVB_OK;
    if (!*out)
        status = kvb_fail(err, KVB_IO, "%s: there is no folder of %s%s%s; name it in %s", places[0], what,
                          named ? "" : ", nor at ", named ? "" : places[1], variable);
    for (int i = 0; i < 2; i++)
        if (places[i] != *out) free(places[i]);
    return status;
}

kvb_status cli_make_folder(const char *path, kvb_error *err)
{
    if (is_folder(path) || mkdir(path, 0777) == 0 || errno == EEXIST) return KVB_OK;
    return kvb_fail(err, KVB_IO, "%s: %s", path, strerror(errno));
}
