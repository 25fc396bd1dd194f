// Documents on standard output, as JSON and as text.
#pragma once
#include <cjson/cJSON.h>

// From here on a lack of memory in cJSON ends the program as need() does, so that nothing that is made of cJSON's
// objects has to be looked at.
void json_needs_memory(void);

// The document as indented text, for cJSON_free(). Bytes that are not UTF-8, as names of files may have, become '?'.
char *json_to_text(const cJSON *document);
// Prints that text and a line end.
void json_print(const cJSON *document);

// A document as text: lines "name: value", inner objects indented, a list of objects with a line for the plain values
// of each. Texts are quoted and escaped: a file may hold anything, a terminal should not get it.
void document_print(const cJSON *document);
