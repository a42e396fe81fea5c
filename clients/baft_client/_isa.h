/* One instruction set: streaming copy and xxh3-128, compiled for the target that the including file has set.
 *
 * The including file defines BAFT_ISA (the exported table's name) and BAFT_ISA_NAME, and BAFT_VECTOR as the
 * store width in bytes (0: plain memcpy). xxhash comes from the system's header and is inlined, so that each
 * instruction set gets its own vectorised copy of it and nothing is linked.
 */
#include <string.h>

#include "_engine.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if __has_include(<xxhash.h>) && !defined(BAFT_NO_XXHASH) /* the tests build it without */
#define XXH_INLINE_ALL
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>
#if XXH_VERSION_NUMBER >= 800 /* the first with the final xxh3 */
#define BAFT_HAVE_XXH3 1
#endif
#endif

#if BAFT_VECTOR == 64
#define BAFT_MOVE(k) _mm512_stream_si512((void *)(to + i + (k) * 64), _mm512_loadu_si512(from + i + (k) * 64))
#elif BAFT_VECTOR == 32
#define BAFT_MOVE(k)                                            \
    _mm256_stream_si256((__m256i *)(void *)(to + i + (k) * 32), \
                        _mm256_loadu_si256((const __m256i *)(const void *)(from + i + (k) * 32)))
#elif BAFT_VECTOR == 16
#define BAFT_MOVE(k)                                         \
    _mm_stream_si128((__m128i *)(void *)(to + i + (k) * 16), \
                     _mm_loadu_si128((const __m128i *)(const void *)(from + i + (k) * 16)))
#endif

#if BAFT_VECTOR
#define BAFT_STRIDE ((size_t)BAFT_VECTOR * 4)

static void isa_copy(uint8_t *to, const uint8_t *from, size_t n) {
    if (n >= 1024) { /* below, the fence that streaming stores need costs more than they save */
        size_t head = (size_t)(-(uintptr_t)to) & 63, i;
        memcpy(to, from, head);
        to += head, from += head, n -= head;
        for (i = 0; i + BAFT_STRIDE <= n; i += BAFT_STRIDE) {
            BAFT_MOVE(0), BAFT_MOVE(1), BAFT_MOVE(2), BAFT_MOVE(3);
        }
        to += i, from += i, n -= i;
    }
    memcpy(to, from, n);
}

static void isa_fence(void) { _mm_sfence(); }
#else
static void isa_copy(uint8_t *to, const uint8_t *from, size_t n) { memcpy(to, from, n); }

static void isa_fence(void) { atomic_thread_fence(memory_order_release); }
#endif

#ifdef BAFT_HAVE_XXH3
_Static_assert(sizeof(XXH3_state_t) <= BAFT_HASH_STATE, "the state of xxh3 has grown");
_Static_assert(sizeof(XXH128_canonical_t) == BAFT_DIGEST, "a digest is 16 bytes");

static void isa_reset(baft_hash *state) {
    /* INITSTATE exists in newer headers only; the older ones need no more than reset on zeroed memory. */
    memset(state, 0, sizeof(XXH3_state_t));
    XXH3_128bits_reset((XXH3_state_t *)(void *)state);
}

static void isa_update(baft_hash *state, const uint8_t *from, size_t n) {
    XXH3_128bits_update((XXH3_state_t *)(void *)state, from, n);
}

static void isa_hash_copy(baft_hash *state, uint8_t *to, const uint8_t *from, size_t n) {
    /* 2 KiB at a time: the loads of the hash and the streaming stores of the copy then overlap.
     * Measured 15-16 GB/s, against 13-14 for 256 KiB at a time and 13 for memcpy without any digest. Every step
     * but the first begins on a cache line of the destination: a line written half in one step and half in the
     * next is fetched and written twice (5 GB/s). */
    size_t step = BAFT_STEP - ((uintptr_t)to & 63);
    for (; n; step = BAFT_STEP) {
        if (step > n) step = n;
        XXH3_128bits_update((XXH3_state_t *)(void *)state, from, step);
        isa_copy(to, from, step);
        to += step, from += step, n -= step;
    }
}

static void isa_finish(const baft_hash *state, uint8_t digest[BAFT_DIGEST]) {
    XXH128_canonicalFromHash((XXH128_canonical_t *)(void *)digest,
                             XXH3_128bits_digest((const XXH3_state_t *)(const void *)state));
}
#else
static void isa_reset(baft_hash *state) { (void)state; }

static void isa_update(baft_hash *state, const uint8_t *from, size_t n) { (void)state, (void)from, (void)n; }

static void isa_hash_copy(baft_hash *state, uint8_t *to, const uint8_t *from, size_t n) {
    (void)state;
    isa_copy(to, from, n);
}

static void isa_finish(const baft_hash *state, uint8_t digest[BAFT_DIGEST]) {
    (void)state;
    memset(digest, 0, BAFT_DIGEST);
}
#endif

const baft_isa BAFT_ISA = {
    .name = BAFT_ISA_NAME,
#ifdef BAFT_HAVE_XXH3
    .digests = true,
#endif
    .copy = isa_copy,
    .fence = isa_fence,
    .hash_reset = isa_reset,
    .hash_update = isa_update,
    .hash_copy = isa_hash_copy,
    .hash_finish = isa_finish,
};
