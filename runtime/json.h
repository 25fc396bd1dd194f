// JSON text inside a file. cJSON reads it; the functions here check what cJSON is lenient about. Not part of the public
// API.
#pragma once
#include "kvbudget.h"

#include <stdbool.h>

struct cJSON;

// cJSON_ParseWithLengthOpts() in the locale "C", for JSON of any type. Returns NULL if the text is not JSON, with *end
// at the fault, or if malloc failed, with *no_memory set: cJSON does not distinguish the two, but malloc sets errno.
// `end` and `no_memory` may be NULL.
struct cJSON *kvb_json_parse(const char *text, size_t size, const char **end, bool *no_memory);

// Reads a JSON object of `size` bytes; only white space may follow it. The locale makes no difference. Fails, with
// messages that begin "NAME: PLACE: ", with
//   KVB_FORMAT  if the text is not a JSON object, with the place; has a NUL byte or \u0000, at which cJSON would end a
//               string; is not UTF-8; or has a key twice in one object, of which cJSON would take the first
//   KVB_MEMORY  if malloc failed (known by errno: cJSON reports it as damaged text)
// *out is then NULL. The caller frees it with cJSON_Delete. Takes up to 40 bytes of memory for each byte of text.
kvb_status kvb_json_object(struct cJSON **out, const char *text, size_t size, const char *name, const char *place,
                           kvb_error *err);
