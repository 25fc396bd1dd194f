// Documents on standard output, as JSON and as text.
#pragma once
#include <cjson/cJSON.h>

// From now on a lack of memory in cJSON ends the program as need() does, so that what cJSON returns need not be checked
// for it.
void json_needs_memory(void);

// Returns the document as indented text, to free with cJSON_free(). Bytes that are not UTF-8 (file names) become '?'.
char *json_to_text(const cJSON *document);
// Prints that text and a line end.
void json_print(const cJSON *document);

// Prints a document as text: lines "name: value", inner objects indented, a list of objects with a line for the plain
// values of each. Texts are quoted and escaped, because a terminal must not get whatever a file holds.
void document_print(const cJSON *document);
