// Hugging Face folders: the tiny model's weights, written as a folder, give the bits of its GGUF file; settings of
// rotary positions in both forms; every fault of config and tensors is an error that names file and tensor.
#include "folder_case.h"
#include "profiler/text/model_text.h"
#include "profiler/weights/weights.h"
#include <dirent.h>

enum { T = 40 };

static void same_as_gguf(const char *path, bool same)
{
    model *gguf = open_path(help_path("tiny.gguf")), *other = open_path(path);
    float *want = case_logits(gguf, T), *got = case_logits(other, T);
    size_t n = (size_t)T * VOCABULARY;
    if (same) case_same("logits", got, want, n);
    else ck_assert(memcmp(got, want, n * sizeof *got) != 0);
    model_text text;
    const model_text_options ids_alone = {.without_tokenizer = true};
    help_ok(model_text_open(&text, other->source, VOCABULARY, &ids_alone, err));
    ck_assert(text.special.bos == 1 && text.special.eos == 2 && text.special.eot == 0);
    model_text_close(&text);
    free(want);
    free(got);
    model_free(gguf);
    model_free(other);
}

UNIT_TEST(test_a_folder_is_its_gguf)
{
    folder f = folder_make("whole");
    char path[1024];
    write_all(&f);
    same_as_gguf(f.path, true);
    snprintf(path, sizeof path, "%s/config.json", f.path);
    same_as_gguf(path, true);
    model *a = open_path(f.path), *b = open_path(path);
    ck_assert_str_eq(a->sha256, b->sha256);
    model_free(a);
    model_free(b);
    folder_free(&f);
}

UNIT_TEST(test_shards_and_other_prefixes)
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
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_FORMAT,
               "shards/model.safetensors.index.json expects there");
    snprintf(file, sizeof file, "%s/b.safetensors", f.path);
    remove(file);
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_IO, "b.safetensors");
    write_text(&f, "model.safetensors.index.json", "{\"weight_map\":{\"x\":\"../tiny.gguf\"}}");
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_FORMAT,
               "tensor x: names the file '../tiny.gguf', expected a file of the folder");
    write_text(&f, "model.safetensors.index.json", "{\"weight_map\":[]}");
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_FORMAT, "expected an object weight_map");
    write_text(&f, "model.safetensors.index.json", "{\"weight_map\":{\"x\":3}}");
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_FORMAT, "tensor x: expected a file's name");
    write_text(&f, "model.safetensors.index.json", "{\"weight_map\":{\"x\":\"a\",\"x\":\"b\"}}");
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_FORMAT, "model.safetensors.index.json");
    write_text(&f, "model.safetensors.index.json", "{\"weight_map\":{\"x\":\"a\"}");
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_FORMAT, "model.safetensors.index.json");
    folder_free(&f);
}

// transformers 5 writes rope_parameters; 4 rope_scaling and rope_theta. The GGUF has theta 10000 and no scaling.
UNIT_TEST(test_rotary_settings_in_both_forms)
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
        float *want = case_logits(m, T);
        model_free(m);
        write_config(&f, cases[i].new_form);
        m = open_path(f.path);
        float *got = case_logits(m, T);
        case_same("logits", got, want, (size_t)T * VOCABULARY);
        free(want);
        free(got);
        model_free(m);
    }
    folder_free(&f);
}

UNIT_TEST(test_wrong_configs)
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
        help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), cases[i].status, cases[i].text);
    }
    write_text(&f, "config.json", "{\"model_type\":\"unheard_of\"}");
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_UNSUPPORTED,
               "model_type is 'unheard_of', expected llama, mistral, ministral3, qwen2");
    write_text(&f, "config.json", "{\"model_type\":\"llama\"}");
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_FORMAT, "lacks num_hidden_layers");
    write_text(&f, "config.json", "{\"architectures\":[]}");
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_FORMAT, "model_type is missing");
    write_text(&f, "config.json", "{\"model_type\":");
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_FORMAT, "expected a JSON object");
    write_config(&f, "");
    model_text text;
    m = open_path(f.path);
    help_fails(model_text_open(&text, m->source, VOCABULARY, NULL, err), KVB_IO, "tokenizer.json");
    model_free(m);
    folder_free(&f);
}

// A config alone gives a model's numbers and the size of its weights, as with the weights; but it is no model.
UNIT_TEST(test_config_alone)
{
    folder f = folder_make("alone");
    model *bare = NULL, *whole = NULL;
    weights *w = NULL;
    const model_options plan = {.without_weights = true, .for_plan = true};
    write_config(&f, "\"vocab_size\":300,\"tie_word_embeddings\":true,\"torch_dtype\":\"float32\"");
    help_fails(model_open(&bare, f.path, &backend_cpu, NULL, err), KVB_IO, "model.safetensors");
    help_ok(weights_open(&w, f.path, true, err));
    ck_assert(w->n_names == 0 && weights_default_type(w) == GGUF_TENSOR_F32);
    weights_close(w);
    help_ok(model_open(&bare, f.path, &backend_cpu, &plan, err));
    write_shard(&f, "model.safetensors", 0, f.n);
    help_ok(weights_open(&w, f.path, true, err));
    ck_assert(w->n_names > 0);
    weights_close(w);
    help_ok(model_open(&whole, f.path, &backend_cpu, &plan, err));
    unit_numbers(bare->config.vocabulary, VOCABULARY, memcmp(&bare->config, &whole->config, sizeof bare->config), 0);
    model_free(bare);
    model_free(whole);
    write_config(&f, "\"vocab_size\":300,\"dtype\":\"bfloat16\"");
    help_ok(weights_open(&w, f.path, true, err));
    ck_assert_uint_eq(weights_default_type(w), GGUF_TENSOR_BF16);
    weights_close(w);
    folder_free(&f);
}

// The same for every family, each with the type of its own file.
UNIT_TEST(test_config_alone_of_every_family)
{
    static const char families[] = "tests/golden/families";
    const model_options plan = {.without_weights = true, .for_plan = true};
    DIR *all = opendir(families);
    unsigned n = 0;
    ck_assert_ptr_nonnull(all);
    for (struct dirent *one; (one = readdir(all));) {
        char path[512], copy[512];
        size_t size;
        model *bare = NULL, *whole = NULL;
        if (one->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s/config.json", families, one->d_name);
        snprintf(copy, sizeof copy, "%s", help_path("config.json"));
        unsigned char *text = help_slurp(path, &size);
        help_spew(copy, text, size);
        free(text);
        help_ok(model_open(&bare, copy, &backend_cpu, &plan, err));
        help_ok(model_open(&whole, path, &backend_cpu, &plan, err));
        for (uint32_t held = 0; held <= bare->config.n_layers + 1; held++) {
            ck_assert_msg(model_weight_bytes(bare, held) == model_weight_bytes(whole, held), "%s", one->d_name);
            ck_assert_msg(model_mapped_bytes(bare, held) == model_mapped_bytes(whole, held), "%s", one->d_name);
        }
        model_free(bare);
        model_free(whole);
        n++;
    }
    closedir(all);
    ck_assert_uint_ge(n, 24);
}

UNIT_TEST(test_wrong_tensors)
{
    folder f = folder_make("tensors");
    model *m = NULL;
    write_all(&f);
    written *t = tensor_of(&f, "model.layers.1.mlp.up_proj.weight");
    t->dtype = "F8_E5M2";
    write_shard(&f, "model.safetensors", 0, f.n);
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_UNSUPPORTED,
               "model.layers.1.mlp.up_proj.weight: type F8_E5M2 cannot be read");
    t->dtype = "F32";
    strcpy(t->name, "model.layers.1.mlp.other.weight");
    write_shard(&f, "model.safetensors", 0, f.n);
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_FORMAT,
               "model.layers.1.mlp.up_proj.weight is missing, expected [128, 64]");
    strcpy(t->name, "model.layers.1.mlp.up_proj.weight");
    t->rows /= 2, t->columns *= 2;
    write_shard(&f, "model.safetensors", 0, f.n);
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_FORMAT, "has shape [64, 128], expected [128, 64]");
    t->rows *= 2, t->columns /= 2;
    f.tensors[f.n] = (written){"model.layers.0.self_attn.sinks", "F32", 0, 4, case_alloc(4, sizeof(float))};
    f.n++;
    write_shard(&f, "model.safetensors", 0, f.n);
    help_fails(model_open(&m, f.path, &backend_cpu, NULL, err), KVB_UNSUPPORTED,
               "tensor 'model.layers.0.self_attn.sinks' is not part of the llama architecture with 2 layers");
    folder_free(&f);
}

// Quantised folders are refused, and the method is named; only the experts of gpt-oss are read.
UNIT_TEST(test_quantised_configs)
{
    static const char *const methods[][2] = {
        {"{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}", "'fp8', expected mxfp4"},
        {"{\"quant_method\":\"compressed-tensors\"}", "'compressed-tensors', expected mxfp4; get the model"},
        {"{\"quant_method\":4}", "'missing'"},
        {"{}", "config.json: quantization_config: quant_method is 'missing'"}};
    folder f = folder_make("quantised");
    weights *w;
    write_all(&f);
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        char config[200];
        snprintf(config, sizeof config, "\"quantization_config\":%s", methods[i][0]);
        write_config(&f, config);
        help_fails(weights_open(&w, f.path, false, err), KVB_UNSUPPORTED, methods[i][1]);
    }
    write_config(&f, "\"quantization_config\":null,\"dtype\":\"float32\"");
    help_ok(weights_open(&w, f.path, false, err));
    ck_assert(!w->is_mxfp4 && weights_default_type(w) == GGUF_TENSOR_F32);
    weights_close(w);
    help_ok(weights_open(&w, "tests/golden/families/gpt-oss-mxfp4/config.json", true, err));
    ck_assert(w->is_mxfp4 && weights_default_type(w) == GGUF_TENSOR_BF16);
    weights_close(w);
    folder_free(&f);
}

// What both containers hold is found under the names of each. A tensor that was found is no longer unclaimed. A file
// that changes is noticed.
static void judge_source(const char *path, bool is_gguf, const char *layers, const char *embedding)
{
    weights *w;
    weight_tensor t;
    tokenizer *words;
    char name[96], text[8], sha256[65];
    double number = 0, list[4];
    size_t n = 7;
    bool found;
    help_ok(weights_open(&w, path, false, err));
    ck_assert(w->is_gguf == is_gguf && w->n_names > 0);
    unit_strings(w->name, path, w->architecture, "llama", weights_key_name(w, WEIGHT_LAYERS, name), layers);
    help_ok(weights_number(w, WEIGHT_LAYERS, &number, &found, err));
    ck_assert(found && number == 2);
    help_ok(weights_number(w, WEIGHT_WINDOW, &number, &found, err));
    ck_assert(!found && number == 2); // untouched
    help_ok(weights_list(w, WEIGHT_LAYER_TYPES, list, 4, &n, err));
    ck_assert_uint_eq(n, 0);
    help_ok(weights_text(w, WEIGHT_ROPE_TYPE, text, sizeof text, err));
    ck_assert_str_eq(text, "");
    const char *open = weights_unclaimed(w);
    ck_assert(open && !weights_find(w, "no such tensor", &t));
    ck_assert(weights_find(w, embedding, &t) && t.rows == VOCABULARY && t.columns == 64);
    for (int i = 0; i < 100 && (open = weights_unclaimed(w)); i++) ck_assert(weights_find(w, open, &t));
    ck_assert_ptr_null(open);
    help_ok(weights_identify(w, NULL, sha256, err));
    ck_assert(strlen(sha256) == 64 && w->origin.n_files == 1);
    ck_assert_str_eq(w->origin.container, is_gguf ? "gguf" : "safetensors");
    weights_forget(w); // what is read again is the same
    help_ok(weights_check(w, err));
    kvb_error problem = {0};
    kvb_status status = tokenizer_open(&words, w, NULL, &problem);
    ck_assert_int_eq(status == KVB_OK, is_gguf); // the folder has no tokenizer
    if (is_gguf) tokenizer_free(words);
    FILE *more = fopen(t.file, "a");
    ck_assert_ptr_nonnull(more);
    fputs("x", more);
    fclose(more);
    help_fails(weights_check(w, err), KVB_IO, t.file);
    weights_close(w);
}

UNIT_TEST(test_what_a_source_says)
{
    folder f = folder_make("said");
    write_all(&f);
    char path[600];
    judge_source(strcpy(path, f.path), false, "num_hidden_layers", "model.embed_tokens.weight");
    folder_free(&f);
    case_tiny_model(help_path("own.gguf"), NULL);
    judge_source(strcpy(path, help_path("own.gguf")), true, "llama.block_count", "token_embd.weight");
}

UNIT_MAIN_ONCE("profiler weights", folder_setup, help_teardown)
