// Discards (MADV_DONTNEED, MADV_FREE, MADV_REMOVE) of merged memory.
#include "common.h"

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

static void dontneed(void) { discard_by(libc_advise); }
static void dontneed_syscall(void) { discard_by(syscall_advise); }
static void dontneed_raw(void) { discard_by(raw_advise); }

// A discard across a hole discards what is mapped on both sides.
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

// Discards where the address space is at its limit, then moves and discards of the same memory.
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
        // This memory is discarded, moved and filled like any other.
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

// Discards of a region while it is being merged: discarded pages read zero, or what was written since.
static void dontneed_racing(void) {
    struct region r = fill(2048, 16, 4000);
    mark_mergeable(&r);
    uint64_t seed = 3;
    size_t most = 0;
    // On a busy machine little is merged between two discards; more and calmer rounds follow there.
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

const struct scenario discard_scenarios[] = {
    {"dontneed", dontneed},
    {"dontneed-syscall", dontneed_syscall},
    {"dontneed-raw", dontneed_raw},
    {"dontneed-hole", dontneed_hole},
    {"dontneed-at-a-limit", dontneed_at_a_limit},
    {"dontneed-racing", dontneed_racing},
    {"lazy-free", lazy_free},
    {"hole-punch", hole_punch},
    {0},
};
