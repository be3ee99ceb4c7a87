// Mappings come, go and fail: munmap(2), mmap(2) at fixed addresses, and the limit of mappings.
#include "common.h"

#include <sys/socket.h>

static void unmap(void) {
    struct region r = merged(1024);
    CHECK(munmap(r.at + 100 * PAGE, 50 * PAGE) == 0, "partial munmap");
    CHECK(faults(r.at + 120 * PAGE, 0), "an unmapped page can be read");
    for (size_t i = 0; i < r.pages; i++)
        if (i < 100 || i >= 150) CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu beside a hole is wrong", i);
    // Another mapping takes the hole.
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

// A call that fails after the kernel has already unmapped the target range: advice for the old mapping must not apply to the next one.
static void failed_maps(void) {
    struct region r = merged(1024), target = merged(1024);
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
    const size_t len = 512 * PAGE;
    CHECK(madvise(target.at, target.pages * PAGE, MADV_DONTFORK) == 0, "MADV_DONTFORK");
    // A socket cannot be mapped, but the kernel asks it only after it has unmapped the range.
    CHECK(mmap(target.at, len, PROT_READ, MAP_SHARED | MAP_FIXED, pair[0], 0) == MAP_FAILED, "a socket was mapped");
    // The new length exceeds the limit of the address space.
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

// Nothing is mapped into a range that the program has unmapped: the program may map it again (MAP_FIXED).
static void holes(void) {
    enum { HOLES = 8, LEN = 16 };
    unsigned char seen[LEN];
    char *at[HOLES];
    for (int i = 0; i < HOLES; i++) {
        at[i] = mmap(NULL, (LEN << i) * PAGE, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(at[i] != MAP_FAILED, "mmap");
        // Keeps neighbours from becoming one mapping.
        CHECK(mmap(NULL, PAGE, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0) != MAP_FAILED, "mmap");
    }
    // The program's own mappings are made before the holes.
    struct region r = fill(1024, 256, 1000);
    FILE *maps = fopen("/proc/thread-self/maps", "r");
    CHECK(maps && getc(maps) != EOF, "maps");
    kept_maps = maps;
    for (int i = 0; i < HOLES; i++) CHECK(munmap(at[i], (LEN << i) * PAGE) == 0, "munmap");
    mark_mergeable(&r);
    wait_merged(&r, r.pages / 2);
    nap(1500);
    for (int i = 0; i < HOLES; i++)
        for (size_t page = 0; page < (size_t)LEN << i; page++)
            CHECK(mincore(at[i] + page * PAGE, PAGE, seen) == -1 && errno == ENOMEM, "something came to page %zu of hole %d", page, i);
    check(&r, "beside holes");
}

// Prints the address of a large block.
static void place(void) { printf("%p\n", mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)); }

// A call with a length that the kernel refuses, or treats as zero, changes neither bytes nor the agent's records of memory above.
static void lengths(void) {
    struct region one = fill(512, 4, 3000), two = fill(512, 4, 3000);
    struct region low = one.at < two.at ? one : two, above = one.at < two.at ? two : one;
    const size_t bad = -PAGE;
    mark_mergeable(&above);
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
    // To a place that is given: nothing, over itself, and beyond what a program may have.
    const long moves[][2] = {{0, (long)low.at + 8 * PAGE}, {4 * PAGE, (long)low.at + PAGE}, {4 * PAGE, (1L << 47) - 2 * PAGE}};
    for (size_t i = 0; i < sizeof moves / sizeof *moves; i++) {
        const long len = moves[i][0], target = moves[i][1];
        const int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
        long said = raw(SYS_mremap, (long)low.at, len, len, flags, target, 0);
        CHECK(said < 0 && said > -4096, "mremap to %lx", target);
        errno = 0;
        CHECK(mremap(low.at, len, len, flags, target) == MAP_FAILED && errno == -said, "mremap to %lx, not %ld", target, said);
    }
    CHECK(mmap(low.at, bad, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED, "mmap");
    for (int i = 0; i < 2; i++) {
        long said = raw(SYS_mlock, (long)low.at, i ? -1 : (long)bad, 0, 0, 0, 0);
        CHECK(mlock(low.at, i ? -1 : (long)bad) == (said ? -1 : 0) && (said == 0 || errno == -said), "mlock, not %ld", said);
        CHECK(munlock(low.at, i ? -1 : (long)bad) == (i ? 0 : -1), "munlock");
    }
    CHECK(pool_pages(above.at, above.pages * PAGE) >= 384, "what lies above a refused length was given back");
    check(&above, "above lengths that were refused");
    // Memory around a hole is marked; the call reports the hole as the kernel does, if the kernel has KSM.
    char *parted = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(parted != MAP_FAILED && munmap(parted + PAGE, PAGE) == 0, "a hole");
    errno = 0;
    long hole = raw(SYS_madvise, (long)parted, 3 * PAGE, MADV_MERGEABLE, 0, 0, 0) == -ENOMEM ? ENOMEM : 0;
    CHECK(madvise(parted, 3 * PAGE, MADV_MERGEABLE) == (hole ? -1 : 0) && errno == hole, "MADV_MERGEABLE of a hole: %d", errno);
    // The memory above is not recorded as mergeable either.
    CHECK(madvise(above.at, above.pages * PAGE, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE");
    madvise(low.at, bad, MADV_MERGEABLE);
    struct region r = merged(1024);
    nap(1000);
    CHECK(shown_pages(above.at, above.pages * PAGE) == 0, "what lies above a refused length is merged");
    check(&above, "left alone");
    check(&low, "left alone");
    check(&r, "in the end");
}

// A run of equal pages crosses from one mapping into the next and is merged by predicted slots: merged pages are not frozen
// again, and the agent receives an event of every discard.
static void straddle(void) {
    const size_t pages = 8192, border = 3000;
    struct region twins[] = {fill(pages, pages, 1000), fill(pages, pages, 1000), fill(pages, pages, 1000)};
    for (int i = 0; i < 3; i++) {
        struct region *r = &twins[i];
        madvise(r->at, pages * PAGE, MADV_NOHUGEPAGE);
        // Splits the third copy into two mappings.
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

// The program needs mappings up to the kernel's limit after many pages were merged one by one.
static void mappings(void) {
    long wanted = 30000;
    struct region r = fill(24000, 1, 1000);
    // Every second page has a twin, so each merged page needs a mapping.
    for (size_t i = 1; i < r.pages; i += 2) fill_page(r.at + i * PAGE, 1u << 20 | i);
    mark_mergeable(&r);
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
        CHECK(mprotect(at + 4 * i * PAGE, PAGE, PROT_READ | PROT_WRITE) == 0, "mapping %ld of %ld: the merger used up the program's mappings", 2 * i, wanted);
    for (size_t i = 0; i < r.pages; i++) CHECK(page_is(r.at + i * PAGE, i % 2 ? 1u << 20 | i : 1000), "page %zu is wrong", i);
    // At the limit the program gets an error; its memory stays right.
    long more = wanted / 2;
    while (more < wanted / 2 * 2 && mprotect(at + 4 * more * PAGE, PAGE, PROT_READ | PROT_WRITE) == 0) more++;
    for (size_t i = 0; i < r.pages; i += 2) fill_page(r.at + i * PAGE, 33);
    nap(1500);
    for (size_t i = 0; i < r.pages; i++) CHECK(page_is(r.at + i * PAGE, i % 2 ? 1u << 20 | i : 33), "at the limit page %zu is wrong", i);
    printf("%zu pages merged one by one\n", last);
}

// Scattered writes into memory that was merged in long runs leave most of the mappings to the program.
static void scatter(void) {
    struct region r = fill(48000, 24000, 1000);
    mark_mergeable(&r);
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

// Large blocks lie side by side and form one mapping, as without an agent: the number of mappings is limited.
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

const struct scenario mappings_scenarios[] = {
    {"unmap", unmap},
    {"failed-maps", failed_maps},
    {"holes", holes},
    {"place", place},
    {"lengths", lengths},
    {"straddle", straddle},
    {"side-by-side", side_by_side},
    {"scatter", scatter},
    {"mappings", mappings},
    {0},
};
