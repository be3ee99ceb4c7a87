#include "common.h"
#include "../bare_call.h"

#include <dirent.h>
#include <setjmp.h>
#include <sys/prctl.h>

FILE *kept_maps;

void nap(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000l};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {
    }
}

void fill_page(void *page, uint64_t number) {
    uint64_t *words = page;
    for (size_t i = 0; i < 512; i++) words[i] = word(number, i);
}

int page_is(const void *page, uint64_t number) {
    const uint64_t *words = page;
    for (size_t i = 0; i < 512; i++)
        if (words[i] != word(number, i)) return 0;
    return 1;
}

int page_is_zero(const void *page) {
    const uint64_t *words = page;
    for (size_t i = 0; i < 512; i++)
        if (words[i]) return 0;
    return 1;
}

long raw(long number, long a, long b, long c, long d, long e, long f) { return bare_call(number, a, b, c, d, e, f); }

size_t pool_pages(const void *start, size_t len) {
    FILE *maps = kept_maps ? kept_maps : fopen("/proc/thread-self/maps", "r");
    if (!maps) return 0;
    rewind(maps);
    char line[512], mode[8];
    size_t pages = 0;
    while (fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        if (!strstr(line, "memfd:pagefold-pool") || sscanf(line, "%lx-%lx %7s", &from, &to, mode) != 3) continue;
        if (mode[3] != 'p') continue;
        unsigned long low = (unsigned long)start, high = low + len;
        if (from < low) from = low;
        if (to > high) to = high;
        if (from < to) pages += (to - from) / PAGE;
    }
    if (maps != kept_maps) fclose(maps);
    return pages;
}

size_t shown_pages(const void *start, size_t len) {
    int file = open("/proc/thread-self/pagemap", O_RDONLY);
    CHECK(file >= 0, "pagemap");
    size_t pages = 0;
    for (size_t at = 0; at < len; at += PAGE) {
        uint64_t entry = 0;
        CHECK(pread(file, &entry, 8, ((unsigned long)start + at) / PAGE * 8) == 8, "pagemap");
        pages += entry >> 63 & entry >> 61 & 1;
    }
    close(file);
    return pages;
}

struct region fill(size_t pages, size_t period, uint64_t base) {
    struct region r = {NULL, pages, period, base};
    r.at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(r.at != MAP_FAILED, "mmap");
    for (size_t i = 0; i < pages; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    return r;
}

void wait_merged(const struct region *r, size_t wanted) {
    double began = now();
    while (pool_pages(r->at, r->pages * PAGE) < wanted) {
        CHECK(now() - began < WAIT_MAX, "only %zu of %zu pages were merged", pool_pages(r->at, r->pages * PAGE), wanted);
        nap(20);
    }
}

void check(const struct region *r, const char *when) {
    for (size_t i = 0; i < r->pages; i++)
        CHECK(page_is(r->at + i * PAGE, number_of(r, i)), "page %zu is wrong %s", i, when);
}

void mark_mergeable(const struct region *r) {
    madvise(r->at, r->pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(madvise(r->at, r->pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
}

struct region merged(size_t pages) {
    struct region r = fill(pages, pages / 4, 1000);
    mark_mergeable(&r);
    wait_merged(&r, pages / 4 * 3);
    check(&r, "after merging");
    return r;
}

void write_all(struct region *r, uint64_t base, const char *when) {
    for (size_t i = 0; i < r->pages; i++) fill_page(r->at + i * PAGE, base + i);
    for (size_t i = 0; i < r->pages; i++) CHECK(page_is(r->at + i * PAGE, base + i), "page %zu lost a write %s", i, when);
}

static sigjmp_buf escape;
static void on_fault(int signal) { siglongjmp(escape, signal); }

int faults(volatile char *at, int write) {
    struct sigaction action = {.sa_handler = on_fault}, old_segv, old_bus;
    sigaction(SIGSEGV, &action, &old_segv);
    sigaction(SIGBUS, &action, &old_bus);
    int signal = sigsetjmp(escape, 1);
    if (signal == 0) {
        if (write) *at = 1;
        else (void)*at;
    }
    sigaction(SIGSEGV, &old_segv, NULL);
    sigaction(SIGBUS, &old_bus, NULL);
    return signal;
}

int ended_well(pid_t child) {
    int status;
    while (waitpid(child, &status, 0) < 0) CHECK(errno == EINTR, "waitpid");
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

long libc_advise(void *at, size_t len, int advice) { return madvise(at, len, advice); }
long syscall_advise(void *at, size_t len, int advice) { return syscall(SYS_madvise, at, len, advice); }
long raw_advise(void *at, size_t len, int advice) { return raw(SYS_madvise, (long)at, len, advice, 0, 0, 0); }

int flag_at(void *at, const char *flag) {
    FILE *smaps = fopen("/proc/self/smaps", "r");
    CHECK(smaps, "smaps");
    char line[512];
    int inside = 0, found = 0;
    while (fgets(line, sizeof line, smaps)) {
        unsigned long from, to;
        char mode[8];
        if (sscanf(line, "%lx-%lx %4s", &from, &to, mode) == 3) inside = from <= (unsigned long)at && (unsigned long)at < to;
        if (inside && strncmp(line, "VmFlags:", 8) == 0) found = strstr(line, flag) != NULL;
    }
    fclose(smaps);
    return found;
}

long agent_thread(void) {
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks, "/proc/self/task");
    long found = 0;
    for (struct dirent *task; (task = readdir(tasks));)
        if (task->d_name[0] != '.' && atol(task->d_name) != getpid()) found = atol(task->d_name);
    closedir(tasks);
    return found;
}

#if __GLIBC__ > 2 || __GLIBC_MINOR__ >= 34
pid_t plain_fork(void) { return _Fork(); }
#else
pid_t plain_fork(void) { return fork(); }
#endif
