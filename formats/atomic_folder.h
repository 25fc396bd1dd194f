// Folders of files that appear whole or not at all: they are filled under another name beside it and renamed.
#pragma once
#include "runtime/kvbudget.h"

typedef struct atomic_folder {
    char *temp_path;  // where to put the files: DIR.<8 hex digits>.partial
    char *final_path; // DIR, with a symbolic link resolved
    int lock;         // tells others that the writer lives
} atomic_folder;

// `dir` must not exist, or be an empty folder. What killed writers of `dir` left is removed. On failure *f holds
// nothing. Errors: KVB_ARGUMENT (not empty, no folder), KVB_IO, KVB_MEMORY.
kvb_status atomic_folder_begin(atomic_folder *f, const char *dir, kvb_error *err);
// Puts it in place when `status` is KVB_OK, else removes it. Returns `status`, or what went wrong here.
kvb_status atomic_folder_end(atomic_folder *f, kvb_status status, kvb_error *err);
