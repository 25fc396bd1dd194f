#include "text.h"
#include <string.h>

size_t kvb_utf8_size(const char *at, size_t left)
{
    const unsigned char *s = (const unsigned char *)at;
    size_t size = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : s[0] < 0xf5 ? 4 : 0;
    if (size > left) return 0;
    for (size_t i = 1; i < size; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    // The second byte shows overlong forms, surrogates, and what is beyond U+10FFFF.
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf0 && s[1] < 0x90) ||
        (s[0] == 0xf4 && s[1] > 0x8f))
        return 0;
    return size;
}

bool kvb_is_shown(const char *at, size_t size)
{
    const unsigned char *s = (const unsigned char *)at;
    // ASCII's control characters, and U+0080 to U+009F.
    if (size == 1) return s[0] >= ' ' && s[0] != 127;
    if (size == 2 && s[0] == 0xc2) return s[1] > 0x9f;
    // Marks of the direction of writing, and line separators: U+061C, U+200E and F, U+2028 to E, U+2066 to 2069.
    if (size == 2) return s[0] != 0xd8 || s[1] != 0x9c;
    if (size == 3 && s[0] == 0xe2 && s[1] == 0x80) return s[2] < 0x8e || (s[2] > 0x8f && s[2] < 0xa8) || s[2] > 0xae;
    if (size == 3 && s[0] == 0xe2 && s[1] == 0x81) return s[2] < 0xa6 || s[2] > 0xa9;
    return size > 2;
}

void kvb_clean_text(char *text)
{
    for (size_t left = strlen(text), size; left > 0; text += size, left -= size) {
        size = kvb_utf8_size(text, left);
        bool keep = kvb_is_shown(text, size);
        if (size == 0) size = 1;
        if (!keep) memset(text, '?', size);
    }
}

static const struct {
    const char *name, *bytes;
    size_t size, at;
} kinds[] = {
    [KVB_FILE_OTHER] = {"something else", "", 0, 0},
    [KVB_FILE_MODEL] = {"a model (GGUF)", "GGUF", 4, 0},
    [KVB_FILE_RECORD] = {"a record (HDF5)", "\x89HDF\r\n\x1a\n", 8, 0},
    [KVB_FILE_ARRAY] = {"an array (.npy)", "\x93NUMPY", 6, 0},
    // After the header's length, whose upper half is 0.
    [KVB_FILE_SAFETENSORS] = {"safetensors, as tables and weights are", "\0\0\0\0{", 5, 4},
};

kvb_file_kind kvb_kind_of_file(const void *data, size_t size)
{
    for (int kind = KVB_FILE_MODEL; kind <= KVB_FILE_SAFETENSORS; kind++) {
        if (size < kinds[kind].at + kinds[kind].size) continue;
        if (memcmp((const char *)data + kinds[kind].at, kinds[kind].bytes, kinds[kind].size) == 0)
            return (kvb_file_kind)kind;
    }
    return KVB_FILE_OTHER;
}

const char *kvb_kind_name(kvb_file_kind kind)
{
    return kinds[kind].name;
}

bool kvb_ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

bool kvb_read_digits(const char **text, uint64_t max, uint64_t *out)
{
    const char *s = *text;
    uint64_t value = 0;
    for (; *s >= '0' && *s <= '9'; s++) {
        unsigned digit = (unsigned)(*s - '0');
        if (digit > max || value > (max - digit) / 10) return false;
        value = value * 10 + digit;
    }
    if (s == *text) return false;
    *text = s;
    *out = value;
    return true;
}
