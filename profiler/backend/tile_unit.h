// The instructions of the tile unit (AMX) that packed_tiles.c needs: the processor's, or, with -DEMULATED_TILES, the
// functions of tests/tiles/tile_unit_emulated.h that do the same in C, so that any machine with AVX-512 and bfloat16
// can judge what is built on them.
#pragma once
#include <stdint.h>

typedef struct tile_setting { // what the processor reads: palette 1, rows and bytes per row of each register
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_setting;

#ifdef EMULATED_TILES
#include "tile_unit_emulated.h" // tests/tiles
#else
#include <dnnl.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TILE_UNIT __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16")))
#define tile_load(tile, from, step) _tile_loadd(tile, from, step)
#define tile_store(tile, to, step) _tile_stored(tile, to, step)
#define tile_zero(tile) _tile_zero(tile)
#define tile_multiply(c, a, b) _tile_dpbf16ps(c, a, b) // c += a b
#define tile_release() _tile_release()

TILE_UNIT static inline void tile_configure(const tile_setting *setting)
{
    __asm__ volatile("" : : "m"(*setting) : "memory"); // GCC's intrinsic says that it reads 8 of the 64 bytes
    _tile_loadconfig(setting);
}

// Whether the processor has such a unit, and the system and oneDNN (DNNL_MAX_CPU_ISA) allow its use.
static inline int tile_unit_found(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 }; // of Linux: asm/prctl.h
    return (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_amx) == dnnl_cpu_isa_avx512_core_amx &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif
