// Transparent huge pages, split or merged whole.
#include "common.h"

static void huge(void) {
    size_t len = 16 * MIB;
    char *at = mmap(NULL, len + 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    at = (char *)(((unsigned long)at + 2 * MIB - 1) & ~(2 * MIB - 1));
    if (madvise(at, len, MADV_HUGEPAGE) != 0) SKIP("no transparent huge pages");
    struct region r = {at, len / PAGE, 512, 5000};
    for (size_t i = 0; i < r.pages; i++) fill_page(at + i * PAGE, number_of(&r, i));
    madvise(at, len, MADV_MERGEABLE);
    wait_merged(&r, r.pages / 2);
    check(&r, "huge");
    write_all(&r, 81000, "in split huge pages");
}

// Maps memory for `chunks` huge pages.
static char *huge_pages(size_t chunks) {
    char *at = mmap(NULL, (chunks + 1) * 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED, "mmap");
    at = (char *)(((unsigned long)at + 2 * MIB - 1) & ~(2 * MIB - 1));
    if (madvise(at, chunks * 2 * MIB, MADV_HUGEPAGE) != 0) SKIP("no transparent huge pages");
    return at;
}

// The field `name` of smaps in KiB, summed over the mappings of the chunks.
static size_t smaps_of(const char *at, size_t chunks, const char *name) {
    FILE *file = fopen("/proc/thread-self/smaps", "r");
    CHECK(file, "smaps");
    char line[512];
    unsigned long from = 0, to = 0, all = 0;
    size_t length = strlen(name);
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) continue;
        if (from >= (unsigned long)at + chunks * 2 * MIB || to <= (unsigned long)at) continue;
        if (strncmp(line, name, length) == 0) all += strtoul(line + length, NULL, 10);
    }
    fclose(file);
    return all;
}

// Three copies of the same 24 MiB: two aligned, one shifted by 37 pages and followed by zeros.
static void huge_whole(void) {
    enum { EACH = 6144, CHUNKS = 3 * EACH / 512 + 2 };
    char *at = huge_pages(CHUNKS);
    for (size_t i = 0; i < EACH; i++) {
        fill_page(at + i * PAGE, 7000 + i);
        fill_page(at + (EACH + i) * PAGE, 7000 + i);
        fill_page(at + (2 * EACH + 37 + i) * PAGE, 7000 + i);
    }
    // Zeros fill the rest of the last chunk of the shifted copy, and one more chunk.
    memset(at + (3 * EACH + 37) * PAGE, 0, 2 * 512 * PAGE - 37 * PAGE);
    if (smaps_of(at, CHUNKS, "AnonHugePages:") < CHUNKS * 2048) SKIP("the kernel has no free huge pages");
    CHECK(madvise(at, CHUNKS * 2 * MIB, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    struct region r = {at, 3 * EACH, EACH, 7000};
    wait_merged(&r, 3 * EACH - 40);
    puts("merged");
    fflush(stdout);
    CHECK(getchar() == '\n', "a line");
    pid_t child = fork();
    if (child == 0) {
        for (double began = now(); shown_pages(at, r.pages * PAGE) < 3 * EACH - 40; nap(10))
            CHECK(now() - began < WAIT_MAX, "only %zu pages are there in a child", shown_pages(at, r.pages * PAGE));
        CHECK(smaps_of(at, CHUNKS, "ShmemPmdMapped:") + smaps_of(at, CHUNKS, "FilePmdMapped:") == 0, "a huge page of the pool's");
        for (size_t i = 0; i < 2 * EACH; i += 512) fill_page(at + i * PAGE, 5);
        for (size_t i = 0; i < 2 * EACH; i++) CHECK(page_is(at + i * PAGE, i % 512 ? 7000 + i % EACH : 5), "page %zu of a child", i);
        _exit(0);
    }
    CHECK(child > 0 && ended_well(child), "a child");
    CHECK(smaps_of(at, CHUNKS, "ShmemPmdMapped:") + smaps_of(at, CHUNKS, "FilePmdMapped:") == 0, "a huge page of the pool's");
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < EACH; i++) {
            uint64_t number = 7000 + 100000 * round + i;
            CHECK(page_is(at + i * PAGE, number), "page %zu of the first", i);
            CHECK(page_is(at + (EACH + i) * PAGE, number), "page %zu of the second", i);
            CHECK(page_is(at + (2 * EACH + 37 + i) * PAGE, number), "page %zu of the shifted", i);
        }
        for (size_t i = 2 * EACH; i < 2 * EACH + 37; i++) CHECK(page_is_zero(at + i * PAGE), "page %zu is not zero", i);
        for (size_t i = 3 * EACH + 37; i < 3 * EACH + 1024; i++) CHECK(page_is_zero(at + i * PAGE), "page %zu is not zero", i);
        for (size_t i = 0; i < EACH; i++) {
            fill_page(at + i * PAGE, 107000 + i);
            fill_page(at + (EACH + i) * PAGE, 107000 + i);
            fill_page(at + (2 * EACH + 37 + i) * PAGE, 107000 + i);
        }
    }
}

// Huge pages are written, read and discarded, each at its own time, while they are merged whole.
static void huge_writers(void) {
    enum { CHUNKS = 12 };
    char *at = huge_pages(CHUNKS);
    uint64_t counts[CHUNKS][512] = {{0}};
    double due[CHUNKS], began = now();
    int step[CHUNKS] = {0};
    uint64_t seed = 99;
    size_t most = 0, rounds = 0;
    for (size_t c = 0; c < CHUNKS; c++) due[c] = began;
    CHECK(madvise(at, CHUNKS * 2 * MIB, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    while (now() - began < 12 || (most < 512 && now() - began < 100)) {
        for (size_t c = 0; c < CHUNKS; c++) {
            if (now() < due[c]) continue;
            char *chunk = at + c * 2 * MIB;
            size_t shared = pool_pages(chunk, 2 * MIB);
            if (shared > most) most = shared;
            if (step[c] == 0) {
                // Half of the discards are bare calls, which may reach the agent while it has the pages frozen.
                long done = draw(&seed) % 2 ? syscall(SYS_madvise, chunk, 2 * MIB, MADV_DONTNEED)
                                            : madvise(chunk, 2 * MIB, MADV_DONTNEED);
                CHECK(done == 0, "MADV_DONTNEED");
                for (size_t i = 0; i < 512; i++) {
                    CHECK(page_is_zero(chunk + i * PAGE), "page %zu of %zu after a discard", i, c);
                    fill_page(chunk + i * PAGE, 31000 + i % 256);
                    counts[c][i] = *(uint64_t *)(chunk + i * PAGE);
                }
                rounds++;
            } else {
                for (size_t i = 0; i < 3; i++) {
                    size_t page = draw(&seed) % 512;
                    CHECK(*(uint64_t *)(chunk + page * PAGE) == counts[c][page], "page %zu of %zu lost a write", page, c);
                    *(uint64_t *)(chunk + page * PAGE) = ++counts[c][page];
                }
                for (size_t i = 0; i < 512; i++) {
                    uint64_t *words = (uint64_t *)(chunk + i * PAGE);
                    CHECK(words[0] == counts[c][i], "page %zu of %zu has another count", i, c);
                    for (size_t w = 1; w < 512; w++) CHECK(words[w] == word(31000 + i % 256, w), "page %zu of %zu", i, c);
                }
            }
            step[c] = (step[c] + 1) % 4;
            // Some steps fall into the merge, some come before it, some long after.
            due[c] = now() + (step[c] == 1 ? 0.10 + draw(&seed) % 500 / 1000.0 : 0.002 + draw(&seed) % 40 / 1000.0);
        }
        nap(1);
    }
    CHECK(most >= 512, "no huge page was ever merged, in %zu rounds: %zu pages", rounds, most);
}

const struct scenario huge_scenarios[] = {
    {"huge", huge},
    {"huge-whole", huge_whole},
    {"huge-writers", huge_writers},
    {0},
};
