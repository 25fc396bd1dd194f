#include "sha256.h"
#include "file_io.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// The opaque state is libcrypto's own: nothing has to be wrapped.
static EVP_MD_CTX *context(sha256_state *s)
{
    return (EVP_MD_CTX *)s;
}

kvb_status sha256_begin(sha256_state **out, kvb_error *err)
{
    EVP_MD_CTX *c = EVP_MD_CTX_new();
    *out = NULL;
    if (!c || EVP_DigestInit_ex(c, EVP_sha256(), NULL) != 1) {
        EVP_MD_CTX_free(c);
        return kvb_fail(err, KVB_MEMORY, "SHA-256: libcrypto cannot start a digest");
    }
    *out = (sha256_state *)c;
    return KVB_OK;
}

kvb_status sha256_add(sha256_state *s, const void *data, size_t size, kvb_error *err)
{
    if (EVP_DigestUpdate(context(s), data, size) != 1)
        return kvb_fail(err, KVB_MEMORY, "SHA-256: libcrypto failed after %zu more bytes", size);
    return KVB_OK;
}

kvb_status sha256_end(sha256_state *s, char out[65], kvb_error *err)
{
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int size = 0;
    if (EVP_DigestFinal_ex(context(s), digest, &size) != 1 || size != 32)
        return kvb_fail(err, KVB_MEMORY, "SHA-256: libcrypto cannot finish a digest");
    static const char digits[] = "0123456789abcdef";
    for (unsigned int i = 0; i < size; i++) {
        out[2 * i] = digits[digest[i] >> 4];
        out[2 * i + 1] = digits[digest[i] & 15];
    }
    out[64] = '\0';
    return KVB_OK;
}

void sha256_free(sha256_state *s)
{
    EVP_MD_CTX_free(context(s));
}

kvb_status sha256_hex(const void *data, size_t size, char out[65], kvb_error *err)
{
    sha256_state *s;
    kvb_status status = sha256_begin(&s, err);
    if (status == KVB_OK) status = sha256_add(s, data, size, err);
    if (status == KVB_OK) status = sha256_end(s, out, err);
    sha256_free(s);
    return status;
}

kvb_status sha256_descriptor_hex(int file, const char *name, char out[65], kvb_error *err)
{
    enum { STEP = 1 << 20 };
    sha256_state *s = NULL;
    unsigned char *block = need(STEP, 1, "bytes of a file");
    kvb_status status = sha256_begin(&s, err);
    off_t at = 0;
    for (ssize_t n = 1; status == KVB_OK && n != 0;) {
        n = pread(file, block, STEP, at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) status = kvb_fail(err, KVB_IO, "%s: cannot read: %s", name, strerror(errno));
        else status = sha256_add(s, block, (size_t)n, err);
        at += n;
    }
    if (status == KVB_OK) status = sha256_end(s, out, err);
    sha256_free(s);
    free(block);
    return status;
}

kvb_status sha256_file_hex(const char *path, char out[65], kvb_error *err)
{
    int file = file_open(path, O_RDONLY | O_NONBLOCK, 0);
    struct stat st;
    if (file < 0 || fstat(file, &st) != 0) {
        kvb_status status = kvb_fail(err, KVB_IO, "%s: cannot open: %s", path, strerror(errno));
        if (file >= 0) (void)file_close(file); // only read
        return status;
    }
    kvb_status status = S_ISREG(st.st_mode) ? sha256_descriptor_hex(file, path, out, err)
                                            : kvb_fail(err, KVB_ARGUMENT, "%s: expected a regular file", path);
    (void)file_close(file);
    return status;
}
