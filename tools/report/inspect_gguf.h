// `kvbudget inspect MODEL.gguf`: the model's part of cmd_inspect.c, kept apart since it needs the profiler's GGUF
// reader.
#pragma once
#include "runtime/kvbudget.h"
#include <stdbool.h>

// Prints the model's metadata and tensors to stdout, as text or as one JSON object. Returns a kvb_status.
int inspect_gguf(const char *path, bool json, kvb_error *err);
