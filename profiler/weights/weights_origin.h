// What weights are, in words that other programs which hold them can check: every file's hash, and where they came
// from.
#pragma once
#include "runtime/kvbudget.h"
#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct weights_file {
    char name[256]; // without its folder; what is not printable ASCII is '?'
    char sha256[65];
} weights_file;

typedef struct weights_origin {
    const char *container; // "gguf" or "safetensors"
    char hf_id[200];       // ORGANISATION/NAME, or NAME, at Hugging Face; "": not known
    char hf_revision[65];  // the commit there; "": not known
    weights_file *files;   // [n_files] all that hold weights, in the order in which they are read
    size_t n_files, room;
} weights_origin;

// Told of bytes of the weight files that are hashed, done and all; false stops it.
typedef struct weights_watch {
    bool (*hashed)(void *context, double done, double total);
    void *context;
} weights_watch;

// The parts of a hub cache's path, .../models--ORGANISATION--NAME/snapshots/COMMIT: fills id and revision and returns
// true, or leaves both as they are. `folder` is absolute.
bool origin_from_path(char id[200], char revision[65], const char *folder);
// Is it a repository's name, such as "org/name"? Paths, relative ones with '.' or more than one '/', are not.
bool origin_is_id(const char *text);
// The name in https://huggingface.co/ORGANISATION/NAME[/...]; false for any other address.
bool origin_from_url(char id[200], const char *url);

// Fills id and revision of the folder that holds the weights: a hub cache's, or one that was downloaded with a folder
// of its own (.cache/huggingface/download/FILE.metadata, whose first line is the commit). What is not known stays.
void origin_of_folder(weights_origin *o, const char *folder, const char *file);
// `path` may lead through folders.
void origin_add_file(weights_origin *o, const char *path, const char sha256[65]);
void origin_free(weights_origin *o); // leaves it zero

// Adds container, hf_id, hf_revision and model_files to a record's attributes (formats/README.md), those that are
// known.
void origin_describe(const weights_origin *o, cJSON *attributes);
