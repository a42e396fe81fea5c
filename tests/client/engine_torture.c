/* The copying thread without Python, for the sanitizers: windows with and without budget, by the clock, paces, cancels and
 * forks from other threads while copies are started, flushed with and without deadline, and cancelled; somebody else reads
 * the spans. Argument: number of copies. Exit status 0: every copy said to be done was complete, had the same digests, and
 * its bytes were counted once. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "_engine.h"

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), exit(1)))
#define SEGMENTS 5

static baft_engine *engine;
static _Atomic int over, turn;

static unsigned dice(unsigned *seed) {
    *seed = *seed * 1103515245 + 12345;
    return *seed >> 16;
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void by_the_clock(unsigned chance) {
    uint64_t rows[3 * 8], at = now();
    for (int i = 0; i < 8; i++) {
        rows[3 * i] = at += chance % 90000;
        rows[3 * i + 1] = at += 1 + chance % 50000;
        rows[3 * i + 2] = chance % 2 ? UINT64_MAX : 300000;
    }
    CHECK(baft_engine_timed(engine, rows, chance % 9));
}

static uint64_t spanned; /* bytes in spans */

static void *reader(void *argument) {
    static baft_span spans[BAFT_SPANS_ROOM];
    while (!over) {
        uint64_t last = 0;
        for (size_t i = 0, n = baft_engine_spans(engine, spans); i < n; i++) {
            CHECK(spans[i].kind >= BAFT_SPAN_KIND && spans[i].kind < BAFT_SPAN_KIND + BAFT_KINDS && spans[i].stage == -1);
            CHECK(spans[i].begin >= last && spans[i].end >= spans[i].begin && spans[i].amount);
            last = spans[i].begin;
            spanned += spans[i].amount;
        }
        usleep(700);
    }
    return argument;
}

static void *windows(void *argument) {
    unsigned seed = 1;
    while (!over) {
        switch (dice(&seed) % 8) {
            case 0: baft_engine_open(engine); break;
            case 1: baft_engine_close(engine, 0); break;
            case 2: baft_engine_close(engine, 100000000 + dice(&seed) * 100000ull); break;
            case 3: baft_engine_window(engine, UINT64_MAX); break;
            case 4: baft_engine_window(engine, dice(&seed) % 3 * 600000); break;
            case 5: baft_engine_pace(engine, dice(&seed) % 2 ? 0 : 2000000000); break;
            case 6: by_the_clock(dice(&seed)); break;
            default:
                baft_engine_progress(engine);
                baft_engine_state(engine);
                if (turn % 3 == 0 && dice(&seed) % 16 == 0) baft_engine_cancel(engine); /* slow machines finish the others */
        }
        usleep(dice(&seed) % 300);
    }
    return argument;
}

static void *forks(void *argument) {
    while (!over) {
        pid_t child = fork();
        if (child == 0) _exit(baft_engine_state(engine) == BAFT_ABSENT ? 0 : 1);
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        usleep(3000);
    }
    return argument;
}

/* Each copy has sources of its own, freed when it is done or cancelled: a late touch is seen by any sanitizer. */
static void new_sources(baft_table *table) {
    for (int i = 0; i < SEGMENTS; i++) {
        uint8_t *source = malloc(table->segments[i].nbytes + 1);
        memset(source, i + 1, table->segments[i].nbytes);
        table->segments[i].source = (uintptr_t)source;
    }
}

static void free_sources(baft_table *table) {
    CHECK(atomic_load(&table->users) == 0);
    for (int i = 0; i < SEGMENTS; i++) free((void *)(uintptr_t)table->segments[i].source);
}

int main(int count, char **arguments) {
    const size_t sizes[SEGMENTS] = {5 << 20, 17, 0, (4 << 20) + 3, 300000};
    size_t end = 0;
    baft_table table = {.count = SEGMENTS, .segments = calloc(SEGMENTS, sizeof *table.segments)};
    for (int i = 0; i < SEGMENTS; i++) {
        table.segments[i] = (baft_segment){4096, end, sizes[i], 1};
        end += sizes[i];
    }
    CHECK(count == 2 && baft_table_chunks(&table) && (engine = baft_engine_new(-1, 0, 0, false)));
    uint8_t *destination = malloc(end), first[16 * BAFT_DIGEST];
    pthread_t one, other, third;
    uint64_t copied = 0, bytes[BAFT_KINDS];
    pthread_create(&one, NULL, windows, NULL);
    pthread_create(&other, NULL, forks, NULL);
    pthread_create(&third, NULL, reader, NULL);
    unsigned seed = 9;
    int done = 0;
    for (int copy = atoi(arguments[1]); copy; copy--) {
        memset(destination, 0xAA, end);
        new_sources(&table);
        turn++;
        CHECK(baft_engine_start(engine, &table, destination));
        usleep(dice(&seed) % 1000);
        bool complete = false;
        switch (dice(&seed) % 3) {
            case 0: break;
            case 1: complete = baft_engine_flush(engine, 30, dice(&seed) % 2); break;
            default:
                while (!complete && baft_engine_left(engine)) complete = baft_engine_flush(engine, 0.0002, true);
        }
        const uint8_t *digests;
        size_t chunks;
        if (!complete || !baft_engine_digests(engine, &digests, &chunks)) {
            baft_engine_cancel(engine); /* whoever else cancels may not be through yet */
            baft_engine_copied(engine, bytes);
            copied += bytes[BAFT_INSIDE] + bytes[BAFT_OUTSIDE] + bytes[BAFT_FENCE];
            free_sources(&table);
            continue;
        }
        for (int i = 0; i < SEGMENTS; i++) {
            const baft_segment *s = &table.segments[i];
            CHECK(memcmp(destination + s->offset, (void *)(uintptr_t)s->source, s->nbytes) == 0);
        }
        baft_engine_copied(engine, bytes);
        CHECK(bytes[BAFT_INSIDE] + bytes[BAFT_OUTSIDE] + bytes[BAFT_FENCE] == table.total);
        copied += table.total;
        if (done++ == 0) memcpy(first, digests, chunks * BAFT_DIGEST);
        CHECK(memcmp(first, digests, chunks * BAFT_DIGEST) == 0);
        free_sources(&table);
    }
    over = 1;
    pthread_join(one, NULL);
    pthread_join(other, NULL);
    pthread_join(third, NULL);
    static baft_span rest[BAFT_SPANS_ROOM];
    for (size_t i = 0, n = baft_engine_spans(engine, rest); i < n; i++) spanned += rest[i].amount;
    CHECK(baft_engine_spans_lost(engine) == 0 && spanned == copied);
    baft_engine_free(engine);
    CHECK(table.users == 0);
    free(table.segments), free(table.chunks), free(destination);
    printf("done %d\n", done);
    return done > 0 ? 0 : 2;
}
