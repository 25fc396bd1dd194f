// A profiling run that is stopped anywhere goes on to the same bytes, and what it keeps of a prefill spares those
// layers; what cannot be used or written is said and changes nothing.
#include "formats/kept_file.h"
#include "profiler/model/forward.h"
#include "test_profiler_run.h"
#include <omp.h>

// Stopped at every call of the progress, then resumed with other batches, so that a batch may find some of its
// questions done; and a run that is stopped again and again.
UNIT_TEST(test_same_bytes_after_a_stop)
{
    profile_case c = case_make("tiny.gguf", LINE_A LINE_B);
    profile_times times;
    watched whole = {0};
    c.o.batch = 1;
    c.o.new_tokens = 4;
    prepare(&c);
    omp_set_num_threads(1); // many small runs
    ck_assert_int_eq(run(&c, help_path("undisturbed.h5"), RECORD_NEW, &whole, &times), KVB_OK);
    ck_assert_int_ge(whole.calls, 2 * 2 + 5 * 4);
    for (int stop = 1; stop <= whole.calls; stop++) {
        char what[64];
        watched first = {.stop_at = stop}, second = {0};
        snprintf(what, sizeof what, "stopped at call %d of %d", stop, whole.calls);
        c.o.batch = 1;
        prepare(&c);
        ck_assert_int_eq(run(&c, help_path("stopped.h5"), RECORD_NEW, &first, &times), KVB_INTERRUPTED);
        ck_assert_msg(!help_exists(help_path("stopped.h5")), "%s: a record is there", what);
        c.o.batch = (uint32_t)stop % 3 + 1;
        prepare(&c);
        ck_assert_int_eq(run(&c, help_path("stopped.h5"), RECORD_RESUME, &second, &times), KVB_OK);
        same_file(what, help_path("undisturbed.h5"), help_path("stopped.h5"));
        ck_assert(!help_exists(help_path("stopped.h5.parts")));
        ck_assert_double_eq_tol(second.done, second.total, 1e-9 * second.total);
        help_remove(help_path("stopped.h5"));
    }
    kvb_status status = KVB_INTERRUPTED;
    int lives = 0;
    for (; status == KVB_INTERRUPTED && lives < 20; lives++) { // long enough for one batch each
        watched w = {.stop_at = 8};
        status = run(&c, help_path("stopped.h5"), lives ? RECORD_RESUME : RECORD_NEW, &w, &times);
    }
    ck_assert_int_eq(status, KVB_OK);
    ck_assert_int_gt(lives, 2);
    same_file("many lives", help_path("undisturbed.h5"), help_path("stopped.h5"));
    watched again = {0}; // a finished record has nothing left to run
    ck_assert_int_eq(run(&c, help_path("stopped.h5"), RECORD_RESUME, &again, &times), KVB_OK);
    ck_assert_uint_eq(times.queries, 0);
    same_file("resumed when finished", help_path("undisturbed.h5"), help_path("stopped.h5"));
    case_free(&c);
}

// A fresh folder of parts whose run was stopped at this call.
static watched stop_at(const profile_case *c, int call)
{
    watched w = {.stop_at = call};
    profile_times times;
    ck_assert_int_eq(run(c, help_path("stopped.h5"), RECORD_REPLACE, &w, &times), KVB_INTERRUPTED);
    return w;
}

// Goes on: to the bytes of whole.h5, with the first progress at `first` of the work.
static watched go_on(const char *what, const profile_case *c, double first)
{
    watched w = {.stop_at = 1};
    profile_times times;
    double keep_after = c->o.keep_after;
    profile_case same = *c;
    same.o.keep_after = 1e9;
    ck_assert_int_eq(run(&same, help_path("stopped.h5"), RECORD_RESUME, &w, &times), KVB_INTERRUPTED);
    ck_assert_msg(w.done > first * 0.999 && w.done < first * 1.001, "%s: begins at %g, expected %g", what, w.done,
                  first);
    same.o.keep_after = keep_after;
    w = (watched){0};
    ck_assert_int_eq(run(&same, help_path("stopped.h5"), RECORD_RESUME, &w, &times), KVB_OK);
    same_file(what, help_path("whole.h5"), help_path("stopped.h5"));
    ck_assert(!help_exists(help_path("stopped.h5.parts")));
    return w;
}

// On every kind of backend, packed keys or plain: the first progress of the run that goes on tells which layers it has.
UNIT_TEST(test_layers_are_kept)
{
    static const backend *const all[] = {&backend_ref, &backend_cpu, &backend_cpu_bf16x3, &backend_cpu_bf16};
    profile_times times;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        profile_case c = case_make("tiny.gguf", LINE_A LINE_B);
        model_free(c.m);
        c.m = case_open(help_path("tiny.gguf"), all[i]);
        run_whole(&c, help_path("whole.h5"), &times);
        uint32_t L = c.m->config.n_layers;
        double prefill = profile_work(c.m, &c.job.contexts[0], NULL);
        for (uint32_t layers = 1; layers <= L; layers++) {
            char what[64], kept[64];
            watched w = stop_at(&c, (int)layers);
            snprintf(what, sizeof what, "%s %s, %u layers", all[i]->name, all[i]->compute, layers);
            snprintf(kept, sizeof kept, "%u of %u layers of its prefill are kept", layers, L);
            ck_assert_msg(strstr(w.problem.message, kept) != NULL, "%s: %s", what, w.problem.message);
            ck_assert(help_exists(help_path("stopped.h5.parts/prefill-a.kept")));
            ck_assert_int_eq(go_on(what, &c, prefill * layers / L).messages, 0);
        }
        stop_at(&c, (int)L + 1); // while a question is decoded: the whole prefill
        ck_assert_int_eq(go_on("a stop in decoding", &c, prefill).messages, 0);
        case_free(&c);
    }
}

UNIT_TEST(test_what_is_not_kept)
{
    profile_case c = case_make("tiny.gguf", LINE_A LINE_B);
    profile_times times;
    run_whole(&c, help_path("whole.h5"), &times);
    double layer = profile_work(c.m, &c.job.contexts[0], NULL) / c.m->config.n_layers;
    c.o.keep_after = 1e9; // too short a prefill
    watched w = stop_at(&c, 1);
    ck_assert_ptr_null(strstr(w.problem.message, "kept"));
    ck_assert(!help_exists(help_path("stopped.h5.parts/prefill-a.kept")));
    go_on("nothing was kept", &c, layer);
    c.o.keep_after = 0; // cannot be written
    profile_case first = c;
    first.o.keep_after = 1e9;
    stop_at(&first, 1);
    ck_assert_int_eq(mkdir(help_path("stopped.h5.parts/prefill-a.kept"), 0777), 0);
    w = (watched){.stop_at = 1};
    ck_assert_int_eq(run(&c, help_path("stopped.h5"), RECORD_RESUME, &w, &times), KVB_INTERRUPTED);
    ck_assert_msg(strstr(w.problem.message, "not kept: ") && strstr(w.problem.message, "Is a directory"), "%s",
                  w.problem.message);
    ck_assert_msg(strstr(w.message, "sample a starts again") != NULL, "%s", w.message);
    ck_assert_int_eq(rmdir(help_path("stopped.h5.parts/prefill-a.kept")), 0);
    go_on("it could not be written", &c, layer);
    case_free(&c);
}

// Writes the kept file again with one float changed, under a right checksum.
static void change_float(const char *path, uint64_t which, const char *key, uint32_t layers)
{
    kept_file *f;
    help_ok(kept_file_open(&f, path, err));
    kept_header header = *kept_file_header(f);
    float *all = case_alloc(header.floats, sizeof *all);
    help_ok(kept_file_get(f, all, header.floats, err));
    help_ok(kept_file_end(f, KVB_OK, err));
    all[which] += 1;
    if (key) memcpy(header.key, key, 64);
    if (layers) header.layers = layers;
    help_ok(kept_file_create(&f, path, &header, err));
    help_ok(kept_file_put(f, all, header.floats, err));
    help_ok(kept_file_end(f, KVB_OK, err));
    free(all);
}

UNIT_TEST(test_what_is_not_taken)
{
    static const char other[] = "0123456789012345678901234567890123456789012345678901234567890123";
    static const struct {
        const char *what, *says;
        long flip; // a byte, from the end when negative
        const char *key;
        uint32_t layers;
    } cases[] = {
        {"a byte of the header", "byte 0: expected", 3, NULL, 0},
        {"a byte of the floats", "damaged", -200, NULL, 0},
        {"a byte of the checksum", "damaged", -1, NULL, 0},
        {"another key", "another text, other metrics or another device", 0, other, 0},
        {"no layers that there are", "has 77 layers", 0, NULL, 77},
        {"more layers than floats", "packs keys in another way", 0, NULL, 2},
        {"other bits of a key", "computed with other bits", 0, NULL, 0},
    };
    profile_case c = case_make("tiny.gguf", LINE_A LINE_B);
    profile_times times;
    run_whole(&c, help_path("whole.h5"), &times);
    double layer = profile_work(c.m, &c.job.contexts[0], NULL) / c.m->config.n_layers;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *path = help_path("stopped.h5.parts/prefill-a.kept");
        size_t size;
        stop_at(&c, 1);
        unsigned char *bytes = help_slurp(path, &size);
        if (cases[i].flip) {
            bytes[cases[i].flip < 0 ? size + (size_t)cases[i].flip : (size_t)cases[i].flip] ^= 1;
            help_spew(path, bytes, size);
        } else {
            change_float(path, 0, cases[i].key, cases[i].layers);
        }
        free(bytes);
        watched w = go_on(cases[i].what, &c, layer);
        ck_assert_int_eq(w.messages, 1);
        ck_assert_msg(strstr(w.message, cases[i].says) && strstr(w.message, "sample a starts again"), "%s: %s",
                      cases[i].what, w.message);
    }
    case_free(&c);
}

// ---- The forward pass itself ----

static bool stop_at_once(void *context, double done, double total)
{
    (void)context, (void)done, (void)total;
    return false;
}

// The first `floats` of a stretch; malloc'd.
static float *stretch_floats(const model *m, const forward_stretch *s, uint64_t floats)
{
    float *out = case_alloc(floats + 1, sizeof *out);
    if (floats) m->device->b->download(m->device, out, s->memory, floats);
    return out;
}

// Copies what one pass has of the first layer to another that has begun the same context, and so has its keys already.
static void take_first_layer(const model *m, forward *from, forward *to)
{
    forward_stretch a[FORWARD_STRETCHES], b[FORWARD_STRETCHES];
    help_ok(forward_stretches(from, 1, a, err));
    help_ok(forward_stretches(to, 1, b, err));
    uint64_t known = forward_first_floats(to);
    float *theirs = stretch_floats(m, &a[0], known), *own = stretch_floats(m, &b[0], known);
    ck_assert_uint_gt(known, 0);
    ck_assert_mem_eq(theirs, own, known * sizeof *own);
    free(theirs), free(own);
    for (int i = 0; i < FORWARD_STRETCHES; i++) {
        ck_assert_uint_eq(a[i].floats, b[i].floats);
        float *floats = stretch_floats(m, &a[i], a[i].floats);
        if (a[i].floats) m->device->b->upload(m->device, b[i].memory, floats, a[i].floats);
        free(floats);
    }
}

// What two passes have of the whole context, bit for bit.
static void same_stretches(const model *m, forward *x, forward *y)
{
    forward_stretch a[FORWARD_STRETCHES], b[FORWARD_STRETCHES];
    help_ok(forward_stretches(x, m->config.n_layers, a, err));
    help_ok(forward_stretches(y, m->config.n_layers, b, err));
    for (int i = 0; i < FORWARD_STRETCHES; i++) {
        ck_assert_uint_eq(a[i].floats, b[i].floats);
        float *of_a = stretch_floats(m, &a[i], a[i].floats), *of_b = stretch_floats(m, &b[i], b[i].floats);
        ck_assert_mem_eq(of_a, of_b, a[i].floats * sizeof *of_a);
        free(of_a), free(of_b);
    }
}

// A pass that takes the first layer from one that was stopped ends with the bits of one that was not.
UNIT_TEST(test_a_prefill_goes_on)
{
    static const backend *const all[] = {&backend_ref, &backend_cpu};
    static const int32_t ids[] = {9, 8, 7, 6, 5, 44, 33, 22, 11, 250, 260, 270, 280, 290, 13, 14, 15};
    const uint32_t T = sizeof ids / sizeof *ids;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        model *m = case_open(help_path("tiny.gguf"), all[i]);
        forward *passes[3];
        for (int p = 0; p < 3; p++)
            help_ok(forward_open(&passes[p], m, &(forward_plan){.max_tokens = T, 1, 1, .oracle = true}, err));
        help_ok(forward_prefill(passes[0], ids, T, NULL, NULL, NULL, err));
        help_fails(forward_prefill(passes[1], ids, T, NULL, &(forward_progress){stop_at_once, NULL}, NULL, err),
                   KVB_INTERRUPTED, "after layer 1");
        help_ok(forward_prefill_first(passes[2], ids, T, err));
        take_first_layer(m, passes[1], passes[2]);
        help_ok(forward_prefill_rest(passes[2], 1, NULL, NULL, err));
        same_stretches(m, passes[0], passes[2]);
        for (int p = 0; p < 3; p++) forward_close(passes[p]);
        model_free(m);
    }
}

UNIT_MAIN_ONCE("profiler kept", setup, help_teardown)
