// Programs under `--manage all` or PR_SET_MEMORY_MERGE, and the allocator and the heap there.
#include "common.h"

#include <malloc.h>

static void blocks(void) {
    enum { BLOCKS = 24 };
    static char *block[BLOCKS];
    static size_t pages[BLOCKS];
    uint64_t seed = 99;
    size_t most = 0;
    for (int round = 0; round < 600; round++) {
        size_t i = draw(&seed) % BLOCKS;
        size_t old = pages[i], count = 300 + draw(&seed) % 700;
        switch (draw(&seed) % 4) {
        case 0:
            free(block[i]);
            block[i] = calloc(count, PAGE);
            CHECK(block[i], "calloc");
            for (size_t p = 0; p < count; p++) CHECK(page_is_zero(block[i] + p * PAGE), "round %d: calloc gave old bytes in page %zu", round, p);
            break;
        case 1:
            free(block[i]);
            block[i] = malloc(count * PAGE);
            CHECK(block[i], "malloc");
            break;
        case 2: {
            char *moved = realloc(block[i], count * PAGE);
            CHECK(moved, "realloc");
            block[i] = moved;
            size_t kept = old < count ? old : count;
            for (size_t p = 0; p < kept; p++) CHECK(page_is(block[i] + p * PAGE, 100 + p % 32), "round %d: realloc lost page %zu", round, p);
            break;
        }
        default:
            count = old;
            for (size_t p = 0; p < count; p++) CHECK(page_is(block[i] + p * PAGE, 100 + p % 32), "round %d: page %zu is wrong", round, p);
            nap(draw(&seed) % 25);
        }
        pages[i] = count;
        for (size_t p = 0; p < count; p++) fill_page(block[i] + p * PAGE, 100 + p % 32);
        // Rest until much is merged, so that the next steps meet merged blocks.
        if (round % 200 == 100) {
            double began = now();
            size_t here;
            while ((here = pool_pages(NULL, ~0ul >> 1)) < 500 && now() - began < WAIT_MAX) nap(50);
            if (here > most) most = here;
        }
    }
    CHECK(most >= 500, "only %zu pages were ever merged", most);
}

// Blocks that are never freed, in the process and in a child, and a heap that only grows: no interposed call reports them.
static void blocks_kept(void) {
    enum { BLOCKS = 32, BLOCK_PAGES = 256, SMALL = 8192 };
    static char *block[2][BLOCKS];
    static uint64_t *small[SMALL];
    struct region r = merged(1024);
    for (int forked = 0; forked < 2; forked++) {
        pid_t child = forked ? fork() : 0;
        CHECK(child >= 0, "fork");
        if (child > 0) {
            CHECK(ended_well(child), "the child");
            break;
        }
        nap(2000);
        for (int i = 0; i < BLOCKS; i++) {
            char *at = block[forked][i] = malloc(BLOCK_PAGES * PAGE);
            CHECK(at, "malloc");
            for (size_t p = 0; p < BLOCK_PAGES; p++) fill_page(at + p * PAGE, 3000 + 100 * forked + p % 32);
        }
        for (size_t i = 0; i < BLOCKS; i++) {
            struct region one = {block[forked][i], BLOCK_PAGES, 32, 3000 + 100 * forked};
            wait_merged(&one, BLOCK_PAGES / 2);
            check(&one, "in a block");
        }
        if (forked) _exit(0);
    }
    // Blocks too small for mappings of their own; their pages are equal wherever they lie.
    nap(2000);
    for (size_t i = 0; i < SMALL; i++) {
        small[i] = calloc(8, 1024);
        CHECK(small[i], "calloc");
    }
    // MADV_DONTDUMP marks secrets: a part of the heap, and a whole block.
    char *secret = (char *)small[SMALL - 1] - 8 * MIB;
    secret -= (size_t)secret % PAGE;
    CHECK(madvise(secret, 4 * MIB, MADV_DONTDUMP) == 0, "MADV_DONTDUMP");
    char *hidden = malloc(4 * MIB);
    CHECK(hidden, "malloc");
    size_t head = (size_t)hidden % PAGE;
    CHECK(madvise(hidden - head, head + 4 * MIB, MADV_DONTDUMP) == 0, "MADV_DONTDUMP");
    // A failed realloc(3) does not end the block.
    void *(*volatile again)(void *, size_t) = realloc;
    CHECK(!again(hidden, (size_t)1 << 62), "realloc");
    memset(hidden, 77, 4 * MIB);
    for (size_t i = 0; i < SMALL; i++)
        for (size_t j = 0; j < 1024; j++) small[i][j] = 77;
    double began = now();
    size_t here, wanted = SMALL;
    char *first = (char *)small[0] - (size_t)small[0] % PAGE, *last = (char *)small[SMALL - 1];
    while ((here = pool_pages(first, last - first)) < wanted / 4) {
        CHECK(now() - began < WAIT_MAX, "only %zu of %zu pages of the heap were merged", here, wanted);
        nap(100);
    }
    nap(1500);
    CHECK(pool_pages(secret, 4 * MIB) == 0, "%zu secret pages of the heap were merged", pool_pages(secret, 4 * MIB));
    CHECK(pool_pages(hidden - head, head + 4 * MIB) == 0, "%zu pages of a secret block were merged", pool_pages(hidden - head, head + 4 * MIB));
    for (size_t i = 0; i < SMALL; i++)
        for (size_t j = 0; j < 1024; j++) CHECK(small[i][j] == 77, "block %zu is wrong", i);
    check(&r, "after all");
}

static void all_memory(int by_prctl) {
    if (by_prctl) CHECK(prctl(67 /* PR_SET_MEMORY_MERGE */, 1, 0, 0, 0) == 0 || errno == EINVAL, "PR_SET_MEMORY_MERGE");
    struct region r = fill(2048, 64, 7000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    wait_merged(&r, 1500);
    check(&r, "with all memory managed");
    write_all(&r, 21000, "with all memory managed");
}

// Maps 256 KiB as one kind of allocator does, apart from all other mappings, and fills them.
static struct region small_mapping(int kind, uint64_t base) {
    enum { PAGES = 64, LEN = PAGES * 4096 };
    const int plain = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, open = PROT_READ | PROT_WRITE;
    char *at = mmap(NULL, 3 * LEN, PROT_NONE, plain, -1, 0);
    CHECK(at != MAP_FAILED, "a reservation");
    switch (kind) {
    case 0:
        // The middle of a reservation is opened, and the rest is unmapped.
        CHECK(munmap(at, LEN) == 0 && munmap(at + 2 * LEN, LEN) == 0, "munmap");
        CHECK(mprotect(at + LEN, LEN, open) == 0, "mprotect");
        at += LEN;
        break;
    case 1:
        // A hint, where nothing lies any more.
        CHECK(munmap(at, 3 * LEN) == 0, "munmap");
        at = mmap(at + LEN, LEN, open, plain, -1, 0);
        break;
    default:
        // A guard page at each end.
        CHECK(munmap(at, 3 * LEN) == 0, "munmap");
        at = mmap(NULL, LEN + 2 * PAGE, open, plain, -1, 0);
        CHECK(at != MAP_FAILED && mprotect(at, PAGE, PROT_NONE) == 0, "a guard page");
        at += PAGE;
        CHECK(mprotect(at + LEN, PAGE, PROT_NONE) == 0, "a guard page");
    }
    CHECK(at != MAP_FAILED, "mmap");
    struct region r = {at, PAGES, PAGES, base};
    for (size_t i = 0; i < PAGES; i++) CHECK(page_is_zero(at + i * PAGE), "fresh page %zu is not zero", i);
    for (size_t i = 0; i < PAGES; i++) fill_page(at + i * PAGE, number_of(&r, i));
    return r;
}

// Memory in mappings of 256 KiB, as that of JavaScript; later every second one is unmapped and another mapped.
static void small_mappings(void) {
    enum { COUNT = 48, KINDS = 3 };
    struct region r[COUNT];
    for (int i = 0; i < COUNT; i++) r[i] = small_mapping(i % KINDS, 5000);
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < COUNT; i++) wait_merged(&r[i], r[i].pages / 2);
        for (int i = 0; i < COUNT; i++) check(&r[i], "while it is merged");
        for (int i = turn; i < COUNT; i += 2) {
            CHECK(munmap(r[i].at, r[i].pages * PAGE) == 0, "munmap");
            r[i] = small_mapping((i + turn) % KINDS, 6000);
        }
    }
    for (int i = 0; i < COUNT; i++) write_all(&r[i], 7000, "in the end");
    for (int i = 0; i < COUNT; i++) r[i].base = 7000, check(&r[i], "after all were written");
}

// More separate mappings than one list holds: those with the highest addresses are managed as well.
static void many_mappings(void) {
    enum { COUNT = 3000, PAGES = 32, FILLED = 4 };
    const size_t step = (PAGES + 1) * PAGE;
    char *at = mmap(NULL, COUNT * step, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(at != MAP_FAILED, "a reservation");
    struct region r[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        r[i] = (struct region){at + i * step, FILLED, FILLED, 5000};
        CHECK(mprotect(r[i].at, PAGES * PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
        for (size_t page = 0; page < FILLED; page++) fill_page(r[i].at + page * PAGE, number_of(&r[i], page));
    }
    for (int turn = 0; turn < 2; turn++) {
        wait_merged(&r[COUNT - 1], FILLED);
        struct region all = {at, COUNT * step / PAGE, 1, 0};
        wait_merged(&all, COUNT * FILLED / 10 * 9);
        for (size_t i = 0; i < COUNT; i++) check(&r[i], "while it is merged");
        for (size_t i = turn; i < COUNT; i += 7) {
            r[i].base = 6000 + turn;
            for (size_t page = 0; page < FILLED; page++) fill_page(r[i].at + page * PAGE, number_of(&r[i], page));
        }
    }
    for (size_t i = 0; i < COUNT; i++) check(&r[i], "in the end");
}

// The program has reserved far more address space than the machine has memory, before it maps anything.
static void all_after_reservations(void) {
    for (int i = 0; i < 64; i++) {
        CHECK(mmap(NULL, 1ul << 62, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED, "mmap");
        void *at = mmap(NULL, 4ul << 40, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(at != MAP_FAILED && munmap(at, 4ul << 40) == 0, "a reservation");
    }
    // These reservations use up the rest of the agent's zone.
    for (int i = 0; i < 4096; i++) {
        void *at = mmap(NULL, 1ul << 30, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(at != MAP_FAILED && munmap(at, 1ul << 30) == 0, "a small reservation");
    }
    all_memory(0);
}

static void all(void) { all_memory(0); }
static void memory_merge(void) { all_memory(1); }

// Asks for all memory to be merged, and after a line of input for none, while no mapping changes.
static void memory_merge_ends(void) {
    struct region r;
    char line[64];
    for (int on = 1; on >= 0; on--) {
        CHECK(prctl(67, on, 0, 0, 0) == 0 || errno == EINVAL, "PR_SET_MEMORY_MERGE");
        if (on) r = fill(4096, 4096, 1000);
        CHECK(write(1, "done\n", 5) == 5 && read(0, line, sizeof line) > 0, "no line of input");
    }
    check(&r, "let alone");
}

// Whether any page is merged; reads the list of mappings without the allocator.
static int shows_pool(void) {
    static char text[1 << 20];
    size_t len = 0;
    int file = open("/proc/self/maps", O_RDONLY);
    for (ssize_t got; file >= 0 && (got = read(file, text + len, sizeof text - 1 - len)) > 0;) len += got;
    text[len] = 0;
    close(file);
    for (char *line = text, *next; *line; line = next) {
        char *end = strchr(line, '\n'), *mode = strchr(line, ' ');
        next = end ? end + 1 : line + strlen(line);
        if (end) *end = 0;
        // Shared mappings are the agent's own.
        if (mode && mode[4] == 'p' && strstr(mode, "memfd:pagefold-pool")) return 1;
    }
    return 0;
}

// The heap shrinks and grows again while it is being merged, as inside malloc(3) and free(3).
static void heap(void) {
    const size_t pages = 8192, top = 512;
    const long len = (pages + top) * PAGE;
    uint64_t seed = getpid();
    size_t turns = 0, merging = 0;
    for (double began = now(); now() - began < 25 || (merging < 20 && now() - began < 100); turns++) {
        char *at = sbrk(len);
        CHECK(at != (char *)-1, "the heap does not grow in turn %zu", turns);
        for (size_t i = 0; i < pages + top; i++) memset(at + i * PAGE, 1 + i % 50, PAGE);
        // A new block makes the agent list the mappings again.
        void *block = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(block != MAP_FAILED, "mmap");
        int here = 0;
        // On a busy machine merging starts late.
        double patience = now() - began < 25 ? 0.6 : 4;
        for (double waited = now(); !here && now() - waited < patience; usleep(300)) here = shows_pool();
        merging += here;
        usleep(draw(&seed) % 12000);
        munmap(block, 2 * MIB);
        CHECK(sbrk(-len) != (void *)-1, "the heap does not shrink in turn %zu", turns);
        if (draw(&seed) % 2) usleep(draw(&seed) % 300);
        CHECK(sbrk(len) == at, "the heap does not grow again in turn %zu", turns);
        for (size_t i = 0; i < pages + top; i++) CHECK(page_is_zero(at + i * PAGE), "fresh page %zu is not zero in turn %zu", i, turns);
        for (size_t i = 0; i < pages + top; i++) memset(at + i * PAGE, 200 + i % 7, PAGE);
        usleep(3000);
        for (size_t i = 0; i < pages + top; i++)
            for (size_t j = 0; j < PAGE; j += 512)
                CHECK(at[i * PAGE + j] == (char)(200 + i % 7), "page %zu is wrong in turn %zu", i, turns);
        CHECK(sbrk(-len) != (void *)-1, "the heap does not shrink in turn %zu", turns);
    }
    CHECK(merging >= 20, "only %zu of %zu turns saw a heap that was being merged", merging, turns);
    printf("%zu of %zu turns while merging\n", merging, turns);
}

// The program frees malloc(3) blocks that it has marked mergeable while they are merged, and allocates new ones in their place.
static void marked_blocks(void) {
    enum { PAGES = 80, INSIDE = PAGES - 2 };
    struct region r = merged(1024);
    // Every block has a mapping of its own, even after other blocks were freed.
    CHECK(mallopt(M_MMAP_THRESHOLD, 128 << 10) == 1, "mallopt");
    size_t ended = 0, turns = 0;
    for (double began = now(); ended < 10; turns++) {
        CHECK(now() - began < WAIT_MAX, "only %zu of %zu blocks ended while they were merged", ended, turns);
        char *block = malloc(PAGES * PAGE - 32), *at = block + PAGE - (size_t)block % PAGE;
        CHECK(block, "malloc");
        for (size_t i = 0; i < INSIDE; i++) fill_page(at + i * PAGE, 1000 + i % 7);
        madvise(at, INSIDE * PAGE, MADV_MERGEABLE);
        // Frozen pages are absent for a moment.
        int frozen = 0;
        for (double waited = now(); !frozen && now() - waited < 1;) {
            unsigned char seen[INSIDE];
            CHECK(mincore(at, INSIDE * PAGE, seen) == 0, "mincore");
            for (size_t i = 0; i < INSIDE; i++) frozen |= !(seen[i] & 1);
        }
        ended += frozen;
        free(block);
        uint64_t *fresh = calloc(PAGES * PAGE / 8 - 4, 8);
        CHECK(fresh, "calloc");
        usleep(2000);
        for (size_t i = 0; i < PAGES * PAGE / 8 - 4; i++) CHECK(fresh[i] == 0, "turn %zu: word %zu of a fresh block is old", turns, i);
        free(fresh);
    }
    check(&r, "after all");
}

const struct scenario all_memory_scenarios[] = {
    {"blocks", blocks},
    {"blocks-kept", blocks_kept},
    {"marked-blocks", marked_blocks},
    {"heap", heap},
    {"all", all},
    {"small-mappings", small_mappings},
    {"many-mappings", many_mappings},
    {"all-after-reservations", all_after_reservations},
    {"memory-merge", memory_merge},
    {"memory-merge-ends", memory_merge_ends},
    {0},
};
