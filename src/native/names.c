#define _GNU_SOURCE
#include "names.h"

#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "slab.h"

#define LEAST 1024

int names_init(struct names *names) {
    memset(names, 0, sizeof *names);
    if (getrandom(names->secret, sizeof names->secret, GRND_NONBLOCK) != sizeof names->secret) {
        struct timespec now; /* a kernel without entropy yet: better than a constant */
        clock_gettime(CLOCK_MONOTONIC, &now);
        names->secret[0] = (uint64_t)now.tv_nsec * 0x9E3779B97F4A7C15ull;
        names->secret[1] = (uint64_t)(uintptr_t)names ^ (uint64_t)now.tv_sec;
    }
    names->slots = pages_alloc(LEAST * sizeof *names->slots);
    names->capacity = names->slots ? LEAST : 0;
    return names->slots ? 0 : -1;
}

void names_clear(struct names *names) { pages_free(names->slots, names->capacity * sizeof *names->slots); }

/* --- SipHash-1-3 (Aumasson and Bernstein), written from its description --- */

#define ROTATED(x, by) ((x) << (by) | (x) >> (64 - (by)))
#define SIP_ROUND                                                                                                      \
    a += b, b = ROTATED(b, 13) ^ a, a = ROTATED(a, 32);                                                                \
    c += d, d = ROTATED(d, 16) ^ c;                                                                                    \
    a += d, d = ROTATED(d, 21) ^ a;                                                                                    \
    c += b, b = ROTATED(b, 17) ^ c, c = ROTATED(c, 32)

uint32_t names_tag(const struct names *names, uint32_t holding, const uint8_t *key, size_t size) {
    uint64_t k0 = names->secret[0] ^ holding, k1 = names->secret[1], word;
    uint64_t a = k0 ^ 0x736f6d6570736575ull, b = k1 ^ 0x646f72616e646f6dull;
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
    uint64_t hash = a ^ b ^ c ^ d;
    return (uint32_t)(hash ^ hash >> 32);
}

/* --- the table --- */

void names_add(struct names *names, uint32_t tag, uint32_t row) {
    size_t at = names_start(names, tag);
    while (names->slots[at]) at = (at + 1) & (names->capacity - 1);
    names->slots[at] = (uint64_t)tag << 32 | (row + 1);
    names->used++;
}

int names_prepare(struct names *names) {
    if (names->used + 1 <= names->capacity / 4 * 3) return 0;
    uint64_t *old = names->slots;
    size_t capacity = names->capacity;
    uint64_t *slots = pages_alloc(2 * capacity * sizeof *slots);
    if (!slots) return -1;
    names->slots = slots;
    names->capacity = 2 * capacity;
    names->used = 0;
    for (size_t i = 0; i < capacity; i++)
        if (old[i]) names_add(names, (uint32_t)(old[i] >> 32), (uint32_t)old[i] - 1);
    pages_free(old, capacity * sizeof *old);
    return 0;
}

void names_remove(struct names *names, uint32_t tag, uint32_t row) {
    size_t mask = names->capacity - 1, at = names_start(names, tag);
    uint64_t wanted = (uint64_t)tag << 32 | (row + 1);
    while (names->slots[at] != wanted) at = (at + 1) & mask;
    /* Move up what follows and began its search at or before the hole: no markers of former names are left. */
    for (size_t next = (at + 1) & mask; names->slots[next]; next = (next + 1) & mask) {
        size_t start = names_start(names, (uint32_t)(names->slots[next] >> 32));
        if (((next - start) & mask) >= ((next - at) & mask)) {
            names->slots[at] = names->slots[next];
            at = next;
        }
    }
    names->slots[at] = 0;
    names->used--;
}
