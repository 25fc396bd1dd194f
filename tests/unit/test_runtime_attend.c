// kvb_attend against plain sums in double: ragged and paged, all formats, extreme scores, and what is refused.
#include "test_runtime_cases.h"

enum { HEADS = 7, MOST_ROWS = 150, POOL = 4096, MOST_D = 256, MOST_GROUP = 9 };

typedef struct attend_case {
    uint32_t group, d, page_rows;
    kvb_rows_format format;
    float softcap, scale;
    bool bias, sinks;
} attend_case;

static struct {
    kvb_attend_cache c;
    double k[POOL * MOST_D], v[POOL * MOST_D]; // the values of the stored numbers
    union {
        float f32[POOL * MOST_D];
        uint16_t half[POOL * MOST_D];
    } stored_k, stored_v;
    float bias[POOL], sinks[HEADS * MOST_GROUP], q[HEADS * MOST_GROUP * MOST_D], out[HEADS * MOST_GROUP * MOST_D];
    int32_t begin[HEADS + 1], pages[POOL];
    uint32_t lengths[HEADS];
    kvb_error err;
} at;

static float noise(uint64_t *random)
{
    return (float)((double)(case_random(random) % 20001) / 5000 - 2);
}

static double half_value(uint16_t bits)
{
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double size = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    if (exponent == 31) size = mantissa ? NAN : INFINITY;
    return bits >> 15 ? -size : size;
}

static double bf16_value(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

static void store(kvb_rows_format format, double *value, float *f32, uint16_t *half, size_t i, uint64_t *random)
{
    if (format == KVB_ROWS_F32) {
        *value = f32[i] = noise(random);
    } else { // 2^-2 to 4, of either sign
        uint64_t x = case_random(random);
        bool bf16 = format == KVB_ROWS_BF16;
        half[i] = (uint16_t)(bf16 ? (x & 0x8000) | (125 + (x >> 16) % 3) << 7 | (x & 127)
                                  : (x & 0x8000) | (13 + (x >> 16) % 3) << 10 | (x & 1023));
        *value = bf16 ? bf16_value(half[i]) : half_value(half[i]);
    }
}

// Makes heads of 0, 1 and other numbers of rows, in shuffled places or pages.
static void fill_case(const attend_case *a, uint64_t *random)
{
    uint32_t size = a->page_rows ? a->page_rows : 1, units = POOL / size, used = 0;
    at.c = (kvb_attend_cache){HEADS,
                              a->group,
                              a->d,
                              a->format,
                              &at.stored_k,
                              &at.stored_v,
                              POOL,
                              at.begin,
                              at.lengths,
                              a->page_rows,
                              a->page_rows ? at.pages : NULL,
                              a->scale,
                              a->softcap,
                              a->bias ? at.bias : NULL,
                              a->sinks ? at.sinks : NULL};
    for (uint32_t h = 0; h < HEADS; h++) {
        at.lengths[h] = h < 2 ? h : (uint32_t)(case_random(random) % MOST_ROWS);
        at.begin[h] = (int32_t)used;
        used += (at.lengths[h] + size - 1) / size + h % 2; // every other head has room to grow
    }
    at.begin[HEADS] = (int32_t)used;
    for (uint32_t i = 0; i < units; i++) {
        uint32_t j = (uint32_t)(case_random(random) % (i + 1));
        at.pages[i] = at.pages[j], at.pages[j] = (int32_t)i;
    }
    for (size_t i = 0; i < (size_t)POOL * a->d; i++) {
        store(a->format, at.k + i, at.stored_k.f32, at.stored_k.half, i, random);
        store(a->format, at.v + i, at.stored_v.f32, at.stored_v.half, i, random);
    }
    for (size_t i = 0; i < POOL; i++) at.bias[i] = case_random(random) % 8 ? noise(random) : -INFINITY;
    for (size_t i = 0; i < HEADS * a->group; i++) at.sinks[i] = noise(random);
    for (size_t i = 0; i < HEADS * a->group * a->d; i++) at.q[i] = noise(random);
}

static size_t place(uint32_t head, uint32_t j)
{
    size_t size = at.c.page_rows, first = (size_t)at.begin[head];
    return size ? (size_t)at.pages[first + j / size] * size + j % size : first + j;
}

static void reference(uint32_t head, uint32_t r, double *o)
{
    const kvb_attend_cache *c = &at.c;
    size_t line = (size_t)head * c->group + r;
    double p[MOST_ROWS + 1], top = c->sinks ? c->sinks[line] : -INFINITY, mass = 0;
    for (uint32_t j = 0; j < c->lengths[head]; j++) {
        size_t row = place(head, j);
        p[j] = 0;
        for (uint32_t e = 0; e < c->head_dim; e++) p[j] += at.q[line * c->head_dim + e] * at.k[row * c->head_dim + e];
        p[j] *= c->scale != 0 ? c->scale : 1 / sqrt(c->head_dim);
        if (c->softcap > 0) p[j] = c->softcap * tanh(p[j] / c->softcap);
        if (c->bias) p[j] += c->bias[row];
        top = fmax(top, p[j]);
    }
    if (c->sinks) mass = exp(c->sinks[line] - top);
    for (uint32_t j = 0; j < c->lengths[head]; j++) mass += p[j] = top == -INFINITY ? 0 : exp(p[j] - top);
    for (uint32_t e = 0; e < c->head_dim; e++) {
        o[e] = 0;
        for (uint32_t j = 0; mass > 0 && j < c->lengths[head]; j++)
            o[e] += p[j] / mass * at.v[place(head, j) * c->head_dim + e];
    }
}

static void check_heads(double tolerance)
{
    double o[MOST_D];
    for (uint32_t line = 0; line < at.c.n_heads * at.c.group; line++) {
        reference(line / at.c.group, line % at.c.group, o);
        for (uint32_t e = 0; e < at.c.head_dim; e++)
            ck_assert_double_eq_tol(at.out[line * at.c.head_dim + e], o[e], tolerance);
    }
}

UNIT_TEST(test_against_plain_sums)
{
    static const attend_case CASES[] = {
        {1, 64, 0, KVB_ROWS_F32, 0, 0, false, false},       {2, 128, 16, KVB_ROWS_F32, 0, 0, true, false},
        {3, 96, 0, KVB_ROWS_BF16, 0, 0, false, false},      {4, 128, 16, KVB_ROWS_BF16, 0, 0, true, true},
        {5, 80, 5, KVB_ROWS_F16, 0, 0.3f, true, false},     {6, 256, 64, KVB_ROWS_BF16, 50, 0.0625f, false, false},
        {7, 40, 1, KVB_ROWS_F16, 3, 0, true, true},         {8, 64, 32, KVB_ROWS_F32, 0, -0.1f, false, true},
        {MOST_GROUP, 8, 7, KVB_ROWS_F32, 1, 2, true, true},
    };
    uint64_t random = 3;
    for (size_t i = 0; i < 4 * sizeof CASES / sizeof *CASES; i++) {
        fill_case(CASES + i / 4, &random);
        ck_assert_msg(kvb_attend(&at.c, at.q, 0, HEADS, at.out, &at.err) == KVB_OK, "%s", at.err.message);
        check_heads(1e-5);
        // Pages in order give the same bits as a ragged cache, and so do ranges of heads.
        static float again[HEADS * MOST_GROUP * MOST_D];
        memset(again, 0xff, sizeof again);
        for (int32_t p = 0; at.c.pages && p < POOL / (int32_t)at.c.page_rows; p++) at.pages[p] = p;
        ck_assert_int_eq(kvb_attend(&at.c, at.q, 0, HEADS, at.out, &at.err), KVB_OK);
        for (uint32_t h = 0; h < HEADS && at.c.page_rows; h++) at.begin[h] *= (int32_t)at.c.page_rows;
        at.begin[HEADS] *= at.c.page_rows ? (int32_t)at.c.page_rows : 1;
        at.c.page_rows = 0, at.c.pages = NULL;
        for (uint32_t h = HEADS; h-- > 0;) ck_assert_int_eq(kvb_attend(&at.c, at.q, h, h + 1, again, NULL), KVB_OK);
        ck_assert_mem_eq(again, at.out, HEADS * at.c.group * at.c.head_dim * sizeof(float));
    }
}

// A cache of one row returns its value: exactly, for every 16-bit number.
UNIT_TEST(test_stored_numbers)
{
    const int32_t begin[2] = {0, 1};
    const uint32_t length = 1;
    for (int format = KVB_ROWS_BF16; format <= KVB_ROWS_F16; format++)
        for (uint32_t bits = 0; bits < 65536; bits++) {
            const uint16_t zeros[8] = {0}, stored[8] = {[3] = (uint16_t)bits};
            double value = format == KVB_ROWS_F16 ? half_value(stored[3]) : bf16_value(stored[3]);
            kvb_attend_cache c = {.n_heads = 1,
                                  .group = 1,
                                  .head_dim = 8,
                                  .format = (kvb_rows_format)format,
                                  .k = zeros,
                                  .v = stored,
                                  .n_rows = 1,
                                  .begin = begin,
                                  .lengths = &length};
            float q[8] = {1}, out[8];
            ck_assert_int_eq(kvb_attend(&c, q, 0, 1, out, NULL), isfinite(value) ? KVB_OK : KVB_NUMERIC);
            if (isfinite(value)) ck_assert(out[3] == (float)value);
        }
}

// Huge, hidden and broken scores in one head; the heads before it are computed anyway.
UNIT_TEST(test_extreme_scores)
{
    enum { HEAD = HEADS - 1, QUERY = 1 };
    static const struct {
        float q, bias;
        uint32_t step; // of the rows with that bias; 0: none
        const char *broken;
    } CASES[] = {
        {1e30f, 0, 0, NULL},     {-1e30f, 0, 0, NULL},    {0, 1e30f, 50, NULL},         {0, -1e30f, 3, NULL},
        {0, -INFINITY, 3, NULL}, {0, -INFINITY, 1, NULL}, {3e38f, 0, 0, "query 1"},     {-INFINITY, 0, 0, "query 1"},
        {NAN, 0, 0, "query 1"},  {0, NAN, 50, "query 0"}, {0, INFINITY, 50, "query 0"}, {0, NAN, 1, "query 0"},
    };
    uint64_t random = 9;
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        fill_case(&(attend_case){3, 64, 16, KVB_ROWS_F32, 0, 1, true, false}, &random);
        at.lengths[HEAD] = 40, at.begin[HEADS] = at.begin[HEAD] + 3;
        if (CASES[i].q != 0) at.q[(HEAD * 3 + QUERY) * 64] = CASES[i].q;
        for (uint32_t j = 0; CASES[i].step && j < 40; j += CASES[i].step) at.bias[place(HEAD, j)] = CASES[i].bias;
        kvb_status status = kvb_attend(&at.c, at.q, 0, HEADS, at.out, &at.err);
        ck_assert_int_eq(status, CASES[i].broken ? KVB_NUMERIC : KVB_OK);
        if (CASES[i].broken) ck_assert(strstr(at.err.message, "head 6, ") && strstr(at.err.message, CASES[i].broken));
        if (CASES[i].broken) at.c.n_heads = HEAD;
        check_heads(1e-5);
    }
}

UNIT_TEST(test_refused)
{
    uint64_t random = 1;
#define REFUSED(change, text)                                                                    \
    do {                                                                                         \
        fill_case(&(attend_case){2, 8, 16, KVB_ROWS_F32, 0, 0, true, false}, &random);           \
        at.lengths[3] = 20;                                                                      \
        memset(at.out, 0x11, sizeof at.out);                                                     \
        change;                                                                                  \
        ck_assert_int_eq(kvb_attend(&at.c, at.q, 0, HEADS, at.out, &at.err), KVB_ARGUMENT);      \
        ck_assert_msg(strstr(at.err.message, text), "%s", at.err.message);                       \
        for (size_t i = 0; i < sizeof at.out; i++) ck_assert(((const char *)at.out)[i] == 0x11); \
    } while (0)
    REFUSED(at.c.k = NULL, "may be NULL");
    REFUSED(at.c.lengths = NULL, "may be NULL");
    REFUSED(at.c.group = 0, "group 0, head_dim 8, format 0");
    REFUSED(at.c.group = 129, "expected 1 to 128");
    REFUSED(at.c.head_dim = 520, "up to 512");
    REFUSED(at.c.head_dim = 12, "a multiple of 8");
    REFUSED(at.c.format = (kvb_rows_format)3, "format 3");
    REFUSED(at.c.scale = NAN, "scale nan");
    REFUSED(at.c.softcap = -1, "softcap -1");
    REFUSED(at.c.n_heads = HEADS - 1, "heads 0 to 7 of 6");
    REFUSED(at.c.page_rows = 0, "pages without page_rows");
    REFUSED(at.begin[0] = -1, "head 0 uses 0 pages");
    REFUSED(at.begin[4] = at.begin[3] + 1, "head 3 uses 2 pages: expected room for them from begin[3] to begin[4]");
    REFUSED(at.lengths[6] = UINT32_MAX, "head 6 uses 268435456 pages");
    REFUSED((at.c.page_rows = 0, at.c.pages = NULL, at.c.n_rows = 12), "rows: expected room");
    REFUSED(at.pages[at.begin[3] + 1] = POOL / 16, "of head 3: expected 0 to 255, found 256");
    REFUSED(at.pages[at.begin[3]] = -1, "found -1");
    ck_assert_int_eq(kvb_attend(NULL, at.q, 0, 0, at.out, NULL), KVB_ARGUMENT);
    ck_assert_int_eq(kvb_attend(&at.c, at.q, 2, 1, at.out, NULL), KVB_ARGUMENT);
}

UNIT_MAIN("runtime_attend")
