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

// libcrypto fails only when memory runs out.
sha256_state *sha256_begin(void)
{
    EVP_MD_CTX *c = needed(EVP_MD_CTX_new(), "digests");
    needed(EVP_DigestInit_ex(c, EVP_sha256(), NULL) == 1 ? c : NULL, "digests");
    return (sha256_state *)c;
}

void sha256_add(sha256_state *s, const void *data, size_t size)
{
    needed(EVP_DigestUpdate(context(s), data, size) == 1 ? s : NULL, "digests");
}

void sha256_end(sha256_state *s, char out[65])
{
    static const char digits[] = "0123456789abcdef";
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int size = 0;
    needed(EVP_DigestFinal_ex(context(s), digest, &size) == 1 && size == 32 ? s : NULL, "digests");
    for (unsigned int i = 0; i < size; i++) {
        out[2 * i] = digits[digest[i] >> 4];
        out[2 * i + 1] = digits[digest[i] & 15];
    }
    out[64] = '\0';
    sha256_free(s);
}

void sha256_free(sha256_state *s)
{
    EVP_MD_CTX_free(context(s));
}

void sha256_hex(const void *data, size_t size, char out[65])
{
    sha256_state *s = sha256_begin();
    sha256_add(s, data, size);
    sha256_end(s, out);
}

kvb_status sha256_descriptor_hex(int file, const char *name, char out[65], kvb_error *err)
{
    enum { STEP = 1 << 20 };
    sha256_state *s = sha256_begin();
    unsigned char *block = need(STEP, 1, "bytes of a file");
    kvb_status status = KVB_OK;
    off_t at = 0;
    for (ssize_t n = 1; status == KVB_OK && n != 0;) {
        n = pread(file, block, STEP, at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) status = kvb_fail(err, KVB_IO, "%s: cannot read: %s", name, strerror(errno));
        else sha256_add(s, block, (size_t)n);
        at += n;
    }
    if (status == KVB_OK) sha256_end(s, out);
    else sha256_free(s);
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
