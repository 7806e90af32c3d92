/* Which row each (holding, key) has: open addressing, a keyed hash so that nobody can choose colliding keys. */
#ifndef KVRELAY_NAMES_H
#define KVRELAY_NAMES_H

#include <stddef.h>
#include <stdint.h>

struct names {
    uint64_t *slots; /* tag in the upper half, row + 1 in the lower; 0: empty */
    size_t capacity; /* a power of two */
    size_t used;
    uint64_t secret[2];
};

int names_init(struct names *names); /* -1: no memory */
void names_clear(struct names *names);

/* See that one more name fits; -1: no memory. */
int names_prepare(struct names *names);

/* 32 bits of the hash: where a name's search begins, and what is compared before a row is looked at. */
uint32_t names_tag(const struct names *names, uint32_t holding, const uint8_t *key, size_t size);

static inline size_t names_start(const struct names *names, uint32_t tag) { return tag & (names->capacity - 1); }

/* The next row with this tag from `*at` on, which is moved behind it; UINT32_MAX: there is none. */
static inline uint32_t names_next(const struct names *names, uint32_t tag, size_t *at) {
    for (;;) {
        uint64_t slot = names->slots[*at];
        if (!slot) return UINT32_MAX;
        *at = (*at + 1) & (names->capacity - 1);
        if (slot >> 32 == tag) return (uint32_t)slot - 1;
    }
}

void names_add(struct names *names, uint32_t tag, uint32_t row); /* after `names_prepare` */
void names_remove(struct names *names, uint32_t tag, uint32_t row);

#endif
