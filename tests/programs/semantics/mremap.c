// mremap(2) of merged memory.
#include "common.h"

// A child moves a range with a hole, which the kernel moves as several mappings (since Linux 6.17) or refuses.
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
            CHECK(page_is(target + i * PAGE, number_of(r, i)), "page %zu is wrong after its move", i);
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
    // Merged memory does not grow in place: it would have to be copied while other threads may write.
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

// Of memory that moves as one, the first part is another mapping, which no userfaultfd watches. All of it moves (since Linux
// 6.17), or nothing.
static void move_several(void) {
    for (int keeps = 0; keeps < 2; keeps++) {
        const size_t part = 16;
        struct region r = fill(1024, 1024, 40000);
        for (size_t i = 0; i < 512; i++) fill_page(r.at + i * PAGE, 1000 + i % 128);
        mark_mergeable(&r);
        wait_merged(&r, 384);
        char *other = mmap(r.at, part * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        CHECK(other == r.at, "mmap");
        for (size_t i = 0; i < part; i++) fill_page(other + i * PAGE, 50000 + i);
        char *target = mmap(NULL, r.pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        int flags = MREMAP_MAYMOVE | MREMAP_FIXED | (keeps ? 4 /* MREMAP_DONTUNMAP */ : 0);
        char *moved = mremap(r.at, r.pages * PAGE, r.pages * PAGE, flags, target);
        CHECK(moved == target || (moved == MAP_FAILED && (errno == EFAULT || errno == EINVAL)), "mremap: %d", errno);
        if (moved == MAP_FAILED) moved = r.at;
        for (size_t i = 0; i < r.pages; i++) {
            size_t number = i < part ? 50000 + i : i < 512 ? 1000 + i % 128 : number_of(&r, i);
            CHECK(page_is(moved + i * PAGE, number), "page %zu is wrong after the move", i);
        }
    }
}

// A program that became another user cannot read /proc/self/pagemap; mremap(2) of two mappings returns what the kernel returns.
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

// A part of a mapping keeps its marks when the rest shrinks or moves.
static void remap_marked(void) {
    struct region r = fill(1024, 256, 1000);
    char *marked = r.at + 512 * PAGE;
    size_t len = 256 * PAGE;
    mark_mergeable(&r);
    CHECK(madvise(marked, len, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE");
    CHECK(mremap(r.at, r.pages * PAGE, 1000 * PAGE, 0) == r.at, "mremap to shrink");
    r.pages = 1000;
    wait_merged(&r, 600);
    nap(1000);
    CHECK(pool_pages(marked, len) == 0, "unmergeable memory is merged after the mapping shrank");
    // A kernel with KSM keeps the marks in two mappings, and may refuse to move them as one.
    char *moved = mremap(r.at, r.pages * PAGE, 1256 * PAGE, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED) return;
    marked += moved - r.at;
    r.at = moved;
    check(&r, "moved");
    wait_merged(&r, 600);
    nap(1000);
    CHECK(pool_pages(marked, len) == 0, "unmergeable memory is merged after the mapping moved");
    CHECK(madvise(marked, len, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    wait_merged(&r, 800);
}

// Parts that were merged and unshared stay separate mappings for the kernel, which moves only one at a time.
static void remap_healed(void) {
    struct region r = fill(1024, 1024, 5000);
    for (size_t i = 0; i < r.pages; i++)
        if (i / 16 % 2) fill_page(r.at + i * PAGE, 1000 + i % 16);
    mark_mergeable(&r);
    wait_merged(&r, 400);
    double began = now();
    while (pool_pages(r.at, r.pages * PAGE) > 0) {
        CHECK(now() - began < WAIT_MAX, "%zu pages are not unshared", pool_pages(r.at, r.pages * PAGE));
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

const struct scenario mremap_scenarios[] = {
    {"remap", remap},
    {"remap-several", move_several},
    {"remap-healed", remap_healed},
    {"remap-as-another", remap_as_another},
    {"remap-marked", remap_marked},
    {0},
};
