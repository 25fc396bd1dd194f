// Rankings as they are written, in a file of their own and inside a table. The runtime reads them and ranks with them.
#include "formats/sha256.h"
#include "formats/table_write.h"
#include "formats_help.h"
#include "runtime/rank.h"

enum { L = 2, G = 1, P = 4, R = 99 };

#define ABOUT(more) \
    "{" more "\"features\":[{\"metric\":\"knorm\",\"log\":false}],\"sink\":1,\"folds\":[],\"target\":\"mean\"}"

static double weights[L * G * P] = {1, 0, 0, 0, -2, 0.5, 0.25, 3};

static rank_content content(const char *about)
{
    return (rank_content){0, L, G, P, weights, about};
}

// Puts the ranking's name in `name`, and returns the ranking with that name in its text, as in files.
static char name[24];
static rank_content with_name(rank_content r)
{
    static char text[512];
    char *named = rank_name(name, &r);
    snprintf(text, sizeof text, "%s", named);
    free(named);
    r.about = text;
    return r;
}

static cJSON *table_metadata(const char *metric, const char *about)
{
    cJSON *m = help_table_metadata("{\"model_id\":\"\",\"n_heads\":\"3\",\"n_kv_heads\":\"1\",\"head_dim\":\"8\","
                                   "\"sink\":\"1\",\"calibration_tokens\":\"100\"}");
    cJSON_ReplaceItemInObject(m, "metric", cJSON_CreateString(metric));
    if (about) cJSON_AddStringToObject(m, "ranking", about);
    return m;
}

static kvb_status write_table(const char *path, const rank_content *ranking, cJSON *metadata, kvb_error *err)
{
    static double prune[R * L * G], row[R];
    static uint8_t saturated[R];
    for (int i = 0; i < R; i++) row[i] = prune[i * L * G] = prune[i * L * G + 1] = (i + 1) / 100.0;
    const table_content t = {R, L, G, prune, row, prune, row, row, row, row, row, saturated, NULL, ranking, metadata};
    kvb_status status = table_write(path, &t, err);
    cJSON_Delete(metadata);
    return status;
}

UNIT_TEST(written_rankings_open)
{
    char other[24];
    const rank_content plain = content(ABOUT(""));
    weights[3] += 1;
    with_name(plain);
    strcpy(other, name);
    weights[3] -= 1;
    const rank_content named = with_name(plain);
    ck_assert_str_ne(name, other);
    const char *path = help_path("rank.safetensors");
    cJSON *m = cJSON_CreateObject();
    cJSON_AddStringToObject(m, "model_sha256", "abc");
    help_ok(rank_write(path, &named, m, err));
    kvb_ranking *r;
    help_ok(kvb_ranking_open(&r, path, err));
    const kvb_ranking_info *info = kvb_ranking_about(r);
    ck_assert(memcmp(info->weights, weights, sizeof weights) == 0);
    unit_strings(info->model_sha256, "abc", info->about, named.about);
    rank_content back = rank_content_of(r);
    ck_assert(back.n_folds == 0 && back.n_layers == L && back.n_kv_heads == G && back.n_columns == P);
    ck_assert(back.weights == info->weights);
    kvb_ranking_close(r);
    help_fails(rank_write(help_path("no.safetensors"), &plain, m, err), KVB_FORMAT, "12 digits");
    ck_assert(!help_exists(help_path("no.safetensors")));
    cJSON_Delete(m);
}

UNIT_TEST(tables_carry_them)
{
    const rank_content named = with_name(content(ABOUT("")));
    const char *path = help_path("table.safetensors");
    help_ok(write_table(path, &named, table_metadata(name, named.about), err));
    kvb_table *table;
    help_ok(kvb_table_open(&table, path, NULL, err));
    const kvb_ranking *carried = kvb_table_ranking(table);
    ck_assert_ptr_nonnull(carried);
    kvb_ranking *alone; // a table can be read as a ranking's file, too
    help_ok(kvb_ranking_open(&alone, path, err));
    const float knorm[4] = {0, 1, 2, 3};
    const float *features[1] = {knorm};
    float out[4], same[4];
    help_ok(kvb_rank(table, 1, 0, features, 4, out, err));
    help_ok(kvb_rank_heads(alone, 0, 1, 1, features, 4, same, err));
    ck_assert(memcmp(out, same, sizeof out) == 0);
    ck_assert_double_eq_tol(out[2], 3 - 0.25 * log(2), 1e-6); // the mean token: z = 0
    help_fails(kvb_rank(table, 2, 0, features, 4, out, err), KVB_ARGUMENT, "found 2 and 0");
    help_fails(kvb_rank(table, 0, 0, NULL, 4, out, err), KVB_ARGUMENT, "NULL");
    const float *missing[1] = {NULL};
    help_fails(kvb_rank(table, 0, 0, missing, 4, out, err), KVB_ARGUMENT, "knorm");
    kvb_ranking_close(alone);
    kvb_table_close(table);
    help_fails(write_table(path, &named, table_metadata("knorm", named.about), err), KVB_FORMAT,
               "not that of the table");
    help_fails(write_table(path, NULL, table_metadata(name, named.about), err), KVB_FORMAT, "rank_weights");
    help_ok(write_table(path, NULL, table_metadata("knorm", NULL), err));
    help_ok(kvb_table_open(&table, path, NULL, err));
    ck_assert_ptr_null(kvb_table_ranking(table));
    help_fails(kvb_rank(table, 0, 0, features, 4, out, err), KVB_ARGUMENT, "learned ranking");
    kvb_table_close(table);
}

UNIT_TEST(bytes_of_a_file)
{
    const rank_content named = with_name(content(ABOUT("")));
    size_t size;
    kvb_safetensors file;
    cJSON *m = cJSON_CreateObject();
    cJSON_AddStringToObject(m, "k", "v");
    help_ok(rank_write(help_path("rank.safetensors"), &named, m, err));
    unsigned char *bytes = help_slurp(help_path("rank.safetensors"), &size);
    help_ok(kvb_safetensors_parse(&file, bytes, size, "f", err));
    const kvb_tensor *n = kvb_safetensors_find(&file, "rank_weights");
    ck_assert(n && n->n_dims == 4 && n->size == sizeof weights && memcmp(n->data, weights, sizeof weights) == 0 &&
              n->data + n->size == bytes + size);
    for (size_t i = 0; i < L * G * P; i++) ck_assert(kvb_load_f64(n->data + 8 * i) == weights[i]);
    ck_assert_str_eq(kvb_safetensors_metadata(file.header, "k"), "v");

    // The file's own hash is that of the file with zeros in its place, here by another SHA-256 than the writer's.
    char hex[65];
    const char *digits = kvb_safetensors_metadata(file.header, "content_sha256");
    char *place = memmem(bytes, size, digits, 64);
    memset(place, '0', 64);
    sha256_hex(bytes, size, hex);
    ck_assert_str_eq(digits, hex);
    memcpy(place, hex, 64);
    kvb_safetensors_free(&file);
    for (size_t i = 0; i < size; i++) { // one wrong bit in every byte
        bytes[i] ^= (unsigned char)(1 << i % 8);
        kvb_status status = kvb_safetensors_parse(&file, bytes, size, "f", NULL);
        ck_assert_msg(status == KVB_FORMAT || status == KVB_UNSUPPORTED ||
                          !kvb_safetensors_metadata(file.header, "content_sha256"), // or the key's name was hit
                      "byte %zu", i);
        if (status == KVB_OK) kvb_safetensors_free(&file);
        bytes[i] ^= (unsigned char)(1 << i % 8);
    }
    free(bytes);
    cJSON_Delete(m);
}

// A ranking of whole layers: kvb_rank_layer() ranks them, and kvb_rank() refuses single heads.
UNIT_TEST(rankings_of_whole_layers)
{
    static double of_layers[L * G * 5] = {1, 0, 0.5, 0, 0, -2, 0.5, 1, 0.25, 3};
    const rank_content named = with_name((rank_content){0, L, G, 5, of_layers, ABOUT("\"layer_mean\":true,")});
    const char *path = help_path("table.safetensors");
    kvb_table *table;
    help_ok(write_table(path, &named, table_metadata(name, named.about), err));
    help_ok(kvb_table_open(&table, path, NULL, err));
    const kvb_ranking *r = kvb_table_ranking(table);
    ck_assert(kvb_ranking_about(r)->layer_mean && kvb_ranking_about(r)->n_columns == 5);
    const float knorm[4] = {0, 1, 2, 3};
    const float *features[1] = {knorm}, *missing[1] = {NULL};
    float out[4], same[4];
    help_ok(kvb_rank_layer(table, 1, features, 4, out, err));
    help_ok(kvb_rank_heads(r, 0, G, G, features, 4, same, err));
    ck_assert(memcmp(out, same, sizeof out) == 0);
    ck_assert_double_eq_tol(out[2], 3 - 0.25 * log(2), 1e-6); // the mean token: z = 0
    help_fails(kvb_rank(table, 1, 0, features, 4, out, err), KVB_ARGUMENT, "kvb_rank_layer()");
    help_fails(kvb_rank_layer(table, 2, features, 4, out, err), KVB_ARGUMENT, "found 2 and 0");
    help_fails(kvb_rank_layer(table, 0, missing, 4, out, err), KVB_ARGUMENT, "knorm");
    help_fails(kvb_rank_layer(NULL, 0, features, 4, out, err), KVB_ARGUMENT, "NULL");
    kvb_table_close(table);
}

UNIT_MAIN_EACH("formats_rank", help_setup, help_teardown)
