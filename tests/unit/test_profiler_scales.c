// FP8 weights of folders: values and their products with scales have the bits that torch makes of them
// (tests/golden/make_fp8.py); a folder with FP8 is the one that has the products; every fault names file and tensor.
#include "folder_case.h"
#include "formats/file_read.h"
#include "profiler/weights/dequant.h"
#include "profiler/weights/weights.h"

// ---- The values ----

enum { ROWS = 16, COLUMNS = 37, DOWN = 5, ACROSS = 8, N_SCALES = 4 * 5 }; // of make_fp8.py

UNIT_TEST(test_every_value_is_torchs)
{
    file_view view;
    uint8_t bytes[256];
    float got[256], want[256];
    help_ok(file_map(&view, "tests/golden/fp8.bin", err));
    memcpy(want, view.data, sizeof want);
    for (int i = 0; i < 256; i++) bytes[i] = (uint8_t)i;
    dequant_e4m3(bytes, 256, got);
    for (int i = 0; i < 256; i++)
        ck_assert_msg(isnan(want[i]) ? isnan(got[i]) : memcmp(&got[i], &want[i], sizeof *got) == 0,
                      "byte %d: expected %.9g, got %.9g", i, (double)want[i], (double)got[i]);
    ck_assert(isnan(got[0x7f]) && isnan(got[0xff]) && got[0x7e] == 448);
    file_unmap(&view);
}

static void judge_rows(const stored_matrix *w, const float *want)
{
    float row[COLUMNS];
    for (uint32_t r = 0; r < w->out; r++) {
        ck_assert(stored_rows(w, r, 1, row));
        case_same("row", row, want + (size_t)r * COLUMNS, COLUMNS);
        for (uint32_t first = 0; first < COLUMNS; first += 3) {
            uint32_t n = COLUMNS - first < 11 ? COLUMNS - first : 11;
            ck_assert(stored_slice(w, r, first, n, row));
            case_same("slice", row, want + (size_t)r * COLUMNS + first, n);
        }
    }
}

// Scales go with the row that the file has: where a matrix begins inside of the tensor, and where rows stand in pairs.
UNIT_TEST(test_products_are_torchs)
{
    file_view view;
    help_ok(file_map(&view, "tests/golden/fp8.bin", err));
    const unsigned char *codes = view.data + 256 * sizeof(float), *scales = codes + ROWS * COLUMNS,
                        *halves = scales + N_SCALES * sizeof(float), *products = halves + N_SCALES * 2;
    static float want[2][ROWS * COLUMNS];
    memcpy(want, products, sizeof want);
    ck_assert_ptr_eq(products + sizeof want, view.data + view.size);
    stored_matrix w = {.type = STORED_F8_E4M3, .data = codes, .out = ROWS, .in = COLUMNS};
    w.scales = (stored_scales){GGUF_TENSOR_F32, scales, DOWN, ACROSS, 0};
    judge_rows(&w, want[0]);
    w.scales = (stored_scales){GGUF_TENSOR_BF16, halves, DOWN, ACROSS, 0};
    judge_rows(&w, want[1]);
    w.data = codes + (size_t)7 * COLUMNS, w.out = ROWS - 7, w.scales.first = 7; // as parts of fused projections begin
    judge_rows(&w, want[1] + (size_t)7 * COLUMNS);

    float row[COLUMNS];
    w = (stored_matrix){.type = STORED_F8_E4M3, .data = codes, .out = ROWS, .in = COLUMNS, .paired = 8, .turned = 6};
    w.scales = (stored_scales){GGUF_TENSOR_F32, scales, DOWN, ACROSS, 0};
    static const uint32_t in_file[8] = {0, 2, 4, 1, 3, 5, 6, 7};
    for (uint32_t r = 0; r < ROWS; r++) {
        ck_assert(stored_rows(&w, r, 1, row));
        case_same("row of a pair", row, want[0] + (size_t)(r / 8 * 8 + in_file[r % 8]) * COLUMNS, COLUMNS);
    }
    uint32_t values = 9, bytes = 9;
    stored_type_block(STORED_F8_E4M3, &values, &bytes);
    ck_assert(values == 1 && bytes == 1);
    stored_type_block(GGUF_TENSOR_Q8_0, &values, &bytes);
    ck_assert(values == 32 && bytes == 34);
    file_unmap(&view);
}

// ---- Folders ----

enum { T = 24 };

// How a form writes its scales: rows and columns of a block, 0: all of them; and whether the shape is [rows] alone.
typedef struct form {
    const char *config, *ending;
    uint32_t rows, columns;
    bool in_line;
} form;

#define FP8(block) "\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":" block "}"
#define GROUPS(weights)                                                                                  \
    "\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":\"float-quantized\",\"" \
    "config_groups\":{\"group_0\":{\"weights\":{" weights "}}}}"
#define FLOATS "\"num_bits\":8,\"type\":\"float\""

static const form FORMS[] = {
    {FP8("[24,40]"), "_scale_inv", 24, 40, false},                       // Qwen3
    {FP8("null"), "_scale_inv", 0, 0, true},                             // Ministral 3
    {GROUPS(FLOATS ",\"strategy\":\"tensor\""), "_scale", 0, 0, false},  // [1, 1]
    {GROUPS(FLOATS ",\"strategy\":\"channel\""), "_scale", 1, 0, false}, // [rows, 1]
    {GROUPS(FLOATS ",\"strategy\":\"channel\""), "_scale", 1, 0, true},  // [rows]
    {GROUPS(FLOATS ",\"strategy\":\"block\",\"block_structure\":[16,16]"), "_scale", 16, 16, false},
};
enum { N_FORMS = sizeof FORMS / sizeof *FORMS };

static written *add_tensor(folder *f, const char *name, const char *ending, const char *dtype, size_t bytes)
{
    written *t = &f->tensors[f->n++];
    ck_assert(f->n <= MAX_TENSORS);
    *t = (written){.dtype = dtype, .values = case_alloc(bytes, 1)};
    snprintf(t->name, sizeof t->name, "%.100s%s", name, ending);
    return t;
}

// Makes the layers' matrices FP8 with scales; `plain`, the same folder, gets the products in float32.
static void quantise(folder *f, folder *plain, const form *how)
{
    uint32_t state = 5;
    size_t n = f->n;
    for (size_t i = 0; i < n; i++) {
        written *t = &f->tensors[i];
        if (!strstr(t->name, "proj")) continue;
        size_t rows = how->rows ? how->rows : t->rows, columns = how->columns ? how->columns : t->columns;
        size_t down = (t->rows + rows - 1) / rows, across = (t->columns + columns - 1) / columns;
        written *s = add_tensor(f, t->name, how->ending, "F32", down * across * sizeof(float));
        s->rows = how->in_line ? 0 : down;
        s->columns = how->in_line ? down : across;
        for (size_t k = 0; k < down * across; k++) s->values[k] = 1e-3f * (float)(k % 7 + 1);
        uint8_t *codes = (uint8_t *)t->values;
        t->dtype = "F8_E4M3";
        float *products = tensor_of(plain, t->name)->values;
        for (size_t k = 0; k < t->rows * t->columns; k++) {
            state = state * 1664525u + 1013904223u;
            codes[k] = (uint8_t)((state >> 24 & 0x80) | (state >> 16) % 0x7f);
            float value;
            dequant_e4m3(&codes[k], 1, &value);
            products[k] = value * s->values[k / t->columns / rows * across + k % t->columns / columns];
        }
    }
}

static void save(const folder *f, const char *config)
{
    write_config(f, config);
    write_shard(f, "model.safetensors", 0, f->n);
}

static float *logits_of(const char *path, const backend *b)
{
    model *m = case_open(path, b);
    float *logits = case_logits(m, T);
    model_free(m);
    return logits;
}

// Engines' scales of activations and caches stand beside the weights' and change nothing here.
UNIT_TEST(test_fp8_is_its_products)
{
    const backend *const backends[] = {&backend_ref, &backend_cpu, &backend_cpu_bf16};
    for (int i = 0; i < N_FORMS; i++) {
        folder f = folder_make("stored"), plain = folder_make("products");
        quantise(&f, &plain, &FORMS[i]);
        add_tensor(&f, "model.layers.0.self_attn.q_proj.input_scale", "", "F32", 4)->columns = 1;
        add_tensor(&f, "model.layers.0.self_attn.k_scale", "", "F32", 4)->columns = 1;
        save(&f, FORMS[i].config);
        save(&plain, "");
        for (size_t b = 0; b < sizeof backends / sizeof *backends; b++) {
            float *got = logits_of(f.path, backends[b]), *want = logits_of(plain.path, backends[b]);
            case_same(FORMS[i].config, got, want, (size_t)T * VOCABULARY);
            free(got), free(want);
        }
        folder_free(&f), folder_free(&plain);
    }
}

// What a config alone says of the types; test_profiler_weights.c compares what every family takes then.
UNIT_TEST(test_types_of_a_config)
{
    folder f = folder_make("plan"), plain = folder_make("unused");
    char config[512];
    weights *w;
    quantise(&f, &plain, &FORMS[0]);
    snprintf(config, sizeof config, "\"vocab_size\":300,\"tie_word_embeddings\":true,\"dtype\":\"float32\",%s",
             FORMS[0].config);
    write_config(&f, config);
    help_ok(weights_open_config(&w, f.path, err));
    ck_assert(weights_layer_type(w) == STORED_F8_E4M3 && weights_default_type(w) == GGUF_TENSOR_F32);
    ck_assert(!weights_experts_are_mxfp4(w));
    weights_close(w);
    help_ok(weights_open_config(&w, "tests/golden/families/gpt-oss-mxfp4/config.json", err));
    ck_assert(weights_experts_are_mxfp4(w) && weights_layer_type(w) == GGUF_TENSOR_BF16);
    weights_close(w);
    folder_free(&f), folder_free(&plain);
}

// ---- Faults ----

static void refused(const folder *f, const char *config, kvb_status status, const char *text)
{
    model *m = NULL;
    save(f, config);
    help_fails(model_open(&m, f->path, &backend_cpu, NULL, err), status, text);
}

UNIT_TEST(test_wrong_scales)
{
    static const char weight[] = "model.layers.1.mlp.up_proj.weight",
                      scale[] = "model.layers.1.mlp.up_proj.weight_scale_inv";
    folder f = folder_make("faults"), plain = folder_make("unused");
    const char *config = FORMS[0].config;
    weight_tensor t;
    weights *w;
    quantise(&f, &plain, &FORMS[0]);
    written *s = tensor_of(&f, scale), *stored = tensor_of(&f, weight);
    ck_assert(s->rows == 6 && s->columns == 2);
    save(&f, config);
    help_ok(weights_open(&w, f.path, err));
    ck_assert(weights_find(w, weight, &t));
    help_ok(weights_find_scales(w, &t, err));
    ck_assert(t.scales.data && t.scales.rows == 24 && t.scales.columns == 40 && t.scales.type == GGUF_TENSOR_F32);
    weights_close(w);

    strcpy(s->name, "model.layers.1.mlp.up_proj.weight_other");
    refused(&f, config, KVB_FORMAT,
            "model.safetensors: tensor model.layers.1.mlp.up_proj.weight is FP8 and has no scales, expected a tensor "
            "model.layers.1.mlp.up_proj.weight_scale_inv or");
    strcpy(s->name, scale);
    refused(&f, FP8("[24,30]"), KVB_FORMAT, "weight_scale_inv has shape [3, 2], expected [3, 3]");
    refused(&f, FP8("null"), KVB_FORMAT, "expected [64, 1] or one value");
    s->rows = 2, s->columns = 6;
    refused(&f, config, KVB_FORMAT, "model.layers.1.mlp.up_proj.weight_scale_inv has shape [2, 6], expected [6, 2]");
    s->rows = 6, s->columns = 2;
    s->dtype = "U8";
    refused(&f, config, KVB_UNSUPPORTED, "up_proj.weight_scale_inv: scales of type U8, expected F32, F16 or BF16");
    s->dtype = "F32";
    s->values[7] = NAN;
    refused(&f, config, KVB_NUMERIC, "up_proj.weight_scale_inv: scale 7 of 12 is not finite");
    s->values[7] = 1;
    ((uint8_t *)stored->values)[130] = 0x7f;
    refused(&f, config, KVB_NUMERIC, "up_proj.weight: value 130 of 8192 is not finite");
    ((uint8_t *)stored->values)[130] = 0;
    s = tensor_of(&f, "model.layers.0.mlp.up_proj.weight_scale_inv");
    strcpy(s->name, "model.layers.0.mlp.up_proj.weight_zero_point");
    tensor_of(&f, "model.layers.0.mlp.up_proj.weight")->dtype = "U8";
    refused(&f, config, KVB_UNSUPPORTED, "model.layers.0.mlp.up_proj.weight: type U8 cannot be read");
    folder_free(&f), folder_free(&plain);
}

UNIT_TEST(test_wrong_quantisation)
{
    static const struct {
        const char *config;
        kvb_status status;
        const char *text;
    } cases[] = {
        {"\"quantization_config\":{\"quant_method\":\"gptq\"}", KVB_UNSUPPORTED,
         "quant_method is 'gptq', expected fp8, compressed-tensors or mxfp4"},
        {"\"quantization_config\":{}", KVB_UNSUPPORTED, "config.json: quantization_config: quant_method is 'missing'"},
        {"\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":\"pack-quantized\"}",
         KVB_UNSUPPORTED, "format is 'pack-quantized', expected float-quantized"},
        {GROUPS("\"num_bits\":4,\"type\":\"float\""), KVB_UNSUPPORTED, "group_0: expected weights of type float"},
        {GROUPS("\"num_bits\":8,\"type\":\"int\""), KVB_UNSUPPORTED, "group_0: expected weights of type float"},
        {FP8("[128]"), KVB_FORMAT, "weight_block_size: expected rows and columns of a block"},
        {FP8("[0,128]"), KVB_FORMAT, "weight_block_size"},
        {FP8("[1.5,128]"), KVB_FORMAT, "weight_block_size"},
        {FP8("[1,1e9]"), KVB_FORMAT, "weight_block_size"},
        {FP8("[\"1\",1]"), KVB_FORMAT, "weight_block_size"},
        {GROUPS(FLOATS ",\"block_structure\":[16,16]}},\"group_1\":{\"weights\":{" FLOATS
                       ",\"block_structure\":[16,8]"),
         KVB_FORMAT, "block_structure: expected rows and columns of a block, the same for all"},
    };
    folder f = folder_make("methods");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refused(&f, cases[i].config, cases[i].status, cases[i].text);
    model_free((save(&f, "\"quantization_config\":null"), open_path(f.path)));
    folder_free(&f);
}

UNIT_MAIN_ONCE("profiler scales", folder_setup, help_teardown)
