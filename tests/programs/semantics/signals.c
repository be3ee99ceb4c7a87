// Signal handlers that interrupt anything.
#include "common.h"

#include <sys/time.h>

atomic_int ticks;
static atomic_long tick_every;  // microseconds from the end of one handler to the next signal, 0 for no more

// A periodic timer would leave no time to the program if a handler took longer than the period.
void next_tick(void) {
    setitimer(ITIMER_REAL, &(struct itimerval){.it_value = {0, atomic_load(&tick_every)}}, NULL);
}

void start_ticks(void (*handler)(int), long every) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    atomic_store(&tick_every, every);
    next_tick();
}

void stop_ticks(void) {
    atomic_store(&tick_every, 0);
    next_tick();
}

static void on_tick(int signal) {
    (void)signal;
    atomic_fetch_add(&ticks, 1);
    // The handler touches managed memory, whatever it interrupts.
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
    stop_hammers(threads);
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

// A handler on a stack of the recommended size discards, unmerges and moves memory, and a thread with the smallest possible
// stack gives up a group.
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

// A handler makes the same calls as the code that it interrupts, and forks in the middle of them.
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

const struct scenario signals_scenarios[] = {
    {"signals", signals},
    {"small-stacks", small_stacks},
    {"signals-nested", signals_nested},
    {0},
};
