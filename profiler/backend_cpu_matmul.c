// Products with weight matrices. A matrix is cut into panels of outputs, each packed for itself; a task is a panel
// times a few blocks of product_rows() rows. With oneDNN every product has exactly that many rows and goes into a tile
// of its own, which the first-level cache holds, so that a row's bits depend on nothing but the row: it sums in another
// order for other shapes. The tile unit takes all rows at once, and weights as whole numbers where the model file has
// them so.
#include "profiler/backend_cpu.h"
#include "profiler/meter.h"
#include "profiler/packed_steps.h"
#include "profiler/packed_tiles.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

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
    size_t panel_bytes;
    panel_kind full, last;
    char *panels;
} packed_matrix;

static bool panel_kind_find(panel_kind *kind, const packed_matrix *m, uint32_t width, uint32_t in)
{
    kind->width = width;
    kind->product = product_find(m->p, m->rows, width, in, false);
    return kind->product;
}

// Buffers of a thread that packs.
typedef struct packer {
    float *rows, *temp; // [width, in], packed_temp_floats
    int8_t *wholes;     // [in]
    float *steps, *bases;
} packer;

static bool packer_open(packer *k, uint32_t width, uint32_t in)
{
    size_t blocks = in / STEP_TERMS + 1;
    *k = (packer){.rows = malloc((size_t)width * in * sizeof(float)),
                  .temp = malloc(packed_temp_floats(in, width) * sizeof(float)),
                  .wholes = malloc(in),
                  .steps = malloc(2 * blocks * sizeof(float))};
    k->bases = k->steps ? k->steps + blocks : NULL;
    return k->rows && k->temp && k->wholes && k->steps;
}

static void packer_close(packer *k)
{
    free(k->rows);
    free(k->temp);
    free(k->wholes);
    free(k->steps);
}

// Packs rows [first, first + n) of w, and copies them to `kept` unless it is NULL.
static bool pack_floats(const packed_matrix *m, char *panel, const stored_matrix *w, uint32_t first, uint32_t n,
                        packer *k, float *kept)
{
    bool ok = stored_rows(w, first, n, k->rows);
    if (kept) memcpy(kept + (size_t)first * w->in, k->rows, (size_t)n * w->in * sizeof(float));
    return ok && packed_store(m->p, panel, k->rows, w->in, true, w->in, n, k->temp);
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

static bool pack_panels(packed_matrix *m, const stored_matrix *w, float *kept)
{
    int failures = 0;
    bool two_parts = true;
#pragma omp parallel reduction(+ : failures) reduction(&& : two_parts)
    {
        packer k;
        bool open = packer_open(&k, m->width, w->in);
        failures += !open;
#pragma omp for schedule(dynamic, 1)
        for (uint32_t i = 0; i < m->n_panels; i++) {
            uint32_t first = i * m->width, width = w->out - first < m->width ? w->out - first : m->width;
            char *panel = m->panels + i * m->panel_bytes;
            if (open)
                failures += !(m->bits ? pack_steps(m, panel, w, first, width, &k, &two_parts)
                                      : pack_floats(m, panel, w, first, width, &k, kept));
        }
        packer_close(&k);
    }
    if (m->bits) m->parts = two_parts ? 2 : 3;
    return failures == 0;
}

static size_t panel_bytes(const packed_matrix *m, uint32_t in, uint32_t width)
{
    return m->bits ? packed_step_bytes(m->bits, in, width) : packed_bytes(m->p, in, width);
}

static packed_matrix *pack_matrix(precision p, const stored_matrix *w, float *kept)
{
    packed_matrix *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->p = p;
    m->rows = product_rows();
    m->bits = product_takes_any_rows() ? stored_bits(w) : 0;
    m->width = product_takes_any_rows() ? TILE_PANEL : PANEL;
    m->n_panels = (w->out + m->width - 1) / m->width;
    uint32_t full = w->out < m->width ? w->out : m->width, last = w->out - (m->n_panels - 1) * m->width;
    size_t full_bytes = panel_bytes(m, w->in, full), last_bytes = panel_bytes(m, w->in, last);
    // 0: no memory to find it out.
    m->panel_bytes = !full_bytes || !last_bytes ? 0 : last_bytes > full_bytes ? last_bytes : full_bytes;
    m->panels = (char *)host_memory(m->panel_bytes / sizeof(float) * m->n_panels);
    bool ok = m->panel_bytes && m->panels && panel_kind_find(&m->full, m, full, w->in) &&
              panel_kind_find(&m->last, m, last, w->in) && pack_panels(m, w, kept);
    if (ok) return m;
    free(m->panels);
    free(m);
    return NULL;
}

dev_matrix cpu_matrix_load(backend_device *on, const stored_matrix *w, bool keep_rows)
{
    dev_matrix m = {.out = w->out, .in = w->in};
    bool has_rows = product_takes_any_rows() && stored_bits(w); // cpu_matrix_rows has them from the packed form
    if (keep_rows && !has_rows && !(m.address = host_memory((size_t)w->out * w->in))) return m;
    m.packed = pack_matrix(cpu_of(on)->p, w, m.address);
    if (!m.packed) {
        free(m.address);
        m.address = NULL;
    }
    return m;
}

void cpu_matrix_rows(float *to, const dev_matrix *w, uint32_t row, uint32_t rows, uint32_t first, uint32_t n)
{
    const packed_matrix *m = w->packed;
    for (uint32_t i = row; i < row + rows; i++, to += n)
        if (w->address) memcpy(to, w->address + (size_t)i * w->in + first, n * sizeof(float));
        else steps_unpack(m->bits, to, m->panels + i / m->width * m->panel_bytes, i % m->width, w->in, first, n);
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

// Rows that meet one matrix, or several of the same width.
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

// Where rows are used as they stand only the last block has a copy, since only it can lack rows.
static char *operand_block(const matmul_job *job, uint32_t i)
{
    return (char *)job->on->operand + (operand_is_plain(job->p) ? 0 : i * job->block_bytes);
}

static uint32_t rows_of(const matmul_job *job, uint32_t block)
{
    uint32_t rest = job->n - block * job->rows;
    return rest < job->rows ? rest : job->rows;
}

// Splits rows [first, first + n) of one block, or copies them where the block lacks rows.
static void prepare_rows(const matmul_job *job, uint32_t first, uint32_t n)
{
    uint32_t block = first / job->rows;
    if (operand_is_plain(job->p) && rows_of(job, block) == job->rows) return;
    operand_split(job->p, operand_block(job, block), job->x + (size_t)first * job->in, job->in, job->rows,
                  first % job->rows, n, job->in, 1.0f);
}

// Blocks [first, end) of the rows, product by product; lines of y are `out` floats apart.
static void multiply_blocks(const matmul_job *job, const panel_kind *kind, const char *b, float *y, uint32_t out,
                            uint32_t first, uint32_t end)
{
    float *tile = job->on->threads[omp_get_thread_num()].panel;
    for (uint32_t i = first; i < end; i++) {
        const void *a = operand_block(job, i);
        if (operand_is_plain(job->p) && rows_of(job, i) == job->rows) a = job->x + (size_t)i * job->rows * job->in;
        if (!product_run(kind->product, a, b, tile)) cpu_product_failed(job->on);
        loop_store_tile(y + (size_t)i * job->rows * out, out, tile, rows_of(job, i), kind->width, job->accumulate);
    }
}

// The same in one product, straight into y.
static void multiply_at_once(const matmul_job *job, const packed_matrix *m, const panel_kind *kind, const char *b,
                             float *y, uint32_t out, uint32_t first, uint32_t rows)
{
    y += (size_t)first * job->rows * out;
    const void *a = operand_block(job, first);
    if (m->bits) product_run_steps(kind->product, rows, a, b, m->bits, m->parts, y, out, job->accumulate);
    else product_run_rows(kind->product, rows, a, b, y, out, job->accumulate);
}

// `panel` counts through all matrices.
static void multiply_panel(const matmul_job *job, uint32_t panel, uint32_t first, uint32_t end)
{
    const projection *to = job->to;
    for (; panel >= ((const packed_matrix *)to->w.packed)->n_panels; to++)
        panel -= ((const packed_matrix *)to->w.packed)->n_panels;
    const packed_matrix *m = to->w.packed;
    const panel_kind *kind = panel + 1 < m->n_panels ? &m->full : &m->last;
    const char *b = m->panels + panel * m->panel_bytes;
    float *y = to->y.address + (size_t)panel * m->width;
    uint32_t rows = (end - 1 - first) * job->rows + rows_of(job, end - 1);
    double start = meter_now();
    if (product_takes_any_rows()) multiply_at_once(job, m, kind, b, y, to->w.out, first, rows);
    else multiply_blocks(job, kind, b, y, to->w.out, first, end);
    meter_add(METER_LINEAR, start, 2.0 * rows * kind->width * job->in, (double)m->panel_bytes);
}

static void multiply_rows(const matmul_job *job)
{
    enum { FEW = 2 }; // rows prepared at a time: few, so that a small batch is shared out; a divisor of product_rows()
    uint32_t blocks = (job->n + job->rows - 1) / job->rows, groups = (blocks + BLOCKS_PER_TASK - 1) / BLOCKS_PER_TASK,
             last = blocks - 1, panels = 0;
    for (uint32_t i = 0; i < job->count; i++) panels += ((const packed_matrix *)job->to[i].w.packed)->n_panels;
    if (rows_of(job, last) < job->rows && !product_takes_any_rows())
        memset(operand_block(job, last), 0, job->block_bytes);
#pragma omp parallel num_threads(job->on->n_threads)
    {
        double start = meter_now();
#pragma omp for schedule(static) nowait
        for (uint32_t i = 0; i < job->n; i += FEW) prepare_rows(job, i, job->n - i < FEW ? job->n - i : FEW);
        meter_add(METER_LINEAR, start, 0, 0);
#pragma omp barrier
        if (product_takes_any_rows()) { // from one end of the panels' memory to the other, which is what decoding waits
                                        // for
            tiles_hold();
#pragma omp for schedule(static) nowait
            for (uint32_t panel = 0; panel < panels; panel++) multiply_panel(job, panel, 0, blocks);
            tiles_let_go();
        } else {
#pragma omp for collapse(2) schedule(dynamic, 1)
            for (uint32_t group = 0; group < groups; group++)
                for (uint32_t panel = 0; panel < panels; panel++) {
                    uint32_t first = group * BLOCKS_PER_TASK, end = first + BLOCKS_PER_TASK;
                    multiply_panel(job, panel, first, end < blocks ? end : blocks);
                }
        }
    }
}

// For oneDNN as many as on->operand holds; the tile unit has its rows in the second-level cache.
static uint32_t rows_at_a_time(const matmul_job *job, uint32_t n)
{
    if (operand_is_plain(job->p)) return n;
    if (!product_takes_any_rows()) return (uint32_t)(job->on->operand_bytes / job->block_bytes) * job->rows;
    size_t near = OPERAND_BYTES / job->block_bytes;
    return (near < 1 ? 1 : near < BLOCKS_PER_TASK ? (uint32_t)near : BLOCKS_PER_TASK) * job->rows;
}

static void multiply_all(cpu_device *on, const projection *to, uint32_t count, dev x, uint32_t n, bool accumulate)
{
    const packed_matrix *m = to->w.packed;
    matmul_job job = {.on = on, .count = count, .p = m->p, .in = to->w.in, .rows = m->rows, .accumulate = accumulate};
    job.block_bytes = operand_bytes(m->p, m->rows, to->w.in);
    if (to->w.in > on->limits.matrix_dim) {
        backend_fail(&on->base, KVB_ARGUMENT, "backend cpu: a product of %u terms, opened for up to %u", to->w.in,
                     on->limits.matrix_dim);
        return;
    }
    uint32_t fit = rows_at_a_time(&job, n);
    bool prepared = product_prepare(on->n_threads);
    for (uint32_t first = 0; first < n; first += fit) {
        job.n = n - first < fit ? n - first : fit;
        job.x = x.address + (size_t)first * job.in;
        for (uint32_t i = 0; i < count; i++)
            job.to[i] = (projection){dev_at(to[i].y, (size_t)first * to[i].w.out), to[i].w};
        if (prepared) multiply_rows(&job);
        else cpu_product_failed(on);
    }
}

void cpu_matmul(backend_device *on, dev y, dev x, dev_matrix w, uint32_t n, bool accumulate)
{
    multiply_all(cpu_of(on), &(projection){y, w}, 1, x, n, accumulate);
}

void cpu_project(backend_device *on, const projection *to, uint32_t count, dev x, uint32_t n)
{
    multiply_all(cpu_of(on), to, count, x, n, false);
}
