// Own code and not a library's, because this folder is made to be copied and needs nothing but libc, libm and cJSON.
// It runs at about 250 MB/s, and a table has 1 MB. Files of many gigabytes are hashed by libcrypto (formats/sha256.c).
#include "sha256.h"
#include <stdint.h>
#include <string.h>

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int by)
{
    return x >> by | x << (32 - by);
}

// The names are the standard's: w is the message schedule, a to h the working variables.
static void add_block(uint32_t state[8], const unsigned char block[64])
{
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++) {
        const unsigned char *p = block + 4 * i;
        w[i] = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
    }
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t a = v[0], e = v[4];
        uint32_t s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25), choice = (e & v[5]) ^ (~e & v[6]);
        uint32_t s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22), major = (a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]);
        uint32_t t = v[7] + s1 + choice + round_constants[i] + w[i];
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t;
        v[0] = t + s0 + major;
    }
    for (int i = 0; i < 8; i++) state[i] += v[i];
}

void kvb_sha256(const kvb_bytes *pieces, size_t n, char hex[65])
{
    static const char digits[] = "0123456789abcdef";
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    unsigned char block[64];
    size_t used = 0;
    uint64_t total = 0;
    for (size_t i = 0; i < n; i++) {
        const unsigned char *from = pieces[i].data;
        for (size_t left = pieces[i].size, step; left > 0; left -= step, from += step) {
            step = left < sizeof block - used ? left : sizeof block - used;
            memcpy(block + used, from, step);
            used = (used + step) % sizeof block;
            if (used == 0) add_block(state, block);
        }
        total += pieces[i].size;
    }
    block[used++] = 0x80; // a one bit, zeros, and in the last 8 bytes of a block the number of bits
    if (used > 56) {
        memset(block + used, 0, sizeof block - used);
        add_block(state, block);
        used = 0;
    }
    memset(block + used, 0, 56 - used);
    for (int i = 0; i < 8; i++) block[56 + i] = (unsigned char)(total * 8 >> (56 - 8 * i));
    add_block(state, block);
    for (int i = 0; i < 64; i++) hex[i] = digits[state[i / 8] >> (28 - 4 * (i % 8)) & 15];
    hex[64] = '\0';
}
