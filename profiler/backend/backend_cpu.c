// The CPU backend: oneDNN for matrix products, OpenMP over heads and rows, loops that the compiler vectorises per CPU.
// This file has its weights, products, scratch memory and row operations; attention is in backend_cpu_attention.c,
// inner loops are in backend_cpu_loops.c. There is one table of operations per precision of the products; cpu_device.h
// says what keeps their bits the same.
#include "formats/need.h"
#include "profiler/backend/cpu_device.h"
#include "profiler/backend/linalg.h"
#include "profiler/backend/packed_steps.h"
#include "profiler/backend/packed_tiles.h"
#include "profiler/weights/dequant.h"
#include "runtime/fail.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(from, bytes) ((void)(from), (void)(bytes))
#endif

// ---- Weights --------------------------------------------------------------------------------------------------------
//
// Weight matrices as the CPU backend keeps them for its products.
//
// A matrix is cut into panels of outputs, each packed separately. What is kept of them depends on the type that the
// file stores and on what was asked for (matrix_hold of backend.h):
//
//     whole    panels as products take them
//     steps    whole numbers of 4 to 8 bits with steps and bases (packed_steps.h): in float32, and on the tile unit
//     halves   values that bfloat16 represents, as 16 bits, if products take float32: a panel is widened for each
//     nothing  a panel is packed for each product from the file, which stays mapped
//
// Products have the same bits in all these forms.

// A width of panels, and the product with it, which writes to a thread's [rows, PANEL].
typedef struct panel_kind {
    uint32_t width, side; // side: packed_side() if panels are widened from whole numbers for each product, else 0
    const product *product;
} panel_kind;

typedef struct packed_matrix {
    precision p;
    uint32_t n_panels, width, rows; // width: outputs of a panel, but perhaps the last; rows of every product
    unsigned bits,
        parts;     // for weights kept as whole numbers: their bits, and the parts that products in float32 need; else 0
    bool halves;   // 16 bits are kept of each value
    bool in_place; // no panels are kept
    bool has_source;   // `source` stays readable as long as the matrix
    size_t kept_bytes; // of a panel as it is kept
    panel_kind full, last;
    stored_matrix source;
    char *panels; // [n_panels, kept_bytes]; NULL if in_place
} packed_matrix;

static inline const panel_kind *panel_at(const packed_matrix *m, uint32_t i)
{
    return i + 1 < m->n_panels ? &m->full : &m->last;
}

// Whether a panel is made anew for each product, which should then have as many rows as possible.
static inline bool packed_is_made(const packed_matrix *m)
{
    return m->in_place || m->full.side || m->halves;
}

// ---- Making a panel ----

// Buffers of a thread that packs.
typedef struct packer {
    float *rows;    // [width, in]
    char *wide;     // a panel as products take it, if another form of it is kept
    int8_t *wholes; // [in]
    float *steps, *bases;
} packer;

enum { N_PACKER_PIECES = 4, LINE = 64 };

// Bytes of a packer's buffers, each on a cache line of its own.
static void list_packer(size_t out[N_PACKER_PIECES], precision p, uint32_t width, uint32_t in)
{
    size_t blocks = in / STEP_TERMS + 1, whole = packed_bytes(p, in, width);
    if (product_takes_any_rows()) { // whole numbers may take more than parts do
        size_t steps = packed_step_bytes(8, in / STEP_TERMS * STEP_TERMS, width);
        whole = steps > whole ? steps : whole;
    }
    const size_t all[N_PACKER_PIECES] = {(size_t)width * in * sizeof(float), whole, in, 2 * blocks * sizeof(float)};
    for (int i = 0; i < N_PACKER_PIECES; i++) out[i] = (all[i] + LINE - 1) / LINE * LINE;
}

static size_t packer_bytes(precision p, uint32_t width, uint32_t in)
{
    size_t pieces[N_PACKER_PIECES], all = 0;
    list_packer(pieces, p, width, in);
    for (int i = 0; i < N_PACKER_PIECES; i++) all += pieces[i];
    return all;
}

// Lays out a packer's buffers in `memory`, which begins on a cache line.
static packer packer_at(char *memory, precision p, uint32_t width, uint32_t in)
{
    size_t pieces[N_PACKER_PIECES];
    packer k;
    list_packer(pieces, p, width, in);
    k.rows = (float *)(void *)memory;
    k.wide = memory += pieces[0];
    k.wholes = (int8_t *)(memory += pieces[1]);
    k.steps = (float *)(void *)(memory + pieces[2]);
    k.bases = k.steps + in / STEP_TERMS + 1;
    return k;
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
        *two_parts = *two_parts && !m->full.side && m->p == PRECISION_F32 && m->bits != 6 &&
                     steps_fit_two_parts(k->wholes, k->steps, k->bases, w->in);
        steps_pack(m->bits, panel, i, w->in, k->wholes, k->steps, k->bases);
    }
    return finite;
}

// Makes panel `i` of w as products take it. Returns false if a value is not finite.
static bool make_panel(const packed_matrix *m, char *panel, const stored_matrix *w, uint32_t i, packer *k,
                       bool *two_parts)
{
    uint32_t first = i * m->width, n = w->out - first < m->width ? w->out - first : m->width;
    if (m->bits) return pack_steps(m, panel, w, first, n, k, two_parts);
    bool ok = stored_rows(w, first, n, k->rows);
    packed_store(m->p, panel, k->rows, w->in, true, w->in, n);
    return ok;
}

// Returns a panel as products take it: the one that is kept, or one made in the thread's scratch memory, valid until
// the thread asks for another. *parts is `parts` of the panel. Returns NULL if the file has a value that is not finite.
static const char *packed_panel(const packed_matrix *m, uint32_t panel, scratch *s, unsigned *parts)
{
    const char *kept = m->panels ? m->panels + panel * m->kept_bytes : NULL;
    *parts = m->parts;
    if (kept && !packed_is_made(m)) return kept;
    packer k = packer_at(s->made, m->p, m->width, m->source.in);
    if (kept) {
        const panel_kind *kind = panel_at(m, panel);
        float *wide = (float *)(void *)k.wide;
        if (kind->side) steps_widen(m->bits, wide, kept, m->source.in, kind->width, kind->side);
        else widen(wide, (const uint16_t *)(const void *)kept, m->kept_bytes / sizeof(uint16_t));
        return k.wide;
    }
    bool two_parts = true;
    if (!make_panel(m, k.wide, &m->source, panel, &k, &two_parts)) return NULL;
    if (m->bits) *parts = two_parts ? 2 : 3;
    return k.wide;
}

// ---- Loading ----

// Makes a panel in the form in which it is kept. Returns false if a value is not finite.
static bool keep_panel(packed_matrix *m, const stored_matrix *w, uint32_t i, packer *k, bool *two_parts)
{
    char *to = m->panels + i * m->kept_bytes;
    if (!m->halves) return make_panel(m, to, w, i, k, two_parts);
    if (!make_panel(m, k->wide, w, i, k, two_parts)) return false;
    narrow((uint16_t *)(void *)to, (const float *)(const void *)k->wide, m->kept_bytes / sizeof(uint16_t));
    return true;
}

static bool pack_panels(packed_matrix *m, const stored_matrix *w)
{
    int failures = 0;
    bool two_parts = true;
    size_t bytes = packer_bytes(m->p, m->width, w->in);
#pragma omp parallel reduction(+ : failures) reduction(&& : two_parts)
    {
        char *memory = needed(aligned_alloc(LINE, bytes), "packed weights");
        packer k = packer_at(memory, m->p, m->width, w->in);
#pragma omp for schedule(dynamic, 1)
        for (uint32_t i = 0; i < m->n_panels; i++) failures += !keep_panel(m, w, i, &k, &two_parts);
        free(memory);
    }
    if (m->bits) m->parts = two_parts ? 2 : 3;
    return failures == 0;
}

static size_t panel_bytes(const packed_matrix *m, uint32_t in, uint32_t width)
{
    return m->bits ? packed_step_bytes(m->bits, in, width) : packed_bytes(m->p, in, width);
}

// Decides whether whole numbers are kept. Without a tile unit, panels must have whole groups of 16 columns side by
// side.
static void choose_steps(packed_matrix *m)
{
    enum { COLUMNS = STEP_COLUMNS / 2 };
    unsigned bits = stored_bits(&m->source);
    uint32_t full = packed_side(m->p, m->source.in, m->full.width),
             last = packed_side(m->p, m->source.in, m->last.width);
    if (product_takes_any_rows()) m->bits = bits;
    else if (bits && !m->in_place && steps_can_widen() && full && last && full % COLUMNS == 0 && last % COLUMNS == 0)
        m->bits = bits, m->full.side = full, m->last.side = last;
}

// Chooses the form of a matrix and computes its sizes.
static void choose_form(packed_matrix *m, precision p, const stored_matrix *w, unsigned hold)
{
    *m = (packed_matrix){.p = p, .rows = product_rows(), .source = *w};
    m->width = product_takes_any_rows() ? TILE_PANEL : PANEL;
    m->n_panels = (w->out + m->width - 1) / m->width;
    m->has_source = hold & HOLD_MAPPED;
    m->in_place = m->has_source && hold & HOLD_IN_PLACE;
    m->full.width = w->out < m->width ? w->out : m->width;
    m->last.width = w->out - (m->n_panels - 1) * m->width;
    choose_steps(m);
    m->halves = w->type == GGUF_TENSOR_BF16 && operand_is_plain(p);
    m->kept_bytes = larger(panel_bytes(m, w->in, m->full.width), panel_bytes(m, w->in, m->last.width));
    if (m->halves) m->kept_bytes /= 2;
}

static packed_matrix *pack_matrix(precision p, const stored_matrix *w, unsigned hold)
{
    packed_matrix *m = need(1, sizeof *m, "weight matrices");
    choose_form(m, p, w, hold);
    m->full.product = product_find(p, m->rows, m->full.width, w->in, false);
    m->last.product = product_find(p, m->rows, m->last.width, w->in, false);
    if (m->in_place) return m;
    m->panels = (char *)host_memory((m->kept_bytes * m->n_panels + sizeof(float) - 1) / sizeof(float));
    if (m->panels && pack_panels(m, w)) return m;
    free_all(m->panels, m);
    return NULL;
}

// Whether the matrix's rows can be read without a copy of them.
static bool has_rows(const packed_matrix *m)
{
    return m->has_source || m->bits;
}

static void cpu_matrix_release(backend_device *on, dev_matrix *w)
{
    packed_matrix *m = w->packed;
    if (m) free(m->panels);
    free_all(m, w->address);
    w->packed = NULL;
    w->address = NULL;
}

static dev_matrix cpu_matrix_load(backend_device *on, const stored_matrix *w, unsigned hold)
{
    dev_matrix m = {.out = w->out, .in = w->in};
    packed_matrix *packed = pack_matrix(cpu_of(on)->p, w, hold);
    m.packed = packed;
    if (packed && hold & HOLD_ROWS && !has_rows(packed) && !(m.address = host_matrix_values(w)))
        cpu_matrix_release(on, &m);
    return m;
}

static uint64_t cpu_matrix_bytes(backend_device *on, const stored_matrix *w, unsigned hold)
{
    packed_matrix m;
    choose_form(&m, cpu_of(on)->p, w, hold);
    uint64_t panels = !m.in_place ? (uint64_t)m.kept_bytes * m.n_panels : 0;
    return panels + (hold & HOLD_ROWS && !has_rows(&m) ? (uint64_t)w->out * w->in * sizeof(float) : 0);
}

// Reads columns first .. first+n-1 of rows row .. row+rows-1 as float32, of a matrix loaded with HOLD_ROWS.
static void cpu_matrix_rows(float *to, const dev_matrix *w, uint32_t row, uint32_t rows, uint32_t first, uint32_t n)
{
    const packed_matrix *m = w->packed;
    for (uint32_t i = row; i < row + rows; i++, to += n) {
        if (w->address) memcpy(to, w->address + (size_t)i * w->in + first, n * sizeof(float));
        else if (m->has_source) stored_slice(&m->source, i, first, n, to);
        else steps_unpack(m->bits, to, m->panels + i / m->width * m->kept_bytes, i % m->width, w->in, first, n);
    }
}

// ---- Products -------------------------------------------------------------------------------------------------------
//
// Products with weight matrices; a task is a panel times all rows. oneDNN sums in another order for other shapes: so
// that a row's bits depend on nothing but the row, every product has exactly product_rows() rows and goes into a tile
// of its own, which the first-level cache holds. The tile unit takes all rows at once, and weights as whole numbers if
// the model file has them so.

typedef struct matmul_job {
    cpu_device *on;
    projection to[BACKEND_PROJECTIONS]; // y from the first of these rows on
    uint32_t count;
    precision p;
    const float *x;
    uint32_t in, n;     // n rows fit into on->operand
    uint32_t rows;      // of every product
    size_t block_bytes; // of a block of the operand
    bool accumulate;
} matmul_job;

// Returns block `i` of the operand. If rows are used directly, only the last block, which can lack rows, has a copy.
static char *operand_block(const matmul_job *job, uint32_t i)
{
    return (char *)job->on->operand + (operand_is_plain(job->p) ? 0 : i * job->block_bytes);
}

static uint32_t rows_of(const matmul_job *job, uint32_t block)
{
    uint32_t rest = job->n - block * job->rows;
    return rest < job->rows ? rest : job->rows;
}

// Splits rows [first, first + n) of one block, or copies them if they are used directly but the block lacks rows.
static void prepare_rows(const matmul_job *job, uint32_t first, uint32_t n)
{
    uint32_t block = first / job->rows;
    if (operand_is_plain(job->p) && rows_of(job, block) == job->rows) return;
    operand_split(job->p, operand_block(job, block), job->x + (size_t)first * job->in, job->in, first % job->rows, n,
                  job->in, 1.0f);
}

// Multiplies the rows block by block; lines of y are `out` floats apart.
static void multiply_blocks(const matmul_job *job, const panel_kind *kind, const char *b, float *y, uint32_t out)
{
    float *tile = job->on->threads[omp_get_thread_num()].panel;
    for (uint32_t i = 0; i * job->rows < job->n; i++) {
        const void *a = operand_block(job, i);
        if (operand_is_plain(job->p) && rows_of(job, i) == job->rows) a = job->x + (size_t)i * job->rows * job->in;
        product_run(kind->product, a, b, tile);
        loop_store_tile(y + (size_t)i * job->rows * out, out, tile, rows_of(job, i), kind->width, job->accumulate);
    }
}

// Multiplies all rows with a panel; `panel` counts through all matrices.
static void multiply_panel(const matmul_job *job, uint32_t panel)
{
    const projection *to = job->to;
    for (; panel >= ((const packed_matrix *)to->w.packed)->n_panels; to++)
        panel -= ((const packed_matrix *)to->w.packed)->n_panels;
    const packed_matrix *m = to->w.packed;
    const panel_kind *kind = panel_at(m, panel);
    float *y = to->y.address + (size_t)panel * m->width;
    unsigned parts;
    const char *b = packed_panel(m, panel, &job->on->threads[omp_get_thread_num()], &parts);
    if (!b)
        backend_fail(&job->on->base, KVB_NUMERIC,
                     "backend %s: a weight that is read from the model's file is not finite, so the file is damaged or "
                     "overflowed when it was made; with memory for all weights the message names the tensor",
                     job->on->base.b->name);
    else if (!product_takes_any_rows()) multiply_blocks(job, kind, b, y, to->w.out);
    else if (!m->bits) product_run_rows(kind->product, job->n, operand_block(job, 0), b, y, to->w.out, job->accumulate);
    else
        product_run_steps(kind->product, job->n, operand_block(job, 0), b, m->bits, parts, y, to->w.out,
                          job->accumulate);
}

static void multiply_rows(const matmul_job *job)
{
    enum { FEW = 2 }; // rows prepared at a time: few, so that threads share a small batch; a divisor of product_rows()
    uint32_t last = (job->n - 1) / job->rows, panels = 0;
    for (uint32_t i = 0; i < job->count; i++) panels += ((const packed_matrix *)job->to[i].w.packed)->n_panels;
    if (rows_of(job, last) < job->rows && !product_takes_any_rows())
        memset(operand_block(job, last), 0, job->block_bytes);
#pragma omp parallel num_threads(job->on->n_threads)
    {
#pragma omp for schedule(static)
        for (uint32_t i = 0; i < job->n; i += FEW) prepare_rows(job, i, job->n - i < FEW ? job->n - i : FEW);
        if (product_takes_any_rows()) { // in the order of the panels' memory, for which decoding waits
            tiles_hold();
#pragma omp for schedule(static) nowait
            for (uint32_t panel = 0; panel < panels; panel++) multiply_panel(job, panel);
            tiles_let_go();
        } else {
#pragma omp for schedule(dynamic, 1)
            for (uint32_t panel = 0; panel < panels; panel++) multiply_panel(job, panel);
        }
    }
}

// Returns the rows to multiply at a time: for oneDNN as many as on->operand holds, for the tile unit as many as stay in
// the second-level cache.
static uint32_t rows_at_a_time(const matmul_job *job, uint32_t n)
{
    enum { MOST = 16 }; // blocks
    if (operand_is_plain(job->p)) return n;
    if (!product_takes_any_rows()) return (uint32_t)(job->on->operand_bytes / job->block_bytes) * job->rows;
    size_t near = OPERAND_BYTES / job->block_bytes;
    return (near < 1 ? 1 : near < MOST ? (uint32_t)near : MOST) * job->rows;
}

static void multiply_all(cpu_device *on, const projection *to, uint32_t count, dev x, uint32_t n, bool accumulate)
{
    const packed_matrix *m = to->w.packed;
    matmul_job job = {.on = on, .count = count, .p = m->p, .in = to->w.in, .rows = m->rows, .accumulate = accumulate};
    job.block_bytes = operand_bytes(m->p, m->rows, to->w.in);
    uint32_t most = on->limits.matrix_dim;
    for (uint32_t i = 0; i < count; i++)
        if (packed_is_made(to[i].w.packed)) most = on->limits.made_terms;
    if (to->w.in > most) {
        backend_fail(&on->base, KVB_ARGUMENT, "backend cpu: a product of %u terms, opened for up to %u", to->w.in,
                     most);
        return;
    }
    uint32_t fit = rows_at_a_time(&job, n);
    product_prepare(on->n_threads);
    for (uint32_t first = 0; first < n; first += fit) {
        job.n = n - first < fit ? n - first : fit;
        job.x = x.address + (size_t)first * job.in;
        for (uint32_t i = 0; i < count; i++)
            job.to[i] = (projection){dev_at(to[i].y, (size_t)first * to[i].w.out), to[i].w};
        multiply_rows(&job);
    }
}

static void cpu_matmul(backend_device *on, dev y, dev x, dev_matrix w, uint32_t n, bool accumulate)
{
    multiply_all(cpu_of(on), &(projection){y, w}, 1, x, n, accumulate);
}

static void cpu_project(backend_device *on, const projection *to, uint32_t count, dev x, uint32_t n)
{
    multiply_all(cpu_of(on), to, count, x, n, false);
}

static void cpu_output_norms(backend_device *on, dev norms, const prefix_kv *kv, dev_matrix wo, attention_shape s)
{
    uint32_t d = s.head_dim, group = s.n_heads / s.n_kv_heads, T = kv->n_tokens;
    uint32_t tiles = (T + QUERY_TILE - 1) / QUERY_TILE;
    if (!cpu_fits(on, T, s)) return;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(cpu_of(on)->n_threads)
    for (uint32_t h = 0; h < s.n_heads; h++)
        for (uint32_t t = 0; t < tiles; t++) {
            scratch *mine = &cpu_of(on)->threads[omp_get_thread_num()];
            float *part = mine->scores, *weights = mine->outputs; // [QUERY_TILE, QUERY_TILE], [QUERY_TILE, d]
            uint32_t row = t * QUERY_TILE, rows = T - row < QUERY_TILE ? T - row : QUERY_TILE;
            const float *v = kv->v.address + ((size_t)(h / group) * T + row) * d;
            float *out = norms.address + (size_t)h * T + row;
            memset(out, 0, rows * sizeof(float));
            for (uint32_t c = 0; c < wo.out; c += QUERY_TILE) {
                uint32_t columns = wo.out - c < QUERY_TILE ? wo.out - c : QUERY_TILE;
                cpu_matrix_rows(weights, &wo, c, columns, h * d, d);
                gemm(false, true, rows, columns, d, 1.0f, v, d, weights, d, 0.0f, part, columns);
                for (uint32_t r = 0; r < rows; r++) out[r] += loop_absolute_sum(part + (size_t)r * columns, columns);
            }
        }
}

// ---- Scratch memory -------------------------------------------------------------------------------------------------
//
// Scratch memory of a CPU device: one table of (pointer, floats) for each thread and one for what threads share, from
// which its size and its layout are made. Every count covers the largest of its users, named beside it;
// what an operation needs beyond the limits that the device was opened with is refused before it begins.

enum { CACHE_LINE = 16, GAP = CACHE_LINE, N_THREAD_PIECES = 11, N_SHARED_PIECES = 5 }; // in floats

typedef struct piece {
    size_t offset; // of a pointer in struct scratch or cpu_device
    size_t floats;
} piece;

static size_t floats_of(size_t bytes)
{
    return (bytes + sizeof(float) - 1) / sizeof(float);
}

// Scores of a tile of rows, or of a block of lines, with a tile of keys (attention, column_sums); a tile of values
// times a root (value_weights), or times rows of W_O (output_norms); or a padded copy of a tile of keys or values.
static size_t score_floats(attention_shape s)
{
    size_t d = s.head_dim, block = cpu_block_lines(cpu_max_lines(s));
    return larger(larger(QUERY_TILE, block) * KEY_TILE, VALUE_TILE * d);
}

static void list_thread(piece out[N_THREAD_PIECES], precision p, const backend_limits *limits)
{
    uint32_t d = limits->shape.head_dim, lines = cpu_max_lines(limits->shape);
    size_t made = limits->made_terms ? packer_bytes(p, tiles_available() ? TILE_PANEL : PANEL, limits->made_terms) : 0;
    bool splits = tiles_available() && p != PRECISION_BF16; // bf16x3 has three parts in products of few terms
    const piece all[N_THREAD_PIECES] = {
        {offsetof(scratch, scores), score_floats(limits->shape)},
        {offsetof(scratch, tails), limits->tail},
        {offsetof(scratch, outputs), larger((size_t)lines * d, KEY_TILE)}, // column_sums: sums of a tile
        {offsetof(scratch, row_max), lines},
        {offsetof(scratch, row_sum), lines},
        {offsetof(scratch, panel), PRODUCT_ROWS_MAX * PANEL},
        {offsetof(scratch, query_operand), floats_of(operand_bytes(p, lines, d)) + MOST_BLOCKS * CACHE_LINE},
        {offsetof(scratch, weight_operand),
         operand_is_plain(p) ? 0 : floats_of(cpu_weight_bytes(p, cpu_most_block_lines(lines)))},
        {offsetof(scratch, split_keys), splits ? floats_of(tiles_split_bytes(3, d, KEY_TILE)) : 0},
        {offsetof(scratch, split_values), splits ? floats_of(tiles_split_bytes(3, KEY_TILE, d)) : 0},
        {offsetof(scratch, made), floats_of(made)}, // a panel
    };
    memcpy(out, all, sizeof all);
}

// Returns the floats of cpu_device.operand: a block of the widest rows, and at least OPERAND_BYTES for the tile unit.
// oneDNN has two such blocks, or all rows of a pass if panels are made for each product; in float32 one is enough.
static size_t operand_floats(precision p, const backend_limits *limits)
{
    size_t one = floats_of(operand_bytes(p, PRODUCT_ROWS_MAX, limits->matrix_dim)), all = 0;
    if (limits->made_terms)
        all = floats_of(operand_bytes(p, PRODUCT_ROWS_MAX, limits->made_terms)) *
              ((limits->rows + PRODUCT_ROWS_MAX - 1) / PRODUCT_ROWS_MAX);
    if (tiles_available()) return larger(one, OPERAND_BYTES / sizeof(float));
    return operand_is_plain(p) ? one : larger(2 * one, all);
}

static void list_shared(piece out[N_SHARED_PIECES], const cpu_device *on, const backend_limits *limits)
{
    size_t lines = (size_t)cpu_row_group() * limits->shape.n_heads,
           parts = lines * ((limits->tokens + KEY_TILE - 1) / KEY_TILE);
    const piece all[N_SHARED_PIECES] = {
        {offsetof(cpu_device, operand), operand_floats(on->p, limits)},
        {offsetof(cpu_device, exponentials), cpu_exponential_floats(on, limits->tokens, limits->shape)},
        {offsetof(cpu_device, part_scale), parts},
        {offsetof(cpu_device, part_sum), parts},
        {offsetof(cpu_device, part_values), parts * limits->shape.head_dim},
    };
    memcpy(out, all, sizeof all);
}

// Floats that a piece takes with the gap behind it, which sanitisers watch.
static size_t piece_step(const piece *p)
{
    return (p->floats + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE + GAP;
}

static size_t all_floats(const cpu_device *on, const backend_limits *limits)
{
    piece shared[N_SHARED_PIECES], each[N_THREAD_PIECES];
    size_t all = 0, thread = 0;
    list_shared(shared, on, limits);
    list_thread(each, on->p, limits);
    for (int i = 0; i < N_SHARED_PIECES; i++) all += piece_step(&shared[i]);
    for (int i = 0; i < N_THREAD_PIECES; i++) thread += piece_step(&each[i]);
    return all + thread * (size_t)on->n_threads;
}

static uint64_t cpu_scratch_bytes(backend_device *on, const backend_limits *limits)
{
    return all_floats(cpu_of(on), limits) * sizeof(float);
}

// Sets the pointer to a piece in `owner`. Returns where the next piece begins.
static float *place(const piece *p, void *owner, float *at)
{
    float **to = (float **)(void *)((char *)owner + p->offset);
    *to = at;
    ASAN_POISON_MEMORY_REGION(at + p->floats, (piece_step(p) - p->floats) * sizeof(float));
    return at + piece_step(p);
}

static void place_pieces(cpu_device *on)
{
    piece shared[N_SHARED_PIECES], each[N_THREAD_PIECES];
    float *at = on->block;
    list_shared(shared, on, &on->limits);
    list_thread(each, on->p, &on->limits);
    for (int i = 0; i < N_SHARED_PIECES; i++) at = place(&shared[i], on, at);
    for (int t = 0; t < on->n_threads; t++)
        for (int i = 0; i < N_THREAD_PIECES; i++) at = place(&each[i], &on->threads[t], at);
}

static bool cpu_scratch_take(cpu_device *on, const backend_limits *limits)
{
    on->limits = *limits;
    on->operand_bytes = operand_floats(on->p, limits) * sizeof(float);
    on->threads = need((size_t)on->n_threads, sizeof *on->threads, "threads");
    on->block = host_memory(all_floats(on, limits));
    if (on->block) place_pieces(on);
    return on->block != NULL;
}

static void cpu_close(backend_device *on)
{
    if (!on) return;
    free_all(cpu_of(on)->threads, cpu_of(on)->block, on);
}

static kvb_status cpu_open(backend_device **out, const backend *b, const backend_limits *limits, kvb_error *err)
{
    *out = NULL;
    cpu_device *on = need(1, sizeof *on, "devices");
    *on = (cpu_device){.base.b = b, .p = precision_named(b->compute), .n_threads = omp_get_max_threads()};
    if (limits && !cpu_scratch_take(on, limits)) {
        cpu_close(&on->base);
        return kvb_fail(err, KVB_MEMORY, "backend %s: no memory for its scratch at %u tokens", b->name, limits->tokens);
    }
    *out = &on->base;
    return KVB_OK;
}

// ---- Rows -----------------------------------------------------------------------------------------------------------

static void cpu_gather(backend_device *on, dev y, dev_matrix table, const int32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        cpu_matrix_rows(y.address + (size_t)i * table.in, &table, (uint32_t)ids[i], 1, 0, table.in);
}

static void cpu_rms_norm(backend_device *on, dev y, dev x, dev weight, uint32_t n, uint32_t width, float eps)
{
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        loop_rms_norm(y.address + (size_t)i * width, x.address + (size_t)i * width, weight.address, width, eps);
}

static void cpu_layer_norm(backend_device *on, dev y, dev x, dev weight, uint32_t n, uint32_t width, uint32_t n_weights,
                           float eps)
{
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        loop_layer_norm(y.address + (size_t)i * width, x.address + (size_t)i * width,
                        weight.address + (size_t)(i % n_weights) * width, width, eps);
}

enum { LOOP_CHUNK = 16384 }; // floats that a thread takes at a time where rows do not matter

static void cpu_glu(backend_device *on, dev gate, dev up, activation act, size_t n_floats)
{
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n_floats; i += LOOP_CHUNK)
        loop_glu(gate.address + i, up.address + i, act, n_floats - i < LOOP_CHUNK ? n_floats - i : LOOP_CHUNK);
}

static void cpu_softcap(backend_device *on, dev y, float cap, size_t n_floats)
{
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n_floats; i += LOOP_CHUNK)
        loop_softcap(y.address + i, n_floats - i < LOOP_CHUNK ? n_floats - i : LOOP_CHUNK, cap);
}

static void cpu_clip(backend_device *on, dev y, float most, size_t n_floats)
{
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n_floats; i++) {
        float x = y.address[i];
        y.address[i] = x > most ? most : x < -most ? -most : x;
    }
}

// Bound by memory, like the operations of backend_host.c: a plain loop.
static void cpu_add_scaled(backend_device *on, dev y, dev x, float by, size_t n_floats)
{
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n_floats; i++) y.address[i] += by * x.address[i];
}

static void cpu_add_rows(backend_device *on, dev y, dev x, const uint32_t *rows, const float *weights, uint32_t n,
                         uint32_t width)
{
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++) {
        float *to = y.address + (size_t)rows[i] * width, weight = weights[i];
        const float *from = x.address + (size_t)i * width;
#pragma omp simd
        for (uint32_t c = 0; c < width; c++) to[c] += weight * from[c];
    }
}

static void cpu_rope(backend_device *on, dev y, dev x, dev cos_sin, const uint32_t *positions, uint32_t n,
                     uint32_t heads, uint32_t d, uint32_t rope_dim)
{
#pragma omp parallel for schedule(static)
    for (uint32_t i = 0; i < n; i++)
        loop_rope(y.address + (size_t)i * heads * d, x.address + (size_t)i * heads * d,
                  cos_sin.address + (size_t)positions[i] * rope_dim, heads, d, rope_dim);
}

// One table for each precision of the products.
#define CPU_BACKEND(COMPUTE, SUMMARY)                                                                                 \
    {                                                                                                                 \
        .name = "cpu", .compute = COMPUTE, .summary = SUMMARY, .context_rows = CONTEXT_ROWS, .sums_importance = true, \
        BACKEND_OPERATIONS(cpu, host, cpu),                                                                           \
    }

const backend backend_cpu = CPU_BACKEND("f32", "oneDNN and OpenMP, float32");
const backend backend_cpu_bf16x3 =
    CPU_BACKEND("bf16x3", "as cpu, products of operands in two bfloat16 parts where that is faster");
const backend backend_cpu_bf16 =
    CPU_BACKEND("bf16", "as cpu, products of operands rounded to bfloat16 where that is faster");
