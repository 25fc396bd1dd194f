// The inputs of eval, refine and recommend: the texts, and what is compared on them.
#include "formats/calib.h"
#include "formats/file_read.h"
#include "formats/need.h"
#include "formats/npy.h"
#include "formats/sha256.h"
#include "profiler/text/utf8.h"
#include "profiler/weights/weights.h"
#include "runtime/fail.h"
#include "runtime/text.h"
#include "tools/cmd/eval_command.h"
#include "tools/device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void take_ids(eval_inputs *e, const char *name, const int32_t *ids, size_t n)
{
    const model_text *own = &e->opened.text;
    bool bos = strcmp(e->bos, "yes") == 0 || (strcmp(e->bos, "auto") == 0 && model_text_begins_with_bos(own));
    size_t most = e->n_tokens + e->n_next, shift = bos && own->special.bos >= 0;
    e->texts = need_more(e->texts, e->n_texts + 1, sizeof *e->texts, "texts");
    e->origin = need_more(e->origin, e->n_texts + 1, sizeof *e->origin, "texts");
    e->origin[e->n_texts] = e->reading;
    sweep_text *t = &e->texts[e->n_texts++];
    *t = (sweep_text){.n_ids = (uint32_t)(n + shift < most ? n + shift : most)};
    t->ids = need(t->n_ids, sizeof *t->ids, "token ids");
    snprintf(t->name, sizeof t->name, "%s", name);
    if (shift) t->ids[0] = own->special.bos;
    if (t->n_ids > shift) memcpy(t->ids + shift, ids, (t->n_ids - shift) * sizeof *ids);
    sha256_hex(t->ids, t->n_ids * sizeof *t->ids, t->sha256);
}

static kvb_status encode_text(eval_inputs *e, const char *name, const char *text, size_t size, kvb_error *err)
{
    const char *nul = memchr(text, '\0', size);
    if (nul)
        return kvb_fail(err, KVB_FORMAT,
                        "%s: byte %zu is 0, expected text, found %s; a table's name ends in .safetensors, and of a "
                        "record `kvbudget solve` makes tables",
                        name, (size_t)(nul - text), kvb_kind_name(kvb_kind_of_file(text, size)));
    int32_t *ids = NULL;
    size_t n = 0;
    kvb_status status = utf8_check_text(name, text, size, err);
    if (status == KVB_OK) status = model_text_encode(&e->opened.text, TEXT_CONTEXT, text, size, &ids, &n, err);
    if (status == KVB_OK) take_ids(e, name, ids, n);
    free(ids);
    return status;
}

static kvb_status read_npy_ids(eval_inputs *e, const char *path, const file_view *view, kvb_error *err)
{
    npy_array a;
    kvb_status status = npy_parse(&a, view->data, view->size, path, err);
    int32_t *ids = status == KVB_OK ? need(a.count, sizeof *ids, "token ids") : NULL;
    if (status == KVB_OK) status = npy_to_i32(&a, ids, path, err);
    if (status == KVB_OK) take_ids(e, path, ids, a.count);
    free(ids);
    return status;
}

static kvb_status take_contexts(eval_inputs *e, const calib_file *file, kvb_error *err)
{
    kvb_status status = KVB_OK;
    for (size_t i = 0; status == KVB_OK && i < file->count; i++) {
        const calib_context *c = &file->contexts[i];
        if (c->context) status = encode_text(e, c->sample_id, c->context, strlen(c->context), err);
        else take_ids(e, c->sample_id, c->context_ids, c->n_context_ids);
    }
    return status;
}

static kvb_status read_calibration(eval_inputs *e, const char *path, kvb_error *err)
{
    calib_file file;
    kvb_status status = calib_load(&file, path, err);
    if (status == KVB_OK) status = take_contexts(e, &file, err);
    calib_free(&file);
    return status;
}

static kvb_status read_eval_text(eval_inputs *e, const char *path, kvb_error *err)
{
    const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    if (kvb_ends_with(path, ".jsonl")) return read_calibration(e, path, err);
    file_view view;
    kvb_status status = file_map(&view, path, err);
    if (status != KVB_OK) return status;
    status = kvb_ends_with(path, ".npy") ? read_npy_ids(e, path, &view, err)
                                         : encode_text(e, name, (const char *)view.data, view.size, err);
    if (status == KVB_OK) status = file_check(&view, path, err);
    file_unmap(&view);
    return status;
}

static kvb_status check_texts(const eval_inputs *e, kvb_error *err)
{
    const sweep_text *t = e->texts;
    for (size_t i = 0; i < e->n_texts; i++) {
        for (size_t k = 0; k < i; k++)
            if (strcmp(t[i].sha256, t[k].sha256) == 0)
                return kvb_fail(err, KVB_ARGUMENT, "%s and %s begin with the same tokens: a text counts once",
                                t[k].name, t[i].name);
        for (uint32_t j = 0; j < t[i].n_ids; j++)
            if (t[i].ids[j] < 0 || (uint32_t)t[i].ids[j] >= e->m->config.vocabulary)
                return kvb_fail(err, KVB_ARGUMENT, "%s: token %u: id %d, expected 0 to %u", t[i].name, j, t[i].ids[j],
                                e->m->config.vocabulary - 1);
        if (t[i].n_ids < e->n_tokens + e->n_next)
            return kvb_fail(err, KVB_ARGUMENT,
                            "%s: %u tokens, expected at least %llu of context and %llu to continue with; use a longer "
                            "text or a smaller --tokens",
                            t[i].name, t[i].n_ids, (unsigned long long)e->n_tokens, (unsigned long long)e->n_next);
    }
    return KVB_OK;
}

int eval_check_lengths(const eval_command *e)
{
    const eval_inputs *in = &e->in;
    if (in->n_tokens >= 1 && in->n_tokens <= 1 << 24 && in->n_next >= 2 && in->n_next <= 65536) return EXIT_DONE;
    return cli_usage_error(e->self, "--tokens: expected 1 to 16777216; --next: 2 to 65536");
}

int eval_open_inputs(eval_command *e, char **operands, size_t n)
{
    kvb_error err = {0};
    int code = methods_read_ratios(&e->with);
    if (code != EXIT_DONE) return code;
    size_t n_texts = 0;
    for (size_t i = 1; i < n; i++) n_texts += !methods_is_table(operands[i]);
    if (!n_texts) return cli_usage_error(e->self, "no text is given: any text file, or .jsonl with contexts");
    opened_wishes wishes = {.text = {.without_tokenizer = true, .pre = e->in.pre}};
    for (size_t i = 1; i < n; i++)
        wishes.text.without_tokenizer &= methods_is_table(operands[i]) || kvb_ends_with(operands[i], ".npy");
    progress bar;
    wishes.watch = &(weights_watch){progress_hashed, &bar};
    progress_begin(&bar, "hash of the model", e->out.quiet);
    kvb_status status = opened_model_open(&e->in.opened, operands[0], e->in.device, &wishes, &err);
    e->in.m = e->in.opened.m;
    progress_clear(&bar);
    if (status == KVB_OK) status = methods_open(&e->with, e->in.m, operands + 1, n - 1, false, &err);
    if (status == KVB_OK) status = methods_set_texts(&e->with, &e->in.opened.text, e->in.chat, e->in.special, &err);
    if (status == KVB_OK && !e->with.n_columns)
        status = kvb_fail(&err, KVB_ARGUMENT, "there is nothing to compare: give a table, or --allocator");
    for (size_t i = 1; i < n && status == KVB_OK; i++) {
        e->in.reading = i;
        if (!methods_is_table(operands[i])) status = read_eval_text(&e->in, operands[i], &err);
    }
    if (status == KVB_OK) status = check_texts(&e->in, &err);
    return status == KVB_OK ? EXIT_DONE : cli_failed(e->self, &err);
}

int eval_check_operands(const cli_command *self, int n)
{
    return n >= 3 ? EXIT_DONE
                  : cli_usage_error(self, "a model, a table and texts are needed: kvbudget %s", self->synopsis);
}

int eval_open_table(eval_command *e, char **operands, size_t n, const char *ratios)
{
    size_t n_tables = 0;
    for (size_t i = 1; i < n; i++) n_tables += methods_is_table(operands[i]);
    if (n_tables != 1) return cli_usage_error(e->self, "%zu tables (.safetensors) are given, expected one", n_tables);
    e->with.allocator_names = (cli_list){need_copy(&(const char *){"none"}, 1, sizeof(char *), "names"), 1};
    if (!e->with.ratio_names.count)
        e->with.ratio_names = (cli_list){need_copy(&ratios, 1, sizeof ratios, "lists of ratios"), 1};
    cli_catch_signals();
    int code = device_take_threads(e->self, e->threads);
    return code == EXIT_DONE ? eval_open_inputs(e, operands, n) : code;
}

void eval_free_inputs(eval_command *e)
{
    methods_free(&e->with);
    for (size_t i = 0; i < e->in.n_texts; i++) free(e->in.texts[i].ids);
    free_all(e->in.texts, e->in.origin);
    opened_model_close(&e->in.opened);
}
