// What commands that run a model open of it: the model and its text side.
#pragma once
#include "profiler/model/model.h"
#include "profiler/text/model_text.h"

typedef struct opened_model {
    model *m;
    model_text text;
} opened_model;

typedef struct opened_wishes {
    model_text_options text;
    const weights_watch *watch;
} opened_wishes;

// Opens all of it and loads the weights, which take longest, last. `wishes` NULL: none. On failure *out is zero.
kvb_status opened_model_open(opened_model *out, const char *path, const backend *b, const opened_wishes *wishes,
                             kvb_error *err);
void opened_model_close(opened_model *o); // leaves it zero; a zero one is allowed
