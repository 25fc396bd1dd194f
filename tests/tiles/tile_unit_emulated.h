// The tile unit's instructions in C, by Intel's manual (LDTILECFG, TILELOADD, TDPBF16PS and so on): part of
// profiler/backend/tile_unit.h in tests. What the unit refuses ends the program: a register that is not configured,
// shapes that do not fit. Rows beyond those configured hold zeros after a load, and are not stored.
#pragma once
#include <dnnl.h>
#include <immintrin.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define TILE_UNIT __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

enum { EMULATED_REGISTERS = 8, EMULATED_ROWS = 16, EMULATED_BYTES = 64 };

static _Thread_local struct {
    bool configured;
    tile_setting setting;
    unsigned char data[EMULATED_REGISTERS][EMULATED_ROWS][EMULATED_BYTES];
} tile_registers;

static inline void tile_expect(bool good, const char *what)
{
    if (good) return;
    fprintf(stderr, "emulated tile unit: %s\n", what);
    abort();
}

// What comes before and behind the unit is the processor's own, as far as oneDNN may use it.
static inline int tile_unit_found(void)
{
    return (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_bf16) == dnnl_cpu_isa_avx512_core_bf16;
}

static inline void tile_configure(const tile_setting *s)
{
    tile_expect(s->palette == 1 && s->start_row == 0, "another palette than 1");
    for (int i = 0; i < EMULATED_REGISTERS; i++)
        tile_expect(s->rows[i] >= 1 && s->rows[i] <= EMULATED_ROWS && s->bytes[i] >= 4 && s->bytes[i] <= EMULATED_BYTES,
                    "rows or bytes of a register");
    tile_registers.setting = *s;
    tile_registers.configured = true;
    memset(tile_registers.data, 0, sizeof tile_registers.data);
}

static inline void tile_release(void)
{
    tile_registers.configured = false;
}

static inline void tile_zero(int tile)
{
    tile_expect(tile_registers.configured, "used before it is configured");
    memset(tile_registers.data[tile], 0, sizeof tile_registers.data[tile]);
}

static inline void tile_load(int tile, const void *from, size_t step)
{
    const tile_setting *s = &tile_registers.setting;
    tile_zero(tile);
    for (int r = 0; r < s->rows[tile]; r++)
        memcpy(tile_registers.data[tile][r], (const char *)from + (size_t)r * step, s->bytes[tile]);
}

static inline void tile_store(int tile, void *to, size_t step)
{
    const tile_setting *s = &tile_registers.setting;
    tile_expect(tile_registers.configured, "used before it is configured");
    for (int r = 0; r < s->rows[tile]; r++)
        memcpy((char *)to + (size_t)r * step, tile_registers.data[tile][r], s->bytes[tile]);
}

// Products take nearly all of the emulation's time, and touch nothing but registers, whose shapes are checked: fast,
// and without sanitisers, in every build.
#if defined(__GNUC__) && !defined(__clang__)
#define TILE_SUMS __attribute__((no_sanitize("address,undefined"), optimize("O3")))
#else
#define TILE_SUMS
#endif

// The float32 with these bits in its upper half; the unit takes subnormals for zero.
TILE_SUMS static inline float tile_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    if (!(bits & 0x7f80)) wide &= 0x80000000u;
    memcpy(&x, &wide, sizeof x);
    return x;
}

// c[m][n] += sum over k of a[m][2k] b[k][2n] + sum over k of a[m][2k+1] b[k][2n+1], each sum in order, from zero; the
// product of two bfloat16 is exact. Loops run over all sixteen columns, so that the compiler makes vectors of them.
TILE_UNIT TILE_SUMS static inline void tile_multiply(int c, int a, int b)
{
    const tile_setting *s = &tile_registers.setting;
    float even_right[EMULATED_ROWS][16], odd_right[EMULATED_ROWS][16];
    tile_expect(tile_registers.configured, "used before it is configured");
    tile_expect(s->rows[c] == s->rows[a] && s->bytes[c] == s->bytes[b] && s->rows[b] * 4 == s->bytes[a],
                "shapes of a product's registers");
    for (int k = 0; k < s->rows[b]; k++) {
        uint16_t right[32];
        memcpy(right, tile_registers.data[b][k], sizeof right);
        for (int n = 0; n < 16; n++) {
            even_right[k][n] = tile_bf16(right[2 * n]);
            odd_right[k][n] = tile_bf16(right[2 * n + 1]);
        }
    }
    for (int m = 0; m < s->rows[a]; m++) {
        float sums[16], even[16] = {0}, odd[16] = {0};
        uint16_t left[32];
        memcpy(left, tile_registers.data[a][m], sizeof left);
        for (int k = 0; k < s->rows[b]; k++) {
            float first = tile_bf16(left[2 * k]), second = tile_bf16(left[2 * k + 1]);
            for (int n = 0; n < 16; n++) {
                even[n] += first * even_right[k][n];
                odd[n] += second * odd_right[k][n];
            }
        }
        memcpy(sums, tile_registers.data[c][m], sizeof sums);
        for (int n = 0; n < s->bytes[b] / 4; n++) sums[n] += even[n] + odd[n];
        memcpy(tile_registers.data[c][m], sums, sizeof sums);
    }
}
