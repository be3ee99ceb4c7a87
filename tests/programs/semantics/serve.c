// Clients for tests that look from outside: they answer each line of input.
#include "common.h"

// Fills memory, prints "ready", and compares every byte at each line of input.
static void serve_region(struct region r) {
    mark_mergeable(&r);
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

static void serve(void) { serve_region(fill(8192, 4096, 1000)); }

// As much as a small guest has, each page with bytes of its own.
static void serve_large(void) { serve_region(fill(1 << 16, 1 << 16, 1000)); }

// Like `serve`, with threads and children that write, discard and compare all the time.
enum { SHARDS = 16, RESTLESS_PAGES = 4096, CHILDREN_MAX = 4 };
static struct {
    char *at;
    uint64_t numbers[RESTLESS_PAGES];  // the number written last, 0 for a discard
    pthread_mutex_t locks[SHARDS];
    atomic_size_t first;  // start of the few pages that are written now; the others rest
    pid_t children[CHILDREN_MAX];
} restless_memory;

// What a wrong page holds instead, and which mapping it lies in: the line by which its cause is found.
static void restless_wrong(size_t page, const char *by) {
    const char *at = restless_memory.at + page * PAGE;
    uint64_t number = restless_memory.numbers[page], holds = 0;
    const uint64_t *words = (const uint64_t *)at;
    size_t wrong = 0, first = 0;
    for (size_t i = 512; i-- > 0;)
        if (words[i] != (number ? word(number, i) : 0)) wrong++, first = i;
    while (holds < 4096 && word(holds, first) != words[first]) holds++;
    fprintf(stderr, "page %zu of %s is not %lu: %zu words from %zu on differ, there it is %s %lu; mapped in ", page, by, number, wrong,
            first, words[first] ? "of number" : "zero, not of a number below", holds);
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned long start, end;
    char line[512];
    while (maps && fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx", &start, &end) == 2 && start <= (uintptr_t)at && (uintptr_t)at < end) fputs(line, stderr);
    _exit(1);
}

static void restless_compare(size_t page, const char *by) {
    const char *at = restless_memory.at + page * PAGE;
    uint64_t number = restless_memory.numbers[page];
    if (!(number ? page_is(at, number) : page_is_zero(at))) restless_wrong(page, by);
}

static void restless_step(uint64_t *seed, const char *by, int locks) {
    size_t page = (restless_memory.first + draw(seed) % 256) % RESTLESS_PAGES;
    uint64_t what = draw(seed) % 16, number = 1 + draw(seed) % 300;
    if (locks) pthread_mutex_lock(&restless_memory.locks[page % SHARDS]);
    restless_compare(page, by);
    char *at = restless_memory.at + page * PAGE;
    if (what == 0) {
        // A bare call could fall between the mapping of a slot and its registration, where no event reports it.
        CHECK(madvise(at, PAGE, MADV_DONTNEED) == 0, "a discard");
        restless_memory.numbers[page] = 0;
    } else if (what < 12) {
        fill_page(at, number);
        restless_memory.numbers[page] = number;
    }
    restless_compare(page, by);
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
    // Children end by themselves.
}

const struct scenario serve_scenarios[] = {
    {"serve", serve},
    {"serve-large", serve_large},
    {"restless", restless},
    {0},
};
