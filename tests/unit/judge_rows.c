// Operations on rows, alone or between layers: norms, activations, rotary positions, copies, drawing tokens.
#include "judge.h"

// Judges operations on rows that are picked by number: every third row, from the last one on.
static void judge_rows_by_number(uint32_t n, uint32_t width, const float *x, const float *other)
{
    uint32_t rows[70], picked = 0;
    for (uint32_t r = n; r > 0; r -= r < 3 ? r : 3) rows[picked++] = r - 1;
    dev y;
    BOTH("take_rows", y, (size_t)picked * width, 0, 0, 0, {
        y = on->b->alloc(on, (size_t)picked * width);
        dev from = put(on, x, (size_t)n * width);
        on->b->take_rows(on, y, from, rows, picked, width);
        on->b->release(on, from);
    });
    BOTH("add_rows", y, (size_t)n * width, 1e-5f, 1e-5f, 0, {
        y = put(on, other, (size_t)n * width);
        dev from = put(on, x, (size_t)n * width);
        on->b->add_rows(on, y, from, rows, other, picked, width);
        on->b->release(on, from);
    });
}

static void judge_norms(uint32_t n, uint32_t width, const float *x, const float *weight)
{
    dev y;
    BOTH("rms_norm", y, (size_t)n * width, 1e-6f, 1e-5f, 0, {
        y = on->b->alloc(on, (size_t)n * width);
        dev dx = put(on, x, (size_t)n * width), dw = put(on, weight, width);
        on->b->rms_norm(on, y, dx, dw, n, width, 1e-5f);
        on->b->release(on, dx), on->b->release(on, dw);
    });
    BOTH("layer_norm", y, (size_t)n * width, 2e-6f, 2e-5f, 0, {
        y = on->b->alloc(on, (size_t)n * width);
        dev dx = put(on, x, (size_t)n * width), dw = put(on, weight, width);
        on->b->layer_norm(on, y, dx, dw, n, width, 1, 1e-5f);
        on->b->release(on, dx), on->b->release(on, dw);
    });
    BOTH("layer_norm by head", y, (size_t)n * width, 2e-6f, 2e-5f, 0, {
        y = on->b->alloc(on, (size_t)n * width);
        dev dx = put(on, x, (size_t)n * width), dw = put(on, weight, width); // for four heads
        on->b->layer_norm(on, y, dx, dw, 4 * n, width / 4, 4, 1e-5f);
        on->b->release(on, dx), on->b->release(on, dw);
    });
    BOTH("rms_norm in place", y, (size_t)n * width, 1e-6f, 1e-5f, 0, {
        y = put(on, x, (size_t)n * width);
        dev dw = put(on, weight, width);
        on->b->rms_norm(on, y, y, dw, n, width, 1e-5f);
        on->b->release(on, dw);
    });
}

UNIT_TEST(test_row_operations)
{
    static const uint32_t rows[] = {1, 3, 16, 31, 70}, widths[] = {8, 64, 576, 1000};
    dev y;
    for (size_t r = 0; r < 5; r++)
        for (size_t w = 0; w < 4; w++) {
            uint32_t n = rows[r], width = widths[w];
            float *x = random_floats((size_t)n * width, 3), *weight = random_floats(width, 2),
                  *other = random_floats((size_t)n * width, 30);
            judge_norms(n, width, x, weight);
            for (int act = SILU; act <= SWIGLU_CLAMPED; act++)
                BOTH("glu", y, (size_t)n * width, 1e-6f, 1e-5f, 0, {
                    y = put(on, other, (size_t)n * width);
                    dev up = put(on, x, (size_t)n * width);
                    on->b->glu(on, y, up, (activation)act, (size_t)n * width);
                    on->b->release(on, up);
                });
            BOTH("clip", y, (size_t)n * width, 0, 0, 0, {
                y = put(on, x, (size_t)n * width);
                on->b->clip(on, y, 1.5f, (size_t)n * width);
            });
            BOTH("softcap", y, (size_t)n * width, 1e-6f, 1e-5f, 0, {
                y = put(on, other, (size_t)n * width);
                on->b->softcap(on, y, 9, (size_t)n * width);
            });
            judge_rows_by_number(n, width, x, other);
            BOTH("scale", y, (size_t)n * width, 0, 1e-6f, 0, {
                y = put(on, x, (size_t)n * width);
                on->b->scale(on, y, 0.37f, (size_t)n * width);
            });
            BOTH("add_row", y, (size_t)n * width, 0, 1e-6f, 0, {
                y = put(on, x, (size_t)n * width);
                dev row = put(on, weight, width);
                on->b->add_row(on, y, row, n, width);
                on->b->release(on, row);
            });
            BOTH("add_scaled", y, (size_t)n * width, 1e-6f, 1e-5f, 0, {
                y = put(on, x, (size_t)n * width);
                dev add = put(on, other, (size_t)n * width);
                on->b->add_scaled(on, y, add, 0.22f, (size_t)n * width);
                on->b->release(on, add);
            });
            free(x);
            free(weight);
            free(other);
        }
}

UNIT_TEST(test_glu_extremes)
{
    const float gate[] = {0, -0.0f, 88, -88, 1000, -1000, 1e30f, -1e30f}, up[] = {1, 1, 1, 1, 2, 2, 1, 1};
    dev g = put(judged, gate, 8), u = put(judged, up, 8);
    JUDGED.glu(judged, g, u, SILU, 8);
    const float want[] = {0, 0, 88, 0, 2000, 0, 1e30f, 0};
    float *got = fetch(g, 8);
    close_to("glu", got, want, 8, 1e-30f, 1e-6f);
    free(got);
    JUDGED.release(judged, g), JUDGED.release(judged, u);
}

UNIT_TEST(test_gather_rope_store)
{
    enum { N = 21, HEADS = 3, D = 16, POSITIONS = 40, WIDTH = HEADS * D };
    int32_t ids[N];
    uint32_t positions[N];
    decode_row rows[N];
    for (uint32_t i = 0; i < N; i++) {
        ids[i] = (int32_t)(i * 7 % 29);
        positions[i] = i * 3 % POSITIONS;
        rows[i] = (decode_row){i / 5, i % 5, false};
    }
    float *table = random_floats(29 * WIDTH, 1), *angles = random_floats(POSITIONS * D, 1),
          *x = random_floats(N * WIDTH, 1);
    dev y;
    BOTH("gather", y, N * WIDTH, 0, 0, 0, {
        y = on->b->alloc(on, N * WIDTH);
        dev_matrix m = backend_matrix(on, table, 29, WIDTH, true);
        on->b->gather(on, y, m, ids, N);
        on->b->matrix_release(on, &m);
    });
    BOTH("rope", y, N * WIDTH, 1e-6f, 1e-6f, 0, {
        y = on->b->alloc(on, N * WIDTH);
        dev dx = put(on, x, N * WIDTH), cs = put(on, angles, POSITIONS * D);
        on->b->rope(on, y, dx, cs, positions, N, HEADS, D, D);
        on->b->release(on, dx), on->b->release(on, cs);
    });
    BOTH("rope in place", y, N * WIDTH, 1e-6f, 1e-6f, 0, {
        y = put(on, x, N * WIDTH);
        dev cs = put(on, angles, POSITIONS * D);
        on->b->rope(on, y, y, cs, positions, N, HEADS, D, D);
        on->b->release(on, cs);
    });
    BOTH("store_prefix", y, 2 * N * WIDTH, 0, 0, 0, {
        y = on->b->alloc(on, 2 * N * WIDTH);
        dev dx = put(on, x, N * WIDTH);
        on->b->store_prefix(on, y, 2 * N, 5, dx, N, HEADS, D);
        on->b->release(on, dx);
    });
    BOTH("store_tail", y, QUESTIONS * TAIL * WIDTH, 0, 0, 0, {
        y = on->b->alloc(on, QUESTIONS * TAIL * WIDTH);
        dev dx = put(on, x, N * WIDTH);
        on->b->store_tail(on, y, TAIL, rows, dx, N, HEADS, D);
        on->b->release(on, dx);
    });
    free(table);
    free(angles);
    free(x);
}

// Both backends draw the same tokens, greedily or not, for sizes around that of a part; -1 if a value is not finite.
UNIT_TEST(test_sample)
{
    enum { ROWS = 7 };
    static const uint32_t sizes[] = {1, 2, 255, 256, 257, 1000, 5003};
    reserve(8, SHAPES[0]);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int greedy = 0; greedy < 2; greedy++) {
            uint32_t n = sizes[i];
            float *logits = random_floats((size_t)ROWS * n, 6);
            sampler s = {greedy, 0.7 + (double)i, 99 + i};
            draw_key keys[ROWS];
            int32_t want[ROWS], got[ROWS];
            logits[2 * (size_t)n + n / 2] = NAN;
            logits[3 * (size_t)n + n - 1] = INFINITY;
            for (uint32_t c = 0; c < n; c++) logits[4 * (size_t)n + c] = -INFINITY;
            for (uint32_t c = 0; c < n; c++) logits[5 * (size_t)n + c] = (float)(c % 3); // ties
            for (uint32_t r = 0; r < ROWS; r++) keys[r] = (draw_key){r, 3 * r, 5 + r};
            for (int which = 0; which < 2; which++) {
                backend_device *on = which ? judged : reference;
                dev d = put(on, logits, (size_t)ROWS * n);
                on->b->sample(on, which ? got : want, d, ROWS, n, &s, keys);
                on->b->release(on, d);
            }
            for (int r = 0; r < ROWS; r++)
                ck_assert_msg(got[r] == want[r] && (r >= 2 && r <= 4 ? want[r] == -1 : want[r] >= 0),
                              "row %d of %u logits: token %d, expected %d", r, n, got[r], want[r]);
            free(logits);
        }
    check_judged();
}

JUDGE_PART(judge_rows)
