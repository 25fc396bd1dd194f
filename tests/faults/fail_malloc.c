// For LD_PRELOAD: makes one call of malloc and its like return NULL, as if memory had run out for a moment.
//   FAIL_MALLOC_AT=N      the N-th call, counted from 1
//   FAIL_MALLOC_COUNT=F   at the end, the number of calls is written to file F
//   FAIL_MALLOC_STACKS=F  for every call, a line in file F: a hash of its call stack
//   FAIL_MALLOC_IN=A,B    counts only calls from objects with one of these words in their file name; "program" is the
//                         program itself. Default: program,libcjson,libkvbudget. Other libraries may abort by
//                         themselves if memory is short, which says nothing about the program.
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <link.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

enum { RANGES = 64 };
static struct {
    uintptr_t begin, end;
} ranges[RANGES];
static int n_ranges;
static long fails_at = -1;
static atomic_long calls;
static atomic_bool ready; // main has begun
static FILE *stacks;      // the file that FAIL_MALLOC_STACKS names
static _Thread_local bool noting;

// Returns whether `name` contains one of `words`, which are separated by commas.
static bool is_wanted(const char *words, const char *name)
{
    char word[64];
    for (const char *at = words; *at;) {
        size_t n = strcspn(at, ",");
        snprintf(word, sizeof word, "%.*s", (int)n, at);
        if (n && strstr(name, word)) return true;
        at += n + (at[n] == ',');
    }
    return false;
}

static int add_object(struct dl_phdr_info *info, size_t size, void *words)
{
    (void)size;
    const char *slash = strrchr(info->dlpi_name, '/'), *name = slash ? slash + 1 : info->dlpi_name;
    if (!is_wanted(words, *name ? name : "program")) return 0;
    for (int i = 0; i < info->dlpi_phnum && n_ranges < RANGES; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type != PT_LOAD || !(p->p_flags & PF_X)) continue;
        ranges[n_ranges].begin = info->dlpi_addr + p->p_vaddr;
        ranges[n_ranges++].end = info->dlpi_addr + p->p_vaddr + p->p_memsz;
    }
    return 0;
}

static __attribute__((constructor)) void begin(void)
{
    const char *at = getenv("FAIL_MALLOC_AT"), *words = getenv("FAIL_MALLOC_IN"), *ways = getenv("FAIL_MALLOC_STACKS");
    char copy[256];
    snprintf(copy, sizeof copy, "%s", words ? words : "program,libcjson,libkvbudget");
    fails_at = at ? atol(at) : -1;
    dl_iterate_phdr(add_object, copy);
    stacks = ways ? fopen(ways, "w") : NULL;
}

// Counting begins with main: constructors, for instance those of a CUDA runtime in the program, are not its own code.
static int (*real_main)(int, char **, char **);

static int counted_main(int argc, char **argv, char **environment)
{
    atomic_store(&ready, true);
    return real_main(argc, argv, environment);
}

int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void *stack_end);
int __libc_start_main(int (*main)(int, char **, char **), int argc, char **argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void *stack_end)
{
    int (*start)(int (*)(int, char **, char **), int, char **, void (*)(void), void (*)(void), void (*)(void), void *);
    *(void **)&start = dlsym(RTLD_NEXT, "__libc_start_main");
    real_main = main;
    return start(counted_main, argc, argv, init, fini, rtld_fini, stack_end);
}

static __attribute__((destructor)) void end(void)
{
    const char *path = getenv("FAIL_MALLOC_COUNT");
    if (stacks) fclose(stacks);
    FILE *f = path ? fopen(path, "w") : NULL;
    if (!f) return;
    fprintf(f, "%ld\n", atomic_load(&calls));
    fclose(f);
}

// Writes a hash of the call's return addresses. Recursion to another depth gives another hash.
static void note_stack(void)
{
    void *at[24];
    uint64_t hash = 14695981039346656037u; // FNV-1a
    noting = true;                         // backtrace() and the stream allocate too
    int n = backtrace(at, 24);
    for (int i = 2; i < n; i++) hash = (hash ^ (uintptr_t)at[i]) * 1099511628211u;
    fprintf(stacks, "%016llx\n", (unsigned long long)hash);
    noting = false;
}

static bool fails(const void *caller)
{
    if (!atomic_load_explicit(&ready, memory_order_relaxed)) return false;
    for (int i = 0; i < n_ranges; i++) {
        if ((uintptr_t)caller < ranges[i].begin || (uintptr_t)caller >= ranges[i].end) continue;
        if (noting) return false;
        if (stacks) note_stack();
        if (atomic_fetch_add(&calls, 1) + 1 != fails_at) return false;
        errno = ENOMEM;
        return true;
    }
    return false;
}

#define FAILS fails(__builtin_return_address(0))

void *malloc(size_t size)
{
    return FAILS ? NULL : __libc_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    return FAILS ? NULL : __libc_calloc(n, size);
}

void *realloc(void *old, size_t size)
{
    return FAILS ? NULL : __libc_realloc(old, size);
}

void *reallocarray(void *old, size_t n, size_t size)
{
    size_t bytes;
    if (FAILS || __builtin_mul_overflow(n, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    return __libc_realloc(old, bytes);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    return FAILS ? NULL : __libc_memalign(alignment, size);
}

int posix_memalign(void **out, size_t alignment, size_t size)
{
    void *p = FAILS ? NULL : __libc_memalign(alignment, size);
    if (!p) return ENOMEM;
    *out = p;
    return 0;
}

// Allocations that libc makes for its caller count as the caller's. Only functions that the program uses are here.
char *strdup(const char *text)
{
    size_t size = strlen(text) + 1;
    char *copy = FAILS ? NULL : __libc_malloc(size);
    return copy ? memcpy(copy, text, size) : NULL;
}

char *strndup(const char *text, size_t most)
{
    size_t size = strnlen(text, most);
    char *copy = FAILS ? NULL : __libc_malloc(size + 1);
    if (!copy) return NULL;
    copy[size] = '\0';
    return memcpy(copy, text, size);
}

int vasprintf(char **out, const char *format, va_list args)
{
    static int (*real)(char **, const char *, va_list);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "vasprintf");
    if (!FAILS) return real(out, format, args);
    *out = NULL;
    return -1;
}

int asprintf(char **out, const char *format, ...)
{
    static int (*real)(char **, const char *, va_list);
    va_list args;
    int n = -1;
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "vasprintf");
    *out = NULL;
    if (FAILS) return n;
    va_start(args, format);
    n = real(out, format, args);
    va_end(args);
    return n;
}

#define STREAM(name, parameters, ...)                         \
    FILE *name parameters                                     \
    {                                                         \
        static FILE *(*real)parameters;                       \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name); \
        return FAILS ? NULL : real(__VA_ARGS__);              \
    }
STREAM(open_memstream, (char **text, size_t *size), text, size)
STREAM(fopen, (const char *path, const char *mode), path, mode)
STREAM(fdopen, (int fd, const char *mode), fd, mode)
STREAM(fopencookie, (void *cookie, const char *mode, cookie_io_functions_t functions), cookie, mode, functions)
