#include "books.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PEEK 16
#define MAX_TRIES 32
#define MOST_BLOCKS 1024
#define REACH 4

static inline struct holding *holding_of(const struct books *books, const struct row *row) {
    return books->holdings + row->holding;
}
static inline uint64_t span_of(const struct row *row) { return rounded(row->size); }

int books_init(struct books *books, uint64_t arena_bytes) {
    memset(books, 0, sizeof *books);
    books->rows.item_bytes = sizeof(struct row);
    books->cold.item_bytes = sizeof(struct cold_row);
    books->free = NO_ROW;
    books->hopeless = UINT64_MAX;
    books->told_due = INFINITY;
    if (blocks_init(&books->blocks, arena_bytes) < 0 || names_init(&books->names) < 0) return -1;
    return 0;
}

static void drop_contents(struct row *row, struct cold_row *cold) {
    if (row->key_size > INLINE_KEY) free(row->long_key);
    if (row->flags & HAS_SUMS && !is_whole(row)) free(cold->sums);
    row->key_size = 0;
    row->flags = 0;
}

void books_clear(struct books *books) {
    for (uint32_t row = 0; row < books->count; row++)
        if (row_at(books, row)->state != FREE) drop_contents(row_at(books, row), cold_at(books, row));
    blocks_clear(&books->blocks);
    names_clear(&books->names);
    slab_free(&books->rows);
    slab_free(&books->cold);
    for (uint32_t i = 0; i < books->holding_count; i++) order_clear(&books->holdings[i].order);
    free(books->holdings);
    free(books->timetable);
    free(books->clearing);
}

uint32_t books_holding(struct books *books, int64_t tenant) {
    for (uint32_t i = 0; i < books->holding_count; i++)
        if (books->holdings[i].tenant == tenant) return i;
    uint32_t count = books->holding_count;
    if (!(count & (count - 1))) {
        struct holding *holdings = realloc(books->holdings, (count ? 2 * count : 1) * sizeof *holdings);
        if (!holdings) return NO_ROW;
        books->holdings = holdings;
    }
    books->holdings[count] = (struct holding){.tenant = tenant, .quota = UINT64_MAX, .max_objects = UINT64_MAX};
    order_init(&books->holdings[count].order, books->names.secret[1]);
    return books->holding_count++;
}

/* --- what clients of this host see --- */

static uint64_t shown_as(const struct index *index, const struct row *row) {
    return index_hash(index_head(index), key_of(row), row->key_size);
}

void books_show(struct books *books, uint32_t holding, struct index *index) {
    books->holdings[holding].index = index;
    index_tell_due(index, books->told_due);
    for (uint32_t number = 0; number < books->count; number++) {
        const struct row *row = row_at(books, number);
        if (row->holding == holding && (row->state == WRITING || row->state == SEALED))
            index_add(index, shown_as(index, row), row->state == SEALED);
    }
}

int books_visited(const struct books *books, uint32_t number) {
    const struct row *row = row_at(books, number);
    const struct index *index = holding_of(books, row)->index;
    return row->flags & VISITED || (index && index_marked(index, shown_as(index, row)));
}

void books_unvisit(struct books *books, uint32_t number) {
    struct row *row = row_at(books, number);
    struct index *index = holding_of(books, row)->index;
    row->flags &= ~VISITED;
    if (index) index_unmark(index, shown_as(index, row));
}

static void tell_due(struct books *books) {
    double due = books->due_count ? cold_at(books, books->timetable[0])->expires : INFINITY;
    if (due == books->told_due) return;
    books->told_due = due;
    for (uint32_t i = 0; i < books->holding_count; i++)
        if (books->holdings[i].index) index_tell_due(books->holdings[i].index, due);
}

/* --- names --- */

static int is_named(const struct row *row, uint32_t holding, const uint8_t *key, size_t size) {
    return row->key_size == size && row->holding == holding && !memcmp(key_of(row), key, size);
}

uint32_t books_find_one(const struct books *books, uint32_t holding, uint32_t tag, const uint8_t *key, size_t size) {
    size_t at = names_start(&books->names, tag);
    for (;;) {
        uint32_t row = names_next(&books->names, tag, &at);
        if (row == NO_ROW || is_named(row_at(books, row), holding, key, size)) return row;
    }
}

void books_find(const struct books *books, uint32_t holding, struct wanted *wanted, size_t count) {
    const struct names *names = &books->names;
    for (size_t i = 0; i < count; i++) {
        wanted[i].tag = names_tag(names, holding, wanted[i].key, wanted[i].size);
        wanted[i].at = names_start(names, wanted[i].tag);
        __builtin_prefetch(names_slot(names, wanted[i].tag, wanted[i].at));
    }
    for (size_t i = 0; i < count; i++) {
        wanted[i].row = names_next(names, wanted[i].tag, &wanted[i].at);
        if (wanted[i].row != NO_ROW) __builtin_prefetch(row_at(books, wanted[i].row), 1);
    }
    for (size_t i = 0; i < count; i++)
        while (wanted[i].row != NO_ROW && !is_named(row_at(books, wanted[i].row), holding, wanted[i].key, wanted[i].size))
            wanted[i].row = names_next(names, wanted[i].tag, &wanted[i].at);
}

static uint32_t mark_of_row(const struct row *row) { return mark_of(key_of(row), row->key_size); }

static uint32_t victim_of(struct books *books, struct holding *holding, int clean) {
    if (!(clean ? holding->clean_bytes : holding->evictable_bytes)) return NO_ROW;
    return order_victim(books, &holding->order, clean);
}

/* --- the timetable --- */

static int sooner(const struct books *books, uint32_t a, uint32_t b) {
    double x = cold_at(books, a)->expires, y = cold_at(books, b)->expires;
    return x < y || (x == y && handle_of(row_at(books, a), a) < handle_of(row_at(books, b), b));
}

static void put_due(struct books *books, uint32_t place, uint32_t row) {
    books->timetable[place] = row;
    cold_at(books, row)->due = place;
}

/* Move a row from `place` to where it belongs. */
static void sift(struct books *books, uint32_t place, uint32_t row) {
    for (; place && sooner(books, row, books->timetable[(place - 1) / 2]); place = (place - 1) / 2)
        put_due(books, place, books->timetable[(place - 1) / 2]);
    for (uint32_t child; (child = 2 * place + 1) < books->due_count; place = child) {
        if (child + 1 < books->due_count && sooner(books, books->timetable[child + 1], books->timetable[child])) child++;
        if (!sooner(books, books->timetable[child], row)) break;
        put_due(books, place, books->timetable[child]);
    }
    put_due(books, place, row);
}

static void take_off(struct books *books, uint32_t row) {
    uint32_t place = cold_at(books, row)->due, last;
    if (place == NO_ROW) return;
    cold_at(books, row)->due = NO_ROW;
    last = books->timetable[--books->due_count];
    if (last != row) sift(books, place, last);
    tell_due(books);
}

static int prepare_due(struct books *books) {
    if (books->due_count < books->due_capacity) return 0;
    uint32_t capacity = books->due_capacity ? books->due_capacity + books->due_capacity / 2 : 64;
    uint32_t *timetable = realloc(books->timetable, capacity * sizeof *timetable);
    if (!timetable) return -1;
    books->timetable = timetable;
    books->due_capacity = capacity;
    return 0;
}

int books_expire_at(struct books *books, uint32_t row, double at) {
    if (prepare_due(books) < 0) return -1;
    take_off(books, row);
    cold_at(books, row)->expires = at;
    if (row_at(books, row)->state == SEALED && !(row_at(books, row)->flags & KEPT) && at != INFINITY)
        sift(books, books->due_count++, row);
    tell_due(books);
    return 0;
}

uint32_t books_expired(const struct books *books, double now) {
    return books->due_count && cold_at(books, books->timetable[0])->expires <= now ? books->timetable[0] : NO_ROW;
}

/* --- what can be evicted --- */

static void account(struct books *books, struct row *row, int sign) {
    struct holding *holding = holding_of(books, row);
    struct fifo *fifo = &holding->order.queues[standing_of(row)];
    uint64_t bytes = sign > 0 ? span_of(row) : -span_of(row);
    uint32_t one = sign > 0 ? 1 : UINT32_MAX;
    holding->evictable_bytes += bytes;
    fifo->idle += one;
    if (row->flags & CLEAN) {
        holding->clean_bytes += bytes;
        fifo->clean_idle += one;
    }
    row->flags = sign > 0 ? row->flags | COUNTED : row->flags & ~COUNTED;
}

static void changed(struct books *books, struct row *row, int was) {
    if (is_evictable(row) == was) return;
    account(books, row, was ? -1 : 1);
    if (!was) books->hopeless = UINT64_MAX;
}

/* --- the end of an object --- */

static void settle(struct books *books, uint32_t number) {
    struct row *row = row_at(books, number);
    struct cold_row *cold = cold_at(books, number);
    if (row->state != GONE || row->pins || row->flags & HELD) return;
    row->state = FREE;
    books->number[GONE]--;
    books->gone_bytes -= row->size;
    holding_of(books, row)->bytes -= span_of(row);
    blocks_free(&books->blocks, row->block);
    books->hopeless = UINT64_MAX;
    drop_contents(row, cold);
    if (row->generation == MAX_GENERATION) return; /* never used again */
    cold->older = books->free;
    books->free = number;
}

static void forget(struct books *books, uint32_t number, int evicted) {
    struct row *row = row_at(books, number);
    if (row->state != WRITING && row->state != SEALED) return;
    int was = is_evictable(row);
    struct index *index = holding_of(books, row)->index;
    if (index) index_drop(index, shown_as(index, row), row->state == SEALED);
    if (row->state == SEALED) {
        take_off(books, number);
        if (row->flags & KEPT) {
            books->kept--;
            row->flags &= ~KEPT;
        } else if (evicted) {
            order_evict(books, &holding_of(books, row)->order, number, mark_of_row(row));
        } else {
            order_remove(books, &holding_of(books, row)->order, number);
        }
    }
    books->number[row->state]--;
    books->number[GONE]++;
    books->gone_bytes += row->size;
    row->state = GONE;
    holding_of(books, row)->named--;
    names_remove(&books->names, cold_at(books, number)->tag, number);
    if (was) account(books, row, -1);
    settle(books, number);
}

void books_forget(struct books *books, uint32_t number) { forget(books, number, 0); }

void books_evict(struct books *books, uint32_t number) { forget(books, number, 1); }

void books_pin(struct books *books, uint32_t number) {
    struct row *row = row_at(books, number);
    int was = is_evictable(row);
    books->pinned += !row->pins;
    row->pins++;
    changed(books, row, was);
}

void books_unpin(struct books *books, uint32_t number) {
    struct row *row = row_at(books, number);
    if (--row->pins) return;
    books->pinned--;
    changed(books, row, 0);
    settle(books, number);
}

void books_unhold(struct books *books, uint32_t number) {
    row_at(books, number)->flags &= ~HELD;
    settle(books, number);
}

int books_keep(struct books *books, uint32_t number, int on) {
    struct row *row = row_at(books, number);
    if (!(row->flags & KEPT) == !on) return 0;
    if (prepare_due(books) < 0) return -1;
    int was = is_evictable(row);
    if (on) {
        row->flags |= KEPT;
        books->kept++;
        take_off(books, number);
        order_remove(books, &holding_of(books, row)->order, number);
    } else {
        row->flags &= ~KEPT;
        books->kept--;
        order_add(books, &holding_of(books, row)->order, number, mark_of_row(row));
        books_expire_at(books, number, cold_at(books, number)->expires);
    }
    changed(books, row, was);
    return 0;
}

void books_mark_clean(struct books *books, uint32_t number, int clean) {
    struct row *row = row_at(books, number);
    int counted = is_evictable(row);
    if (counted) account(books, row, -1);
    row->flags = clean ? row->flags | CLEAN : row->flags & ~CLEAN;
    if (counted) account(books, row, 1);
}

int books_seal(struct books *books, uint32_t number, const uint8_t *sums, double expires) {
    struct row *row = row_at(books, number);
    struct cold_row *cold = cold_at(books, number);
    if (prepare_due(books) < 0) return -1;
    if (is_whole(row)) {
        memcpy(&cold->sum, sums, 8);
    } else {
        size_t bytes = 8 * (size_t)row->layers * row->segments;
        uint64_t *copy = malloc(bytes);
        if (!copy) return -1;
        memcpy(copy, sums, bytes);
        cold->sums = copy;
    }
    row->flags = (row->flags | HAS_SUMS) & ~HELD;
    row->state = SEALED;
    books->number[WRITING]--;
    books->number[SEALED]++;
    struct index *index = holding_of(books, row)->index;
    if (index) index_seal(index, shown_as(index, row));
    order_add(books, &holding_of(books, row)->order, number, mark_of_row(row));
    changed(books, row, 0);
    return books_expire_at(books, number, expires);
}

/* --- room --- */

static uint64_t cost_of(const struct books *books, uint32_t block) {
    uint32_t number = block_at(&books->blocks, block)->up;
    uint64_t span = span_of(row_at(books, number));
    if (!is_evictable(row_at(books, number))) return 0;
    return order_spares(books, number) ? span + span / 2 : span; /* clearing.HOT_COST */
}

/* Growing the hole by one object and the free block beside it. */
struct step {
    uint32_t block; /* 0: it cannot be grown */
    uint64_t cost, edge;
    uint32_t beyond;
};

static uint32_t live_before(const struct blocks *blocks, uint32_t block, uint64_t *edge) {
    uint32_t neighbour = block_at(blocks, block)->before;
    const struct block *there = block_at(blocks, neighbour);
    *edge = block_offset(block_state(there) == BLOCK_FREE ? there : block_at(blocks, block));
    return block_state(there) == BLOCK_FREE ? there->before : neighbour;
}

static uint32_t live_after(const struct blocks *blocks, uint32_t block, uint64_t *edge) {
    uint32_t neighbour = block_at(blocks, block)->after;
    const struct block *there = block_at(blocks, neighbour);
    *edge = block_offset(block_at(blocks, block)) + block_at(blocks, block)->length;
    if (block_state(there) != BLOCK_FREE) return neighbour;
    *edge += there->length;
    return there->after;
}

static struct step step_over(const struct books *books, uint32_t block, int up) {
    struct step step = {0, 0, 0, 0};
    uint64_t cost = block ? cost_of(books, block) : 0;
    if (!cost) return step;
    step.block = block;
    step.cost = cost;
    step.beyond = (up ? live_after : live_before)(&books->blocks, block, &step.edge);
    return step;
}

/* What each byte gained costs if the hole ends at the step's edge now; of use are only those `missing`, if any. */
static double per_byte(const struct step *step, uint64_t edge, uint64_t missing) {
    uint64_t gained = step->edge > edge ? step->edge - edge : edge - step->edge;
    return (double)step->cost / (double)(missing && missing < gained ? missing : gained);
}

/* Rows to evict, into `clearing`, so that `need` bytes fit where `seed` is; 0: not possible there. */
static uint32_t window(struct books *books, uint32_t seed, uint64_t need) {
    const struct blocks *blocks = &books->blocks;
    uint64_t start, end, spent = cost_of(books, seed);
    uint32_t count = 0;
    if (!spent) return 0;
    books->clearing[count++] = block_at(blocks, seed)->up;
    uint32_t left = live_before(blocks, seed, &start), right = live_after(blocks, seed, &end);
    int64_t low = (int64_t)start - REACH * (int64_t)need;
    uint64_t high = end + REACH * need;
    struct step down = step_over(books, left, 0), up = step_over(books, right, 1);
    while (count < MOST_BLOCKS) {
        uint64_t fitting = room(start, end), missing = fitting < need ? need - fitting : 0;
        int goes_up = up.block && (!down.block || per_byte(&up, end, missing) < per_byte(&down, start, missing));
        struct step step = goes_up ? up : down;
        if (!step.block) break;
        uint64_t new_start = goes_up ? start : down.edge, new_end = goes_up ? up.edge : end;
        uint64_t fits = fitting / need, would_fit = room(new_start, new_end) / need;
        if (fits && (unsigned __int128)(spent + step.cost) * fits >= (unsigned __int128)spent * would_fit) break;
        books->clearing[count++] = block_at(blocks, step.block)->up;
        spent += step.cost;
        start = new_start;
        end = new_end;
        if (goes_up) up = end < high ? step_over(books, step.beyond, 1) : (struct step){0, 0, 0, 0};
        else down = (int64_t)start > low ? step_over(books, step.beyond, 0) : (struct step){0, 0, 0, 0};
    }
    return room(start, end) >= need ? count : 0;
}

static int prepare_clearing(struct books *books, uint32_t count) {
    if (count <= books->clearing_capacity) return 0;
    uint32_t capacity = books->clearing_capacity ? books->clearing_capacity : MOST_BLOCKS;
    while (capacity < count) capacity *= 2;
    uint32_t *clearing = realloc(books->clearing, capacity * sizeof *clearing);
    if (!clearing) return -1;
    books->clearing = clearing;
    books->clearing_capacity = capacity;
    return 0;
}

/* The first run of free and evictable bytes that is long enough, into `clearing`; how many rows, -1: no memory. */
static int64_t anywhere(struct books *books, uint64_t span) {
    const struct blocks *blocks = &books->blocks;
    uint64_t start = 0;
    uint32_t count = 0;
    for (uint32_t number = block_at(blocks, 0)->after; number; number = block_at(blocks, number)->after) {
        const struct block *block = block_at(blocks, number);
        uint64_t end = block_offset(block) + block->length;
        if (block_state(block) == BLOCK_LIVE) {
            if (!is_evictable(row_at(books, block->up))) {
                count = 0;
                start = end;
                continue;
            }
            if (prepare_clearing(books, count + 1) < 0) return -1;
            books->clearing[count++] = block->up;
        }
        if (room(start, end) >= span) return count;
    }
    return 0;
}

/* Whom to evict so that `span` bytes fit in one piece, into `clearing`; how many, 0: nothing helps, -1: no memory. */
static int64_t victims_for(struct books *books, uint64_t span) {
    uint64_t evictable = 0;
    if (span > books->blocks.size || span >= books->hopeless) return 0;
    for (uint32_t i = 0; i < books->holding_count; i++) evictable += books->holdings[i].evictable_bytes;
    if (books->blocks.free_bytes + evictable >= span) {
        for (int tries = evictable ? MAX_TRIES : 0; tries; tries--) {
            struct holding *most = NULL;
            for (struct holding *h = books->holdings; h < books->holdings + books->holding_count; h++)
                if (h->evictable_bytes && (!most || h->bytes > most->bytes)) most = h;
            uint32_t victim = victim_of(books, most, 0);
            if (victim == NO_ROW) break;
            uint32_t count = window(books, row_at(books, victim)->block, span);
            if (count) return count;
        }
        int64_t count = anywhere(books, span);
        if (count) return count;
    }
    books->hopeless = span;
    return 0;
}

static uint64_t beyond(uint64_t wanted, uint64_t most) { return wanted > most ? wanted - most : 0; }

static int within_quota(struct books *books, struct holding *holding, uint64_t span) {
    uint64_t evictable = 0;
    for (int standing = 0; standing < STANDINGS; standing++) evictable += holding->order.queues[standing].idle;
    if (beyond(holding->bytes + span, holding->quota) > holding->evictable_bytes ||
        beyond(holding->named + 1, holding->max_objects) > evictable)
        return 0;
    while (beyond(holding->bytes + span, holding->quota) || beyond(holding->named + 1, holding->max_objects)) {
        uint32_t victim = victim_of(books, holding, 0);
        if (victim == NO_ROW) break;
        books->evicted_unclean += !(row_at(books, victim)->flags & CLEAN);
        books_evict(books, victim);
        books->evicted_for_quota++;
    }
    return 1;
}

enum begun books_begin(struct books *books, uint32_t holding_number, uint32_t tag, const uint8_t *key,
                       size_t key_size, uint32_t size, uint32_t layers, uint32_t segments, uint32_t *begun) {
    struct holding *holding = books->holdings + holding_number;
    uint8_t *long_key = NULL;
    if (names_prepare(&books->names) < 0 || prepare_clearing(books, MOST_BLOCKS) < 0 ||
        slab_reach(&books->rows, books->count) < 0 || slab_reach(&books->cold, books->count) < 0)
        return NO_ROOM;
    if (!within_quota(books, holding, rounded(size))) return NO_ROOM;
    uint32_t number = books->free == NO_ROW ? books->count : books->free, block;
    struct row *row = row_at(books, number);
    struct cold_row *cold = cold_at(books, number);
    if (number < books->count) books->free = cold->older;
    if (key_size > INLINE_KEY) long_key = malloc(key_size);
    int failed = blocks_prepare(&books->blocks) < 0 || (key_size > INLINE_KEY && !long_key);
    while (!failed && !(block = blocks_allocate(&books->blocks, size, number))) {
        int64_t count = victims_for(books, rounded(size));
        if (count <= 0) {
            failed = 1;
            break;
        }
        for (int64_t i = 0; i < count; i++) {
            books->evicted_unclean += !(row_at(books, books->clearing[i])->flags & CLEAN);
            books_evict(books, books->clearing[i]);
        }
        books->evicted_for_room += (uint64_t)count;
    }
    if (number < books->count) row->generation++;
    if (failed) {
        free(long_key);
        if (number < books->count && row->generation < MAX_GENERATION) {
            cold->older = books->free;
            books->free = number;
        }
        return NO_ROOM;
    }
    if (number == books->count) {
        row->generation = 1;
        books->count++;
    }
    if (long_key) row->long_key = long_key;
    memcpy(long_key ? long_key : row->key, key, key_size);
    row->key_size = (uint8_t)key_size;
    row->holding = holding_number;
    row->size = size;
    row->layers = layers;
    row->segments = segments;
    row->pins = 0;
    row->block = block;
    row->state = WRITING;
    row->flags = 0;
    *cold = (struct cold_row){.expires = INFINITY, .older = NO_ROW, .newer = NO_ROW, .due = NO_ROW, .tag = tag};
    names_add(&books->names, tag, number);
    if (holding->index) index_add(holding->index, shown_as(holding->index, row), 0);
    holding->bytes += rounded(size);
    holding->named++;
    books->number[WRITING]++;
    *begun = number;
    return BEGUN;
}

/* --- losing objects --- */

void books_trim(struct books *books, uint64_t bytes, uint32_t only, int clean, uint64_t *objects, uint64_t *freed) {
    *objects = *freed = 0;
    while (*freed < bytes) {
        struct holding *most = NULL;
        for (uint32_t i = 0; i < books->holding_count; i++) {
            struct holding *holding = books->holdings + i;
            if ((only == NO_ROW || only == i) && (clean ? holding->clean_bytes : holding->evictable_bytes) &&
                (!most || holding->bytes > most->bytes))
                most = holding;
        }
        uint32_t victim = most ? victim_of(books, most, clean) : NO_ROW;
        if (victim == NO_ROW) return;
        ++*objects;
        *freed += span_of(row_at(books, victim));
        books_evict(books, victim);
    }
}

uint32_t books_victims(const struct books *books, uint32_t limit, uint32_t only, uint32_t *rows) {
    uint32_t count = 0, done = 0;
    uint8_t *seen = calloc(books->holding_count ? books->holding_count : 1, 1);
    if (!seen) return 0;
    for (; done < books->holding_count && count < limit; done++) {
        uint32_t most = NO_ROW;
        for (uint32_t i = 0; i < books->holding_count; i++)
            if (!seen[i] && (only == NO_ROW || only == i) &&
                (most == NO_ROW || books->holdings[i].bytes > books->holdings[most].bytes))
                most = i;
        if (most == NO_ROW) break;
        seen[most] = 1;
        const struct order *order = &books->holdings[most].order;
        uint32_t number = NO_ROW;
        int queue = -1;
        for (uint64_t peek = (uint64_t)MAX_PEEK * limit; peek && count < limit; peek--) {
            if ((number = order_next(books, order, &queue, number)) == NO_ROW) break;
            const struct row *row = row_at(books, number);
            if (is_evictable(row) && !(row->flags & CLEAN) && !books_visited(books, number)) rows[count++] = number;
        }
    }
    free(seen);
    return count;
}

/* --- order --- */

static const char *check_holding(const struct books *books, uint32_t index) {
    const struct holding *holding = books->holdings + index;
    uint64_t sealed = 0, bytes = 0, evictable = 0, clean = 0, queued = 0, kept = 0, named = 0;
    for (uint32_t number = 0; number < books->count; number++) {
        const struct row *row = row_at(books, number);
        if (row->state == FREE || row->holding != index) continue;
        bytes += span_of(row);
        named += row->state == WRITING || row->state == SEALED;
        if (holding->index && row->state != GONE && !index_has(holding->index, shown_as(holding->index, row), row->state == SEALED))
            return "the index misses a name";
        sealed += row->state == SEALED;
        kept += row->state == SEALED && row->flags & KEPT;
        if (!is_evictable(row)) continue;
        evictable += span_of(row);
        clean += row->flags & CLEAN ? span_of(row) : 0;
    }
    for (int standing = 0; standing < STANDINGS; standing++) {
        const struct fifo *fifo = &holding->order.queues[standing];
        uint32_t older = NO_ROW, found = 0, idle = 0, clean_idle = 0;
        for (uint32_t number = fifo->oldest; number != NO_ROW; older = number, number = cold_at(books, number)->newer) {
            const struct row *row = row_at(books, number);
            if (row->state != SEALED || row->flags & KEPT || row->holding != index) return "a queue has a wrong row";
            if (standing_of(row) != (enum standing)standing) return "a row is in another queue than it stands";
            if (cold_at(books, number)->older != older) return "a queue is broken";
            if (++found > sealed) return "a queue has a loop";
            idle += is_evictable(row);
            clean_idle += is_evictable(row) && row->flags & CLEAN;
        }
        if (fifo->idle != idle || fifo->clean_idle != clean_idle) return "a queue counts those it may give up wrong";
        if (fifo->newest != older || fifo->count != found) return "a queue's end is wrong";
        queued += found;
    }
    if (queued != sealed - kept) return "a queue misses a row";
    if (holding->index && index_kept(holding->index)) {
        const char *wrong = index_check(holding->index);
        if (wrong || named != holding->index->used) return wrong ? wrong : "the index has another number of names";
    }
    if (named != holding->named || bytes != holding->bytes) return "a holding is counted wrong";
    if (evictable != holding->evictable_bytes || clean != holding->clean_bytes) return "evictable bytes are counted wrong";
    return NULL;
}

static const char *check_row(const struct books *books, uint32_t number) {
    const struct row *row = row_at(books, number);
    const struct cold_row *cold = cold_at(books, number);
    const struct block *block = block_at(&books->blocks, row->block);
    if (block_state(block) != BLOCK_LIVE || block->up != number || block->length != span_of(row))
        return "a row is not its block's";
    if (row->state == GONE) {
        if (!row->pins && !(row->flags & HELD)) return "bytes nobody can touch are not free";
    } else if (cold->tag != names_tag(&books->names, row->holding, key_of(row), row->key_size) ||
               books_find_one(books, row->holding, cold->tag, key_of(row), row->key_size) != number) {
        return "a row is not found by its name";
    }
    if (row->state == SEALED && (!(row->flags & HAS_SUMS))) return "a sealed row has no checksums";
    int due = row->state == SEALED && !(row->flags & KEPT) && cold->expires != INFINITY;
    if (due != (cold->due != NO_ROW)) return "the timetable misses a row, or has one too many";
    if (due && (cold->due >= books->due_count || books->timetable[cold->due] != number)) return "a row is not where it is due";
    if (due && cold->due && sooner(books, number, books->timetable[(cold->due - 1) / 2])) return "the timetable is not a heap";
    return NULL;
}

const char *books_check(const struct books *books) {
    uint64_t number[STATES] = {0}, pinned = 0, kept = 0, gone_bytes = 0, due = 0, free_rows = 0, retired = 0;
    const char *wrong = blocks_check(&books->blocks);
    if (!wrong) wrong = names_check(&books->names);
    for (uint32_t i = 0; !wrong && i < books->count; i++) {
        const struct row *row = row_at(books, i);
        number[row->state]++;
        if (row->state == FREE) {
            retired += row->generation == MAX_GENERATION;
            continue;
        }
        pinned += row->pins > 0;
        kept += (row->flags & KEPT) != 0;
        gone_bytes += row->state == GONE ? row->size : 0;
        due += cold_at(books, i)->due != NO_ROW;
        wrong = check_row(books, i);
    }
    for (uint32_t i = 0; !wrong && i < books->holding_count; i++) wrong = check_holding(books, i);
    if (wrong) return wrong;
    for (uint32_t row = books->free; row != NO_ROW; row = cold_at(books, row)->older)
        if (row_at(books, row)->state != FREE || ++free_rows > number[FREE]) return "the free rows are wrong";
    if (free_rows + retired != number[FREE]) return "a free row is lost";
    for (int state = WRITING; state < STATES; state++)
        if (number[state] != books->number[state]) return "states are counted wrong";
    if (books->names.used != number[WRITING] + number[SEALED]) return "names are counted wrong";
    if (pinned != books->pinned || kept != books->kept || gone_bytes != books->gone_bytes) return "a gauge is wrong";
    return due == books->due_count ? NULL : "the timetable is counted wrong";
}
