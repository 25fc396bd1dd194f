#include "tools/terminal.h"
#include "formats/atomic_file.h"
#include "formats/file_io.h"
#include "runtime/text.h"
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

enum { SEQUENCE_MAX = 4, SHOWN_MAX = 8, ROOM = 1 << 13 }; // bytes: of a UTF-8 character; as it is shown; of a write

typedef struct guarded {
    FILE *stream;
    int file, why;            // errno of the first write that failed
    bool own;                 // terminal_sequence() is writing: do not filter
    char begun[SEQUENCE_MAX]; // the beginning of a character that the next bytes may complete
    size_t n_begun;
} guarded;

static guarded guards[] = {{.file = STDOUT_FILENO}, {.file = STDERR_FILENO}};
static bool pipes_end_the_program; // SIGPIPE is ignored only so that temporary files can be removed first

static bool write_out(guarded *g, const char *data, size_t size)
{
    if (file_write_all(g->file, data, size)) return true;
    int why = errno;
    if (!g->why) g->why = why;
    if (why == EPIPE && pipes_end_the_program) {
        atomic_files_remove();
        signal(SIGPIPE, SIG_DFL);
        raise(SIGPIPE);
    }
    errno = why;
    return false;
}

static uint32_t code_point(const char *at, size_t size)
{
    const unsigned char *s = (const unsigned char *)at;
    if (size == 1) return s[0];
    uint32_t c = s[0] & (0xff >> (size + 1));
    for (size_t i = 1; i < size; i++) c = c << 6 | (s[i] & 0x3f);
    return c;
}

// Returns `size` if the bytes are the beginning of a character and too few to complete it, else 0.
static size_t unfinished(const char *text, size_t size)
{
    unsigned char lead = (unsigned char)*text;
    size_t wanted = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc2 ? 2 : 1;
    if (size >= wanted || lead >= 0xf5) return 0;
    for (size_t i = 1; i < size; i++)
        if (((unsigned char)text[i] & 0xc0) != 0x80) return 0;
    return size;
}

// Writes the text, filtered. `whole`: nothing follows that could complete its last character.
static bool write_shown(guarded *g, const char *text, size_t size, bool whole)
{
    char out[ROOM];
    size_t n = 0, length;
    for (; size > 0; text += length, size -= length) {
        if (n + SHOWN_MAX > sizeof out) {
            if (!write_out(g, out, n)) return false;
            n = 0;
        }
        length = kvb_utf8_size(text, size);
        if (length == 0 && !whole && unfinished(text, size)) {
            memcpy(g->begun, text, size);
            g->n_begun = size;
            break;
        }
        uint32_t c = length ? code_point(text, length) : 0;
        if (length == 0) n += (size_t)snprintf(out + n, SHOWN_MAX, "\\x%02x", (unsigned char)*text), length = 1;
        else if (!kvb_is_shown(text, length) && c != '\n' && c != '\t')
            n += (size_t)snprintf(out + n, SHOWN_MAX, "\\u%04x", (unsigned)c);
        else memcpy(out + n, text, length), n += length;
    }
    return n == 0 || write_out(g, out, n);
}

static bool write_begun(guarded *g)
{
    size_t n = g->n_begun;
    g->n_begun = 0;
    return n == 0 || write_shown(g, g->begun, n, true);
}

static ssize_t guard_write(void *cookie, const char *data, size_t size)
{
    guarded *g = cookie;
    if (g->own) return write_begun(g) && write_out(g, data, size) ? (ssize_t)size : 0;
    // A character that was begun is completed byte by byte; the rest is then written at once.
    size_t taken = 0;
    while (g->n_begun > 0 && taken < size) {
        char whole[SEQUENCE_MAX];
        size_t n = g->n_begun;
        memcpy(whole, g->begun, n);
        whole[n++] = data[taken];
        if (!kvb_utf8_size(whole, n) && !unfinished(whole, n)) {
            if (!write_begun(g)) return 0; // it was none, and this byte begins another one
            break;
        }
        taken++;
        g->n_begun = 0;
        if (!write_shown(g, whole, n, false)) return 0;
    }
    return write_shown(g, data + taken, size - taken, false) ? (ssize_t)size : 0;
}

static int guard_close(void *cookie)
{
    return write_begun(cookie) ? 0 : -1;
}

static guarded *guard_of(FILE *stream)
{
    for (size_t i = 0; i < sizeof guards / sizeof *guards; i++)
        if (guards[i].stream == stream) return &guards[i];
    return NULL;
}

void terminal_guard_streams(void)
{
    struct sigaction before;
    FILE **streams[] = {&stdout, &stderr};
    for (size_t i = 0; i < sizeof guards / sizeof *guards; i++) {
        FILE *stream =
            fopencookie(&guards[i], "w", (cookie_io_functions_t){.write = guard_write, .close = guard_close});
        if (!stream) continue; // if there is no memory, the plain stream stays
        // Lines of both streams stay whole and in order in `2>&1 | tee`.
        setvbuf(stream, NULL, _IOLBF, i == 0 ? 1 << 16 : 1 << 12);
        guards[i].stream = *streams[i] = stream;
    }
    if (sigaction(SIGPIPE, NULL, &before) == 0 && before.sa_handler == SIG_DFL) {
        signal(SIGPIPE, SIG_IGN);
        pipes_end_the_program = true;
    }
}

void terminal_sequence(FILE *out, const char *format, ...)
{
    guarded *g = guard_of(out);
    if (g) fflush(out);
    if (g) g->own = true;
    va_list args;
    va_start(args, format);
    vfprintf(out, format, args);
    va_end(args);
    if (g) fflush(out);
    if (g) g->own = false;
}

const char *terminal_output_failure(void)
{
    if (fflush(stdout) != 0 && !guards[0].why) guards[0].why = errno;
    return guards[0].why || ferror(stdout) ? strerror(guards[0].why ? guards[0].why : EIO) : NULL;
}
