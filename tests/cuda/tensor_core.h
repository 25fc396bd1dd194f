// The emulated device's tensor cores, by the definitions of the PTX manual (mma.m16n8k16, ldmatrix, cp.async): what
// profiler/backend/backend_cuda_mma.cuh has as instructions for the real one. Part of tests/cuda/cuda_runtime.h.
#pragma once

static std::vector<uint4>
    emulator_shared; // of the block that runs: as large as the launch said, so that AddressSanitizer sees the end
#define DYNAMIC_SHARED(type, name) type *name = (type *)(void *)emulator_shared.data()

static inline uint32_t pack_bf16(float low, float high)
{
    uint32_t halves[2];
    const float both[2] = {low, high};
    for (int i = 0; i < 2; i++) {
        uint32_t bits;
        memcpy(&bits, &both[i], sizeof bits);
        bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        halves[i] = is_nan ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    }
    return halves[0] | halves[1] << 16;
}

static inline float bf16_half(uint32_t both, unsigned which)
{
    uint32_t bits = which ? both & 0xffff0000u : both << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void mma_bf16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    struct operands {
        uint32_t a[4], b[2];
    } mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    unsigned turn = warp_give(mine), lane = emulator.current % EMULATED_WARP;
    // Its elements are (lane / 4 + 8 [i / 2], lane % 4 * 2 + i % 2), i = 0 .. 3: of a and b it needs what four lanes
    // have of one row modulo 8, and of each of two columns.
    operands left[4], right[2][4];
    for (unsigned j = 0; j < 4; j++) {
        left[j] = given_by<operands>(lane / 4 * 4 + j, turn);
        for (unsigned i = 0; i < 2; i++) right[i][j] = given_by<operands>((lane % 4 * 2 + i) * 4 + j, turn);
    }
    for (unsigned i = 0; i < 4; i++)
        for (unsigned k = 0; k < 16; k++) { // a (row, k): register row / 8 + k / 8 * 2 of lane row % 8 * 4 + k % 8 / 2
            uint32_t a_half = left[k % 8 / 2].a[i / 2 + k / 8 * 2], b_half = right[i % 2][k % 8 / 2].b[k / 8];
            c[i] += bf16_half(a_half, k % 2) * bf16_half(b_half, k % 2);
        }
}

// The pointers that the lanes name, and of their lines the values that this one gets.
static void load_blocks_either(uint32_t r[4], const void *line, bool turned)
{
    if ((uintptr_t)line % 16) emulator_stop("ldmatrix of an address that is not a multiple of 16");
    unsigned turn = warp_give(line), lane = emulator.current % EMULATED_WARP;
    for (unsigned block = 0; block < 4; block++) {
        uint16_t two[2];
        for (unsigned i = 0; i < 2; i++) {
            unsigned row = turned ? lane % 4 * 2 + i : lane / 4, column = turned ? lane / 4 : lane % 4 * 2 + i;
            two[i] = ((const uint16_t *)given_by<const void *>(8 * block + row, turn))[column];
        }
        r[block] = two[0] | (uint32_t)two[1] << 16;
    }
}

static inline void load_blocks(uint32_t r[4], const void *line)
{
    load_blocks_either(r, line, false);
}

static inline void load_blocks_turned(uint32_t r[4], const void *line)
{
    load_blocks_either(r, line, true);
}

// With threads in shuffled order a copy is done when somebody waits for it, else at once: both may happen.
static void copy_async(void *to, const void *from, bool there)
{
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16) emulator_stop("cp.async of addresses that are not multiples of 16");
    auto copy = [=] {
        if (there) memcpy(to, from, 16);
        else memset(to, 0, 16);
    };
    if (emulator.how != THREADS_SHUFFLED) copy();
    else emulator.fibers[emulator.current].copies.back().push_back(copy);
}

static inline void copy_commit(void)
{
    emulator.fibers[emulator.current].copies.push_back({});
}

template <int N> static void copy_wait_but(void)
{
    auto &copies = emulator.fibers[emulator.current].copies;
    while (copies.size() > N + 1) {
        for (auto &copy : copies.front()) copy();
        copies.erase(copies.begin());
    }
}
