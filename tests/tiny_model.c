// Writes a small llama model with random weights as GGUF, so that the tests need neither a download nor Python: 2
// layers, 4 query and 2 KV heads of 16, width 64, FFN 128, the vocabulary of tiny_vocab.h. The same options give the
// same bytes.
#include "gguf_build.h"
#include "tiny_vocab.h"
#include <math.h>
#include <stdbool.h>

enum { LAYERS = 2, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 16, WIDTH = 64, FFN = 128, CONTEXT = 4096 };
enum { TYPE_F32 = 0, TYPE_F16 = 1, TYPE_Q8_0 = 8 };

typedef struct settings {
    const char *path, *pre;
    uint32_t type; // of the matrices; norms are always F32
    bool tied, vocab_only;
    uint64_t seed;
} settings;

typedef struct weight {
    char name[64];
    uint64_t dims[2]; // columns, rows
    uint32_t n_dims, type;
    double scale, offset; // offset + scale * N(0, 1)
} weight;

static uint64_t splitmix64(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

// Returns a nearly normal number, the sum of twelve uniform ones. No libm: its last bits differ between machines.
static double random_normal(uint64_t *state)
{
    double sum = -6;
    for (int i = 0; i < 12; i++) sum += (double)(splitmix64(state) >> 11) * 0x1p-53;
    return sum;
}

// Rounds to the nearest IEEE half, ties to even. Handles denormals, but no overflow: weights are far from the limit.
static uint16_t to_half(float value)
{
    float magnitude = value < 0 ? -value : value;
    int exponent;
    if (magnitude == 0) return 0;
    (void)frexpf(magnitude, &exponent);              // magnitude = m * 2^exponent, 0.5 <= m < 1
    int unit = exponent > -13 ? exponent - 11 : -24; // of the last place
    double steps = (double)magnitude * ldexp(1, -unit);
    uint32_t whole = (uint32_t)steps;
    double rest = steps - whole;
    whole += rest > 0.5 || (rest == 0.5 && whole % 2);
    uint32_t bits =
        whole + (unit > -24 ? (uint32_t)(unit + 24) << 10 : 0); // a carry increments the exponent, as it should
    return (uint16_t)(bits | (value < 0 ? 0x8000u : 0));
}

static float from_half(uint16_t h)
{
    int exponent = h >> 10 & 31;
    double mantissa = (h & 1023) + (exponent ? 1024 : 0);
    return (float)(ldexp(mantissa, (exponent ? exponent : 1) - 25) * (h & 0x8000 ? -1 : 1));
}

static void build_half(gguf_build *b, uint16_t h)
{
    unsigned char le[2] = {(unsigned char)h, (unsigned char)(h >> 8)};
    build_bytes(b, le, sizeof le);
}

static void build_q8_0(gguf_build *b, const float *x)
{
    float largest = 0;
    for (int i = 0; i < 32; i++) largest = fmaxf(largest, fabsf(x[i]));
    uint16_t scale = to_half(largest / 127);
    float inverse = scale ? 1 / from_half(scale) : 0;
    build_half(b, scale);
    for (int i = 0; i < 32; i++) {
        int8_t q = (int8_t)fminf(127, fmaxf(-127, roundf(x[i] * inverse)));
        build_bytes(b, &q, 1);
    }
}

static uint64_t weight_values(const weight *w)
{
    return w->dims[0] * w->dims[1];
}

static size_t weight_bytes(const weight *w)
{
    uint64_t n = weight_values(w);
    return (size_t)(w->type == TYPE_Q8_0 ? n / 32 * 34 : w->type == TYPE_F16 ? n * 2 : n * 4);
}

static void build_values(gguf_build *b, const weight *w, uint64_t *random)
{
    float block[32];
    for (uint64_t at = 0; at < weight_values(w); at += 32) { // every size here is a multiple of 32
        for (int i = 0; i < 32; i++) block[i] = (float)(w->offset + w->scale * random_normal(random));
        if (w->type == TYPE_Q8_0) build_q8_0(b, block);
        else
            for (int i = 0; i < 32; i++)
                w->type == TYPE_F16 ? build_half(b, to_half(block[i])) : build_f32(b, block[i]);
    }
    build_pad(b);
}

static void build_config(gguf_build *b, uint32_t n_tokens, uint32_t type)
{
    build_key_string(b, "general.architecture", "llama");
    build_key_string(b, "general.type", "model");
    build_key_string(b, "general.name", "Tiny test model");
    build_key_u32(b, "general.file_type", type == TYPE_Q8_0 ? 7 : type);
    build_key_u32(b, "general.quantization_version", 2);
    build_key_u32(b, "llama.block_count", LAYERS);
    build_key_u32(b, "llama.context_length", CONTEXT);
    build_key_u32(b, "llama.embedding_length", WIDTH);
    build_key_u32(b, "llama.feed_forward_length", FFN);
    build_key_u32(b, "llama.attention.head_count", HEADS);
    build_key_u32(b, "llama.attention.head_count_kv", KV_HEADS);
    build_key_f32(b, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    build_key_f32(b, "llama.rope.freq_base", 10000);
    build_key_u32(b, "llama.rope.dimension_count", HEAD_DIM);
    build_key_u32(b, "llama.vocab_size", n_tokens);
}

// Scales: normalised activations have size 1, so queries and keys of scale 0.2 sqrt(64) give attention logits with a
// standard deviation of about 2.5: heads that really prefer some positions. The rest keeps the residual stream near
// size 1.
static size_t list_weights(weight *list, uint32_t n_tokens, const settings *s)
{
    const struct {
        const char *name;
        uint64_t columns, rows; // rows 0: a norm
        double scale;
    } layer[] = {{"attn_norm", WIDTH, 0, 0.1},
                 {"attn_q", WIDTH, HEADS * HEAD_DIM, 0.2},
                 {"attn_k", WIDTH, KV_HEADS * HEAD_DIM, 0.2},
                 {"attn_v", WIDTH, KV_HEADS * HEAD_DIM, 0.125},
                 {"attn_output", HEADS * HEAD_DIM, WIDTH, 0.125},
                 {"ffn_norm", WIDTH, 0, 0.1},
                 {"ffn_gate", WIDTH, FFN, 0.125},
                 {"ffn_up", WIDTH, FFN, 0.125},
                 {"ffn_down", FFN, WIDTH, 0.09}};
    size_t n = 0;
    list[n++] = (weight){"token_embd.weight", {WIDTH, n_tokens}, 2, s->type, 0.3, 0};
    for (int l = 0; l < LAYERS; l++)
        for (size_t i = 0; i < sizeof layer / sizeof *layer; i++) {
            bool norm = layer[i].rows == 0;
            weight *w = &list[n++];
            *w = (weight){"",
                          {layer[i].columns, norm ? 1 : layer[i].rows},
                          norm ? 1 : 2,
                          norm ? TYPE_F32 : s->type,
                          layer[i].scale,
                          norm};
            snprintf(w->name, sizeof w->name, "blk.%d.%s.weight", l, layer[i].name);
        }
    list[n++] = (weight){"output_norm.weight", {WIDTH, 1}, 1, TYPE_F32, 0.1, 1};
    if (!s->tied) list[n++] = (weight){"output.weight", {WIDTH, n_tokens}, 2, s->type, 0.3, 0};
    return n;
}

static int usage(const char *what)
{
    fprintf(stderr,
            "tiny_model: %s\nusage: tiny_model [--type f32|f16|q8_0] [--tied yes|no] [--pre NAME] [--seed N] "
            "[--vocab-only yes|no] OUT.gguf\n",
            what);
    return 2;
}

static int parse(settings *s, int argc, char **argv)
{
    *s = (settings){.pre = "smollm", .type = TYPE_F32, .tied = true, .seed = 1};
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (name[0] != '-') {
            if (s->path) return usage("more than one output file");
            s->path = name;
            continue;
        }
        const char *value = i + 1 < argc ? argv[++i] : "";
        bool yes = strcmp(value, "yes") == 0, no = strcmp(value, "no") == 0;
        if (strcmp(name, "--type") == 0 && strcmp(value, "f32") == 0) s->type = TYPE_F32;
        else if (strcmp(name, "--type") == 0 && strcmp(value, "f16") == 0) s->type = TYPE_F16;
        else if (strcmp(name, "--type") == 0 && strcmp(value, "q8_0") == 0) s->type = TYPE_Q8_0;
        else if (strcmp(name, "--tied") == 0 && (yes || no)) s->tied = yes;
        else if (strcmp(name, "--vocab-only") == 0 && (yes || no)) s->vocab_only = yes;
        else if (strcmp(name, "--pre") == 0 && *value) s->pre = value;
        else if (strcmp(name, "--seed") == 0 && *value) s->seed = strtoull(value, NULL, 10);
        else return usage(name);
    }
    return s->path ? 0 : usage("no output file");
}

int main(int argc, char **argv)
{
    settings s;
    int code = parse(&s, argc, argv);
    if (code) return code;

    gguf_build b;
    gguf_build_begin(&b, 3);
    uint32_t n_tokens = TINY_FIRST_MERGE + TINY_MERGES + 2;
    if (!s.vocab_only) build_config(&b, n_tokens, s.type);
    tiny_vocab_build(&b, s.pre);
    if (!s.vocab_only) {
        weight list[3 + 9 * LAYERS];
        size_t n = list_weights(list, n_tokens, &s);
        for (size_t i = 0; i < n; i++)
            build_tensor(&b, list[i].name, list[i].n_dims, list[i].dims, list[i].type, weight_bytes(&list[i]));
        build_pad(&b);
        for (size_t i = 0; i < n; i++) {
            uint64_t random = s.seed * 1000003 + i; // so that a tensor's values do not depend on those before it
            build_values(&b, &list[i], &random);
        }
    }
    FILE *out = fopen(s.path, "wb");
    bool good = out && fwrite(b.data, 1, b.size, out) == b.size;
    if (out) good = fclose(out) == 0 && good;
    if (!good) perror(s.path);
    else printf("%s: %zu bytes, %u tokens\n", s.path, b.size, n_tokens);
    free(b.data);
    return good ? 0 : 1;
}
