/* The copy engine: types shared by its C files. See engine.py for what it does, DESIGN notes beside each part. */
#ifndef BAFT_ENGINE_H
#define BAFT_ENGINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BAFT_CHUNK ((size_t)4 << 20)   /* bytes under one digest, at most */
#define BAFT_BLOCK ((size_t)256 << 10) /* bytes between two looks at the gate, and between two publications */
#define BAFT_STEP ((size_t)2048)       /* bytes hashed, then copied while they are in the first-level cache */
#define BAFT_DIGEST 16

/* ------------------------------------------------------------------ instruction sets (_isa*.c) */

#define BAFT_HASH_STATE 1024
typedef struct {
    _Alignas(64) unsigned char bytes[BAFT_HASH_STATE];
} baft_hash;

typedef struct {
    const char *name;
    bool digests;                                               /* <xxhash.h> was there at build time */
    void (*copy)(uint8_t *to, const uint8_t *from, size_t n);   /* streaming stores: fence() before telling anyone */
    void (*fence)(void);
    void (*hash_reset)(baft_hash *state);
    void (*hash_update)(baft_hash *state, const uint8_t *from, size_t n);
    void (*hash_copy)(baft_hash *state, uint8_t *to, const uint8_t *from, size_t n);
    void (*hash_finish)(const baft_hash *state, uint8_t digest[BAFT_DIGEST]);
} baft_isa;

extern const baft_isa baft_isa_base;
#if defined(__x86_64__) && defined(__GNUC__)
#define BAFT_X86_DISPATCH 1
extern const baft_isa baft_isa_avx2, baft_isa_avx512;
#endif
extern const baft_isa *baft_cpu; /* the one in use */
size_t baft_isa_list(const baft_isa **list, size_t room); /* those this CPU can run, best first */

/* ------------------------------------------------------------------ control page (offsets: control.py) */

#define BAFT_PAGE_BYTES 4096
#define BAFT_PAGE_VERSION 1
#define BAFT_PAGE_MAGIC 0x014C544354464142ull /* "BAFTCTL\x01" */
#define BAFT_FIELDS(X)                                                                                          \
    X(magic, 0x000, 8) X(version, 0x008, 4) X(rank, 0x00C, 4) X(pid, 0x040, 8) X(pid_start, 0x048, 8)           \
    X(epoch, 0x050, 8) X(step, 0x080, 8) X(updates, 0x088, 8) X(fence, 0x090, 8)         \
    X(held_ns, 0x098, 8) X(held_total_ns, 0x0A0, 8) X(gate, 0x0C0, 4) X(pace, 0x100, 8)                         \
    X(window_opened, 0x108, 8) X(window_closed, 0x110, 8) X(window, 0x118, 8) X(budget, 0x120, 8)               \
    X(outside_pace, 0x128, 8) X(bytes_copied, 0x140, 8) X(bytes_total, 0x148, 8) X(chunks_done, 0x150, 8)       \
    X(copies, 0x158, 8) X(engine, 0x160, 4) X(bytes_inside, 0x168, 8) X(bytes_outside, 0x170, 8)                \
    X(spent, 0x178, 8) X(hold_at, 0x180, 8)
#define BAFT_OFFSET(name, offset, size) BAFT_AT_##name = offset,
enum { BAFT_FIELDS(BAFT_OFFSET) };
#undef BAFT_OFFSET
#define BAFT_WORD8(page, name) ((_Atomic uint64_t *)(void *)((page) + BAFT_AT_##name))
#define BAFT_WORD4(page, name) ((_Atomic uint32_t *)(void *)((page) + BAFT_AT_##name))

enum { BAFT_CLOSED = 0, BAFT_OPEN, BAFT_FLUSH, BAFT_WINDOW, BAFT_BESIDE };
enum { BAFT_IDLE = 0, BAFT_WAITING, BAFT_COPYING, BAFT_DONE, BAFT_PAUSED, BAFT_HELD, BAFT_ABSENT };

/* ------------------------------------------------------------------ segments and chunks (_bulk.c) */

typedef struct {
    uint64_t source, offset, nbytes, itemsize;
} baft_segment;

typedef struct {
    size_t segment;
    uint64_t start; /* in the segment */
    size_t length;
} baft_chunk;

typedef struct {
    baft_segment *segments;
    size_t count;
    baft_chunk *chunks;
    size_t nchunks;
    uint64_t total, extent; /* bytes; highest offset + nbytes */
    _Atomic int users;      /* engines that hold it armed: sources may not change */
} baft_table;

bool baft_table_chunks(baft_table *table); /* fills chunks, total, extent; false: no memory or sizes overflow */
void baft_table_canary(const baft_table *table, uint64_t *records);
/* Index of the first segment that differs, its byte in *at; count if all are equal. */
size_t baft_table_compare(const baft_table *table, const uint8_t *destination, uint64_t *at);
/* Digest (and copy, when `to` is not NULL) a range with several threads; digests may be NULL when only copying. */
void baft_bulk(const uint8_t *from, uint8_t *to, size_t n, uint8_t *digests, int threads);

/* ------------------------------------------------------------------ the thread (_worker.c, _windows.c) */

/* Kinds of copying; a span's kind is BAFT_SPAN_KIND plus one of them: see EventKind in pipeline/events.py. */
enum { BAFT_INSIDE = 0, BAFT_OUTSIDE, BAFT_FENCE, BAFT_KINDS };
#define BAFT_SPAN_KIND 49
#define BAFT_SPANS 1024 /* kept for each of the two threads that copy */
#define BAFT_SPANS_ROOM (2 * BAFT_SPANS)

typedef struct { /* a record of pipeline/events.py */
    uint8_t kind, zero;
    int16_t stage;
    int32_t micro;
    uint64_t begin, end, amount;
} baft_span;
_Static_assert(sizeof(baft_span) == 32, "as packed in events.py");

typedef struct baft_engine baft_engine;

/* fd < 0: a private page. NULL with errno on failure. */
baft_engine *baft_engine_new(int fd, int nice, uint64_t throttle, bool hold);
/* false: a copy is unfinished, or no memory (errno), or the engine is absent. The table must outlive it. */
bool baft_engine_start(baft_engine *engine, baft_table *table, uint8_t *destination);
void baft_engine_open(baft_engine *engine);                     /* all the time, at the pace set */
void baft_engine_window(baft_engine *engine, uint64_t budget);  /* begins a window */
void baft_engine_close(baft_engine *engine, uint64_t outside);  /* ends it; outside: bytes a second until the next */
/* count windows of (begin, end, bytes), in order and disjoint; false: no memory. */
bool baft_engine_timed(baft_engine *engine, const uint64_t *rows, size_t count);
void baft_engine_rest(baft_engine *engine);                     /* the gate is closed, timed windows end */
void baft_engine_pace(baft_engine *engine, uint64_t bytes_per_second);
bool baft_engine_flush(baft_engine *engine, double seconds, bool help);
bool baft_engine_left(baft_engine *engine); /* an armed copy is unfinished */
void baft_engine_cancel(baft_engine *engine);
int baft_engine_state(baft_engine *engine);
bool baft_engine_busy(baft_engine *engine); /* a thread is inside a block */
uint64_t baft_engine_progress(baft_engine *engine);
void baft_engine_copied(baft_engine *engine, uint64_t bytes[BAFT_KINDS]);
/* Takes them: to[BAFT_SPANS_ROOM], by time of their beginning; one reader at a time. */
size_t baft_engine_spans(baft_engine *engine, baft_span *to);
uint64_t baft_engine_spans_lost(baft_engine *engine);
bool baft_engine_digests(baft_engine *engine, const uint8_t **digests, size_t *nchunks); /* false: not done */
void baft_engine_stop(baft_engine *engine);
void baft_engine_free(baft_engine *engine); /* stops it first */

#endif
