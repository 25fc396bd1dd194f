// Shards: what record_merge puts together, and everything that it must refuse.
#include "formats_record_help.h"

enum { N_WHOLE = 2, N_QUESTIONS = 3 };
static const record_whole whole[N_WHOLE] = {{"zeta", N_QUESTIONS}, {"alpha-2", N_QUESTIONS}};

// What a shard has of each context: bit q is question q; 8 is the context itself.
typedef struct shard {
    uint32_t number, of; // 0: not marked as a shard
    unsigned has[N_WHOLE];
    float spoil_score, spoil_oracle; // added to one number of the first context
    const char *seed;                // another attribute; NULL: the usual one
    const record_whole *list;        // NULL: `whole`
} shard;

static void put(record_writer *w, const shard *s, size_t c)
{
    enum { T = 9, COUNT = SMALL_L * SMALL_G * T };
    float scores[COUNT], oracle[COUNT];
    int32_t ids[T];
    const char *metric = "keydiff";
    const float *all = scores;
    for (int t = 0; t < T; t++) ids[t] = t;
    for (size_t i = 0; i < COUNT; i++) scores[i] = small_score(c, 0, i);
    scores[COUNT - 1] += c == 0 ? s->spoil_score : 0;
    help_ok(record_put_context(w, whole[c].id, ids, T, &metric, &all, 1, err));
    for (unsigned q = 0; q < N_QUESTIONS; q++) {
        if (!(s->has[c] & 1u << q)) continue;
        for (size_t i = 0; i < COUNT; i++) oracle[i] = small_oracle(c, q, i);
        oracle[0] += c == 0 ? s->spoil_oracle : 0;
        record_question one = {oracle, ids, 4, ids, 2, 63, NULL};
        if (q == 1) one = (record_question){NULL, ids, 4, NULL, 0, 0, NULL}; // skipped
        help_ok(record_put_question(w, whole[c].id, q, &one, err));
    }
}

static const char *make(const char *name, const shard *s)
{
    record_writer *w;
    cJSON *a = small_attributes();
    const char *ids[N_WHOLE], *path = help_path("%s", name);
    size_t n = 0;
    if (s->seed) cJSON_ReplaceItemInObject(a, "seed", cJSON_CreateString(s->seed));
    if (s->number) help_ok(record_mark_shard(a, s->number, s->of, s->list ? s->list : whole, N_WHOLE, err));
    help_ok(record_begin(&w, path, &small_shape, a, RECORD_REPLACE, err));
    for (size_t c = 0; c < N_WHOLE; c++) {
        if (!s->has[c]) continue;
        put(w, s, c);
        ids[n++] = whole[c].id;
    }
    help_ok(record_finish(w, ids, n, err));
    record_writer_free(w);
    cJSON_Delete(a);
    return path;
}

// Paths for record_merge, and their number.
#define INPUTS(...) (const char *const[]){__VA_ARGS__}, sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *)

UNIT_TEST(test_merge_gives_the_bytes_of_one_run)
{
    const char *one = make("one.h5", &(shard){.has = {15, 15}});
    const char *a = make("a.h5", &(shard){.number = 1, .of = 3, .has = {8 | 1, 0}});
    const char *b = make("b.h5", &(shard){.number = 2, .of = 3, .has = {8 | 6, 8 | 4}});
    const char *c = make("c.h5", &(shard){.number = 3, .of = 3, .has = {0, 8 | 3}});
    const char *out = help_path("out.h5");
    help_ok(record_merge(out, INPUTS(a, b, c), false, err));
    help_same_file(one, out);
    help_fails(record_merge(out, INPUTS(a, b, c), false, err), KVB_MISMATCH, "--force");
    help_ok(record_merge(out, INPUTS(c, a, one, b), true, err)); // any order, overlapping with the whole
    help_same_file(one, out);
    record *r;
    help_ok(record_open(&r, b, err));
    ck_assert_str_eq(record_shard(r), "2/3");
    record_close(r);
    help_ok(record_open(&r, out, err));
    ck_assert_ptr_null(record_shard(r));
    record_close(r);
    help_ok(record_merge(help_path("copy.h5"), INPUTS(one), false, err)); // no shards at all
    help_same_file(one, help_path("copy.h5"));
}

UNIT_TEST(test_merge_names_what_is_missing)
{
    const char *a = make("a.h5", &(shard){.number = 1, .of = 3, .has = {8 | 1, 0}});
    const char *b = make("b.h5", &(shard){.number = 2, .of = 3, .has = {8 | 4, 8 | 2}});
    const char *out = help_path("out.h5");
    help_fails(record_merge(out, INPUTS(a), false, err), KVB_MISMATCH,
               "missing: questions 2 to 3 of zeta, context alpha-2; shard 2/3 is not among the files; shard 3/3");
    help_fails(record_merge(out, INPUTS(a, b), false, err), KVB_MISMATCH,
               "missing: question 2 of zeta, question 1 of alpha-2, question 3 of alpha-2; shard 3/3");
    help_fails(record_merge(out, INPUTS(a, help_path("none.h5")), false, err), KVB_IO, "none.h5");
    help_fails(record_merge(out, NULL, 0, false, err), KVB_ARGUMENT, "no records");
    ck_assert(!help_exists(out));
}

UNIT_TEST(test_merge_refuses_strangers)
{
    static const record_whole other[N_WHOLE] = {{"zeta", 3}, {"beta", 3}},
                              fewer[N_WHOLE] = {{"zeta", 1}, {"alpha-2", 3}};
    const char *a = make("a.h5", &(shard){.number = 1, .of = 2, .has = {15, 0}});
    const char *out = help_path("out.h5");
    help_fails(record_merge(out, INPUTS(a, make("b.h5", &(shard){.number = 2, .of = 2, .has = {0, 15}, .seed = "2"})),
                            false, err),
               KVB_MISMATCH, "not of one run: seed is");
    help_fails(record_merge(out, INPUTS(a, make("b.h5", &(shard){.number = 2, .of = 2, .has = {0, 15}, .list = other})),
                            false, err),
               KVB_MISMATCH, "shards of different wholes");
    help_fails(record_merge(out, INPUTS(make("c.h5", &(shard){.number = 2, .of = 2, .has = {0, 15}, .list = other})),
                            false, err),
               KVB_MISMATCH, "context alpha-2 is not in the list");
    help_fails(record_merge(out, INPUTS(make("c.h5", &(shard){.number = 1, .of = 1, .has = {15, 15}, .list = fewer})),
                            false, err),
               KVB_MISMATCH, "has question 3, but the run has only 1");
    ck_assert(!help_exists(out));
}

// The same context or question with another number is refused, and both files are named.
UNIT_TEST(test_merge_refuses_other_contents)
{
    const char *a = make("a.h5", &(shard){.number = 1, .of = 2, .has = {15, 0}}), *out = help_path("out.h5");
    const char *b = make("b.h5", &(shard){.number = 2, .of = 2, .has = {8, 15}, .spoil_score = 1});
    help_fails(record_merge(out, INPUTS(a, b), false, err), KVB_MISMATCH, "with different scores of keydiff");
    help_fails(record_merge(out, INPUTS(a, b), false, err), KVB_MISMATCH, "b.h5 both have context zeta");
    b = make("b.h5", &(shard){.number = 2, .of = 2, .has = {9, 15}, .spoil_oracle = 1});
    help_fails(record_merge(out, INPUTS(a, b), false, err), KVB_MISMATCH, "with different oracle");
    ck_assert(!help_exists(out));
    b = make("b.h5", &(shard){.number = 2, .of = 2, .has = {15, 15}});
    help_ok(record_merge(out, INPUTS(a, b), false, err));
}

// A list of contexts that was damaged or made up.
UNIT_TEST(test_merge_refuses_bad_lists)
{
    static const char *const lists[] = {"",
                                        "{}",
                                        "[1]",
                                        "[[\"zeta\"]]",
                                        "[[\"zeta\",-1]]",
                                        "[[\"zeta\",1.5]]",
                                        "[[\"zeta\",1,1]]",
                                        "[[\"../zeta\",1]]",
                                        "[[\"zeta\",4294967296]]",
                                        "[[1,\"zeta\"]]",
                                        "[[\"zeta\",3",
                                        "[[\"zeta\",3],[\"alpha-2\",3],[\"zeta\",3]]"};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        record_writer *w;
        cJSON *a = small_attributes();
        const char *path = help_path("bad%zu.h5", i), *id = "zeta";
        cJSON_AddStringToObject(a, "shard", i % 2 ? "1/1" : "nonsense");
        cJSON_AddStringToObject(a, "shard_of", lists[i]);
        help_ok(record_begin(&w, path, &small_shape, a, RECORD_NEW, err));
        put(w, &(shard){.has = {15, 0}}, 0);
        help_ok(record_finish(w, &id, 1, err));
        record_writer_free(w);
        cJSON_Delete(a);
        help_fails(record_merge(help_path("out.h5"), INPUTS(path), false, err), KVB_FORMAT, "shard_of");
    }
    static const record_whole huge[N_WHOLE] = {{"zeta", UINT32_MAX}, {"alpha-2", UINT32_MAX}};
    const char *big = make("big.h5", &(shard){.number = 1, .of = 1, .has = {15, 15}, .list = huge});
    help_fails(record_merge(help_path("out.h5"), INPUTS(big), false, err), KVB_MISMATCH, "questions 4 to 4294967295");
}

UNIT_TEST(test_several_writers_of_one_record)
{
    const char *one = make("one.h5", &(shard){.has = {15, 15}}), *path = help_path("joined.h5");
    record_writer *first, *second;
    cJSON *a = small_attributes(), *b = small_attributes();
    cJSON_ReplaceItemInObject(b, "seed", cJSON_CreateNumber(7));
    help_fails(record_begin(&second, path, &small_shape, a, RECORD_JOIN, err), KVB_IO, "one file system");
    help_ok(record_begin(&first, path, &small_shape, a, RECORD_NEW, err));
    help_fails(record_begin(&second, path, &small_shape, b, RECORD_JOIN, err), KVB_MISMATCH, "seed");
    help_ok(record_begin(&second, path, &small_shape, a, RECORD_JOIN, err));
    put(second, &(shard){.has = {15, 0}}, 0);
    ck_assert(record_writer_has_question(first, "zeta", 2));
    put(first, &(shard){.has = {0, 15}}, 1);
    const char *ids[N_WHOLE] = {"zeta", "alpha-2"};
    help_fails(record_finish(second, ids, N_WHOLE, err), KVB_ARGUMENT, "only the process that began");
    help_ok(record_finish(first, ids, N_WHOLE, err));
    record_writer_free(second);
    record_writer_free(first);
    help_same_file(one, path);
    cJSON_Delete(a);
    cJSON_Delete(b);
}

UNIT_MAIN_EACH("formats merge", help_setup, help_teardown)
