/* The copying thread: gate, flush, cancel, fork. Windows, budgets and paces: _windows.c.
 *
 * Who may touch sources and slot? A thread raises `busy`, then looks whether it is permitted (`armed`, not
 * `paused`, gate open or windows by the clock) and only then copies one block; whoever withdraws the permission does so
 * first and then waits for `busy` to be 0. All of these are sequentially consistent, so one of the two always sees the other.
 * The gate lies in the control page, where others may write it; `armed` and `paused` do not: nothing that a page
 * can hold makes the thread touch memory that this process did not arm. Closing a window withdraws nothing: the block that
 * is under way ends, and the copy stays armed. Who needs memory back cancels. Windows, budgets, paces and the clock only
 * choose, after that, whether the permitted block is copied now, how much of it, and as what it is counted.
 *
 * The gate word counts its changes above bit 4. The thread sleeps on it, and every event that concerns the thread
 * changes it, so no wake-up is lost; where nothing is left to copy, or nothing may be, nobody is woken. During a flush the calling thread takes chunks as well; a chunk that was
 * begun and left lies "parked" in its lane and is taken over by whoever comes first.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "_worker.h"

enum { LANE_FREE, LANE_TAKEN, LANE_PARKED };
#define LONGEST_SLEEP 60000000000 /* ns; then the thread looks again, whatever the clock's next window is */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

static void pause_ns(long ns) { nanosleep(&(struct timespec){0, ns}, NULL); }

/* ns < 0: until woken. The page is shared between processes, so these are not private futexes. */
static void futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t ns) {
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, ns < 0 ? NULL : &t, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0); }

static void tell(baft_engine *e, uint32_t state) {
    atomic_store_explicit(BAFT_WORD4(e->page, engine), state, memory_order_release);
}

void baft_change_gate(baft_engine *e, uint32_t mode, bool wake) {
    _Atomic uint32_t *gate = BAFT_WORD4(e->page, gate);
    uint32_t old = atomic_load(gate), new;
    do {
        bool keep = mode == KEEP || ((old & 15) == BAFT_FLUSH && atomic_load(&e->flushing));
        new = ((old >> 4) + 1) << 4 | (keep ? old & 15 : mode);
    } while (!atomic_compare_exchange_weak(gate, &old, new));
    bool was = (old & 15) == BAFT_OPEN || (old & 15) == BAFT_WINDOW, is = (new & 15) == BAFT_OPEN || (new & 15) == BAFT_WINDOW;
    if (is && !was) atomic_fetch_add(BAFT_WORD8(e->page, window_opened), 1);
    if (was && !is) atomic_fetch_add(BAFT_WORD8(e->page, window_closed), 1);
    /* Whoever arms a copy looks at the gate afterwards, so a thread that is not woken here for want of one is woken there. */
    if (wake && baft_engine_left(e) && atomic_load(&e->sleeping)) futex_wake(gate);
}

static void sleep_on_gate(baft_engine *e, uint32_t word, int64_t ns) {
    atomic_store(&e->sleeping, 1);
    futex_wait(BAFT_WORD4(e->page, gate), word, ns);
    atomic_store(&e->sleeping, 0);
}

static bool permitted(baft_engine *e) {
    uint32_t mode = mode_of(e);
    bool gate = (mode != BAFT_CLOSED && mode <= BAFT_BESIDE) || atomic_load(&e->timed);
    return gate && atomic_load(&e->armed) && !atomic_load(&e->paused);
}

static bool enter(baft_engine *e) {
    atomic_fetch_add(&e->busy, 1);
    if (permitted(e)) return true;
    atomic_fetch_sub(&e->busy, 1);
    return false;
}

static void leave(baft_engine *e) { atomic_fetch_sub(&e->busy, 1); }

static void wait_until_quiet(baft_engine *e) {
    /* At most one block (some 30 us), longer only where the other thread gets no CPU. */
    for (int i = 0; atomic_load(&e->busy); i++) {
        if (i < 200) atomic_signal_fence(memory_order_seq_cst);
        else if (i < 220) sched_yield();
        else pause_ns(20000);
    }
}

/* ------------------------------------------------------------------ copying */

static lane *take_lane(baft_engine *e) {
    for (int i = 0; i < LANES; i++) {
        int parked = LANE_PARKED;
        if (atomic_compare_exchange_strong(&e->lanes[i].state, &parked, LANE_TAKEN)) return &e->lanes[i];
    }
    if (atomic_load_explicit(&e->cursor, memory_order_relaxed) >= e->table->nchunks) return NULL;
    for (int i = 0; i < LANES; i++) {
        int free_lane = LANE_FREE;
        if (!atomic_compare_exchange_strong(&e->lanes[i].state, &free_lane, LANE_TAKEN)) continue;
        lane *l = &e->lanes[i];
        l->chunk = atomic_fetch_add(&e->cursor, 1);
        if (l->chunk < e->table->nchunks) {
            l->at = 0;
            baft_cpu->hash_reset(&l->hash);
            return l;
        }
        atomic_store(&l->state, LANE_FREE);
        return NULL;
    }
    return NULL;
}

/* Enters the pages of a chunk's destination in the page table. One fault for each 4 KiB instead took three to four
 * times as long (0.8 s instead of 0.25 s for 512 MiB, on a busy machine), in the first copy to every slot. Older
 * kernels refuse; then the copy faults as it goes. */
static void populate(const uint8_t *begin, size_t n) {
    uintptr_t inside = (uintptr_t)sysconf(_SC_PAGESIZE) - 1, from = (uintptr_t)begin & ~inside;
    madvise((void *)from, ((uintptr_t)begin + n - from + inside) & ~inside, MADV_POPULATE_WRITE);
}

static bool known(baft_engine *e, uint8_t *destination, uint64_t extent) {
    for (size_t i = 0; i < KNOWN; i++) {
        if (e->known[i].begin == destination && e->known[i].extent >= extent) return true;
    }
    return false;
}

static void copy_block(baft_engine *e, lane *l, size_t n, int kind) {
    const baft_chunk *c = &e->table->chunks[l->chunk];
    const baft_segment *s = &e->table->segments[c->segment];
    uint64_t place = c->start + l->at;
    if (e->populate) populate(e->destination + s->offset + place, n);
    baft_cpu->hash_copy(&l->hash, e->destination + s->offset + place, (const uint8_t *)(uintptr_t)s->source + place, n);
    l->at += n;
    if (l->at == c->length) baft_cpu->hash_finish(&l->hash, e->digests + l->chunk * BAFT_DIGEST);
    baft_cpu->fence(); /* streaming stores are ordered by nothing else */
    uint64_t of_kind = atomic_fetch_add_explicit(&e->copied[kind], n, memory_order_relaxed) + n;
    if (kind == BAFT_INSIDE) atomic_store_explicit(BAFT_WORD8(e->page, bytes_inside), of_kind, memory_order_relaxed);
    if (kind == BAFT_OUTSIDE) atomic_store_explicit(BAFT_WORD8(e->page, bytes_outside), of_kind, memory_order_relaxed);
    uint64_t copied = atomic_fetch_add_explicit(&e->done_bytes, n, memory_order_release) + n;
    atomic_store_explicit(BAFT_WORD8(e->page, bytes_copied), copied, memory_order_release);
}

static void finish_chunk(baft_engine *e, lane *l) {
    size_t all = e->table->nchunks;
    atomic_store(&l->state, LANE_FREE);
    size_t chunks = atomic_fetch_add(&e->done_chunks, 1) + 1;
    atomic_store_explicit(BAFT_WORD8(e->page, chunks_done), chunks, memory_order_release);
    if (chunks < all) return;
    /* Two threads may have published their counts in the wrong order. */
    atomic_store_explicit(BAFT_WORD8(e->page, bytes_copied), atomic_load(&e->total), memory_order_release);
    if (e->populate) {
        e->known[e->known_next].begin = e->destination, e->known[e->known_next].extent = e->table->extent;
        e->known_next = (e->known_next + 1) % KNOWN;
    }
    atomic_fetch_sub(&e->table->users, 1);
    atomic_store(&e->done, 1);
    tell(e, BAFT_DONE);
    atomic_fetch_add(&e->bell, 1);
    if (atomic_load(&e->listeners)) futex_wake(&e->bell);
}

enum { GO, NOTHING_LEFT, NOT_PERMITTED, NOT_NOW, HOLDING };

/* Whether, and as what, the thread may copy the next `want` bytes; NOT_NOW: e->wake says when to ask again. */
static int may_copy(baft_engine *e, uint64_t now, uint64_t want, grant *g) {
    if (!baft_look(e, now, want, g)) return NOT_NOW;
    uint64_t pace = g->pace && (!e->throttle || g->pace < e->throttle) ? g->pace : e->throttle;
    if (pace) {
        /* A window leaves its pace no credit, and what was copied before it is not forgotten. */
        if (pace != e->pace_last || (e->pace_left && e->pace_until < now)) e->pace_until = now;
        e->pace_last = pace, e->pace_left = false;
        if (now < e->pace_until) {
            if (!e->wake || e->pace_until < e->wake) e->wake = e->pace_until;
            return NOT_NOW;
        }
        /* Lateness is made up for, but no more than 10 ms of it: a pace is no credit for idle times. */
        if (e->pace_until + 10000000u < now) e->pace_until = now - 10000000u;
        e->pace_until += (uint64_t)((double)g->n * 1e9 / (double)pace);
    } else {
        e->pace_left = true;
    }
    baft_spend(e, g);
    return GO;
}

/* Called between enter() and leave(). `until`: 0, or when the helping thread has to be back. */
static int work(baft_engine *e, uint64_t until) {
    ledger *book = &e->ledgers[until != 0];
    uint64_t job = atomic_load(&e->job);
    for (;;) {
        if (e->hold && atomic_load(&e->done_chunks) >= atomic_load(BAFT_WORD8(e->page, hold_at))) return HOLDING;
        lane *l = take_lane(e);
        if (!l) return NOTHING_LEFT;
        size_t length = e->table->chunks[l->chunk].length;
        uint64_t now = now_ns();
        while (l->at < length) {
            size_t want = length - l->at < BAFT_BLOCK ? length - l->at : BAFT_BLOCK;
            grant g = {BAFT_FENCE, -1, false, 0, want, 0};
            int why = permitted(e) ? until ? now < until ? GO : NOT_PERMITTED : may_copy(e, now, want, &g) : NOT_PERMITTED;
            if (why != GO) {
                atomic_store(&l->state, LANE_PARKED);
                return why;
            }
            copy_block(e, l, (size_t)g.n, g.kind);
            uint64_t end = now_ns();
            baft_span_add(book, &g, job, now, end);
            now = end;
        }
        finish_chunk(e, l);
    }
}

/* Lets the calling thread run wherever any thread of the process may. It was born with the mask of the training thread,
 * which OpenMP often binds to one core (KMP_AFFINITY, OMP_PROC_BIND): it would copy on the very core that computes. */
static void spread(void) {
    cpu_set_t all, one;
    DIR *tasks = opendir("/proc/self/task");
    if (!tasks) return;
    CPU_ZERO(&all);
    for (struct dirent *entry; (entry = readdir(tasks));) {
        pid_t task = (pid_t)atol(entry->d_name);
        if (task > 0 && sched_getaffinity(task, sizeof one, &one) == 0) CPU_OR(&all, &all, &one);
    }
    closedir(tasks);
    if (CPU_COUNT(&all)) sched_setaffinity(0, sizeof all, &all);
}

static void *run(void *argument) {
    baft_engine *e = argument;
    spread();
    pthread_setname_np(pthread_self(), "baft-copy");
    /* The same share of CPU as others, but waking it does not push the training thread off its core: on busy cores
     * opening the gate otherwise took 8 to 30 ms. */
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &(struct sched_param){0});
    prctl(PR_SET_TIMERSLACK, 1ul); /* windows by the clock and paces are kept to some microseconds instead of 50 */
    if (e->nice) setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), getpriority(PRIO_PROCESS, 0) + e->nice);
    for (;;) {
        uint32_t word = atomic_load(BAFT_WORD4(e->page, gate));
        if (atomic_load(&e->quit)) return NULL;
        if (atomic_load(&e->done) || !enter(e)) {
            tell(e, (uint32_t)baft_engine_state(e));
            sleep_on_gate(e, word, -1);
            continue;
        }
        tell(e, BAFT_COPYING);
        int why = work(e, 0);
        leave(e);
        if (why == NOT_NOW) {
            uint64_t now = now_ns(), early = e->wake > now ? e->wake - now : 0;
            tell(e, BAFT_WAITING);
            if (!e->wake) sleep_on_gate(e, word, -1);
            else if (early) sleep_on_gate(e, word, early < LONGEST_SLEEP ? (int64_t)early : LONGEST_SLEEP);
        } else if (why == HOLDING) {
            tell(e, BAFT_HELD);
            sleep_on_gate(e, word, 1000000); /* a test writes hold_at and wakes nobody */
        } else if (why == NOTHING_LEFT && !atomic_load(&e->done)) {
            sleep_on_gate(e, word, -1); /* the helper has the last chunk */
        }
    }
}

/* ------------------------------------------------------------------ fork */

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
static baft_engine *registry;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void before_fork(void) {
    pthread_mutex_lock(&registry_lock);
    for (baft_engine *e = registry; e; e = e->next) atomic_store(&e->paused, 1);
    /* A fork must not hang because a block does: after two seconds it goes on, which is safe all the same (the
     * child has no thread and its engines are absent). */
    uint64_t until = now_ns() + 2000000000u;
    for (baft_engine *e = registry; e; e = e->next) {
        while (atomic_load(&e->busy) && now_ns() < until) pause_ns(10000);
        if (!atomic_load(&e->absent)) tell(e, BAFT_PAUSED);
    }
}

static void after_fork_parent(void) {
    for (baft_engine *e = registry; e; e = e->next) {
        atomic_store(&e->paused, 0);
        if (atomic_load(&e->absent)) continue;
        tell(e, (uint32_t)baft_engine_state(e));
        baft_change_gate(e, KEEP, true);
    }
    pthread_mutex_unlock(&registry_lock);
}

static void after_fork_child(void) {
    /* The page is the parent's: the child changes its own memory only. */
    for (baft_engine *e = registry; e; e = e->next) {
        atomic_store(&e->absent, 1);
        if (atomic_load(&e->armed) && !atomic_load(&e->done)) atomic_fetch_sub(&e->table->users, 1);
        atomic_store(&e->armed, 0);
        atomic_store(&e->busy, 0);
        atomic_store(&e->paused, 0);
    }
    pthread_mutex_unlock(&registry_lock);
}

static void install_fork_handlers(void) { pthread_atfork(before_fork, after_fork_parent, after_fork_child); }

/* ------------------------------------------------------------------ control */

baft_engine *baft_engine_new(int fd, int nice, uint64_t throttle, bool hold) {
    struct stat st;
    if (fd >= 0 && fstat(fd, &st) != 0) return NULL;
    if (fd >= 0 && st.st_size < BAFT_PAGE_BYTES) {
        errno = EINVAL;
        return NULL;
    }
    baft_engine *e = aligned_alloc(64, (sizeof *e + 63) / 64 * 64);
    if (!e) return NULL;
    memset(e, 0, sizeof *e);
    e->nice = nice, e->throttle = throttle, e->hold = hold;
    e->page = mmap(NULL, BAFT_PAGE_BYTES, PROT_READ | PROT_WRITE, fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
    if (e->page == MAP_FAILED) {
        free(e);
        return NULL;
    }
    pthread_mutex_init(&e->control, NULL);
    pthread_once(&fork_once, install_fork_handlers);
    baft_engine_rest(e);
    baft_reset_windows(e);
    atomic_store(BAFT_WORD8(e->page, bytes_copied), 0);
    atomic_store(BAFT_WORD8(e->page, bytes_total), 0);
    atomic_store(BAFT_WORD8(e->page, chunks_done), 0);

    sigset_t all, before;
    sigfillset(&all);
    pthread_mutex_lock(&registry_lock); /* a fork waits until the engine is whole */
    pthread_sigmask(SIG_BLOCK, &all, &before); /* the thread inherits it: signals stay with Python's threads */
    int error = pthread_create(&e->thread, NULL, run, e);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error) e->next = registry, registry = e;
    pthread_mutex_unlock(&registry_lock);
    if (error) {
        munmap(e->page, BAFT_PAGE_BYTES);
        free(e);
        errno = error;
        return NULL;
    }
    return e;
}

bool baft_engine_left(baft_engine *e) { return atomic_load(&e->armed) && !atomic_load(&e->done); }

bool baft_engine_busy(baft_engine *e) { return atomic_load(&e->busy) != 0; }

static bool start(baft_engine *e, baft_table *table, uint8_t *destination) {
    if (atomic_load(&e->absent) || baft_engine_left(e)) return false;
    atomic_store(&e->armed, 0);
    wait_until_quiet(e); /* a thread may still look around in the finished copy */
    if (table->nchunks > e->digest_room) {
        uint8_t *bigger = realloc(e->digests, table->nchunks * BAFT_DIGEST);
        if (!bigger) return false;
        e->digests = bigger, e->digest_room = table->nchunks;
    }
    e->table = table, e->destination = destination, e->nchunks = table->nchunks;
    e->populate = !known(e, destination, table->extent);
    baft_reset_windows(e);
    for (int i = 0; i < LANES; i++) atomic_store(&e->lanes[i].state, LANE_FREE);
    atomic_store(&e->cursor, 0);
    atomic_store(&e->done_chunks, 0);
    atomic_store(&e->done_bytes, 0);
    atomic_store(&e->total, table->total);
    atomic_store(&e->done, table->nchunks == 0);
    if (table->nchunks) atomic_fetch_add(&table->users, 1);
    atomic_store(BAFT_WORD8(e->page, bytes_copied), 0);
    atomic_store(BAFT_WORD8(e->page, chunks_done), 0);
    atomic_store(BAFT_WORD8(e->page, bytes_total), table->total);
    atomic_fetch_add(BAFT_WORD8(e->page, copies), 1);
    atomic_fetch_add(&e->job, 1);
    tell(e, table->nchunks ? BAFT_WAITING : BAFT_DONE);
    atomic_store(&e->armed, 1);
    if (table->nchunks && mode_of(e) != BAFT_CLOSED) baft_change_gate(e, KEEP, true); /* a closed gate wakes nobody for nothing */
    return true;
}

bool baft_engine_start(baft_engine *e, baft_table *table, uint8_t *destination) {
    if (atomic_load(&e->absent)) return false; /* in a child, whoever held the mutex in the parent does not exist */
    pthread_mutex_lock(&e->control);
    bool started = start(e, table, destination);
    pthread_mutex_unlock(&e->control);
    return started;
}

void baft_engine_pace(baft_engine *e, uint64_t bytes_per_second) {
    if (atomic_load(&e->absent)) return;
    atomic_store(BAFT_WORD8(e->page, pace), bytes_per_second);
    baft_change_gate(e, KEEP, true); /* ends a sleep at the old pace */
}

bool baft_engine_flush(baft_engine *e, double seconds, bool help) {
    uint64_t job = atomic_load(&e->job), begin = now_ns();
    uint64_t until = begin + (uint64_t)((seconds < 0 ? 0 : seconds > 1e9 ? 1e9 : seconds) * 1e9);
    atomic_store(&e->timed, NULL);
    help = help && !e->throttle && !e->hold;
    while (atomic_load(&e->job) == job && baft_engine_left(e)) {
        uint64_t now = now_ns();
        if (now >= until) break;
        if (mode_of(e) != BAFT_FLUSH) {
            atomic_store(&e->flushing, 1); /* before the mode: see baft_change_gate */
            baft_change_gate(e, BAFT_FLUSH, true);
        }
        if (help && enter(e)) {
            work(e, until);
            leave(e);
        }
        uint32_t bell = atomic_load(&e->bell);
        atomic_fetch_add(&e->listeners, 1);
        /* Woken by the last chunk; looks by itself every millisecond for a cancel, a fork or a gate closed by others. */
        if (baft_engine_left(e) && !atomic_load(&e->absent)) futex_wait(&e->bell, bell, 1000000);
        atomic_fetch_sub(&e->listeners, 1);
        if (atomic_load(&e->absent)) return false;
    }
    if (atomic_load(&e->job) != job) return false;
    baft_engine_rest(e);
    return atomic_load(&e->armed) && atomic_load(&e->done);
}

static void cancel(baft_engine *e) {
    bool left = baft_engine_left(e);
    atomic_store(&e->armed, 0);
    baft_engine_rest(e);
    wait_until_quiet(e);
    if (left && !atomic_load(&e->done)) atomic_fetch_sub(&e->table->users, 1);
    atomic_store(&e->done, 0);
    e->table = NULL;
    tell(e, BAFT_IDLE);
}

void baft_engine_cancel(baft_engine *e) {
    if (atomic_load(&e->absent)) return;
    pthread_mutex_lock(&e->control);
    if (!atomic_load(&e->absent)) cancel(e);
    pthread_mutex_unlock(&e->control);
}

int baft_engine_state(baft_engine *e) {
    if (atomic_load(&e->absent)) return BAFT_ABSENT;
    if (!atomic_load(&e->armed)) return BAFT_IDLE;
    if (atomic_load(&e->done)) return BAFT_DONE;
    if (atomic_load(&e->paused)) return BAFT_PAUSED;
    if (atomic_load(&e->busy)) return BAFT_COPYING;
    uint32_t told = atomic_load(BAFT_WORD4(e->page, engine));
    return told == BAFT_HELD && mode_of(e) != BAFT_CLOSED ? BAFT_HELD : BAFT_WAITING;
}

uint64_t baft_engine_progress(baft_engine *e) {
    if (!atomic_load(&e->armed)) return 0;
    /* Equal to the total only when the last digest is there too: who polls this may then start the next copy. */
    uint64_t total = atomic_load(&e->total), copied = atomic_load(&e->done_bytes);
    return atomic_load(&e->done) || copied < total ? copied : total - 1;
}

bool baft_engine_digests(baft_engine *e, const uint8_t **digests, size_t *nchunks) {
    if (!atomic_load(&e->armed) || !atomic_load(&e->done)) return false;
    *nchunks = e->nchunks;
    *digests = e->digests;
    return true;
}

void baft_engine_stop(baft_engine *e) {
    if (atomic_load(&e->absent)) return; /* stopped before, or a forked child: there is no thread to join */
    pthread_mutex_lock(&e->control);
    if (!atomic_load(&e->absent)) {
        cancel(e);
        atomic_store(&e->quit, 1);
        baft_change_gate(e, KEEP, false);
        futex_wake(BAFT_WORD4(e->page, gate));
        pthread_join(e->thread, NULL);
        tell(e, BAFT_ABSENT);
        atomic_store(&e->absent, 1);
    }
    pthread_mutex_unlock(&e->control);
}

void baft_engine_free(baft_engine *e) {
    baft_engine_stop(e);
    pthread_mutex_lock(&registry_lock);
    for (baft_engine **at = &registry; *at; at = &(*at)->next) {
        if (*at != e) continue;
        *at = e->next;
        break;
    }
    pthread_mutex_unlock(&registry_lock);
    munmap(e->page, BAFT_PAGE_BYTES);
    baft_free_windows(e);
    free(e->digests);
    free(e);
}
