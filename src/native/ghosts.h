/* Marks of what was evicted, oldest first: a set in order of arrival (Python's OrderedDict of marks).
 *
 * When its table is full a new one takes its place, into which some are moved with each addition: the oldest first, to
 * places before those of what arrives meanwhile. Until that is done there are two, and a mark is in one of them.
 */
#ifndef KVRELAY_GHOSTS_H
#define KVRELAY_GHOSTS_H

#include <stddef.h>
#include <stdint.h>

struct ghost_table {
    uint32_t *ring;       /* marks in order of arrival; those not in the slots at their place are void; NULL: no table */
    uint64_t *slots;      /* open addressing: mark in the upper half, place in the lower; 0: empty */
    uint32_t ring_size;   /* a power of two, as is the number of slots, twice that */
    uint32_t first, next; /* places are counted on and on */
};

struct ghosts {
    struct ghost_table table, old;
    uint32_t moved;  /* where the next one from the old table goes */
    uint32_t count;  /* in both */
    uint64_t secret; /* odd: where marks go cannot be guessed */
};

void ghosts_init(struct ghosts *ghosts, uint64_t secret);
void ghosts_clear(struct ghosts *ghosts);
int ghosts_has(const struct ghosts *ghosts, uint32_t mark);
void ghosts_remove(struct ghosts *ghosts, uint32_t mark);
void ghosts_add(struct ghosts *ghosts, uint32_t mark); /* as the latest; not done where there is no memory */
void ghosts_pop(struct ghosts *ghosts);                /* the oldest, if there is one */

/* CRC-32 as zlib's, never 0. */
uint32_t mark_of(const uint8_t *data, size_t size);

#endif
