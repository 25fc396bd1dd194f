// Damaged and hostile model files: each is refused with a message that names file and place, or opens; none crashes.
#include "profiler/weights/gguf.h"
#include "test_profiler_cases.h"

// The tiny model's bytes, and where its parts are in them.
typedef struct patient {
    unsigned char *data;
    size_t size;
    gguf_file file;
} patient;

static patient patient_open(void)
{
    patient p;
    p.data = help_slurp(help_path("tiny.gguf"), &p.size);
    help_ok(gguf_parse(&p.file, p.data, p.size, "tiny", err));
    return p;
}

static void patient_close(patient *p)
{
    gguf_close(&p->file);
    free(p->data);
}

// Opens the first `size` bytes as a model file; they must be refused with a message that names file and `text`.
static void refused(const patient *p, size_t size, kvb_status status, const char *text)
{
    model *m = NULL;
    kvb_error err = {0};
    help_spew(help_path("bad.gguf"), p->data, size);
    kvb_status got = model_open(&m, help_path("bad.gguf"), &backend_cpu, NULL, &err);
    ck_assert_ptr_null(m);
    ck_assert_msg(got != KVB_OK && (got == status || status == KVB_OK), "%s: %s, expected %s: %s", text,
                  kvb_status_name(got), kvb_status_name(status), err.message);
    ck_assert_msg(strstr(err.message, "bad.gguf") && strstr(err.message, text), "no '%s' in: %s", text, err.message);
}

static unsigned char *bytes_at(const void *place)
{
    return (unsigned char *)(uintptr_t)place;
}

UNIT_TEST(test_wrong_shapes)
{
    patient p = patient_open();
    for (size_t i = 0; i < p.file.n_tensors; i++) {
        const gguf_tensor *t = &p.file.tensors[i];
        bool matrix = t->n_dims == 2, embedding = gguf_string_is(t->name, "token_embd.weight");
        unsigned char *dims = bytes_at(t->name.data + t->name.size + 4), *at = matrix && !embedding ? dims + 8 : dims;
        uint64_t right = matrix && !embedding ? t->dims[1] : t->dims[0], wrong = right / 2;
        char text[200], name[64];
        snprintf(name, sizeof name, "%.*s", (int)t->name.size, t->name.data);
        if (embedding) snprintf(text, sizeof text, "tensor %s has shape [300, 32], expected [1 to 16777216, 64]", name);
        else if (matrix)
            snprintf(text, sizeof text, "tensor %s has shape [%d, %d], expected [%d, %d]", name, (int)wrong,
                     (int)t->dims[0], (int)right, (int)t->dims[0]);
        else snprintf(text, sizeof text, "tensor %s has shape [1, 32], expected [1, 64]", name);
        memcpy(at, &wrong, sizeof wrong);
        refused(&p, p.size, KVB_FORMAT, text);
        memcpy(at, &right, sizeof right);
    }
    patient_close(&p);
}

UNIT_TEST(test_weights_that_are_no_numbers)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    patient p = patient_open();
    for (size_t i = 0; i < p.file.n_tensors; i++) {
        const gguf_tensor *t = &p.file.tensors[i];
        size_t value = i * 7 % t->n_values;
        unsigned char *at = bytes_at((const char *)t->data + value * 4), saved[4];
        char text[128];
        snprintf(text, sizeof text, "tensor %.*s: value %zu of %llu is not finite", (int)t->name.size, t->name.data,
                 value, (unsigned long long)t->n_values);
        memcpy(saved, at, 4);
        memcpy(at, &bad[i % 3], 4);
        refused(&p, p.size, KVB_NUMERIC, text);
        memcpy(at, saved, 4);
    }
    patient_close(&p);
}

UNIT_TEST(test_wrong_config)
{
    static const struct {
        const char *key;
        uint32_t value;
        kvb_status status;
        const char *text;
    } cases[] = {
        {"llama.block_count", 3, KVB_FORMAT, "tensor blk.2.attn_q.weight is missing, expected [64, 64]"},
        {"llama.block_count", 1, KVB_UNSUPPORTED, "tensor 'blk.1.attn_k.weight' is not part of"},
        {"llama.block_count", 0, KVB_FORMAT, "llama.block_count is 0, expected 1 to"},
        {"llama.block_count", UINT32_MAX, KVB_FORMAT, "llama.block_count is 4294967295"},
        {"llama.attention.head_count", 3, KVB_FORMAT, "3 query heads cannot share 2 KV heads"},
        {"llama.attention.head_count", 0, KVB_FORMAT, "llama.attention.head_count is 0"},
        {"llama.attention.head_count", 8, KVB_UNSUPPORTED, "head size 8, value size 8, rotary size 16"},
        {"llama.attention.head_count_kv", 4, KVB_FORMAT, "tensor blk.0.attn_k.weight has shape [32, 64], expected"},
        {"llama.attention.head_count_kv", 0, KVB_FORMAT, "4 query heads cannot share 0 KV heads"},
        {"llama.attention.head_count_kv", 8, KVB_FORMAT, "4 query heads cannot share 8 KV heads"},
        {"llama.embedding_length", 128, KVB_UNSUPPORTED, "rotary size 16"},
        {"llama.feed_forward_length", 64, KVB_FORMAT, "tensor blk.0.ffn_gate.weight has shape [128, 64], expected"},
        {"llama.rope.dimension_count", 8, KVB_UNSUPPORTED, "rotary size 8"},
        {"llama.context_length", 0, KVB_FORMAT, "llama.context_length is 0"},
        {"llama.attention.layer_norm_rms_epsilon", 0xbf800000, KVB_FORMAT, "norm epsilon -1"},
        {"llama.rope.freq_base", 0, KVB_FORMAT, "rotary base 0"},
    };
    patient p = patient_open();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unsigned char *at = bytes_at(gguf_find(&p.file, cases[i].key)->data), saved[4];
        memcpy(saved, at, 4);
        memcpy(at, &cases[i].value, 4);
        refused(&p, p.size, cases[i].status, cases[i].text);
        memcpy(at, saved, 4);
    }
    bytes_at(gguf_find(&p.file, "general.architecture")->data)[0] = 'L';
    refused(&p, p.size, KVB_UNSUPPORTED, "general.architecture is 'Llama', expected llama");
    patient_close(&p);
}

// Any bit of metadata and tensor entries may be wrong: this gives an error or a model, never a crash.
UNIT_TEST(test_flipped_bits)
{
    patient p = patient_open();
    size_t entries = (size_t)((const unsigned char *)p.file.tensors[0].data - p.data);
    for (int i = 0; i < 300; i++) {
        size_t bit = (size_t)((case_uniform() + 1) * 0.5 * (double)(entries * 8));
        model *m = NULL;
        kvb_error err = {0};
        p.data[bit / 8] ^= (unsigned char)(1u << bit % 8);
        help_spew(help_path("bad.gguf"), p.data, p.size);
        if (model_open(&m, help_path("bad.gguf"), &backend_cpu, NULL, &err) != KVB_OK)
            ck_assert_msg(strstr(err.message, "bad.gguf") != NULL, "bit %zu: %s", bit, err.message);
        model_free(m);
        p.data[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    patient_close(&p);
}

// ---- a file that is cut short or written while it is read ----

static char victim[512];
static long cut_to; // 0: only touched
static int loads_left;
static backend cutting;

static dev_matrix cut_then_load(backend_device *on, const stored_matrix *w, unsigned hold)
{
    if (loads_left-- == 0) {
        if (cut_to) ck_assert_int_eq(truncate(victim, cut_to), 0);
        else ck_assert_int_eq(utimensat(AT_FDCWD, victim, NULL, 0), 0);
    }
    return backend_cpu.matrix_load(on, w, hold);
}

UNIT_TEST(test_file_that_is_cut_while_it_is_read)
{
    patient p = patient_open();
    snprintf(victim, sizeof victim, "%s", help_path("victim.gguf"));
    cutting = backend_cpu;
    cutting.matrix_load = cut_then_load;
    for (int when = 0; when < 15; when += 2)
        for (int how = 0; how < 3; how++) {
            model *m = NULL;
            kvb_error err = {0};
            help_spew(victim, p.data, p.size);
            loads_left = when;
            cut_to = how == 0 ? 4096 : how == 1 ? (long)p.size - 5000 : 0;
            ck_assert_int_eq(model_open(&m, victim, &cutting, NULL, &err), KVB_IO);
            ck_assert_ptr_null(m);
            ck_assert_msg(strstr(err.message, "victim.gguf") && strstr(err.message, "another program"), "%s",
                          err.message);
        }
    loads_left = 1000;
    help_spew(victim, p.data, p.size);
    model *m = NULL;
    help_ok(model_open(&m, victim, &cutting, NULL, err));
    model_free(m);
    patient_close(&p);
}

// ---- options ----

UNIT_TEST(test_no_tokenizer_where_all_ids_are_given)
{
    patient p = patient_open();
    const gguf_value *kind = gguf_find(&p.file, "tokenizer.ggml.model");
    memcpy(bytes_at(kind->data), "what", 4); // a kind that nobody knows
    help_spew(help_path("odd.gguf"), p.data, p.size);
    model *m = case_open(help_path("odd.gguf"), &backend_cpu), *with = case_open(help_path("tiny.gguf"), &backend_cpu);
    model_text text, own = case_text(with);
    const model_text_options options = {.without_tokenizer = true};
    help_fails(model_text_open(&text, m->source, m->config.vocabulary, NULL, err), KVB_UNSUPPORTED, "what");
    help_ok(model_text_open(&text, m->source, m->config.vocabulary, &options, err));
    ck_assert(!text.tokens && memcmp(&text.special, &own.special, sizeof own.special) == 0 && own.special.eos == 2);
    ck_assert(model_text_ends_answer(&text, own.special.eos) && !model_text_ends_answer(&text, own.special.bos) &&
              !model_text_ends_answer(&text, -1));
    model_text_close(&text);
    model_text_close(&own);
    model_free(m);
    model_free(with);
    patient_close(&p);
}

UNIT_TEST(test_options)
{
    model *m = NULL;
    model_text text;
    help_ok(model_open(&m, help_path("tiny.gguf"), &backend_cpu, &(model_options){.n_layers = 1}, err));
    ck_assert_uint_eq(m->config.n_layers, 1);
    help_ok(model_text_open(&text, m->source, m->config.vocabulary, &(model_text_options){.pre = "qwen2"}, err));
    ck_assert_str_eq(tokenizer_pre(text.tokens), "qwen2");
    model_text_close(&text);
    help_fails(model_text_open(&text, m->source, m->config.vocabulary, &(model_text_options){.pre = "none"}, err),
               KVB_UNSUPPORTED, "none");
    ck_assert_ptr_null(text.tokens);
    model_free(m);
    help_fails(model_open(&m, help_path("tiny.gguf"), &backend_cpu, &(model_options){.n_layers = 3}, err), KVB_ARGUMENT,
               "has 2 layers, 3 were asked for");
}

// ---- how weights are held ----

static const backend *const cpus[] = {&backend_cpu, &backend_cpu_bf16x3, &backend_cpu_bf16};

// However many groups of weights are held in memory, the numbers are the same.
UNIT_TEST(test_weights_in_place)
{
    enum { N = 70 };
    for (size_t b = 0; b < sizeof cpus / sizeof *cpus; b++) {
        model *m = case_open(help_path("tiny.gguf"), cpus[b]);
        float *want = case_logits(m, N);
        uint32_t groups = m->config.n_layers + 1;
        ck_assert_uint_eq(m->n_held, groups);
        size_t n = (size_t)N * m->config.vocabulary;
        model_free(m);
        for (uint32_t held = 0; held <= groups; held++) {
            help_ok(model_open(&m, help_path("tiny.gguf"), cpus[b], &(model_options){.without_weights = true}, err));
            help_ok(model_load(m, held, err));
            float *got = case_logits(m, N);
            case_same("logits", got, want, n);
            free(got);
            model_free(m);
        }
        free(want);
    }
}

// What is planned before weights are loaded: more groups take more memory and leave less in the file, and as many are
// chosen as fit.
UNIT_TEST(test_room_of_weights)
{
    model *m = NULL;
    const model_options o = {.without_weights = true};
    help_ok(model_open(&m, help_path("tiny.gguf"), &backend_cpu, &o, err));
    ck_assert_str_eq(m->sha256, "");
    help_ok(model_identify(m, NULL, err));
    ck_assert_uint_eq(strlen(m->sha256), 64);
    uint32_t groups = m->config.n_layers + 1;
    ck_assert_uint_eq(model_mapped_bytes(m, groups), 0);
    for (uint32_t held = 0; held <= groups; held++) {
        uint64_t bytes = model_weight_bytes(m, held);
        ck_assert_uint_eq(model_fit_weights(m, bytes), held);
        if (held == 0) continue;
        ck_assert_uint_lt(model_weight_bytes(m, held - 1), bytes);
        ck_assert_uint_gt(model_mapped_bytes(m, held - 1), model_mapped_bytes(m, held));
        ck_assert_uint_eq(model_fit_weights(m, bytes - 1), held - 1);
    }
    unit_numbers(model_made_terms(m), 0, model_context_rows(m), backend_cpu.context_rows);
    m->n_held = 1;
    ck_assert_uint_eq(model_made_terms(m), m->config.ffn_width);
    ck_assert_uint_gt(model_context_rows(m), backend_cpu.context_rows);
    model_free(m);
    help_ok(model_open(&m, help_path("tiny.gguf"), &backend_ref, &o, err)); // this backend reads nothing in place
    ck_assert_uint_eq(model_fit_weights(m, 0), groups);
    model_free(m);
}

// If another program writes the file while the model is in use, model_check reports it and the pass fails.
UNIT_TEST(test_file_that_changes_in_use)
{
    patient p = patient_open();
    help_spew(help_path("used.gguf"), p.data, p.size);
    model *m = case_open(help_path("used.gguf"), &backend_cpu);
    forward *f = NULL;
    const int32_t ids[] = {5, 6, 7};
    help_ok(model_check(m, err));
    help_ok(forward_open(&f, m, &(forward_plan){3, 1, 1, false, false, 1}, err));
    help_ok(forward_prefill(f, ids, 3, NULL, NULL, NULL, err));
    ck_assert_int_eq(utimensat(AT_FDCWD, help_path("used.gguf"), NULL, 0), 0);
    help_fails(model_check(m, err), KVB_IO, "used.gguf");
    help_fails(forward_prefill(f, ids, 3, NULL, NULL, NULL, err), KVB_IO, "another program");
    forward_close(f), model_free(m), patient_close(&p);
}

UNIT_MAIN_ONCE("profiler model", case_tiny_setup, help_teardown)
