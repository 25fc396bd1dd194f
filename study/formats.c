#include "study/formats.h"
#include "formats/need.h"
#include <math.h>

void formats_of(const study_options *o, uint32_t j, uint8_t formats[2])
{
    formats[0] = (uint8_t)o->packings[j / o->n_packings];
    formats[1] = (uint8_t)o->packings[j % o->n_packings];
}

double formats_loss(const double *loss, size_t head, const uint8_t formats[2])
{
    const double *own = loss + head * RECORD_PACKINGS, *values = own + RECORD_PACKINGS / 2;
    return (formats[0] ? own[formats[0] - 1] : 0) + (formats[1] ? values[formats[1] - 1] : 0);
}

bytes_problem formats_problem(const study_options *o, const double *loss, const loss_curves *c, uint32_t head_dim,
                              uint64_t budget[ROWS])
{
    uint32_t T = c->shape.n_tokens, N = shape_heads(&c->shape), J = o->n_packings * o->n_packings;
    double *added = need((size_t)N * J, sizeof *added, "losses"),
           full = 2.0 * (double)kvb_packed_bytes(KVB_PACK_BF16, KVB_KEYS, T, head_dim) * N;
    uint64_t *cost = need((size_t)J * (T + 1), sizeof *cost, "bytes of formats");
    for (uint32_t j = 0; j < J; j++) {
        uint8_t f[2];
        formats_of(o, j, f);
        for (uint32_t n = 0; n < N; n++) added[(size_t)n * J + j] = formats_loss(loss, n, f);
        for (uint32_t b = 0; b <= T; b++)
            cost[(size_t)j * (T + 1) + b] =
                kvb_packed_bytes(f[0], KVB_KEYS, b, head_dim) + kvb_packed_bytes(f[1], KVB_VALUES, b, head_dim);
    }
    for (int r = 0; r < ROWS; r++) budget[r] = (uint64_t)floor((1 - o->ratios[r]) * full + 1e-6);
    return (bytes_problem){c, J, added, cost};
}

void formats_problem_free(bytes_problem *p)
{
    free_all(p->added, p->cost);
    *p = (bytes_problem){0};
}
