// The emulated device's threads: those of a block are fibers that stop at barriers and shuffles; blocks run one after
// the other. Part of tests/cuda/cuda_runtime.h.
#pragma once

// Each fiber has its own stack. Switching takes a few instructions here; the C library's swapcontext calls the kernel
// each time, and there are millions of switches.
#if defined(__x86_64__)
struct fiber_context {
    void *stack_pointer;
};
extern "C" void emulator_switch(void **from, void *to);
asm(".text\n"
    ".type emulator_switch, @function\n"
    "emulator_switch:\n" // pushes the callee-saved registers on the old stack, then pops those of the new one
    "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
    "    ret\n"
    ".size emulator_switch, .-emulator_switch\n");

static void context_make(fiber_context *c, char *stack, size_t size, void (*entry)(void))
{
    // As if `entry` had been called: its return address (never used) where the ABI wants the stack misaligned by 8,
    // below it the six registers.
    void **top = (void **)(((uintptr_t)stack + size) / 16 * 16) - 1;
    *top = NULL;
    *--top = (void *)entry;
    for (int i = 0; i < 6; i++) *--top = NULL;
    c->stack_pointer = top;
}

static void context_switch(fiber_context *from, fiber_context *to)
{
    emulator_switch(&from->stack_pointer, to->stack_pointer);
}
#else
#include <ucontext.h>
typedef ucontext_t fiber_context;

static void context_make(fiber_context *c, char *stack, size_t size, void (*entry)(void))
{
    getcontext(c);
    c->uc_stack.ss_sp = stack;
    c->uc_stack.ss_size = size;
    c->uc_link = NULL;
    makecontext(c, entry, 0);
}

static void context_switch(fiber_context *from, fiber_context *to)
{
    swapcontext(from, to);
}
#endif

enum fiber_state { FIBER_READY, FIBER_AT_BARRIER, FIBER_AT_SHUFFLE, FIBER_DONE };
struct emulated_fiber {
    fiber_context context;
    dim3 index;
    fiber_state state;
    unsigned shuffles;
    uint64_t given[2]; // values for shuffles, used alternately
    std::vector<char> stack;
};

static struct {
    std::vector<emulated_fiber> fibers;
    std::vector<unsigned> order;
    unsigned n_threads, current;
    fiber_context scheduler;
    std::function<void()> kernel;
    dim3 block, grid, block_size;
    emulator_order how;
    uint64_t random;
} emulator = {{}, {}, 0, 0, {}, nullptr, {}, {}, {}, THREADS_ASCEND, 20261121};

#define threadIdx (emulator.fibers[emulator.current].index)
#define blockIdx (emulator.block)
#define gridDim (emulator.grid)
#define blockDim (emulator.block_size)

[[noreturn]] static void emulator_stop(const char *why)
{
    fprintf(stderr, "CUDA emulator: %s (block %u %u %u)\n", why, blockIdx.x, blockIdx.y, blockIdx.z);
    abort();
}

static void fiber_wait(fiber_state state)
{
    emulated_fiber *f = &emulator.fibers[emulator.current];
    f->state = state;
    context_switch(&f->context, &emulator.scheduler);
}

static void fiber_main(void)
{
    emulator.kernel();
    fiber_wait(FIBER_DONE); // never returns
}

static inline void __syncthreads(void)
{
    fiber_wait(FIBER_AT_BARRIER);
}

static inline void __syncwarp(void)
{
    fiber_wait(FIBER_AT_SHUFFLE);
}

// All threads of a warp publish a value for each other. Returns the turn, for given_by.
template <typename T> static unsigned warp_give(const T &value)
{
    emulated_fiber *f = &emulator.fibers[emulator.current];
    static_assert(sizeof(T) <= sizeof f->given[0], "as large as a place");
    unsigned turn = f->shuffles++ % 2;
    memcpy(&f->given[turn], &value, sizeof value);
    fiber_wait(FIBER_AT_SHUFFLE);
    return turn;
}

// Returns the value that thread `lane` of the same warp published.
template <typename T> static T given_by(unsigned lane, unsigned turn)
{
    T value;
    memcpy(&value, &emulator.fibers[emulator.current / EMULATED_WARP * EMULATED_WARP + lane].given[turn], sizeof value);
    return value;
}

template <typename T> static T __shfl_xor_sync(unsigned, T value, int step)
{
    unsigned turn = warp_give(value);
    return given_by<T>(emulator.current % EMULATED_WARP ^ (unsigned)step, turn);
}

static inline int atomicMax(int *to, int value)
{
    int before = *to;
    if (value > before) *to = value;
    return before;
}

static inline int __float_as_int(float x)
{
    int bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static unsigned count_fibers(unsigned first, unsigned n, fiber_state state)
{
    unsigned count = 0;
    for (unsigned i = first; i < first + n; i++) count += emulator.fibers[i].state == state;
    return count;
}

// Lets n fibers from `first` on run again if all of them are in state `from`: a warp at a shuffle, or the block at a
// barrier. Returns false if nothing changed.
static bool release(unsigned first, unsigned n, fiber_state from)
{
    if (count_fibers(first, n, from) < n) return false;
    for (unsigned i = first; i < first + n; i++) emulator.fibers[i].state = FIBER_READY;
    return true;
}

static bool release_waiting(void)
{
    unsigned n = emulator.n_threads, at_barrier = count_fibers(0, n, FIBER_AT_BARRIER);
    if (at_barrier && at_barrier < n && at_barrier + count_fibers(0, n, FIBER_DONE) == n)
        emulator_stop("a barrier that some threads do not reach");
    bool released = release(0, n, FIBER_AT_BARRIER);
    for (unsigned first = 0; first < n; first += EMULATED_WARP)
        released |= release(first, std::min(n - first, EMULATED_WARP), FIBER_AT_SHUFFLE);
    return released;
}

static void order_threads(void)
{
    unsigned n = emulator.n_threads;
    emulator.order.resize(n);
    for (unsigned i = 0; i < n; i++) emulator.order[i] = emulator.how == THREADS_DESCEND ? n - 1 - i : i;
    for (unsigned i = n - 1; emulator.how == THREADS_SHUFFLED && i > 0; i--) {
        emulator.random = emulator.random * 6364136223846793005u + 1442695040888963407u;
        std::swap(emulator.order[i], emulator.order[(emulator.random >> 33) % (i + 1)]);
    }
}

static void run_thread(unsigned i)
{
    if (emulator.fibers[i].state != FIBER_READY) return;
    emulator.current = i;
    context_switch(&emulator.scheduler, &emulator.fibers[i].context);
}

static void run_block(void)
{
    for (unsigned i = 0; i < emulator.n_threads; i++) {
        emulated_fiber *f = &emulator.fibers[i];
        f->index = dim3(i, 0, 0);
        f->state = FIBER_READY;
        context_make(&f->context, f->stack.data(), f->stack.size(), fiber_main);
    }
    for (;;) {
        order_threads();
        for (unsigned i : emulator.order) {
            run_thread(i);
            // In ascending order warps advance side by side; otherwise one runs as far ahead as it can.
            unsigned first = i / EMULATED_WARP * EMULATED_WARP,
                     warp = std::min(emulator.n_threads - first, EMULATED_WARP);
            while (emulator.how != THREADS_ASCEND && release(first, warp, FIBER_AT_SHUFFLE))
                for (unsigned t = first; t < first + warp; t++) run_thread(t);
        }
        if (release_waiting()) continue;
        for (unsigned i = 0; i < emulator.n_threads; i++)
            if (emulator.fibers[i].state != FIBER_DONE) emulator_stop("threads wait for each other for ever");
        return;
    }
}

static void run_kernel(dim3 blocks, dim3 threads, const std::function<void()> &kernel)
{
    emulator.n_threads = threads.x;
    emulator.kernel = kernel;
    emulator.grid = blocks;
    emulator.block_size = threads;
    if (emulator.fibers.size() < threads.x) emulator.fibers.resize(threads.x);
    for (emulated_fiber &f : emulator.fibers) f.stack.resize(128 * 1024);
    for (emulator.block.z = 0; emulator.block.z < blocks.z; emulator.block.z++)
        for (emulator.block.y = 0; emulator.block.y < blocks.y; emulator.block.y++)
            for (emulator.block.x = 0; emulator.block.x < blocks.x; emulator.block.x++) run_block();
}
