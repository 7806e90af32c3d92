#define _GNU_SOURCE
#include "names.h"

#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "siphash.h"
#include "slab.h"

#define LEAST 1024

void siphash_secret(uint64_t secret[2]) {
    if (getrandom(secret, 16, GRND_NONBLOCK) == 16) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    secret[0] = (uint64_t)now.tv_nsec * 0x9E3779B97F4A7C15ull;
    secret[1] = (uint64_t)(uintptr_t)secret ^ (uint64_t)now.tv_sec;
}

int names_init(struct names *names) {
    memset(names, 0, sizeof *names);
    siphash_secret(names->secret);
    names->slots = pages_alloc(LEAST * sizeof *names->slots);
    names->capacity = names->slots ? LEAST : 0;
    return names->slots ? 0 : -1;
}

void names_clear(struct names *names) { pages_free(names->slots, names->capacity * sizeof *names->slots); }

uint32_t names_tag(const struct names *names, uint32_t holding, const uint8_t *key, size_t size) {
    uint64_t hash = siphash(names->secret[0] ^ holding, names->secret[1], key, size);
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
