/* SipHash-1-3 (Aumasson and Bernstein), written from its description: a keyed hash nobody can choose collisions of. */
#ifndef KVRELAY_SIPHASH_H
#define KVRELAY_SIPHASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ROTATED(x, by) ((x) << (by) | (x) >> (64 - (by)))
#define SIP_ROUND                                                                                                      \
    a += b, b = ROTATED(b, 13) ^ a, a = ROTATED(a, 32);                                                                \
    c += d, d = ROTATED(d, 16) ^ c;                                                                                    \
    a += d, d = ROTATED(d, 21) ^ a;                                                                                    \
    c += b, b = ROTATED(b, 17) ^ c, c = ROTATED(c, 32)

static inline uint64_t siphash(uint64_t k0, uint64_t k1, const uint8_t *key, size_t size) {
    uint64_t a = k0 ^ 0x736f6d6570736575ull, b = k1 ^ 0x646f72616e646f6dull, word;
    uint64_t c = k0 ^ 0x6c7967656e657261ull, d = k1 ^ 0x7465646279746573ull;
    size_t at = 0;
    for (; at + 8 <= size; at += 8) {
        memcpy(&word, key + at, 8);
        d ^= word;
        SIP_ROUND;
        a ^= word;
    }
    word = (uint64_t)size << 56;
    for (size_t i = at; i < size; i++) word |= (uint64_t)key[i] << 8 * (i - at);
    d ^= word;
    SIP_ROUND;
    a ^= word;
    c ^= 0xff;
    SIP_ROUND;
    SIP_ROUND;
    SIP_ROUND;
    return a ^ b ^ c ^ d;
}

/* 16 bytes nobody can foresee; on a kernel without entropy yet, better than a constant. */
void siphash_secret(uint64_t secret[2]);

#endif
