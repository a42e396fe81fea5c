/* The copying thread without Python, for the sanitizers: windows, paces, cancels and forks from other threads while
 * copies are started, flushed with and without deadline, and cancelled. Argument: number of copies. Exit status 0: every
 * copy said to be done was complete and had the same digests. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "_engine.h"

#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), exit(1)))
#define SEGMENTS 5

static baft_engine *engine;
static _Atomic int over;

static unsigned dice(unsigned *seed) {
    *seed = *seed * 1103515245 + 12345;
    return *seed >> 16;
}

static void *windows(void *argument) {
    unsigned seed = 1;
    while (!over) {
        switch (dice(&seed) % 4) {
            case 0: baft_engine_gate(engine, BAFT_OPEN); break;
            case 1: baft_engine_gate(engine, BAFT_CLOSED); break;
            case 2: baft_engine_pace(engine, dice(&seed) % 2 ? 0 : 2000000000); break;
            default:
                baft_engine_progress(engine);
                baft_engine_state(engine);
                if (dice(&seed) % 64 == 0) baft_engine_cancel(engine);
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

int main(int count, char **arguments) {
    const size_t sizes[SEGMENTS] = {5 << 20, 17, 0, (4 << 20) + 3, 300000};
    size_t end = 0;
    baft_table table = {.count = SEGMENTS, .segments = calloc(SEGMENTS, sizeof *table.segments)};
    for (int i = 0; i < SEGMENTS; i++) {
        uint8_t *source = malloc(sizes[i] + 1);
        memset(source, i + 1, sizes[i]);
        table.segments[i] = (baft_segment){(uintptr_t)source, end, sizes[i], 1};
        end += sizes[i];
    }
    CHECK(count == 2 && baft_table_chunks(&table) && (engine = baft_engine_new(-1, 0, 0, false)));
    uint8_t *destination = malloc(end), first[16 * BAFT_DIGEST];
    pthread_t one, other;
    pthread_create(&one, NULL, windows, NULL);
    pthread_create(&other, NULL, forks, NULL);
    unsigned seed = 9;
    int done = 0;
    for (int copy = atoi(arguments[1]); copy; copy--) {
        memset(destination, 0xAA, end);
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
            continue;
        }
        for (int i = 0; i < SEGMENTS; i++) {
            const baft_segment *s = &table.segments[i];
            CHECK(memcmp(destination + s->offset, (void *)(uintptr_t)s->source, s->nbytes) == 0);
        }
        if (done++ == 0) memcpy(first, digests, chunks * BAFT_DIGEST);
        CHECK(memcmp(first, digests, chunks * BAFT_DIGEST) == 0);
    }
    over = 1;
    pthread_join(one, NULL);
    pthread_join(other, NULL);
    baft_engine_free(engine);
    CHECK(table.users == 0);
    for (int i = 0; i < SEGMENTS; i++) free((void *)(uintptr_t)table.segments[i].source);
    free(table.segments), free(table.chunks), free(destination);
    printf("done %d\n", done);
    return done > 0 ? 0 : 2;
}
