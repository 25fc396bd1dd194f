// What `kvbudget learn` tells of a fit.
#pragma once
#include "study/learn.h"

// Plain metrics, the best sets, and the settings of the chosen one, with their losses on texts left out.
void print_learned(const learned *l, const char *name);
// The same and all trials, as a JSON object; the caller owns it.
cJSON *learned_to_json(const learned *l, const char *name);
