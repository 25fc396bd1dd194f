#include "profiler/backend/backend_cpu_weights.h"
#include "profiler/backend/linalg.h"
#include "profiler/backend/packed_steps.h"
#include "profiler/weights/dequant.h"
#include <stdlib.h>
#include <string.h>

static bool panel_kind_find(panel_kind *kind, const packed_matrix *m, uint32_t width, uint32_t in)
{
    kind->width = width;
    kind->product = product_find(m->p, m->rows, width, in, false);
    return kind->product;
}

// ---- Making a panel ----

// Buffers of a thread that packs.
typedef struct packer {
    float *rows, *temp; // [width, in], packed_temp_floats
    char *wide;         // a panel as products take it, where another form of it is kept
    int8_t *wholes;     // [in]
    float *steps, *bases;
} packer;

enum { N_PACKER_PIECES = 5, LINE = 64 };

// Bytes of a packer's buffers, each on a cache line of its own.
static void list_packer(size_t out[N_PACKER_PIECES], precision p, uint32_t width, uint32_t in)
{
    size_t blocks = in / STEP_TERMS + 1, whole = packed_bytes(p, in, width);
    if (product_takes_any_rows()) { // whole numbers may take more than parts do
        size_t steps = packed_step_bytes(8, in / STEP_TERMS * STEP_TERMS, width);
        whole = steps > whole ? steps : whole;
    }
    const size_t all[N_PACKER_PIECES] = {(size_t)width * in * sizeof(float),
                                         packed_temp_floats(in, width) * sizeof(float), whole, in,
                                         2 * blocks * sizeof(float)};
    for (int i = 0; i < N_PACKER_PIECES; i++) out[i] = (all[i] + LINE - 1) / LINE * LINE;
}

static size_t packer_bytes(precision p, uint32_t width, uint32_t in)
{
    size_t pieces[N_PACKER_PIECES], all = 0;
    list_packer(pieces, p, width, in);
    for (int i = 0; i < N_PACKER_PIECES; i++) all += pieces[i];
    return all;
}

// `memory` is on a cache line.
static packer packer_at(char *memory, precision p, uint32_t width, uint32_t in)
{
    size_t pieces[N_PACKER_PIECES];
    packer k;
    list_packer(pieces, p, width, in);
    k.rows = (float *)(void *)memory;
    k.temp = (float *)(void *)(memory += pieces[0]);
    k.wide = memory += pieces[1];
    k.wholes = (int8_t *)(memory += pieces[2]);
    k.steps = (float *)(void *)(memory + pieces[3]);
    k.bases = k.steps + in / STEP_TERMS + 1;
    return k;
}

size_t packed_made_bytes(precision p, uint32_t in)
{
    return in ? packer_bytes(p, product_takes_any_rows() ? TILE_PANEL : PANEL, in) : 0;
}

SIMD_CLONES static void narrow(uint16_t *to, const float *from, size_t n)
{
    const uint32_t *bits = (const uint32_t *)(const void *)from;
#pragma omp simd
    for (size_t i = 0; i < n; i++) to[i] = (uint16_t)(bits[i] >> 16);
}

SIMD_CLONES static void widen(float *to, const uint16_t *from, size_t n)
{
    uint32_t *bits = (uint32_t *)(void *)to;
#pragma omp simd
    for (size_t i = 0; i < n; i++) bits[i] = (uint32_t)from[i] << 16;
}

static bool pack_steps(const packed_matrix *m, char *panel, const stored_matrix *w, uint32_t first, uint32_t n,
                       packer *k, bool *two_parts)
{
    bool finite = true;
    for (uint32_t i = 0; i < n; i++) {
        finite &= stored_steps(w, first + i, k->wholes, k->steps, k->bases);
        *two_parts = *two_parts && m->p == PRECISION_F32 && steps_fit_two_parts(k->wholes, k->steps, k->bases, w->in);
        steps_pack(m->bits, panel, i, w->in, k->wholes, k->steps, k->bases);
    }
    return finite;
}

// Panel `i` of w as products take it.
static bool make_panel(const packed_matrix *m, char *panel, const stored_matrix *w, uint32_t i, packer *k,
                       bool *two_parts)
{
    uint32_t first = i * m->width, n = w->out - first < m->width ? w->out - first : m->width;
    if (m->bits) return pack_steps(m, panel, w, first, n, k, two_parts);
    bool ok = stored_rows(w, first, n, k->rows);
    if (m->rounds) stored_round(k->rows, (size_t)n * w->in);
    return ok && packed_store(m->p, panel, k->rows, w->in, true, w->in, n, k->temp);
}

const char *packed_panel(const packed_matrix *m, uint32_t panel, scratch *s, unsigned *parts)
{
    const char *kept = m->panels ? m->panels + panel * m->kept_bytes : NULL;
    *parts = m->parts;
    if (kept && !packed_is_made(m)) return kept;
    packer k = packer_at(s->made, m->p, m->width, m->source.in);
    if (kept) {
        widen((float *)(void *)k.wide, (const uint16_t *)(const void *)kept, m->kept_bytes / sizeof(uint16_t));
        return k.wide;
    }
    bool two_parts = true;
    if (!make_panel(m, k.wide, &m->source, panel, &k, &two_parts)) return NULL;
    if (m->bits) *parts = two_parts ? 2 : 3;
    return k.wide;
}

// ---- Loading ----

// A panel in the form in which it is kept.
static bool keep_panel(packed_matrix *m, const stored_matrix *w, uint32_t i, packer *k, bool *two_parts)
{
    char *to = m->panels + i * m->kept_bytes;
    if (!m->halves) return make_panel(m, to, w, i, k, two_parts);
    if (!make_panel(m, k->wide, w, i, k, two_parts)) return false;
    if (m->p == PRECISION_F32)
        narrow((uint16_t *)(void *)to, (const float *)(const void *)k->wide, m->kept_bytes / sizeof(uint16_t));
    else memcpy(to, k->wide, m->kept_bytes);
    return true;
}

static bool pack_panels(packed_matrix *m, const stored_matrix *w)
{
    int failures = 0;
    bool two_parts = true;
    size_t bytes = packer_bytes(m->p, m->width, w->in);
#pragma omp parallel reduction(+ : failures) reduction(&& : two_parts)
    {
        char *memory = aligned_alloc(LINE, bytes);
        failures += !memory;
        packer k = {NULL};
        if (memory) k = packer_at(memory, m->p, m->width, w->in);
#pragma omp for schedule(dynamic, 1)
        for (uint32_t i = 0; i < m->n_panels; i++)
            if (memory) failures += !keep_panel(m, w, i, &k, &two_parts);
        free(memory);
    }
    if (m->bits) m->parts = two_parts ? 2 : 3;
    return failures == 0;
}

static size_t panel_bytes(const packed_matrix *m, uint32_t in, uint32_t width)
{
    return m->bits ? packed_step_bytes(m->bits, in, width) : packed_bytes(m->p, in, width);
}

// Which form the matrix gets, and how large it is; false where oneDNN has no memory to find it out.
static bool choose_form(packed_matrix *m, precision p, const stored_matrix *w, unsigned hold)
{
    bool tiles = product_takes_any_rows(), is_half = w->type == GGUF_TENSOR_BF16;
    *m = (packed_matrix){.p = p, .rows = product_rows(), .source = *w};
    m->width = tiles ? TILE_PANEL : PANEL;
    m->rounds = hold & HOLD_HALF && !is_half;
    m->bits = tiles && !m->rounds && !(hold & HOLD_WIDE) ? stored_bits(w) : 0;
    m->n_panels = (w->out + m->width - 1) / m->width;
    m->has_source = hold & HOLD_MAPPED;
    m->in_place = m->has_source && hold & HOLD_IN_PLACE;
    m->full.width = w->out < m->width ? w->out : m->width;
    m->last.width = w->out - (m->n_panels - 1) * m->width;
    size_t full = panel_bytes(m, w->in, m->full.width), last = panel_bytes(m, w->in, m->last.width),
           high = packed_high_bytes(p, w->in, m->full.width);
    m->panel_bytes = !full || !last ? 0 : last > full ? last : full;
    m->kept_bytes = m->panel_bytes;
    // The tile unit's parts stand side by side, those of products of few terms as well.
    m->halves = (m->rounds || (is_half && !(hold & HOLD_WIDE))) && !tiles && (p == PRECISION_F32 || high);
    if (m->halves) m->kept_bytes = p == PRECISION_F32 ? m->panel_bytes / 2 : high;
    return m->panel_bytes != 0;
}

static packed_matrix *pack_matrix(precision p, const stored_matrix *w, unsigned hold)
{
    packed_matrix *m = calloc(1, sizeof *m);
    bool ok = m && choose_form(m, p, w, hold) && panel_kind_find(&m->full, m, m->full.width, w->in) &&
              panel_kind_find(&m->last, m, m->last.width, w->in);
    if (ok && !m->in_place) {
        m->panels = (char *)host_memory((m->kept_bytes * m->n_panels + sizeof(float) - 1) / sizeof(float));
        ok = m->panels && pack_panels(m, w);
    }
    if (ok) return m;
    if (m) free(m->panels);
    free(m);
    return NULL;
}

// Has the matrix its rows without a copy of them?
static bool has_rows(const packed_matrix *m)
{
    return m->has_source || m->bits;
}

dev_matrix cpu_matrix_load(backend_device *on, const stored_matrix *w, unsigned hold)
{
    dev_matrix m = {.out = w->out, .in = w->in};
    packed_matrix *packed = pack_matrix(cpu_of(on)->p, w, hold);
    m.packed = packed;
    if (packed && hold & HOLD_ROWS && !has_rows(packed) && !(m.address = host_matrix_values(w, hold)))
        cpu_matrix_release(on, &m);
    return m;
}

uint64_t cpu_matrix_bytes(backend_device *on, const stored_matrix *w, unsigned hold)
{
    packed_matrix m;
    bool ok = choose_form(&m, cpu_of(on)->p, w, hold);
    uint64_t panels = ok && !m.in_place ? (uint64_t)m.kept_bytes * m.n_panels : 0;
    return panels + (hold & HOLD_ROWS && !has_rows(&m) ? (uint64_t)w->out * w->in * sizeof(float) : 0);
}

void cpu_matrix_rows(float *to, const dev_matrix *w, uint32_t row, uint32_t rows, uint32_t first, uint32_t n)
{
    const packed_matrix *m = w->packed;
    for (uint32_t i = row; i < row + rows; i++, to += n) {
        if (w->address) memcpy(to, w->address + (size_t)i * w->in + first, n * sizeof(float));
        else if (m->has_source) stored_slice(&m->source, i, first, n, to);
        else steps_unpack(m->bits, to, m->panels + i / m->width * m->kept_bytes, i % m->width, w->in, first, n);
        if (!w->address && m->rounds) stored_round(to, n);
    }
}

void cpu_matrix_release(backend_device *on, dev_matrix *w)
{
    (void)on;
    packed_matrix *m = w->packed;
    if (m) free(m->panels);
    free(m);
    free(w->address);
    w->packed = NULL;
    w->address = NULL;
}
