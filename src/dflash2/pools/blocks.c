/*
 * Stores and loads a batch of blocks of an NVMe pool in one call: headers, payloads and checksums, by several threads.
 *
 * A caller from Python gives up the interpreter once for the batch, not several times for every block. Nothing is
 * reported here but how far each block came: whatever did not go well is done again, block by block, by Python.
 */
#define _DEFAULT_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#include "threads.h"

enum { HEADER_BYTES = 64, MAX_PIECES = 256 };
enum { NOTHING = 0, MOVED = 1, DONE = 2 };

typedef uint64_t (*hash_function)(const void *data, size_t size);

/* The header of a slot as it lies in the index file (nvme_format.py). */
struct header {
    uint8_t key[32];
    uint64_t checksum, generation;
    uint32_t payload_bytes, flags;
    uint64_t self_checksum;
};
_Static_assert(sizeof(struct header) == HEADER_BYTES, "no padding");

/* Blocks to move; arrays hold one entry for each, neighbours in a file next to each other. */
struct blocks {
    hash_function hash;
    char *memory; /* row r begins at memory + r * stride */
    size_t stride; /* of a block, in memory and in its file */
    size_t payload; /* the bytes of a block that its checksum covers */
    int64_t num_rows, count;
    int64_t max_run; /* most blocks moved by one call of the system */
    int64_t num_threads; /* most calls at once */
    const int32_t *files, *rows;
    const int64_t *offsets;
    uint64_t *checksums; /* of what was read or written */
    uint8_t *states; /* NOTHING, MOVED, DONE */
};

/* The index file, and what happens to it before and after payloads are written. */
struct index {
    int64_t start; /* of slot 0's header */
    const int32_t *stale; /* ascending slots whose headers are emptied first */
    int64_t num_stale;
    const int32_t *slots; /* of each block */
    const int32_t *by_slot; /* numbers of the blocks, their slots ascending */
    struct header *headers; /* of each block, complete but for the checksums */
    int32_t file;
};

typedef ssize_t (*move_function)(int file, const struct iovec *pieces, int num_pieces, off_t offset);

/* Whether all bytes were moved. A short call is no success: the system tells why when it is asked for the rest. */
static int moved(move_function move, int file, const struct iovec *pieces, int num_pieces, int64_t offset) {
    size_t wanted = 0;
    for (int i = 0; i < num_pieces; i++) wanted += pieces[i].iov_len;
    ssize_t count;
    do count = move(file, pieces, num_pieces, offset);
    while (count < 0 && errno == EINTR);
    return count >= 0 && (size_t)count == wanted;
}

static char *row_of(const struct blocks *blocks, int64_t i) {
    return blocks->memory + (size_t)blocks->rows[i] * blocks->stride;
}

static int rows_exist(const struct blocks *blocks) {
    for (int64_t i = 0; i < blocks->count; i++)
        if (blocks->rows[i] < 0 || blocks->rows[i] >= blocks->num_rows) return 0;
    return 1;
}

/* How many blocks from `first` on one call of the system may move. */
static int64_t run_from(const struct blocks *blocks, int64_t first) {
    int64_t most = blocks->max_run < MAX_PIECES ? blocks->max_run : MAX_PIECES, n = 1;
    while (n < most && first + n < blocks->count && blocks->files[first + n] == blocks->files[first]
           && blocks->offsets[first + n] == blocks->offsets[first] + n * (int64_t)blocks->stride)
        n++;
    return n;
}

static int move_run(move_function move, const struct blocks *blocks, int64_t first, int64_t n) {
    struct iovec pieces[MAX_PIECES];
    for (int64_t i = 0; i < n; i++) pieces[i] = (struct iovec){row_of(blocks, first + i), blocks->stride};
    return moved(move, blocks->files[first], pieces, (int)n, blocks->offsets[first]);
}

/* What the threads of one call share. */
struct work {
    const struct blocks *blocks;
    int stores;
    pthread_mutex_t lock; /* guards what follows */
    int64_t next;
    int failed;
};

/* The next run that nobody has taken; 0 if there is none, or one has failed: Python is then asked for the rest. */
static int64_t take_run(struct work *work, int64_t *first) {
    pthread_mutex_lock(&work->lock);
    int64_t n = 0;
    *first = work->next;
    if (!work->failed && work->next < work->blocks->count) n = run_from(work->blocks, work->next);
    work->next += n;
    pthread_mutex_unlock(&work->lock);
    return n;
}

static void set_checksums(const struct blocks *blocks, int64_t first, int64_t n) {
    for (int64_t i = first; i < first + n; i++)
        blocks->checksums[i] = blocks->hash(row_of(blocks, i), blocks->payload);
}

static void *move_runs(void *shared) {
    struct work *work = shared;
    const struct blocks *blocks = work->blocks;
    for (int64_t first, n; (n = take_run(work, &first));) {
        if (work->stores) set_checksums(blocks, first, n);
        if (move_run(work->stores ? pwritev : preadv, blocks, first, n)) {
            if (!work->stores) set_checksums(blocks, first, n);
            memset(blocks->states + first, MOVED, (size_t)n);
        } else {
            pthread_mutex_lock(&work->lock);
            work->failed = 1;
            pthread_mutex_unlock(&work->lock);
        }
    }
    return NULL;
}

static void move_blocks(const struct blocks *blocks, int stores) {
    struct work work = {.blocks = blocks, .stores = stores, .lock = PTHREAD_MUTEX_INITIALIZER};
    int64_t num_runs = 0;
    for (int64_t first = 0; first < blocks->count; first += run_from(blocks, first)) num_runs++;
    run_threads(move_runs, &work, blocks->num_threads < num_runs ? blocks->num_threads : num_runs);
    pthread_mutex_destroy(&work.lock);
}

/*
 * Reads blocks and says what their checksums are; ends early when a run was not read whole.
 *
 * Returns 0, or -1 if a row is not there; nothing is then read.
 */
int dflash2_load_blocks_2(const struct blocks *blocks) {
    if (!rows_exist(blocks)) return -1;
    move_blocks(blocks, 0);
    return 0;
}

static int64_t header_at(const struct index *index, int32_t slot) { return index->start + (int64_t)slot * HEADER_BYTES; }

static int empty_headers(const struct index *index) {
    static const struct header empty[MAX_PIECES];
    for (int64_t first = 0, n; first < index->num_stale; first += n) {
        int32_t slot = index->stale[first];
        n = 1;
        while (n < MAX_PIECES && first + n < index->num_stale && index->stale[first + n] == slot + n) n++;
        struct iovec zeros = {(void *)empty, (size_t)n * HEADER_BYTES};
        if (!moved(pwritev, index->file, &zeros, 1, header_at(index, slot))) return 0;
    }
    return 1;
}

/* Headers of all blocks that were moved; a run whose headers could not be written stays at MOVED. */
static void write_headers(const struct blocks *blocks, const struct index *index) {
    struct iovec pieces[MAX_PIECES];
    for (int64_t first = 0, n; first < blocks->count; first += n) {
        int32_t slot = index->slots[index->by_slot[first]];
        for (n = 0; n < MAX_PIECES && first + n < blocks->count; n++) {
            int32_t i = index->by_slot[first + n];
            if (blocks->states[i] != MOVED || index->slots[i] != slot + n) break;
            struct header *header = &index->headers[i];
            header->checksum = blocks->checksums[i];
            header->self_checksum = blocks->hash(header, offsetof(struct header, self_checksum));
            pieces[n] = (struct iovec){header, HEADER_BYTES};
        }
        if (n == 0) {
            n = 1; /* was not moved */
            continue;
        }
        if (!moved(pwritev, index->file, pieces, (int)n, header_at(index, slot))) continue;
        for (int64_t i = first; i < first + n; i++) blocks->states[index->by_slot[i]] = DONE;
    }
}

/*
 * Empties the headers that are stale, writes blocks, and then the headers of those that were written; ends early when a
 * run was not written whole.
 *
 * Returns 0; -1 if a row is not there, and nothing is then written; -2 if a header could not be emptied, and no payload
 * is then written.
 */
int dflash2_store_blocks_2(const struct blocks *blocks, const struct index *index) {
    if (!rows_exist(blocks)) return -1;
    if (!empty_headers(index)) return -2;
    move_blocks(blocks, 1);
    write_headers(blocks, index);
    return 0;
}
