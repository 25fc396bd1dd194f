// Weight matrices as the CPU backend keeps them for its products (backend_cpu_weights.c).
//
// A matrix is cut into panels of outputs, each packed for itself. What is kept of them depends on the type that the
// file stores and on what was asked for (matrix_hold of backend.h):
//
//     whole    panels as products take them
//     steps    whole numbers of 4 or 8 bits with a step and a base (packed_steps.h), where the tile unit multiplies
//     halves   values that bfloat16 holds, as 16 bits: a panel of float32 is widened when rows meet it; of bf16x3 only
//              the high parts are there, the low ones being zero
//     nothing  a panel is packed from the file, which stays mapped, when rows meet it
//
// Products are the same in all of them, and so are their bits, but for how whole numbers round (HOLD_WIDE of
// backend.h).
#pragma once
#include "profiler/backend/backend_cpu.h"

// One width of panel, and how to multiply with it, into a thread's [rows, PANEL].
typedef struct panel_kind {
    uint32_t width;
    const product *product;
} panel_kind;

typedef struct packed_matrix {
    precision p;
    uint32_t n_panels, width, rows; // outputs of a panel, but perhaps the last; rows of every product
    unsigned bits,
        parts; // of weights kept as whole numbers: theirs, and the parts that products in float32 need of them; else 0
    bool rounds;        // to bfloat16 what the file has in more bits
    bool halves;        // 16 bits are kept of each value
    bool in_place;      // no panels are kept
    bool has_source;    // `source` stays readable as long as the matrix
    size_t panel_bytes; // of a panel as products take it
    size_t kept_bytes;  // of a panel as it is kept; 0 where nothing is
    panel_kind full, last;
    stored_matrix source;
    char *panels; // [n_panels, kept_bytes]
} packed_matrix;

// A panel as products take it: what is kept, or made in the thread's scratch memory, where it stays until the thread
// asks for another. *parts is `parts` of the panel. NULL where the file has a value that is not finite, or oneDNN no
// memory.
const char *packed_panel(const packed_matrix *m, uint32_t panel, scratch *s, unsigned *parts);

// Is a panel made anew for each product, so that as many rows as possible should meet it?
static inline bool packed_is_made(const packed_matrix *m)
{
    return m->in_place || (m->halves && m->p == PRECISION_F32);
}

// Bytes that packed_panel needs of a thread's scratch memory for matrices of up to `in` terms.
size_t packed_made_bytes(precision p, uint32_t in);
