// JSON on standard output: the one place that prints it.
#pragma once
#include <cjson/cJSON.h>

// From here on a lack of memory in cJSON ends the program as need() does, so that nothing that is made of cJSON's
// objects has to be looked at.
void json_needs_memory(void);

// The document as indented text, for cJSON_free(). Bytes that are not UTF-8, as names of files may have, become '?'.
char *json_text(const cJSON *document);
// Prints that text and a line end.
void json_print(const cJSON *document);
