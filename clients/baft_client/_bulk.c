/* Work done at once in the calling thread (and helpers it waits for): tables, canary, comparison, digests. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "_engine.h"

bool baft_table_chunks(baft_table *table) {
    size_t n = 0;
    table->total = table->extent = 0;
    for (size_t i = 0; i < table->count; i++) {
        const baft_segment *s = &table->segments[i];
        uint64_t end;
        if (__builtin_add_overflow(s->offset, s->nbytes, &end)) return false;
        if (__builtin_add_overflow(table->total, s->nbytes, &table->total)) return false;
        if (end > table->extent) table->extent = end;
        n += (size_t)(s->nbytes / BAFT_CHUNK) + (s->nbytes % BAFT_CHUNK != 0);
    }
    table->chunks = malloc((n ? n : 1) * sizeof *table->chunks);
    if (!table->chunks) return false;
    table->nchunks = n;
    baft_chunk *c = table->chunks;
    for (size_t i = 0; i < table->count; i++) {
        uint64_t nbytes = table->segments[i].nbytes;
        for (uint64_t at = 0; at < nbytes; at += BAFT_CHUNK, c++) {
            *c = (baft_chunk){i, at, nbytes - at < BAFT_CHUNK ? (size_t)(nbytes - at) : BAFT_CHUNK};
        }
    }
    return true;
}

/* Sixteen elements, evenly spread, the first and the last among them. */
#define SAMPLES 16
#define AHEAD 4 /* tensors whose lines are asked for before they are read */

static inline size_t samples_of(const baft_segment *s, uint64_t *elements) {
    *elements = s->itemsize ? s->nbytes / s->itemsize : 0;
    return *elements < SAMPLES ? (size_t)*elements : SAMPLES;
}

static inline const uint8_t *sample_at(const baft_segment *s, uint64_t elements, size_t k, size_t samples) {
    uint64_t index = samples < SAMPLES ? k : elements <= UINT64_MAX / SAMPLES ? k * (elements - 1) / (SAMPLES - 1) : 0;
    return (const uint8_t *)(uintptr_t)s->source + index * s->itemsize;
}

void baft_table_canary(const baft_table *table, uint64_t *records) {
    for (size_t i = 0; i < table->count + AHEAD; i++) {
        uint64_t elements;
        if (i < table->count) {
            const baft_segment *s = &table->segments[i];
            size_t m = samples_of(s, &elements);
            for (size_t k = 0; k < m; k++) __builtin_prefetch(sample_at(s, elements, k, m));
        }
        if (i < AHEAD) continue;
        const baft_segment *s = &table->segments[i - AHEAD];
        size_t m = samples_of(s, &elements);
        uint64_t h = 0x9E3779B97F4A7C15ull;
        for (size_t k = 0; k < m; k++) {
            const uint8_t *p = sample_at(s, elements, k, m);
            for (uint64_t left = s->itemsize; left;) {
                uint64_t word = 0;
                size_t take = left < 8 ? (size_t)left : 8;
                if (take == 8) memcpy(&word, p, 8);
                else if (take == 4) memcpy(&word, p, 4);
                else if (take == 2) memcpy(&word, p, 2);
                else memcpy(&word, p, take);
                /* one to one in `word`: a single element that differs always changes the record */
                h = (h ^ word) * 0xD6E8FEB86659FD93ull;
                h ^= h >> 32;
                p += take, left -= take;
            }
        }
        records[i - AHEAD] = h;
    }
}

static size_t mismatch(const uint8_t *a, const uint8_t *b, size_t n) {
    for (size_t at = 0; at < n; at += 4096) {
        size_t m = n - at < 4096 ? n - at : 4096;
        if (memcmp(a + at, b + at, m) == 0) continue;
        while (a[at] == b[at]) at++;
        return at;
    }
    return n;
}

size_t baft_table_compare(const baft_table *table, const uint8_t *destination, uint64_t *at) {
    for (size_t i = 0; i < table->count; i++) {
        const baft_segment *s = &table->segments[i];
        if (!s->nbytes) continue;
        size_t where = mismatch((const uint8_t *)(uintptr_t)s->source, destination + s->offset, s->nbytes);
        if (where < s->nbytes) {
            *at = where;
            return i;
        }
    }
    return table->count;
}

typedef struct {
    const uint8_t *from;
    uint8_t *to, *digests;
    size_t n, chunks;
    _Atomic size_t next;
} bulk_job;

static void *bulk_run(void *argument) {
    bulk_job *job = argument;
    baft_hash state;
    for (;;) {
        size_t chunk = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (chunk >= job->chunks) break;
        size_t at = chunk * BAFT_CHUNK, n = job->n - at < BAFT_CHUNK ? job->n - at : BAFT_CHUNK;
        if (!job->digests) {
            baft_cpu->copy(job->to + at, job->from + at, n);
            continue;
        }
        baft_cpu->hash_reset(&state);
        if (job->to) baft_cpu->hash_copy(&state, job->to + at, job->from + at, n);
        else baft_cpu->hash_update(&state, job->from + at, n);
        baft_cpu->hash_finish(&state, job->digests + chunk * BAFT_DIGEST);
    }
    baft_cpu->fence();
    return NULL;
}

void baft_bulk(const uint8_t *from, uint8_t *to, size_t n, uint8_t *digests, int threads) {
    bulk_job job = {.from = from, .to = to, .digests = digests, .n = n, .chunks = n / BAFT_CHUNK + (n % BAFT_CHUNK != 0)};
    pthread_t helpers[64];
    int started = 0, wanted = threads < 64 ? threads - 1 : 63;
    if ((size_t)wanted >= job.chunks) wanted = (int)job.chunks - 1;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* signals stay with Python's threads */
    while (started < wanted && pthread_create(&helpers[started], NULL, bulk_run, &job) == 0) started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    bulk_run(&job);
    while (started > 0) pthread_join(helpers[--started], NULL);
}
