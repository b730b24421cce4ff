/*
 * Copies rows of bytes between matrices, a batch of rows and all pieces of each row in one call.
 *
 * A copy of a few KiB to a few MiB by memcpy reads the destination into the cache before it overwrites it: a third of
 * the memory's traffic for nothing. Stores that go past the cache avoid that; glibc uses them only for far larger copies.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

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

/*
 * For each i and each piece: dst row dst_at[i] = src row src_at[i], `piece_bytes` bytes.
 *
 * Returns 0, or -1 if an index names no row; nothing is then copied. The number in the name goes up when the arguments
 * change, so that a library left by an older build is not called with the new ones.
 */
int dflash2_copy_rows_1(const struct rows *dst, const int32_t *dst_at, const struct rows *src, const int32_t *src_at,
                        int64_t count, int64_t num_pieces, size_t piece_bytes) {
    if (!within(dst_at, count, dst->num_rows) || !within(src_at, count, src->num_rows)) return -1;
    for (int64_t i = 0; i < count; i++) {
        for (int64_t p = 0; p < num_pieces; p++) {
            const char *from = row_of(src, p, src_at[i]), *next = from;
            if (p + 1 < num_pieces) next = row_of(src, p + 1, src_at[i]);
            else if (i + 1 < count) next = row_of(src, 0, src_at[i + 1]);
            copy_row(row_of(dst, p, dst_at[i]), from, piece_bytes, next);
        }
    }
    finish();
    return 0;
}
