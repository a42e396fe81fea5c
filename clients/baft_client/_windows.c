/* What may be copied when: windows with a budget, a pace outside of them, windows by the clock; and when it was.
 *
 * Nothing here permits anything (see the top of _worker.c): it says how many bytes a permitted thread takes, and how
 * soon. Windows are opened by the training thread with three stores and no lock. The copying thread reads the gate's
 * mode, then the newest window's serial, then the budget that lies at this serial: whatever is opened or closed
 * meanwhile, a budget is never taken for that of another window. What is spent is counted by the copying thread alone.
 *
 * Lists of timed windows are read between enter() and leave() only, and freed when the next copy is armed, when no
 * thread is there.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "_worker.h"

#define FINEST ((uint64_t)4096)  /* blocks are not cut finer at the end of a budget */
#define PAUSE 5000000u           /* ns between two blocks of one span, at most */
#define LONG_SPAN 20000000u      /* ns; a paced copy is told in pieces of this length */

/* ------------------------------------------------------------------ opening and closing */

void baft_engine_window(baft_engine *e, uint64_t budget) {
    if (atomic_load(&e->absent)) return;
    uint64_t before = atomic_load(&e->serial), serial;
    do { /* more than one thread may open windows: of two at once the later one counts */
        serial = before + 1;
        atomic_store_explicit(&e->budgets[serial % BUDGETS], budget, memory_order_relaxed);
    } while (!atomic_compare_exchange_weak(&e->serial, &before, serial));
    atomic_store_explicit(BAFT_WORD8(e->page, budget), budget, memory_order_relaxed);
    atomic_store_explicit(BAFT_WORD8(e->page, window), serial - atomic_load_explicit(&e->first, memory_order_relaxed), memory_order_relaxed);
    baft_change_gate(e, BAFT_WINDOW, budget != 0);
}

void baft_engine_close(baft_engine *e, uint64_t outside) {
    if (atomic_load(&e->absent)) return;
    atomic_store_explicit(BAFT_WORD8(e->page, window), 0, memory_order_relaxed);
    atomic_store_explicit(BAFT_WORD8(e->page, outside_pace), outside, memory_order_relaxed);
    baft_change_gate(e, outside ? BAFT_BESIDE : BAFT_CLOSED, outside != 0);
}

bool baft_engine_timed(baft_engine *e, const uint64_t *rows, size_t count) {
    if (atomic_load(&e->absent)) return true;
    timed_list *list = malloc(sizeof *list + count * sizeof *list->windows);
    if (!list) return false;
    pthread_mutex_lock(&e->control);
    list->before = e->lists;
    list->serial = ++e->timed_lists;
    list->count = count;
    if (count) memcpy(list->windows, rows, count * sizeof *list->windows);
    e->lists = list;
    bool left = baft_engine_left(e);
    atomic_store(&e->timed, left && count ? list : NULL);
    pthread_mutex_unlock(&e->control);
    if (left) baft_change_gate(e, KEEP, true);
    return true;
}

void baft_engine_rest(baft_engine *e) {
    if (atomic_load(&e->absent)) return;
    atomic_store(&e->timed, NULL);
    atomic_store(&e->flushing, 0);
    baft_engine_close(e, 0);
}

void baft_engine_open(baft_engine *e) {
    if (atomic_load(&e->absent)) return;
    atomic_store_explicit(BAFT_WORD8(e->page, window), 0, memory_order_relaxed);
    baft_change_gate(e, BAFT_OPEN, true);
}

void baft_free_windows(baft_engine *e) {
    for (timed_list *list = e->lists, *before; list; list = before) {
        before = list->before;
        free(list);
    }
    e->lists = NULL;
}

void baft_reset_windows(baft_engine *e) {
    atomic_store(&e->flushing, 0);
    atomic_store(&e->timed, NULL);
    baft_free_windows(e);
    atomic_store(&e->first, atomic_load(&e->serial));
    for (int i = 0; i < BAFT_KINDS; i++) atomic_store(&e->copied[i], 0);
    atomic_store(BAFT_WORD8(e->page, bytes_inside), 0);
    atomic_store(BAFT_WORD8(e->page, bytes_outside), 0);
}

/* ------------------------------------------------------------------ the copying thread's question */

static void tell_spent(baft_engine *e, uint64_t n) {
    atomic_store_explicit(BAFT_WORD8(e->page, spent), n, memory_order_relaxed);
}

/* What a block of `want` bytes may take of a budget. */
static uint64_t cut(uint64_t budget, uint64_t spent, uint64_t want) {
    uint64_t left = budget > spent ? budget - spent : 0;
    return budget == UINT64_MAX || want <= left ? want : left & ~(FINEST - 1);
}

/* The window by the clock that is now; none: e->wake is the beginning of the next. */
static bool look_at_clock(baft_engine *e, uint64_t now, uint64_t want, grant *g) {
    timed_list *list = atomic_load(&e->timed);
    if (!list) return false;
    if (list->serial != e->timed_serial) e->timed_serial = list->serial, e->timed_at = 0, e->timed_spent = 0;
    for (; e->timed_at < list->count; e->timed_at++, e->timed_spent = 0) {
        const timed_window *w = &list->windows[e->timed_at];
        if (now < w->begin) {
            e->wake = w->begin;
            return false;
        }
        uint64_t n = now < w->end ? cut(w->bytes, e->timed_spent, want) : 0;
        if (!n) continue;
        *g = (grant){BAFT_INSIDE, -2 - (int32_t)e->timed_at, true, list->serial, n, 0};
        return true;
    }
    return false;
}

bool baft_look(baft_engine *e, uint64_t now, uint64_t want, grant *g) {
    uint32_t mode = mode_of(e);
    e->wake = 0;
    if (mode == BAFT_FLUSH) {
        *g = (grant){BAFT_FENCE, -1, false, 0, want, 0};
        return true;
    }
    if (mode == BAFT_WINDOW) {
        uint64_t serial = atomic_load(&e->serial), budget = atomic_load(&e->budgets[serial % BUDGETS]);
        if (serial != e->spent_serial) {
            e->spent_serial = serial;
            tell_spent(e, e->spent = 0);
        }
        uint64_t n = cut(budget, e->spent, want);
        if (n) {
            /* Number -1: it was opened before the copy was armed. */
            *g = (grant){BAFT_INSIDE, (int32_t)(serial - atomic_load(&e->first)) - 1, false, serial, n, 0};
            return true;
        }
    }
    if (look_at_clock(e, now, want, g)) return true;
    if (mode == BAFT_OPEN) {
        *g = (grant){BAFT_OUTSIDE, -1, false, 0, want, atomic_load(BAFT_WORD8(e->page, pace))};
        return true;
    }
    uint64_t pace = mode == BAFT_BESIDE ? atomic_load(BAFT_WORD8(e->page, outside_pace)) : 0;
    *g = (grant){BAFT_OUTSIDE, -1, false, 0, want, pace};
    return pace != 0;
}

void baft_spend(baft_engine *e, const grant *g) {
    if (g->kind != BAFT_INSIDE) return;
    if (g->by_clock) e->timed_spent += g->n;
    else tell_spent(e, e->spent += g->n);
}

/* ------------------------------------------------------------------ spans */

static bool lock(ledger *book, int tries) {
    while (atomic_exchange_explicit(&book->locked, 1, memory_order_acquire)) {
        if (--tries == 0) return false;
        if (tries % 64 == 0) sched_yield();
    }
    return true;
}

static void unlock(ledger *book) { atomic_store_explicit(&book->locked, 0, memory_order_release); }

void baft_span_add(ledger *book, const grant *g, uint64_t job, uint64_t begin, uint64_t end) {
    lock(book, -1); /* the reader's turn is short, and it waits for nobody */
    baft_span *s = &book->ring[(book->head - 1) % BAFT_SPANS];
    bool same = book->head != book->tail && s->kind == BAFT_SPAN_KIND + g->kind && s->micro == g->window &&
                book->serial == g->serial && book->job == job && begin - s->end <= PAUSE &&
                !(g->pace && end - s->begin > LONG_SPAN);
    if (same) {
        s->end = end;
        s->amount += g->n;
    } else if (book->head - book->tail < BAFT_SPANS) {
        book->ring[book->head++ % BAFT_SPANS] = (baft_span){
            .kind = (uint8_t)(BAFT_SPAN_KIND + g->kind), .stage = -1, .micro = g->window, .begin = begin, .end = end, .amount = g->n};
        book->serial = g->serial;
        book->job = job;
    } else {
        atomic_fetch_add_explicit(&book->lost, 1, memory_order_relaxed);
    }
    unlock(book);
}

size_t baft_engine_spans(baft_engine *e, baft_span *to) {
    bool mine[LANES];
    size_t n = 0;
    if (atomic_load(&e->absent)) return 0;
    for (int i = 0; i < LANES; i++) mine[i] = lock(&e->ledgers[i], 1000);
    for (;; n++) { /* each is in order: the earlier of the two comes first */
        ledger *from = NULL;
        for (int i = 0; i < LANES; i++) {
            ledger *book = &e->ledgers[i];
            if (!mine[i] || book->tail == book->head) continue;
            if (!from || book->ring[book->tail % BAFT_SPANS].begin < from->ring[from->tail % BAFT_SPANS].begin) from = book;
        }
        if (!from) break;
        to[n] = from->ring[from->tail++ % BAFT_SPANS];
    }
    for (int i = 0; i < LANES; i++) {
        if (mine[i]) unlock(&e->ledgers[i]);
    }
    return n;
}

uint64_t baft_engine_spans_lost(baft_engine *e) {
    uint64_t n = 0;
    for (int i = 0; i < LANES; i++) n += atomic_load(&e->ledgers[i].lost);
    return n;
}

void baft_engine_copied(baft_engine *e, uint64_t bytes[BAFT_KINDS]) {
    for (int i = 0; i < BAFT_KINDS; i++) bytes[i] = atomic_load(&e->copied[i]);
}
