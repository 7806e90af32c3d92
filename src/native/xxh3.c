/* XXH3-64, written from the published specification (xxHash, doc/xxhash_spec.md): seed 0, default secret.
 *
 * Inputs over 240 bytes are consumed in blocks of 16 stripes of 64 bytes by eight 64-bit lanes. That loop exists three
 * times (plain C, AVX2, AVX-512) and, of each, once with a store beside the load: a copy that hashes costs what the copy
 * costs, because the lanes need far fewer cycles than memory does.
 */
#include "xxh3.h"

#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define X86 1
#else
#define X86 0
#endif

#define P32_1 0x9E3779B1U
#define P32_2 0x85EBCA77U
#define P32_3 0xC2B2AE3DU
#define P64_1 0x9E3779B185EBCA87ULL
#define P64_2 0xC2B2AE3D27D4EB4FULL
#define P64_3 0x165667B19E3779F9ULL
#define P64_4 0x85EBCA77C2B2AE63ULL
#define P64_5 0x27D4EB2F165667C5ULL
#define MX1 0x165667919E3779F9ULL
#define MX2 0x9FB21C651E98DF25ULL

#define STRIPE 64
#define HALF 32
#define STRIPES (XXH3_BLOCK / STRIPE)
#define SECRET_SIZE 192
#define PAGE 4096

/* Loads run this many blocks ahead, and at an object's end into the next one: hardware prefetchers stop at every page. */
#define AHEAD 4

#if defined(__clang__)
#define PLAIN
#else
#define PLAIN __attribute__((optimize("no-tree-vectorize", "unroll-loops")))
#endif

static const uint8_t SECRET[SECRET_SIZE] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
#define SCRAMBLE_SECRET (SECRET + SECRET_SIZE - STRIPE)

static const uint64_t START[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};

static const struct xxh3_next NOTHING_NEXT = {NULL, NULL};

/* What to load beside a block, `left` blocks before the end. */
static inline const uint8_t *ahead_of(const uint8_t *from, size_t left, const uint8_t *next) {
    return left > AHEAD ? from + AHEAD * XXH3_BLOCK : next ? next + (AHEAD - left) * XXH3_BLOCK : from;
}

/* A byte of the page that will be written after this one, so that its address is translated by then. */
static inline const uint8_t *page_after(const uint8_t *to, size_t left, const uint8_t *next) {
    return left * XXH3_BLOCK > PAGE || !next ? to + 2 * PAGE - STRIPE : next;
}

static inline uint64_t u64_at(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static inline uint32_t u32_at(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

static inline uint64_t rotated(uint64_t value, int by) { return value << by | value >> (64 - by); }

/* Both halves of the 128-bit product, folded. */
static inline uint64_t folded_product(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t x) {
    x ^= x >> 37;
    x *= MX1;
    return x ^ x >> 32;
}

static inline uint64_t avalanche_64(uint64_t x) {
    x ^= x >> 33;
    x *= P64_2;
    x ^= x >> 29;
    x *= P64_3;
    return x ^ x >> 32;
}

/* --- up to 240 bytes --- */

static uint64_t hash_small(const uint8_t *data, size_t size) {
    if (size > 8) {
        uint64_t low = u64_at(SECRET + 24) ^ u64_at(SECRET + 32) ^ u64_at(data);
        uint64_t high = u64_at(SECRET + 40) ^ u64_at(SECRET + 48) ^ u64_at(data + size - 8);
        return avalanche(size + __builtin_bswap64(low) + high + folded_product(low, high));
    }
    if (size >= 4) {
        uint64_t combined = u32_at(data + size - 4) | (uint64_t)u32_at(data) << 32;
        uint64_t value = u64_at(SECRET + 8) ^ u64_at(SECRET + 16) ^ combined;
        value ^= rotated(value, 49) ^ rotated(value, 24);
        value *= MX2;
        value ^= (value >> 35) + size;
        value *= MX2;
        return value ^ value >> 28;
    }
    if (size) {
        uint32_t combined = data[size - 1] | (uint32_t)size << 8 | (uint32_t)data[0] << 16 |
                            (uint32_t)data[size >> 1] << 24;
        return avalanche_64((uint64_t)(u32_at(SECRET) ^ u32_at(SECRET + 4)) ^ combined);
    }
    return avalanche_64(u64_at(SECRET + 56) ^ u64_at(SECRET + 64));
}

static inline uint64_t mixed(const uint8_t *data, const uint8_t *secret) {
    return folded_product(u64_at(data) ^ u64_at(secret), u64_at(data + 8) ^ u64_at(secret + 8));
}

static uint64_t hash_medium(const uint8_t *data, size_t size) {
    uint64_t acc = size * P64_1;
    if (size <= 128) {
        for (size_t i = (size - 1) / 32 + 1; i-- > 0;) {
            acc += mixed(data + 16 * i, SECRET + 32 * i);
            acc += mixed(data + size - 16 * i - 16, SECRET + 32 * i + 16);
        }
        return avalanche(acc);
    }
    for (size_t i = 0; i < 8; i++) acc += mixed(data + 16 * i, SECRET + 16 * i);
    acc = avalanche(acc);
    for (size_t i = 8; i < size / 16; i++) acc += mixed(data + 16 * i, SECRET + 16 * (i - 8) + 3);
    return avalanche(acc + mixed(data + size - 16, SECRET + 119));
}

/* --- more than 240 bytes: the loops --- */

static inline void accumulate(uint64_t acc[8], const uint8_t *stripe, const uint8_t *secret) {
    for (int i = 0; i < 8; i++) {
        uint64_t lane = u64_at(stripe + 8 * i), value = lane ^ u64_at(secret + 8 * i);
        acc[i ^ 1] += lane;
        acc[i] += (uint64_t)(uint32_t)value * (value >> 32);
    }
}

static inline void scramble(uint64_t acc[8]) {
    for (int i = 0; i < 8; i++) {
        acc[i] ^= acc[i] >> 47;
        acc[i] ^= u64_at(SCRAMBLE_SECRET + 8 * i);
        acc[i] *= P32_1;
    }
}

/* Eight scalar multiplications a stripe are faster than what compilers make of two lanes a vector. */
PLAIN static void blocks_plain(uint64_t acc[8], const uint8_t *from, size_t count, const struct xxh3_next *next) {
    uint64_t lanes[8];
    (void)next;
    memcpy(lanes, acc, sizeof lanes);
    for (; count; count--, from += XXH3_BLOCK) {
        for (int n = 0; n < STRIPES; n++) accumulate(lanes, from + n * STRIPE, SECRET + 8 * n);
        scramble(lanes);
    }
    memcpy(acc, lanes, sizeof lanes);
}

static void copy_blocks_plain(uint64_t acc[8], uint8_t *to, const uint8_t *from, size_t count, const struct xxh3_next *next,
                              enum xxh3_store store) {
    (void)store;
    for (; count; count--, from += XXH3_BLOCK, to += XXH3_BLOCK) {
        memcpy(to, from, XXH3_BLOCK);
        blocks_plain(acc, to, 1, next);
    }
}

#if X86

/* Each loop is written once; `store` is a constant wherever it is inlined. SHIFTED: streamed, to a place that is aligned to
 * 8 bytes only. What is stored there is put together from the registers that were hashed, never loaded again. */
enum store { NOTHING, CACHED, STREAMED, SHIFTED };

__attribute__((target("avx512f"), always_inline)) static inline void loop_avx512(
    uint64_t acc[8], uint8_t *to, const uint8_t *from, size_t count, const struct xxh3_next *next, enum store store) {
    const __m512i prime = _mm512_set1_epi64(P32_1), last = _mm512_loadu_si512(SCRAMBLE_SECRET);
    __m512i lanes = _mm512_loadu_si512(acc);
    /* SHIFTED: words in front of the first aligned line; a line is the end of one stripe and the start of the next. */
    const size_t front = store == SHIFTED ? (STRIPE - (uintptr_t)to % STRIPE) / 8 : 0;
    const __mmask8 in_front = (__mmask8)((1u << front) - 1);
    const __m512i line = _mm512_add_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi64((long long)front));
    __m512i before = _mm512_setzero_si512();
    int begun = 0;
    for (; count; count--, from += XXH3_BLOCK, to += store == NOTHING ? 0 : XXH3_BLOCK) {
        const uint8_t *ahead = ahead_of(from, count, next->from);
        if (store != NOTHING && (uintptr_t)to % PAGE < XXH3_BLOCK)
            _mm_prefetch((const char *)page_after(to, count, next->to), _MM_HINT_T1);
#pragma GCC unroll 16
        for (int n = 0; n < STRIPES; n++) {
            _mm_prefetch((const char *)ahead + n * STRIPE, _MM_HINT_T0);
            __m512i data = _mm512_loadu_si512(from + n * STRIPE);
            if (store == CACHED) _mm512_storeu_si512(to + n * STRIPE, data);
            if (store == STREAMED) _mm512_stream_si512((__m512i *)(to + n * STRIPE), data);
            if (store == SHIFTED) {
                if (n || begun)
                    _mm512_stream_si512((__m512i *)(to + n * STRIPE - STRIPE + 8 * front),
                                        _mm512_permutex2var_epi64(before, line, data));
                else
                    _mm512_mask_storeu_epi64(to, in_front, data);
                before = data;
            }
            __m512i value = _mm512_xor_si512(data, _mm512_loadu_si512(SECRET + 8 * n));
            __m512i product = _mm512_mul_epu32(value, _mm512_srli_epi64(value, 32));
            __m512i swapped = _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2));
            lanes = _mm512_add_epi64(lanes, _mm512_add_epi64(product, swapped));
        }
        lanes = _mm512_xor_si512(_mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 47)), last);
        __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(lanes, 32), prime);
        lanes = _mm512_add_epi64(_mm512_mul_epu32(lanes, prime), _mm512_slli_epi64(high, 32));
        begun = 1;
    }
    if (store == SHIFTED && begun) _mm512_mask_storeu_epi64(to - STRIPE, (__mmask8)~in_front, before);
    _mm512_storeu_si512(acc, lanes);
}

__attribute__((target("avx512f"))) static void blocks_avx512(uint64_t acc[8], const uint8_t *from, size_t count,
                                                               const struct xxh3_next *next) {
    loop_avx512(acc, NULL, from, count, next, NOTHING);
}

__attribute__((target("avx512f"))) static void copy_blocks_avx512(uint64_t acc[8], uint8_t *to, const uint8_t *from,
                                                                   size_t count, const struct xxh3_next *next, enum xxh3_store store) {
    if (store == XXH3_STREAMED && (uintptr_t)to % STRIPE == 0)
        loop_avx512(acc, to, from, count, next, STREAMED);
    else if (store == XXH3_STREAMED && (uintptr_t)to % 8 == 0)
        loop_avx512(acc, to, from, count, next, SHIFTED);
    else
        loop_avx512(acc, to, from, count, next, CACHED);
}

/* Half a stripe. */
__attribute__((target("avx2"), always_inline)) static inline __m256i accumulated_avx2(
    __m256i lanes, uint8_t *to, const uint8_t *from, const uint8_t *secret, enum store store) {
    __m256i data = _mm256_loadu_si256((const __m256i *)from);
    if (store == CACHED) _mm256_storeu_si256((__m256i *)to, data);
    if (store == STREAMED) _mm256_stream_si256((__m256i *)to, data);
    __m256i value = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(value, _mm256_srli_epi64(value, 32));
    __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, swapped));
}

__attribute__((target("avx2"), always_inline)) static inline __m256i scrambled_avx2(__m256i lanes,
                                                                                      const uint8_t *secret) {
    const __m256i prime = _mm256_set1_epi64x(P32_1);
    lanes = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    lanes = _mm256_xor_si256(lanes, _mm256_loadu_si256((const __m256i *)secret));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

__attribute__((target("avx2"), always_inline)) static inline void loop_avx2(
    uint64_t acc[8], uint8_t *to, const uint8_t *from, size_t count, const struct xxh3_next *next, enum store store) {
    __m256i low = _mm256_loadu_si256((const __m256i *)acc), high = _mm256_loadu_si256((const __m256i *)(acc + 4));
    for (; count; count--, from += XXH3_BLOCK, to += store == NOTHING ? 0 : XXH3_BLOCK) {
        const uint8_t *ahead = ahead_of(from, count, next->from);
        if (store != NOTHING && (uintptr_t)to % PAGE < XXH3_BLOCK)
            _mm_prefetch((const char *)page_after(to, count, next->to), _MM_HINT_T1);
#pragma GCC unroll 16
        for (int n = 0; n < STRIPES; n++) {
            uint8_t *target = store == NOTHING ? NULL : to + n * STRIPE;
            _mm_prefetch((const char *)ahead + n * STRIPE, _MM_HINT_T0);
            low = accumulated_avx2(low, target, from + n * STRIPE, SECRET + 8 * n, store);
            target += store == NOTHING ? 0 : HALF;
            high = accumulated_avx2(high, target, from + n * STRIPE + HALF, SECRET + 8 * n + HALF, store);
        }
        low = scrambled_avx2(low, SCRAMBLE_SECRET);
        high = scrambled_avx2(high, SCRAMBLE_SECRET + HALF);
    }
    _mm256_storeu_si256((__m256i *)acc, low);
    _mm256_storeu_si256((__m256i *)(acc + 4), high);
}

__attribute__((target("avx2"))) static void blocks_avx2(uint64_t acc[8], const uint8_t *from, size_t count,
                                                               const struct xxh3_next *next) {
    loop_avx2(acc, NULL, from, count, next, NOTHING);
}

__attribute__((target("avx2"))) static void copy_blocks_avx2(uint64_t acc[8], uint8_t *to, const uint8_t *from,
                                                              size_t count, const struct xxh3_next *next, enum xxh3_store store) {
    if (store == XXH3_STREAMED && (uintptr_t)to % HALF == 0)
        loop_avx2(acc, to, from, count, next, STREAMED);
    else
        loop_avx2(acc, to, from, count, next, CACHED);
}

#endif

struct xxh3_kernel xxh3_kernels[4];

void xxh3_find_kernels(void) {
    struct xxh3_kernel *next = xxh3_kernels;
#if X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        *next++ = (struct xxh3_kernel){"avx512", blocks_avx512, copy_blocks_avx512};
    if (__builtin_cpu_supports("avx2")) *next++ = (struct xxh3_kernel){"avx2", blocks_avx2, copy_blocks_avx2};
#endif
    *next++ = (struct xxh3_kernel){"plain", blocks_plain, copy_blocks_plain};
    *next = (struct xxh3_kernel){0};
}

/* --- more than 240 bytes: the ends --- */

/* Whole blocks that are scrambled: the last one, even if full, is not. */
static inline size_t scrambled_bytes(size_t size) { return (size - 1) / XXH3_BLOCK * XXH3_BLOCK; }

/* `tail`: what follows the scrambled blocks, 1 to 1024 bytes; `last`: the last 64 bytes of all. */
static uint64_t finished(uint64_t acc[8], const uint8_t *tail, const uint8_t *last, size_t size) {
    size_t stripes = (size - scrambled_bytes(size) - 1) / STRIPE;
    for (size_t n = 0; n < stripes; n++) accumulate(acc, tail + n * STRIPE, SECRET + 8 * n);
    accumulate(acc, last, SECRET + SECRET_SIZE - 71);
    uint64_t result = size * P64_1;
    for (int i = 0; i < 4; i++) {
        const uint8_t *secret = SECRET + 11 + 16 * i;
        result += folded_product(acc[2 * i] ^ u64_at(secret), acc[2 * i + 1] ^ u64_at(secret + 8));
    }
    return avalanche(result);
}

void xxh3_begin(struct xxh3_progress *progress) {
    memcpy(progress->acc, START, sizeof START);
    progress->done = 0;
}

void xxh3_advance(const struct xxh3_kernel *kernel, struct xxh3_progress *progress, const uint8_t *data, size_t size,
                  size_t there) {
    if (size <= XXH3_MID_MAX) return;
    size_t end = there < size ? there / XXH3_BLOCK * XXH3_BLOCK : scrambled_bytes(size);
    if (end > scrambled_bytes(size)) end = scrambled_bytes(size);
    if (end > progress->done) {
        kernel->blocks(progress->acc, data + progress->done, (end - progress->done) / XXH3_BLOCK, &NOTHING_NEXT);
        progress->done = end;
    }
}

uint64_t xxh3_finish(const struct xxh3_kernel *kernel, struct xxh3_progress *progress, const uint8_t *data,
                     size_t size) {
    if (size <= 16) return hash_small(data, size);
    if (size <= XXH3_MID_MAX) return hash_medium(data, size);
    xxh3_advance(kernel, progress, data, size, size);
    return finished(progress->acc, data + progress->done, data + size - STRIPE, size);
}

uint64_t xxh3(const struct xxh3_kernel *kernel, const uint8_t *data, size_t size) {
    struct xxh3_progress progress;
    xxh3_begin(&progress);
    return xxh3_finish(kernel, &progress, data, size);
}

uint64_t xxh3_copy(const struct xxh3_kernel *kernel, uint8_t *to, const uint8_t *from, size_t size,
                   const struct xxh3_next *next, enum xxh3_store store) {
    if (size <= XXH3_MID_MAX) {
        if (size) memcpy(to, from, size);
        return xxh3(kernel, to, size);
    }
    uint64_t acc[8];
    memcpy(acc, START, sizeof START);
    size_t scrambled = scrambled_bytes(size), tail = size - scrambled;
    kernel->copy_blocks(acc, to, from, scrambled / XXH3_BLOCK, next, store);
    memcpy(to + scrambled, from + scrambled, tail);
    if (tail >= STRIPE) return finished(acc, to + scrambled, to + size - STRIPE, size);
    /* The last stripe begins in the block before: streamed bytes are not read back. */
    uint8_t last[STRIPE];
    memcpy(last, from + size - STRIPE, STRIPE - tail);
    memcpy(last + STRIPE - tail, to + scrambled, tail);
    return finished(acc, to + scrambled, last, size);
}

void xxh3_copy_fence(void) {
#if X86
    _mm_sfence();
#endif
}
