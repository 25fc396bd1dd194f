// Products with weight matrices, which are cut into panels of outputs (backend_cpu_weights.h); a task is a panel
// times a few blocks of product_rows() rows. With oneDNN every product has exactly that many rows and goes into a tile
// of its own, which the first-level cache holds, so that a row's bits depend on nothing but the row: it sums in another
// order for other shapes. The tile unit takes all rows at once, and weights as whole numbers where the model file has
// them so.
#include "profiler/backend/backend_cpu_weights.h"
#include "profiler/backend/meter.h"
#include "profiler/backend/packed_steps.h"
#include "profiler/backend/packed_tiles.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

// Rows that meet one matrix, or several of the same width.
typedef struct matmul_job {
    cpu_device *on;
    projection to[BACKEND_PROJECTIONS]; // y from the first of these rows on
    uint32_t count;
    precision p;
    const float *x;
    uint32_t in, n;                // n rows fit into on->operand
    uint32_t rows;                 // of every product
    size_t block_bytes;            // of a block of the operand
    bool accumulate, makes_panels; // of a matrix
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
static void multiply_blocks(const matmul_job *job, const packed_matrix *m, const panel_kind *kind, const char *b,
                            float *y, uint32_t out, uint32_t first, uint32_t end)
{
    bool high_alone = m->halves && m->p == PRECISION_BF16X3;
    float *tile = job->on->threads[omp_get_thread_num()].panel;
    for (uint32_t i = first; i < end; i++) {
        const void *a = operand_block(job, i);
        if (operand_is_plain(job->p) && rows_of(job, i) == job->rows) a = job->x + (size_t)i * job->rows * job->in;
        bool ok = high_alone ? product_run_high(kind->product, a, b, tile) : product_run(kind->product, a, b, tile);
        if (!ok) cpu_product_failed(job->on);
        loop_store_tile(y + (size_t)i * job->rows * out, out, tile, rows_of(job, i), kind->width, job->accumulate);
    }
}

// The same in one product, straight into y.
static void multiply_at_once(const matmul_job *job, const packed_matrix *m, unsigned parts, const panel_kind *kind,
                             const char *b, float *y, uint32_t out, uint32_t first, uint32_t rows)
{
    y += (size_t)first * job->rows * out;
    const void *a = operand_block(job, first);
    if (m->bits) product_run_steps(kind->product, rows, a, b, m->bits, parts, y, out, job->accumulate);
    else product_run_rows(kind->product, rows, a, b, y, out, job->accumulate);
}

static void panel_failed(cpu_device *on)
{
    backend_fail(&on->base, KVB_NUMERIC,
                 "backend %s: a weight that is read from the model's file is not finite, so the file is damaged or "
                 "overflowed when it was made; with memory for all weights the message names the tensor",
                 on->base.b->name);
}

// `panel` counts through all matrices.
static void multiply_panel(const matmul_job *job, uint32_t panel, uint32_t first, uint32_t end)
{
    const projection *to = job->to;
    for (; panel >= ((const packed_matrix *)to->w.packed)->n_panels; to++)
        panel -= ((const packed_matrix *)to->w.packed)->n_panels;
    const packed_matrix *m = to->w.packed;
    const panel_kind *kind = panel + 1 < m->n_panels ? &m->full : &m->last;
    float *y = to->y.address + (size_t)panel * m->width;
    uint32_t rows = (end - 1 - first) * job->rows + rows_of(job, end - 1);
    unsigned parts;
    double start = meter_now();
    const char *b = packed_panel(m, panel, &job->on->threads[omp_get_thread_num()], &parts);
    if (!b) {
        panel_failed(job->on);
        return;
    }
    if (product_takes_any_rows()) multiply_at_once(job, m, parts, kind, b, y, to->w.out, first, rows);
    else multiply_blocks(job, m, kind, b, y, to->w.out, first, end);
    meter_add(METER_LINEAR, start, 2.0 * rows * kind->width * job->in, (double)m->kept_bytes);
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
        } else if (job->makes_panels) { // each of them once
#pragma omp for schedule(dynamic, 1)
            for (uint32_t panel = 0; panel < panels; panel++) multiply_panel(job, panel, 0, blocks);
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
    for (uint32_t i = 0; i < count; i++) job.makes_panels |= packed_is_made(to[i].w.packed);
    if (to->w.in > on->limits.matrix_dim || (job.makes_panels && to->w.in > on->limits.made_terms)) {
        backend_fail(&on->base, KVB_ARGUMENT, "backend cpu: a product of %u terms, opened for up to %u", to->w.in,
                     job.makes_panels ? on->limits.made_terms : on->limits.matrix_dim);
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
