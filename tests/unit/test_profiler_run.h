// What the tests of profiling runs share: two calibration lines, a job with everything that it needs, and a run that is
// watched and may be stopped.
#pragma once
#include "profiler/profile.h"
#include "test_profiler_cases.h"

#define TEXT_A "The king and the key: in the and of an old house, she went to the river. 123 1 12 and then on the way "
#define LINE_A                                                                                                        \
    "{\"sample_id\": \"a\", \"context\": \"" TEXT_A TEXT_A "again.\", \"questions\": [\"Who went?\", \"Where to?\", " \
    "\"What is the key of the old house in the text?\"]}\n"
#define LINE_B                                                                                                   \
    "{\"sample_id\": \"b\", \"context_ids\": [9,8,7,6,5,44,33,22,11,250,260,270,280,290,13,14,15,16,17,18,19], " \
    "\"question_ids\": [[100,101,102],[103]]}\n"

static inline void setup(void)
{
    help_setup();
    case_tiny_model(help_path("tiny.gguf"), NULL);
}

// ---- a job with everything that it needs ----

typedef struct profile_case {
    model *m;
    model_text text;
    calib_file file;
    metric metrics[3];
    profile_options o;
    profile_job job;
} profile_case;

static inline profile_case case_make(const char *model_file, const char *jsonl)
{
    profile_case c = {.m = case_open(help_path("%s", model_file), &backend_cpu)};
    c.text = case_text(c.m);
    help_ok(calib_parse(&c.file, jsonl, strlen(jsonl), "calib.jsonl", err));
    help_ok(metric_parse(&c.metrics[0], "snapkv:window=8", err));
    help_ok(metric_parse(&c.metrics[1], "keydiff", err));
    help_ok(metric_parse(&c.metrics[2], "ea", err));
    c.o = (profile_options){.draw = {.temperature = 0.7, .seed = 1}, .new_tokens = 6, .ignore_eos = true};
    return c;
}

static inline void case_free(profile_case *c)
{
    profile_job_free(&c->job);
    calib_free(&c->file);
    model_text_close(&c->text);
    model_free(c->m);
}

static inline void prepare(profile_case *c)
{
    profile_job_free(&c->job);
    c->o.metrics = c->metrics, c->o.n_metrics = 3;
    help_ok(profile_prepare(&c->job, c->m, &c->text, &c->file, 1, &c->o, err));
}

// What a run told its watcher; it stops the run at call number `stop_at`.
typedef struct watched {
    int calls, stop_at, messages;
    double done, total;
    char message[sizeof(kvb_error) + 100];
    kvb_error problem; // how the run ended
} watched;

static inline bool watch_progress(void *context, double done, double total)
{
    watched *w = context;
    ck_assert_msg(done >= w->done && done <= total * (1 + 1e-12), "progress: %g after %g, of %g", done, w->done, total);
    w->done = done, w->total = total;
    return ++w->calls != w->stop_at;
}

static inline void watch_message(void *context, const char *text)
{
    watched *w = context;
    w->messages++;
    snprintf(w->message, sizeof w->message, "%s", text);
}

static inline kvb_status run(const profile_case *c, const char *path, record_start start, watched *w,
                             profile_times *times)
{
    const model_config *k = &c->m->config;
    cJSON *attributes = profile_attributes(c->m, &c->job, &c->o);
    record_writer *writer;
    kvb_error problem = {0};
    ck_assert_ptr_nonnull(attributes);
    help_ok(record_begin(&writer, path, &(record_shape){k->n_layers, k->n_heads, k->n_kv_heads, k->head_dim},
                         attributes, start, err));
    profile_watch watch = {watch_progress, watch_message, w};
    profile_share all;
    help_ok(profile_share_out(&all, c->m, &c->job, NULL, 1, 0, err));
    kvb_status status = profile_run_share(c->m, &c->job, &c->o, &all, writer, w ? &watch : NULL, times, &problem);
    if (status == KVB_OK) status = profile_finish(&c->job, NULL, writer, &problem);
    profile_share_free(&all);
    ck_assert_msg(status == KVB_OK || status == KVB_INTERRUPTED, "%s", problem.message);
    if (w) w->problem = problem;
    record_writer_free(writer);
    cJSON_Delete(attributes);
    return status;
}

static inline void run_whole(profile_case *c, const char *path, profile_times *times)
{
    watched w = {0};
    prepare(c);
    ck_assert_int_eq(run(c, path, RECORD_REPLACE, &w, times), KVB_OK);
    ck_assert_double_eq_tol(w.done, w.total, 1e-9 * w.total);
}

static inline void same_file(const char *what, const char *a, const char *b)
{
    size_t na, nb;
    unsigned char *da = help_slurp(a, &na), *db = help_slurp(b, &nb);
    ck_assert_msg(na == nb && memcmp(da, db, na) == 0, "%s: other bytes", what);
    free(da);
    free(db);
}
