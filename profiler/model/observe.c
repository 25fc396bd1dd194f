#include "profiler/model/observe.h"
#include <math.h>

double view_scale(const layer_view *v)
{
    return v->scale > 0 ? v->scale : 1.0 / sqrt((double)v->head_dim);
}
