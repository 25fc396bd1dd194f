// Any bytes as the file that a stopped run leaves: its header must fit the bytes, or say why it does not.
#include "formats/kept_file.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    kept_header header;
    kvb_error err = {0};
    if (kept_header_read(&header, data, size, "fuzz", &err) == KVB_OK) {
        if (kept_file_bytes(header.floats) != size || header.key[64]) abort();
    } else if (err.status == KVB_OK || err.message[0] == 0) {
        abort();
    }
    return 0;
}
