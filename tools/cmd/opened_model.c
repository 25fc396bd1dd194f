#include "tools/cmd/opened_model.h"

kvb_status opened_model_open(opened_model *out, const char *path, const backend *b, const opened_wishes *wishes,
                             kvb_error *err)
{
    const opened_wishes none = {.watch = NULL}, *o = wishes ? wishes : &none;
    const model_options without_weights = {.without_weights = true};
    *out = (opened_model){.m = NULL};
    kvb_status status = model_open(&out->m, path, b, &without_weights, err);
    model *m = out->m;
    if (status == KVB_OK) status = model_text_open(&out->text, m->source, m->config.vocabulary, &o->text, err);
    if (status == KVB_OK) status = model_identify(m, o->watch, err);
    if (status == KVB_OK) status = model_load(m, m->config.n_layers + 1, err);
    if (status != KVB_OK) opened_model_close(out);
    return status;
}

void opened_model_close(opened_model *o)
{
    model_text_close(&o->text);
    model_free(o->m);
    *o = (opened_model){.m = NULL};
}
