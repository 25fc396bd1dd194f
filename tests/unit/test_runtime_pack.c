// Packed keys and values against a plain reading of the bytes that formats/README.md describes.
#include "runtime/kvbudget.h"
#include "test_runtime_cases.h"
#include <float.h>

enum { MOST_T = 70, MOST_D = 80 };

static kvb_error message, *const err = &message;

static double bf16(const unsigned char *b)
{
    float x;
    const uint32_t bits = (uint32_t)b[0] << 16 | (uint32_t)b[1] << 24;
    memcpy(&x, &bits, sizeof x);
    return (double)x;
}

// Reads number (t, c) of packed rows independently: it counts to the number's group from the beginning.
static double plain_number(const unsigned char *b, unsigned bits, bool keys, uint32_t T, uint32_t d, uint32_t t,
                           uint32_t c, double *step)
{
    uint32_t along = keys ? T : d, at = keys ? t : c;
    for (uint32_t line = 0; line < (keys ? (T + 31) / 32 : T); line++)
        for (uint32_t part = 0; part < (keys ? d : (d + 31) / 32); part++) {
            uint32_t first = 32 * (keys ? line : part), n = along - first < 32 ? along - first : 32;
            bool mine = keys ? part == c && at / 32 == line : line == t && at / 32 == part;
            if (!mine) {
                b += 4 + (n * bits + 7) / 8;
                continue;
            }
            unsigned code = 0;
            for (unsigned i = 0; i < bits; i++) {
                unsigned bit = (at - first) * bits + i;
                code |= (unsigned)(b[4 + bit / 8] >> bit % 8 & 1) << i;
            }
            *step = bf16(b + 2);
            return bf16(b) + *step * code;
        }
    ck_abort_msg("number %u, %u is in no group", t, c);
}

static void judge(kvb_packing p, kvb_side side, uint32_t T, uint32_t d, float offset)
{
    static float rows[MOST_T * MOST_D], back[MOST_T * MOST_D];
    static unsigned char packed[MOST_T * MOST_D * 2 + 4096];
    unsigned bits = 16u >> p;
    size_t n = (size_t)T * d, bytes = kvb_packed_bytes(p, side, T, d);
    ck_assert(bytes < sizeof packed);
    for (size_t i = 0; i < n; i++) rows[i] = offset + (float)((i * 7919 + 13) % 1009) / 101 * (i % 5 ? 1 : -1);
    memset(packed, 0xa5, sizeof packed);
    ck_assert_int_eq(kvb_pack(p, side, rows, T, d, packed, err), KVB_OK);
    ck_assert_int_eq(packed[bytes], 0xa5);
    ck_assert_int_eq(kvb_unpack(p, side, packed, T, d, back, err), KVB_OK);
    for (uint32_t t = 0; t < T; t++)
        for (uint32_t c = 0; c < d; c++) {
            size_t i = (size_t)t * d + c;
            double step = fabs((double)rows[i]) / 128, want = bf16(packed + 2 * i);
            if (p != KVB_PACK_BF16) want = plain_number(packed, bits, side == KVB_KEYS, T, d, t, c, &step);
            ck_assert_double_eq_tol((double)back[i], want, 1e-6 * (fabs(want) + step) + 1e-12);
            ck_assert_msg(fabs(want - (double)rows[i]) <= 0.5001 * step, "%s, %u x %u, %u, %u: %g for %g, step %g",
                          kvb_packing_name(p), T, d, t, c, want, (double)rows[i], step);
        }
}

UNIT_TEST(test_packed_numbers_are_within_half_a_step)
{
    const uint32_t shapes[][2] = {{1, 1}, {1, 64}, {31, 8}, {32, 32}, {33, 33}, {64, 64}, {70, 80}, {5, 40}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (kvb_packing p = 0; p < KVB_PACKINGS; p++)
            for (int side = 0; side < 2; side++)
                for (int offset = -100; offset <= 100; offset += 50)
                    judge(p, (kvb_side)side, shapes[s][0], shapes[s][1], (float)offset);
}

UNIT_TEST(test_bytes_of_formats)
{
    for (int side = 0; side < 2; side++) {
        ck_assert_uint_eq(kvb_packed_bytes(KVB_PACK_BF16, (kvb_side)side, 100, 64), 12800);
        ck_assert_uint_eq(kvb_packed_bytes(KVB_PACK_INT8, (kvb_side)side, 64, 64), 64 * 64 + 128 * 4);
        ck_assert_uint_eq(kvb_packed_bytes(KVB_PACK_INT4, (kvb_side)side, 64, 64), 64 * 64 / 2 + 128 * 4);
        ck_assert_uint_eq(kvb_packed_bytes(KVB_PACK_INT2, (kvb_side)side, 64, 64), 64 * 64 / 4 + 128 * 4);
        ck_assert_uint_eq(kvb_packed_bytes((kvb_packing)4, (kvb_side)side, 64, 64), 0);
    }
    ck_assert_uint_eq(kvb_packed_bytes(KVB_PACK_INT4, KVB_KEYS, 33, 10), 10 * (4 + 16 + 4 + 1));
    ck_assert_uint_eq(kvb_packed_bytes(KVB_PACK_INT4, KVB_VALUES, 33, 35), 33 * (4 + 16 + 4 + 2));
}

UNIT_TEST(test_what_cannot_be_packed)
{
    float rows[64] = {0}, back[64];
    unsigned char packed[256];
    const float wrong[] = {NAN, INFINITY, -INFINITY, -FLT_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        rows[37] = wrong[i];
        ck_assert_int_eq(kvb_pack(KVB_PACK_INT4, KVB_VALUES, rows, 2, 32, packed, err), KVB_NUMERIC);
        ck_assert_msg(strstr(err->message, "values: token 1, channel 0 and its group") != NULL, "%s", err->message);
    }
    rows[37] = FLT_MAX / 2;
    rows[38] = -FLT_MAX / 2;
    ck_assert_int_eq(kvb_pack(KVB_PACK_INT2, KVB_VALUES, rows, 2, 32, packed, err), KVB_OK);
    ck_assert_int_eq(kvb_pack((kvb_packing)4, KVB_KEYS, rows, 2, 32, packed, err), KVB_ARGUMENT);
    ck_assert_int_eq(kvb_unpack(KVB_PACK_INT4, KVB_KEYS, NULL, 2, 32, back, err), KVB_ARGUMENT);
    ck_assert_ptr_null(kvb_packing_name((kvb_packing)4));
}

UNIT_MAIN("runtime pack")
