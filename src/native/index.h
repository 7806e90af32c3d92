/* What one tenant's objects are named, in shared memory: clients of this host look keys up without asking the pool.
 *
 * The **table** is written by the pool alone and mapped read-only by clients. Its first page is the head; a table of
 * 2**bits buckets lies at 64 << bits, so that each size has a place of its own in one sparse file, and growing is a new
 * place, filled bit by bit, and one store of `current`. A bucket is a cache line: a word that counts the names whose search went past it,
 * full, when they were added, and seven slots. A slot is a name: 62 bits of the key's hash, a bit that is always set, and
 * whether the object is sealed; 0 is empty. Two keys of one hash are two equal slots.
 *
 * Reading needs no lock. A name stays in its slot for as long as it is there, and while it is, every bucket its search
 * goes past says so: a reader finds what was there all the time of its search and does not find what was not, whatever is
 * added and taken beside it. Whoever reads `current` after its probes as it did before read the table that was in force.
 *
 * The **marks** are written by clients: in the first line, tallies of lookups; then, at 1 << bits, a byte a bucket, a bit a
 * slot that was found, which the order of eviction takes for having been asked for.
 */
#ifndef KVRELAY_INDEX_H
#define KVRELAY_INDEX_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "siphash.h"

#define SLOTS 8 /* words of a bucket; the first is no slot */
#define BUCKET_BYTES 64
#define LEAST_BITS 6  /* a page of buckets */
#define MOST_BITS 28
#define SEALED_NAME 1u

struct index_head {
    uint64_t current;   /* generation << 8 | bits; 0: the pool keeps it no more */
    uint64_t due;       /* a double: when the first object of the pool expires, on the pool's clock */
    uint64_t secret[2]; /* of the hash */
};

struct index_tallies {
    uint64_t lookups, matched, missed;
};

/* A table grows by and by, while readers go on in the one that is in force: a thread gets the next one's memory, additions
 * fill it, it is put in force when it is whole, and then what was marked in the old one is taken over and its memory given
 * back. */
enum index_stage { STEADY, PREPARING, FILLING, LEAVING };

struct index {
    uint8_t *table, *marks;
    unsigned most_bits;
    uint64_t used; /* names */
    enum index_stage stage;
    unsigned other_bits; /* of the table to come, or of the one that is left */
    uint64_t done;       /* its buckets (LEAVING) or those of the table in force (FILLING) that have been seen to */
    pthread_t preparing;
    int prepared; /* by the thread: 0: not yet; 1: done; -1: there is no memory */
};

static inline struct index_head *index_head(const struct index *index) { return (struct index_head *)index->table; }
static inline struct index_tallies *index_tallies(const struct index *index) {
    return (struct index_tallies *)index->marks;
}
static inline unsigned index_bits(uint64_t current) { return current & 255; }
static inline uint64_t *bucket_at(const uint8_t *table, unsigned bits, uint64_t bucket) {
    return (uint64_t *)(table + ((uint64_t)BUCKET_BYTES << bits) + BUCKET_BYTES * bucket);
}
static inline uint8_t *marks_at(uint8_t *marks, unsigned bits, uint64_t bucket) {
    return marks + ((uint64_t)1 << bits) + bucket;
}
/* A slot that holds this hash, of a name not sealed. */
static inline uint64_t index_name(uint64_t hash) { return (hash & ~(uint64_t)3) | 2; }
static inline uint64_t index_home(uint64_t name, unsigned bits) { return name >> (64 - bits); }
static inline uint64_t index_hash(const struct index_head *head, const uint8_t *key, size_t size) {
    return siphash(head->secret[0], head->secret[1], key, size);
}

/* How many bytes the files of an index with up to 2**bits buckets have. */
static inline uint64_t index_table_bytes(unsigned bits) { return (uint64_t)BUCKET_BYTES << (bits + 1); }
static inline uint64_t index_marks_bytes(unsigned bits) { return (uint64_t)1 << (bits + 1); }

/* --- the pool's side: one thread --- */

/* An empty index in two zeroed files, mapped; -1: they are no such files, or there is no memory. */
int index_begin(struct index *index, uint8_t *table, size_t table_bytes, uint8_t *marks, size_t marks_bytes);
void index_end(struct index *index); /* tell readers that it is kept no more, and give its memory back */
static inline int index_kept(const struct index *index) { return index_head(index)->current != 0; }

/* If memory runs out the index ends: readers ask the pool. */
void index_add(struct index *index, uint64_t hash, int sealed);
void index_seal(struct index *index, uint64_t hash);
void index_drop(struct index *index, uint64_t hash, int sealed);
int index_has(const struct index *index, uint64_t hash, int sealed);
int index_marked(const struct index *index, uint64_t hash);
void index_unmark(struct index *index, uint64_t hash);
void index_tell_due(struct index *index, double due);
uint64_t index_bytes(const struct index *index); /* of memory */
const char *index_check(const struct index *index); /* what is wrong, or NULL */

/* --- a client's side: any number of threads and processes --- */

struct sought {
    const uint8_t *key;
    size_t size;
};
enum read_as { COUNT_NAMES, TELL_EACH };
/* COUNT_NAMES: how many keys from the first on are there; `*sealed`: of these, from the first on, sealed; what is found is
 * marked. TELL_EACH: `flags` says for each whether it is sealed. -1: the index does not say, ask the pool. */
int64_t index_read(const uint8_t *table, size_t table_bytes, uint8_t *marks, size_t marks_bytes,
                   const struct sought *keys, int64_t count, enum read_as as, int64_t *sealed, uint8_t *flags);

#endif
