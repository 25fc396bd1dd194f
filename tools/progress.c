// Progress of long work on stderr.
#include "tools/cli.h"
#include "tools/terminal.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// A terminal is redrawn a few times a second; a log gets a line often enough to see that the work goes on.
#define SECONDS_TERMINAL 0.2
#define SECONDS_LOG 5.0
enum { BAR_WIDTH = 24 };

double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void progress_begin(progress *p, const char *label, bool quiet)
{
    const char *term = getenv("TERM");
    bool terminal = isatty(STDERR_FILENO) && term && strcmp(term, "dumb") != 0;
    double now = seconds_now();
    // A log's first line comes after its first interval: short work leaves only its closing line.
    *p = (progress){label, now, terminal ? -INFINITY : now, NAN, INFINITY, terminal, quiet};
}

static void format_seconds(char *out, size_t size, double seconds)
{
    if (seconds < 100) snprintf(out, size, "%.0f s", ceil(seconds));
    else if (seconds < 6000) snprintf(out, size, "%.0f min", ceil(seconds / 60));
    else snprintf(out, size, "%.1f h", seconds / 3600);
}

static void format_number(char *out, size_t size, double value)
{
    if (value == floor(value) || value >= 1000) snprintf(out, size, "%.0f", value);
    else snprintf(out, size, value < 10 ? "%.2f" : "%.1f", value);
}

// Writes "58 %  12/40 texts  3 s left"; without a unit only the share, without a known total what is done. The time
// left never grows, as it would if a run slowed down for a while.
static void format_state(progress *p, char *out, size_t size, double done, double total, const char *unit)
{
    char part[2][48] = {"", ""};
    double elapsed = seconds_now() - p->start, rate = elapsed > 0 ? (done - p->first_done) / elapsed : 0;
    size_t used = 0;
    format_number(part[0], sizeof part[0], done);
    format_number(part[1], sizeof part[1], total);
    if (total > 0) used += (size_t)snprintf(out, size, "%3.0f %%", floor(100 * done / total));
    if (unit && total > 0) used += (size_t)snprintf(out + used, size - used, "  %s/%s %s", part[0], part[1], unit);
    else if (unit) used += (size_t)snprintf(out, size, "%s %s", part[0], unit);
    if (rate <= 0 || elapsed < 1 || total <= 0 || done >= total) return;
    p->left = fmin(p->left, (total - done) / rate);
    format_seconds(part[0], sizeof part[0], p->left);
    snprintf(out + used, size - used, "  %s left", part[0]);
}

// On a narrow terminal the bar is left out first, then the line is cut: one that wraps could not be redrawn.
static void draw_terminal(const progress *p, const char *state, double done, double total)
{
    char bar[BAR_WIDTH + 4] = "", line[320];
    int columns = cli_terminal_width(STDERR_FILENO, 80) - 1;
    int room = columns - (int)strlen(p->label) - (int)strlen(state) - 4;
    int width = room < BAR_WIDTH ? room : BAR_WIDTH;
    if (total > 0 && width >= 4) {
        int full = (int)(width * fmin(1, fmax(0, done / total)));
        bar[0] = '[';
        for (int i = 0; i < width; i++) bar[i + 1] = i < full ? '#' : '.';
        bar[width + 1] = ']';
        bar[width + 2] = ' ';
    }
    int length = snprintf(line, sizeof line, "%s %s%s", p->label, bar, state);
    if (columns >= 0 && columns < (int)sizeof line && length > columns) line[columns] = '\0';
    terminal_sequence(stderr, "\r");
    fputs(line, stderr);
    terminal_sequence(stderr, "\033[K");
}

void progress_update(progress *p, double done, double total, const char *unit)
{
    if (isnan(p->first_done)) p->first_done = done;
    double now = seconds_now();
    if (p->quiet || now - p->last_shown < (p->terminal ? SECONDS_TERMINAL : SECONDS_LOG)) return;
    p->last_shown = now;
    char state[192];
    format_state(p, state, sizeof state, done, total, unit);
    if (p->terminal) draw_terminal(p, state, done, total);
    else fprintf(stderr, "%s: %s\n", p->label, state);
}

// Writes the line at once, so that it stays whole when other output goes to the same place.
void progress_end(progress *p, const char *format, ...)
{
    if (p->quiet) return;
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (p->terminal) terminal_sequence(stderr, "\r\033[K");
    fprintf(stderr, "%s: %s (%.1f s)\n", p->label, text, seconds_now() - p->start);
}

void progress_clear(progress *p)
{
    if (!p->quiet && p->terminal && isfinite(p->last_shown)) terminal_sequence(stderr, "\r\033[K");
}

bool progress_hashed(void *bar, double done, double total)
{
    progress_update(bar, done / 1e9, total / 1e9, "GB");
    return !cli_stop_requested;
}
