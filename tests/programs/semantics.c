// A program with memory that pagefold merges, one scenario per run: it waits until its pages are
// shown from the pool, does what its argument says to them, and compares every byte with what
// anonymous memory would show. Exit status: 0 right, 1 wrong (one line on stderr), 77 cannot be
// tried here (one line on stdout).
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
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

extern char **environ;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void nap(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000l};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {
    }
}

static uint64_t mix(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

static uint64_t draw(uint64_t *seed) { return mix((*seed) += 0x9e3779b97f4a7c15ull); }

// Word `at` of pages with number `number`.
static uint64_t word(uint64_t number, size_t at) { return mix(number * 512 + at + 1); }

static void fill_page(void *page, uint64_t number) {
    uint64_t *words = page;
    for (size_t i = 0; i < 512; i++) words[i] = word(number, i);
}

static int page_is(const void *page, uint64_t number) {
    const uint64_t *words = page;
    for (size_t i = 0; i < 512; i++)
        if (words[i] != word(number, i)) return 0;
    return 1;
}

static int page_is_zero(const void *page) {
    const uint64_t *words = page;
    for (size_t i = 0; i < 512; i++)
        if (words[i]) return 0;
    return 1;
}

// A raw system call that no library sees.
static long raw(long number, long a, long b, long c, long d, long e, long f) {
#if defined(__x86_64__)
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#else
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#endif
}

static FILE *kept_maps;  // for who has no /proc any more

// Pages of [start, start + len) that a pool file backs, and the number of its mappings.
static size_t pool_pages(const void *start, size_t len) {
    FILE *maps = kept_maps ? kept_maps : fopen("/proc/thread-self/maps", "r");
    if (!maps) return 0;
    rewind(maps);
    char line[512], mode[8];
    size_t pages = 0;
    while (fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        if (!strstr(line, "memfd:pagefold-pool") || sscanf(line, "%lx-%lx %7s", &from, &to, mode) != 3) continue;
        if (mode[3] != 'p') continue;
        unsigned long low = (unsigned long)start, high = low + len;
        if (from < low) from = low;
        if (to > high) to = high;
        if (from < to) pages += (to - from) / PAGE;
    }
    if (maps != kept_maps) fclose(maps);
    return pages;
}

// Pages of [start, start + len) that the kernel shows from a file now: those that are shared.
static size_t shown_pages(const void *start, size_t len) {
    int file = open("/proc/thread-self/pagemap", O_RDONLY);
    CHECK(file >= 0, "pagemap");
    size_t pages = 0;
    for (size_t at = 0; at < len; at += PAGE) {
        uint64_t entry = 0;
        CHECK(pread(file, &entry, 8, ((unsigned long)start + at) / PAGE * 8) == 8, "pagemap");
        pages += entry >> 63 & entry >> 61 & 1;
    }
    close(file);
    return pages;
}

struct region {
    char *at;
    size_t pages;
    size_t period;  // page i has number base + i % period
    uint64_t base;
};

static uint64_t number_of(const struct region *r, size_t page) { return r->base + page % r->period; }

static struct region fill(size_t pages, size_t period, uint64_t base) {
    struct region r = {NULL, pages, period, base};
    r.at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(r.at != MAP_FAILED, "mmap");
    for (size_t i = 0; i < pages; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    return r;
}

static void wait_merged(const struct region *r, size_t wanted) {
    double began = now();
    while (pool_pages(r->at, r->pages * PAGE) < wanted) {
        CHECK(now() - began < WAIT_MAX, "only %zu of %zu pages were merged", pool_pages(r->at, r->pages * PAGE), wanted);
        nap(20);
    }
}

static void check(const struct region *r, const char *when) {
    for (size_t i = 0; i < r->pages; i++)
        CHECK(page_is(r->at + i * PAGE, number_of(r, i)), "page %zu is wrong %s", i, when);
}

// Memory full of twins, at least three quarters of it shown from the pool. Transparent huge pages are refused, so
// that pages are merged whatever the machine's setting is.
static struct region merged(size_t pages) {
    struct region r = fill(pages, pages / 4, 1000);
    madvise(r.at, pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(madvise(r.at, pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    wait_merged(&r, pages / 4 * 3);
    check(&r, "after merging");
    return r;
}

static void write_all(struct region *r, uint64_t base, const char *when) {
    for (size_t i = 0; i < r->pages; i++) fill_page(r->at + i * PAGE, base + i);
    for (size_t i = 0; i < r->pages; i++) CHECK(page_is(r->at + i * PAGE, base + i), "page %zu lost a write %s", i, when);
}

static sigjmp_buf escape;
static void on_fault(int signal) { siglongjmp(escape, signal); }

static int faults(volatile char *at, int write) {
    struct sigaction action = {.sa_handler = on_fault}, old_segv, old_bus;
    sigaction(SIGSEGV, &action, &old_segv);
    sigaction(SIGBUS, &action, &old_bus);
    int signal = sigsetjmp(escape, 1);
    if (signal == 0) {
        if (write) *at = 1;
        else (void)*at;
    }
    sigaction(SIGSEGV, &old_segv, NULL);
    sigaction(SIGBUS, &old_bus, NULL);
    return signal;
}

static int ended_well(pid_t child) {
    int status;
    while (waitpid(child, &status, 0) < 0) CHECK(errno == EINTR, "waitpid");
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// ---- writers ----------------------------------------------------------------------------------------------------

static int flag_at(void *at, const char *flag);

enum { HAMMER_PAGES = 4096, HAMMERS = 4, HAMMER_VALUES = 3 };
static struct region hammered;
static unsigned char expected[HAMMER_PAGES];
static atomic_ulong writes;
static atomic_int hammering = 1, resting;

// Each writer owns every fourth page and adds to counters there, in windows that wander: pages rest, are merged,
// and are written again at any moment. The counters wrap early, so that pages become equal again.
static void *hammer(void *argument) {
    size_t mine = (size_t)argument;
    uint64_t seed = 77 + mine;
    while (atomic_load(&hammering)) {
        size_t window = draw(&seed) % (HAMMER_PAGES / HAMMERS - 128);
        for (int i = 0; i < 6000 && !atomic_load(&resting); i++) {
            size_t page = (window + draw(&seed) % 128) * HAMMERS + mine;
            volatile uint64_t *counter = (volatile uint64_t *)(hammered.at + page * PAGE) + 100;
            uint64_t before = *counter;
            CHECK(before == expected[page], "page %zu has count %lu, not %u: a write was lost", page, before, expected[page]);
            expected[page] = (expected[page] + 1) % HAMMER_VALUES;
            *counter = expected[page];
        }
        atomic_fetch_add(&writes, 6000);
        nap(draw(&seed) % 8);
    }
    return NULL;
}

static void check_hammered(void) {
    for (size_t i = 0; i < HAMMER_PAGES; i++) {
        uint64_t *words = (uint64_t *)(hammered.at + i * PAGE);
        for (size_t j = 0; j < 512; j++) {
            uint64_t right = j == 100 ? expected[i] : word(number_of(&hammered, i), j);
            CHECK(words[j] == right, "page %zu word %zu is %lx, not %lx", i, j, words[j], right);
        }
    }
}

static void start_hammers(pthread_t *threads) {
    hammered = fill(HAMMER_PAGES, 4, 50);
    for (size_t i = 0; i < HAMMER_PAGES; i++) ((uint64_t *)(hammered.at + i * PAGE))[100] = 0;
    madvise(hammered.at, HAMMER_PAGES * PAGE, MADV_NOHUGEPAGE);
    CHECK(madvise(hammered.at, HAMMER_PAGES * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    for (size_t i = 0; i < HAMMERS; i++) pthread_create(&threads[i], NULL, hammer, (void *)i);
}

static void writers(void) {
    pthread_t threads[HAMMERS];
    start_hammers(threads);
    size_t most = 0;
    double began = now();
    while (atomic_load(&writes) < 2000000 || most <= 200 || now() - began < 6) {
        size_t here = pool_pages(hammered.at, HAMMER_PAGES * PAGE);
        if (here > most) most = here;
        CHECK(now() - began < 100, "only %lu writes, and up to %zu pages merged", atomic_load(&writes), most);
        nap(50);
    }
    atomic_store(&hammering, 0);
    for (size_t i = 0; i < HAMMERS; i++) pthread_join(threads[i], NULL);
    check_hammered();
    printf("%lu writes, up to %zu pages merged meanwhile\n", atomic_load(&writes), most);
}

// MADV_UNMERGEABLE and MERGEABLE in turn while others write.
static void unmergeable_writers(void) {
    pthread_t threads[HAMMERS];
    start_hammers(threads);
    size_t most = 0;
    // On a busy machine little is merged between two rounds: more of them then, and longer ones.
    for (int round = 0; round < 12 || (most <= 100 && round < 60); round++) {
        nap(round < 12 ? 400 : 2000);
        size_t here = pool_pages(hammered.at, HAMMER_PAGES * PAGE);
        if (here > most) most = here;
        CHECK(madvise(hammered.at, HAMMER_PAGES * PAGE, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE");
        CHECK(shown_pages(hammered.at, HAMMER_PAGES * PAGE) == 0, "pages are still shared");
        CHECK(madvise(hammered.at, HAMMER_PAGES * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    }
    atomic_store(&hammering, 0);
    for (size_t i = 0; i < HAMMERS; i++) pthread_join(threads[i], NULL);
    check_hammered();
    CHECK(most > 100, "only %zu pages were ever merged", most);
}

// Locks are not inherited: what a child writes anew is merged.
static void locks_and_children(void) {
    struct region r = fill(1024, 256, 1000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    if (mlock(r.at, r.pages * PAGE) != 0) SKIP("mlock is limited here");
    for (int all = 0; all < 2; all++) {
        if (all && mlockall(MCL_CURRENT | MCL_FUTURE) != 0) SKIP("mlockall is limited here");
        pid_t child = fork();
        if (child == 0) {
            for (size_t i = 0; i < r.pages; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
            CHECK(madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
            wait_merged(&r, 700);
            check(&r, "merged in a child");
            _exit(0);
        }
        CHECK(child > 0 && ended_well(child), "the child of a parent that locked %s", all ? "all" : "memory");
        CHECK(flag_at(r.at, " lo") && pool_pages(r.at, r.pages * PAGE) == 0, "the parent's memory is not locked");
        if (!all) CHECK(munlock(r.at, r.pages * PAGE) == 0, "munlock");
    }
    CHECK(munlockall() == 0, "munlockall");
    for (size_t i = 0; i < r.pages; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    wait_merged(&r, 700);
}

// Counts in every page in turn, as fast as it can.
static void *count_in(void *argument) {
    struct region *r = argument;
    for (size_t i = 0; !atomic_load(&resting); i = (i + 1) % r->pages) {
        volatile uint64_t *counter = (volatile uint64_t *)(r->at + i * PAGE) + 100;
        CHECK(*counter == expected[i], "page %zu has count %lu, not %u: a write was lost", i, *counter, expected[i]);
        *counter = ++expected[i];
    }
    return NULL;
}

static void *lock_all(void *argument) {
    struct region *r = argument;
    CHECK(mlock(r->at, r->pages * PAGE) == 0, "mlock");
    return NULL;
}

// Two threads lock memory of their own at the same time, and one of the two is being written.
static void lock_writers(void) {
    struct region quiet = fill(4096, 16, 3000), written = fill(1024, 16, 50);
    if (mlock(quiet.at, quiet.pages * PAGE) != 0) SKIP("mlock is limited here");
    munlock(quiet.at, quiet.pages * PAGE);
    for (int round = 0; round < 5; round++) {
        memset(expected, 0, sizeof expected);
        for (size_t i = 0; i < written.pages; i++) {
            fill_page(written.at + i * PAGE, number_of(&written, i));
            ((uint64_t *)(written.at + i * PAGE))[100] = 0;
        }
        for (int i = 0; i < 2; i++) {
            struct region *r = i ? &quiet : &written;
            madvise(r->at, r->pages * PAGE, MADV_NOHUGEPAGE);
            CHECK(madvise(r->at, r->pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
        }
        // The agent comes back after each round.
        wait_merged(&written, 700);
        wait_merged(&quiet, 2800);
        pthread_t counter, lockers[2];
        atomic_store(&resting, 0);
        pthread_create(&counter, NULL, count_in, &written);
        pthread_create(&lockers[0], NULL, lock_all, &quiet);
        nap(1 + 2 * round);
        pthread_create(&lockers[1], NULL, lock_all, &written);
        for (int i = 0; i < 2; i++) pthread_join(lockers[i], NULL);
        nap(10);
        atomic_store(&resting, 1);
        pthread_join(counter, NULL);
        for (size_t i = 0; i < written.pages; i++) {
            uint64_t count = ((uint64_t *)(written.at + i * PAGE))[100];
            CHECK((unsigned char)count == expected[i], "page %zu has count %lu, not %u", i, count, expected[i]);
        }
        check(&quiet, "locked");
        munlock(quiet.at, quiet.pages * PAGE);
        munlock(written.at, written.pages * PAGE);
    }
}

// ---- fork -------------------------------------------------------------------------------------------------------

static long agent_thread(void);

static pid_t raw_clone(void) { return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); }
#if __GLIBC__ > 2 || __GLIBC_MINOR__ >= 34
static pid_t plain_fork(void) { return _Fork(); }
#else
static pid_t plain_fork(void) { return fork(); }
#endif

static int cloned(void *argument) {
    check(argument, "in a child by clone(3)");
    return 0;
}

static char clone_stack[64 << 10] __attribute__((aligned(16)));

static void forks(void) {
    struct region r = fill(2048, 16, 3000);
    uint64_t seed = 5;
    size_t most = 0;
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    pid_t (*ways[])(void) = {fork, raw_clone, plain_fork};
    // On a busy machine little is merged between two forks: more rounds then, and calmer ones.
    for (int round = 0; round < 45 || (most <= 100 && round < 145); round++) {
        // Writing gives the merger something to do at the moment of the fork.
        madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
        for (size_t i = 0; i < (round < 45 ? 512 : 32); i++) {
            size_t page = draw(&seed) % r.pages;
            fill_page(r.at + page * PAGE, number_of(&r, page));
        }
        nap(round < 45 ? draw(&seed) % 250 : 500);
        size_t here = pool_pages(r.at, r.pages * PAGE);
        if (here > most) most = here;
        pid_t child;
        if (round % 4 == 3) {
            child = clone(cloned, clone_stack + sizeof clone_stack, SIGCHLD, &r);
        } else {
            child = ways[round % 4]();
            if (child == 0) {
                check(&r, "in a child");
                fill_page(r.at + PAGE * (round % r.pages), 9);
                CHECK(page_is(r.at + PAGE * (round % r.pages), 9), "the child's write is gone");
                _exit(0);
            }
        }
        CHECK(child > 0, "fork");
        CHECK(ended_well(child), "the child of round %d (way %d) is wrong", round, round % 4);
        check(&r, "in the parent of a fork");
    }
    CHECK(most > 100, "only %zu pages were ever merged", most);
}

// A child's agent looks after what is merged before a daemon has answered it.
static void child_without_daemon(void) {
    const char *number = getenv("DAEMON");
    CHECK(number, "no DAEMON");
    struct region r = merged(1024);
    wait_merged(&r, r.pages);
    CHECK(kill(atoi(number), SIGSTOP) == 0, "SIGSTOP");
    pid_t child = fork();
    if (child == 0) {
        // Who is watched for discards is watched for missing pages.
        for (double began = now(); !flag_at(r.at, " um"); nap(10)) CHECK(now() - began < WAIT_MAX, "nobody looks after merged pages");
        CHECK(raw(SYS_madvise, (long)r.at, 128 * PAGE, MADV_DONTNEED, 0, 0, 0) == 0, "MADV_DONTNEED");
        for (size_t i = 0; i < 128; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes", i);
        CHECK(mlock(r.at + 256 * PAGE, 256 * PAGE) == 0 || errno == ENOMEM || errno == EPERM, "mlock");
        for (size_t i = 128; i < r.pages; i++) CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu is wrong", i);
        CHECK(setgid(getgid()) == 0, "setgid");
        exit(0);
    }
    int well = ended_well(child);
    CHECK(kill(atoi(number), SIGCONT) == 0, "SIGCONT");
    CHECK(well, "the child was wrong");
    check(&r, "in the parent");
}

// A program that advises all the anonymous memory that it finds, ours with it.
static void all_that_is_listed(void) {
    struct region r = merged(1024);
    char path[64], text[512] = "", line[512], mode[8];
    snprintf(path, sizeof path, "/proc/self/task/%ld/syscall", agent_thread());
    unsigned long stack = 0;
    for (double began = now(); !stack; nap(1)) {
        int file = open(path, O_RDONLY);
        if (file < 0 || read(file, text, sizeof text - 1) <= 0) SKIP("the kernel tells no stacks of threads");
        close(file);
        // Number, six arguments, stack, place; or "running".
        if (sscanf(text, "%*s %*s %*s %*s %*s %*s %*s %lx", &stack) != 1) stack = 0;
        CHECK(now() - began < WAIT_MAX, "the agent never waits");
    }
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps, "maps");
    while (fgets(line, sizeof line, maps)) {
        unsigned long from, to, inode;
        int name = 0;
        if (sscanf(line, "%lx-%lx %7s %*s %*s %lu %n", &from, &to, mode, &inode, &name) != 4) continue;
        if (strcmp(mode, "rw-p") != 0 || inode != 0 || (line[name] && line[name] != '\n')) continue;
        madvise((void *)from, to - from, MADV_NOHUGEPAGE);
        CHECK(madvise((void *)from, to - from, MADV_MERGEABLE) == 0, "MADV_MERGEABLE of %s", line);
    }
    fclose(maps);
    struct region later = merged(1024);
    nap(1500);
    CHECK(!flag_at((void *)stack, " uw") && !flag_at((void *)stack, " um"), "the agent's own stack is managed");
    CHECK(madvise(r.at, 64 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    for (size_t i = 0; i < 64; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes", i);
    pid_t child = fork();
    if (child == 0) {
        check(&later, "in a child");
        _exit(0);
    }
    CHECK(ended_well(child), "the child was wrong");
    check(&later, "in the end");
}

// Where no thread can be made any more nothing stays merged; the children, which are in the new namespace, have agents.
static void process_namespace(void) {
    struct region r = merged(1024);
    if (unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) SKIP("no namespaces for this user");
    check(&r, "in a new namespace");
    CHECK(raw(SYS_madvise, (long)r.at, 128 * PAGE, MADV_DONTNEED, 0, 0, 0) == 0, "MADV_DONTNEED");
    for (size_t i = 0; i < 128; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes", i);
    CHECK(pool_pages(r.at, r.pages * PAGE) == 0, "%zu pages are held by nobody", pool_pages(r.at, r.pages * PAGE));
    pid_t child = fork();
    if (child == 0) {
        merged(1024);
        exit(0);
    }
    CHECK(ended_well(child), "the child has no agent");
}

// What the process's directory in /proc tells of its memory goes with its first thread.
static void *goes_on(void *argument) {
    struct region r = *(struct region *)argument;
    char text[512] = "";
    for (double began = now(); !strstr(text, ") Z ");) {
        CHECK(now() - began < WAIT_MAX, "the first thread goes on");
        int file = open("/proc/self/stat", O_RDONLY);
        CHECK(file >= 0 && read(file, text, sizeof text - 1) > 0, "stat");
        close(file);
        nap(10);
    }
    CHECK(madvise(r.at, 128 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    CHECK(raw(SYS_madvise, (long)r.at + 128 * PAGE, 128 * PAGE, MADV_DONTNEED, 0, 0, 0) == 0, "raw MADV_DONTNEED");
    for (size_t i = 0; i < 256; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes", i);
    char *moved = mremap(r.at + 512 * PAGE, 512 * PAGE, 1024 * PAGE, MREMAP_MAYMOVE);
    CHECK(moved != MAP_FAILED, "mremap");
    for (size_t i = 0; i < 512; i++) CHECK(page_is(moved + i * PAGE, number_of(&r, 512 + i)), "page %zu is wrong, moved", i);
    for (size_t i = 256; i < 512; i++) CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu is wrong", i);
    merged(1024);
    exit(0);
}

static void main_ends(void) {
    static struct region r;
    r = merged(1024);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, goes_on, &r) == 0, "pthread_create");
    pthread_exit(NULL);
}

// The child goes on with the parent's merged pages after the parent is gone and others took its slots.
static void orphan(void) {
    struct region r = merged(1024);
    int ends[2];
    CHECK(pipe(ends) == 0, "pipe");
    pid_t child = fork();
    if (child == 0) {
        pid_t grandchild = fork();
        if (grandchild > 0) _exit(0);
        nap(300);
        check(&r, "after the parent's end");
        struct region other = fill(1024, 16, 77000);
        madvise(other.at, other.pages * PAGE, MADV_MERGEABLE);
        nap(1500);
        check(&r, "after the parent's slots were given up");
        check(&other, "of the child's own");
        write_all(&r, 123456, "in an orphan");
        CHECK(write(ends[1], "k", 1) == 1, "write");
        _exit(0);
    }
    CHECK(ended_well(child), "the child failed");
    munmap(r.at, r.pages * PAGE);
    close(ends[1]);
    char answer = 0;
    CHECK(read(ends[0], &answer, 1) == 1 && answer == 'k', "the grandchild failed");
}

static void vforks(void) {
    struct region r = merged(1024);
    for (int round = 0; round < 20; round++) {
        pid_t child = vfork();
        if (child == 0) {
            execl("/bin/true", "true", NULL);
            _exit(1);
        }
        CHECK(child > 0 && ended_well(child), "vfork and exec");
        char *arguments[] = {"true", NULL};
        CHECK(posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ) == 0, "posix_spawn");
        CHECK(ended_well(child), "posix_spawn's program");
        CHECK(system("exit 0") == 0, "system");
        check(&r, "after vfork");
    }
    wait_merged(&r, 500);
}

// What a child gives up that has its parent's memory until it is another program is not the parent's to give up.
static void vforks_with_less(void) {
    struct region r = merged(1024);
    long before = agent_thread();
    for (int turn = 0; turn < 2; turn++) {
        pid_t child = vfork();
        if (child == 0) {
            if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) _exit(1);
            if (turn && geteuid() == 0 && (setgroups(0, NULL) || setgid(65534) || setuid(65534))) _exit(2);
            execl("/bin/true", "true", NULL);
            _exit(3);
        }
        CHECK(child > 0 && ended_well(child), "vfork, less rights, and exec");
        CHECK(pool_pages(r.at, r.pages * PAGE) > 0, "the child has unmerged its parent");
        CHECK(agent_thread() == before, "the agent is another or gone");
    }
    // With a filter of its own, which forbids what only we would call.
    char *small = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(small != MAP_FAILED && madvise(small, 64 * PAGE, MADV_MERGEABLE) == 0, "memory");
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigprocmask, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    pid_t child = vfork();
    if (child == 0) {
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) _exit(1);
        _exit(munmap(small, 64 * PAGE) == 0 ? 0 : 2);
    }
    CHECK(child > 0 && ended_well(child), "vfork, a filter, and munmap");
    check(&r, "after vfork");
    struct region later = merged(1024);
    check(&later, "merged later");
}

static void daemonize(void) {
    struct region r = merged(1024);
    int ends[2];
    CHECK(pipe(ends) == 0, "pipe");
    pid_t child = fork();
    if (child == 0) {
        setsid();
        if (fork() > 0) _exit(0);
        if (chdir("/") != 0) _exit(1);
        for (int fd = 3; fd < 64; fd++)
            if (fd != ends[1]) close(fd);
        nap(500);
        check(&r, "in a daemon");
        // Merging goes on here as well.
        struct region own = fill(1024, 16, 880000);
        madvise(own.at, own.pages * PAGE, MADV_NOHUGEPAGE);
        madvise(own.at, own.pages * PAGE, MADV_MERGEABLE);
        wait_merged(&own, 700);
        check(&own, "in a daemon");
        write_all(&r, 5555, "in a daemon");
        CHECK(write(ends[1], "k", 1) == 1, "write");
        _exit(0);
    }
    CHECK(ended_well(child), "the child failed");
    close(ends[1]);
    char answer = 0;
    CHECK(read(ends[0], &answer, 1) == 1 && answer == 'k', "the daemon failed");
    check(&r, "in the parent of a daemon");
}

// ---- discards and mappings --------------------------------------------------------------------------------------

static void discard_by(long (*advise)(void *, size_t, int)) {
    struct region r = merged(1024);
    for (int round = 0; round < 3; round++) {
        CHECK(advise(r.at + 100 * PAGE, 300 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
        for (size_t i = 0; i < r.pages; i++) {
            if (i >= 100 && i < 400) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes after a discard", i);
            else CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu beside a discard is wrong", i);
        }
        for (size_t i = 100; i < 400; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
        check(&r, "after a discard was written over");
        wait_merged(&r, 750);
    }
    check(&r, "merged again");
}

static long libc_advise(void *at, size_t len, int advice) { return madvise(at, len, advice); }
static long syscall_advise(void *at, size_t len, int advice) { return syscall(SYS_madvise, at, len, advice); }
static long raw_advise(void *at, size_t len, int advice) { return raw(SYS_madvise, (long)at, len, advice, 0, 0, 0); }
static void dontneed(void) { discard_by(libc_advise); }
static void dontneed_syscall(void) { discard_by(syscall_advise); }
static void dontneed_raw(void) { discard_by(raw_advise); }

// A discard over a hole: what is mapped beside it is gone all the same.
static void dontneed_hole(void) {
    long (*const ways[])(void *, size_t, int) = {libc_advise, syscall_advise, raw_advise};
    for (size_t way = 0; way < 3; way++) {
        struct region r = merged(1024);
        CHECK(munmap(r.at + 400 * PAGE, 100 * PAGE) == 0, "munmap");
        long result = ways[way](r.at + 300 * PAGE, 300 * PAGE, MADV_DONTNEED);
        CHECK(result == -ENOMEM || (result == -1 && errno == ENOMEM), "%ld", result);
        for (size_t i = 0; i < r.pages; i++) {
            if (i >= 400 && i < 500) continue;
            if (i >= 300 && i < 600) CHECK(page_is_zero(r.at + i * PAGE), "way %zu: page %zu shows old bytes", way, i);
            else CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu beside a discard is wrong", i);
        }
        CHECK(munmap(r.at, r.pages * PAGE) == 0, "munmap");
    }
}

// Discards where the kernel has no room for another mapping, and what else happens to such memory.
static void dontneed_at_a_limit(void) {
    long (*const ways[])(void *, size_t, int) = {raw_advise, libc_advise};
    struct rlimit all, few;
    CHECK(getrlimit(RLIMIT_AS, &all) == 0, "getrlimit");
    few = all;
    few.rlim_cur = PAGE;
    for (size_t way = 0; way < 2; way++) {
        struct region r = merged(1024);
        for (size_t i = 5; i < r.pages; i += 9) fill_page(r.at + i * PAGE, number_of(&r, i));
        CHECK(setrlimit(RLIMIT_AS, &few) == 0, "setrlimit");
        for (size_t i = 20; i < 200; i += 20) CHECK(ways[way](r.at + i * PAGE, 3 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
        for (size_t i = 0; i < r.pages; i++) {
            if (i >= 20 && i < 200 && i % 20 < 3) CHECK(page_is_zero(r.at + i * PAGE), "way %zu: page %zu shows old bytes", way, i);
            else CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu beside a discard is wrong", i);
        }
        CHECK(setrlimit(RLIMIT_AS, &all) == 0, "setrlimit");
        for (size_t i = 20; i < 200; i += 20)
            for (size_t j = i; j < i + 3; j++) fill_page(r.at + j * PAGE, number_of(&r, j));
        nap(1000);
        check(&r, "without a limit");
        // It moves, goes, and comes again like any other.
        CHECK(madvise(r.at + 40 * PAGE, 3 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
        char *moved = mremap(r.at, r.pages * PAGE, 2 * r.pages * PAGE, MREMAP_MAYMOVE);
        CHECK(moved != MAP_FAILED, "mremap");
        for (size_t i = 40; i < 43; i++) CHECK(page_is_zero(moved + i * PAGE), "way %zu: page %zu shows old bytes where it moved", way, i);
        for (size_t i = 40; i < 43; i++) fill_page(moved + i * PAGE, number_of(&r, i));
        r.at = moved;
        check(&r, "moved");
        CHECK(munmap(r.at, 2 * r.pages * PAGE) == 0, "munmap");
    }
}

// Raw discards of a region while it is being merged: what was discarded reads zero or what was written since.
static void dontneed_racing(void) {
    struct region r = fill(2048, 16, 4000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    uint64_t seed = 3;
    size_t most = 0;
    // On a busy machine little is merged between two discards: more rounds then, and calmer ones.
    for (int round = 0; round < 120 || (most <= 300 && round < 270); round++) {
        nap(round < 120 ? draw(&seed) % 60 : 600);
        if (round % 20 == 0) nap(600);
        size_t here = pool_pages(r.at, r.pages * PAGE);
        if (here > most) most = here;
        size_t first = draw(&seed) % 1500, pages = 1 + draw(&seed) % 500;
        char *at = r.at + first * PAGE;
        long done = round % 2 ? raw_advise(at, pages * PAGE, MADV_DONTNEED) : libc_advise(at, pages * PAGE, MADV_DONTNEED);
        CHECK(done == 0, "MADV_DONTNEED gave %ld", done);
        for (size_t i = 0; i < pages; i++) CHECK(page_is_zero(at + i * PAGE), "round %d: page %zu shows old bytes", round, first + i);
        for (size_t i = 0; i < pages; i++) fill_page(at + i * PAGE, number_of(&r, first + i));
        check(&r, "among discards");
    }
    CHECK(most > 300, "only %zu pages were ever merged", most);
}

static void lazy_free(void) {
    struct region r = merged(1024);
    CHECK(madvise(r.at, 512 * PAGE, MADV_FREE) == 0, "MADV_FREE");
    for (size_t i = 0; i < 512; i++)
        CHECK(page_is(r.at + i * PAGE, number_of(&r, i)) || page_is_zero(r.at + i * PAGE), "page %zu is neither old nor zero", i);
    for (size_t i = 512; i < r.pages; i++) CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu is wrong", i);
    write_all(&r, 900000, "after MADV_FREE");
}

static void hole_punch(void) {
    struct region r = merged(1024);
    // Anonymous private memory has nothing to remove.
    CHECK(madvise(r.at, 64 * PAGE, MADV_REMOVE) == -1 && errno == EINVAL, "MADV_REMOVE on private memory");
    check(&r, "after MADV_REMOVE");
    raw_advise(r.at, 64 * PAGE, MADV_REMOVE);
    check(&r, "after a raw MADV_REMOVE");
    write_all(&r, 31000, "after MADV_REMOVE");
}

static void unmap(void) {
    struct region r = merged(1024);
    CHECK(munmap(r.at + 100 * PAGE, 50 * PAGE) == 0, "partial munmap");
    CHECK(faults(r.at + 120 * PAGE, 0), "an unmapped page can be read");
    for (size_t i = 0; i < r.pages; i++)
        if (i < 100 || i >= 150) CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu beside a hole is wrong", i);
    // Something else takes the hole.
    void *other = mmap(r.at + 100 * PAGE, 50 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(other == r.at + 100 * PAGE, "mmap into the hole");
    for (size_t i = 100; i < 150; i++) CHECK(page_is_zero(r.at + i * PAGE), "fresh page %zu is not zero", i);
    for (size_t i = 100; i < 150; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    check(&r, "after the hole was filled");
    CHECK(raw(SYS_munmap, (long)(r.at + 500 * PAGE), 20 * PAGE, 0, 0, 0, 0) == 0, "raw munmap");
    nap(500);
    CHECK(faults(r.at + 510 * PAGE, 1), "a page unmapped by a raw call can be written");
    CHECK(munmap(r.at, r.pages * PAGE) == 0, "munmap");
    CHECK(faults(r.at, 0), "an unmapped page can be read");
}

// A call that fails when the kernel has unmapped what lay there: what the program said of that is not said of what comes there next.
static void failed_maps(void) {
    struct region r = merged(1024), target = merged(1024);
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
    const size_t len = 512 * PAGE;
    CHECK(madvise(target.at, target.pages * PAGE, MADV_DONTFORK) == 0, "MADV_DONTFORK");
    // A socket has no memory to map; the kernel asks it when the place is free.
    CHECK(mmap(target.at, len, PROT_READ, MAP_SHARED | MAP_FIXED, pair[0], 0) == MAP_FAILED, "a socket was mapped");
    // Longer than all memory may be.
    char *plain = fill(1, 1, 1).at, *place = target.at + len;
    struct rlimit old, little;
    CHECK(getrlimit(RLIMIT_AS, &old) == 0, "getrlimit");
    little = (struct rlimit){PAGE, old.rlim_max};
    CHECK(setrlimit(RLIMIT_AS, &little) == 0, "setrlimit");
    char *moved = mremap(plain, PAGE, len, MREMAP_MAYMOVE | MREMAP_FIXED, place);
    CHECK(setrlimit(RLIMIT_AS, &old) == 0 && moved == MAP_FAILED, "mremap beyond a limit");
    size_t freed = 0;
    for (int half = 0; half < 2; half++) {
        unsigned char seen[512];
        char *at = target.at + half * len;
        struct region fresh = {at, 512, 128, 1000};
        if (mincore(at, len, seen) == 0 || errno != ENOMEM) continue;
        CHECK(mmap(at, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | 0x100000 /* MAP_FIXED_NOREPLACE */, -1, 0) == at, "mmap");
        for (size_t i = 0; i < fresh.pages; i++) fill_page(at + i * PAGE, number_of(&fresh, i));
        CHECK(madvise(at, len, MADV_NOHUGEPAGE) == 0, "MADV_NOHUGEPAGE");
        madvise(at, len, MADV_MERGEABLE);
        wait_merged(&fresh, fresh.pages / 2);
        CHECK(!flag_at(at, " dc"), "fresh memory is not the child's");
        pid_t child = fork();
        if (child == 0) {
            check(&fresh, "in the child");
            _exit(0);
        }
        CHECK(ended_well(child), "the child of fresh memory");
        check(&fresh, "in the parent");
        freed++;
    }
    check(&r, "after all");
    if (!freed) SKIP("this kernel unmaps nothing for a call that fails");
}

// A child moves what has a hole, which the kernel may take for several mappings (since Linux 6.17) or refuse.
static void move_around_a_hole(struct region *r, int flags) {
    const size_t hole = r->pages / 2;
    pid_t child = fork();
    if (child == 0) {
        CHECK(munmap(r->at + hole * PAGE, PAGE) == 0, "munmap");
        char *target = mmap(NULL, r->pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(target != MAP_FAILED, "mmap");
        if (mremap(r->at, r->pages * PAGE, r->pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED | flags, target) == MAP_FAILED) exit(0);
        for (size_t i = 0; i < r->pages; i++) {
            if (i == hole) continue;
            CHECK(page_is(target + i * PAGE, number_of(r, i)), "page %zu is wrong behind its move", i);
            if (flags) CHECK(page_is_zero(r->at + i * PAGE), "page %zu is still where it was", i);
        }
        CHECK(madvise(target, hole * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
        for (size_t i = 0; i < hole; i++) CHECK(page_is_zero(target + i * PAGE), "page %zu shows old bytes", i);
        exit(0);
    }
    CHECK(child > 0 && ended_well(child), "the child that moves with %d was wrong", flags);
}

static void remap(void) {
    struct region r = merged(1024);
    // Not without moving: then it would have to be copied while others may write.
    CHECK(mremap(r.at, r.pages * PAGE, (r.pages + 1) * PAGE, 0) == MAP_FAILED && errno == ENOMEM, "mremap in place");
    check(&r, "after growing in place");
    char *grown = mremap(r.at, r.pages * PAGE, 2 * r.pages * PAGE, MREMAP_MAYMOVE);
    CHECK(grown != MAP_FAILED, "mremap to grow");
    r.at = grown;
    check(&r, "after growing");
    for (size_t i = r.pages; i < 2 * r.pages; i++) CHECK(page_is_zero(grown + i * PAGE), "grown page %zu is not zero", i);
    for (size_t i = r.pages; i < 2 * r.pages; i++) fill_page(grown + i * PAGE, number_of(&r, i));
    r.pages *= 2;
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    wait_merged(&r, 1500);
    check(&r, "grown and merged again");
    move_around_a_hole(&r, 0);
    move_around_a_hole(&r, 4 /* MREMAP_DONTUNMAP */);
    char *target = mmap(NULL, r.pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mremap(r.at, r.pages * PAGE, r.pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target) == target, "mremap to move");
    CHECK(faults(r.at, 0), "the old place can be read");
    r.at = target;
    check(&r, "after moving");
    wait_merged(&r, 1500);
    CHECK(mremap(r.at, r.pages * PAGE, 100 * PAGE, 0) == r.at, "mremap to shrink");
    CHECK(faults(r.at + 100 * PAGE, 0), "beyond the end can be read");
    r.pages = 100;
    check(&r, "after shrinking");
    write_all(&r, 31000, "after mremap");
}

// Who has become another user may not read his memory by /proc, and is told of two mappings what the kernel tells of them.
static void remap_as_another(void) {
    struct region r = merged(1024);
    if (setgid(65534) != 0 || setuid(65534) != 0) SKIP("not root");
    struct region two = fill(4, 4, 1);
    CHECK(madvise(two.at, PAGE, MADV_DONTFORK) == 0, "MADV_DONTFORK");
    char *moved = mremap(two.at, 4 * PAGE, 8 * PAGE, MREMAP_MAYMOVE);
    CHECK(moved != MAP_FAILED || errno == EFAULT, "mremap of two mappings");
    if (moved != MAP_FAILED) two.at = moved;
    check(&two, "after mremap");
    check(&r, "after all");
}

// Where the program has unmapped something nothing comes that it did not map: it may want the place again (MAP_FIXED).
static void holes(void) {
    enum { HOLES = 8, LEN = 16 };
    unsigned char seen[LEN];
    char *at[HOLES];
    for (int i = 0; i < HOLES; i++) {
        at[i] = mmap(NULL, (LEN << i) * PAGE, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(at[i] != MAP_FAILED, "mmap");
        // Else they would be one.
        CHECK(mmap(NULL, PAGE, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0) != MAP_FAILED, "mmap");
    }
    // What the program maps itself comes before.
    struct region r = fill(1024, 256, 1000);
    FILE *maps = fopen("/proc/thread-self/maps", "r");
    CHECK(maps && getc(maps) != EOF, "maps");
    kept_maps = maps;
    for (int i = 0; i < HOLES; i++) CHECK(munmap(at[i], (LEN << i) * PAGE) == 0, "munmap");
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    wait_merged(&r, r.pages / 2);
    nap(1500);
    for (int i = 0; i < HOLES; i++)
        for (size_t page = 0; page < (size_t)LEN << i; page++)
            CHECK(mincore(at[i] + page * PAGE, PAGE, seen) == -1 && errno == ENOMEM, "something came to page %zu of hole %d", page, i);
    check(&r, "beside holes");
}

// Tells where a large block lies.
static void place(void) { printf("%p\n", mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)); }

// What a part of a mapping is marked with it keeps, whatever becomes of the rest.
static void remap_marked(void) {
    struct region r = fill(1024, 256, 1000);
    char *marked = r.at + 512 * PAGE;
    size_t len = 256 * PAGE;
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    CHECK(madvise(marked, len, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE");
    CHECK(mremap(r.at, r.pages * PAGE, 1000 * PAGE, 0) == r.at, "mremap to shrink");
    r.pages = 1000;
    wait_merged(&r, 600);
    nap(1000);
    CHECK(pool_pages(marked, len) == 0, "what is not to be merged is merged after the mapping shrank");
    // Kernels that note the marks themselves move one mapping only.
    char *moved = mremap(r.at, r.pages * PAGE, 1256 * PAGE, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED) return;
    marked += moved - r.at;
    r.at = moved;
    check(&r, "moved");
    wait_merged(&r, 600);
    nap(1000);
    CHECK(pool_pages(marked, len) == 0, "what is not to be merged is merged after the mapping moved");
    CHECK(madvise(marked, len, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    wait_merged(&r, 800);
}

// Parts were merged and given back: the kernel does not join them with the others, and moves one mapping only.
static void remap_healed(void) {
    struct region r = fill(1024, 1024, 5000);
    for (size_t i = 0; i < r.pages; i++)
        if (i / 16 % 2) fill_page(r.at + i * PAGE, 1000 + i % 16);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    wait_merged(&r, 400);
    double began = now();
    while (pool_pages(r.at, r.pages * PAGE) > 0) {
        CHECK(now() - began < WAIT_MAX, "%zu pages are not given back", pool_pages(r.at, r.pages * PAGE));
        for (size_t i = 0; i < r.pages; i++)
            if (i / 16 % 2) fill_page(r.at + i * PAGE, number_of(&r, i));
        nap(100);
    }
    for (size_t times = 1; times < 3; times++) {
        char *grown = mremap(r.at, r.pages * times * PAGE, r.pages * (times + 1) * PAGE, MREMAP_MAYMOVE);
        CHECK(grown != MAP_FAILED, "mremap");
        r.at = grown;
        check(&r, "after mremap");
    }
}

static void protect(void) {
    struct region r = merged(1024);
    size_t len = r.pages * PAGE;
    // A page broken before the protection: the merger will want to heal it.
    for (size_t i = 0; i < 64; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    CHECK(mprotect(r.at, len, PROT_READ) == 0, "mprotect to read only");
    check(&r, "read only");
    CHECK(faults(r.at + 5 * PAGE, 1) == SIGSEGV, "a read-only page can be written");
    nap(700);
    check(&r, "read only, later");
    CHECK(faults(r.at + 5 * PAGE, 1) == SIGSEGV, "a read-only page can be written later");
    CHECK(mprotect(r.at, len, PROT_READ | PROT_WRITE) == 0, "mprotect back");
    for (size_t i = 0; i < 64; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    CHECK(mprotect(r.at, len, PROT_NONE) == 0, "mprotect to nothing");
    nap(1000);
    CHECK(faults(r.at, 0) == SIGSEGV && faults(r.at + 700 * PAGE, 0) == SIGSEGV, "a page without rights can be read");
    // Moving and unmerging memory without rights must keep both rights and bytes.
    char *target = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mremap(r.at, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, target) == target, "mremap without rights");
    r.at = target;
    CHECK(faults(r.at, 0) == SIGSEGV, "a moved page without rights can be read");
    CHECK(mprotect(r.at, len, PROT_READ | PROT_WRITE) == 0, "mprotect back");
    check(&r, "after all rights came back");
    wait_merged(&r, 700);
    CHECK(mprotect(r.at, len, PROT_READ) == 0, "mprotect to read only");
    CHECK(madvise(r.at, len, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE read only");
    check(&r, "unmerged read only");
    CHECK(faults(r.at + 5 * PAGE, 1) == SIGSEGV, "an unmerged read-only page can be written");
    CHECK(mprotect(r.at, len, PROT_READ | PROT_WRITE) == 0, "mprotect back");
    madvise(r.at, len, MADV_MERGEABLE);
    wait_merged(&r, 700);
    CHECK(mprotect(r.at, len, PROT_READ) == 0, "mprotect to read only");
    CHECK(madvise(r.at, 100 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED read only");
    CHECK(page_is_zero(r.at), "a discarded read-only page shows old bytes");
    CHECK(faults(r.at + 5 * PAGE, 1) == SIGSEGV, "a discarded read-only page can be written");
    CHECK(mprotect(r.at, len, PROT_READ | PROT_WRITE) == 0, "mprotect back");
    write_all(&r, 42000, "after mprotect");
}

// Memory with a key of its own is shown from the pool no more: our mappings have none. Not every processor has keys; a key that is
// refused changes nothing.
static void keys(void) {
    struct region r = merged(1024);
    size_t len = r.pages * PAGE;
    for (size_t i = 0; i < 64; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    CHECK(pkey_mprotect(r.at, len, PROT_READ, -1) == 0, "pkey_mprotect without a key");
    CHECK(faults(r.at + 5 * PAGE, 1) == SIGSEGV, "a read-only page can be written");
    CHECK(pkey_mprotect(r.at, len, PROT_READ | PROT_WRITE, -1) == 0, "pkey_mprotect back");
    wait_merged(&r, 700);
    CHECK(pkey_mprotect(r.at, len, PROT_READ | PROT_WRITE, 15) == -1 && errno == EINVAL, "a key that nobody has");
    check(&r, "refused");
    CHECK(syscall(SYS_pkey_mprotect, r.at + 1, len, PROT_READ | PROT_WRITE, 15) == -1 && errno == EINVAL, "within a page");
    wait_merged(&r, 700);
    int key = pkey_alloc(0, 0);
    if (key < 0) {
        printf("no protection keys here: refusals alone were tried\n");
        return;
    }
    CHECK(pkey_mprotect(r.at, len / 2, PROT_READ | PROT_WRITE, key) == 0, "pkey_mprotect");
    CHECK(pool_pages(r.at, len / 2) == 0, "memory with a key is shown from the pool");
    for (int round = 0; round < 3; round++) {
        nap(700);
        check(&r, "keyed");
        CHECK(pool_pages(r.at, len / 2) == 0, "memory with a key was merged");
        pkey_set(key, PKEY_DISABLE_ACCESS);
        CHECK(faults(r.at, 0) == SIGSEGV && faults(r.at + len / 2 - PAGE, 0) == SIGSEGV, "the key is lost");
        pkey_set(key, 0);
        for (size_t i = round; i < r.pages; i += 7) fill_page(r.at + i * PAGE, number_of(&r, i));
    }
}

static void install(int by_syscall, struct sock_filter *code, size_t count);

// Answers of a kernel with keys on a processor that has none: key 14 fails on the way, the others do not.
static void pretend_keys(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pkey_mprotect, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[3])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 14, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOMEM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 0),
    };
    install(0, code, sizeof code / sizeof *code);
}

// A key goes before advice, and may lie on the first pages where giving it failed.
static void keys_and_advice(void) {
    struct region r = merged(1024);
    size_t part = r.pages / 4;
    pretend_keys();
    wait_merged(&r, 3 * part);
    CHECK(pkey_mprotect(r.at, part * PAGE, PROT_READ | PROT_WRITE, 15) == 0, "a key");
    CHECK(pkey_mprotect(r.at + part * PAGE, part * PAGE, PROT_READ | PROT_WRITE, 14) == -1 && errno == ENOMEM, "a lack");
    CHECK(madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    for (size_t i = 0; i < r.pages; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    for (int round = 0; round < 5; round++) {
        nap(700);
        CHECK(pool_pages(r.at, 2 * part * PAGE) == 0, "memory with a key was merged");
    }
    check(&r, "keyed");
    CHECK(pkey_mprotect(r.at, 2 * part * PAGE, PROT_READ | PROT_WRITE, 0) == 0, "key 0");
    wait_merged(&r, 3 * part);
    check(&r, "merged again");
}

static void lock(void) {
    struct region r = merged(1024);
    if (mlock(r.at, 256 * PAGE) != 0) SKIP("mlock is limited here");
    check(&r, "locked");
    write_all(&r, 61000, "locked");
    nap(600);
    for (size_t i = 0; i < r.pages; i++) CHECK(page_is(r.at + i * PAGE, 61000 + i), "locked page %zu is wrong", i);
    CHECK(munlock(r.at, 256 * PAGE) == 0, "munlock");
    if (mlockall(MCL_CURRENT) == 0) munlockall();
    for (size_t i = 0; i < r.pages; i++) CHECK(page_is(r.at + i * PAGE, 61000 + i), "unlocked page %zu is wrong", i);
}

static void all_locked(const struct region *r, const char *when) {
    CHECK(pool_pages(r->at, r->pages * PAGE) == 0, "%s memory is shown from the pool", when);
    for (size_t i = 0; i < r->pages; i += 16) CHECK(flag_at(r->at + i * PAGE, " lo"), "page %zu is not locked, %s", i, when);
    unsigned char here[r->pages];
    CHECK(mincore(r->at, r->pages * PAGE, here) == 0, "mincore");
    for (size_t i = 0; i < r->pages; i++) CHECK(here[i] & 1, "page %zu is not in memory, %s", i, when);
    check(r, when);
}

// Nobody reads what is locked: a copy of it finds no twin. What was merged is plain and in memory before it is locked, and
// may be merged again when it is not locked any more.
static void locks(void) {
    struct region secret = fill(512, 512, 500000), copy = {NULL, 512, 512, 500000};
    if (mlock(secret.at, secret.pages * PAGE) != 0) SKIP("mlock is limited here");
    copy = fill(512, 512, 500000);
    for (int i = 0; i < 2; i++) madvise(i ? secret.at : copy.at, 512 * PAGE, MADV_NOHUGEPAGE);
    for (int i = 0; i < 2; i++) madvise(i ? secret.at : copy.at, 512 * PAGE, MADV_MERGEABLE);
    struct region r = merged(1024);
    nap(2000);
    all_locked(&secret, "while others merge");
    CHECK(pool_pages(copy.at, copy.pages * PAGE) == 0, "locked pages were read: their copies are merged");
    CHECK(syscall(SYS_munlock, secret.at, secret.pages * PAGE) == 0, "munlock");
    wait_merged(&copy, 500);
    check(&secret, "unlocked");
    CHECK(mprotect(r.at, 64 * PAGE, PROT_READ) == 0, "mprotect");
    CHECK(mlock(r.at, r.pages * PAGE) == 0, "mlock of what is merged");
    all_locked(&r, "locked");
    nap(1000);
    all_locked(&r, "locked for a while");
    CHECK(mprotect(r.at, 64 * PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
    CHECK(munlock(r.at, r.pages * PAGE) == 0, "munlock");
    wait_merged(&r, 700);
    if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0) SKIP("mlockall is limited here");
    all_locked(&r, "with all locked");
    all_locked(&copy, "with all locked");
    struct region later = fill(256, 4, 7000);
    madvise(later.at, later.pages * PAGE, MADV_MERGEABLE);
    nap(1000);
    all_locked(&later, "with all to come locked");
    CHECK(munlockall() == 0, "munlockall");
    wait_merged(&r, 700);
    wait_merged(&later, 128);
    check(&r, "with all unlocked");
    write_all(&r, 72000, "with all unlocked");
}

// A call whose length the kernel refuses, or takes for none, changes nothing: neither bytes nor what is known of memory above.
static void lengths(void) {
    struct region one = fill(512, 4, 3000), two = fill(512, 4, 3000);
    struct region low = one.at < two.at ? one : two, above = one.at < two.at ? two : one;
    const size_t bad = -PAGE;
    madvise(above.at, above.pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(madvise(above.at, above.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    wait_merged(&above, 384);
    const int advices[] = {MADV_DONTNEED, MADV_FREE, MADV_REMOVE, MADV_MERGEABLE, MADV_UNMERGEABLE, MADV_WIPEONFORK, MADV_COLD, MADV_PAGEOUT};
    for (size_t i = 0; i < sizeof advices / sizeof *advices; i++) {
        errno = 0;
        CHECK(madvise(low.at, bad, advices[i]) == -1 && errno == EINVAL, "madvise %d of a length that wraps", advices[i]);
        errno = 0;
        CHECK(syscall(SYS_madvise, low.at + 1, PAGE, advices[i]) == -1 && errno == EINVAL, "madvise %d of half a page", advices[i]);
    }
    CHECK(munmap(low.at, bad) == -1 && errno == EINVAL, "munmap");
    CHECK(munmap(low.at + 1, PAGE) == -1 && errno == EINVAL, "munmap of half a page");
    CHECK(mprotect(low.at, bad, PROT_NONE) == -1 && errno == ENOMEM, "mprotect");
    const long sizes[][2] = {{bad, PAGE}, {PAGE, bad}, {-1, PAGE}, {PAGE, -1}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int flags = 0; flags <= MREMAP_MAYMOVE; flags++) {
            errno = 0;
            long said = raw(SYS_mremap, (long)low.at, sizes[i][0], sizes[i][1], flags, 0, 0);
            CHECK(said < 0 && said > -4096, "mremap %zu", i);
            CHECK(mremap(low.at, sizes[i][0], sizes[i][1], flags) == MAP_FAILED && errno == -said, "mremap %zu, not %ld", i, said);
        }
    CHECK(mmap(low.at, bad, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED, "mmap");
    for (int i = 0; i < 2; i++) {
        long said = raw(SYS_mlock, (long)low.at, i ? -1 : (long)bad, 0, 0, 0, 0);
        CHECK(mlock(low.at, i ? -1 : (long)bad) == (said ? -1 : 0) && (said == 0 || errno == -said), "mlock, not %ld", said);
        CHECK(munlock(low.at, i ? -1 : (long)bad) == (i ? 0 : -1), "munlock");
    }
    CHECK(pool_pages(above.at, above.pages * PAGE) >= 384, "what lies above a refused length was given back");
    check(&above, "above lengths that were refused");
    // What a hole parts is mergeable, and the hole is told of where there is a KSM.
    char *parted = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(parted != MAP_FAILED && munmap(parted + PAGE, PAGE) == 0, "a hole");
    errno = 0;
    long hole = raw(SYS_madvise, (long)parted, 3 * PAGE, MADV_MERGEABLE, 0, 0, 0) == -ENOMEM ? ENOMEM : 0;
    CHECK(madvise(parted, 3 * PAGE, MADV_MERGEABLE) == (hole ? -1 : 0) && errno == hole, "MADV_MERGEABLE of a hole: %d", errno);
    // Nor is it taken for unlocked, or for mergeable.
    CHECK(madvise(above.at, above.pages * PAGE, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE");
    madvise(low.at, bad, MADV_MERGEABLE);
    struct region r = merged(1024);
    nap(1000);
    CHECK(shown_pages(above.at, above.pages * PAGE) == 0, "what lies above a refused length is merged");
    check(&above, "left alone");
    check(&low, "left alone");
    check(&r, "in the end");
}

// What could not be given back when it was locked stays locked.
static void locks_at_a_limit(void) {
    struct region r = merged(1024);
    struct rlimit all, few;
    CHECK(getrlimit(RLIMIT_AS, &all) == 0, "getrlimit");
    few = all;
    few.rlim_cur = PAGE;
    CHECK(setrlimit(RLIMIT_AS, &few) == 0, "setrlimit");
    int result = mlock(r.at, r.pages * PAGE);
    CHECK(setrlimit(RLIMIT_AS, &all) == 0, "setrlimit");
    if (result != 0) SKIP("mlock is limited here");
    CHECK(pool_pages(r.at, r.pages * PAGE) > 0, "all was given back");
    // The agent is back and at work when this is merged.
    struct region later = fill(1024, 16, 7000);
    madvise(later.at, later.pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(madvise(later.at, later.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    wait_merged(&later, 700);
    nap(1000);
    for (size_t i = 0; i < r.pages; i++) CHECK(flag_at(r.at + i * PAGE, " lo"), "page %zu is not locked any more", i);
    CHECK(madvise(r.at, r.pages * PAGE, MADV_DONTNEED) != 0 && errno == EINVAL, "MADV_DONTNEED of what is locked");
    check(&r, "locked");
    CHECK(munlock(r.at, r.pages * PAGE) == 0, "munlock");
    CHECK(madvise(r.at, r.pages * PAGE, MADV_DONTNEED) == 0 && page_is_zero(r.at), "MADV_DONTNEED");
}

static void unmergeable(void) {
    struct region r = merged(1024);
    CHECK(madvise(r.at, r.pages * PAGE, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE");
    CHECK(shown_pages(r.at, r.pages * PAGE) == 0, "pages are still shared");
    check(&r, "unmerged");
    nap(800);
    CHECK(shown_pages(r.at, r.pages * PAGE) == 0, "pages were merged against the program's word");
    write_all(&r, 71000, "after MADV_UNMERGEABLE");
    // Of a hole the call tells, and has done the rest.
    struct region parted = merged(1024);
    CHECK(munmap(parted.at + 1023 * PAGE, PAGE) == 0, "a hole");
    parted.pages = 1023;
    errno = 0;
    CHECK(madvise(parted.at, 1024 * PAGE, MADV_UNMERGEABLE) == -1 && errno == ENOMEM, "MADV_UNMERGEABLE of a hole");
    CHECK(shown_pages(parted.at, parted.pages * PAGE) == 0, "pages before a hole are still shared");
    struct region later = merged(1024);
    nap(1000);
    CHECK(shown_pages(parted.at, parted.pages * PAGE) == 0, "pages before a hole were merged against the program's word");
    check(&parted, "before a hole");
    check(&later, "in the end");
}

// Guards, where an access faults whatever the mapping's rights (Linux 6.13).
enum { GUARD_INSTALL = 102, GUARD_REMOVE = 103 };

static void need_guards(void) {
    void *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (madvise(page, PAGE, GUARD_INSTALL) != 0) SKIP("this kernel has no MADV_GUARD_INSTALL");
    munmap(page, PAGE);
}

static int is_guarded(size_t page) { return (page >= 100 && page < 130) || page == 500 || page >= 1022; }

static void set_guards(struct region *r, long (*advise)(void *, size_t, int), int advice) {
    static const size_t runs[][2] = {{100, 30}, {500, 1}, {1022, 2}};
    for (size_t i = 0; i < 3; i++)
        CHECK(advise(r->at + runs[i][0] * PAGE, runs[i][1] * PAGE, advice) == 0, "advice %d", advice);
}

static void check_guards(struct region *r, const char *when) {
    for (size_t i = 0; i < r->pages; i++) {
        if (is_guarded(i)) CHECK(faults(r->at + i * PAGE, i % 2) == SIGSEGV, "page %zu has no guard %s", i, when);
        else CHECK(page_is(r->at + i * PAGE, number_of(r, i)), "page %zu is wrong %s", i, when);
    }
}

static void check_guards_in_child(struct region *r, const char *when) {
    pid_t child = fork();
    if (child == 0) {
        check_guards(r, when);
        _exit(0);
    }
    CHECK(ended_well(child), "a child %s", when);
}

static void guards(void) {
    need_guards();
    struct region r = merged(1024);
    for (int round = 0; round < 3; round++) {
        set_guards(&r, libc_advise, GUARD_INSTALL);
        check_guards(&r, "guarded");
        nap(300);
        check_guards_in_child(&r, "guarded");
        set_guards(&r, libc_advise, GUARD_REMOVE);
        for (size_t i = 0; i < r.pages; i++) {
            if (!is_guarded(i)) continue;
            CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes after its guard went", i);
            fill_page(r.at + i * PAGE, number_of(&r, i));
        }
        check(&r, "after guards");
        wait_merged(&r, 750);
    }
    CHECK(madvise(r.at + PAGE, 8 * PAGE, GUARD_INSTALL) == 0, "a guard");
    CHECK(mprotect(r.at + 4 * PAGE, PAGE, PROT_READ) == 0, "mprotect");
    CHECK(madvise(r.at, 16 * PAGE, GUARD_INSTALL) == 0, "guards over several mappings");
    CHECK(madvise(r.at, 16 * PAGE, GUARD_REMOVE) == 0, "no guards");
    for (size_t i = 0; i < 16; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes", i);
}

// By bare calls, on pages that the program has written since they were merged: they lie among what is given back.
static void guards_raw(void) {
    need_guards();
    struct region r = merged(1024);
    wait_merged(&r, r.pages);
    for (size_t i = 0; i < r.pages; i++)
        if (is_guarded(i)) fill_page(r.at + i * PAGE, 1u << 21 | i);
    set_guards(&r, raw_advise, GUARD_INSTALL);
    check_guards(&r, "guarded");
    double began = now();
    while (pool_pages(r.at + 64 * PAGE, 128 * PAGE) > 0) {
        CHECK(now() - began < WAIT_MAX, "%zu pages are not given back", pool_pages(r.at + 64 * PAGE, 128 * PAGE));
        for (size_t i = 64; i < 192; i++)
            if (!is_guarded(i)) fill_page(r.at + i * PAGE, 1u << 20 | i);
        nap(100);
    }
    for (size_t i = 64; i < 192; i++)
        if (!is_guarded(i)) {
            CHECK(page_is(r.at + i * PAGE, 1u << 20 | i), "page %zu lost a write", i);
            fill_page(r.at + i * PAGE, number_of(&r, i));
        }
    check_guards(&r, "after healing");
    check_guards_in_child(&r, "after healing");
    CHECK(madvise(r.at, 768 * PAGE, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE");
    CHECK(shown_pages(r.at, 768 * PAGE) == 0, "pages are still shared");
    check_guards(&r, "unmerged");
    // What is still merged, with two guards at its end.
    char *moved = mremap(r.at + 768 * PAGE, 256 * PAGE, 512 * PAGE, MREMAP_MAYMOVE);
    CHECK(moved != MAP_FAILED, "mremap");
    for (size_t i = 768; i < r.pages; i++) {
        char *at = moved + (i - 768) * PAGE;
        CHECK(is_guarded(i) ? faults(at, 0) == SIGSEGV : page_is(at, number_of(&r, i)), "page %zu is wrong when moved", i);
    }
}

// A descriptor that tells of writes and of missing pages.
static int userfaultfd(void) {
    int fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) SKIP("userfaultfd(2) is not for this user");
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_PAGEFAULT_FLAG_WP};
    CHECK(ioctl(fd, UFFDIO_API, &api) == 0, "UFFDIO_API");
    return fd;
}

// A userfaultfd of the program's own, as VM monitors have for snapshots (writes) and postcopy migration (missing pages).
static struct tracker {
    int fd;
    struct region region;
    atomic_int writes, missing, end;
} tracker;

static void *track(void *unused) {
    (void)unused;
    uint64_t bytes[512];
    while (!tracker.end) {
        struct uffd_msg event;
        if (read(tracker.fd, &event, sizeof event) != sizeof event) {
            nap(1);
            continue;
        }
        char *page = (char *)(event.arg.pagefault.address & ~(PAGE - 1));
        if (event.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP) {
            tracker.writes++;
            struct uffdio_writeprotect wp = {.range = {(unsigned long)page, PAGE}, .mode = 0};
            CHECK(ioctl(tracker.fd, UFFDIO_WRITEPROTECT, &wp) == 0, "UFFDIO_WRITEPROTECT");
        } else {
            tracker.missing++;
            fill_page(bytes, number_of(&tracker.region, (page - tracker.region.at) / PAGE));
            struct uffdio_copy copy = {.dst = (unsigned long)page, .src = (unsigned long)bytes, .len = PAGE};
            CHECK(ioctl(tracker.fd, UFFDIO_COPY, &copy) == 0, "UFFDIO_COPY");
        }
    }
    return NULL;
}

static void own_userfaultfd(void) {
    struct region r = tracker.region = merged(1024);
    const size_t half = 512;
    struct uffdio_range range = {(unsigned long)r.at, half * PAGE};
    for (int missing = 0; missing < 2; missing++) {
        tracker.fd = userfaultfd();
        struct uffdio_register reg = {range, missing ? UFFDIO_REGISTER_MODE_MISSING : UFFDIO_REGISTER_MODE_WP, 0};
        CHECK(ioctl(tracker.fd, UFFDIO_REGISTER, &reg) == 0, "UFFDIO_REGISTER");
        CHECK(pool_pages(r.at, half * PAGE) == 0, "tracked pages are shown from the pool");
        check(&r, "tracked");
        tracker.writes = tracker.missing = tracker.end = 0;
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, track, NULL) == 0, "pthread_create");
        for (int round = 1; round <= 3; round++) {
            // Every page tells once, whatever goes on beside.
            if (missing) {
                CHECK(madvise(r.at, half * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
                nap(700);
                check(&r, "after it came back");
                CHECK(tracker.missing == round * (int)half, "%d pages were missing", tracker.missing);
            } else {
                struct uffdio_writeprotect wp = {range, UFFDIO_WRITEPROTECT_MODE_WP};
                CHECK(ioctl(tracker.fd, UFFDIO_WRITEPROTECT, &wp) == 0, "UFFDIO_WRITEPROTECT");
                nap(700);
                for (size_t i = 0; i < half; i++) *(volatile char *)(r.at + i * PAGE) = *(volatile char *)(r.at + i * PAGE);
                CHECK(tracker.writes == round * (int)half, "%d writes were told", tracker.writes);
            }
        }
        // Closing it is letting go as well.
        if (!missing) CHECK(ioctl(tracker.fd, UFFDIO_UNREGISTER, &range) == 0, "UFFDIO_UNREGISTER");
        tracker.end = 1;
        pthread_join(thread, NULL);
        close(tracker.fd);
        check(&r, "not tracked any more");
        wait_merged(&r, 750);
        CHECK(pool_pages(r.at, half * PAGE) > half / 2, "what was tracked is not merged again");
    }
}

// Several blocks are asked for one after another, and let go by closing the descriptor.
static void tracked_blocks(void) {
    struct region blocks[] = {merged(12288), merged(64), merged(512)};
    for (int round = 0; round < 6; round++) {
        for (int i = 0; i < 3; i++) wait_merged(&blocks[i], blocks[i].pages / 4 * 3);
        int fd = userfaultfd();
        for (int i = 0; i < 3; i++) {
            struct uffdio_range range = {(unsigned long)blocks[i].at, blocks[i].pages * PAGE};
            struct uffdio_register reg = {range, UFFDIO_REGISTER_MODE_WP, 0};
            CHECK(ioctl(fd, UFFDIO_REGISTER, &reg) == 0, "UFFDIO_REGISTER of block %d in round %d", i, round);
            CHECK(pool_pages(blocks[i].at, blocks[i].pages * PAGE) == 0, "tracked pages are shown from the pool");
            check(&blocks[i], "tracked");
        }
        close(fd);
    }
}

// As a VM monitor asks, while its guest works, whether it could: no write may be lost meanwhile.
static void probes(void) {
    pthread_t threads[HAMMERS];
    start_hammers(threads);
    struct uffdio_range range = {(unsigned long)hammered.at, HAMMER_PAGES * PAGE};
    uint64_t seed = 5;
    for (int round = 0; round < 6; round++) {
        atomic_store(&resting, 1);
        wait_merged(&hammered, HAMMER_PAGES / 4 * 3);
        atomic_store(&resting, 0);
        nap(draw(&seed) % 20);
        int fd = userfaultfd();
        struct uffdio_register reg = {range, UFFDIO_REGISTER_MODE_WP, 0};
        CHECK(ioctl(fd, UFFDIO_REGISTER, &reg) == 0, "UFFDIO_REGISTER");
        CHECK(ioctl(fd, UFFDIO_UNREGISTER, &range) == 0, "UFFDIO_UNREGISTER");
        close(fd);
    }
    atomic_store(&hammering, 0);
    for (size_t i = 0; i < HAMMERS; i++) pthread_join(threads[i], NULL);
    check_hammered();
}

// Equal pages that go on where one mapping ends and another begins, merged by the slots of those before: none is frozen again
// that is merged already, and the agent hears of every discard.
static void straddle(void) {
    const size_t pages = 8192, border = 3000;
    struct region twins[] = {fill(pages, pages, 1000), fill(pages, pages, 1000), fill(pages, pages, 1000)};
    for (int i = 0; i < 3; i++) {
        struct region *r = &twins[i];
        madvise(r->at, pages * PAGE, MADV_NOHUGEPAGE);
        // Keeps the two apart.
        if (i == 2) CHECK(madvise(r->at + border * PAGE, (pages - border) * PAGE, MADV_DONTDUMP) == 0, "MADV_DONTDUMP");
        CHECK(madvise(r->at, pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
        if (i > 0) {
            wait_merged(r, pages);
            check(r, "after merging");
        }
    }
    nap(1000);
    CHECK(raw_advise(twins[2].at, pages * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    for (size_t i = 0; i < pages * PAGE; i++) CHECK(twins[2].at[i] == 0, "byte %zu is what it was before the discard", i);
    check(&twins[0], "beside a discard");
    check(&twins[1], "beside a discard");
}

// Rights that change by raw calls, of which the agent hears nothing, while pages are frozen: what goes back finds other
// mappings than it came from.
static struct region between;
static _Atomic int changing;

static void *change_rights(void *seed_of) {
    uint64_t seed = (uintptr_t)seed_of;
    while (atomic_load(&changing)) {
        size_t page = draw(&seed) % between.pages | 1;
        char *at = between.at + page * PAGE;
        CHECK(raw(SYS_mprotect, (long)at, PAGE, PROT_READ, 0, 0, 0) == 0, "mprotect");
        CHECK(page_is(at, number_of(&between, page)), "page %zu is wrong while it may only be read", page);
        CHECK(raw(SYS_mprotect, (long)at, PAGE, PROT_READ | PROT_WRITE, 0, 0, 0) == 0, "mprotect");
    }
    return NULL;
}

static void rights_raw(void) {
    const size_t pages = 2048;
    struct region twin = fill(pages, pages, 1000);
    between = fill(pages, pages, 1000);
    // Every second page has no twin: it is frozen only because it lies between two that have one.
    for (size_t i = 1; i < pages; i += 2) fill_page(twin.at + i * PAGE, 900000 + i);
    struct region *both[] = {&twin, &between};
    for (int i = 0; i < 2; i++) {
        madvise(both[i]->at, pages * PAGE, MADV_NOHUGEPAGE);
        CHECK(madvise(both[i]->at, pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    }
    atomic_store(&changing, 1);
    pthread_t threads[2];
    for (uintptr_t i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, change_rights, (void *)(i + 1)) == 0, "pthread_create");
    wait_merged(&between, pages / 8);
    for (int round = 0; round < 20; round++) {
        for (size_t i = 0; i < pages; i += 2) fill_page(between.at + i * PAGE, number_of(&between, i));
        nap(300);
        check(&between, "while its rights change");
    }
    atomic_store(&changing, 0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    check(&between, "after its rights changed");
}

// A sealed mapping (mseal(2), Linux 6.10) is neither replaced nor moved, by us as by anybody; the other one merges.
static void sealed(void) {
    enum { SYS_MSEAL = 462 };
    struct region r = fill(1024, 256, 1000), other = fill(1024, 256, 1000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    if (syscall(SYS_MSEAL, r.at, 512 * PAGE, 0) != 0) SKIP("this kernel has no mseal(2)");
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    madvise(other.at, other.pages * PAGE, MADV_NOHUGEPAGE);
    madvise(other.at, other.pages * PAGE, MADV_MERGEABLE);
    wait_merged(&other, 700);
    for (int round = 0; round < 5; round++) {
        nap(300);
        check(&r, "sealed");
        for (size_t i = round; i < r.pages; i += 7) fill_page(r.at + i * PAGE, number_of(&r, i));
    }
    CHECK(pool_pages(r.at, 512 * PAGE) == 0, "a sealed mapping was replaced");
    check(&r, "written");
    CHECK(mprotect(r.at, 512 * PAGE, PROT_READ) == -1 && errno == EPERM, "the seal is gone");
}

static long libc_seal(void *at, size_t len) { return syscall(462 /* mseal */, at, len, 0) == 0 ? 0 : -errno; }
static long raw_seal(void *at, size_t len) { return raw(462, (long)at, len, 0, 0, 0, 0); }

// Sealed memory that may be written to may be discarded: it reads zero then, in children too, and keeps what is written since.
static void discard_sealed(long (*seal)(void *, size_t), long (*advise)(void *, size_t, int)) {
    struct region r = merged(1024), hidden = merged(256);
    // Some are the program's own in a mapping of the pool's.
    for (size_t i = 5; i < r.pages; i += 9) fill_page(r.at + i * PAGE, number_of(&r, i));
    long error = seal(r.at, r.pages * PAGE);
    if (error == -ENOSYS) SKIP("this kernel has no mseal(2)");
    CHECK(error == 0, "mseal: %ld", error);
    CHECK(mprotect(hidden.at, hidden.pages * PAGE, PROT_READ) == 0, "mprotect");
    CHECK(seal(hidden.at, hidden.pages * PAGE) == 0, "mseal");
    check(&r, "sealed");
    for (int round = 0; round < 3; round++) {
        CHECK(advise(r.at + 100 * PAGE, 300 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
        pid_t child = round == 1 ? fork() : -1;
        for (size_t i = 0; i < r.pages; i++) {
            if (i >= 100 && i < 400) CHECK(page_is_zero(r.at + i * PAGE), "round %d: page %zu shows old bytes (%d)", round, i, child);
            else CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu beside a discard is wrong", i);
        }
        if (round == 2) nap(1500);
        for (size_t i = 100; i < 400; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
        nap(500);
        check(&r, "after a discard was written over");
        if (child == 0) {
            CHECK(advise(r.at + 200 * PAGE, 100 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED in a child");
            for (size_t i = 200; i < 300; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu in a child", i);
            _exit(0);
        }
        if (child > 0) CHECK(ended_well(child), "the child");
    }
    // The agent leaves, and another comes.
    CHECK(advise(r.at + 100 * PAGE, 300 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS");
    for (size_t i = 100; i < 400; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes behind another agent", i);
    for (size_t i = 100; i < 400; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    for (int round = 0; round < 5; round++) {
        nap(300);
        check(&r, "in the end");
        check(&hidden, "which may not be written to");
        for (size_t i = round; i < r.pages; i += 7) fill_page(r.at + i * PAGE, number_of(&r, i));
    }
    // To a bare discard the pool's mapping is a file's, which may be discarded; what it shows is right all the same.
    long refused = advise(hidden.at, PAGE, MADV_DONTNEED);
    CHECK(advise == raw_advise || refused != 0, "what is sealed and read-only was discarded");
    check(&hidden, "after a discard that is refused");
    CHECK(mprotect(r.at, PAGE, PROT_READ) == -1 && errno == EPERM, "the seal is gone");
    CHECK(munmap(r.at, PAGE) == -1 && errno == EPERM, "the seal is gone");
    CHECK(mremap(r.at, PAGE, 2 * PAGE, MREMAP_MAYMOVE) == MAP_FAILED && errno == EPERM, "the seal is gone");
    check(&r, "after calls that are refused");
}

static void seal_and_discard(void) { discard_sealed(libc_seal, libc_advise); }
static void seal_raw(void) { discard_sealed(raw_seal, libc_advise); }
static void seal_and_discard_raw(void) { discard_sealed(raw_seal, raw_advise); }

static void wipe_on_fork(void) {
    struct region r = merged(1024);
    CHECK(madvise(r.at, 512 * PAGE, MADV_WIPEONFORK) == 0, "MADV_WIPEONFORK");
    pid_t child = fork();
    if (child == 0) {
        for (size_t i = 0; i < r.pages; i++)
            CHECK(i < 512 ? page_is_zero(r.at + i * PAGE) : page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu", i);
        _exit(0);
    }
    CHECK(ended_well(child), "the child of MADV_WIPEONFORK");
    check(&r, "after MADV_WIPEONFORK");
    // Two mappings to the kernel, which may refuse to move them as one.
    char *moved = mremap(r.at, r.pages * PAGE, 2 * r.pages * PAGE, MREMAP_MAYMOVE);
    if (moved != MAP_FAILED) r.at = moved;
    child = fork();
    if (child == 0) _exit(page_is_zero(r.at) && page_is_zero(r.at + 511 * PAGE) ? 0 : 1);
    CHECK(ended_well(child), "what is to be wiped was not, after mremap");
    // Whoever advises to merge all that there is means this too.
    struct region wiped = fill(1024, 256, 1000);
    madvise(wiped.at, wiped.pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(madvise(wiped.at, wiped.pages * PAGE, MADV_WIPEONFORK) == 0, "MADV_WIPEONFORK");
    CHECK(madvise(wiped.at, wiped.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    struct region other = merged(1024);
    nap(1500);
    child = fork();
    if (child == 0) {
        for (size_t i = 0; i < wiped.pages; i++) CHECK(page_is_zero(wiped.at + i * PAGE), "page %zu is not wiped", i);
        _exit(0);
    }
    CHECK(ended_well(child), "what is to be wiped was merged");
    check(&wiped, "in the parent");
    check(&other, "beside");
    // Of a hole the kernel tells, and what lies around it is to be wiped all the same.
    struct region holed = fill(1024, 256, 1000);
    madvise(holed.at, holed.pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(munmap(holed.at + 512 * PAGE, PAGE) == 0, "munmap");
    CHECK(madvise(holed.at, holed.pages * PAGE, MADV_WIPEONFORK) == -1 && errno == ENOMEM, "MADV_WIPEONFORK of a hole");
    madvise(holed.at, holed.pages * PAGE, MADV_MERGEABLE);
    struct region more = merged(1024);
    nap(1500);
    child = fork();
    if (child == 0) {
        for (size_t i = 0; i < holed.pages; i++)
            if (i != 512) CHECK(page_is_zero(holed.at + i * PAGE), "page %zu beside a hole is not wiped", i);
        _exit(0);
    }
    CHECK(ended_well(child), "what is to be wiped beside a hole was merged");
    check(&more, "beside the hole");
}

static int flag_at(void *at, const char *flag) {
    FILE *smaps = fopen("/proc/self/smaps", "r");
    CHECK(smaps, "smaps");
    char line[512];
    int inside = 0, found = 0;
    while (fgets(line, sizeof line, smaps)) {
        unsigned long from, to;
        char mode[8];
        if (sscanf(line, "%lx-%lx %4s", &from, &to, mode) == 3) inside = from <= (unsigned long)at && (unsigned long)at < to;
        if (inside && strncmp(line, "VmFlags:", 8) == 0) found = strstr(line, flag) != NULL;
    }
    fclose(smaps);
    return found;
}

static void flags(void) {
    struct region r = fill(1024, 256, 1000);
    madvise(r.at, r.pages * PAGE, MADV_HUGEPAGE);
    int merges = madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0 && flag_at(r.at, " mg");
    int huge = flag_at(r.at, " hg");
    CHECK(madvise(r.at, r.pages * PAGE, MADV_DONTFORK) == 0, "MADV_DONTFORK");
    CHECK(madvise(r.at, r.pages * PAGE, MADV_DONTDUMP) == 0, "MADV_DONTDUMP");
    wait_merged(&r, 700);
    for (size_t i = 0; i < r.pages; i += 61) {
        void *at = r.at + i * PAGE;
        CHECK(flag_at(at, " dc"), "page %zu lost DONTFORK", i);
        CHECK(flag_at(at, " dd"), "page %zu lost DONTDUMP", i);
        CHECK(!merges || flag_at(at, " mg"), "page %zu lost MERGEABLE", i);
        CHECK(!huge || flag_at(at, " hg"), "page %zu lost HUGEPAGE", i);
    }
    // Broken and healed, the flags are still there; so they are after a discard.
    for (size_t i = 0; i < 256; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    nap(1500);
    CHECK(madvise(r.at + 300 * PAGE, 100 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    for (size_t i = 0; i < 450; i += 7) {
        void *at = r.at + i * PAGE;
        CHECK(flag_at(at, " dc"), "page %zu lost DONTFORK later", i);
        CHECK(flag_at(at, " dd"), "page %zu lost DONTDUMP later", i);
    }
    pid_t child = fork();
    if (child == 0) _exit(faults(r.at + 40 * PAGE, 0) && faults(r.at + 350 * PAGE, 0) ? 0 : 1);
    CHECK(ended_well(child), "the child has memory that is not for children");
    // Of a hole the calls tell, and have done the rest.
    struct region parted = fill(1024, 256, 1000);
    CHECK(munmap(parted.at + 1023 * PAGE, PAGE) == 0, "a hole");
    parted.pages = 1023;
    madvise(parted.at, parted.pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(madvise(parted.at, 1024 * PAGE, MADV_DONTFORK) == -1 && errno == ENOMEM, "MADV_DONTFORK of a hole");
    CHECK(madvise(parted.at, 1024 * PAGE, MADV_DONTDUMP) == -1 && errno == ENOMEM, "MADV_DONTDUMP of a hole");
    madvise(parted.at, parted.pages * PAGE, MADV_MERGEABLE);
    wait_merged(&parted, 700);
    for (size_t i = 0; i < parted.pages; i += 61)
        CHECK(flag_at(parted.at + i * PAGE, " dc") && flag_at(parted.at + i * PAGE, " dd"), "page %zu before a hole lost a flag", i);
}

static void *change_rights_beside(void *end) {
    char *beside = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    while (!atomic_load((atomic_int *)end))
        for (int i = 0; i < 64; i++) mprotect(beside + i * PAGE, PAGE, i % 2 ? PROT_READ : PROT_READ | PROT_WRITE);
    munmap(beside, 64 * PAGE);
    return NULL;
}

// Bare discards while other threads make calls that are followed.
static void flags_raw(void) {
    struct region r = fill(1024, 256, 1000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(madvise(r.at, r.pages * PAGE, MADV_DONTFORK) == 0, "MADV_DONTFORK");
    CHECK(madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    wait_merged(&r, r.pages);
    // What was mapped a moment ago is not watched yet.
    nap(500);
    atomic_int end = 0;
    pthread_t others[3];
    for (int i = 0; i < 3; i++) pthread_create(&others[i], NULL, change_rights_beside, &end);
    for (size_t i = 0; i < r.pages; i += 8)
        CHECK(raw(SYS_madvise, (long)r.at + i * PAGE, 4 * PAGE, MADV_DONTNEED, 0, 0, 0) == 0, "raw MADV_DONTNEED");
    for (size_t i = 0; i < r.pages; i++)
        CHECK(i % 8 < 4 ? page_is_zero(r.at + i * PAGE) : page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu", i);
    atomic_store(&end, 1);
    for (int i = 0; i < 3; i++) pthread_join(others[i], NULL);
    double began = now();
    for (size_t i = 0; i < r.pages; i += 4)
        while (!flag_at(r.at + i * PAGE, " dc") || (i % 8 < 4 && !flag_at(r.at + i * PAGE, " nh"))) {
            CHECK(now() - began < WAIT_MAX, "page %zu lost DONTFORK or NOHUGEPAGE", i);
            nap(50);
        }
}

// More is said of parts of memory than the agent can know: what it cannot know it must not need.
static void marks(void) {
    enum { MARKS = 20000 };
    struct region r = merged(1024);
    char *marked = mmap(NULL, 2 * MARKS * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(marked != MAP_FAILED, "mmap");
    for (size_t i = 0; i < MARKS; i++) CHECK(madvise(marked + 2 * i * PAGE, PAGE, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE");
    check(&r, "after the marks");
    CHECK(madvise(r.at, 512 * PAGE, MADV_DONTFORK) == 0, "MADV_DONTFORK");
    CHECK(madvise(r.at + 100 * PAGE, 100 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    for (size_t i = 100; i < 200; i++) {
        CHECK(flag_at(r.at + i * PAGE, " dc"), "page %zu lost DONTFORK", i);
        CHECK(page_is_zero(r.at + i * PAGE), "page %zu is not zero", i);
    }
    for (size_t i = 100; i < 200; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    check(&r, "after the discard");
    CHECK(pool_pages(r.at, r.pages * PAGE) == 0, "%zu pages are the pool's", pool_pages(r.at, r.pages * PAGE));
    struct region more = fill(1024, 256, 1000);
    CHECK(madvise(more.at, more.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    nap(1500);
    CHECK(pool_pages(more.at, more.pages * PAGE) == 0, "there is an agent still");
    check(&more, "with no agent");
}

static void huge(void) {
    size_t len = 16 * MIB;
    char *at = mmap(NULL, len + 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    at = (char *)(((unsigned long)at + 2 * MIB - 1) & ~(2 * MIB - 1));
    if (madvise(at, len, MADV_HUGEPAGE) != 0) SKIP("no transparent huge pages");
    struct region r = {at, len / PAGE, 512, 5000};
    for (size_t i = 0; i < r.pages; i++) fill_page(at + i * PAGE, number_of(&r, i));
    madvise(at, len, MADV_MERGEABLE);
    wait_merged(&r, r.pages / 2);
    check(&r, "huge");
    write_all(&r, 81000, "in split huge pages");
}

// Memory of huge pages, `chunks` of them.
static char *huge_pages(size_t chunks) {
    char *at = mmap(NULL, (chunks + 1) * 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED, "mmap");
    at = (char *)(((unsigned long)at + 2 * MIB - 1) & ~(2 * MIB - 1));
    if (madvise(at, chunks * 2 * MIB, MADV_HUGEPAGE) != 0) SKIP("no transparent huge pages");
    return at;
}

// KiB of the chunks that smaps counts under `name`.
static size_t smaps_of(const char *at, size_t chunks, const char *name) {
    FILE *file = fopen("/proc/thread-self/smaps", "r");
    CHECK(file, "smaps");
    char line[512];
    unsigned long from = 0, to = 0, all = 0;
    size_t length = strlen(name);
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) continue;
        if (from >= (unsigned long)at + chunks * 2 * MIB || to <= (unsigned long)at) continue;
        if (strncmp(line, name, length) == 0) all += strtoul(line + length, NULL, 10);
    }
    fclose(file);
    return all;
}

// The same 24 MiB three times, each page number once: where they were, shifted by pages, and beside zeros.
static void huge_whole(void) {
    enum { EACH = 6144, CHUNKS = 3 * EACH / 512 + 2 };
    char *at = huge_pages(CHUNKS);
    for (size_t i = 0; i < EACH; i++) {
        fill_page(at + i * PAGE, 7000 + i);
        fill_page(at + (EACH + i) * PAGE, 7000 + i);
        fill_page(at + (2 * EACH + 37 + i) * PAGE, 7000 + i);
    }
    // The rest of the chunk that the shifted copy ends in, and one of zeros.
    memset(at + (3 * EACH + 37) * PAGE, 0, 2 * 512 * PAGE - 37 * PAGE);
    if (smaps_of(at, CHUNKS, "AnonHugePages:") < CHUNKS * 2048) SKIP("the kernel has no huge pages to give");
    CHECK(madvise(at, CHUNKS * 2 * MIB, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    struct region r = {at, 3 * EACH, EACH, 7000};
    wait_merged(&r, 3 * EACH - 40);
    puts("merged");
    fflush(stdout);
    CHECK(getchar() == '\n', "a line");
    pid_t child = fork();
    if (child == 0) {
        for (double began = now(); shown_pages(at, r.pages * PAGE) < 3 * EACH - 40; nap(10))
            CHECK(now() - began < WAIT_MAX, "only %zu pages are there in a child", shown_pages(at, r.pages * PAGE));
        CHECK(smaps_of(at, CHUNKS, "ShmemPmdMapped:") + smaps_of(at, CHUNKS, "FilePmdMapped:") == 0, "a huge page of the pool's");
        for (size_t i = 0; i < 2 * EACH; i += 512) fill_page(at + i * PAGE, 5);
        for (size_t i = 0; i < 2 * EACH; i++) CHECK(page_is(at + i * PAGE, i % 512 ? 7000 + i % EACH : 5), "page %zu of a child", i);
        _exit(0);
    }
    CHECK(child > 0 && ended_well(child), "a child");
    CHECK(smaps_of(at, CHUNKS, "ShmemPmdMapped:") + smaps_of(at, CHUNKS, "FilePmdMapped:") == 0, "a huge page of the pool's");
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < EACH; i++) {
            uint64_t number = 7000 + 100000 * round + i;
            CHECK(page_is(at + i * PAGE, number), "page %zu of the first", i);
            CHECK(page_is(at + (EACH + i) * PAGE, number), "page %zu of the second", i);
            CHECK(page_is(at + (2 * EACH + 37 + i) * PAGE, number), "page %zu of the shifted", i);
        }
        for (size_t i = 2 * EACH; i < 2 * EACH + 37; i++) CHECK(page_is_zero(at + i * PAGE), "page %zu is not zero", i);
        for (size_t i = 3 * EACH + 37; i < 3 * EACH + 1024; i++) CHECK(page_is_zero(at + i * PAGE), "page %zu is not zero", i);
        for (size_t i = 0; i < EACH; i++) {
            fill_page(at + i * PAGE, 107000 + i);
            fill_page(at + (EACH + i) * PAGE, 107000 + i);
            fill_page(at + (2 * EACH + 37 + i) * PAGE, 107000 + i);
        }
    }
}

// Huge pages that are written, read and discarded while they are merged whole, each at its own time, and then made anew.
static void huge_writers(void) {
    enum { CHUNKS = 12 };
    char *at = huge_pages(CHUNKS);
    uint64_t counts[CHUNKS][512] = {{0}};
    double due[CHUNKS], began = now();
    int step[CHUNKS] = {0};
    uint64_t seed = 99;
    size_t most = 0, rounds = 0;
    for (size_t c = 0; c < CHUNKS; c++) due[c] = began;
    CHECK(madvise(at, CHUNKS * 2 * MIB, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    while (now() - began < 12 || (most < 512 && now() - began < 100)) {
        for (size_t c = 0; c < CHUNKS; c++) {
            if (now() < due[c]) continue;
            char *chunk = at + c * 2 * MIB;
            size_t shared = pool_pages(chunk, 2 * MIB);
            if (shared > most) most = shared;
            if (step[c] == 0) {
                // A bare discard now and then, which the agent hears of while it has the pages in its hands.
                long done = draw(&seed) % 2 ? syscall(SYS_madvise, chunk, 2 * MIB, MADV_DONTNEED)
                                            : madvise(chunk, 2 * MIB, MADV_DONTNEED);
                CHECK(done == 0, "MADV_DONTNEED");
                for (size_t i = 0; i < 512; i++) {
                    CHECK(page_is_zero(chunk + i * PAGE), "page %zu of %zu after a discard", i, c);
                    fill_page(chunk + i * PAGE, 31000 + i % 256);
                    counts[c][i] = *(uint64_t *)(chunk + i * PAGE);
                }
                rounds++;
            } else {
                for (size_t i = 0; i < 3; i++) {
                    size_t page = draw(&seed) % 512;
                    CHECK(*(uint64_t *)(chunk + page * PAGE) == counts[c][page], "page %zu of %zu lost a write", page, c);
                    *(uint64_t *)(chunk + page * PAGE) = ++counts[c][page];
                }
                for (size_t i = 0; i < 512; i++) {
                    uint64_t *words = (uint64_t *)(chunk + i * PAGE);
                    CHECK(words[0] == counts[c][i], "page %zu of %zu has another count", i, c);
                    for (size_t w = 1; w < 512; w++) CHECK(words[w] == word(31000 + i % 256, w), "page %zu of %zu", i, c);
                }
            }
            step[c] = (step[c] + 1) % 4;
            // Some come in the middle of the merge, some before, some long after.
            due[c] = now() + (step[c] == 1 ? 0.10 + draw(&seed) % 500 / 1000.0 : 0.002 + draw(&seed) % 40 / 1000.0);
        }
        nap(1);
    }
    CHECK(most >= 512, "no huge page was ever merged, in %zu rounds: %zu pages", rounds, most);
}

// ---- threads, signals, filters, identities ----------------------------------------------------------------------

static atomic_int ticks;
static atomic_long tick_every;  // microseconds from the end of one handler to the next signal, 0 for no more

// Not a period of the timer: where a handler lasts longer than that, nothing but handlers would ever run.
static void next_tick(void) {
    setitimer(ITIMER_REAL, &(struct itimerval){.it_value = {0, atomic_load(&tick_every)}}, NULL);
}

static void start_ticks(void (*handler)(int), long every) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    atomic_store(&tick_every, every);
    next_tick();
}

static void stop_ticks(void) {
    atomic_store(&tick_every, 0);
    next_tick();
}

static void on_tick(int signal) {
    (void)signal;
    atomic_fetch_add(&ticks, 1);
    // A handler that touches managed memory, in the middle of anything.
    volatile char *at = hammered.at;
    if (at) (void)at[(atomic_load(&ticks) * 4099ul) % (HAMMER_PAGES * PAGE)];
    next_tick();
}

static void signals(void) {
    pthread_t threads[HAMMERS];
    start_hammers(threads);
    start_ticks(on_tick, 700);
    double began = now();
    uint64_t seed = 12;
    size_t most = 0;
    while (now() - began < 5 || (most <= 100 && now() - began < 100)) {
        // Interposed calls are interrupted by the handler as well.
        char *some = mmap(NULL, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(some != MAP_FAILED, "mmap among signals");
        memset(some, 1, 8 * PAGE);
        CHECK(madvise(some, 8 * PAGE, draw(&seed) % 2 ? MADV_DONTNEED : MADV_MERGEABLE) == 0, "madvise among signals");
        CHECK(munmap(some, 8 * PAGE) == 0, "munmap among signals");
        if (draw(&seed) % 256 == 0) {
            size_t here = pool_pages(hammered.at, HAMMER_PAGES * PAGE);
            if (here > most) most = here;
        }
    }
    stop_ticks();
    atomic_store(&hammering, 0);
    for (size_t i = 0; i < HAMMERS; i++) pthread_join(threads[i], NULL);
    check_hammered();
    CHECK(atomic_load(&ticks) > 100, "only %d signals came", atomic_load(&ticks));
    CHECK(most > 100, "only %zu pages were ever merged", most);
}

static struct region small;
static void on_small_stack(int signal) {
    (void)signal;
    if (madvise(small.at, 64 * PAGE, MADV_DONTNEED) != 0) _exit(2);
    if (madvise(small.at + 64 * PAGE, 64 * PAGE, MADV_UNMERGEABLE) != 0) _exit(3);
    if (mremap(small.at + 128 * PAGE, 64 * PAGE, 128 * PAGE, MREMAP_MAYMOVE) == MAP_FAILED) _exit(4);
}

static void *on_smallest_stack(void *unused) {
    CHECK(setgid(getgid()) == 0, "setgid");
    return unused;
}

// A handler on a stack of the size that the system recommends for handlers discards, unmerges and moves; and a thread with the
// smallest stack there is gives something up.
static void small_stacks(void) {
    small = merged(1024);
    size_t len = sysconf(_SC_SIGSTKSZ) > 0 ? (sysconf(_SC_SIGSTKSZ) + PAGE - 1) / PAGE * PAGE : 2 * PAGE;
    char *at = mmap(NULL, len + 16 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED && mprotect(at + 16 * PAGE, len, PROT_READ | PROT_WRITE) == 0, "a stack");
    stack_t stack = {.ss_sp = at + 16 * PAGE, .ss_size = len};
    CHECK(sigaltstack(&stack, NULL) == 0, "sigaltstack");
    struct sigaction action = {.sa_handler = on_small_stack, .sa_flags = SA_ONSTACK};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0, "sigaction");
    raise(SIGUSR1);
    for (size_t i = 0; i < 64; i++) CHECK(page_is_zero(small.at + i * PAGE), "page %zu shows old bytes", i);
    for (size_t i = 64; i < small.pages; i++)
        if (i < 128 || i >= 192) CHECK(page_is(small.at + i * PAGE, number_of(&small, i)), "page %zu is wrong", i);
    pthread_attr_t attributes;
    pthread_t thread;
    CHECK(pthread_attr_init(&attributes) == 0, "attributes");
    CHECK(pthread_attr_setstacksize(&attributes, sysconf(_SC_THREAD_STACK_MIN)) == 0, "a small stack");
    CHECK(pthread_create(&thread, &attributes, on_smallest_stack, NULL) == 0, "a thread");
    CHECK(pthread_join(thread, NULL) == 0, "its end");
}

// A handler that makes the very calls which it interrupts, and forks in the middle of them.
static char *nested_at;
static void on_nested_tick(int signal) {
    (void)signal;
    int count = atomic_fetch_add(&ticks, 1);
    mprotect(nested_at, PAGE, PROT_READ | PROT_WRITE);
    if (count % 64 != 0) return next_tick();
    int before = errno, status;
    pid_t child = plain_fork();
    if (child == 0) {
        mprotect(nested_at, PAGE, PROT_READ);
        _exit(0);
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    errno = before;
    next_tick();
}

static void *watch_ticks(void *unused) {
    for (int last = -1, idle = 0; atomic_load(&ticks) < 4000; last = atomic_load(&ticks)) {
        idle = last == atomic_load(&ticks) ? idle + 1 : 0;
        CHECK(idle < 30, "stuck after %d signals", last);
        nap(1000);
    }
    return unused;
}

static void signals_nested(void) {
    struct region r = merged(256);
    nested_at = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(nested_at != MAP_FAILED, "mmap");
    sigset_t tick;
    sigemptyset(&tick);
    sigaddset(&tick, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &tick, NULL);
    pthread_t watcher;
    CHECK(pthread_create(&watcher, NULL, watch_ticks, NULL) == 0, "pthread_create");
    start_ticks(on_nested_tick, 50);
    pthread_sigmask(SIG_UNBLOCK, &tick, NULL);
    while (atomic_load(&ticks) < 4000)
        CHECK(mprotect(nested_at + PAGE, PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect among signals");
    stop_ticks();
    pthread_join(watcher, NULL);
    check(&r, "after signals");
}

static int filter_flags;
static void install(int by_syscall, struct sock_filter *code, size_t count) {
    struct sock_fprog program = {count, code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no_new_privs");
    if (by_syscall) CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, filter_flags, &program) == 0, "seccomp");
    else CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0, "PR_SET_SECCOMP");
}

// Appends `answer` for each of `count` calls to a filter that has loaded the number; returns where it goes on.
static size_t answer_each(struct sock_filter *code, size_t at, const int *calls, size_t count, unsigned answer) {
    for (size_t i = 0; i < count; i++) {
        code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], 0, 1);
        code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, answer);
    }
    return at;
}

// Allows `count` calls and kills for all others.
static void allow_only(int by_syscall, const int *allowed, size_t count) {
    struct sock_filter code[2 * count + 2];
    size_t at = 0;
    code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    at = answer_each(code, at, allowed, count, SECCOMP_RET_ALLOW);
    code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    install(by_syscall, code, at);
}

static void install_filter(int by_syscall) {
    // A strict filter: what a finished program needs, and nothing that the agent uses.
    int allowed[] = {SYS_write, SYS_exit_group, SYS_exit, SYS_clock_nanosleep, SYS_nanosleep, SYS_futex, SYS_rt_sigreturn,
                     SYS_clock_gettime, SYS_munmap, SYS_mmap, SYS_madvise, SYS_mprotect, SYS_brk, SYS_newfstatat, SYS_fstat};
    allow_only(by_syscall, allowed, sizeof allowed / sizeof *allowed);
}

static void seccomp_by(int by_syscall) {
    struct region r = merged(1024);
    install_filter(by_syscall);
    check(&r, "behind a filter");
    for (size_t i = 0; i < 100; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    struct timespec rest = {1, 0};
    clock_nanosleep(CLOCK_MONOTONIC, 0, &rest, NULL);
    check(&r, "behind a filter, later");
    CHECK(madvise(r.at + 200 * PAGE, 100 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED behind a filter");
    for (size_t i = 200; i < 300; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes", i);
    write_all(&r, 91000, "behind a filter");
}

// An agent that leaves for a filter gives back what others are writing to, also where the program may execute.
static void seccomp_writers(void) {
    struct sock_filter code[8];
    int forbidden[] = {SYS_memfd_create, SYS_close_range};
    size_t at = 0;
    code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    at = answer_each(code, at, forbidden, 2, SECCOMP_RET_KILL_PROCESS);
    code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    for (int round = 0; round < 8; round++) {
        pid_t child = fork();
        if (child == 0) {
            struct region r = fill(1024, 16, 50);
            for (size_t i = 0; i < r.pages; i++) ((uint64_t *)(r.at + i * PAGE))[100] = 0;
            madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
            CHECK(madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
            wait_merged(&r, 700);
            CHECK(mprotect(r.at, r.pages * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0, "mprotect");
            pthread_t counter;
            CHECK(pthread_create(&counter, NULL, count_in, &r) == 0, "pthread_create");
            nap(round);
            install(0, code, at);
            nap(10);
            atomic_store(&resting, 1);
            pthread_join(counter, NULL);
            for (size_t i = 0; i < r.pages; i++) {
                uint64_t count = ((uint64_t *)(r.at + i * PAGE))[100];
                CHECK((unsigned char)count == expected[i], "page %zu has count %lu, not %u", i, count, expected[i]);
            }
            CHECK(pool_pages(r.at, r.pages * PAGE) == 0, "%zu pages are left in the pool", pool_pages(r.at, r.pages * PAGE));
            _exit(0);
        }
        CHECK(ended_well(child), "writers while a filter comes");
    }
}

// A child inherits the filter for which the agent left, and must not start one of its own.
static void seccomp_child(void) {
    struct region r = merged(1024);
    struct sock_filter code[8];
    int forbidden[] = {SYS_memfd_create, SYS_close_range};
    size_t at = 0;
    code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    at = answer_each(code, at, forbidden, 2, SECCOMP_RET_KILL_PROCESS);
    code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    install(0, code, at);
    check(&r, "behind a filter");
    pid_t child = fork();
    if (child == 0) {
        struct region own = fill(2048, 16, 500);
        nap(500);
        check(&own, "in a child behind a filter");
        check(&r, "in a child behind a filter");
        _exit(0);
    }
    CHECK(ended_well(child), "the child behind a filter");
}

// What the agent maps for itself is not the child's: pages that the pool lets go of would stay for its sake.
static void no_segments_in_children(void) {
    merged(1024);
    // By a call that nobody sees, so that the child has no agent of its own.
    pid_t child = raw(SYS_clone, SIGCHLD, 0, 0, 0, 0, 0);
    if (child == 0) {
        FILE *maps = fopen("/proc/thread-self/maps", "r");
        CHECK(maps, "maps");
        char line[512], mode[8];
        while (fgets(line, sizeof line, maps))
            CHECK(sscanf(line, "%*s %4s", mode) != 1 || mode[3] != 's' || !strstr(line, "pagefold"), "inherited: %s", line);
        _exit(0);
    }
    CHECK(ended_well(child), "the child has what is the agent's");
}

static void seccomp_prctl(void) { seccomp_by(0); }
static void seccomp_tsync(void) {
    filter_flags = SECCOMP_FILTER_FLAG_TSYNC;
    seccomp_by(1);
}

// An agent that stays under a filter goes on merging, heals, unmerges, and hears of discards that no library sees.
static void work_on(struct region *r, const char *when) {
    check(r, when);
    struct region later = merged(1024);
    for (size_t i = 0; i < 64; i++) fill_page(later.at + i * PAGE, number_of(&later, i));
    nap(1500);
    check(&later, when);
    raw(SYS_madvise, (long)(later.at + 200 * PAGE), 100 * PAGE, MADV_DONTNEED, 0, 0, 0);
    for (size_t i = 200; i < 300; i++) CHECK(page_is_zero(later.at + i * PAGE), "page %zu shows old bytes %s", i, when);
    CHECK(madvise(r->at, r->pages * PAGE, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE %s", when);
    check(r, when);
    write_all(r, 92000, when);
    CHECK(munmap(later.at, later.pages * PAGE) == 0, "munmap %s", when);
}

// As QEMU's: no processes, no choice of processors, but threads.
static void install_sandbox(void) {
    const int threads = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_SETTLS;
    const int refused[] = {SYS_execve, SYS_execveat, SYS_sched_setaffinity, SYS_sched_setscheduler, SYS_setpriority,
#ifdef SYS_fork
                           SYS_fork, SYS_vfork,
#endif
                           SYS_setuid, SYS_setsid, SYS_reboot, SYS_mount};
    struct sock_filter code[64];
    size_t at = 0;
    code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    at = answer_each(code, at, refused, sizeof refused / sizeof *refused, SECCOMP_RET_KILL_PROCESS);
    at = answer_each(code, at, (int[]){SYS_clone3}, 1, SECCOMP_RET_ERRNO | ENOSYS);
    code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 4);
    code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args));
    code[at++] = (struct sock_filter)BPF_STMT(BPF_ALU | BPF_AND | BPF_K, threads);
    code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, threads, 1, 0);
    code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter_flags = SECCOMP_FILTER_FLAG_TSYNC;
    install(1, code, at);
}

static void sandbox(void) {
    struct region r = merged(1024);
    install_sandbox();
    work_on(&r, "in a sandbox");
}

// The filter comes before there is anything to merge: the agent's thread must be there by then.
static void sandbox_first(void) {
    install_sandbox();
    struct region r = merged(1024);
    work_on(&r, "in a sandbox that came first");
}

// All that is allowed is what the agent says that it needs, and a few calls of this program's own.
static void sandbox_listed(void) {
    int allowed[256] = {SYS_exit_group, SYS_clock_nanosleep, SYS_nanosleep, SYS_newfstatat, SYS_brk, SYS_lseek, SYS_rt_sigreturn};
    size_t count = 7;
    const char *list = getenv("NEEDED");
    CHECK(list, "no list");
    for (char *end; *list && count < 256; list = *end ? end + 1 : end) allowed[count++] = (int)strtol(list, &end, 10);
    struct region r = merged(1024);
    filter_flags = SECCOMP_FILTER_FLAG_TSYNC;
    allow_only(1, allowed, count);
    work_on(&r, "with what is needed alone");
}

static void close_all(void) {
    struct region r = fill(1024, 16, 1000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    for (int fd = 3; fd < 1024; fd++) close(fd);
    raw(SYS_close_range, 3, ~0u, 0, 0, 0, 0);
    wait_merged(&r, 700);
    check(&r, "with every descriptor closed");
    // And none of ours may have come up in the program's table.
    for (int fd = 3; fd < 64; fd++) CHECK(fcntl(fd, F_GETFD) == -1, "descriptor %d is not the program's", fd);
    write_all(&r, 11000, "with every descriptor closed");
}

// The agent's thread is made, but has no processor yet: what the program closes meanwhile is closed.
static void closed_at_once(void) {
    struct region r = fill(1024, 256, 1000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    int ends[2];
    CHECK(pipe(ends) == 0, "pipe");
    cpu_set_t before, one;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0, "sched_getaffinity");
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    // It comes behind who has it, and to no other.
    if (sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1}) != 0) SKIP("no right to real time");
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0, "sched_setaffinity");
    CHECK(madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    close(ends[1]);
    struct pollfd end = {.fd = ends[0], .events = POLLIN};
    int hung = poll(&end, 1, 0) == 1 && end.revents & POLLHUP;
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0, "sched_setaffinity");
    CHECK(sched_setscheduler(0, SCHED_OTHER, &(struct sched_param){0}) == 0, "sched_setscheduler");
    CHECK(hung, "a pipe that was closed is open");
    close(ends[0]);
    wait_merged(&r, 700);
    check(&r, "after all");
}

// Reads, writes and discards what was merged, and again when it may be merged again.
static void still_works(struct region *r, uint64_t base, const char *when) {
    check(r, when);
    write_all(r, base, when);
    nap(800);
    for (size_t i = 0; i < r->pages; i++) CHECK(page_is(r->at + i * PAGE, base + i), "page %zu is wrong %s", i, when);
    CHECK(madvise(r->at, 100 * PAGE, MADV_DONTNEED) == 0 && page_is_zero(r->at), "a discard %s", when);
}

static void identity(void) {
    struct region r = merged(1024);
    if (geteuid() != 0) SKIP("needs root to become another user");
    CHECK(setgid(65534) == 0 && setuid(65534) == 0, "setuid");
    still_works(&r, 12000, "as another user");
}

// Who shall not be dumped is hidden from /proc, also from himself.
static void not_dumpable(void) {
    struct region r = merged(1024);
    CHECK(mprotect(r.at, 128 * PAGE, PROT_READ) == 0, "mprotect");
    CHECK(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0, "PR_SET_DUMPABLE");
    CHECK(pool_pages(r.at, r.pages * PAGE) == 0, "%zu pages are held by nobody", pool_pages(r.at, r.pages * PAGE));
    CHECK(mprotect(r.at, 128 * PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
    check(&r, "given back");
    write_all(&r, 53000, "given back");
}

// Without descriptors, and then without /proc, merged memory is discarded and given back all the same, and other memory locked.
static void no_proc(void) {
    static char plain[16];
    struct region r = merged(1024);
    char dir[] = "/tmp/semantics-XXXXXX";
    CHECK(mkdtemp(dir), "mkdtemp");
    CHECK((kept_maps = fopen("/proc/self/maps", "r")), "maps");
    struct rlimit before, none;
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0, "getrlimit");
    none = before;
    none.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit");
    CHECK(madvise(r.at, 128 * PAGE, MADV_DONTFORK) == 0, "MADV_DONTFORK");
    CHECK(madvise(r.at, 32 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED without descriptors");
    CHECK(madvise(r.at + 32 * PAGE, 32 * PAGE, MADV_FREE) == 0, "MADV_FREE without descriptors");
    CHECK(mlock(plain, sizeof plain) == 0 || errno == ENOMEM || errno == EPERM, "mlock without descriptors");
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0, "setrlimit");
    CHECK(flag_at(r.at, " dc"), "MADV_DONTFORK is forgotten");
    CHECK(chdir(dir) == 0 && rmdir(dir) == 0, "chdir");
    if (chroot(".") != 0) SKIP("no right to chroot");
    CHECK(access("/proc/self", F_OK) != 0, "chroot");
    CHECK(mlock(plain, sizeof plain) == 0 || errno == ENOMEM || errno == EPERM, "mlock");
    CHECK(madvise(r.at + 64 * PAGE, 64 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    CHECK(raw(SYS_madvise, (long)r.at + 128 * PAGE, 128 * PAGE, MADV_DONTNEED, 0, 0, 0) == 0, "raw MADV_DONTNEED");
    for (size_t i = 0; i < 256; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes", i);
    CHECK(pool_pages(r.at, 256 * PAGE) == 0, "discarded pages are shown from the pool");
    CHECK(pool_pages(r.at, r.pages * PAGE) >= 512, "nothing is merged any more");
    for (size_t i = 256; i < r.pages; i++) CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu is wrong", i);
    CHECK(setuid(65534) == 0, "setuid");
    CHECK(pool_pages(r.at, r.pages * PAGE) == 0, "%zu pages are held by nobody", pool_pages(r.at, r.pages * PAGE));
    for (size_t i = 256; i < r.pages; i++) CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu is wrong, given back", i);
    write_all(&r, 52000, "given back");
}

// Each takes something away from the calling thread, by the C library or past it.
static long one_of_many_calls(int turn) {
    struct { uint32_t version; int pid; } head = {0x20080522, 0};
    struct { uint32_t effective, permitted, inheritable; } data[2];
    struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog filter = {1, &allow};
    gid_t groups[] = {65534, 65533};
    switch (turn) {
    case 0: return prctl(PR_CAPBSET_DROP, 22 /* CAP_SYS_BOOT */, 0, 0, 0);
    case 1:
        if (syscall(SYS_capget, &head, data) != 0) return -1;
        data[0].effective = data[0].permitted &= ~(1u << 23 /* CAP_SYS_NICE */);
        return syscall(SYS_capset, &head, data);
    case 2: return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    case 3: return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0);
    case 4: return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter);
    case 5: return setgroups(2, groups);
    case 6: return syscall(SYS_setresgid, 65534, 65534, 65534);
    case 7: return setreuid(-1, 65534) || seteuid(0) || setuid(65534);
    default: return 1;
    }
}

// What `task` may do, as the kernel tells it.
static void powers(const char *task, char *text, size_t room) {
    static const char *const names[] = {"Uid:", "Gid:", "Groups:", "CapPrm:", "CapBnd:", "NoNewPrivs:", "Seccomp_filters:"};
    char path[300], line[512];
    snprintf(path, sizeof path, "/proc/self/task/%s/status", task);
    FILE *file = fopen(path, "r");
    size_t len = 0;
    text[0] = 0;
    if (!file) return;
    while (fgets(line, sizeof line, file))
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            if (strncmp(line, names[i], strlen(names[i])) == 0) len += snprintf(text + len, room - len, "%s", line);
    fclose(file);
}

// All threads may do the same; returns how many there are. A thread that has ended is listed for a moment.
static size_t all_threads_have_the_same(int turn) {
    double began = now();
again:;
    char own[4096], others[4096], number[16];
    snprintf(number, sizeof number, "%d", getpid());
    powers(number, own, sizeof own);
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks, "/proc/self/task");
    size_t threads = 0;
    for (struct dirent *task; (task = readdir(tasks));) {
        if (task->d_name[0] == '.') continue;
        threads++;
        powers(task->d_name, others, sizeof others);
        if (strcmp(own, others) != 0 && now() - began < 10) {
            closedir(tasks);
            nap(1);
            goto again;
        }
        CHECK(strcmp(own, others) == 0, "after call %d a thread has\n%snot\n%s", turn, others, own);
    }
    closedir(tasks);
    return threads;
}

// What a program gives up no thread in it keeps: not by any of the ways in which that is given up for a thread alone.
static void privileges(void) {
    if (geteuid() != 0) SKIP("needs root to give something up");
    struct region r = merged(1024);
    CHECK(all_threads_have_the_same(0) == 2, "no agent");
    for (int turn = 0; turn <= 7; turn++) {
        CHECK(one_of_many_calls(turn) == 0, "call %d", turn);
        // Whoever may choose users and groups has not given up those that he left.
        if (turn < 5 || turn == 7) CHECK(all_threads_have_the_same(turn) == 2, "no agent after call %d", turn);
    }
    CHECK(setuid(0) != 0, "a way back");
    still_works(&r, 14000, "with nothing left");
}

// Gives something up when told to, by when nobody answers its agent.
static void less_with_nobody_there(void) {
    struct region r = fill(64, 16, 1000);
    printf("ready\n");
    fflush(stdout);
    CHECK(getchar() == '\n', "a line");
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    nap(200);
    CHECK(one_of_many_calls(1) == 0, "capset");
    check(&r, "with less");
}

// The number of the agent's thread.
static long agent_thread(void) {
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks, "/proc/self/task");
    long found = 0;
    for (struct dirent *task; (task = readdir(tasks));)
        if (task->d_name[0] != '.' && atol(task->d_name) != getpid()) found = atol(task->d_name);
    closedir(tasks);
    return found;
}

// A handler that interrupts calls about memory, and whose child gives something up: in the handler and behind it.
static volatile sig_atomic_t gave_up;
static void on_privileged_tick(int signal) {
    (void)signal;
    int before = errno, status;
    pid_t child = plain_fork();
    if (child == 0) {
        if (one_of_many_calls(1) != 0) _exit(2);
        if (atomic_fetch_add(&ticks, 1) % 2) _exit(0);
        gave_up = 1;
        errno = before;
        return;
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (status != 0) _exit(3);
    atomic_fetch_add(&ticks, 1);
    errno = before;
    next_tick();
}

static void privileges_in_handlers(void) {
    if (geteuid() != 0) SKIP("needs root to give something up");
    struct region r = merged(1024);
    char *beside = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(beside != MAP_FAILED, "mmap");
    start_ticks(on_privileged_tick, 2000);
    while (atomic_load(&ticks) < 100 && !gave_up) {
        CHECK(munmap(beside, PAGE) == 0, "munmap among signals");
        CHECK(mmap(beside, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == beside, "mmap");
    }
    stop_ticks();
    if (gave_up) CHECK(mprotect(beside, PAGE, PROT_READ) == 0, "mprotect");
    size_t threads = all_threads_have_the_same(1);
    CHECK(threads == 2, "%zu threads, %s", threads, gave_up ? "with less" : "with all");
    check(&r, "after signals");
}

// No file tells what Landlock forbids a thread; a thread that the restricted one starts is restricted too.
static void landlock(void) {
    struct { uint64_t files; } rules = {1 << 1 /* LANDLOCK_ACCESS_FS_WRITE_FILE */};
    int set = syscall(444 /* landlock_create_ruleset */, &rules, sizeof rules, 0);
    if (set < 0) SKIP("no Landlock here");
    struct region r = merged(1024);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS");
    long before = agent_thread();
    CHECK(syscall(446 /* landlock_restrict_self */, set, 0) == 0, "landlock_restrict_self");
    CHECK(before != 0 && agent_thread() != before, "the agent's thread is the same, %ld", before);
    check(&r, "behind Landlock");
    write_all(&r, 15000, "behind Landlock");
}

static void user_namespace(void) {
    struct region r = merged(1024);
    if (unshare(CLONE_NEWUSER) != 0) {
        if (errno == EPERM || errno == ENOSPC) SKIP("no user namespaces here");
        CHECK(0, "unshare: a process of one thread may");
    }
    check(&r, "in a user namespace");
    write_all(&r, 13000, "in a user namespace");
    CHECK(madvise(r.at, 100 * PAGE, MADV_DONTNEED) == 0 && page_is_zero(r.at), "a discard in a namespace");
}

// The kernel refuses a thread that shares its root directory with another, as it does with ours.
static void mount_namespace(void) {
    struct region r = merged(1024);
    int space = open("/proc/self/ns/mnt", O_RDONLY);
    CHECK(space >= 0, "no namespaces");
    if (syscall(SYS_setns, space, CLONE_NEWNS) != 0 && errno == EPERM) SKIP("no right to change namespaces");
    for (int turn = 0; turn < 2; turn++) {
        CHECK((turn ? setns(space, CLONE_NEWNS) : syscall(SYS_setns, space, CLONE_NEWNS)) == 0, "setns in turn %d", turn);
        check(&r, "in a namespace");
        struct region later = merged(1024);
        CHECK(munmap(later.at, later.pages * PAGE) == 0, "munmap");
    }
}

// Writes a marker that only merged pages hold, and dies with a core dump.
static void core(void) {
    struct region r = fill(1024, 16, 424242);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    wait_merged(&r, 1024);
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_CORE, &limit) == 0, "RLIMIT_CORE");
    abort();
}

// Looks for the marker in the file `core*` of this directory.
static void core_check(const char *path) {
    int file = open(path, O_RDONLY);
    CHECK(file >= 0, "no core file");
    static char page[PAGE];
    size_t found = 0;
    while (read(file, page, PAGE) == (ssize_t)PAGE)
        for (uint64_t i = 0; i < 16; i++) found += page_is(page, 424242 + i);
    CHECK(found >= 1024, "the core holds %zu of 1024 merged pages", found);
}

// ---- devices ----------------------------------------------------------------------------------------------------

enum { FILE_PAGES = 256 };

static int pattern_file(int flags) {
    char name[] = "direct-XXXXXX";
    int file = mkstemp(name);
    CHECK(file >= 0, "mkstemp");
    static char page[PAGE];
    for (size_t i = 0; i < FILE_PAGES; i++) {
        fill_page(page, 600 + i % 8);
        CHECK(write(file, page, PAGE) == (ssize_t)PAGE, "write");
    }
    fsync(file);
    close(file);
    file = open(name, O_RDONLY | flags);
    int error = errno;
    unlink(name);
    if (file < 0 && error == EINVAL) SKIP("no O_DIRECT on this file system");
    CHECK(file >= 0, "open");
    return file;
}

static int direct_file;
static struct region direct_region;

static void *direct_reader(void *argument) {
    size_t mine = (size_t)argument;
    uint64_t seed = 900 + mine;
    size_t own = direct_region.pages / 4;
    size_t *shown = malloc(own * sizeof *shown);
    for (size_t i = 0; i < own; i++) shown[i] = number_of(&direct_region, mine * own + i);
    for (int round = 0; round < 250; round++) {
        size_t pages = 1 + draw(&seed) % 16, to = draw(&seed) % (own - 16), from = draw(&seed) % (FILE_PAGES - 16);
        char *at = direct_region.at + (mine * own + to) * PAGE;
        ssize_t got = pread(direct_file, at, pages * PAGE, from * PAGE);
        CHECK(got == (ssize_t)(pages * PAGE), "pread gave %zd", got);
        for (size_t i = 0; i < pages; i++) {
            shown[to + i] = 600 + (from + i) % 8;
            CHECK(page_is(at + i * PAGE, shown[to + i]), "what a device read is lost at page %zu", to + i);
        }
        if (round % 16 == 0)
            for (size_t i = 0; i < own; i++)
                CHECK(page_is(direct_region.at + (mine * own + i) * PAGE, shown[i]), "page %zu is wrong", i);
        nap(draw(&seed) % 30);
    }
    return NULL;
}

static void direct(void) {
    direct_file = pattern_file(O_DIRECT);
    direct_region = fill(2048, 8, 600);
    madvise(direct_region.at, direct_region.pages * PAGE, MADV_NOHUGEPAGE);
    madvise(direct_region.at, direct_region.pages * PAGE, MADV_MERGEABLE);
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++) pthread_create(&threads[i], NULL, direct_reader, (void *)i);
    wait_merged(&direct_region, 400);
    for (size_t i = 0; i < 4; i++) pthread_join(threads[i], NULL);
}

struct ring {
    int fd;
    char *submit, *complete;
    struct io_uring_sqe *entries;
    struct io_uring_params params;
};

static void ring_submit(struct ring *ring, int file, char *to, size_t len, size_t from, int buffer) {
    unsigned *tail = (unsigned *)(ring->submit + ring->params.sq_off.tail);
    unsigned mask = *(unsigned *)(ring->submit + ring->params.sq_off.ring_mask);
    unsigned *array = (unsigned *)(ring->submit + ring->params.sq_off.array);
    unsigned at = *tail & mask;
    struct io_uring_sqe *entry = &ring->entries[at];
    memset(entry, 0, sizeof *entry);
    entry->opcode = IORING_OP_READ_FIXED;
    entry->fd = file;
    entry->addr = (unsigned long)to;
    entry->len = len;
    entry->off = from;
    entry->buf_index = buffer;
    array[at] = at;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    CHECK(syscall(SYS_io_uring_enter, ring->fd, 1, 0, 0, NULL, 0) == 1, "io_uring_enter");
}

static long ring_result(struct ring *ring) {
    CHECK(syscall(SYS_io_uring_enter, ring->fd, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 0, "io_uring_enter");
    unsigned *head = (unsigned *)(ring->complete + ring->params.cq_off.head);
    unsigned cq_mask = *(unsigned *)(ring->complete + ring->params.cq_off.ring_mask);
    struct io_uring_cqe *results = (struct io_uring_cqe *)(ring->complete + ring->params.cq_off.cqes);
    long result = results[*head & cq_mask].res;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return result;
}

static long ring_read(struct ring *ring, int file, char *to, size_t len, size_t from, int buffer) {
    ring_submit(ring, file, to, len, from, buffer);
    return ring_result(ring);
}

static struct ring open_ring(void) {
    struct ring ring = {0};
    ring.fd = syscall(SYS_io_uring_setup, 8, &ring.params);
    if (ring.fd < 0) SKIP("no io_uring here");
    size_t sq = ring.params.sq_off.array + ring.params.sq_entries * 4;
    size_t cq = ring.params.cq_off.cqes + ring.params.cq_entries * sizeof(struct io_uring_cqe);
    ring.submit = mmap(NULL, sq, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQ_RING);
    ring.complete = mmap(NULL, cq, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_CQ_RING);
    ring.entries = mmap(NULL, ring.params.sq_entries * sizeof *ring.entries, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQES);
    CHECK(ring.submit != MAP_FAILED && ring.complete != MAP_FAILED && (void *)ring.entries != MAP_FAILED, "ring");
    return ring;
}

// A read into a registered buffer is under way while the agent leaves: what comes must show.
static void uring_leaving(void) {
    int pipe_ends[2];
    CHECK(pipe(pipe_ends) == 0, "pipe");
    for (int locks = 1; locks >= 0; locks--) {
        struct region r = merged(1024);
        struct ring ring = open_ring();
        struct iovec buffer = {r.at, 256 * PAGE};
        long done = syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &buffer, 1);
        if (done != 0 && errno == ENOMEM) SKIP("io_uring buffers are limited here");
        CHECK(done == 0, "register buffers");
        ring_submit(&ring, pipe_ends[0], r.at + 100 * PAGE, PAGE, 0, 0);
        if (locks) CHECK(mlock(r.at, r.pages * PAGE) == 0, "mlock");
        else CHECK(geteuid() != 0 || one_of_many_calls(1) == 0, "capset");
        char page[PAGE];
        fill_page(page, 4711);
        CHECK(write(pipe_ends[1], page, PAGE) == (long)PAGE, "write");
        CHECK(ring_result(&ring) == (long)PAGE, "read fixed");
        CHECK(page_is(r.at + 100 * PAGE, 4711), "what was read does not show, locks: %d", locks);
        fill_page(r.at + 100 * PAGE, number_of(&r, 100));
        check(&r, "after reading");
        close(ring.fd);
    }
}

// Merged memory with a registered buffer in it moves or grows, if it does, with what the device reads.
static void uring_remap(void) {
    struct region r = merged(1024);
    struct ring ring = open_ring();
    struct iovec buffer = {r.at, 16 * PAGE};
    int pipe_ends[2];
    CHECK(pipe(pipe_ends) == 0, "pipe");
    long done = syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &buffer, 1);
    if (done != 0 && errno == ENOMEM) SKIP("io_uring buffers are limited here");
    CHECK(done == 0, "register buffers");
    for (int round = 0; round < 2; round++) {
        // The buffer keeps its address, whatever lies there.
        ring_submit(&ring, pipe_ends[0], (char *)buffer.iov_base + 10 * PAGE, PAGE, 0, 0);
        char *grown = mremap(r.at, r.pages * PAGE, (r.pages + 64) * PAGE, round ? MREMAP_MAYMOVE : 0);
        CHECK(grown != MAP_FAILED || errno == ENOMEM, "mremap");
        if (grown != MAP_FAILED) r.at = grown;
        char page[PAGE];
        fill_page(page, 4711 + round);
        CHECK(write(pipe_ends[1], page, PAGE) == (long)PAGE, "write");
        CHECK(ring_result(&ring) == (long)PAGE, "read fixed");
        CHECK(page_is(r.at + 10 * PAGE, 4711 + round), "what was read does not show after mremap, round %d", round);
        fill_page(r.at + 10 * PAGE, number_of(&r, 10));
        check(&r, "after reading");
        if (grown != MAP_FAILED) break;
    }
    close(ring.fd);
}

// A block with a registered buffer in it becomes longer: it is another, or the same with what the device reads.
static void uring_realloc(void) {
    struct region r = {malloc(1024 * PAGE), 1024, 256, 1000};
    CHECK(r.at, "malloc");
    r.at += PAGE - (size_t)r.at % PAGE;
    r.pages--;
    for (size_t i = 0; i < r.pages; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    wait_merged(&r, r.pages / 2);
    struct ring ring = open_ring();
    struct iovec buffer = {r.at, 16 * PAGE};
    long done = syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &buffer, 1);
    if (done != 0 && errno == ENOMEM) SKIP("io_uring buffers are limited here");
    CHECK(done == 0, "register buffers");
    char *block = realloc(r.at - (PAGE - 16), 4096 * PAGE), *at = block + PAGE - 16;
    CHECK(block, "realloc");
    int moved = at != r.at, file = pattern_file(0);
    r.at = at;
    check(&r, "after realloc");
    CHECK(moved || (ring_read(&ring, file, r.at, PAGE, 0, 0) == (long)PAGE && page_is(r.at, 600)), "what was read does not show");
    close(ring.fd);
}

// Buffers registered while they are plain, and (others) when they are merged already: what the device reads must show.
static void uring(void) {
    struct ring ring = open_ring();
    int file = pattern_file(0);
    for (int before = 0; before < 2; before++) {
        struct region r = before ? fill(1024, 16, 2000) : merged(1024);
        struct iovec buffer = {r.at, 256 * PAGE};
        if (before) {
            madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
            // Nothing is merged yet: the pin comes first.
        }
        long done = syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &buffer, 1);
        if (done != 0 && errno == ENOMEM) SKIP("io_uring buffers are limited here");
        CHECK(done == 0, "register buffers");
        if (before) {
            CHECK(madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
            wait_merged(&r, 500);
        }
        check(&r, "with registered buffers");
        uint64_t seed = 8;
        for (int round = 0; round < 60; round++) {
            size_t page = draw(&seed) % 256, from = draw(&seed) % FILE_PAGES;
            CHECK(ring_read(&ring, file, r.at + page * PAGE, PAGE, from * PAGE, 0) == (long)PAGE, "read fixed");
            CHECK(page_is(r.at + page * PAGE, 600 + from % 8), "what the device read does not show at page %zu", page);
            fill_page(r.at + page * PAGE, number_of(&r, page));
            nap(30);
        }
        nap(500);
        for (size_t page = 0; page < 256; page++) {
            CHECK(ring_read(&ring, file, r.at + page * PAGE, PAGE, page * PAGE, 0) == (long)PAGE, "read fixed");
            CHECK(page_is(r.at + page * PAGE, 600 + page % 8), "later: what the device read does not show at page %zu", page);
        }
        CHECK(syscall(SYS_io_uring_register, ring.fd, IORING_UNREGISTER_BUFFERS, NULL, 0) == 0, "unregister");
    }
}

// System calls that read and write managed memory while it is frozen and merged.
static void system_calls(void) {
    struct region r = fill(1024, 16, 1000);
    int ends[2], file = pattern_file(0);
    CHECK(pipe(ends) == 0, "pipe");
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    uint64_t seed = 44;
    double began = now();
    while (now() - began < 4) {
        size_t page = draw(&seed) % (r.pages - 16);
        CHECK(write(ends[1], r.at + page * PAGE, PAGE) == (ssize_t)PAGE, "write from merged memory");
        size_t other = page + r.base % 16;
        other = page + 16 < r.pages ? page + 16 : page;  // the twin
        CHECK(read(ends[0], r.at + other * PAGE, PAGE) == (ssize_t)PAGE, "read into merged memory");
        size_t from = draw(&seed) % FILE_PAGES;
        CHECK(pread(file, r.at + page * PAGE, PAGE, from * PAGE) == (ssize_t)PAGE, "pread into merged memory");
        CHECK(page_is(r.at + page * PAGE, 600 + from % 8), "a read is lost");
        fill_page(r.at + page * PAGE, number_of(&r, page));
        if (draw(&seed) % 128 == 0) nap(300);
    }
    check(&r, "after system calls");
}

// ---- all memory (--manage all) -----------------------------------------------------------------------------------------

static void blocks(void) {
    enum { BLOCKS = 24 };
    static char *block[BLOCKS];
    static size_t pages[BLOCKS];
    uint64_t seed = 99;
    size_t most = 0;
    for (int round = 0; round < 600; round++) {
        size_t i = draw(&seed) % BLOCKS;
        size_t old = pages[i], count = 300 + draw(&seed) % 700;
        switch (draw(&seed) % 4) {
        case 0:
            free(block[i]);
            block[i] = calloc(count, PAGE);
            CHECK(block[i], "calloc");
            for (size_t p = 0; p < count; p++) CHECK(page_is_zero(block[i] + p * PAGE), "round %d: calloc gave old bytes in page %zu", round, p);
            break;
        case 1:
            free(block[i]);
            block[i] = malloc(count * PAGE);
            CHECK(block[i], "malloc");
            break;
        case 2: {
            char *moved = realloc(block[i], count * PAGE);
            CHECK(moved, "realloc");
            block[i] = moved;
            size_t kept = old < count ? old : count;
            for (size_t p = 0; p < kept; p++) CHECK(page_is(block[i] + p * PAGE, 100 + p % 32), "round %d: realloc lost page %zu", round, p);
            break;
        }
        default:
            count = old;
            for (size_t p = 0; p < count; p++) CHECK(page_is(block[i] + p * PAGE, 100 + p % 32), "round %d: page %zu is wrong", round, p);
            nap(draw(&seed) % 25);
        }
        pages[i] = count;
        for (size_t p = 0; p < count; p++) fill_page(block[i] + p * PAGE, 100 + p % 32);
        // Rest until much is merged, so that what follows meets merged blocks.
        if (round % 200 == 100) {
            double began = now();
            size_t here;
            while ((here = pool_pages(NULL, ~0ul >> 1)) < 500 && now() - began < WAIT_MAX) nap(50);
            if (here > most) most = here;
        }
    }
    CHECK(most >= 500, "only %zu pages were ever merged", most);
}

// Blocks that are never freed, of the process and of a child, and a heap that only grows: no call that is followed tells of them.
static void blocks_kept(void) {
    enum { BLOCKS = 32, BLOCK_PAGES = 256, SMALL = 8192 };
    static char *block[2][BLOCKS];
    static uint64_t *small[SMALL];
    struct region r = merged(1024);
    for (int who = 0; who < 2; who++) {
        pid_t child = who ? fork() : 0;
        CHECK(child >= 0, "fork");
        if (child > 0) {
            CHECK(ended_well(child), "the child");
            break;
        }
        nap(2000);
        for (int i = 0; i < BLOCKS; i++) {
            char *at = block[who][i] = malloc(BLOCK_PAGES * PAGE);
            CHECK(at, "malloc");
            for (size_t p = 0; p < BLOCK_PAGES; p++) fill_page(at + p * PAGE, 3000 + 100 * who + p % 32);
        }
        for (size_t i = 0; i < BLOCKS; i++) {
            struct region one = {block[who][i], BLOCK_PAGES, 32, 3000 + 100 * who};
            wait_merged(&one, BLOCK_PAGES / 2);
            check(&one, "in a block");
        }
        if (who) _exit(0);
    }
    // Less at a time than has a mapping of its own; equal pages, whatever lies where.
    nap(2000);
    for (size_t i = 0; i < SMALL; i++) {
        small[i] = calloc(8, 1024);
        CHECK(small[i], "calloc");
    }
    // What is not to be dumped is secret, part of the heap or a whole block.
    char *secret = (char *)small[SMALL - 1] - 8 * MIB;
    secret -= (size_t)secret % PAGE;
    CHECK(madvise(secret, 4 * MIB, MADV_DONTDUMP) == 0, "MADV_DONTDUMP");
    char *hidden = malloc(4 * MIB);
    CHECK(hidden, "malloc");
    size_t head = (size_t)hidden % PAGE;
    CHECK(madvise(hidden - head, head + 4 * MIB, MADV_DONTDUMP) == 0, "MADV_DONTDUMP");
    // What cannot be had is no end of the block.
    void *(*volatile again)(void *, size_t) = realloc;
    CHECK(!again(hidden, (size_t)1 << 62), "realloc");
    memset(hidden, 77, 4 * MIB);
    for (size_t i = 0; i < SMALL; i++)
        for (size_t j = 0; j < 1024; j++) small[i][j] = 77;
    double began = now();
    size_t here, wanted = SMALL;
    char *first = (char *)small[0] - (size_t)small[0] % PAGE, *last = (char *)small[SMALL - 1];
    while ((here = pool_pages(first, last - first)) < wanted / 4) {
        CHECK(now() - began < WAIT_MAX, "only %zu of %zu pages of the heap were merged", here, wanted);
        nap(100);
    }
    nap(1500);
    CHECK(pool_pages(secret, 4 * MIB) == 0, "%zu secret pages of the heap were merged", pool_pages(secret, 4 * MIB));
    CHECK(pool_pages(hidden - head, head + 4 * MIB) == 0, "%zu pages of a secret block were merged", pool_pages(hidden - head, head + 4 * MIB));
    for (size_t i = 0; i < SMALL; i++)
        for (size_t j = 0; j < 1024; j++) CHECK(small[i][j] == 77, "block %zu is wrong", i);
    check(&r, "after all");
}

static void all_memory(int by_prctl) {
    if (by_prctl) CHECK(prctl(67 /* PR_SET_MEMORY_MERGE */, 1, 0, 0, 0) == 0 || errno == EINVAL, "PR_SET_MEMORY_MERGE");
    struct region r = fill(2048, 64, 7000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    wait_merged(&r, 1500);
    check(&r, "with all memory managed");
    write_all(&r, 21000, "with all memory managed");
}
// Far more memory than anybody has was asked for, and reserved, before.
static void all_after_reservations(void) {
    for (int i = 0; i < 64; i++) {
        CHECK(mmap(NULL, 1ul << 62, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED, "mmap");
        void *at = mmap(NULL, 4ul << 40, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(at != MAP_FAILED && munmap(at, 4ul << 40) == 0, "a reservation");
    }
    // The rest of the zone.
    for (int i = 0; i < 4096; i++) {
        void *at = mmap(NULL, 1ul << 30, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(at != MAP_FAILED && munmap(at, 1ul << 30) == 0, "a small reservation");
    }
    all_memory(0);
}

static void all(void) { all_memory(0); }
static void memory_merge(void) { all_memory(1); }

// Asks for all memory to be merged, and a line later not any more, while no mapping changes.
static void memory_merge_ends(void) {
    struct region r;
    char line[64];
    for (int on = 1; on >= 0; on--) {
        CHECK(prctl(67, on, 0, 0, 0) == 0 || errno == EINVAL, "PR_SET_MEMORY_MERGE");
        if (on) r = fill(4096, 4096, 1000);
        CHECK(write(1, "done\n", 5) == 5 && read(0, line, sizeof line) > 0, "nobody is there");
    }
    check(&r, "let alone");
}

// Whether pages are merged anywhere, found without the allocator.
static int shows_pool(void) {
    static char text[1 << 20];
    size_t len = 0;
    int file = open("/proc/self/maps", O_RDONLY);
    for (ssize_t got; file >= 0 && (got = read(file, text + len, sizeof text - 1 - len)) > 0;) len += got;
    text[len] = 0;
    close(file);
    for (char *line = text, *next; *line; line = next) {
        char *end = strchr(line, '\n'), *mode = strchr(line, ' ');
        next = end ? end + 1 : line + strlen(line);
        if (end) *end = 0;
        // What is shared is the agent's own.
        if (mode && mode[4] == 'p' && strstr(mode, "memfd:pagefold-pool")) return 1;
    }
    return 0;
}

// The end of the heap goes and comes back while it is being merged, as malloc(3) and free(3) make it do from within.
static void heap(void) {
    const size_t pages = 8192, top = 512;
    const long len = (pages + top) * PAGE;
    uint64_t seed = getpid();
    size_t turns = 0, merging = 0;
    for (double began = now(); now() - began < 25 || (merging < 20 && now() - began < 100); turns++) {
        char *at = sbrk(len);
        CHECK(at != (char *)-1, "the heap does not grow in turn %zu", turns);
        for (size_t i = 0; i < pages + top; i++) memset(at + i * PAGE, 1 + i % 50, PAGE);
        // The list of mappings changed for all to see: a new block.
        void *block = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(block != MAP_FAILED, "mmap");
        int here = 0;
        // On a busy machine merging comes late.
        double patience = now() - began < 25 ? 0.6 : 4;
        for (double waited = now(); !here && now() - waited < patience; usleep(300)) here = shows_pool();
        merging += here;
        usleep(draw(&seed) % 12000);
        munmap(block, 2 * MIB);
        CHECK(sbrk(-len) != (void *)-1, "the heap does not shrink in turn %zu", turns);
        if (draw(&seed) % 2) usleep(draw(&seed) % 300);
        CHECK(sbrk(len) == at, "the heap does not grow again in turn %zu", turns);
        for (size_t i = 0; i < pages + top; i++) CHECK(page_is_zero(at + i * PAGE), "fresh page %zu is not zero in turn %zu", i, turns);
        for (size_t i = 0; i < pages + top; i++) memset(at + i * PAGE, 200 + i % 7, PAGE);
        usleep(3000);
        for (size_t i = 0; i < pages + top; i++)
            for (size_t j = 0; j < PAGE; j += 512)
                CHECK(at[i * PAGE + j] == (char)(200 + i % 7), "page %zu is wrong in turn %zu", i, turns);
        CHECK(sbrk(-len) != (void *)-1, "the heap does not shrink in turn %zu", turns);
    }
    CHECK(merging >= 20, "only %zu of %zu turns saw a heap that was being merged", merging, turns);
    printf("%zu of %zu turns while merging\n", merging, turns);
}

// The same memory for the test that looks from outside: fills, says "ready", and checks at each line of input.
static void serve(void) {
    struct region r = fill(8192, 4096, 1000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    char line[64];
    uint64_t seed = getpid();
    printf("ready\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        check(&r, "while serving");
        if (strncmp(line, "write", 5) == 0)
            for (size_t i = 0; i < 200; i++) {
                size_t page = draw(&seed) % r.pages;
                fill_page(r.at + page * PAGE, 8);
                CHECK(page_is(r.at + page * PAGE, 8), "a write is lost");
                fill_page(r.at + page * PAGE, number_of(&r, page));
            }
        printf("right %zu\n", pool_pages(r.at, r.pages * PAGE));
        fflush(stdout);
    }
}

// As `serve`, with threads that write, discard and compare all the time, and children that do too.
enum { SHARDS = 16, RESTLESS_PAGES = 4096, CHILDREN_MAX = 4 };
static struct {
    char *at;
    uint64_t numbers[RESTLESS_PAGES];  // what was written last, 0 for a discard
    pthread_mutex_t locks[SHARDS];
    atomic_size_t first;  // few pages are written at a time, so that the others come to rest
    pid_t children[CHILDREN_MAX];
} restless_memory;

static void restless_compare(size_t page, const char *who) {
    const char *at = restless_memory.at + page * PAGE;
    uint64_t number = restless_memory.numbers[page];
    CHECK(number ? page_is(at, number) : page_is_zero(at), "page %zu of %s is not %lu", page, who, number);
}

static void restless_step(uint64_t *seed, const char *who, int locks) {
    size_t page = (restless_memory.first + draw(seed) % 256) % RESTLESS_PAGES;
    uint64_t what = draw(seed) % 16, number = 1 + draw(seed) % 300;
    if (locks) pthread_mutex_lock(&restless_memory.locks[page % SHARDS]);
    restless_compare(page, who);
    char *at = restless_memory.at + page * PAGE;
    if (what == 0) {
        // Not by a bare call: between a mapping of the pool's and its registration nobody hears of those.
        CHECK(madvise(at, PAGE, MADV_DONTNEED) == 0, "a discard");
        restless_memory.numbers[page] = 0;
    } else if (what < 12) {
        fill_page(at, number);
        restless_memory.numbers[page] = number;
    }
    restless_compare(page, who);
    if (locks) pthread_mutex_unlock(&restless_memory.locks[page % SHARDS]);
}

static void *restless_writer(void *number) {
    uint64_t seed = getpid() + (uint64_t)number * 77;
    for (size_t turn = 0;; turn++) {
        restless_step(&seed, "a writer", 1);
        if (turn % 400 == 0) restless_memory.first = draw(&seed) % RESTLESS_PAGES;
        if (turn % 4 == 0) usleep(1000);
    }
    return NULL;
}

static void restless_child(uint64_t seed) {
    for (size_t i = 0; i < RESTLESS_PAGES; i++) restless_compare(i, "a new child");
    usleep(draw(&seed) % 1500000);
    for (size_t i = 0; i < 500; i++) restless_step(&seed, "a child", 0);
    usleep(draw(&seed) % 500000);
    for (size_t i = 0; i < RESTLESS_PAGES; i++) restless_compare(i, "an old child");
    _exit(0);
}

static void restless(void) {
    restless_memory.at = mmap(NULL, RESTLESS_PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(restless_memory.at != MAP_FAILED, "mmap");
    madvise(restless_memory.at, RESTLESS_PAGES * PAGE, MADV_NOHUGEPAGE);
    for (size_t i = 0; i < RESTLESS_PAGES; i++) fill_page(restless_memory.at + i * PAGE, restless_memory.numbers[i] = 1000 + i / 2);
    madvise(restless_memory.at, RESTLESS_PAGES * PAGE, MADV_MERGEABLE);
    for (size_t i = 0; i < SHARDS; i++) pthread_mutex_init(&restless_memory.locks[i], NULL);
    pthread_t thread;
    for (size_t i = 0; i < 2; i++) CHECK(pthread_create(&thread, NULL, restless_writer, (void *)i) == 0, "pthread_create");
    char line[64];
    uint64_t seed = getpid();
    printf("ready\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        for (size_t i = 0; i < SHARDS; i++) pthread_mutex_lock(&restless_memory.locks[i]);
        for (size_t i = 0; i < CHILDREN_MAX; i++) {
            pid_t *child = &restless_memory.children[i];
            int status = 0;
            if (*child > 0 && waitpid(*child, &status, WNOHANG) == *child) *child = 0;
            CHECK(status == 0, "a child ended by %d", status);
            if (*child == 0 && strncmp(line, "fork", 4) == 0) {
                *child = fork();
                CHECK(*child >= 0, "fork");
                if (*child == 0) restless_child(draw(&seed));
                break;
            }
        }
        for (size_t i = 0; i < RESTLESS_PAGES; i++) restless_compare(i, "the program");
        size_t shown = pool_pages(restless_memory.at, RESTLESS_PAGES * PAGE);
        for (size_t i = 0; i < SHARDS; i++) pthread_mutex_unlock(&restless_memory.locks[i]);
        printf("right %zu\n", shown);
        fflush(stdout);
    }
    // Children end by themselves, whoever is left.
}

// Files of the pool that this process maps, for itself or through its agent: their inodes, at most `room`.
static size_t pool_files(unsigned long *files, size_t room) {
    FILE *maps = fopen("/proc/thread-self/maps", "r");
    CHECK(maps, "maps");
    char line[512];
    size_t count = 0;
    while (fgets(line, sizeof line, maps)) {
        unsigned long inode;
        if (!strstr(line, "memfd:pagefold-pool") || sscanf(line, "%*s %*s %*s %*s %lu", &inode) != 1) continue;
        size_t at = 0;
        while (at < count && files[at] != inode) at++;
        if (at == count && count < room) files[count++] = inode;
    }
    fclose(maps);
    return count;
}

// Most of what was merged is written for good: what is left moves together, and the memory of the files where it was
// comes back, but for less than a file's worth.
static void decay(void) {
    struct region r = fill(16384, 8192, 1000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    wait_merged(&r, r.pages * 9 / 10);
    unsigned long before[64], after[64];
    size_t files = pool_files(before, 64), old = files, kept = 0;
    for (size_t i = 0; i < r.pages; i++)
        if (i % 8) fill_page(r.at + i * PAGE, 1ul << 20 | i);
    double began = now();
    while (old > 1 || kept < r.pages / 8 * 9 / 10) {
        CHECK(now() - began < 2 * WAIT_MAX, "%zu of %zu files stay, %zu of %zu pages are shared", old, files, kept, r.pages / 8);
        nap(100);
        size_t count = pool_files(after, 64);
        old = 0;
        for (size_t i = 0; i < files; i++)
            for (size_t j = 0; j < count; j++) old += before[i] == after[j];
        kept = shown_pages(r.at, r.pages * PAGE);
    }
    for (size_t i = 0; i < r.pages; i++)
        CHECK(page_is(r.at + i * PAGE, i % 8 ? 1ul << 20 | i : number_of(&r, i)), "page %zu is wrong", i);
    for (size_t i = 1; i < r.pages; i += 1000)
        CHECK(flag_at(r.at + i * PAGE, " nh"), "page %zu lost NOHUGEPAGE", i);
    printf("%zu of %zu files went in %.1f s\n", files - old, files, now() - began);
}

// Needs mappings of its own, up to the kernel's limit, after much was merged in single pages.
static void mappings(void) {
    long wanted = 30000;
    struct region r = fill(24000, 1, 1000);
    // Pages with a twin alternate with pages without: no two can be mapped together.
    for (size_t i = 1; i < r.pages; i += 2) fill_page(r.at + i * PAGE, 1u << 20 | i);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    wait_merged(&r, 10);
    double began = now();
    size_t last = 0;
    while (now() - began < 20) {
        size_t here = pool_pages(r.at, r.pages * PAGE);
        if (here == last && here > 0) break;
        last = here;
        nap(700);
    }
    char *at = mmap(NULL, 2 * wanted * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(at != MAP_FAILED, "mmap");
    for (long i = 0; i < wanted / 2; i++)
        CHECK(mprotect(at + 4 * i * PAGE, PAGE, PROT_READ | PROT_WRITE) == 0, "mapping %ld of %ld: the merger took the program's", 2 * i, wanted);
    for (size_t i = 0; i < r.pages; i++) CHECK(page_is(r.at + i * PAGE, i % 2 ? 1u << 20 | i : 1000), "page %zu is wrong", i);
    // And up to the very limit: an error then, and nothing else.
    long more = wanted / 2;
    while (more < wanted / 2 * 2 && mprotect(at + 4 * more * PAGE, PAGE, PROT_READ | PROT_WRITE) == 0) more++;
    for (size_t i = 0; i < r.pages; i += 2) fill_page(r.at + i * PAGE, 33);
    nap(1500);
    for (size_t i = 0; i < r.pages; i++) CHECK(page_is(r.at + i * PAGE, i % 2 ? 1u << 20 | i : 33), "at the limit page %zu is wrong", i);
    printf("%zu pages merged one by one\n", last);
}

// Writes here and there into memory that was merged in long runs: its own mappings stay the program's.
static void scatter(void) {
    struct region r = fill(48000, 24000, 1000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    wait_merged(&r, r.pages * 9 / 10);
    for (size_t i = 0; i < r.pages; i += 2) fill_page(r.at + i * PAGE, 1ul << 20 | i);
    size_t most = 0;
    for (double began = now(); now() - began < 6; nap(100)) {
        FILE *maps = fopen("/proc/thread-self/maps", "r");
        CHECK(maps, "the limit of mappings left none for the file's own buffer");
        size_t lines = 0;
        for (int c = fgetc(maps); c != EOF; c = fgetc(maps)) lines += c == '\n';
        fclose(maps);
        if (lines > most) most = lines;
    }
    CHECK(most < 20000, "%zu mappings", most);
    for (size_t i = 0; i < r.pages; i++)
        CHECK(page_is(r.at + i * PAGE, i % 2 ? number_of(&r, i) : 1ul << 20 | i), "page %zu is wrong", i);
    printf("%zu mappings at most\n", most);
}

// Blocks of malloc(3) that the program wants merged end in the middle of that, and others begin there at once.
static void marked_blocks(void) {
    enum { PAGES = 80, INSIDE = PAGES - 2 };
    struct region r = merged(1024);
    // Each has a mapping of its own, also after others were freed.
    CHECK(mallopt(M_MMAP_THRESHOLD, 128 << 10) == 1, "mallopt");
    size_t ended = 0, turns = 0;
    for (double began = now(); ended < 10; turns++) {
        CHECK(now() - began < WAIT_MAX, "only %zu of %zu blocks ended while they were merged", ended, turns);
        char *block = malloc(PAGES * PAGE - 32), *at = block + PAGE - (size_t)block % PAGE;
        CHECK(block, "malloc");
        for (size_t i = 0; i < INSIDE; i++) fill_page(at + i * PAGE, 1000 + i % 7);
        madvise(at, INSIDE * PAGE, MADV_MERGEABLE);
        // What is away for a moment is not there.
        int away = 0;
        for (double waited = now(); !away && now() - waited < 1;) {
            unsigned char seen[INSIDE];
            CHECK(mincore(at, INSIDE * PAGE, seen) == 0, "mincore");
            for (size_t i = 0; i < INSIDE; i++) away |= !(seen[i] & 1);
        }
        ended += away;
        free(block);
        uint64_t *fresh = calloc(PAGES * PAGE / 8 - 4, 8);
        CHECK(fresh, "calloc");
        usleep(2000);
        for (size_t i = 0; i < PAGES * PAGE / 8 - 4; i++) CHECK(fresh[i] == 0, "turn %zu: word %zu of a fresh block is old", turns, i);
        free(fresh);
    }
    check(&r, "after all");
}

// Large blocks lie side by side and are one mapping, as without an agent: a program may have only so many.
static void side_by_side(void) {
    enum { BLOCKS = 2000 };
    struct region r = merged(1024);
    FILE *maps = fopen("/proc/thread-self/maps", "r");
    CHECK(maps, "maps");
    size_t lines[2] = {0, 0};
    for (int when = 0; when < 2; when++) {
        rewind(maps);
        for (int c = fgetc(maps); c != EOF; c = fgetc(maps)) lines[when] += c == '\n';
        for (size_t i = 0; i < BLOCKS && when == 0; i++)
            CHECK(mmap(NULL, (1 + i % 3) * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != MAP_FAILED, "block %zu", i);
    }
    fclose(maps);
    CHECK(lines[1] < lines[0] + BLOCKS, "%zu mappings became %zu by %d blocks", lines[0], lines[1], BLOCKS);
    check(&r, "beside them");
}

static void *wait_for_end(void *end) {
    while (!atomic_load((atomic_int *)end)) nap(1);
    return NULL;
}

static unsigned long threads_by(int dir, const char *path) {
    struct stat at, plain;
    CHECK(fstatat(dir, path, &at, 0) == 0, "fstatat %s", path);
    if (*path == '/') {
        CHECK(stat(path, &plain) == 0, "stat %s", path);
        CHECK(plain.st_nlink == at.st_nlink, "%s has %lu and %lu links", path, plain.st_nlink, at.st_nlink);
    }
    return at.st_nlink - 2;
}

// What a stream on the process's line in /proc tells of its threads; the rest is as the kernel has it.
static long threads_told(void) {
    FILE *file = fopen("/proc/self/stat", "r");
    char line[1024] = "", name[64];
    CHECK(file && fgets(line, sizeof line, file) && fclose(file) == 0, "/proc/self/stat");
    int pid, parent;
    long count;
    CHECK(sscanf(line, "%d (%63[^)]) %*c %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %ld", &pid, name, &parent, &count) == 4, "%s", line);
    CHECK(pid == getpid() && parent == getppid() && strcmp(name, "semantics") == 0 && line[strlen(line) - 1] == '\n', "%s", line);
    return count;
}

// Who must be alone counts the directories of its threads, as the sandbox of Chromium does: the agent's is none of them.
static void tasks(void) {
    struct region r = merged(1024);
    struct stat kernels;
    CHECK(syscall(SYS_newfstatat, AT_FDCWD, "/proc/self/task", &kernels, 0) == 0, "newfstatat");
    CHECK(kernels.st_nlink > 3, "the agent has no thread here");
    int proc = open("/proc/", O_RDONLY | O_DIRECTORY);
    char own[64];
    snprintf(own, sizeof own, "/proc/%d/task//", getpid());
    atomic_int end = 0;
    pthread_t thread;
    for (unsigned long count = 1; count <= 2; count++) {
        unsigned long counts[] = {threads_by(proc, "self/task/"), threads_by(proc, "self/task"), threads_by(proc, own), threads_by(-1, "/proc/self/task")};
        for (int i = 0; i < 4; i++) CHECK(counts[i] == count, "%lu threads by name %d, not %lu", counts[i], i, count);
        CHECK(threads_told() == (long)count, "%ld threads are told, not %lu", threads_told(), count);
        if (count == 1) CHECK(pthread_create(&thread, NULL, wait_for_end, &end) == 0, "pthread_create");
    }
    atomic_store(&end, 1);
    pthread_join(thread, NULL);
    // Who writes more than he may is ended by a signal.
    struct rlimit before, none;
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0, "getrlimit");
    none = before;
    none.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_FSIZE, &none) == 0, "setrlimit");
    threads_told();
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0, "setrlimit");
    // Of another process, and what only has the name.
    pid_t child = fork();
    if (child == 0) {
        nap(60000);
        _exit(0);
    }
    snprintf(own, sizeof own, "/proc/%d/task", child);
    struct stat seen;
    CHECK(stat(own, &seen) == 0 && syscall(SYS_newfstatat, AT_FDCWD, own, &kernels, 0) == 0, "stat %s", own);
    CHECK(seen.st_nlink == kernels.st_nlink || seen.st_nlink == kernels.st_nlink - 1, "%lu links", seen.st_nlink);
    CHECK(seen.st_nlink >= 3, "a child without threads");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    char dir[] = "/tmp/tasks-XXXXXX";
    CHECK(mkdtemp(dir) && chdir(dir) == 0 && mkdir("self", 0700) == 0 && mkdir("self/task", 0700) == 0, "a directory");
    CHECK(stat("self/task", &seen) == 0 && seen.st_nlink <= 2 && seen.st_nlink >= 1, "%lu links of a directory", seen.st_nlink);
    CHECK(rmdir("self/task") == 0 && rmdir("self") == 0 && rmdir(dir) == 0, "rmdir");
    CHECK(stat("self/task", &seen) == -1 && errno == ENOENT, "stat of nothing");
    CHECK(fstatat(proc, "", &seen, AT_EMPTY_PATH) == 0 && S_ISDIR(seen.st_mode), "fstatat of a descriptor");
    close(proc);
    check(&r, "after all");
}

struct scenario {
    const char *name;
    void (*run)(void);
};

static const struct scenario scenarios[] = {
    {"writers", writers}, {"unmergeable-writers", unmergeable_writers}, {"lock-writers", lock_writers}, {"forks", forks}, {"orphan", orphan}, {"all-that-is-listed", all_that_is_listed}, {"child-without-daemon", child_without_daemon}, {"process-namespace", process_namespace}, {"main-ends", main_ends},
    {"vforks", vforks}, {"vforks-with-less", vforks_with_less}, {"daemonize", daemonize}, {"dontneed", dontneed}, {"dontneed-syscall", dontneed_syscall},
    {"dontneed-raw", dontneed_raw}, {"dontneed-hole", dontneed_hole}, {"dontneed-at-a-limit", dontneed_at_a_limit}, {"dontneed-racing", dontneed_racing}, {"lazy-free", lazy_free},
    {"hole-punch", hole_punch}, {"unmap", unmap}, {"failed-maps", failed_maps}, {"remap", remap}, {"remap-healed", remap_healed}, {"remap-as-another", remap_as_another}, {"holes", holes}, {"place", place}, {"remap-marked", remap_marked}, {"protect", protect}, {"keys", keys}, {"keys-and-advice", keys_and_advice}, {"lock", lock}, {"locks", locks}, {"locks-at-a-limit", locks_at_a_limit}, {"locks-and-children", locks_and_children},
    {"lengths", lengths}, {"unmergeable", unmergeable}, {"wipe-on-fork", wipe_on_fork}, {"own-userfaultfd", own_userfaultfd}, {"tracked-blocks", tracked_blocks}, {"probes", probes}, {"straddle", straddle}, {"rights-raw", rights_raw}, {"sealed", sealed}, {"seal-and-discard", seal_and_discard}, {"seal-raw", seal_raw}, {"seal-and-discard-raw", seal_and_discard_raw}, {"guards", guards}, {"guards-raw", guards_raw}, {"flags", flags}, {"flags-raw", flags_raw}, {"marks", marks}, {"huge", huge}, {"huge-whole", huge_whole}, {"huge-writers", huge_writers},
    {"signals", signals}, {"small-stacks", small_stacks}, {"signals-nested", signals_nested}, {"seccomp-prctl", seccomp_prctl}, {"seccomp-child", seccomp_child}, {"seccomp-writers", seccomp_writers}, {"no-segments-in-children", no_segments_in_children}, {"seccomp-tsync", seccomp_tsync},
    {"sandbox", sandbox}, {"sandbox-first", sandbox_first}, {"sandbox-listed", sandbox_listed},
    {"close-all", close_all}, {"closed-at-once", closed_at_once}, {"identity", identity}, {"not-dumpable", not_dumpable}, {"no-proc", no_proc}, {"privileges", privileges}, {"less-with-nobody-there", less_with_nobody_there}, {"privileges-in-handlers", privileges_in_handlers}, {"landlock", landlock}, {"user-namespace", user_namespace}, {"mount-namespace", mount_namespace}, {"core", core},
    {"direct", direct}, {"uring", uring}, {"uring-leaving", uring_leaving}, {"uring-remap", uring_remap}, {"uring-realloc", uring_realloc}, {"system-calls", system_calls}, {"blocks", blocks}, {"blocks-kept", blocks_kept}, {"marked-blocks", marked_blocks}, {"side-by-side", side_by_side}, {"heap", heap}, {"all", all}, {"all-after-reservations", all_after_reservations},
    {"memory-merge", memory_merge}, {"memory-merge-ends", memory_merge_ends}, {"serve", serve}, {"restless", restless}, {"decay", decay}, {"scatter", scatter}, {"tasks", tasks}, {"mappings", mappings},
};

int main(int count, char **arguments) {
    CHECK(count >= 2, "usage: semantics SCENARIO");
    if (strcmp(arguments[1], "core-check") == 0 && count == 3) {
        core_check(arguments[2]);
        return 0;
    }
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
        if (strcmp(scenarios[i].name, arguments[1]) == 0) {
            scenarios[i].run();
            return 0;
        }
    CHECK(0, "no scenario %s", arguments[1]);
}
