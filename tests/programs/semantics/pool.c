// The files of the pool: dead slots, and core dumps.
#include "common.h"

// Aborts with a core dump while all marker pages are merged.
static void core(void) {
    struct region r = fill(1024, 16, 424242);
    mark_mergeable(&r);
    wait_merged(&r, 1024);
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_CORE, &limit) == 0, "RLIMIT_CORE");
    abort();
}

// Counts the marker pages in the core file at `path`.
void core_check(const char *path) {
    int file = open(path, O_RDONLY);
    CHECK(file >= 0, "no core file");
    static char page[PAGE];
    size_t found = 0;
    while (read(file, page, PAGE) == (ssize_t)PAGE)
        for (uint64_t i = 0; i < 16; i++) found += page_is(page, 424242 + i);
    CHECK(found >= 1024, "the core holds %zu of 1024 merged pages", found);
}

// The inodes of the pool's files that this process or its agent maps, at most `max`.
static size_t pool_files(unsigned long *files, size_t max) {
    FILE *maps = fopen("/proc/thread-self/maps", "r");
    CHECK(maps, "maps");
    char line[512];
    size_t count = 0;
    while (fgets(line, sizeof line, maps)) {
        unsigned long inode;
        if (!strstr(line, "memfd:pagefold-pool") || sscanf(line, "%*s %*s %*s %*s %lu", &inode) != 1) continue;
        size_t at = 0;
        while (at < count && files[at] != inode) at++;
        if (at == count && count < max) files[count++] = inode;
    }
    fclose(maps);
    return count;
}

// Most merged pages are written and stay private: the rest is moved together into few files, and the memory of the old files
// is freed, except for less than one file.
static void decay(void) {
    struct region r = fill(16384, 8192, 1000);
    mark_mergeable(&r);
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

const struct scenario pool_scenarios[] = {
    {"core", core},
    {"decay", decay},
    {0},
};
