#define _GNU_SOURCE
#include "index.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define PAGE ((uint64_t)4096)
#define SLOTS_OF(bits) (((uint64_t)1 << (bits)) * (SLOTS - 1))
#define GROWS_AT(bits) (SLOTS_OF(bits) / 10 * 7)
#define WAITS_AT(bits) (SLOTS_OF(bits) / 10 * 9)
#define MOST_FULL(bits) (SLOTS_OF(bits) / 20 * 19)
#define STEPS 2 /* buckets seen to with each addition while a table grows, which is 7 % full more when it is done */
#define PART (HUGE_PAGE / BUCKET_BYTES) /* buckets whose memory is given back together */
#define LARGE ((uint64_t)512 << 10)     /* memory that is got in the background */
#define HUGE_PAGE ((uint64_t)2 << 20)
#define TRIES 4
#define GROUP 64 /* keys whose memory latencies overlap */

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

static uint64_t parts_of(uint64_t buckets) { return buckets / PART * PART; }

static int prepare(const struct index *index, unsigned bits) {
    uint64_t bytes = (uint64_t)BUCKET_BYTES << bits, marks_bytes = (uint64_t)1 << bits;
    if (populate(index->table + bytes, bytes) < 0) return -1;
    return populate(index->marks + marks_bytes, marks_bytes);
}

/* Give a table's memory back, from a bucket on. */
static void dispose(struct index *index, unsigned bits, uint64_t from) {
    uint64_t bytes = (uint64_t)BUCKET_BYTES << bits;
    give_back(index->table + bytes + BUCKET_BYTES * from, bytes - BUCKET_BYTES * from);
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

static int has_prepared(struct index *index) {
    pthread_join(index->preparing, NULL);
    return index->prepared;
}

void index_end(struct index *index) {
    unsigned bits = index_bits(index_head(index)->current);
    if (!bits) return;
    store(&index_head(index)->current, 0);
    if (index->stage == PREPARING) has_prepared(index);
    dispose(index, bits, 0);
    if (index->stage != STEADY) dispose(index, index->other_bits, index->stage == LEAVING ? parts_of(index->done) : 0);
    index->stage = STEADY;
}

uint64_t index_bytes(const struct index *index) {
    unsigned bits = index_bits(index_head(index)->current);
    uint64_t buckets = bits ? (uint64_t)1 << bits : 0;
    if (index->stage != STEADY) buckets += (uint64_t)1 << index->other_bits;
    return 2 * PAGE + (BUCKET_BYTES + 1) * buckets;
}

/* --- writing --- */

struct place {
    uint64_t *bucket;
    uint64_t number;
    unsigned slot; /* 0: none */
};

static uint64_t put(struct index *index, unsigned bits, uint64_t name, int marked) {
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (uint64_t number = index_home(name, bits);; number = (number + 1) & mask) {
        uint64_t *bucket = bucket_at(index->table, bits, number);
        for (unsigned slot = 1; slot < SLOTS; slot++) {
            if (bucket[slot]) continue;
            set_mark(marks_at(index->marks, bits, number), slot, marked);
            store(bucket + slot, name);
            return number;
        }
        store(bucket, bucket[0] + 1); /* before the name is there */
    }
}

static struct place find(const struct index *index, unsigned bits, uint64_t name) {
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (uint64_t number = index_home(name, bits);; number = (number + 1) & mask) {
        uint64_t *bucket = bucket_at(index->table, bits, number);
        for (unsigned slot = 1; slot < SLOTS; slot++)
            if (bucket[slot] == name) return (struct place){bucket, number, slot};
        if (!bucket[0]) return (struct place){NULL, 0, 0};
    }
}

static int is_marked(const struct index *index, unsigned bits, const struct place *place) {
    return __atomic_load_n(marks_at(index->marks, bits, place->number), __ATOMIC_RELAXED) >> place->slot & 1;
}

static void mark(struct index *index, unsigned bits, const struct place *place, int marked) {
    set_mark(marks_at(index->marks, bits, place->number), place->slot, marked);
}

static void take(struct index *index, unsigned bits, uint64_t name, const struct place *place) {
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    store(place->bucket + place->slot, 0);
    for (uint64_t number = index_home(name, bits); number != place->number; number = (number + 1) & mask) {
        uint64_t *passed = bucket_at(index->table, bits, number);
        store(passed, passed[0] - 1); /* after the name has gone */
    }
}

/* Where a name is in the table in force, and there alone or in the next one, too. */
static struct place find_current(const struct index *index, uint64_t name) {
    return find(index, index_bits(index_head(index)->current), name);
}
static int is_copied(const struct index *index, uint64_t bucket) { return index->stage == FILLING && bucket < index->done; }

/* --- growing --- */

static void *prepare_next(void *argument) {
    struct index *index = argument;
    int prepared = prepare(index, index->other_bits) < 0 ? -1 : 1;
    __atomic_store_n(&index->prepared, prepared, __ATOMIC_RELEASE);
    return NULL;
}

static void begin_filling(struct index *index) {
    index->done = 0;
    index->stage = FILLING;
}

/* Get memory for a table of twice the size: by a thread, since the kernel may take long over it. -1: there is none. */
static int begin_growing(struct index *index, unsigned bits) {
    index->other_bits = bits + 1;
    index->prepared = 0;
    index->stage = PREPARING;
    if ((uint64_t)BUCKET_BYTES << (bits + 1) >= LARGE && !pthread_create(&index->preparing, NULL, prepare_next, index)) return 0;
    begin_filling(index);
    return prepare(index, bits + 1);
}

/* Copy the names of a bucket into the table to come: in the order of the old ones, so that both are walked from end to end. */
static void copy_bucket(struct index *index, unsigned bits) {
    const uint64_t *bucket = bucket_at(index->table, bits, index->done);
    uint8_t marks = __atomic_load_n(marks_at(index->marks, bits, index->done), __ATOMIC_RELAXED);
    for (unsigned slot = 1; slot < SLOTS; slot++)
        if (bucket[slot]) put(index, index->other_bits, bucket[slot], marks >> slot & 1);
    index->done++;
}

/* Take over what was marked in a bucket of the table that was in force. */
static void leave_bucket(struct index *index) {
    const uint64_t *bucket = bucket_at(index->table, index->other_bits, index->done);
    uint8_t marks = __atomic_load_n(marks_at(index->marks, index->other_bits, index->done), __ATOMIC_RELAXED);
    for (unsigned slot = 1; marks && slot < SLOTS; slot++) {
        if (!(marks >> slot & 1) || !bucket[slot]) continue;
        struct place place = find_current(index, bucket[slot] | SEALED_NAME);
        if (place.slot) mark(index, index_bits(index_head(index)->current), &place, 1);
    }
    index->done++;
    if (index->done % PART == 0)
        give_back((uint8_t *)bucket_at(index->table, index->other_bits, index->done - PART), PART * BUCKET_BYTES);
}

/* How many buckets to see to: more if the memory came so late that the table might be full before its names are copied. */
static uint64_t steps_of(const struct index *index, unsigned bits) {
    uint64_t additions = index->used < MOST_FULL(bits) ? MOST_FULL(bits) - index->used : 1;
    uint64_t needed = index->stage == FILLING ? (((uint64_t)1 << bits) - index->done) / additions + 1 : 0;
    return needed > STEPS ? needed : STEPS;
}

/* A few steps of whatever is under way; -1: there is no memory for what must be. */
static int advance(struct index *index) {
    struct index_head *head = index_head(index);
    unsigned bits = index_bits(head->current);
    if (index->stage == STEADY) {
        if (bits == index->most_bits || index->used < GROWS_AT(bits)) return index->used < MOST_FULL(bits) ? 0 : -1;
        if (begin_growing(index, bits) < 0) return -1;
    }
    if (index->stage == PREPARING) {
        int prepared = __atomic_load_n(&index->prepared, __ATOMIC_ACQUIRE);
        if (!prepared && index->used < WAITS_AT(bits)) return 0;
        prepared = has_prepared(index);
        begin_filling(index);
        if (prepared < 0) return -1;
    }
    for (uint64_t steps = steps_of(index, bits); steps && index->stage != STEADY; steps--) {
        if (index->stage == FILLING) {
            copy_bucket(index, bits);
            if (index->done >> bits) { /* whoever still reads in the old one finds another `current` afterwards */
                store(&head->current, ((head->current >> 8) + 1) << 8 | index->other_bits);
                *index = (struct index){.table = index->table, .marks = index->marks, .most_bits = index->most_bits,
                                        .used = index->used, .stage = LEAVING, .other_bits = bits};
                break;
            }
        } else if (index->stage == LEAVING) {
            leave_bucket(index);
            if (!(index->done >> index->other_bits)) continue;
            dispose(index, index->other_bits, parts_of(index->done));
            index->stage = STEADY;
        }
    }
    return 0;
}

/* --- the pool's calls --- */

void index_add(struct index *index, uint64_t hash, int sealed) {
    if (!index_kept(index)) return;
    if (advance(index) < 0) {
        index_end(index);
        return;
    }
    uint64_t name = index_name(hash) | (sealed ? SEALED_NAME : 0);
    if (is_copied(index, put(index, index_bits(index_head(index)->current), name, 0))) put(index, index->other_bits, name, 0);
    index->used++;
}

void index_seal(struct index *index, uint64_t hash) {
    if (!index_kept(index)) return;
    struct place place = find_current(index, index_name(hash));
    if (!place.slot) return;
    store(place.bucket + place.slot, place.bucket[place.slot] | SEALED_NAME);
    if (!is_copied(index, place.number)) return;
    place = find(index, index->other_bits, index_name(hash));
    if (place.slot) store(place.bucket + place.slot, place.bucket[place.slot] | SEALED_NAME);
}

void index_drop(struct index *index, uint64_t hash, int sealed) {
    if (!index_kept(index)) return;
    uint64_t name = index_name(hash) | (sealed ? SEALED_NAME : 0);
    struct place place = find_current(index, name);
    if (!place.slot) return;
    take(index, index_bits(index_head(index)->current), name, &place);
    index->used--;
    if (!is_copied(index, place.number)) return;
    place = find(index, index->other_bits, name);
    if (place.slot) take(index, index->other_bits, name, &place);
}

int index_has(const struct index *index, uint64_t hash, int sealed) {
    return !index_kept(index) || find_current(index, index_name(hash) | (sealed ? SEALED_NAME : 0)).slot;
}

/* Marks are of what was found: none are set before the first lookup that found something. */
static int any_marks(const struct index *index) {
    return index_kept(index) && __atomic_load_n(&index_tallies(index)->matched, __ATOMIC_RELAXED);
}

/* Where else than in the table in force a name may be marked: in the one to come, or in the one that is left. */
static struct place find_other(const struct index *index, uint64_t name, const struct place *current) {
    const struct place nowhere = {NULL, 0, 0};
    if (is_copied(index, current->number)) return find(index, index->other_bits, name);
    if (index->stage != LEAVING || index_home(name, index->other_bits) < parts_of(index->done)) return nowhere;
    struct place place = find(index, index->other_bits, name);
    return place.number < index->done ? nowhere : place;
}

int index_marked(const struct index *index, uint64_t hash) {
    if (!any_marks(index)) return 0;
    uint64_t name = index_name(hash) | SEALED_NAME;
    struct place place = find_current(index, name), other;
    if (!place.slot) return 0;
    if (is_marked(index, index_bits(index_head(index)->current), &place)) return 1;
    other = find_other(index, name, &place);
    return other.slot && is_marked(index, index->other_bits, &other);
}

void index_unmark(struct index *index, uint64_t hash) {
    if (!any_marks(index)) return;
    uint64_t name = index_name(hash) | SEALED_NAME;
    struct place place = find_current(index, name), other;
    if (!place.slot) return;
    mark(index, index_bits(index_head(index)->current), &place, 0);
    other = find_other(index, name, &place);
    if (other.slot) mark(index, index->other_bits, &other, 0);
}

void index_tell_due(struct index *index, double due) {
    uint64_t bits;
    memcpy(&bits, &due, 8);
    store(&index_head(index)->due, bits);
}

static const char *check_table(const struct index *index, unsigned bits, uint64_t names) {
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
    if (found != names) return "the index counts its names wrong";
    return passes == counted ? NULL : "the index counts passing searches wrong";
}

const char *index_check(const struct index *index) {
    if (!index_kept(index)) return NULL;
    unsigned bits = index_bits(index_head(index)->current);
    uint64_t copied = 0;
    const char *wrong = check_table(index, bits, index->used);
    if (wrong || index->stage != FILLING) return wrong;
    for (uint64_t number = 0; number < index->done; number++)
        for (unsigned slot = 1; slot < SLOTS; slot++) {
            uint64_t name = bucket_at(index->table, bits, number)[slot];
            if (name && !find(index, index->other_bits, name).slot) return "the index that is being filled misses a name";
            copied += name != 0;
        }
    return check_table(index, index->other_bits, copied);
}

/* --- reading --- */

struct probe {
    uint64_t name, bucket;
    unsigned slot;
};

enum met { NOWHERE, UNSEALED_NAME, WHOLE_NAME };

/* Which slots of a bucket have this name, a bit each. All seven are compared: which it is cannot be foretold, and a branch
 * would be mistaken about it. */
static inline unsigned slots_with(const uint64_t *bucket, uint64_t name) {
    unsigned same = 0;
    for (unsigned slot = 1; slot < SLOTS; slot++)
        same |= (unsigned)((load(bucket + slot) | SEALED_NAME) == (name | SEALED_NAME)) << slot;
    return same;
}

static inline enum met probe_for(const uint8_t *table, unsigned bits, struct probe *probe) {
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (uint64_t passed = 0; passed <= mask; probe->bucket = (probe->bucket + 1) & mask, passed++) {
        const uint64_t *bucket = bucket_at(table, bits, probe->bucket);
        for (unsigned same = slots_with(bucket, probe->name); same; same &= same - 1) {
            probe->slot = (unsigned)__builtin_ctz(same);
            uint64_t there = load(bucket + probe->slot);
            if ((there | SEALED_NAME) != (probe->name | SEALED_NAME)) continue;
            return there & SEALED_NAME ? WHOLE_NAME : UNSEALED_NAME;
        }
        if (!load(bucket)) return NOWHERE;
    }
    return NOWHERE;
}

/* Have the memory that a few keys are looked for in: nothing else is done meanwhile, so that as many reads as the processor
 * can have under way are. Prefetches amid other work took twice as long among ten million names. */
static inline void fetch(const uint8_t *table, unsigned bits, const struct probe *probes, int count) {
    uint64_t all = 0;
    for (int i = 0; i < count; i++) all |= __atomic_load_n(bucket_at(table, bits, probes[i].bucket), __ATOMIC_RELAXED);
    __asm__ volatile("" ::"r"(all));
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
    struct probe probes[GROUP];
    for (int tries = 0; tries < TRIES; tries++) {
        uint64_t current = load(&head->current);
        unsigned bits = index_bits(current);
        if (bits < LEAST_BITS || bits > MOST_BITS || index_table_bytes(bits) > table_bytes ||
            index_marks_bytes(bits) > marks_bytes || is_due(head))
            return -1;
        int64_t unsealed = -1, found = 0;
        for (int64_t at = 0; at < count && found == at; at += GROUP) {
            int several = count - at < GROUP ? (int)(count - at) : GROUP, here = 0;
            for (int i = 0; i < several; i++) {
                probes[i].name = index_name(index_hash(head, keys[at + i].key, keys[at + i].size));
                probes[i].bucket = index_home(probes[i].name, bits);
            }
            fetch(table, bits, probes, several);
            for (; here < several; here++) {
                enum met met = probe_for(table, bits, probes + here);
                if (as == TELL_EACH) flags[at + here] = met == WHOLE_NAME;
                else if (met == NOWHERE) break;
                if (unsealed < 0 && met == UNSEALED_NAME) unsealed = at + here;
            }
            for (int i = 0; as == COUNT_NAMES && i < here; i++)
                set_mark(marks_at(marks, bits, probes[i].bucket), probes[i].slot, 1);
            found += here;
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (load(&head->current) != current) continue;
        *sealed = unsealed < 0 ? found : unsealed;
        return found;
    }
    return -1;
}
