// Folders of Hugging Face: the tiny model's weights written as one gives the bits of its GGUF file; settings of rotary
// positions in both forms; every fault of a folder is an error that names file and tensor; tokens that the embedding
// has no row for are harmless until a text holds one.
#include "formats/file_read.h"
#include "formats/sha256.h"
#include "profiler/forward.h"
#include "profiler/gguf.h"
#include "profiler/weights.h"
#include "profiler/weights_index.h"
#include "test_profiler_cases.h"
#include <sys/stat.h>

enum { T = 40, VOCABULARY = 300, MAX_TENSORS = 64 };

// A tensor of a folder that is to be written.
typedef struct written {
    char name[128];
    const char *dtype;
    uint64_t rows, columns; // rows 0: a vector
    float *values;
} written;

typedef struct folder {
    char path[512];
    gguf_file gguf;
    written tensors[MAX_TENSORS];
    size_t n;
} folder;

static const char CONFIG[] = "\"model_type\":\"llama\",\"num_hidden_layers\":2,\"num_attention_heads\":4,"
                             "\"num_key_value_heads\":2,\"hidden_size\":64,\"intermediate_size\":128,"
                             "\"max_position_embeddings\":4096,\"rms_norm_eps\":1e-5,\"bos_token_id\":1,"
                             "\"eos_token_id\":[2,0],\"head_dim\":null";

// transformers keeps rows of Q and K with rotary pairs half a head apart.
static void copy_rows(written *to, const gguf_tensor *from, uint32_t head)
{
    const float *values = from->data;
    uint64_t rows = from->dims[1], columns = from->dims[0];
    to->values = case_alloc(rows * columns, sizeof(float));
    for (uint64_t r = 0; r < rows; r++) {
        uint64_t in = head ? r % head : 0, source = r;
        if (head) source = r - in + (in < head / 2 ? 2 * in : 2 * (in - head / 2) + 1);
        memcpy(to->values + r * columns, values + source * columns, columns * sizeof(float));
    }
}

static void setup(void)
{
    help_setup();
    case_tiny_model(help_path("tiny.gguf"), NULL);
}

static folder folder_make(const char *name)
{
    static const struct {
        const char *gguf, *hf;
        uint32_t head;
    } names[] = {
        {"attn_q.weight", "self_attn.q_proj.weight", 16},         {"attn_k.weight", "self_attn.k_proj.weight", 16},
        {"attn_v.weight", "self_attn.v_proj.weight", 0},          {"attn_output.weight", "self_attn.o_proj.weight", 0},
        {"ffn_gate.weight", "mlp.gate_proj.weight", 0},           {"ffn_up.weight", "mlp.up_proj.weight", 0},
        {"ffn_down.weight", "mlp.down_proj.weight", 0},           {"attn_norm.weight", "input_layernorm.weight", 0},
        {"ffn_norm.weight", "post_attention_layernorm.weight", 0}};
    folder f = {.n = 0};
    snprintf(f.path, sizeof f.path, "%s", help_path(name));
    mkdir(f.path, 0755);
    help_ok(gguf_open(&f.gguf, help_path("tiny.gguf"), err));
    for (size_t i = 0; i < f.gguf.n_tensors; i++) {
        const gguf_tensor *t = &f.gguf.tensors[i];
        written *to = &f.tensors[f.n++];
        unsigned layer = 0;
        int at = 0;
        char full[128];
        uint32_t head = 0;
        snprintf(full, sizeof full, "%.*s", (int)t->name.size, t->name.data);
        if (strcmp(full, "token_embd.weight") == 0) strcpy(to->name, "model.embed_tokens.weight");
        else if (strcmp(full, "output_norm.weight") == 0) strcpy(to->name, "model.norm.weight");
        else ck_assert(sscanf(full, "blk.%u.%n", &layer, &at) == 1 && at);
        for (size_t k = 0; at && k < sizeof names / sizeof *names; k++)
            if (strcmp(full + at, names[k].gguf) == 0) {
                snprintf(to->name, sizeof to->name, "model.layers.%u.%s", layer, names[k].hf);
                head = names[k].head;
            }
        to->dtype = "F32";
        to->rows = t->n_dims == 1 ? 0 : t->dims[1];
        to->columns = t->dims[0];
        copy_rows(to, t, head);
    }
    return f;
}

static void folder_free(folder *f)
{
    for (size_t i = 0; i < f->n; i++) free(f->tensors[i].values);
    gguf_close(&f->gguf);
}

static written *tensor_of(folder *f, const char *name)
{
    for (size_t i = 0; i < f->n; i++)
        if (strcmp(f->tensors[i].name, name) == 0) return &f->tensors[i];
    ck_abort_msg("no tensor %s", name);
    return NULL;
}

// Tensors [first, end) as a safetensors file of the folder.
static void write_shard(const folder *f, const char *file, size_t first, size_t end)
{
    char *header = case_alloc(1 << 16, 1), path[1024];
    size_t size = 0, at = 0;
    size += (size_t)sprintf(header, "{");
    for (size_t i = first; i < end; i++) {
        const written *t = &f->tensors[i];
        size_t bytes = (t->rows ? t->rows : 1) * t->columns * (strcmp(t->dtype, "F32") == 0 ? 4 : 1);
        size += (size_t)sprintf(header + size, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i == first ? "" : ",", t->name,
                                t->dtype);
        if (t->rows) size += (size_t)sprintf(header + size, "%d,", (int)t->rows);
        size += (size_t)sprintf(header + size, "%d],\"data_offsets\":[%zu,%zu]}", (int)t->columns, at, at + bytes);
        at += bytes;
    }
    size += (size_t)sprintf(header + size, "}");
    snprintf(path, sizeof path, "%s/%s", f->path, file);
    FILE *out = fopen(path, "wb");
    ck_assert_ptr_nonnull(out);
    for (int b = 0; b < 8; b++) fputc((int)(size >> 8 * b & 255), out);
    fwrite(header, 1, size, out);
    for (size_t i = first; i < end; i++) {
        const written *t = &f->tensors[i];
        size_t values = (t->rows ? t->rows : 1) * t->columns;
        fwrite(t->values, strcmp(t->dtype, "F32") == 0 ? 4 : 1, values, out);
    }
    ck_assert_int_eq(fclose(out), 0);
    free(header);
}

static void write_text(const folder *f, const char *file, const char *text)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", f->path, file);
    help_spew(path, text, strlen(text));
}

// config.json with more members behind CONFIG's.
static void write_config(const folder *f, const char *more)
{
    char text[4096];
    snprintf(text, sizeof text, "{%s%s%s}", CONFIG, more[0] ? "," : "", more);
    write_text(f, "config.json", text);
}

static void write_all(const folder *f)
{
    write_config(f, "");
    write_shard(f, "model.safetensors", 0, f->n);
}

static const model_options ids_only = {.without_tokenizer = true};

static model *open_path(const char *path)
{
    model *m = NULL;
    help_ok(model_open(&m, path, &backend_cpu, &ids_only, err));
    return m;
}

static float *logits_of(const model *m)
{
    int32_t ids[T];
    forward *f;
    float *logits = case_alloc((size_t)T * VOCABULARY, sizeof *logits);
    for (int i = 0; i < T; i++) ids[i] = i * 37 % VOCABULARY;
    help_ok(forward_open(&f, m, &(forward_plan){T, 1, 1, false}, err));
    help_ok(forward_prefill(f, ids, T, NULL, NULL, logits, err));
    forward_close(f);
    return logits;
}

static void same_as_gguf(const char *path, bool same)
{
    model *gguf = open_path(help_path("tiny.gguf")), *other = open_path(path);
    float *want = logits_of(gguf), *got = logits_of(other);
    size_t n = (size_t)T * VOCABULARY;
    if (same) case_same("logits", got, want, n);
    else ck_assert(memcmp(got, want, n * sizeof *got) != 0);
    ck_assert(other->special.bos == 1 && other->special.eos == 2 && other->special.eot == 0);
    free(want), free(got);
    model_free(gguf), model_free(other);
}

START_TEST(test_a_folder_is_its_gguf)
{
    folder f = folder_make("whole");
    char path[1024];
    write_all(&f);
    same_as_gguf(f.path, true);
    snprintf(path, sizeof path, "%s/config.json", f.path);
    same_as_gguf(path, true);
    model *a = open_path(f.path), *b = open_path(path);
    ck_assert_str_eq(a->sha256, b->sha256);
    model_free(a), model_free(b);
    folder_free(&f);
}
END_TEST

START_TEST(test_shards_and_other_prefixes)
{
    folder f = folder_make("shards");
    char text[8192] = "{\"weight_map\":{", file[1024];
    for (size_t i = 0; i < f.n; i++) {
        char plain[128];
        strcpy(plain, f.tensors[i].name);
        snprintf(f.tensors[i].name, sizeof f.tensors[i].name, "model.language_model.%.90s", plain + strlen("model."));
        sprintf(text + strlen(text), "%s\"%s\":\"%s.safetensors\"", i ? "," : "", f.tensors[i].name, i < 7 ? "a" : "b");
    }
    strcat(text, "}}");
    write_config(&f, "");
    write_text(&f, "model.safetensors.index.json", text);
    write_shard(&f, "a.safetensors", 0, 7);
    write_shard(&f, "b.safetensors", 7, f.n);
    same_as_gguf(f.path, true);
    write_shard(&f, "b.safetensors", 8, f.n);
    model *m = NULL;
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_FORMAT,
               "shards/model.safetensors.index.json expects there");
    snprintf(file, sizeof file, "%s/b.safetensors", f.path);
    remove(file);
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_IO, "b.safetensors");
    write_text(&f, "model.safetensors.index.json", "{\"weight_map\":{\"x\":\"../tiny.gguf\"}}");
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_FORMAT,
               "tensor x: names the file '../tiny.gguf', expected a file of the folder");
    write_text(&f, "model.safetensors.index.json", "{\"weight_map\":[]}");
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_FORMAT, "expected an object weight_map");
    write_text(&f, "model.safetensors.index.json", "{\"weight_map\":{\"x\":3}}");
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_FORMAT, "tensor x: expected a file's name");
    write_text(&f, "model.safetensors.index.json", "{\"weight_map\":{\"x\":\"a\",\"x\":\"b\"}}");
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_FORMAT, "model.safetensors.index.json");
    write_text(&f, "model.safetensors.index.json", "{\"weight_map\":{\"x\":\"a\"}");
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_FORMAT, "model.safetensors.index.json");
    folder_free(&f);
}
END_TEST

// transformers 5 writes rope_parameters; 4 rope_scaling and rope_theta. The GGUF has theta 10000 and no scaling.
START_TEST(test_rotary_settings_in_both_forms)
{
    static const struct {
        const char *old_form, *new_form;
    } cases[] = {
        {"\"rope_theta\":500000", "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":500000}"},
        {"\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.0}",
         "\"rope_parameters\":{\"rope_type\":\"linear\",\"factor\":2.0,\"rope_theta\":10000.0}"},
        {"\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,"
         "\"original_max_position_embeddings\":16},\"rope_theta\":10000",
         "\"rope_parameters\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,"
         "\"original_max_position_embeddings\":16,\"rope_theta\":10000}"},
    };
    folder f = folder_make("rotary");
    write_all(&f);
    write_config(&f, "\"rope_theta\":10000.0,\"rope_scaling\":null");
    same_as_gguf(f.path, true);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_config(&f, cases[i].old_form);
        same_as_gguf(f.path, false);
        model *m = open_path(f.path);
        float *want = logits_of(m);
        model_free(m);
        write_config(&f, cases[i].new_form);
        m = open_path(f.path);
        float *got = logits_of(m);
        case_same("logits", got, want, (size_t)T * VOCABULARY);
        free(want), free(got);
        model_free(m);
    }
    folder_free(&f);
}
END_TEST

START_TEST(test_wrong_configs)
{
    static const struct {
        const char *more;
        kvb_status status;
        const char *text;
    } cases[] = {
        {"\"rope_scaling\":{\"type\":\"odd\"}", KVB_UNSUPPORTED, "rotary scaling is 'odd'"},
        {"\"rope_scaling\":{\"type\":3}", KVB_FORMAT, "type: expected a text"},
        {"\"rope_parameters\":{\"rope_type\":\"linear\",\"factor\":-1}", KVB_FORMAT, "factor is -1"},
        {"\"rope_parameters\":{\"rope_type\":\"longrope\",\"short_factor\":[1],\"long_factor\":[1]}", KVB_FORMAT,
         "short_factor: expected 8 positive numbers"},
        {"\"rope_parameters\":{\"rope_theta\":0}", KVB_FORMAT, "rotary base 0"},
        {"\"sliding_window\":128", KVB_UNSUPPORTED, "a sliding window of 128 positions"},
        {"\"num_local_experts\":8", KVB_UNSUPPORTED, "has 8 experts"},
        {"\"attention_bias\":true", KVB_FORMAT, "model.layers.0.self_attn.q_proj.bias is missing, expected [1, 64]"},
        {"\"tie_word_embeddings\":false", KVB_FORMAT, "lm_head.weight is missing, expected [300, 64]"},
        {"\"sliding_window\":\"wide\"", KVB_FORMAT, "sliding_window: expected a number"},
        {"\"partial_rotary_factor\":3", KVB_UNSUPPORTED, "rotary size 48"},
    };
    folder f = folder_make("configs");
    model *m = NULL;
    write_all(&f);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_config(&f, cases[i].more);
        help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), cases[i].status, cases[i].text);
    }
    write_text(&f, "config.json", "{\"model_type\":\"unheard_of\"}");
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_UNSUPPORTED,
               "model_type is 'unheard_of', expected llama, mistral, ministral3, qwen2");
    write_text(&f, "config.json", "{\"model_type\":\"llama\"}");
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_FORMAT, "lacks num_hidden_layers");
    write_text(&f, "config.json", "{\"architectures\":[]}");
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_FORMAT, "model_type is missing");
    write_text(&f, "config.json", "{\"model_type\":");
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_FORMAT, "expected a JSON object");
    write_config(&f, "");
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_IO, "tokenizer.json");
    folder_free(&f);
}
END_TEST

// A config alone gives a model's numbers and what its weights would take, the same as with them; it is no model.
START_TEST(test_config_alone)
{
    folder f = folder_make("alone");
    model *bare = NULL, *whole = NULL;
    weights *w = NULL;
    const model_options plan = {.without_tokenizer = true, .without_weights = true, .for_plan = true};
    write_config(&f, "\"vocab_size\":300,\"tie_word_embeddings\":true,\"torch_dtype\":\"float32\"");
    help_fails(model_open(&bare, f.path, &backend_cpu, NULL, err), KVB_IO, "model.safetensors");
    help_ok(weights_open_config(&w, f.path, err));
    ck_assert(!weights_has_tensors(w) && weights_default_type(w) == GGUF_TENSOR_F32);
    weights_close(w);
    help_ok(model_open(&bare, f.path, &backend_cpu, &plan, err));
    write_shard(&f, "model.safetensors", 0, f.n);
    help_ok(weights_open_config(&w, f.path, err));
    ck_assert(weights_has_tensors(w));
    weights_close(w);
    help_ok(model_open(&whole, f.path, &backend_cpu, &plan, err));
    ck_assert_uint_eq(bare->config.vocabulary, VOCABULARY);
    ck_assert_int_eq(memcmp(&bare->config, &whole->config, sizeof bare->config), 0);
    for (uint32_t held = 0; held <= bare->config.n_layers + 1; held++) {
        ck_assert_uint_eq(model_weight_bytes(bare, held), model_weight_bytes(whole, held));
        ck_assert_uint_eq(model_mapped_bytes(bare, held), model_mapped_bytes(whole, held));
    }
    model_free(bare), model_free(whole);
    write_config(&f, "\"vocab_size\":300,\"dtype\":\"bfloat16\"");
    help_ok(weights_open_config(&w, f.path, err));
    ck_assert_uint_eq(weights_default_type(w), GGUF_TENSOR_BF16);
    weights_close(w);
    folder_free(&f);
}
END_TEST

START_TEST(test_wrong_tensors)
{
    folder f = folder_make("tensors");
    model *m = NULL;
    write_all(&f);
    written *t = tensor_of(&f, "model.layers.1.mlp.up_proj.weight");
    t->dtype = "F8_E4M3";
    write_shard(&f, "model.safetensors", 0, f.n);
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_UNSUPPORTED,
               "model.layers.1.mlp.up_proj.weight: type F8_E4M3 cannot be read");
    t->dtype = "F32";
    strcpy(t->name, "model.layers.1.mlp.other.weight");
    write_shard(&f, "model.safetensors", 0, f.n);
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_FORMAT,
               "model.layers.1.mlp.up_proj.weight is missing, expected [128, 64]");
    strcpy(t->name, "model.layers.1.mlp.up_proj.weight");
    t->values[5] = NAN;
    write_shard(&f, "model.safetensors", 0, f.n);
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_NUMERIC,
               "model.layers.1.mlp.up_proj.weight: value 5 of 8192 is not finite");
    t->values[5] = 0;
    t->rows /= 2, t->columns *= 2;
    write_shard(&f, "model.safetensors", 0, f.n);
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_FORMAT,
               "has shape [64, 128], expected [128, 64]");
    t->rows *= 2, t->columns /= 2;
    f.tensors[f.n] = (written){"model.layers.0.self_attn.sinks", "F32", 0, 4, case_alloc(4, sizeof(float))};
    f.n++;
    write_shard(&f, "model.safetensors", 0, f.n);
    help_fails(model_open(&m, f.path, &backend_cpu, &ids_only, err), KVB_UNSUPPORTED,
               "tensor 'model.layers.0.self_attn.sinks' is not part of the llama architecture with 2 layers");
    folder_free(&f);
}
END_TEST

// A shard that is cut short or has a flipped bit in its header is refused by name, or is the same model.
START_TEST(test_damaged_shards)
{
    folder f = folder_make("damaged");
    char path[1024];
    write_all(&f);
    snprintf(path, sizeof path, "%s/model.safetensors", f.path);
    size_t size;
    unsigned char *whole = help_slurp(path, &size);
    uint64_t header = whole[0] | (uint64_t)whole[1] << 8;
    kvb_error said;
    for (size_t cut = 0; cut < size; cut += cut < header + 64 ? 61 : size / 9) {
        help_spew(path, whole, cut);
        model *m = NULL;
        ck_assert_msg(model_open(&m, f.path, &backend_cpu, &ids_only, &said) != KVB_OK, "cut to %zu bytes", cut);
        ck_assert_msg(strstr(said.message, "model.safetensors"), "cut to %zu bytes: %s", cut, said.message);
    }
    unsigned refused = 0, same = 0;
    for (size_t at = 0; at < header; at += 7) {
        whole[at] ^= 1u << at % 8;
        help_spew(path, whole, size);
        model *m = NULL;
        if (model_open(&m, f.path, &backend_cpu, &ids_only, &said) == KVB_OK) same++;
        else refused += strstr(said.message, f.path) || strstr(said.message, "model.");
        model_free(m);
        whole[at] ^= 1u << at % 8;
    }
    ck_assert_msg(refused > 9 * same && refused + same == (header + 6) / 7, "%u refused by name, %u the same, of %u",
                  refused, same, (unsigned)(header + 6) / 7);
    free(whole);
    folder_free(&f);
}
END_TEST

START_TEST(test_index_and_config_from_bytes)
{
    weights_index x;
    static const char index[] = "{\"metadata\":{},\"weight_map\":{\"p\":\"a.st\",\"q\":\"b.st\",\"r\":\"a.st\"}}";
    help_ok(weights_index_parse(&x, index, sizeof index - 1, "index", err));
    ck_assert(x.n_files == 2 && strcmp(x.files[0], "a.st") == 0 && strcmp(x.files[1], "b.st") == 0);
    weights_index_free(&x);
    help_fails(weights_index_parse(&x, "{\"weight_map\":{}}", 17, "index", err), KVB_FORMAT, "with tensors");
    help_fails(weights_index_read(&x, "/none/index", err), KVB_IO, "/none/index");
    char config[1024];
    weights *w;
    model_config c;
    const struct family *f;
    snprintf(config, sizeof config, "{%s,\"vocab_size\":300}", CONFIG);
    help_ok(weights_from_config(&w, "bytes", config, strlen(config), err));
    help_ok(model_read_config(&c, &f, w, err));
    ck_assert(c.n_layers == 2 && c.head_dim == 16 && c.vocabulary == 300);
    weights_close(w);
    help_fails(weights_from_config(&w, "bytes", config, strlen(config) - 1, err), KVB_FORMAT, "bytes: byte");
    ck_assert_ptr_null(w);
}
END_TEST

// ---- where weights are from ----

START_TEST(test_names_at_the_hub)
{
    static const struct {
        const char *path, *id, *revision; // id NULL: not a hub cache's
    } cases[] = {
        {"/c/hub/models--org--some-name/snapshots/0123456789abcdef0123456789abcdef01234567", "org/some-name",
         "0123456789abcdef0123456789abcdef01234567"},
        {"/c/models--gpt2/snapshots/0123456789abcdef0123456789abcdef01234567/sub", "gpt2",
         "0123456789abcdef0123456789abcdef01234567"},
        {"/c/hub/models--org--name/snapshots/main", NULL, NULL},
        {"/c/hub/models--org--name/blobs", NULL, NULL},
        {"/c/hub/models--org na/snapshots/0123456789abcdef0123456789abcdef01234567", NULL, NULL},
        {"/home/me/model", NULL, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char id[200] = "", revision[65] = "";
        ck_assert_int_eq(origin_from_path(id, revision, cases[i].path), cases[i].id != NULL);
        ck_assert_str_eq(id, cases[i].id ? cases[i].id : "");
        ck_assert_str_eq(revision, cases[i].id ? cases[i].revision : "");
    }
    ck_assert(origin_is_id("org/name-1.0_b") && !origin_is_id("name") && !origin_is_id("./name") &&
              !origin_is_id("/org/name") && !origin_is_id("a/b/c") && !origin_is_id("org/"));
    char id[200] = "";
    ck_assert(origin_from_url(id, "https://huggingface.co/org/name/tree/main"));
    ck_assert_str_eq(id, "org/name");
    ck_assert(!origin_from_url(id, "https://example.com/org/name") && !origin_from_url(id, "https://huggingface.co/o"));
}
END_TEST

START_TEST(test_identity)
{
    static const char commit[] = "0123456789abcdef0123456789abcdef01234567";
    char cache[512], path[1024], line[128];
    snprintf(cache, sizeof cache, "models--org--name/snapshots/%s", commit);
    mkdir(help_path("models--org--name"), 0755), mkdir(help_path("models--org--name/snapshots"), 0755);
    folder f = folder_make(cache);
    write_all(&f);
    model *m = open_path(f.path);
    ck_assert_str_eq(m->origin.hf_id, "org/name");
    ck_assert_str_eq(m->origin.hf_revision, commit);
    ck_assert_str_eq(m->config.name, "org/name");
    ck_assert(m->origin.n_files == 1 && strcmp(m->origin.container, "safetensors") == 0);
    ck_assert_str_eq(m->origin.files[0].name, "model.safetensors");
    char sha256[65];
    file_view view;
    snprintf(path, sizeof path, "%s/model.safetensors", f.path);
    help_ok(file_map(&view, path, err));
    help_ok(sha256_hex(view.data, view.size, sha256, err));
    file_unmap(&view);
    ck_assert_str_eq(m->origin.files[0].sha256, sha256);
    cJSON *a = cJSON_CreateObject();
    ck_assert(origin_describe(&m->origin, a));
    char want[256];
    snprintf(want, sizeof want, "{\"model.safetensors\":\"%s\"}", sha256);
    ck_assert_str_eq(cJSON_GetObjectItem(a, "model_files")->valuestring, want);
    ck_assert_str_eq(cJSON_GetObjectItem(a, "hf_revision")->valuestring, commit);
    cJSON_Delete(a);
    model_free(m);
    folder_free(&f);

    f = folder_make("downloaded"); // a folder of its own, as `hf download --local-dir` makes it
    write_all(&f);
    write_config(&f, "\"_name_or_path\":\"org/other\"");
    snprintf(path, sizeof path, "%s", f.path);
    static const char *const parts[] = {"/.cache", "/huggingface", "/download"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) mkdir(strcat(path, parts[i]), 0755);
    strcat(path, "/config.json.metadata");
    snprintf(line, sizeof line, "%s\netag\n1.0\n", commit);
    help_spew(path, line, strlen(line));
    m = open_path(f.path);
    ck_assert_str_eq(m->origin.hf_id, "org/other");
    ck_assert_str_eq(m->origin.hf_revision, commit);
    model_free(m);
    write_config(&f, "");
    remove(path);
    m = open_path(f.path);
    ck_assert(!m->origin.hf_id[0] && !m->origin.hf_revision[0]);
    ck_assert_str_eq(m->config.name, "downloaded");
    model_free(m);
    folder_free(&f);
}
END_TEST

// ---- tokens that the embedding has no row for ----

// Token 299 has the last row, 300 and 301 have none.
#define TOKENIZER                                                                                           \
    "{\"normalizer\":null,\"pre_tokenizer\":null,\"added_tokens\":[{\"id\":299,\"content\":\"<last>\"},"    \
    "{\"id\":300,\"content\":\"<extra>\"},{\"id\":301,\"content\":\"<bos>\",\"special\":true}],\"model\":{" \
    "\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[]}}"

START_TEST(test_tokens_without_a_row)
{
    folder f = folder_make("tokens");
    model *m = NULL;
    int32_t *ids;
    size_t n;
    write_all(&f);
    write_text(&f, "tokenizer.json", TOKENIZER);
    write_text(&f, "tokenizer_config.json", "{\"bos_token\":\"<bos>\",\"eos_token\":\"<extra>\"}");
    help_ok(model_open(&m, f.path, &backend_cpu, NULL, err));
    ck_assert(tokenizer_size(m->tokens) == 302 && m->special.bos == -1 && m->special.eos == -1);
    help_ok(model_encode(m, TEXT_ALONE, "ab<last>", 8, &ids, &n, err));
    ck_assert(n == 3 && ids[0] == 0 && ids[1] == 1 && ids[2] == 299);
    free(ids);
    help_fails(model_encode(m, TEXT_ALONE, "a<extra>", 8, &ids, &n, err), KVB_ARGUMENT,
               "token 1 of the text is \"<extra>\" with id 300, but the embedding has 300 rows");
    ck_assert(!ids && n == 0);
    model_free(m);
    write_text(&f, "tokenizer_config.json", "{\"bos_token\":\"<bos>\",\"add_bos_token\":true}");
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_FORMAT, "texts begin with token 301 (BOS)");
    folder_free(&f);
}
END_TEST

static void fill(TCase *tc)
{
    tcase_add_unchecked_fixture(tc, setup, help_teardown);
    tcase_add_test(tc, test_a_folder_is_its_gguf);
    tcase_add_test(tc, test_shards_and_other_prefixes);
    tcase_add_test(tc, test_rotary_settings_in_both_forms);
    tcase_add_test(tc, test_wrong_configs);
    tcase_add_test(tc, test_wrong_tensors);
    tcase_add_test(tc, test_config_alone);
    tcase_add_test(tc, test_damaged_shards);
    tcase_add_test(tc, test_index_and_config_from_bytes);
    tcase_add_test(tc, test_names_at_the_hub);
    tcase_add_test(tc, test_identity);
    tcase_add_test(tc, test_tokens_without_a_row);
}

UNIT_MAIN("profiler weights", fill)
