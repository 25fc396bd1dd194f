// JSON text inside of a file: cJSON reads it, and here is made sure of what cJSON is generous about. Not part of the
// public API.
#pragma once
#include "kvbudget.h"

#include <stdbool.h>

struct cJSON;

// cJSON_ParseWithLengthOpts() in the locale "C", for texts of any kind. NULL: not JSON, *end then being the place; or,
// where *no_memory is set, malloc failed (it says so by errno), which cJSON does not tell apart. Both may be NULL.
struct cJSON *kvb_json_parse(const char *text, size_t size, const char **end, bool *no_memory);

// Reads a JSON object of `size` bytes, followed by nothing but spaces. The same in every locale. Fails, with messages
// that begin "NAME: PLACE: ", with
//   KVB_FORMAT  not a JSON object, with the place; a NUL byte or \u0000, at which cJSON would end a string; bytes that
//               are not UTF-8; a key that one object has twice, of which cJSON would take the first
//   KVB_MEMORY  malloc failed (it says so by errno), which cJSON tells in no other way than a damaged text
// *out is then NULL. The caller frees it with cJSON_Delete. Takes up to 40 bytes of memory for each byte of text.
kvb_status kvb_json_object(struct cJSON **out, const char *text, size_t size, const char *name, const char *place,
                           kvb_error *err);
