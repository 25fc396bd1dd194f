#include "sha256.h"
#include "file_read.h"
#include "runtime/fail.h"
#include <openssl/evp.h>
#include <stdint.h>
#include <sys/mman.h>

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

kvb_status sha256_file_hex(const char *path, char out[65], kvb_error *err)
{
    enum { STEP = 4 << 20 }; // whole pages on any machine
    file_view view;
    sha256_state *s = NULL;
    kvb_status status = file_map(&view, path, err);
    if (status == KVB_OK) status = sha256_begin(&s, err);
    for (size_t done = 0; status == KVB_OK && done < view.size; done += STEP) {
        const unsigned char *from = (const unsigned char *)view.data + done;
        size_t size = view.size - done < STEP ? view.size - done : STEP;
        status = sha256_add(s, from, size, err);
        // A record may be larger than the memory: what was read need not stay. Only advice, so failing is no failure.
        (void)madvise((void *)(uintptr_t)from, size, MADV_DONTNEED);
    }
    if (status == KVB_OK) status = sha256_end(s, out, err);
    sha256_free(s);
    file_unmap(&view);
    return status;
}
