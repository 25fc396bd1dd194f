// What `kvbudget learn` reports about a fit.
#pragma once
#include "study/learn.h"

// Prints plain metrics, the best sets, and the settings of the chosen one, with their losses on texts left out.
void print_learned(const learned *l, const char *name);
// Returns the same and all trials as a JSON object, which the caller frees.
cJSON *learned_to_json(const learned *l, const char *name);
