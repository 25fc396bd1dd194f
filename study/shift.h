// Tables near a given table: every head takes its budget from its own column, at a higher or lower ratio than the
// row's.
//
// On the axis x = log(ratio / (1 - ratio)) a table's column is a falling curve, the share that the head keeps. With a
// shift s the head keeps what its curve says at u + s, where u is common to all heads that share a total and is chosen
// so that the total equals that of the table's row. So the loss curves from which the table was solved remain the
// prior: a head moves along its own curve, within the range of budgets it has in the table; shift 0 is the table
// itself. Rows are made in order, and no head keeps more in a later row: budgets stay nested.
#pragma once
#include "runtime/limits.h"
#include <math.h>

// The point on the axis that stands for ratio 0, well below the first row of any table.
#define SHIFT_AXIS_BEGIN (-8.0)
// Returns the point on the axis of a ratio in (0, 1).
static inline double shift_axis(double ratio)
{
    return log(ratio / (1 - ratio));
}

typedef struct shift_base {
    uint32_t n_rows, n_layers, n_kv_heads; // R, L, G
    const double *ratio;                   // [R] ascending, in (0, 1)
    const double *prune;                   // [R, L*G]
    const kvb_limits *limits;              // constraints on the budgets; NULL: only their sum is limited
    bool by_layer;                         // each layer has a total of its own
} shift_base;

// shift [n_knots, L*G] at the ratios knots [n_knots] (ascending): linear on the axis x between them, constant outside.
// out [R, L*G] receives prune ratios whose sums over all heads that share a total are the base's: all heads of the
// model, of a layer, or of a tensor-parallel rank. Caps of layers, floors and ceilings of heads hold. Rows up to the
// first one with a nonzero shift are the base's to the bit. Errors: KVB_ARGUMENT, KVB_NUMERIC, KVB_MEMORY.
kvb_status shift_table(const shift_base *base, const double *knots, uint32_t n_knots, const double *shift, double *out,
                       kvb_error *err);
