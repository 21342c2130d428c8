/* A persistent pool of threads: parallel_for(fn, work, num_blocks, threads).
 *
 * Blocks are claimed from an atomic counter, so slow threads take fewer. The caller works too and
 * keeps the job on its stack; several threads of the process may call at once. Idle workers wait
 * on a condition variable. A forked child starts with an empty pool of its own.
 */
#ifndef ZERO_STRATEGY_POOL_H
#define ZERO_STRATEGY_POOL_H

#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stddef.h>

enum { MAX_WORKERS = 1023 };

typedef void (*BlockFn)(const void *work, int64_t block);

typedef struct Job {
    BlockFn fn;
    const void *work;
    int64_t num_blocks;
    _Atomic int64_t next_block;
    int helpers_wanted;  /* guarded by pool.mutex, as all below */
    int helpers_at_work;
    struct Job *next;
} Job;

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t has_job, helper_left;
    Job *jobs;
    int num_workers;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0};

static void pool_after_fork(void) {
    pool.mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.has_job = pool.helper_left = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.jobs = NULL;
    pool.num_workers = 0;
}

__attribute__((constructor)) static void pool_on_load(void) {
    pthread_atfork(NULL, NULL, pool_after_fork);
}

static void job_run(Job *job) {
    for (;;) {
        int64_t block = atomic_fetch_add_explicit(&job->next_block, 1, memory_order_relaxed);
        if (block >= job->num_blocks) return;
        job->fn(job->work, block);
    }
}

static void job_unlist(Job *job) {
    for (Job **link = &pool.jobs; *link; link = &(*link)->next)
        if (*link == job) {
            *link = job->next;
            return;
        }
}

static void *worker_main(void *unused) {
    (void)unused;
    /* A thread inherits its maker's mode: flushed denormals would make bits depend on it. */
    fesetenv(FE_DFL_ENV);
    pthread_mutex_lock(&pool.mutex);
    for (;;) {
        Job *job = pool.jobs;
        if (!job) {
            pthread_cond_wait(&pool.has_job, &pool.mutex);
            continue;
        }
        if (--job->helpers_wanted == 0) job_unlist(job);
        job->helpers_at_work++;
        pthread_mutex_unlock(&pool.mutex);
        job_run(job);
        pthread_mutex_lock(&pool.mutex);
        if (--job->helpers_at_work == 0) pthread_cond_broadcast(&pool.helper_left);
    }
    return NULL;
}

/* Called with the mutex held. Fewer workers than wanted only make the job slower. */
static void pool_grow(int num_workers) {
    sigset_t all, before;
    sigfillset(&all);
    /* Signals belong to the interpreter's threads. */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.num_workers < num_workers && pool.num_workers < MAX_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker_main, NULL)) break;
        pthread_detach(thread);
        pool.num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void parallel_for(BlockFn fn, const void *work, int64_t num_blocks, int threads) {
    int64_t helpers = threads < num_blocks ? threads - 1 : num_blocks - 1;
    Job job = {fn, work, num_blocks, 0, (int)helpers, 0, NULL};
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    if (helpers > 0) {
        pthread_mutex_lock(&pool.mutex);
        pool_grow((int)helpers);
        Job **last = &pool.jobs;
        while (*last) last = &(*last)->next;
        *last = &job;
        pthread_cond_broadcast(&pool.has_job);
        pthread_mutex_unlock(&pool.mutex);
    }
    job_run(&job);
    if (helpers > 0) {
        pthread_mutex_lock(&pool.mutex);
        job_unlist(&job);
        while (job.helpers_at_work) pthread_cond_wait(&pool.helper_left, &pool.mutex);
        pthread_mutex_unlock(&pool.mutex);
    }
    fesetenv(&before);
}

#endif
