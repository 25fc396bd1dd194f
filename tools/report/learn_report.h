// What `kvbudget learn` reports about a fit.
#pragma once
#include "study/learn.h"

// Prints the losses on texts left out of each metric's own order and of the fit, and the fit's settings.
void print_learned(const learned *l, const char *name);
// Returns the same and all trials as a JSON object, which the caller frees.
cJSON *learned_to_json(const learned *l, const char *name);
