// A chat template: any bytes are refused, or give a frame; refused ones leave nothing allocated.
#include "profiler/text/model_text.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *template = malloc(size + 1);
    if (!template) return 0;
    if (size) memcpy(template, data, size);
    template[size] = '\0';
    chat_frame f;
    kvb_error err;
    if (chat_frame_read(&f, template, "<s>", "</s>", "input", &err) == KVB_OK) {
        if (!f.kind || !f.front || !f.back) abort();
    } else if (f.kind || f.front || f.back || !err.message[0]) {
        abort();
    }
    chat_frame_free(&f);
    free(template);
    return 0;
}
