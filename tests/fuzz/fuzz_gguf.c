// The GGUF reader on arbitrary bytes: in files that it accepts, every value and tensor must be readable.
#include "profiler/weights/dequant.h"
#include "profiler/weights/gguf.h"
#include "tests/fuzz/fuzz.h"

static volatile unsigned sum; // keeps the reads

static void read_value(const gguf_file *f, const gguf_value *v)
{
    char key[256];
    uint32_t u = 0;
    double x;
    bool flag;
    gguf_string s;
    gguf_array a;
    for (size_t i = 0; i < v->size; i++) sum += v->data[i];
    if (v->key.size >= sizeof key) return;
    memcpy(key, v->key.data, v->key.size);
    key[v->key.size] = 0;
    if (gguf_find(f, key) != v) abort(); // keys are unique and hold no NUL
    (void)gguf_get_u32(f, key, &u, NULL);
    (void)gguf_get_number(f, key, &x, NULL);
    (void)gguf_get_bool(f, key, &flag, NULL);
    if (gguf_get_string(f, key, &s, NULL) == KVB_OK && s.size != v->size) abort();
    for (int type = GGUF_VALUE_U8; type <= GGUF_VALUE_F64; type++) {
        if (gguf_get_array(f, key, (gguf_value_type)type, &a, NULL) != KVB_OK) continue;
        uint64_t count = a.count, strings = 0;
        if (type <= GGUF_VALUE_I32 && count) sum += (unsigned)gguf_array_int(&a, count - 1);
        while (gguf_next_string(&a, &s)) strings++, sum += s.size ? (unsigned char)s.data[s.size - 1] : 0;
        if (type == GGUF_VALUE_STRING && (strings != count || a.size)) abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    gguf_file f;
    kvb_error err;
    if (gguf_parse(&f, data, size, "input", &err) != KVB_OK) return 0;
    for (size_t i = 0; i < f.n_values; i++) read_value(&f, &f.values[i]);
    for (size_t i = 0; i < f.n_tensors; i++) {
        const gguf_tensor *t = &f.tensors[i];
        float *y = t->n_values <= 1 << 20 ? malloc((size_t)t->n_values * sizeof *y) : NULL;
        if (y && (dequant_rows(t->type, t->data, (size_t)t->n_values, y, &err) == KVB_OK) != (t->data != NULL)) abort();
        free(y);
    }
    gguf_close(&f);
    return 0;
}
