// A Hugging Face folder of the tiny model's weights, tensor by tensor, so that tests can damage any part of it.
#pragma once
#include "profiler/weights/gguf.h"
#include "test_profiler_cases.h"

enum { VOCABULARY = 300, MAX_TENSORS = 64 };

// A tensor that is to be written to the folder.
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

// Copies a tensor. With `head`, rows of Q or K are put in transformers' order: rotary pairs are half a head apart.
static inline void copy_rows(written *to, const gguf_tensor *from, uint32_t head)
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

static inline void folder_setup(void)
{
    help_setup();
    case_tiny_model(help_path("tiny.gguf"), NULL);
}

static inline folder folder_make(const char *name)
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
        to->dtype = "F32", to->rows = t->n_dims == 1 ? 0 : t->dims[1], to->columns = t->dims[0];
        copy_rows(to, t, head);
    }
    return f;
}

static inline void folder_free(folder *f)
{
    for (size_t i = 0; i < f->n; i++) free(f->tensors[i].values);
    gguf_close(&f->gguf);
}

static inline written *tensor_of(folder *f, const char *name)
{
    for (size_t i = 0; i < f->n; i++)
        if (strcmp(f->tensors[i].name, name) == 0) return &f->tensors[i];
    ck_abort_msg("no tensor %s", name);
    return NULL;
}

// Writes tensors [first, end) as a safetensors file of the folder.
static inline void write_shard(const folder *f, const char *file, size_t first, size_t end)
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

static inline void write_text(const folder *f, const char *file, const char *text)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", f->path, file);
    help_spew(path, text, strlen(text));
}

// Writes config.json with more members after CONFIG's.
static inline void write_config(const folder *f, const char *more)
{
    char text[4096];
    snprintf(text, sizeof text, "{%s%s%s}", CONFIG, more[0] ? "," : "", more);
    write_text(f, "config.json", text);
}

static inline void write_all(const folder *f)
{
    write_config(f, "");
    write_shard(f, "model.safetensors", 0, f->n);
}

static inline model *open_path(const char *path)
{
    model *m = NULL;
    help_ok(model_open(&m, path, &backend_cpu, NULL, err));
    return m;
}
