/* The engine as its own files see it: _worker.c (thread, flush, cancel, fork) and _windows.c (what may be copied when,
 * and the record of it). Who may touch which memory is said at the top of _worker.c. */
#ifndef BAFT_WORKER_H
#define BAFT_WORKER_H

#include <pthread.h>
#include <time.h>

#include "_engine.h"

#define LANES 2    /* the thread and one helper */
#define KNOWN 16
#define BUDGETS 64 /* windows that may be opened while the thread looks at one of them */

typedef struct {
    baft_hash hash;
    _Atomic int state;
    size_t chunk, at; /* at: bytes of the chunk that are copied */
} lane;

/* What the next block may be: see baft_look. */
typedef struct {
    int kind;        /* BAFT_INSIDE, BAFT_OUTSIDE, BAFT_FENCE */
    int32_t window;  /* its number, of a timed one -2 - its index; -1: none */
    bool by_clock;   /* it is one of the timed windows */
    uint64_t serial; /* tells windows of one number apart */
    uint64_t n;      /* bytes the block may have */
    uint64_t pace;   /* bytes a second, 0: any */
} grant;

/* Spans of one thread. Its lock is held for some nanoseconds; the reader never waits for a writer that lost its core. */
typedef struct {
    _Atomic uint32_t locked;
    baft_span ring[BAFT_SPANS];
    uint64_t head, tail;  /* written so far, read so far */
    uint64_t serial, job; /* of the newest span */
    _Atomic uint64_t lost;
} ledger;

typedef struct {
    uint64_t begin, end, bytes;
} timed_window;

typedef struct timed_list {
    struct timed_list *before; /* lists of this copy that are in force no more; freed when the thread is quiet */
    uint64_t serial;
    size_t count;
    timed_window windows[];
} timed_list;

struct baft_engine {
    lane lanes[LANES];
    unsigned char *page;
    pthread_t thread;
    int nice;
    uint64_t throttle;
    bool hold;
    baft_engine *next; /* registry of all engines, for fork */

    _Atomic uint32_t armed, busy, paused, quit, absent, sleeping, flushing;
    _Atomic uint32_t bell, listeners; /* bell: futex that changes when a copy ends */
    _Atomic uint64_t job;

    pthread_mutex_t control; /* start, cancel and stop exclude one another: the I/O thread may cancel at any time */
    baft_table *table;
    uint8_t *destination, *digests;
    size_t digest_room, nchunks;
    _Atomic size_t cursor, done_chunks;
    _Atomic uint64_t done_bytes, total;
    _Atomic uint32_t done;

    bool populate; /* the destination was never copied to: its pages are not in this process's page table */
    struct {
        uint8_t *begin;
        uint64_t extent;
    } known[KNOWN]; /* destinations that were; the oldest is forgotten */
    size_t known_next;

    /* windows: written by whoever opens them */
    _Atomic uint64_t serial;           /* of the newest window */
    _Atomic uint64_t budgets[BUDGETS]; /* by serial: who has read a serial reads the budget that belongs to it */
    _Atomic uint64_t first;            /* serial when the copy was armed */
    _Atomic(timed_list *) timed;       /* in force */
    timed_list *lists;                 /* all of this copy, the newest first */
    uint64_t timed_lists;              /* made since the engine began */
    _Atomic uint64_t copied[BAFT_KINDS]; /* bytes of the newest copy: inside, outside, at the fence */

    /* the thread's own */
    uint64_t spent_serial, spent; /* bytes copied in the newest window it has seen */
    uint64_t timed_serial, timed_spent;
    size_t timed_at;
    uint64_t pace_until, pace_last;
    bool pace_left; /* blocks without a pace came after the last one with */
    uint64_t wake; /* when it has to look again by itself; 0: only when the gate changes */

    ledger ledgers[LANES];
};

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline uint32_t mode_of(baft_engine *e) { return atomic_load(BAFT_WORD4(e->page, gate)) & 15; }

#define KEEP UINT32_MAX
/* Sets the gate's mode (KEEP: only counts a change) and wakes the thread if `wake` and it has something left to copy.
 * During a flush the mode stays: windows that another thread opens and closes meanwhile do not end it. */
void baft_change_gate(baft_engine *e, uint32_t mode, bool wake);

/* The thread asks before each block of `want` bytes; false: nothing now, and e->wake says when to look again. */
bool baft_look(baft_engine *e, uint64_t now, uint64_t want, grant *g);
/* Counts the block of `g` against its window. */
void baft_spend(baft_engine *e, const grant *g);
/* For `start`, while the thread is quiet: forgets the windows of the copy before. */
void baft_reset_windows(baft_engine *e);
void baft_free_windows(baft_engine *e);

/* A block of g->n bytes was copied from `begin` to `end`. By the ledger's thread only, before anyone can learn that the
 * block is there: who sees that a copy is done finds all of its spans. */
void baft_span_add(ledger *book, const grant *g, uint64_t job, uint64_t begin, uint64_t end);

#endif
