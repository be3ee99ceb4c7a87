// What all scenarios share: memory with known contents, a look at which of its pages the pool backs,
// and checks that end the program with exit status 1 and one line on standard error.
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define MIB (1ul << 20)
#ifndef WAIT_MAX
#define WAIT_MAX 120
#endif
#define CHECK(what, ...)                                          \
    do {                                                          \
        if (!(what)) {                                            \
            fprintf(stderr, "%s:%d: ", __func__, __LINE__);       \
            fprintf(stderr, __VA_ARGS__);                         \
            fprintf(stderr, " (errno %d)\n", errno);              \
            _exit(1);                                             \
        }                                                         \
    } while (0)
#define SKIP(...)                        \
    do {                                 \
        printf("SKIPPED: " __VA_ARGS__); \
        printf("\n");                    \
        fflush(stdout);                  \
        _exit(77);                       \
    } while (0)

// One run of the program. Each file ends with a table of its scenarios, which a row of zeros ends.
struct scenario {
    const char *name;
    void (*run)(void);
};

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

void nap(int ms);

static inline uint64_t mix(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

static inline uint64_t draw(uint64_t *seed) { return mix((*seed) += 0x9e3779b97f4a7c15ull); }

// ---- pages with known contents ----------------------------------------------------------------------------------

// Word `at` of a page with number `number`.
static inline uint64_t word(uint64_t number, size_t at) { return mix(number * 512 + at + 1); }

void fill_page(void *page, uint64_t number);
int page_is(const void *page, uint64_t number);
int page_is_zero(const void *page);

struct region {
    char *at;
    size_t pages;
    size_t period;  // page i has number base + i % period
    uint64_t base;
};

static inline uint64_t number_of(const struct region *r, size_t page) { return r->base + page % r->period; }

// Maps `pages` pages and fills them.
struct region fill(size_t pages, size_t period, uint64_t base);
// Asks for the region to be merged in 4 KiB pages. Refusing transparent huge pages makes the result independent of the
// machine's setting.
void mark_mergeable(const struct region *r);
// Maps memory full of twins and waits until the pool shows at least three quarters of it.
struct region merged(size_t pages);
void wait_merged(const struct region *r, size_t wanted);
// Compares every byte of the region with what `fill` wrote.
void check(const struct region *r, const char *when);
// Writes every page, with numbers from `base`, and compares all of them.
void write_all(struct region *r, uint64_t base, const char *when);

// ---- what the kernel shows --------------------------------------------------------------------------------------

// An open /proc/self/maps for scenarios that lose /proc; NULL otherwise.
extern FILE *kept_maps;

// Pages of [start, start + len) in private mappings of a pool file.
size_t pool_pages(const void *start, size_t len);
// Pages of [start, start + len) that the kernel shows from a file now: the shared ones.
size_t shown_pages(const void *start, size_t len);
// Whether the VmFlags of the mapping at `at` contain `flag`.
int flag_at(void *at, const char *flag);
// The signal that reading (or writing) `at` raises, 0 for none.
int faults(volatile char *at, int write);

// ---- calls ------------------------------------------------------------------------------------------------------

// A system call by bare instruction, which no library sees. Returns a negative error number.
long raw(long number, long a, long b, long c, long d, long e, long f);
// madvise(2) by three ways: the C library's function, syscall(2), and the bare instruction.
long libc_advise(void *at, size_t len, int advice);
long syscall_advise(void *at, size_t len, int advice);
long raw_advise(void *at, size_t len, int advice);
// A fork that runs no handlers of pthread_atfork(3), where the C library has one.
pid_t plain_fork(void);
// Waits for the child; true if its exit status is 0.
int ended_well(pid_t child);
// The thread id of the agent, if the program has no other thread besides its first.
long agent_thread(void);

// ---- shared by scenarios of several files -----------------------------------------------------------------------

// writers.c: threads that count in pages of `hammered`, and pause while `resting` is 1.
enum { HAMMER_PAGES = 4096, HAMMERS = 4 };
extern struct region hammered;
extern atomic_int resting;
void start_hammers(pthread_t *threads);
// Stops the threads and compares every byte.
void stop_hammers(pthread_t *threads);
// Fills the region, with a count of 0 in every page.
void fill_counted(const struct region *r);
// A thread that adds 1 to every page's count in turn, as fast as it can, until `resting` is 1.
void *count_in(void *region);
// Compares the counts in memory with those that the thread has added.
void check_counts(const struct region *r);

// signals.c: a timer signal after each handler's end.
extern atomic_int ticks;
void start_ticks(void (*handler)(int), long every);
void stop_ticks(void);
void next_tick(void);

// seccomp.c: installs a filter for this thread, by prctl(2) or by seccomp(2) with `filter_flags`.
struct sock_filter;
extern int filter_flags;
void install(int by_syscall, struct sock_filter *code, size_t count);

// privileges.c: call number `turn` of eight that each take something away from the calling thread.
long one_of_many_calls(int turn);
