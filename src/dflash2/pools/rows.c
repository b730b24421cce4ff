/*
 * Copies rows of bytes between matrices, a batch of rows and all pieces of each row in one call, by several threads.
 *
 * A copy of a few KiB to a few MiB by memcpy reads the destination into the cache before it overwrites it: a third of
 * the memory's traffic for nothing. Stores that go past the cache avoid that; glibc uses them only for far larger copies.
 */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "threads.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Less is not worth a thread; so much is copied before a thread looks what is left. */
enum { THREAD_BYTES = 1 << 20, TURN_BYTES = 512 * 1024 };

/* Rows in `num_pieces` matrices of one shape; row r of piece p begins at pieces[p] + r * stride. */
struct rows {
    char *const *pieces;
    size_t stride;
    int64_t num_rows;
};

#ifdef __SSE2__
enum { LINE = 64, AHEAD = 768, STREAM_FROM = 512 };

/* `next` is what will be read after this: its first lines are fetched while the last ones of `src` are stored. */
static void copy_row(char *dst, const char *src, size_t n, const char *next) {
    if (n < STREAM_FROM) {
        memcpy(dst, src, n);
        return;
    }
    size_t head = -(uintptr_t)dst % LINE; /* only whole lines of the destination may go past the cache */
    memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    for (; n >= LINE; dst += LINE, src += LINE, n -= LINE) {
        _mm_prefetch(n > AHEAD ? src + AHEAD : next + (AHEAD - n), _MM_HINT_NTA);
        __m128i a = _mm_loadu_si128((const __m128i *)src), b = _mm_loadu_si128((const __m128i *)(src + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(src + 32)), d = _mm_loadu_si128((const __m128i *)(src + 48));
        _mm_stream_si128((__m128i *)dst, a), _mm_stream_si128((__m128i *)(dst + 16), b);
        _mm_stream_si128((__m128i *)(dst + 32), c), _mm_stream_si128((__m128i *)(dst + 48), d);
    }
    memcpy(dst, src, n);
}

static void finish(void) { _mm_sfence(); } /* before anybody is told that the rows are there */
#else
static void copy_row(char *dst, const char *src, size_t n, const char *next) {
    (void)next;
    memcpy(dst, src, n);
}

static void finish(void) {}
#endif

static int within(const int32_t *at, int64_t count, int64_t num_rows) {
    for (int64_t i = 0; i < count; i++)
        if (at[i] < 0 || at[i] >= num_rows) return 0;
    return 1;
}

static char *row_of(const struct rows *rows, int64_t piece, int32_t at) {
    return rows->pieces[piece] + (size_t)at * rows->stride;
}

/* A batch that several threads copy; each takes some rows after the other. */
struct work {
    const struct rows *dst, *src;
    const int32_t *dst_at, *src_at;
    int64_t count, num_pieces, rows_at_a_time;
    size_t piece_bytes;
    atomic_int_fast64_t next;
};

static void *copy_some(void *shared) {
    struct work *work = shared;
    const struct rows *dst = work->dst, *src = work->src;
    int64_t first;
    while ((first = atomic_fetch_add(&work->next, work->rows_at_a_time)) < work->count) {
        int64_t end = first + work->rows_at_a_time < work->count ? first + work->rows_at_a_time : work->count;
        for (int64_t i = first; i < end; i++) {
            for (int64_t p = 0; p < work->num_pieces; p++) {
                const char *from = row_of(src, p, work->src_at[i]), *next = from;
                if (p + 1 < work->num_pieces) next = row_of(src, p + 1, work->src_at[i]);
                else if (i + 1 < end) next = row_of(src, 0, work->src_at[i + 1]);
                copy_row(row_of(dst, p, work->dst_at[i]), from, work->piece_bytes, next);
            }
        }
    }
    finish();
    return NULL;
}

/*
 * For each i and each piece: dst row dst_at[i] = src row src_at[i], `piece_bytes` bytes; by `num_threads` threads at
 * most, fewer where there is little to copy.
 *
 * Returns 0, or -1 if an index names no row; nothing is then copied. The number in the name goes up when the arguments
 * change, so that a library left by an older build is not called with the new ones.
 */
int dflash2_copy_rows_2(const struct rows *dst, const int32_t *dst_at, const struct rows *src, const int32_t *src_at,
                        int64_t count, int64_t num_pieces, size_t piece_bytes, int64_t num_threads) {
    if (!within(dst_at, count, dst->num_rows) || !within(src_at, count, src->num_rows)) return -1;
    int64_t row_bytes = num_pieces * (int64_t)piece_bytes, at_a_time = TURN_BYTES / (row_bytes + 1) + 1;
    int64_t most = count * row_bytes / THREAD_BYTES;
    struct work work = {dst, src, dst_at, src_at, count, num_pieces, at_a_time, piece_bytes, 0};
    run_threads(copy_some, &work, num_threads < most ? num_threads : most);
    return 0;
}
