// Names that become file names and HDF5 links, checked the same way everywhere.
#pragma once
#include <stdbool.h>

#define CONTEXT_ID_MAX 64
#define METRIC_NAME_MAX 128

// [A-Za-z0-9_.-]{1,64}, neither "." nor ".." (these mean folders).
bool context_id_valid(const char *id);
// What the function above accepts, for messages.
#define CONTEXT_ID_RULE "1 to 64 characters A-Z a-z 0-9 _ . -"

// 1 to 128 printable ASCII characters without space and '/', not "." (HDF5 means the group itself by it).
bool metric_name_valid(const char *name);
#define METRIC_NAME_RULE "1 to 128 printable characters without space and '/'"
