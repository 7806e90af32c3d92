#define _GNU_SOURCE
#include "index.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define PAGE ((uint64_t)4096)
#define MOST_FULL(bits) (((uint64_t)1 << (bits)) * (SLOTS - 1) / 5 * 4)
#define HUGE_PAGE ((uint64_t)2 << 20)
#define TRIES 4
#define AHEAD 32 /* keys whose memory latencies overlap */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static inline uint64_t load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline void store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

/* Of two that change a byte of marks at once one may be lost. What that does is not worth a locked instruction, which
 * would have every search wait for the memory of the one before. */
static inline void set_mark(uint8_t *marks, unsigned slot, int marked) {
    uint8_t was = __atomic_load_n(marks, __ATOMIC_RELAXED), bit = (uint8_t)(1u << slot);
    uint8_t is = marked ? was | bit : was & (uint8_t)~bit;
    if (is != was) __atomic_store_n(marks, is, __ATOMIC_RELAXED);
}

/* --- memory --- */

/* Have a range of pages now: a write to one that cannot be had would end the process. Huge ones where that is possible:
 * with small ones a search among millions waits longer for the page tables than for the names. */
static int populate(uint8_t *start, uint64_t bytes) {
    if (bytes < PAGE) return 0; /* on the first page, which is there */
    if (bytes >= HUGE_PAGE) {
        uint64_t touched = 0; /* a page of each is what the kernel makes a huge one of */
        while (touched < bytes && !madvise(start + touched, PAGE, MADV_POPULATE_WRITE)) touched += HUGE_PAGE;
        if (touched >= bytes) madvise(start, bytes, MADV_COLLAPSE);
    }
    return madvise(start, bytes, MADV_POPULATE_WRITE) < 0 && errno != EINVAL ? -1 : 0; /* EINVAL: before Linux 5.14 */
}

static void give_back(uint8_t *start, uint64_t bytes) {
    if (bytes >= PAGE) madvise(start, bytes, MADV_REMOVE);
}

static int prepare(struct index *index, unsigned bits) {
    uint64_t bytes = (uint64_t)BUCKET_BYTES << bits, marks_bytes = (uint64_t)1 << bits;
    if (populate(index->table + bytes, bytes) < 0) return -1;
    return populate(index->marks + marks_bytes, marks_bytes);
}

static void dispose(struct index *index, unsigned bits) {
    give_back(index->table + ((uint64_t)BUCKET_BYTES << bits), (uint64_t)BUCKET_BYTES << bits);
    give_back(index->marks + ((uint64_t)1 << bits), (uint64_t)1 << bits);
}

int index_begin(struct index *index, uint8_t *table, size_t table_bytes, uint8_t *marks, size_t marks_bytes) {
    unsigned bits = LEAST_BITS;
    while (bits < MOST_BITS && index_table_bytes(bits) < table_bytes) bits++;
    if (table_bytes != index_table_bytes(bits) || marks_bytes < index_marks_bytes(bits) || marks_bytes < PAGE) return -1;
    *index = (struct index){.table = table, .marks = marks, .most_bits = bits};
    if (populate(table, PAGE) < 0 || populate(marks, PAGE) < 0 || prepare(index, LEAST_BITS) < 0) return -1;
    siphash_secret(index_head(index)->secret);
    index_tell_due(index, INFINITY);
    store(&index_head(index)->current, 1 << 8 | LEAST_BITS);
    return 0;
}

void index_end(struct index *index) {
    unsigned bits = index_bits(index_head(index)->current);
    if (!bits) return;
    store(&index_head(index)->current, 0);
    dispose(index, bits);
}

uint64_t index_bytes(const struct index *index) {
    unsigned bits = index_bits(index_head(index)->current);
    return bits ? 2 * PAGE + ((uint64_t)(BUCKET_BYTES + 1) << bits) : 2 * PAGE;
}

/* --- writing --- */

struct place {
    uint64_t *bucket;
    uint64_t number;
    unsigned slot; /* 0: none */
};

static void put(struct index *index, unsigned bits, uint64_t name, int marked) {
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (uint64_t number = index_home(name, bits);; number = (number + 1) & mask) {
        uint64_t *bucket = bucket_at(index->table, bits, number);
        for (unsigned slot = 1; slot < SLOTS; slot++) {
            if (bucket[slot]) continue;
            set_mark(marks_at(index->marks, bits, number), slot, marked);
            store(bucket + slot, name);
            return;
        }
        store(bucket, bucket[0] + 1); /* before the name is there */
    }
}

static struct place find(const struct index *index, uint64_t name) {
    unsigned bits = index_bits(index_head(index)->current);
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (uint64_t number = index_home(name, bits);; number = (number + 1) & mask) {
        uint64_t *bucket = bucket_at(index->table, bits, number);
        for (unsigned slot = 1; slot < SLOTS; slot++)
            if (bucket[slot] == name) return (struct place){bucket, number, slot};
        if (!bucket[0]) return (struct place){NULL, 0, 0};
    }
}

static int is_marked(const struct index *index, const struct place *place) {
    const uint8_t *marks = marks_at(index->marks, index_bits(index_head(index)->current), place->number);
    return __atomic_load_n(marks, __ATOMIC_RELAXED) >> place->slot & 1;
}

static void unmark(struct index *index, const struct place *place) {
    set_mark(marks_at(index->marks, index_bits(index_head(index)->current), place->number), place->slot, 0);
}

/* Twice as many buckets: in the order of the old ones, so that both are walked from end to end. */
static int grow(struct index *index) {
    struct index_head *head = index_head(index);
    uint64_t current = head->current;
    unsigned bits = index_bits(current);
    if (bits == index->most_bits || prepare(index, bits + 1) < 0) return -1;
    for (uint64_t number = 0; number < (uint64_t)1 << bits; number++) {
        const uint64_t *bucket = bucket_at(index->table, bits, number);
        uint8_t marks = *marks_at(index->marks, bits, number);
        for (unsigned slot = 1; slot < SLOTS; slot++)
            if (bucket[slot]) put(index, bits + 1, bucket[slot], marks >> slot & 1);
    }
    store(&head->current, ((current >> 8) + 1) << 8 | (bits + 1));
    dispose(index, bits); /* whoever still reads there finds another `current` afterwards */
    return 0;
}

void index_add(struct index *index, uint64_t hash, int sealed) {
    if (!index_kept(index)) return;
    if (index->used >= MOST_FULL(index_bits(index_head(index)->current)) && grow(index) < 0) {
        index_end(index);
        return;
    }
    put(index, index_bits(index_head(index)->current), index_name(hash) | (sealed ? SEALED_NAME : 0), 0);
    index->used++;
}

void index_seal(struct index *index, uint64_t hash) {
    if (!index_kept(index)) return;
    struct place place = find(index, index_name(hash));
    if (!place.slot) return;
    store(place.bucket + place.slot, place.bucket[place.slot] | SEALED_NAME);
}

void index_drop(struct index *index, uint64_t hash, int sealed) {
    if (!index_kept(index)) return;
    uint64_t name = index_name(hash) | (sealed ? SEALED_NAME : 0);
    struct place place = find(index, name);
    if (!place.slot) return;
    unsigned bits = index_bits(index_head(index)->current);
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    store(place.bucket + place.slot, 0);
    index->used--;
    for (uint64_t number = index_home(name, bits); number != place.number; number = (number + 1) & mask) {
        uint64_t *passed = bucket_at(index->table, bits, number);
        store(passed, passed[0] - 1); /* after the name has gone */
    }
}

int index_has(const struct index *index, uint64_t hash, int sealed) {
    return !index_kept(index) || find(index, index_name(hash) | (sealed ? SEALED_NAME : 0)).slot;
}

/* Marks are of what was found: none are set before the first lookup that found something. */
static int any_marks(const struct index *index) {
    return index_kept(index) && __atomic_load_n(&index_tallies(index)->matched, __ATOMIC_RELAXED);
}

int index_marked(const struct index *index, uint64_t hash) {
    if (!any_marks(index)) return 0;
    struct place place = find(index, index_name(hash) | SEALED_NAME);
    return place.slot && is_marked(index, &place);
}

void index_unmark(struct index *index, uint64_t hash) {
    if (!any_marks(index)) return;
    struct place place = find(index, index_name(hash) | SEALED_NAME);
    if (place.slot) unmark(index, &place);
}

void index_tell_due(struct index *index, double due) {
    uint64_t bits;
    memcpy(&bits, &due, 8);
    store(&index_head(index)->due, bits);
}

const char *index_check(const struct index *index) {
    if (!index_kept(index)) return NULL;
    unsigned bits = index_bits(index_head(index)->current);
    uint64_t buckets = (uint64_t)1 << bits, mask = buckets - 1, found = 0, passes = 0, counted = 0;
    for (uint64_t number = 0; number < buckets; number++) {
        const uint64_t *bucket = bucket_at(index->table, bits, number);
        counted += bucket[0];
        for (unsigned slot = 1; slot < SLOTS; slot++) {
            if (!bucket[slot]) continue;
            found++;
            for (uint64_t at = index_home(bucket[slot], bits); at != number; at = (at + 1) & mask, passes++)
                if (!*bucket_at(index->table, bits, at)) return "a name in the index cannot be found";
        }
    }
    if (found != index->used) return "the index counts its names wrong";
    return passes == counted ? NULL : "the index counts passing searches wrong";
}

/* --- reading --- */

struct probe {
    uint64_t name;
    uint64_t home;
};

enum met { NOWHERE, UNSEALED_NAME, WHOLE_NAME };

static inline enum met probe_for(const uint8_t *table, unsigned bits, const struct probe *probe, uint8_t *marks) {
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (uint64_t number = probe->home, passed = 0; passed <= mask; number = (number + 1) & mask, passed++) {
        const uint64_t *bucket = bucket_at(table, bits, number);
        unsigned same = 0; /* all seven: which it is cannot be foretold, and a branch would be mistaken about it */
        for (unsigned slot = 1; slot < SLOTS; slot++)
            same |= (unsigned)((load(bucket + slot) | SEALED_NAME) == (probe->name | SEALED_NAME)) << slot;
        for (; same; same &= same - 1) {
            unsigned slot = (unsigned)__builtin_ctz(same);
            uint64_t there = load(bucket + slot);
            if ((there | SEALED_NAME) != (probe->name | SEALED_NAME)) continue;
            if (marks) set_mark(marks_at(marks, bits, number), slot, 1);
            return there & SEALED_NAME ? WHOLE_NAME : UNSEALED_NAME;
        }
        if (!load(bucket)) return NOWHERE;
    }
    return NOWHERE;
}

static int is_due(const struct index_head *head) {
    uint64_t bits = load(&head->due);
    double due;
    struct timespec now;
    memcpy(&due, &bits, 8);
    if (due == INFINITY) return 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return !((double)now.tv_sec + (double)now.tv_nsec * 1e-9 < due);
}

int64_t index_read(const uint8_t *table, size_t table_bytes, uint8_t *marks, size_t marks_bytes,
                   const struct sought *keys, int64_t count, enum read_as as, int64_t *sealed, uint8_t *flags) {
    const struct index_head *head = (const struct index_head *)table;
    struct probe probes[AHEAD];
    for (int tries = 0; tries < TRIES; tries++) {
        uint64_t current = load(&head->current);
        unsigned bits = index_bits(current);
        if (bits < LEAST_BITS || bits > MOST_BITS || index_table_bytes(bits) > table_bytes ||
            index_marks_bytes(bits) > marks_bytes || is_due(head))
            return -1;
        int64_t unsealed = -1, found = 0;
        for (int64_t at = 0; at < count + AHEAD; at++) {
            if (at >= AHEAD) {
                if (found >= count) break;
                enum met met = probe_for(table, bits, probes + found % AHEAD, as == COUNT_NAMES ? marks : NULL);
                if (as == TELL_EACH) flags[found] = met == WHOLE_NAME;
                else if (met == NOWHERE) break;
                if (unsealed < 0 && met == UNSEALED_NAME) unsealed = found;
                found++;
            }
            if (at < count) {
                struct probe *probe = probes + at % AHEAD;
                probe->name = index_name(index_hash(head, keys[at].key, keys[at].size));
                probe->home = index_home(probe->name, bits);
                __builtin_prefetch(bucket_at(table, bits, probe->home));
                if (as == COUNT_NAMES) __builtin_prefetch(marks_at(marks, bits, probe->home), 1);
            }
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (load(&head->current) != current) continue;
        *sealed = unsealed < 0 ? found : unsealed;
        return found;
    }
    return -1;
}
