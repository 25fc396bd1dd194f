// Tables near a table: every head reads its budget from its own column, further up or down than the ratio says.
//
// On the axis x = log(ratio / (1 - ratio)) a table's column is a falling curve, the share that the head keeps. With a
// shift s the head keeps what its curve says at u + s, where u is common to all heads that share a total and is found
// so that the total stays what the table's row has. So the loss curves that the table was solved from remain the prior:
// a head moves along its own curve, at its own pace, within what it was ever granted; shift 0 is the table itself.
// Rows are made in order, and no head keeps more in a later one: budgets stay nested.
#pragma once
#include "runtime/limits.h"
#include <math.h>

// Ratio 0 on the axis: nothing that matters happens between it and the first row of a table.
#define SHIFT_AXIS_BEGIN (-8.0)
// Where a ratio in (0, 1) stands on it.
static inline double shift_axis(double ratio)
{
    return log(ratio / (1 - ratio));
}

typedef struct shift_base {
    uint32_t n_rows, n_layers, n_kv_heads; // R, L, G
    const double *ratio;                   // [R] ascending, in (0, 1)
    const double *prune;                   // [R, L*G]
    const kvb_limits *limits;              // what the budgets keep to; NULL: their sum only
    bool by_layer;                         // totals are those of each layer
} shift_base;

// shift [n_knots, L*G] at the ratios knots [n_knots] (ascending): between them linear on the axis x, outside constant.
// out [R, L*G] receives prune ratios whose sums over all heads that share a total are the base's: all heads of the
// model, of a layer, or of a tensor-parallel rank. Caps of layers, floors and ceilings of heads hold. A row without any
// shift, before which no other row was changed, is the base's to the bit. Errors: KVB_ARGUMENT, KVB_NUMERIC,
// KVB_MEMORY.
kvb_status shift_table(const shift_base *base, const double *knots, uint32_t n_knots, const double *shift, double *out,
                       kvb_error *err);
