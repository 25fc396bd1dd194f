// Hugging Face folders, apart from their weights: damaged shards, index and config from bytes, where weights are from,
// texts in the model's chat template, and tokens that have no row in the embedding.
#include "folder_case.h"
#include "formats/sha256.h"
#include "profiler/weights/weights.h"
#include "profiler/weights/weights_internal.h"

// A shard that is cut short is refused, and named.
UNIT_TEST(test_cut_shards)
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
        ck_assert_msg(model_open(&m, f.path, &backend_cpu, NULL, &said) != KVB_OK, "cut to %zu bytes", cut);
        ck_assert_msg(strstr(said.message, "model.safetensors"), "cut to %zu bytes: %s", cut, said.message);
    }
    free(whole);
    folder_free(&f);
}

UNIT_TEST(test_index_and_config_from_bytes)
{
    weights_index x;
    static const char index[] = "{\"metadata\":{},\"weight_map\":{\"p\":\"a.st\",\"q\":\"b.st\",\"r\":\"a.st\"}}";
    help_ok(weights_index_parse(&x, index, sizeof index - 1, "index", err));
    ck_assert(x.n_files == 2 && strcmp(x.files[0], "a.st") == 0 && strcmp(x.files[1], "b.st") == 0);
    weights_index_free(&x);
    help_fails(weights_index_parse(&x, "{\"weight_map\":{}}", 17, "index", err), KVB_FORMAT, "with tensors");
    char config[1024];
    weights *w;
    model_config c;
    const struct family *f;
    snprintf(config, sizeof config, "{%s,\"vocab_size\":300}", CONFIG);
    help_ok(weights_from_config(&w, "bytes", config, strlen(config), err));
    help_ok(model_read_config(&c, &f, w, err));
    ck_assert(c.n_layers == 2 && c.head_dim == 16 && c.vocabulary == 300);
    weights_close(w);
    help_fails(weights_from_config(&w, "bytes", config, strlen(config) - 1, err), KVB_FORMAT,
               "bytes: config.json: expected a JSON object");
    ck_assert_ptr_null(w);
}

// Models without a cache per head cannot be budgeted: they are refused with the reason, before any other key is read.
UNIT_TEST(test_models_without_a_cache_per_head)
{
    static const char *const cases[][2] = {
        {"deepseek_v2", "MLA"},
        {"deepseek_v3", "no budget per head"},
        {"kimi_k2", "MLA"},
        {"qwen3_next", "linear attention"},
        {"falcon_h1", "state spaces"},
        {"jamba", "state spaces"},
        {"mamba2", "no cache"},
        {"rwkv7", "nothing to budget"},
        {"bert", "expected llama"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char config[64];
        weights *w;
        model_config c;
        const struct family *f;
        int size = snprintf(config, sizeof config, "{\"model_type\":\"%s\"}", cases[i][0]);
        help_ok(weights_from_config(&w, "bytes", config, (size_t)size, err));
        help_fails(model_read_config(&c, &f, w, err), KVB_UNSUPPORTED, cases[i][0]);
        help_fails(model_read_config(&c, &f, w, err), KVB_UNSUPPORTED, cases[i][1]);
        weights_close(w);
    }
}

// ---- where weights are from ----

UNIT_TEST(test_names_at_the_hub)
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
        unit_strings(id, cases[i].id ? cases[i].id : "", revision, cases[i].id ? cases[i].revision : "");
    }
    ck_assert(origin_is_id("org/name-1.0_b") && !origin_is_id("name") && !origin_is_id("./name") &&
              !origin_is_id("/org/name") && !origin_is_id("a/b/c") && !origin_is_id("org/"));
    char id[200] = "";
    ck_assert(origin_from_url(id, "https://huggingface.co/org/name/tree/main"));
    ck_assert_str_eq(id, "org/name");
    ck_assert(!origin_from_url(id, "https://example.com/org/name") && !origin_from_url(id, "https://huggingface.co/o"));
}

UNIT_TEST(test_identity)
{
    static const char commit[] = "0123456789abcdef0123456789abcdef01234567";
    char cache[512], path[1024], line[128];
    snprintf(cache, sizeof cache, "models--org--name/snapshots/%s", commit);
    mkdir(help_path("models--org--name"), 0755);
    mkdir(help_path("models--org--name/snapshots"), 0755);
    folder f = folder_make(cache);
    write_all(&f);
    model *m = open_path(f.path);
    unit_strings(m->source->origin.hf_id, "org/name", m->source->origin.hf_revision, commit, m->config.name,
                 "org/name");
    ck_assert(m->source->origin.n_files == 1 && strcmp(m->source->origin.container, "safetensors") == 0);
    ck_assert_str_eq(m->source->origin.files[0].name, "model.safetensors");
    char sha256[65];
    file_view view;
    snprintf(path, sizeof path, "%s/model.safetensors", f.path);
    help_ok(file_map(&view, path, err));
    sha256_hex(view.data, view.size, sha256);
    file_unmap(&view);
    ck_assert_str_eq(m->source->origin.files[0].sha256, sha256);
    cJSON *a = cJSON_CreateObject();
    origin_describe(&m->source->origin, a);
    char want[256];
    snprintf(want, sizeof want, "{\"model.safetensors\":\"%s\"}", sha256);
    unit_strings(cJSON_GetObjectItem(a, "model_files")->valuestring, want,
                 cJSON_GetObjectItem(a, "hf_revision")->valuestring, commit);
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
    unit_strings(m->source->origin.hf_id, "org/other", m->source->origin.hf_revision, commit);
    model_free(m);
    write_config(&f, "");
    remove(path);
    m = open_path(f.path);
    ck_assert(!m->source->origin.hf_id[0] && !m->source->origin.hf_revision[0]);
    ck_assert_str_eq(m->config.name, "downloaded");
    model_free(m);
    folder_free(&f);
}

// ---- tokens that have no row in the embedding ----

// Token 299 has the last row; 300 and 301 have none.
#define TOKENIZER                                                                                           \
    "{\"normalizer\":null,\"pre_tokenizer\":null,\"added_tokens\":[{\"id\":299,\"content\":\"<last>\"},"    \
    "{\"id\":300,\"content\":\"<extra>\"},{\"id\":301,\"content\":\"<bos>\",\"special\":true}],\"model\":{" \
    "\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[]}}"

UNIT_TEST(test_tokens_without_a_row)
{
    folder f = folder_make("tokens");
    model_text t;
    int32_t *ids;
    size_t n;
    write_all(&f);
    write_text(&f, "tokenizer.json", TOKENIZER);
    write_text(&f, "tokenizer_config.json", "{\"bos_token\":\"<bos>\",\"eos_token\":\"<extra>\"}");
    model *m = open_path(f.path);
    help_ok(model_text_open(&t, m->source, VOCABULARY, NULL, err));
    ck_assert(tokenizer_size(t.tokens) == 302 && t.special.bos == -1 && t.special.eos == -1);
    help_ok(model_text_encode(&t, TEXT_ALONE, "ab<last>", 8, &ids, &n, err));
    ck_assert(n == 3 && ids[0] == 0 && ids[1] == 1 && ids[2] == 299);
    free(ids);
    ck_assert(!model_text_begins_with_bos(&t));
    help_fails(model_text_use_chat(&t, err), KVB_UNSUPPORTED, "has no chat template");
    help_fails(model_text_encode(&t, TEXT_ALONE, "a<extra>", 8, &ids, &n, err), KVB_ARGUMENT,
               "token 1 of the text is \"<extra>\" with id 300, but the embedding has 300 rows");
    ck_assert(!ids && n == 0);
    model_text_close(&t);
    model_free(m);
    write_text(&f, "tokenizer_config.json", "{\"bos_token\":\"<bos>\",\"add_bos_token\":true}");
    m = open_path(f.path);
    help_fails(model_text_open(&t, m->source, VOCABULARY, NULL, err), KVB_FORMAT, "texts begin with token 301 (BOS)");
    model_free(m);
    folder_free(&f);
}

// ---- a chat template of the folder's own ----

#define CHAT                                                                                            \
    "{\"chat_template\":\"{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>user\\\\n' + " \
    "message.content | "                                                                                \
    "trim + '<end_of_turn>\\\\n' }}{% endfor %}{{ '<start_of_turn>model\\\\n' }}\",\"bos_token\":\"<last>\"}"

UNIT_TEST(test_texts_in_a_template)
{
    folder f = folder_make("chat");
    model_text t, without;
    int32_t *context, *question, *alone;
    size_t n_context, n_question, n_alone;
    write_all(&f);
    write_text(
        &f, "tokenizer.json",
        "{\"normalizer\":null,\"pre_tokenizer\":null,\"added_tokens\":[{\"id\":299,\"content\":\"<last>\"},"
        "{\"id\":298,\"content\":\"<start_of_turn>\",\"special\":true},{\"id\":297,\"content\":\"<end_of_turn>\","
        "\"special\":true}],\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\" \":2},\"merges\":[]}}");
    write_text(&f, "tokenizer_config.json", CHAT);
    model *m = open_path(f.path);
    help_ok(model_text_open(&t, m->source, VOCABULARY, NULL, err));
    ck_assert(!model_text_begins_with_bos(&t) && !t.chat.kind);
    help_ok(model_text_encode(&t, TEXT_CONTEXT, " ab", 3, &context, &n_context, err));
    ck_assert(n_context == 3 && context[0] == 2); // without a template
    free(context);
    help_ok(model_text_use_chat(&t, err));
    ck_assert(model_text_begins_with_bos(&t) && strcmp(t.chat.kind, "gemma") == 0);
    help_ok(model_text_encode(&t, TEXT_CONTEXT, " ab", 3, &context, &n_context, err));
    ck_assert(n_context == 3 && context[0] == 298 && context[1] == 0 && context[2] == 1); // "user" has no tokens here
    help_ok(model_text_encode(&t, TEXT_QUESTION, "b ", 2, &question, &n_question, err));
    ck_assert(n_question == 3 && question[0] == 1 && question[1] == 297 && question[2] == 298);
    free(question);
    help_ok(model_text_encode_question(&t, "b ", "a", &question, &n_question, err));
    ck_assert(n_question == 4 && question[2] == 298 && question[3] == 0);
    help_ok(model_text_encode(&t, TEXT_ALONE, " a", 2, &alone, &n_alone, err));
    ck_assert(n_alone == 2 && alone[0] == 2);
    free(context);
    free(question);
    free(alone);
    help_ok(model_text_open(&without, m->source, VOCABULARY, &(model_text_options){.without_tokenizer = true}, err));
    help_fails(model_text_use_chat(&without, err), KVB_ARGUMENT, "only token ids are given");
    model_text_close(&t);
    model_text_close(&without);
    model_free(m);
    folder_free(&f);
}

UNIT_MAIN_ONCE("profiler folder", folder_setup, help_teardown)
