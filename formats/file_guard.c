#include "formats/file_guard.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

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

// Zeros from the page that is missing to the end of the mapping: the rest of the file is of no use either.
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
    sigaction(SIGBUS, &before, NULL); // not ours: what was there before gets it, when the instruction is tried again
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

int file_guard_begin(const void *data, size_t size)
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

bool file_guard_hit(int guard)
{
    return guard >= 0 && atomic_load(&guards[guard].hit);
}

void file_guard_end(int guard)
{
    if (guard < 0) return;
    pthread_mutex_lock(&lock);
    atomic_store(&guards[guard].size, 0);
    pthread_mutex_unlock(&lock);
}
