/* Rows, tenants, the arena and the timetable of expiry: kvrelay.pool.core.books and what is under it, in C.
 *
 * The decisions are those of the Python catalog, in the same order; a test compares the two. No Python here.
 */
#ifndef KVRELAY_BOOKS_H
#define KVRELAY_BOOKS_H

#include "blocks.h"
#include "index.h"
#include "names.h"
#include "order.h"

#define NO_ROW UINT32_MAX
#define INLINE_KEY 32
#define MAX_KEY 255
#define MAX_GENERATION ((1u << 30) - 1) /* handles stay below 2**62 */

enum state { FREE, WRITING, SEALED, GONE, STATES };
enum flags { HELD = 1, KEPT = 2, CLEAN = 4, VISITED = 8, HAS_SUMS = 16, STANDING = 96, COUNTED = 128 };
#define STANDING_SHIFT 5

/* What lookups touch: one cache line. */
struct row {
    union {
        uint8_t key[INLINE_KEY];
        uint8_t *long_key; /* of more than INLINE_KEY bytes */
    };
    uint32_t holding, size, layers, segments, pins, block, generation;
    uint8_t key_size, state, flags;
};

struct cold_row {
    double expires;
    union {
        uint64_t sum;
        uint64_t *sums; /* of more than one segment */
    };
    uint32_t older, newer; /* in the queue; of a free row, `older` is the next free one */
    uint32_t due;          /* place in the timetable; NO_ROW: not in it */
    uint32_t tag;          /* of its name */
};

struct holding {
    int64_t tenant;
    struct order order; /* of sealed objects that are not kept */
    uint64_t named, bytes, evictable_bytes, clean_bytes;
    uint64_t quota, max_objects; /* UINT64_MAX: none */
    struct index *index; /* shown to clients of this host; NULL: none */
};

struct books {
    struct blocks blocks;
    struct names names;
    struct slab rows, cold;
    uint32_t count, free; /* rows ever used; the free one to be used next */
    struct holding *holdings;
    uint32_t holding_count;
    uint32_t *timetable; /* a heap of rows by (expires, handle) */
    uint32_t due_count, due_capacity;
    double told_due; /* to the indexes: when the next expires */
    uint64_t number[STATES];
    uint64_t pinned, kept, gone_bytes, evicted_for_room, evicted_for_quota;
    uint64_t evicted_unclean; // of these
    uint64_t hopeless;  /* what was found not to fit whatever were evicted; UINT64_MAX: nothing */
    uint32_t *clearing; /* scratch: rows to be evicted together */
    uint32_t clearing_capacity;
};

enum begun { BEGUN, NO_ROOM }; /* no room: in the arena, or of the machine's memory for what is kept beside it */

int books_init(struct books *books, uint64_t arena_bytes); /* -1: no memory */
void books_clear(struct books *books);

static inline struct row *row_at(const struct books *books, uint32_t row) { return SLAB_AT(struct row, books->rows, row); }
static inline struct cold_row *cold_at(const struct books *books, uint32_t row) {
    return SLAB_AT(struct cold_row, books->cold, row);
}
static inline const uint8_t *key_of(const struct row *row) {
    return row->key_size > INLINE_KEY ? row->long_key : row->key;
}
static inline uint64_t handle_of(const struct row *row, uint32_t number) {
    return (uint64_t)row->generation << 32 | number;
}
static inline int is_whole(const struct row *row) { return row->layers == 1 && row->segments == 1; }
static inline enum standing standing_of(const struct row *row) { return row->flags >> STANDING_SHIFT & 3; }
static inline int is_evictable(const struct row *row) {
    return row->state == SEALED && !row->pins && !(row->flags & KEPT);
}

/* Index of what a tenant holds; NO_ROW: no memory. */
uint32_t books_holding(struct books *books, int64_t tenant);

/* Show what a tenant has, from now on, in an index that has just begun. It stays the caller's. */
void books_show(struct books *books, uint32_t holding, struct index *index);
/* Whether an object was asked for since that was last forgotten, here or by a client that looked it up itself. */
int books_visited(const struct books *books, uint32_t row);
void books_unvisit(struct books *books, uint32_t row);

struct wanted { /* a key that is looked for, and what is known of it on the way */
    const uint8_t *key;
    size_t size;
    uint32_t tag, row;
    size_t at;
};
/* Find rows of `count` keys (NO_ROW: none), memory latencies side by side. */
void books_find(const struct books *books, uint32_t holding, struct wanted *wanted, size_t count);
uint32_t books_find_one(const struct books *books, uint32_t holding, uint32_t tag, const uint8_t *key, size_t size);

enum begun books_begin(struct books *books, uint32_t holding, uint32_t tag, const uint8_t *key, size_t key_size,
                       uint32_t size, uint32_t layers, uint32_t segments, uint32_t *row);
/* `sums`: u64 a segment, packed. -1: no memory, nothing was done. */
int books_seal(struct books *books, uint32_t row, const uint8_t *sums, double expires);
void books_forget(struct books *books, uint32_t row);
void books_evict(struct books *books, uint32_t row); /* forget it to make room, and remember that it was there */
void books_pin(struct books *books, uint32_t row);
void books_unpin(struct books *books, uint32_t row);
void books_unhold(struct books *books, uint32_t row);
int books_keep(struct books *books, uint32_t row, int on);         /* as books_seal */
int books_expire_at(struct books *books, uint32_t row, double at); /* as books_seal */
void books_mark_clean(struct books *books, uint32_t row, int clean);
void books_trim(struct books *books, uint64_t bytes, uint32_t holding, int clean, uint64_t *objects, uint64_t *freed);
/* Rows about to be evicted and lost with it, into `rows`; how many. */
uint32_t books_victims(const struct books *books, uint32_t limit, uint32_t only, uint32_t *rows);
uint32_t books_expired(const struct books *books, double now); /* the next whose time is over; NO_ROW: none */

/* What is wrong, or NULL. Walks everything. */
const char *books_check(const struct books *books);

#endif
