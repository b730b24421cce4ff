/* Threads for one call: started for it and ended with it, so that nothing lives in between. */
#ifndef DFLASH2_THREADS_H
#define DFLASH2_THREADS_H

#include <pthread.h>
#include <stdint.h>

enum { MAX_THREADS = 64, STACK_BYTES = 256 * 1024 };

/* Runs `function(work)` in `num_threads` threads, of which the caller is one; one that cannot be had is done without. */
static void run_threads(void *(*function)(void *), void *work, int64_t num_threads) {
    pthread_t helpers[MAX_THREADS];
    pthread_attr_t attributes;
    int64_t n = 0, most = num_threads < MAX_THREADS ? num_threads : MAX_THREADS;
    if (most > 1 && pthread_attr_init(&attributes) == 0) {
        pthread_attr_setstacksize(&attributes, STACK_BYTES);
        while (n + 1 < most && pthread_create(&helpers[n], &attributes, function, work) == 0) n++;
        pthread_attr_destroy(&attributes);
    }
    function(work);
    while (n > 0) pthread_join(helpers[--n], NULL);
}

#endif
