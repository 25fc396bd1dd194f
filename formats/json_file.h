// Writing JSON: whole files, and sealed lines of logs.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stdbool.h>

// Writes a value as text with a newline at its end, atomically. If `value` is NULL, it fails with KVB_MEMORY, since
// making it must have failed.
kvb_status json_write(const char *path, const cJSON *value, kvb_error *err);

// Makes a number with all its digits: cJSON leaves out the 16th and 17th if it thinks they do not matter, and then
// reading gives other bits. NaN and infinity become null. Returns NULL if there is no memory.
cJSON *json_exact(double x);
bool json_add_exact(cJSON *object, const char *name, double x);

// Adds members to an object: json_put(o, "metric %s ratio %g bound %g", metric, ratio, bound). A name has up to 63
// characters and no blank; %g, %u and %zu are numbers (NaN and infinity print as null), %d is true or false, %s a text.
void json_put(cJSON *object, const char *members, ...) __attribute__((format(printf, 2, 3)));

// Prints an object, which must have members, on one line that ends with a newline. Its last member, "sha256", is the
// hash of the line up to the comma before it. The caller frees it.
char *json_sealed_line(const cJSON *object);
// Tells whether a line, given without its newline, ends with the hash of the text before it.
bool json_line_holds(const char *line, size_t size);
