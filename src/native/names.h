/* Which row each (holding, key) has: open addressing, a keyed hash so that nobody can choose colliding keys. */
#ifndef KVRELAY_NAMES_H
#define KVRELAY_NAMES_H

#include <stddef.h>
#include <stdint.h>

struct name_table {
    uint64_t *slots; /* tag in the upper half, row + 1 in the lower; 0: empty */
    size_t capacity; /* a power of two */
};

/* A table grows by and by: for some additions there are two, and a name is in the one that its tag tells. */
struct names {
    struct name_table table, old; /* no slots in `old`: there is one table */
    size_t first, moved; /* the old table's slots that have been emptied: how many, and from which on */
    size_t used;
    uint64_t secret[2];
};

int names_init(struct names *names); /* -1: no memory */
void names_clear(struct names *names);

/* See that one more name fits, and move a few if the table is growing; -1: no memory. */
int names_prepare(struct names *names);
const char *names_check(const struct names *names); /* what is wrong, or NULL */

/* 32 bits of the hash: where a name's search begins, and what is compared before a row is looked at. */
uint32_t names_tag(const struct names *names, uint32_t holding, const uint8_t *key, size_t size);

/* Where the search of a tag begins: in the order of tags, so that a table is filled from end to end as it grows. */
static inline size_t names_home(const struct name_table *table, uint32_t tag) {
    return (size_t)((uint64_t)tag * table->capacity >> 32);
}
/* The table a name of this tag is in, or would be. */
static inline const struct name_table *names_of(const struct names *names, uint32_t tag) {
    const struct name_table *old = &names->old;
    if (!old->slots || ((names_home(old, tag) - names->first) & (old->capacity - 1)) < names->moved) return &names->table;
    return old;
}
static inline size_t names_start(const struct names *names, uint32_t tag) { return names_home(names_of(names, tag), tag); }
static inline const uint64_t *names_slot(const struct names *names, uint32_t tag, size_t at) {
    return names_of(names, tag)->slots + at;
}

/* The next row with this tag from `*at` on, which is moved behind it; UINT32_MAX: there is none. */
static inline uint32_t names_next(const struct names *names, uint32_t tag, size_t *at) {
    const struct name_table *table = names_of(names, tag);
    for (;;) {
        uint64_t slot = table->slots[*at];
        if (!slot) return UINT32_MAX;
        *at = (*at + 1) & (table->capacity - 1);
        if (slot >> 32 == tag) return (uint32_t)slot - 1;
    }
}

void names_add(struct names *names, uint32_t tag, uint32_t row); /* after `names_prepare` */
void names_remove(struct names *names, uint32_t tag, uint32_t row);

#endif
