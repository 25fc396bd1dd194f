// The colour scale of all heat maps: viridis (van der Walt and Smith, public domain). Equal steps look equally large,
// also to colour-blind readers and in grey.
#pragma once
#include <stdbool.h>

typedef struct viridis_rgb {
    int r, g, b; // 0 .. 255
} viridis_rgb;

enum { VIRIDIS_LAST = 10 }; // steps between which the scale is a straight line

viridis_rgb viridis_at(double position); // 0 (dark) .. 1 (light); beyond: the ends
bool viridis_is_light(viridis_rgb c);    // whether dark text can be read on it
