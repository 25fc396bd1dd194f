// A model as commands open it: its weights, and what turns texts into its token ids.
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

// Opens both, and loads the weights last, since they take longest. `wishes` may be NULL. On failure *out is zero. The
// caller closes it.
kvb_status opened_model_open(opened_model *out, const char *path, const backend *b, const opened_wishes *wishes,
                             kvb_error *err);
void opened_model_close(opened_model *o); // a zero struct is allowed; leaves it zero
