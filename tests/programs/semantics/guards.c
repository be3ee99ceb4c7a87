// Guard pages (MADV_GUARD_INSTALL, Linux 6.13), where an access faults whatever the rights of the mapping are.
#include "common.h"

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

// Bare calls install guards on pages that were written since the merge and lie among pages that the agent unshares.
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
        CHECK(now() - began < WAIT_MAX, "%zu pages are not unshared", pool_pages(r.at + 64 * PAGE, 128 * PAGE));
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
    // Moves the part that is still merged, with two guards at its end.
    char *moved = mremap(r.at + 768 * PAGE, 256 * PAGE, 512 * PAGE, MREMAP_MAYMOVE);
    CHECK(moved != MAP_FAILED, "mremap");
    for (size_t i = 768; i < r.pages; i++) {
        char *at = moved + (i - 768) * PAGE;
        CHECK(is_guarded(i) ? faults(at, 0) == SIGSEGV : page_is(at, number_of(&r, i)), "page %zu is wrong when moved", i);
    }
}

const struct scenario guards_scenarios[] = {
    {"guards", guards},
    {"guards-raw", guards_raw},
    {0},
};
