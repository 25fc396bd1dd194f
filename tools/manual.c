#include "tools/manual.h"
#include <ctype.h>
#include <string.h>

// What every command's --help is printed by meanwhile, one after the other.
static void visit_commands(const manual *m, cli_manual_printer *printer)
{
    cli_print_manuals_by(printer);
    for (size_t i = 0; i < m->n_commands; i++) {
        char option[] = "--help", name[32];
        snprintf(name, sizeof name, "%s", m->commands[i]->name);
        char *words[] = {name, option, NULL};
        (void)m->commands[i]->run(m->commands[i], 2, words); // prints, and cannot fail
    }
    cli_print_manuals_by(NULL);
}

// ---- man ------------------------------------------------------------------------------------------------------------

// A line of text: what roff would take for itself is escaped.
static void put_roff(const char *text, size_t length)
{
    if (length > 0 && (*text == '.' || *text == '\'')) fputs("\\&", stdout);
    for (size_t i = 0; i < length; i++) {
        if (text[i] == '\\') fputs("\\e", stdout);
        else if (text[i] == '-') fputs("\\-", stdout);
        else putchar(text[i]);
    }
    putchar('\n');
}

// Running text is filled; lines that begin with a space are examples and tables.
static void put_roff_text(const char *text)
{
    bool as_is = false;
    for (const char *line = text; *line;) {
        size_t length = strcspn(line, "\n");
        bool example = *line == ' ';
        if (example != as_is && length > 0) puts(example ? ".PP\n.nf" : ".fi\n.PP");
        if (length > 0) as_is = example;
        if (length == 0) puts(as_is ? "" : ".PP");
        else put_roff(line, length);
        line += length + (line[length] == '\n');
    }
    if (as_is) puts(".fi");
}

static void put_roff_option(const cli_option *o)
{
    fputs(".TP\n", stdout);
    if (o->short_name) printf("\\fB\\-%c\\fR, ", o->short_name);
    fputs("\\fB\\-\\-", stdout);
    for (const char *p = o->name; *p; p++) fputs(*p == '-' ? "\\-" : (const char[]){*p, 0}, stdout);
    printf("\\fR%s%s%s\n", o->metavar ? " \\fI" : "", o->metavar ? o->metavar : "", o->metavar ? "\\fR" : "");
    for (const char *line = o->help; *line;) {
        size_t length = strcspn(line, "\n");
        put_roff(line, length);
        line += length + (line[length] == '\n');
    }
}

static void put_roff_command(const cli_command *command, const cli_option *options)
{
    printf(".SS kvbudget %s\n", command->name);
    put_roff(command->summary, strlen(command->summary));
    fputs(".PP\n.B kvbudget\n", stdout);
    put_roff(command->synopsis, strlen(command->synopsis));
    for (const cli_option *o = options; o->name; o++) put_roff_option(o);
    if (cli_force_option(options)) put_roff_option(cli_force_option(options));
    if (!command->details) return;
    puts(".PP");
    put_roff_text(command->details);
}

static void print_roff(const manual *m)
{
    printf(
        ".TH KVBUDGET 1 \"\" \"kvbudget %s\" \"User Commands\"\n.SH NAME\nkvbudget \\- budgets of KV caches for every "
        "attention head of a model\n.SH SYNOPSIS\n.B kvbudget\n.I COMMAND\n[OPTION]... [FILE]...\n.SH DESCRIPTION\n",
        kvb_version());
    put_roff_text(m->introduction);
    puts(".SH COMMANDS");
    visit_commands(m, put_roff_command);
    puts(".SH USE");
    put_roff_text(m->workflow);
}

// ---- bash and zsh ---------------------------------------------------------------------------------------------------

// Whether the help calls an option's value by the words that it may be: "npy|lukv-steps|csv".
static bool is_choice(const cli_option *o)
{
    if (!o->metavar || !strchr(o->metavar, '|')) return false;
    for (const char *p = o->metavar; *p; p++)
        if (!islower((unsigned char)*p) && !isdigit((unsigned char)*p) && !strchr("|-_", *p)) return false;
    return true;
}

static void put_spaced(const char *choices)
{
    for (; *choices; choices++) putchar(*choices == '|' ? ' ' : *choices);
}

static void put_bash_command(const cli_command *command, const cli_option *options)
{
    printf("    %s)\n        options='--help", command->name);
    for (const cli_option *o = options; o->name; o++) printf(" --%s", o->name);
    if (cli_force_option(options)) fputs(" --force", stdout);
    fputs("'\n        case $before in\n", stdout);
    for (const cli_option *o = options; o->name; o++) {
        if (!is_choice(o)) continue;
        printf("        --%s", o->name);
        if (o->short_name) printf(" | -%c", o->short_name);
        fputs(") words='", stdout);
        put_spaced(o->metavar);
        fputs("' ;;\n", stdout);
    }
    fputs("        esac\n        ;;\n", stdout);
}

static void put_names(const manual *m)
{
    for (size_t i = 0; i < m->n_commands; i++) printf("%s%s", i ? " " : "", m->commands[i]->name);
}

// Values are names of files, unless the option lists its words.
static void print_bash(const manual *m)
{
    fputs("# Completion of kvbudget for bash; made by `kvbudget help bash`.\n"
          "_kvbudget() {\n"
          "    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} options='' words=''\n"
          "    COMPREPLY=()\n"
          "    local commands='",
          stdout);
    put_names(m);
    fputs("'\n    if [ \"$COMP_CWORD\" = 1 ]; then\n"
          "        mapfile -t COMPREPLY < <(compgen -W \"$commands help --version\" -- \"$current\")\n"
          "        return\n"
          "    fi\n"
          "    case ${COMP_WORDS[1]} in\n"
          "    help) words=\"$commands metrics man bash zsh\" ;;\n",
          stdout);
    visit_commands(m, put_bash_command);
    fputs("    esac\n"
          "    if [ -n \"$words\" ]; then mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$current\")\n"
          "    elif [[ $current == -* ]]; then mapfile -t COMPREPLY < <(compgen -W \"$options\" -- \"$current\")\n"
          "    else mapfile -t COMPREPLY < <(compgen -f -- \"$current\"); fi\n"
          "}\n"
          "complete -o filenames -F _kvbudget kvbudget\n",
          stdout);
}

// The first line of a help text inside of '...[...]' of zsh's _arguments, or, without brackets, of _describe.
static void put_zsh(const char *text)
{
    for (; *text && *text != '\n'; text++) {
        if (*text == '\'') fputs("'\\''", stdout);
        else if (strchr("[]:\\", *text)) printf("\\%c", *text);
        else putchar(*text);
    }
}

static void put_zsh_option(const cli_option *o)
{
    const char *again = o->kind == CLI_LIST || o->kind == CLI_INPUTS ? "*" : "";
    for (int is_short = 0; is_short < (o->short_name ? 2 : 1); is_short++) {
        if (is_short) printf("            '%s-%c%s[", again, o->short_name, o->kind == CLI_FLAG ? "" : "+");
        else printf("            '%s--%s%s[", again, o->name, o->kind == CLI_FLAG ? "" : "=");
        put_zsh(o->help);
        putchar(']');
        if (o->kind != CLI_FLAG) {
            putchar(':');
            put_zsh(o->metavar ? o->metavar : "value");
            fputs(is_choice(o) ? ":(" : ":_files", stdout);
            if (is_choice(o)) {
                put_spaced(o->metavar);
                putchar(')');
            }
        }
        fputs("' \\\n", stdout);
    }
}

static void put_zsh_command(const cli_command *command, const cli_option *options)
{
    printf("    %s)\n        _arguments -s \\\n", command->name);
    for (const cli_option *o = options; o->name; o++) put_zsh_option(o);
    if (cli_force_option(options)) put_zsh_option(cli_force_option(options));
    fputs("            '(- *)'{-h,--help}'[print the manual of the command]' '*:file:_files' ;;\n", stdout);
}

static void print_zsh(const manual *m)
{
    fputs("#compdef kvbudget\n# Completion of kvbudget for zsh; made by `kvbudget help zsh`.\n"
          "_kvbudget() {\n    local -a commands=(\n",
          stdout);
    for (size_t i = 0; i < m->n_commands; i++) {
        printf("        '%s:", m->commands[i]->name);
        put_zsh(m->commands[i]->summary);
        fputs("'\n", stdout);
    }
    fputs("        'help:explain a command'\n    )\n"
          "    if (( CURRENT == 2 )); then _describe command commands; return; fi\n"
          "    local command=$words[2]\n"
          "    shift words; (( CURRENT-- ))\n"
          "    case $command in\n"
          "    help) _describe command commands; _values other metrics man bash zsh ;;\n",
          stdout);
    visit_commands(m, put_zsh_command);
    fputs("    esac\n}\n_kvbudget \"$@\"\n", stdout);
}

bool manual_print(const manual *m, const char *name)
{
    static const struct {
        const char *name;
        void (*print)(const manual *);
    } forms[] = {{"man", print_roff}, {"bash", print_bash}, {"zsh", print_zsh}};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (strcmp(name, forms[i].name) != 0) continue;
        forms[i].print(m);
        return true;
    }
    return false;
}
