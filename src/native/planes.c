/* One pass over memory: a piece of a segment (a block's tokens of one plane) is hashed and rearranged while it is in the
 * first level cache, and stored past the caches where the whole is larger than they are. */
#include "planes.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#else
#define X86 0
#endif

#define LINE 64
/* Rearranged bytes of a segment, on their way to it. */
#define BOUNCE (16u << 10)
/* Bytes that are hashed, then rearranged. */
#define PIECE (16u << 10)

static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t scrambled_bytes(size_t size) { return size ? (size - 1) / XXH3_BLOCK * XXH3_BLOCK : 0; }

/* --- transposing: to[column][row] = from[row][column]; strides in items --- */

#define TRANSPOSE_PLAIN(type)                                                                                          \
    static void transpose_##type(type *to, size_t to_stride, const type *from, size_t from_stride, size_t rows,        \
                                 size_t columns) {                                                                     \
        for (size_t r = 0; r < rows; r++)                                                                              \
            for (size_t c = 0; c < columns; c++) to[c * to_stride + r] = from[r * from_stride + c];                    \
    }
TRANSPOSE_PLAIN(uint8_t)
TRANSPOSE_PLAIN(uint16_t)
TRANSPOSE_PLAIN(uint32_t)

#if X86

#define AVX2 __attribute__((target("avx2"), always_inline)) static inline

AVX2 void load_8x8(__m256i row[8], const uint32_t *from, size_t stride) {
    for (int i = 0; i < 8; i++) row[i] = _mm256_loadu_si256((const __m256i *)(from + i * stride));
}

AVX2 void transpose_8x8(__m256i row[8]) {
    __m256i half[8], quad[8];
    for (int i = 0; i < 4; i++) {
        half[2 * i] = _mm256_unpacklo_epi32(row[2 * i], row[2 * i + 1]);
        half[2 * i + 1] = _mm256_unpackhi_epi32(row[2 * i], row[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        quad[4 * i] = _mm256_unpacklo_epi64(half[4 * i], half[4 * i + 2]);
        quad[4 * i + 1] = _mm256_unpackhi_epi64(half[4 * i], half[4 * i + 2]);
        quad[4 * i + 2] = _mm256_unpacklo_epi64(half[4 * i + 1], half[4 * i + 3]);
        quad[4 * i + 3] = _mm256_unpackhi_epi64(half[4 * i + 1], half[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        row[i] = _mm256_permute2x128_si256(quad[i], quad[i + 4], 0x20);
        row[i + 4] = _mm256_permute2x128_si256(quad[i], quad[i + 4], 0x31);
    }
}

/* Two tiles that make whole cache lines: half a line stored past the caches costs as much as all of it. */
AVX2 void line_tiles(uint32_t *to, size_t to_stride, const uint32_t *from, size_t from_stride, int streamed) {
    __m256i low[8], high[8];
    load_8x8(low, from, from_stride);
    transpose_8x8(low);
    load_8x8(high, from + 8 * from_stride, from_stride);
    transpose_8x8(high);
    for (int i = 0; i < 8; i++) {
        __m256i *line = (__m256i *)(to + i * to_stride);
        if (streamed) {
            _mm256_stream_si256(line, low[i]);
            _mm256_stream_si256(line + 1, high[i]);
        } else {
            _mm256_storeu_si256(line, low[i]);
            _mm256_storeu_si256(line + 1, high[i]);
        }
    }
}

__attribute__((target("avx2"))) static void transpose_avx2_4(uint32_t *to, size_t to_stride, const uint32_t *from,
                                                             size_t from_stride, size_t rows, size_t columns,
                                                             int streamed) {
    size_t whole_rows = rows / 16 * 16, whole_columns = columns / 8 * 8;
    streamed = streamed && (uintptr_t)to % LINE == 0 && to_stride * 4 % LINE == 0;
    for (size_t c = 0; c < whole_columns; c += 8)
        for (size_t r = 0; r < whole_rows; r += 16) {
            if (streamed)
                line_tiles(to + c * to_stride + r, to_stride, from + r * from_stride + c, from_stride, 1);
            else
                line_tiles(to + c * to_stride + r, to_stride, from + r * from_stride + c, from_stride, 0);
        }
    if (whole_rows < rows)
        transpose_uint32_t(to + whole_rows, to_stride, from + whole_rows * from_stride, from_stride, rows - whole_rows,
                           whole_columns);
    if (whole_columns < columns)
        transpose_uint32_t(to + whole_columns * to_stride, to_stride, from + whole_columns, from_stride, rows,
                           columns - whole_columns);
}

static inline void transpose_8x8_pairs(__m128i row[8]) {
    __m128i pair[8], quad[8];
    for (int i = 0; i < 4; i++) {
        pair[2 * i] = _mm_unpacklo_epi16(row[2 * i], row[2 * i + 1]);
        pair[2 * i + 1] = _mm_unpackhi_epi16(row[2 * i], row[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        quad[4 * i] = _mm_unpacklo_epi32(pair[4 * i], pair[4 * i + 2]);
        quad[4 * i + 1] = _mm_unpackhi_epi32(pair[4 * i], pair[4 * i + 2]);
        quad[4 * i + 2] = _mm_unpacklo_epi32(pair[4 * i + 1], pair[4 * i + 3]);
        quad[4 * i + 3] = _mm_unpackhi_epi32(pair[4 * i + 1], pair[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        row[2 * i] = _mm_unpacklo_epi64(quad[i], quad[i + 4]);
        row[2 * i + 1] = _mm_unpackhi_epi64(quad[i], quad[i + 4]);
    }
}

static void transpose_sse2_2(uint16_t *to, size_t to_stride, const uint16_t *from, size_t from_stride, size_t rows,
                             size_t columns, int streamed) {
    size_t whole_rows = rows / 32 * 32, whole_columns = columns / 8 * 8;
    streamed = streamed && (uintptr_t)to % LINE == 0 && to_stride * 2 % LINE == 0;
    for (size_t c = 0; c < whole_columns; c += 8)
        for (size_t r = 0; r < whole_rows; r += 32) {
            __m128i tile[4][8];
            for (int part = 0; part < 4; part++) {
                for (int i = 0; i < 8; i++)
                    tile[part][i] =
                        _mm_loadu_si128((const __m128i *)(from + (r + 8 * part + i) * from_stride + c));
                transpose_8x8_pairs(tile[part]);
            }
            for (int i = 0; i < 8; i++) {
                __m128i *line = (__m128i *)(to + (c + i) * to_stride + r);
                for (int part = 0; part < 4; part++) {
                    if (streamed) _mm_stream_si128(line + part, tile[part][i]);
                    else _mm_storeu_si128(line + part, tile[part][i]);
                }
            }
        }
    if (whole_rows < rows)
        transpose_uint16_t(to + whole_rows, to_stride, from + whole_rows * from_stride, from_stride, rows - whole_rows,
                           whole_columns);
    if (whole_columns < columns)
        transpose_uint16_t(to + whole_columns * to_stride, to_stride, from + whole_columns, from_stride, rows,
                           columns - whole_columns);
}

__attribute__((target("avx2"))) static void stream_avx2(uint8_t *to, const uint8_t *from, size_t size) {
    size_t at = 0;
    for (; at + LINE <= size; at += LINE) {
        __m256i low = _mm256_loadu_si256((const __m256i *)(from + at));
        __m256i high = _mm256_loadu_si256((const __m256i *)(from + at + LINE / 2));
        _mm256_stream_si256((__m256i *)(to + at), low);
        _mm256_stream_si256((__m256i *)(to + at + LINE / 2), high);
    }
    memcpy(to + at, from + at, size - at);
}

#endif

/* What is the same for all of a segment. */
struct way {
    const struct xxh3_kernel *kernel;
    size_t item;
    int vectors, streamed;
};

static struct way way_of(const struct xxh3_kernel *kernel, const struct pages *pages, enum xxh3_store store) {
    int vectors = X86 && strcmp(kernel->name, "plain") != 0;
    return (struct way){kernel, pages->item, vectors, vectors && store == XXH3_STREAMED};
}

static void copy(const struct way *way, uint8_t *to, const uint8_t *from, size_t size) {
#if X86
    if (way->streamed && (uintptr_t)to % LINE == 0 && size >= LINE) {
        stream_avx2(to, from, size);
        return;
    }
#endif
    (void)way;
    memcpy(to, from, size);
}

static void transpose(const struct way *way, uint8_t *to, size_t to_stride, const uint8_t *from, size_t from_stride,
                      size_t rows, size_t columns) {
    switch (way->item) {
    case 1:
        transpose_uint8_t(to, to_stride, from, from_stride, rows, columns);
        return;
    case 2:
#if X86
        if (way->vectors) {
            transpose_sse2_2((uint16_t *)to, to_stride, (const uint16_t *)from, from_stride, rows, columns, way->streamed);
            return;
        }
#endif
        transpose_uint16_t((uint16_t *)to, to_stride, (const uint16_t *)from, from_stride, rows, columns);
        return;
    default:
#if X86
        if (way->vectors) {
            transpose_avx2_4((uint32_t *)to, to_stride, (const uint32_t *)from, from_stride, rows, columns, way->streamed);
            return;
        }
#endif
        transpose_uint32_t((uint32_t *)to, to_stride, (const uint32_t *)from, from_stride, rows, columns);
    }
}

/* --- items one by one, where nothing lies together --- */

#define SCATTER(type)                                                                                                  \
    static void scatter_##type(type *to, const struct order *to_order, size_t to_token, const type *from,              \
                               const struct order *from_order, size_t from_token, size_t tokens, size_t dims) {        \
        for (size_t t = 0; t < tokens; t++) {                                                                          \
            type *to_at = to + to_order->token_at[to_token + t];                                                       \
            const type *from_at = from + from_order->token_at[from_token + t];                                         \
            for (size_t d = 0; d < dims; d++) to_at[to_order->dim_at[d]] = from_at[from_order->dim_at[d]];             \
        }                                                                                                              \
    }                                                                                                                  \
    static void spread_##type(type *to, const struct order *order, size_t token, const type *from, size_t tokens,      \
                              size_t dims) {                                                                           \
        for (size_t t = 0; t < tokens; t++)                                                                            \
            for (size_t d = 0; d < dims; d++) to[order->token_at[token + t] + order->dim_at[d]] = *from++;             \
    }                                                                                                                  \
    static void collect_##type(type *to, const type *from, const struct order *order, size_t token, size_t tokens,     \
                               size_t dims) {                                                                          \
        for (size_t t = 0; t < tokens; t++)                                                                            \
            for (size_t d = 0; d < dims; d++) *to++ = from[order->token_at[token + t] + order->dim_at[d]];             \
    }
SCATTER(uint8_t)
SCATTER(uint16_t)
SCATTER(uint32_t)

/* By the size of an item. */
#define BY_ITEM(size, function, ...)                                                                                   \
    do {                                                                                                               \
        if ((size) == 1) function##_uint8_t(__VA_ARGS__);                                                              \
        else if ((size) == 2) function##_uint16_t(__VA_ARGS__);                                                        \
        else function##_uint32_t(__VA_ARGS__);                                                                         \
    } while (0)

/* --- some tokens of one plane of one (block, head) --- */

/* From [token][dim] into slots from `slot` on. */
static void put(const struct way *way, const struct plane *plane, uint8_t *block, size_t slot, const uint8_t *from,
                size_t tokens) {
    const struct order *order = &plane->paged;
    size_t row = plane->dims * way->item;
    if (order->rows) {
        for (size_t t = 0; t < tokens;) {
            size_t run = 1, at = order->token_at[slot + t];
            while (t + run < tokens && order->token_at[slot + t + run] == at + run * plane->dims) run++;
            copy(way, block + (at + order->dim_at[0]) * way->item, from + t * row, run * row);
            t += run;
        }
    } else if (order->columns) {
        uint8_t *to = block + (order->token_at[slot] + order->dim_at[0]) * way->item;
        transpose(way, to, order->stride, from, plane->dims, tokens, plane->dims);
    } else {
        BY_ITEM(way->item, spread, (void *)block, order, slot, (const void *)from, tokens, plane->dims);
    }
}

/* Out of slots from `slot` on to [token][dim]. */
static void take(const struct way *way, const struct plane *plane, const uint8_t *block, size_t slot, uint8_t *to,
                 size_t tokens) {
    const struct order *order = &plane->paged;
    size_t row = plane->dims * way->item;
    struct way cached = *way;
    cached.streamed = 0;
    if (order->rows) {
        for (size_t t = 0; t < tokens;) {
            size_t run = 1, at = order->token_at[slot + t];
            while (t + run < tokens && order->token_at[slot + t + run] == at + run * plane->dims) run++;
            memcpy(to + t * row, block + (at + order->dim_at[0]) * way->item, run * row);
            t += run;
        }
    } else if (order->columns) {
        const uint8_t *from = block + (order->token_at[slot] + order->dim_at[0]) * way->item;
        transpose(&cached, to, plane->dims, from, order->stride, plane->dims, tokens);
    } else {
        BY_ITEM(way->item, collect, (void *)to, (const void *)block, order, slot, tokens, plane->dims);
    }
}

/* Between a block of the engine and one of an object. */
static void rearrange(const struct way *way, const struct plane *plane, uint8_t *to, const struct order *to_order,
                      const uint8_t *from, const struct order *from_order, size_t slot, size_t tokens) {
    if (!to_order->rows || !from_order->rows) {
        BY_ITEM(way->item, scatter, (void *)to, to_order, slot, (const void *)from, from_order, slot, tokens,
                plane->dims);
        return;
    }
    for (size_t t = slot; t < slot + tokens; t++)
        memcpy(to + (to_order->token_at[t] + to_order->dim_at[0]) * way->item,
               from + (from_order->token_at[t] + from_order->dim_at[0]) * way->item, plane->dims * way->item);
}

/* --- segments --- */

size_t segment_bytes(const struct pages *pages, size_t tokens) {
    if (pages->native) tokens = (tokens + pages->block_tokens - 1) / pages->block_tokens * pages->block_tokens;
    return tokens * pages->token_bytes;
}

static uint8_t *block_at(const struct pages *pages, size_t head, uint64_t block) {
    return pages->base + block * pages->block_stride + head * pages->head_stride;
}

/* Hash the segment up to `there`; what comes next is fetched meanwhile. */
static void hash_to(const struct way *way, struct xxh3_progress *progress, const uint8_t *segment, size_t size,
                    size_t there) {
    size_t end = smaller(there / XXH3_BLOCK * XXH3_BLOCK, scrambled_bytes(size));
    if (size <= XXH3_MID_MAX || end <= progress->done) return;
    struct xxh3_next next = {segment + end, NULL};
    way->kernel->blocks(progress->acc, segment + progress->done, (end - progress->done) / XXH3_BLOCK,
                        &next);
    progress->done = end;
}

/* Copy bytes [at, at + count) of a segment, in or out, hashing what has been hashed up to `at`; false if they are no
 * whole steps of the hash. `saves`: what is hashed at the end is read where it was stored, so it stays in the caches. */
static int copy_hashed(const struct way *way, struct xxh3_progress *progress, uint8_t *to, const uint8_t *from, size_t at,
                       size_t count, size_t size, const struct xxh3_next *next, int saves) {
    if (progress->done != at || count % XXH3_BLOCK || size <= XXH3_MID_MAX) return 0;
    size_t end = smaller(at + count, scrambled_bytes(size)), hashed = end - at;
    enum xxh3_store store = way->streamed && (uintptr_t)to % LINE == 0 ? XXH3_STREAMED : XXH3_CACHED;
    way->kernel->copy_blocks(progress->acc, to, from, hashed / XXH3_BLOCK, next, store);
    if (saves) memcpy(to + hashed, from + hashed, count - hashed);
    else copy(way, to + hashed, from + hashed, count - hashed);
    progress->done = end;
    return 1;
}

/* Begin to fetch what is read next. */
static inline void fetch(const uint8_t *from, size_t size) {
#if X86
    for (size_t at = 0; at < size; at += LINE) _mm_prefetch((const char *)from + at, _MM_HINT_T0);
#else
    (void)from;
    (void)size;
#endif
}

/* Have an address that is written next translated meanwhile. */
static inline void translate(const uint8_t *to) {
#if X86
    _mm_prefetch((const char *)to, _MM_HINT_T1);
#else
    (void)to;
#endif
}

/* What is read after the bytes of a segment that end at `end`. */
static inline const uint8_t *after(const uint8_t *end, const uint8_t *segment_end, const uint8_t *following) {
    return end == segment_end && following ? following : end;
}

/* Tokens to rearrange at once, so that they stay in the first level cache; the next begin at a cache line, too. */
static size_t smaller_piece(size_t row, size_t slot) {
    size_t count = PIECE / row / LINE * LINE;
    return count ? count - slot % LINE : LINE - slot % LINE;
}

/* Whether these tokens' items of a plane lie in the block as in a segment. */
static int together(const struct plane *plane, size_t slot, size_t count) {
    const size_t *token_at = plane->paged.token_at + slot;
    if (!plane->paged.rows) return 0;
    for (size_t t = 1; t < count; t++)
        if (token_at[t] != token_at[0] + t * plane->dims) return 0;
    return 1;
}

static void load_canonical(const struct way *way, const struct pages *pages, size_t head, const uint64_t *blocks,
                           const struct span *span, const uint8_t *segment, const uint8_t *following,
                           struct xxh3_progress *progress) {
    size_t size = segment_bytes(pages, span->tokens);
    const uint8_t *tokens = segment;
    for (size_t p = 0; p < pages->plane_count; p++) {
        const struct plane *plane = pages->planes + p;
        size_t row = plane->dims * way->item;
        for (size_t done = 0, count; done < span->count; done += count) {
            size_t at = span->first + done, slot = at % pages->block_tokens;
            count = smaller(pages->block_tokens - slot, span->count - done);
            if (!plane->paged.rows) count = smaller(count, smaller_piece(row, slot));
            const uint8_t *from = tokens + (span->skip + done) * row;
            uint8_t *block = block_at(pages, head, blocks[at / pages->block_tokens]);
            uint8_t *to = block + (plane->paged.token_at[slot] + plane->paged.dim_at[0]) * way->item;
            size_t offset = from - segment;
            translate(to);
            if (together(plane, slot, count)) {
                struct xxh3_next next = {after(from + count * row, segment + size, following), NULL};
                if (copy_hashed(way, progress, to, from, offset, count * row, size, &next, 0)) continue;
            }
            hash_to(way, progress, segment, size, offset + count * row);
            put(way, plane, block, slot, from, count);
        }
        tokens += span->tokens * row;
    }
}

static void load_native(const struct way *way, const struct pages *pages, size_t head, const uint64_t *blocks,
                        const struct span *span, const uint8_t *segment, const uint8_t *following,
                        struct xxh3_progress *progress) {
    size_t size = segment_bytes(pages, span->tokens), tokens = pages->block_tokens, block = tokens * pages->token_bytes;
    for (size_t at = 0, token = 0; at < size; at += block, token += tokens) {
        size_t begin = span->skip > token ? span->skip - token : 0, end = span->skip + span->count;
        end = end > token ? smaller(end - token, tokens) : 0;
        if (begin >= end) continue;
        size_t index = (span->first + token + begin - span->skip) / tokens;
        uint8_t *to = block_at(pages, head, blocks[index]);
        if (pages->alike && end - begin == tokens) {
            struct xxh3_next next = {after(segment + at + block, segment + size, following), NULL};
            if (token + 2 * tokens <= span->skip + span->count) next.to = block_at(pages, head, blocks[index + 1]);
            if (copy_hashed(way, progress, to, segment + at, at, block, size, &next, 0)) continue;
            hash_to(way, progress, segment, size, at + block);
            copy(way, to, segment + at, block);
            continue;
        }
        hash_to(way, progress, segment, size, at + block);
        for (size_t p = 0; p < pages->plane_count; p++) {
            const struct plane *plane = pages->planes + p;
            rearrange(way, plane, to, &plane->paged, segment + at, &plane->packed, begin, end - begin);
        }
    }
}

uint64_t load_segment(const struct xxh3_kernel *kernel, const struct pages *pages, size_t head, const uint64_t *blocks,
                      const struct span *span, const uint8_t *segment, const uint8_t *following, enum xxh3_store store) {
    struct way way = way_of(kernel, pages, store);
    struct xxh3_progress progress;
    xxh3_begin(&progress);
    (pages->native ? load_native : load_canonical)(&way, pages, head, blocks, span, segment, following, &progress);
    if (following) fetch(following, XXH3_BLOCK);
    return xxh3_finish(kernel, &progress, segment, segment_bytes(pages, span->tokens));
}

/* Bytes of a segment that were rearranged and are not in it yet; they begin where its hash has come to. */
struct bounce {
    uint8_t bytes[BOUNCE] __attribute__((aligned(LINE)));
    size_t filled;
};

static void flush(const struct way *way, struct bounce *bounce, struct xxh3_progress *progress, uint8_t *segment,
                  size_t size) {
    size_t at = progress->done, end = smaller((at + bounce->filled) / XXH3_BLOCK * XXH3_BLOCK, scrambled_bytes(size));
    if (end <= at) return;
    struct xxh3_next next = {bounce->bytes, segment + end};
    enum xxh3_store store = way->streamed && (uintptr_t)segment % LINE == 0 ? XXH3_STREAMED : XXH3_CACHED;
    way->kernel->copy_blocks(progress->acc, segment + at, bounce->bytes, (end - at) / XXH3_BLOCK, &next, store);
    progress->done = end;
    bounce->filled -= end - at;
    memmove(bounce->bytes, bounce->bytes + (end - at), bounce->filled);
}

static void save_canonical(const struct way *way, const struct pages *pages, size_t head, const uint64_t *blocks,
                           const struct span *span, uint8_t *segment, struct xxh3_progress *progress) {
    size_t size = segment_bytes(pages, span->tokens);
    struct bounce bounce;
    bounce.filled = 0;
    int bounces = size > XXH3_MID_MAX;
    for (size_t p = 0; p < pages->plane_count; p++)
        if (pages->planes[p].dims * way->item > BOUNCE / 4) bounces = 0;
    for (size_t p = 0, from = 0; p < pages->plane_count; p++) {
        const struct plane *plane = pages->planes + p;
        size_t row = plane->dims * way->item;
        for (size_t done = 0, count; done < span->tokens; done += count, from += count * row) {
            size_t at = span->first + done, slot = at % pages->block_tokens;
            const uint8_t *block = block_at(pages, head, blocks[at / pages->block_tokens]);
            count = smaller(pages->block_tokens - slot, span->tokens - done);
            if (bounces) {
                /* At most one step of the hash, 1024 bytes, is left by a flush. */
                count = smaller(count, (BOUNCE - bounce.filled) / row);
                take(way, plane, block, slot, bounce.bytes + bounce.filled, count);
                bounce.filled += count * row;
                flush(way, &bounce, progress, segment, size);
            } else {
                take(way, plane, block, slot, segment + from, count);
                hash_to(way, progress, segment, size, from + count * row);
            }
        }
    }
    if (bounces) memcpy(segment + progress->done, bounce.bytes, bounce.filled);
}

static void save_native(const struct way *way, const struct pages *pages, size_t head, const uint64_t *blocks,
                        const struct span *span, uint8_t *segment, struct xxh3_progress *progress) {
    size_t size = segment_bytes(pages, span->tokens), tokens = pages->block_tokens, block = tokens * pages->token_bytes;
    for (size_t at = 0, token = 0; at < size; at += block, token += tokens) {
        size_t count = smaller(span->tokens - token, tokens), index = (span->first + token) / tokens;
        const uint8_t *from = block_at(pages, head, blocks[index]);
        if (pages->alike && count == tokens) {
            struct xxh3_next next = {NULL, segment + at + block};
            if (token + 2 * tokens <= span->tokens) next.from = block_at(pages, head, blocks[index + 1]);
            if (copy_hashed(way, progress, segment + at, from, at, block, size, &next, 1)) continue;
            memcpy(segment + at, from, block);
        } else {
            if (count < tokens) memset(segment + at, 0, block);
            for (size_t p = 0; p < pages->plane_count; p++) {
                const struct plane *plane = pages->planes + p;
                rearrange(way, plane, segment + at, &plane->packed, from, &plane->paged, 0, count);
            }
        }
        hash_to(way, progress, segment, size, at + block);
    }
}

uint64_t save_segment(const struct xxh3_kernel *kernel, const struct pages *pages, size_t head, const uint64_t *blocks,
                      const struct span *span, uint8_t *segment, enum xxh3_store store) {
    struct way way = way_of(kernel, pages, store);
    struct xxh3_progress progress;
    xxh3_begin(&progress);
    (pages->native ? save_native : save_canonical)(&way, pages, head, blocks, span, segment, &progress);
    return xxh3_finish(kernel, &progress, segment, segment_bytes(pages, span->tokens));
}
