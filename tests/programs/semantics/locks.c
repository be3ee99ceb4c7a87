// Locked memory (mlock(2), mlockall(2)) is not merged.
#include "common.h"

// Children do not inherit locks: pages that a child writes are merged.
static void locks_and_children(void) {
    struct region r = fill(1024, 256, 1000);
    mark_mergeable(&r);
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

static void *lock_all(void *argument) {
    struct region *r = argument;
    CHECK(mlock(r->at, r->pages * PAGE) == 0, "mlock");
    return NULL;
}

// Two threads lock different memory at the same time, while a third writes to one of the two.
static void lock_writers(void) {
    struct region quiet = fill(4096, 16, 3000), written = fill(1024, 16, 50);
    if (mlock(quiet.at, quiet.pages * PAGE) != 0) SKIP("mlock is limited here");
    munlock(quiet.at, quiet.pages * PAGE);
    for (int round = 0; round < 5; round++) {
        fill_counted(&written);
        mark_mergeable(&written);
        mark_mergeable(&quiet);
        // The agent merges again after each round.
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
        check_counts(&written);
        check(&quiet, "locked");
        munlock(quiet.at, quiet.pages * PAGE);
        munlock(written.at, written.pages * PAGE);
    }
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

// Locked pages are never read, so a copy of them finds no twin. Merged pages are private and in memory before they are
// locked, and may be merged again after they are unlocked.
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

// Pages that could not be unmerged when they were locked stay locked.
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
    // The agent is working again when this is merged.
    struct region later = fill(1024, 16, 7000);
    mark_mergeable(&later);
    wait_merged(&later, 700);
    nap(1000);
    for (size_t i = 0; i < r.pages; i++) CHECK(flag_at(r.at + i * PAGE, " lo"), "page %zu is not locked any more", i);
    CHECK(madvise(r.at, r.pages * PAGE, MADV_DONTNEED) != 0 && errno == EINVAL, "MADV_DONTNEED of what is locked");
    check(&r, "locked");
    CHECK(munlock(r.at, r.pages * PAGE) == 0, "munlock");
    CHECK(madvise(r.at, r.pages * PAGE, MADV_DONTNEED) == 0 && page_is_zero(r.at), "MADV_DONTNEED");
}

const struct scenario locks_scenarios[] = {
    {"lock-writers", lock_writers},
    {"lock", lock},
    {"locks", locks},
    {"locks-at-a-limit", locks_at_a_limit},
    {"locks-and-children", locks_and_children},
    {0},
};
