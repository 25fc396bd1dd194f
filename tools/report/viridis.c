#include "tools/report/viridis.h"
#include <math.h>

// Eleven even steps; straight lines between them stay within what the eye can tell.
static const viridis_rgb STEPS[VIRIDIS_LAST + 1] = {{68, 1, 84},    {72, 36, 117},  {65, 68, 135},  {53, 95, 141},
                                                    {42, 120, 142}, {33, 145, 140}, {34, 168, 132}, {68, 191, 112},
                                                    {122, 209, 81}, {189, 223, 38}, {253, 231, 37}};

viridis_rgb viridis_at(double position)
{
    double x = fmin(1, fmax(0, position)) * VIRIDIS_LAST;
    int i = (int)fmin(VIRIDIS_LAST - 1, floor(x));
    double t = x - i;
    viridis_rgb a = STEPS[i], b = STEPS[i + 1];
    return (viridis_rgb){(int)lround(a.r + t * (b.r - a.r)), (int)lround(a.g + t * (b.g - a.g)),
                         (int)lround(a.b + t * (b.b - a.b))};
}

bool viridis_is_light(viridis_rgb c)
{
    return 299 * c.r + 587 * c.g + 114 * c.b > 1000 * 128;
}
