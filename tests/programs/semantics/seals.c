// Sealed mappings (mseal(2), Linux 6.10).
#include "common.h"

// A sealed mapping is neither replaced nor moved; memory beside it merges.
static void sealed(void) {
    enum { SYS_MSEAL = 462 };
    struct region r = fill(1024, 256, 1000), other = fill(1024, 256, 1000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    if (syscall(SYS_MSEAL, r.at, 512 * PAGE, 0) != 0) SKIP("this kernel has no mseal(2)");
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    mark_mergeable(&other);
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

// Writable sealed memory may be discarded: it then reads zero, in children too, and keeps later writes.
static void discard_sealed(long (*seal)(void *, size_t), long (*advise)(void *, size_t, int)) {
    struct region r = merged(1024), hidden = merged(256);
    // Some pages are private copies in mappings of the pool.
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
    // The agent ends, and another one starts.
    CHECK(advise(r.at + 100 * PAGE, 300 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS");
    for (size_t i = 100; i < 400; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes with the next agent", i);
    for (size_t i = 100; i < 400; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    for (int round = 0; round < 5; round++) {
        nap(300);
        check(&r, "in the end");
        check(&hidden, "read-only");
        for (size_t i = round; i < r.pages; i += 7) fill_page(r.at + i * PAGE, number_of(&r, i));
    }
    // The kernel treats a mapping of the pool as a file's, which a bare call may discard; its bytes are right all the same.
    long refused = advise(hidden.at, PAGE, MADV_DONTNEED);
    CHECK(advise == raw_advise || refused != 0, "sealed read-only memory was discarded");
    check(&hidden, "after a refused discard");
    CHECK(mprotect(r.at, PAGE, PROT_READ) == -1 && errno == EPERM, "the seal is gone");
    CHECK(munmap(r.at, PAGE) == -1 && errno == EPERM, "the seal is gone");
    CHECK(mremap(r.at, PAGE, 2 * PAGE, MREMAP_MAYMOVE) == MAP_FAILED && errno == EPERM, "the seal is gone");
    check(&r, "after refused calls");
}

static void seal_and_discard(void) { discard_sealed(libc_seal, libc_advise); }
static void seal_raw(void) { discard_sealed(raw_seal, libc_advise); }
static void seal_and_discard_raw(void) { discard_sealed(raw_seal, raw_advise); }

const struct scenario seals_scenarios[] = {
    {"sealed", sealed},
    {"seal-and-discard", seal_and_discard},
    {"seal-raw", seal_raw},
    {"seal-and-discard-raw", seal_and_discard_raw},
    {0},
};
