// Loss curves from other programs: what is made of them, and every way in which they can be wrong.
#include "formats/curves_file.h"
#include "formats_help.h"

// A file of two contexts, one layer and two heads with ten tokens: a sink, eight to choose from, and the window.
typedef struct curves_case {
    const char *metadata, *loss, *kept, *type; // type of kept
    kvb_status status;
    const char *message;
} curves_case;

#define WHOLE "\"method\":\"mine\",\"n_tokens\":\"10\",\"sink\":\"1\",\"window\":\"1\""
#define LOSS "[2,1,2,3]"
static const double sound[12] = {8, 4, 0, 6, 0, 0, 1, 1, 0.5, 3, 2, 1};

static size_t make_file(unsigned char *out, const curves_case *k, const double *loss, const int32_t *kept)
{
    const char *type = k->type ? k->type : "I32";
    unsigned bytes = strcmp(type, "I32") == 0 ? 12 : 24;
    double wide[3] = {kept[0] + 0.5, kept[1], kept[2]};
    char text[600];
    int n = snprintf(text, sizeof text,
                     "{\"__metadata__\":{%s},\"loss\":{\"dtype\":\"F64\",\"shape\":%s,\"data_offsets\":[0,96]},"
                     "\"%s\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[96,%u]}}",
                     k->metadata ? k->metadata : WHOLE, k->loss ? k->loss : LOSS, k->kept ? k->kept : "kept", type,
                     96 + bytes);
    uint64_t size = (uint64_t)n;
    memcpy(out, &size, 8);
    memcpy(out + 8, text, size);
    memcpy(out + 8 + size, loss, 96);
    memcpy(out + 8 + size + 96, bytes == 12 ? (const void *)kept : wide, bytes);
    return 8 + size + 96 + bytes;
}

UNIT_TEST(importance_of_curves)
{
    unsigned char file[900];
    curves_file c;
    float got[20];
    const curves_case plain = {.metadata = NULL};
    help_ok(curves_parse(&c, file, make_file(file, &plain, sound, (const int32_t[]){2, 6, 8}), "x", err));
    ck_assert(c.n_contexts == 2 && c.n_layers == 1 && c.n_kv_heads == 2 && c.n_budgets == 3 && c.n_tokens == 10);
    ck_assert_str_eq(c.method, "mine");
    // A budget begins with sink and window, so its third token is at position 1. The last two exceed a budget of 8.
    const float first[20] = {0, 1, 1, 1, 1, 2, 2, 0, 0, 0, 0, 1.5F, 1.5F, 1.5F, 1.5F, 0, 0, 0, 0, 0};
    const float second[20] = {0, 0,     0,     0,     0,     0.25F, 0.25F, 0.25F, 0.25F, 0,
                              0, 0.25F, 0.25F, 0.25F, 0.25F, 0.5F,  0.5F,  0.5F,  0.5F,  0};
    curves_importance(&c, 0, got);
    ck_assert_mem_eq(got, first, sizeof got);
    curves_importance(&c, 1, got);
    ck_assert_mem_eq(got, second, sizeof got);
    curves_free(&c);
}

UNIT_TEST(a_record)
{
    unsigned char file[900];
    const curves_case plain = {.metadata = NULL};
    size_t size = make_file(file, &plain, sound, (const int32_t[]){2, 6, 8});
    help_spew(help_path("c.safetensors"), file, size);
    cJSON *more = cJSON_CreateObject();
    cJSON_AddStringToObject(more, "model_id", "tiny");
    const lukv_steps_options o = {.n_heads = 4, .head_dim = 8, .attributes = more};
    help_ok(curves_import(help_path("c.safetensors"), help_path("run.h5"), &o, err));
    help_fails(curves_import(help_path("c.safetensors"), help_path("run.h5"), &o, err), KVB_MISMATCH, "run.h5");
    record *r;
    float got[20];
    help_ok(record_open(&r, help_path("run.h5"), err));
    const record_context_info *c = record_context(r, 1);
    ck_assert(record_context_count(r) == 2 && c->n_tokens == 10 && c->n_questions == 1 && c->n_metrics == 1);
    ck_assert(record_find(r, "1") == 1 && record_find(r, "2") == record_context_count(r));
    unit_strings(c->id, "1", c->metrics[0], "mine");
    ck_assert_str_eq(cJSON_GetObjectItem(record_attributes(r), "metrics")->valuestring,
                     "{\"mine\":{\"protect_sink\":1,\"protect_window\":1}}");
    ck_assert_str_eq(cJSON_GetObjectItem(record_attributes(r), "model_id")->valuestring, "tiny");
    help_ok(record_read_scores(r, 1, "mine", got, err));
    for (int i = 0; i < 20; i++) ck_assert(got[i] == (float)-(i % 10));
    record_close(r);
    cJSON_Delete(more);
}

UNIT_TEST(mistakes)
{
    static const struct {
        curves_case file;
        int at; // this loss, or 100 + this budget, becomes `to`
        double to;
    } all[] = {
        {{.metadata = "\"n_tokens\":\"10\"", .status = KVB_FORMAT, .message = "\"method\": expected a name"}, -1, 0},
        {{.metadata = "\"method\":\"a b\",\"n_tokens\":\"10\"", .status = KVB_FORMAT, .message = "\"method\""}, -1, 0},
        {{.metadata = "\"method\":\"a\"", .status = KVB_FORMAT, .message = "\"n_tokens\": expected"}, -1, 0},
        {{.metadata = "\"method\":\"a\",\"n_tokens\":\"-1\"", .status = KVB_FORMAT, .message = "\"n_tokens\""}, -1, 0},
        {{.metadata = "\"method\":\"a\",\"n_tokens\":\"4294967306\"", .status = KVB_FORMAT, .message = "whole"}, -1, 0},
        {{.metadata = WHOLE ",\"sink\":\"1\"", .status = KVB_FORMAT, .message = "sink"}, -1, 0}, // twice
        {{.metadata = "\"method\":\"a\",\"n_tokens\":\"10\",\"sink\":\"9\",\"window\":\"1\"",
          .status = KVB_FORMAT,
          .message = "nothing of 10 tokens"},
         -1,
         0},
        {{.metadata = "\"method\":\"a\",\"n_tokens\":\"536870912\",\"sink\":\"2\"",
          .status = KVB_FORMAT,
          .message = "below 2^30"},
         -1,
         0},
        {{.metadata = "\"method\":\"a\",\"n_tokens\":\"10\"", .status = KVB_FORMAT, .message = "at most 0 "}, -1, 0},
        {{.loss = "[12]", .status = KVB_FORMAT, .message = "expected loss"}, -1, 0},
        {{.loss = "[3,2,2]", .status = KVB_FORMAT, .message = "expected loss"}, -1, 0},
        {{.loss = "[1,1,1,1,12]", .status = KVB_FORMAT, .message = "\"loss\" [contexts"}, -1, 0},
        {{.kept = "keep", .status = KVB_FORMAT, .message = "\"kept\" [budgets]"}, -1, 0},
        {{.type = "U64", .status = KVB_FORMAT, .message = "of F32, F64"}, -1, 0},
        {{.type = "F64", .status = KVB_FORMAT, .message = "found 2.5 as number 0"}, -1, 0},
        {{.status = KVB_FORMAT, .message = "found 3 as number 0"}, 100, 3},
        {{.status = KVB_FORMAT, .message = "found -1 as number 0"}, 100, -1},
        {{.status = KVB_FORMAT, .message = "found 2 as number 1"}, 101, 2},
        {{.status = KVB_FORMAT, .message = "found 11 as number 2"}, 102, 11},
        {{.status = KVB_NUMERIC, .message = "context 1, layer 0, KV head 0: 1 with 6 tokens and 2 with 8"}, 8, 2},
        {{.status = KVB_NUMERIC, .message = "context 0, layer 0, KV head 0: 8 with 2 tokens and nan"}, 1, NAN},
        {{.status = KVB_NUMERIC, .message = "KV head 1: -6 with 2"}, 3, -6},
        {{.status = KVB_NUMERIC, .message = "never rise"}, 3, 1e39},
        {{.status = KVB_NUMERIC, .message = "KV head 0: 0.5 with 10 tokens"}, 102, 10},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        unsigned char file[900];
        curves_file c;
        double loss[12];
        int32_t kept[3] = {2, 6, 8};
        memcpy(loss, sound, sizeof loss);
        if (all[i].at >= 100) kept[all[i].at - 100] = (int32_t)all[i].to;
        else if (all[i].at >= 0) loss[all[i].at] = all[i].to;
        size_t size = make_file(file, &all[i].file, loss, kept);
        help_fails(curves_parse(&c, file, size, "x", err), all[i].file.status, all[i].file.message);
        ck_assert(!c.loss && !c.kept);
    }
}

UNIT_MAIN_EACH("formats_curves", help_setup, help_teardown)
