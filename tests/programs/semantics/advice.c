// What a program says about its memory by madvise(2) is obeyed and kept.
#include "common.h"

// A program advises all anonymous memory in its list of mappings, the agent's included.
static void all_that_is_listed(void) {
    struct region r = merged(1024);
    char path[64], text[512] = "", line[512], mode[8];
    snprintf(path, sizeof path, "/proc/self/task/%ld/syscall", agent_thread());
    unsigned long stack = 0;
    for (double began = now(); !stack; nap(1)) {
        int file = open(path, O_RDONLY);
        if (file < 0 || read(file, text, sizeof text - 1) <= 0) SKIP("the kernel does not show the stacks of threads");
        close(file);
        // The number of the call, six arguments, stack pointer and program counter; or "running".
        if (sscanf(text, "%*s %*s %*s %*s %*s %*s %*s %lx", &stack) != 1) stack = 0;
        CHECK(now() - began < WAIT_MAX, "the agent never waits");
    }
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps, "maps");
    while (fgets(line, sizeof line, maps)) {
        unsigned long from, to, inode;
        int name = 0;
        if (sscanf(line, "%lx-%lx %7s %*s %*s %lu %n", &from, &to, mode, &inode, &name) != 4) continue;
        if (strcmp(mode, "rw-p") != 0 || inode != 0 || (line[name] && line[name] != '\n')) continue;
        madvise((void *)from, to - from, MADV_NOHUGEPAGE);
        CHECK(madvise((void *)from, to - from, MADV_MERGEABLE) == 0, "MADV_MERGEABLE of %s", line);
    }
    fclose(maps);
    struct region later = merged(1024);
    nap(1500);
    CHECK(!flag_at((void *)stack, " uw") && !flag_at((void *)stack, " um"), "the agent's own stack is managed");
    CHECK(madvise(r.at, 64 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    for (size_t i = 0; i < 64; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes", i);
    pid_t child = fork();
    if (child == 0) {
        check(&later, "in a child");
        _exit(0);
    }
    CHECK(ended_well(child), "the child was wrong");
    check(&later, "in the end");
}

static void unmergeable(void) {
    struct region r = merged(1024);
    CHECK(madvise(r.at, r.pages * PAGE, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE");
    CHECK(shown_pages(r.at, r.pages * PAGE) == 0, "pages are still shared");
    check(&r, "unmerged");
    nap(800);
    CHECK(shown_pages(r.at, r.pages * PAGE) == 0, "pages were merged against the program's advice");
    write_all(&r, 71000, "after MADV_UNMERGEABLE");
    // The call reports a hole after it has handled the rest.
    struct region parted = merged(1024);
    CHECK(munmap(parted.at + 1023 * PAGE, PAGE) == 0, "a hole");
    parted.pages = 1023;
    errno = 0;
    CHECK(madvise(parted.at, 1024 * PAGE, MADV_UNMERGEABLE) == -1 && errno == ENOMEM, "MADV_UNMERGEABLE of a hole");
    CHECK(shown_pages(parted.at, parted.pages * PAGE) == 0, "pages before a hole are still shared");
    struct region later = merged(1024);
    nap(1000);
    CHECK(shown_pages(parted.at, parted.pages * PAGE) == 0, "pages before a hole were merged against the program's advice");
    check(&parted, "before a hole");
    check(&later, "in the end");
}

struct watched {
    struct region *r;
    size_t looks;
    atomic_int end;
};

// Whenever another thread looks, no part of the region can be had by a child or a dump: its pages are replaced all the while.
static void *watch_flags(void *argument) {
    struct watched *watched = argument;
    unsigned long start = (unsigned long)watched->r->at, end = start + watched->r->pages * PAGE;
    for (; !atomic_load(&watched->end); watched->looks++) {
        FILE *smaps = fopen("/proc/self/smaps", "r");
        CHECK(smaps, "smaps");
        char line[512];
        unsigned long from = 0, to = 0;
        char mode[8];
        while (fgets(line, sizeof line, smaps)) {
            unsigned long first, last;
            if (sscanf(line, "%lx-%lx %4s", &first, &last, mode) == 3) from = first, to = last;
            if (from >= end || to <= start || strncmp(line, "VmFlags:", 8)) continue;
            CHECK(strstr(line, " dc"), "%lx-%lx is without DONTFORK for a while", from, to);
            CHECK(strstr(line, " dd"), "%lx-%lx is without DONTDUMP for a while", from, to);
        }
        fclose(smaps);
    }
    return NULL;
}

static void flags(void) {
    struct region r = fill(1024, 256, 1000);
    madvise(r.at, r.pages * PAGE, MADV_HUGEPAGE);
    int merges = madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0 && flag_at(r.at, " mg");
    int huge = flag_at(r.at, " hg");
    CHECK(madvise(r.at, r.pages * PAGE, MADV_DONTFORK) == 0, "MADV_DONTFORK");
    CHECK(madvise(r.at, r.pages * PAGE, MADV_DONTDUMP) == 0, "MADV_DONTDUMP");
    struct watched watched = {.r = &r};
    pthread_t watcher;
    pthread_create(&watcher, NULL, watch_flags, &watched);
    wait_merged(&r, 700);
    for (size_t i = 0; i < r.pages; i += 61) {
        void *at = r.at + i * PAGE;
        CHECK(flag_at(at, " dc"), "page %zu lost DONTFORK", i);
        CHECK(flag_at(at, " dd"), "page %zu lost DONTDUMP", i);
        CHECK(!merges || flag_at(at, " mg"), "page %zu lost MERGEABLE", i);
        CHECK(!huge || flag_at(at, " hg"), "page %zu lost HUGEPAGE", i);
    }
    // The flags survive copy on write and unsharing, and a discard.
    for (size_t i = 0; i < 256; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    nap(1500);
    CHECK(madvise(r.at + 300 * PAGE, 100 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    for (size_t i = 0; i < 450; i += 7) {
        void *at = r.at + i * PAGE;
        CHECK(flag_at(at, " dc"), "page %zu lost DONTFORK later", i);
        CHECK(flag_at(at, " dd"), "page %zu lost DONTDUMP later", i);
    }
    atomic_store(&watched.end, 1);
    pthread_join(watcher, NULL);
    CHECK(watched.looks > 100, "%zu looks only", watched.looks);
    pid_t child = fork();
    if (child == 0) _exit(faults(r.at + 40 * PAGE, 0) && faults(r.at + 350 * PAGE, 0) ? 0 : 1);
    CHECK(ended_well(child), "the child has memory that is marked MADV_DONTFORK");
    // The calls report a hole after they have handled the rest.
    struct region parted = fill(1024, 256, 1000);
    CHECK(munmap(parted.at + 1023 * PAGE, PAGE) == 0, "a hole");
    parted.pages = 1023;
    madvise(parted.at, parted.pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(madvise(parted.at, 1024 * PAGE, MADV_DONTFORK) == -1 && errno == ENOMEM, "MADV_DONTFORK of a hole");
    CHECK(madvise(parted.at, 1024 * PAGE, MADV_DONTDUMP) == -1 && errno == ENOMEM, "MADV_DONTDUMP of a hole");
    madvise(parted.at, parted.pages * PAGE, MADV_MERGEABLE);
    wait_merged(&parted, 700);
    for (size_t i = 0; i < parted.pages; i += 61)
        CHECK(flag_at(parted.at + i * PAGE, " dc") && flag_at(parted.at + i * PAGE, " dd"), "page %zu before a hole lost a flag", i);
}

static void *change_rights_beside(void *end) {
    char *beside = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    while (!atomic_load((atomic_int *)end))
        for (int i = 0; i < 64; i++) mprotect(beside + i * PAGE, PAGE, i % 2 ? PROT_READ : PROT_READ | PROT_WRITE);
    munmap(beside, 64 * PAGE);
    return NULL;
}

// Bare discards while other threads make calls that the agent's library sees.
static void flags_raw(void) {
    struct region r = fill(1024, 256, 1000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(madvise(r.at, r.pages * PAGE, MADV_DONTFORK) == 0, "MADV_DONTFORK");
    CHECK(madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    wait_merged(&r, r.pages);
    // A new mapping is registered a moment after it appears.
    nap(500);
    atomic_int end = 0;
    pthread_t others[3];
    for (int i = 0; i < 3; i++) pthread_create(&others[i], NULL, change_rights_beside, &end);
    for (size_t i = 0; i < r.pages; i += 8)
        CHECK(raw(SYS_madvise, (long)r.at + i * PAGE, 4 * PAGE, MADV_DONTNEED, 0, 0, 0) == 0, "raw MADV_DONTNEED");
    for (size_t i = 0; i < r.pages; i++)
        CHECK(i % 8 < 4 ? page_is_zero(r.at + i * PAGE) : page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu", i);
    atomic_store(&end, 1);
    for (int i = 0; i < 3; i++) pthread_join(others[i], NULL);
    double began = now();
    for (size_t i = 0; i < r.pages; i += 4)
        while (!flag_at(r.at + i * PAGE, " dc") || (i % 8 < 4 && !flag_at(r.at + i * PAGE, " nh"))) {
            CHECK(now() - began < WAIT_MAX, "page %zu lost DONTFORK or NOHUGEPAGE", i);
            nap(50);
        }
}

// The program marks more parts of memory than the agent can record. The agent ends, and the program stays right.
static void marks(void) {
    enum { MARKS = 20000 };
    struct region r = merged(1024);
    char *marked = mmap(NULL, 2 * MARKS * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(marked != MAP_FAILED, "mmap");
    for (size_t i = 0; i < MARKS; i++) CHECK(madvise(marked + 2 * i * PAGE, PAGE, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE");
    check(&r, "after the marks");
    CHECK(madvise(r.at, 512 * PAGE, MADV_DONTFORK) == 0, "MADV_DONTFORK");
    CHECK(madvise(r.at + 100 * PAGE, 100 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    for (size_t i = 100; i < 200; i++) {
        CHECK(flag_at(r.at + i * PAGE, " dc"), "page %zu lost DONTFORK", i);
        CHECK(page_is_zero(r.at + i * PAGE), "page %zu is not zero", i);
    }
    for (size_t i = 100; i < 200; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    check(&r, "after the discard");
    CHECK(pool_pages(r.at, r.pages * PAGE) == 0, "%zu pages are still merged", pool_pages(r.at, r.pages * PAGE));
    struct region more = fill(1024, 256, 1000);
    CHECK(madvise(more.at, more.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    nap(1500);
    CHECK(pool_pages(more.at, more.pages * PAGE) == 0, "there is still an agent");
    check(&more, "with no agent");
}

const struct scenario advice_scenarios[] = {
    {"all-that-is-listed", all_that_is_listed},
    {"unmergeable", unmergeable},
    {"flags", flags},
    {"flags-raw", flags_raw},
    {"marks", marks},
    {0},
};
