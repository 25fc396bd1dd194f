// Every tensor type against the floats that gguf-py makes of the same bytes (tests/golden/make_quants.py), bit by bit.
#include "formats/file_read.h"
#include "profiler/weights/dequant.h"
#include "unit.h"

static uint32_t take_u32(const unsigned char **at)
{
    uint32_t v;
    memcpy(&v, *at, sizeof v);
    *at += sizeof v;
    return v;
}

// If the format has whole numbers, checks that those of the same bytes make the same values.
static void compare_steps(uint32_t type, const unsigned char *bytes, const float *values, uint32_t n)
{
    unsigned bits = dequant_step_bits(type);
    int8_t *wholes = malloc(n);
    float *steps = malloc(n * sizeof *steps), *bases = malloc(n * sizeof *bases);
    ck_assert(wholes && steps && bases);
    if (bits) dequant_steps(type, bytes, n, wholes, steps, bases);
    for (uint32_t i = 0; bits && i < n; i++) {
        uint32_t at = i / DEQUANT_STEP_VALUES;
        bool second = bits == 6 && i % DEQUANT_STEP_VALUES >= 16; // has a step of its own
        float value = (second ? bases : steps)[at] * (float)wholes[i] + (bits == 6 ? 0 : bases[at]);
        ck_assert(bits == 8 || (bits == 6 ? abs(wholes[i]) <= 32 : wholes[i] >= 0 && wholes[i] < 16));
        ck_assert_msg(value == values[i] || !isfinite(values[i]), "%s value %u: expected %.9g, got %.9g",
                      gguf_tensor_type_name(type), i, (double)values[i], (double)value);
    }
    free(wholes);
    free(steps);
    free(bases);
}

UNIT_TEST(test_golden)
{
    file_view view;
    help_ok(file_map(&view, "tests/golden/quants.bin", err));
    const unsigned char *at = view.data;
    uint32_t n_cases = take_u32(&at);
    ck_assert_uint_eq(n_cases, 16);
    for (uint32_t c = 0; c < n_cases; c++) {
        uint32_t type = take_u32(&at), n_values = take_u32(&at), n_bytes = take_u32(&at);
        float *got = malloc(n_values * sizeof *got);
        ck_assert_ptr_nonnull(got);
        help_ok(dequant_rows(type, at, n_values, got, err));
        at += n_bytes;
        for (uint32_t i = 0; i < n_values; i++) {
            float expected;
            memcpy(&expected, at + i * sizeof expected, sizeof expected);
            ck_assert_msg(memcmp(&expected, &got[i], sizeof expected) == 0, "%s value %u: expected %.9g, got %.9g",
                          gguf_tensor_type_name(type), i, (double)expected, (double)got[i]);
        }
        compare_steps(type, at - n_bytes, got, n_values);
        at += n_values * sizeof(float);
        free(got);
    }
    ck_assert_ptr_eq(at, view.data + view.size);
    file_unmap(&view);
}

// All 65536 halves against the definition of binary16.
UNIT_TEST(test_half)
{
    for (uint32_t h = 0; h < 65536; h++) {
        int exponent = (int)(h >> 10 & 31), mantissa = (int)(h & 1023);
        double sign = h & 0x8000 ? -1 : 1;
        float got = half_to_float((uint16_t)h);
        if (exponent == 31 && mantissa) {
            ck_assert(isnan(got));
            continue;
        }
        double expected = exponent == 31 ? INFINITY
                          : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                                         : ldexp(mantissa, -24);
        ck_assert_msg((double)got == sign * expected && !signbit(got) == (sign > 0), "half 0x%04x: got %g", h,
                      (double)got);
    }
}

UNIT_TEST(test_refusals)
{
    kvb_error err;
    unsigned char bytes[256] = {0};
    float y[256];
    ck_assert_int_eq(dequant_rows(GGUF_TENSOR_Q8_0, bytes, 33, y, &err), KVB_ARGUMENT);
    ck_assert_int_eq(dequant_rows(16, bytes, 256, y, &err), KVB_UNSUPPORTED); // IQ2_XXS
    ck_assert_ptr_nonnull(strstr(err.message, "IQ2_XXS"));
    ck_assert_int_eq(dequant_rows(4000000000u, bytes, 256, y, NULL), KVB_UNSUPPORTED);
    ck_assert_int_eq(dequant_rows(GGUF_TENSOR_Q8_0, bytes, 0, y, &err), KVB_OK);
}

// MXFP4's exponents 254 and 255 are no numbers: all values become NaN, in rows and in steps.
UNIT_TEST(test_exponents_that_are_no_numbers)
{
    for (int e = 252; e < 256; e++) {
        unsigned char block[17] = {(unsigned char)e, 0x10, 0x21}; // 0, 0.5, 1
        float y[32], step, base;
        int8_t wholes[32];
        help_ok(dequant_rows(GGUF_TENSOR_MXFP4, block, 32, y, err));
        dequant_steps(GGUF_TENSOR_MXFP4, block, 32, wholes, &step, &base);
        for (int i = 0; i < 32; i++) ck_assert_msg(isnan(y[i]) == (e >= 254), "%d: %g", e, (double)y[i]);
        ck_assert_msg(isnan(step) == (e >= 254), "%d: %g", e, (double)step);
    }
}

UNIT_MAIN("profiler: dequant")
