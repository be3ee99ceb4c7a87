// Writers of memory that is being merged.
#include "common.h"

enum { HAMMER_VALUES = 3, COUNT_AT = 100 };
struct region hammered;
atomic_int resting;
static unsigned char expected[HAMMER_PAGES];  // the count in each page: its word COUNT_AT
static atomic_ulong writes;
static atomic_int hammering = 1;

// Each writer owns every fourth page and adds to counters there, within a window that moves: pages rest, are merged,
// and are written again at any moment. The counters wrap early, and pages become equal again.
static void *hammer(void *argument) {
    size_t mine = (size_t)argument;
    uint64_t seed = 77 + mine;
    while (atomic_load(&hammering)) {
        size_t window = draw(&seed) % (HAMMER_PAGES / HAMMERS - 128);
        for (int i = 0; i < 6000 && !atomic_load(&resting); i++) {
            size_t page = (window + draw(&seed) % 128) * HAMMERS + mine;
            volatile uint64_t *counter = (volatile uint64_t *)(hammered.at + page * PAGE) + COUNT_AT;
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

void stop_hammers(pthread_t *threads) {
    atomic_store(&hammering, 0);
    for (size_t i = 0; i < HAMMERS; i++) pthread_join(threads[i], NULL);
    for (size_t i = 0; i < HAMMER_PAGES; i++) {
        uint64_t *words = (uint64_t *)(hammered.at + i * PAGE);
        for (size_t j = 0; j < 512; j++) {
            uint64_t right = j == COUNT_AT ? expected[i] : word(number_of(&hammered, i), j);
            CHECK(words[j] == right, "page %zu word %zu is %lx, not %lx", i, j, words[j], right);
        }
    }
}

void start_hammers(pthread_t *threads) {
    hammered = fill(HAMMER_PAGES, 4, 50);
    fill_counted(&hammered);
    mark_mergeable(&hammered);
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
    stop_hammers(threads);
    printf("%lu writes, up to %zu pages merged meanwhile\n", atomic_load(&writes), most);
}

// MADV_UNMERGEABLE and MADV_MERGEABLE in turn while threads write.
static void unmergeable_writers(void) {
    pthread_t threads[HAMMERS];
    start_hammers(threads);
    size_t most = 0;
    // On a busy machine little is merged between two rounds; more and longer rounds follow there.
    for (int round = 0; round < 12 || (most <= 100 && round < 60); round++) {
        nap(round < 12 ? 400 : 2000);
        size_t here = pool_pages(hammered.at, HAMMER_PAGES * PAGE);
        if (here > most) most = here;
        CHECK(madvise(hammered.at, HAMMER_PAGES * PAGE, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE");
        CHECK(shown_pages(hammered.at, HAMMER_PAGES * PAGE) == 0, "pages are still shared");
        CHECK(madvise(hammered.at, HAMMER_PAGES * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    }
    stop_hammers(threads);
    CHECK(most > 100, "only %zu pages were ever merged", most);
}

void fill_counted(const struct region *r) {
    memset(expected, 0, sizeof expected);
    for (size_t i = 0; i < r->pages; i++) {
        fill_page(r->at + i * PAGE, number_of(r, i));
        ((uint64_t *)(r->at + i * PAGE))[COUNT_AT] = 0;
    }
}

void check_counts(const struct region *r) {
    for (size_t i = 0; i < r->pages; i++) {
        uint64_t count = ((uint64_t *)(r->at + i * PAGE))[COUNT_AT];
        CHECK((unsigned char)count == expected[i], "page %zu has count %lu, not %u", i, count, expected[i]);
    }
}

void *count_in(void *argument) {
    struct region *r = argument;
    for (size_t i = 0; !atomic_load(&resting); i = (i + 1) % r->pages) {
        volatile uint64_t *counter = (volatile uint64_t *)(r->at + i * PAGE) + COUNT_AT;
        CHECK(*counter == expected[i], "page %zu has count %lu, not %u: a write was lost", i, *counter, expected[i]);
        *counter = ++expected[i];
    }
    return NULL;
}

const struct scenario writers_scenarios[] = {
    {"writers", writers},
    {"unmergeable-writers", unmergeable_writers},
    {0},
};
