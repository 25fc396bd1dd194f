// A JSON document as text on standard output: lines "name: value", inner objects indented, a list of objects with a
// line for the plain values of each. Texts are quoted and escaped: a file may hold anything, a terminal should not get
// it.
#pragma once
#include <cjson/cJSON.h>

void document_print(const cJSON *document);
