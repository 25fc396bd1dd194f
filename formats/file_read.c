#include "formats/file_read.h"
#include "runtime/fail.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// Mapped files that another program cuts short, or whose disk fails, raise SIGBUS when they are read. Reading with
// pread instead would need a second copy of every weight; here a handler puts zeros where the file has ended and
// remembers it, so that reading goes on harmlessly, on any thread, and whoever reads asks afterwards (file_check).
enum { GUARDS = 256 };

// Written under `lock`, `size` last; the handler reads without it.
typedef struct guarded {
    _Atomic uintptr_t start;
    _Atomic size_t size; // 0: free
    atomic_bool hit;
} guarded;

static guarded guards[GUARDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t page_size;
static struct sigaction before;

// Puts zeros from the missing page to the end of the mapping: the rest of the file is of no use either.
static bool fill_with_zeros(guarded *g, uintptr_t at)
{
    uintptr_t page = at & ~(page_size - 1), end = atomic_load(&g->start) + atomic_load(&g->size);
    void *zeros = mmap((void *)page, end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (zeros == MAP_FAILED) return false;
    atomic_store(&g->hit, true);
    return true;
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    (void)number, (void)context;
    int saved = errno;
    uintptr_t at = (uintptr_t)info->si_addr;
    for (int i = 0; i < GUARDS; i++) {
        guarded *g = &guards[i];
        if (at - atomic_load(&g->start) >= atomic_load(&g->size)) continue;
        if (!fill_with_zeros(g, at)) break;
        errno = saved;
        return;
    }
    sigaction(SIGBUS, &before, NULL); // not ours: tried again, the instruction goes to the handler from before
    errno = saved;
}

static void install(void)
{
    if (page_size) return;
    page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before);
}

// Guards a mapping until guard_end; the handler is installed with the first one. Returns -1 if too many are guarded at
// once: then reading past the end kills the program, as it does without a guard.
static int guard_begin(const void *data, size_t size)
{
    int found = -1;
    pthread_mutex_lock(&lock);
    install();
    for (int i = 0; i < GUARDS && found < 0; i++)
        if (atomic_load(&guards[i].size) == 0) found = i;
    if (found >= 0) {
        atomic_store(&guards[found].hit, false);
        atomic_store(&guards[found].start, (uintptr_t)data);
        atomic_store(&guards[found].size, size);
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void guard_end(int guard)
{
    if (guard < 0) return;
    pthread_mutex_lock(&lock);
    atomic_store(&guards[guard].size, 0);
    pthread_mutex_unlock(&lock);
}

kvb_status file_map(file_view *out, const char *path, kvb_error *err)
{
    *out = (file_view){0};
    // O_NONBLOCK: opening a pipe must not wait for a writer; it means nothing for regular files.
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return kvb_fail(err, KVB_IO, "%s: cannot open: %s", path, strerror(errno));
    struct stat st;
    kvb_status status = KVB_OK;
    if (fstat(fd, &st) != 0) {
        status = kvb_fail(err, KVB_IO, "%s: cannot read its size: %s", path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        status = kvb_fail(err, KVB_ARGUMENT, "%s: is %s, expected a file", path,
                          S_ISDIR(st.st_mode) ? "a folder" : "a device, pipe or socket");
    } else if (st.st_size == 0) {
        status = kvb_fail(err, KVB_FORMAT, "%s: the file is empty", path);
    } else {
        void *data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED)
            status =
                kvb_fail(err, KVB_IO, "%s: cannot map %lld bytes: %s", path, (long long)st.st_size, strerror(errno));
        else *out = (file_view){data, (size_t)st.st_size, fd, guard_begin(data, (size_t)st.st_size), st.st_mtim};
    }
    if (!out->data) (void)close(fd); // only read
    return status;
}

kvb_status file_check(const file_view *view, const char *path, kvb_error *err)
{
    struct stat st;
    if (!view->data) return KVB_OK;
    if (fstat(view->fd, &st) != 0) return kvb_fail(err, KVB_IO, "%s: cannot read its size: %s", path, strerror(errno));
    if ((uint64_t)st.st_size != view->size)
        return kvb_fail(err, KVB_IO, "%s: had %zu bytes when it was opened and has %lld now: another program writes it",
                        path, view->size, (long long)st.st_size);
    if (view->guard >= 0 && atomic_load(&guards[view->guard].hit))
        return kvb_fail(err, KVB_IO, "%s: a part of it could not be read; is the disk in order?", path);
    if (st.st_mtim.tv_sec != view->changed.tv_sec || st.st_mtim.tv_nsec != view->changed.tv_nsec)
        return kvb_fail(err, KVB_IO, "%s: was changed by another program while it was read", path);
    return KVB_OK;
}

void file_forget(const file_view *view)
{
    if (view->data)
        madvise((void *)(uintptr_t)view->data, view->size, MADV_DONTNEED); // only a hint: errors change nothing
}

void file_unmap(file_view *view)
{
    if (view->data) {
        guard_end(view->guard);
        munmap((void *)(uintptr_t)view->data, view->size); // munmap takes no const; nothing is written
        (void)close(view->fd);                             // only read
    }
    *view = (file_view){0};
}
