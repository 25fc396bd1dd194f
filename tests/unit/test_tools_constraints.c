// Constraints and ratios as they are written on the command line, and where files of several metrics go.
#include "formats_help.h"
#include "tools/cmd/solve_line.h"
#include "tools/report/output.h"

static const record_shape SHAPE = {3, 9, 2, 64}; // 3 layers of 2 KV heads
static layer_map layers = {3, 3, NULL};          // all of the model's

static kvb_status apply(const constraint_wishes *w, study_options *o, kvb_limits *limits, kvb_error *err)
{
    *o = study_options_make();
    *limits = (kvb_limits){0};
    return wishes_apply(w, &SHAPE, &layers, o, limits, err);
}

// One entry in a list of the command line.
#define LIST(text) ((cli_list){(const char *[]){text}, 1})

UNIT_TEST(ratios_as_a_list_and_as_a_range)
{
    study_options o;
    kvb_limits none;
    help_ok(apply(&(constraint_wishes){.ratios = "0.3,0.5,0.8"}, &o, &none, err));
    ck_assert(o.n_rows == 3 && o.own_ratios && !o.limits);
    ck_assert_double_eq(o.ratios[1], 0.5);
    ck_assert_double_eq(o.ratios[98], 0.8); // filled up
    help_ok(apply(&(constraint_wishes){.ratios = "0.5:0.9:0.05"}, &o, &none, err));
    ck_assert_uint_eq(o.n_rows, 9);
    ck_assert_double_eq(o.ratios[6], 0.8); // not 0.8 and a bit
    help_ok(apply(&(constraint_wishes){.block = 1}, &o, &none, err));
    ck_assert(o.n_rows == 99 && !o.own_ratios && !o.limits);
    static const char *const wrong[] = {"",        "x",           "0.5,",          "0.5,0.3",   "0",   "1",
                                        "0.5:0.9", "0.9:0.5:0.1", "0.1:0.9:0.001", "0.1:0.9:0", "nan", "0.5 0.6"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        help_fails(apply(&(constraint_wishes){.ratios = wrong[i]}, &o, &none, err), KVB_ARGUMENT, "--ratios");
}

UNIT_TEST(sizes_of_caches)
{
    study_options o;
    kvb_limits limits;
    // 6 heads of 1000 tokens, 2 * 64 elements of 2 bytes each: 1,536,000 bytes in all.
    const struct {
        constraint_wishes w;
        double ratio;
    } cases[] = {{{.bytes = "768000", .tokens = 1000}, 0.5},
                 {{.bytes = "750KiB", .tokens = 1000}, 0.5},
                 {{.bytes = "0.384MB", .dtype = "fp8", .tokens = 1000}, 0.5},
                 {{.bytes = "1.536MB", .dtype = "f32", .tokens = 1000}, 0.5}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        help_ok(apply(&cases[i].w, &o, &limits, err));
        ck_assert_uint_eq(o.n_rows, 1);
        ck_assert_double_eq_tol(o.ratios[0], cases[i].ratio, 1e-12);
        kvb_limits_free(&limits);
    }
    const struct {
        constraint_wishes w;
        const char *says;
    } wrong[] = {{{.bytes = "1GiB"}, "needs --tokens T"},
                 {{.bytes = "1GiB", .tokens = 1000}, "nothing needs to be pruned"},
                 {{.bytes = "300", .tokens = 1000}, "too small"},
                 {{.bytes = "1QiB", .tokens = 1000}, "expected a size"},
                 {{.bytes = "-1", .tokens = 1000}, "expected a size"},
                 {{.bytes = "1MB", .dtype = "f8", .tokens = 1000}, "--dtype f8"},
                 {{.dtype = "f16"}, "--dtype is for --bytes"},
                 {{.tokens = 9}, "--tokens is for"},
                 {{.bytes = "1MB", .ratios = "0.5", .tokens = 1000}, "exclude each other"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        help_fails(apply(&wrong[i].w, &o, &limits, err), KVB_ARGUMENT, wrong[i].says);
        kvb_limits_free(&limits);
    }
}

UNIT_TEST(shares_of_heads_and_layers)
{
    study_options o;
    kvb_limits m;
    const char *floors[] = {"0.1", "0.2@1", "0.3@1.1"};
    const constraint_wishes w = {.block = 16,
                                 .levels = 2,
                                 .floors = {floors, 3},
                                 .ceilings = LIST("0.9@0.0"),
                                 .caps = LIST("0.5@2"),
                                 .pins = LIST("2.0")};
    help_fails(apply(&w, &o, &m, err), KVB_ARGUMENT, ""); // a head that keeps everything in a layer that may not
    kvb_limits_free(&m);
    constraint_wishes good = w;
    good.caps = LIST("0.7@0");
    help_ok(apply(&good, &o, &m, err));
    ck_assert(o.limits == &m && m.block == 16 && m.levels == 2);
    const double least[6] = {0.1, 0.1, 0.2, 0.3, 1, 0.1}, most[6] = {0.9, 1, 1, 1, 1, 1};
    for (int h = 0; h < 6; h++) {
        ck_assert_double_eq(m.least[h], least[h]);
        ck_assert_double_eq(m.most[h], most[h]);
    }
    ck_assert(m.cap[0] == 0.7 && m.cap[1] == 1 && m.cap[2] == 1);
    // (0.1 + 0.1 + 0.2 + 0.3 + 1 + 0.1) / 6 = 30 % is the least that is kept: the table ends at 70 %.
    ck_assert_uint_eq(o.n_rows, 70);
    ck_assert_double_eq(o.ratios[98], o.ratios[69]);
    kvb_limits_free(&m);
}

UNIT_TEST(wrong_places_and_shares)
{
    study_options o;
    kvb_limits m;
    static const char *const wrong[] = {"2", "-0.1", "x", "0.5@", "0.5@3", "0.5@1.2", "0.5@1.x", "0.5@ 1", "0.5x"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const char *items[] = {wrong[i]};
        help_fails(apply(&(constraint_wishes){.floors = {items, 1}}, &o, &m, err), KVB_ARGUMENT, "--floor");
        kvb_limits_free(&m);
    }
    help_fails(apply(&(constraint_wishes){.caps = LIST("0.5@1.1")}, &o, &m, err), KVB_ARGUMENT, "for a whole layer");
    kvb_limits_free(&m);
    help_fails(apply(&(constraint_wishes){.block = 1 << 30}, &o, &m, err), KVB_ARGUMENT, "--block");
    kvb_limits_free(&m);
    help_fails(apply(&(constraint_wishes){.floors = LIST("1")}, &o, &m, err), KVB_ARGUMENT,
               "not even 1 % can be pruned");
    kvb_limits_free(&m);
}

UNIT_TEST(files_of_metrics)
{
    char path[PATH_SIZE];
    const char *const two[] = {"a:b", "a=b"}, *folder = help_path("d");
    const output_form arrays = {"--npy", FILE_ARRAY, ".npy"}, pictures = {"--svg", FILE_PICTURE, ".svg"};
    named_files_begin(false);
    ck_assert_int_eq(mkdir(folder, 0755), 0);
    help_ok(output_path(path, "x.svg", "a:b", ".svg", false, err));
    ck_assert_str_eq(path, "x.svg");
    help_ok(output_path(path, "t/{metric}.h", "ea:kvpress:epsilon=0", ".svg", true, err));
    ck_assert_str_eq(path, "t/ea_kvpress_epsilon_0.h");
    help_ok(output_path(path, folder, "a:b", ".svg", true, err));
    ck_assert_ptr_nonnull(strstr(path, "/d/a_b.svg"));
    help_fails(output_path(path, "x.svg", "a:b", ".svg", true, err), KVB_ARGUMENT, "with several metrics");
    help_fails(output_check("{metric}.npy", &arrays, two, 2, err), KVB_ARGUMENT,
               "metrics a:b and a=b would be written to the same");
    help_ok(output_check("{metric}.npy", &arrays, two, 1, err));
    // What cannot be written is found before any work: a folder where the file should be, and one that is not there.
    ck_assert_int_eq(mkdir(help_path("d/a_b.svg"), 0755), 0);
    help_fails(output_check(folder, &pictures, two, 1, err), KVB_ARGUMENT, "d/a_b.svg");
    help_ok(output_check(folder, &arrays, two, 1, err));
    help_fails(output_check(help_path("no/such"), &pictures, two, 1, err), KVB_IO, "no/such");
}

UNIT_MAIN_EACH("tools constraints", help_setup, help_teardown)
