/* A client of the cold tier that knows what every byte of its memory must be. One command per line on standard input:
 *   check            compare every page            peek N     compare N pages at random
 *   write N          write N pages anew            discard N  MADV_DONTNEED of N short ranges, the C library's way
 *   rawdiscard N     the same by a bare system call  guard N  short ranges are guarded, touched, and free again
 *   fork | rawfork   a child compares every page   move       mremap of the whole memory to another address
 *   baremove         move by a bare system call
 *   clone3           as fork, by syscall(SYS_clone3); the child then installs a filter and discards
 *   barefork         the same by a bare system call
 *   waitfork         like rawfork; the child may also wait for its pages until it is killed
 *   fill             write every page
 *   partfork         as fork, but the first pages are not for the child (MADV_DONTFORK)
 *   populate         MADV_POPULATE_WRITE of all    hide      fork while the memory may not be touched (PROT_NONE)
 *   hidetrack        as track, while the other half may not be touched
 *   hidemove         moved by a handler on a small stack, while the memory may not be touched
 *   seal | rawseal   mseal(2) of the whole memory, the C library's way or by a bare system call
 *   unmap            a part is unmapped and mapped again
 *   block            malloc of a block of its own    grow       realloc of it to twice the size
 *   wipe             MADV_WIPEONFORK while threads write, and a fork
 *   track            a part is registered with a userfaultfd of its own, and let go
 *   storm MS         threads write, compare and discard for so long; work MS: without bare system calls
 *   advise pageout|cold|willneed                   lost       touch all; counts pages that end in SIGBUS
 * Each answers "right", or "refused" if there is no memory for it, or "wrong ..." and ends. */
#define _GNU_SOURCE
#include "bare_call.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL

static uint8_t *memory;
static size_t pages;
/* What each page holds: 0 nothing, else the seed of its content. */
static uint32_t *version;
static uint64_t seed = 88172645463325252ULL;

static uint64_t next(void) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed;
}

/* Kinds of content: one word, shared by many, text-like, noise. */
static void content(uint64_t *out, uint32_t page, uint32_t v) {
    if (v == 0) {
        memset(out, 0, PAGE);
        return;
    }
    uint64_t x;
    switch ((page + v) % 5) {
    case 0:
        for (size_t i = 0; i < PAGE / 8; i++) out[i] = 0x4141414141414141ULL * (v % 3 + 1);
        return;
    case 1:
        x = 0x9E3779B97F4A7C15ULL * (v % 7 + 1);
        break;
    case 2:
        x = 0x9E3779B97F4A7C15ULL * (page + 1) + v;
        for (size_t i = 0; i < PAGE / 8; i++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            out[i] = x;
        }
        return;
    default:
        x = ((uint64_t)page << 32 | v) * 0x9E3779B97F4A7C15ULL;
    }
    for (size_t i = 0; i < PAGE / 8; i++) {
        if (i % 8 == 0) x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        out[i] = (x & 0x0f0f0f0f) << 8 | i % 8;
    }
    out[0] = ((uint64_t)page << 32) | v;
}

static int compare(size_t page) {
    uint64_t want[PAGE / 8];
    content(want, page, version[page]);
    if (memcmp(memory + page * PAGE, want, PAGE) == 0) return 0;
    uint64_t *have = (uint64_t *)(memory + page * PAGE);
    size_t at = 0;
    while (have[at] == want[at]) at++;
    printf("wrong page %zu of %zu at %p, version %u: word %zu is %016lx, not %016lx\n", page, pages,
           (void *)(memory + page * PAGE), version[page], at, (unsigned long)have[at], (unsigned long)want[at]);
    fflush(stdout);
    return 1;
}

static void rewrite(size_t page) {
    uint64_t fresh[PAGE / 8];
    uint32_t v = version[page] + 1 + (uint32_t)(page & 1);
    content(fresh, page, v);
    memcpy(memory + page * PAGE, fresh, PAGE);
    version[page] = v;
}

static int check(void) {
    for (size_t page = 0; page < pages; page++)
        if (compare(page)) return 1;
    return 0;
}

static long bare(long number, long a, long b, long c, long d, long e) { return bare_call(number, a, b, c, d, e, 0); }

static uint8_t *map(size_t len);

static int after_fork(pid_t child) {
    if (child == 0) {
        int bad = check();
        /* The child may also write what it has. */
        for (size_t page = 0; page < pages && !bad; page += 7) rewrite(page), bad = compare(page);
        _exit(bad ? 3 : 0);
    }
    int status = 0;
    if (child < 0 && errno == ENOMEM) return -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
        printf("wrong child, status %x\n", status);
        fflush(stdout);
        return 1;
    }
    return 0;
}

static uint8_t *target, *moved;

static void move_in_handler(int signal) {
    (void)signal;
    moved = mremap(memory, pages * PAGE, pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target);
}

/* As long as SIGSTKSZ has been on x86-64 for decades, or as long as this processor wants it. */
static int move_on_small_stack(void) {
    static uint8_t small[1 << 20];
    long wanted = sysconf(_SC_SIGSTKSZ);
#if defined(__x86_64__)
    wanted = 8192;
#endif
    if (wanted <= 0 || (size_t)wanted > sizeof small) return 1;
    stack_t stack = {.ss_sp = small, .ss_size = (size_t)wanted};
    struct sigaction action = {.sa_handler = move_in_handler, .sa_flags = SA_ONSTACK};
    target = map(pages * PAGE);
    if (sigaltstack(&stack, NULL) != 0 || sigaction(SIGUSR1, &action, NULL) != 0 || raise(SIGUSR1) != 0) return 1;
    if (moved == target) memory = moved;
    return moved != target;
}

static int wait_fork(void) {
    pid_t child = (pid_t)bare(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) {
        alarm(5);
        _exit(check() ? 3 : 0);
    }
    int status = 0;
    return child < 0 || waitpid(child, &status, 0) != child || (status != 0 && status != SIGALRM);
}

static int track(void) {
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_PAGEFAULT_FLAG_WP};
    struct uffdio_range range = {(unsigned long)memory, pages / 2 * PAGE};
    struct uffdio_register reg = {range, UFFDIO_REGISTER_MODE_WP, 0};
    if (fd < 0 || ioctl(fd, UFFDIO_API, &api) != 0 || ioctl(fd, UFFDIO_REGISTER, &reg) != 0) {
        if (fd >= 0 && errno == ENOMEM) return close(fd), -1;
        printf("wrong userfaultfd: %s\n", strerror(errno));
        fflush(stdout);
        return 1;
    }
    int bad = check();
    struct uffdio_writeprotect wp = {range, UFFDIO_WRITEPROTECT_MODE_WP};
    bad |= ioctl(fd, UFFDIO_WRITEPROTECT, &wp) != 0;
    usleep(300000);
    wp.mode = 0;
    bad |= check() || ioctl(fd, UFFDIO_WRITEPROTECT, &wp) != 0 || ioctl(fd, UFFDIO_UNREGISTER, &range) != 0;
    close(fd);
    return bad;
}

static volatile int stop_threads, bare_calls;
static int threads_bad;

/* Thread n owns pages n, n + 4, ... */
static void *hammer(void *argument) {
    size_t mine = (size_t)argument;
    uint64_t x = 0x1234567 + mine * 77;
    while (!stop_threads) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        size_t page = (x >> 20) % (pages / 4) * 4 + mine;
        if (compare(page)) {
            threads_bad = 1;
            return NULL;
        }
        if (x & 1) rewrite(page);
        /* Often in the lower half; in the upper one seldom, so that it can go out meanwhile. */
        size_t away = (x >> 30) % (pages / 4) * 4 + mine;
        if ((x & (away < pages / 2 ? 0xff00 : 0x7fff00)) == 0) {
            version[away] = 0;
            if ((x & 2) || !bare_calls)
                madvise(memory + away * PAGE, PAGE, MADV_DONTNEED);
            else
                bare(SYS_madvise, (long)(memory + away * PAGE), PAGE, MADV_DONTNEED, 0, 0);
        }
    }
    return NULL;
}

static int storm(long ms) {
    pthread_t threads[4];
    stop_threads = threads_bad = 0;
    for (size_t i = 0; i < 4; i++) pthread_create(&threads[i], NULL, hammer, (void *)i);
    struct timespec wait = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&wait, NULL);
    stop_threads = 1;
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    return threads_bad;
}

static sigjmp_buf bus_jump;
static void on_bus(int signal);

/* True if a touch of the page ends in SIGSEGV. */
static int is_guarded(size_t page) {
    struct sigaction action = {.sa_handler = on_bus, .sa_flags = SA_NODEFER}, old;
    sigaction(SIGSEGV, &action, &old);
    int guarded = sigsetjmp(bus_jump, 1);
    if (!guarded) (void)*(volatile uint8_t *)(memory + page * PAGE);
    sigaction(SIGSEGV, &old, NULL);
    return guarded;
}

static int guard(void) {
    enum { INSTALL = 102, REMOVE = 103 };
    size_t page = next() % pages, len = 1 + next() % 9;
    if (page + len > pages) len = pages - page;
    /* Kernels before 6.13 do not know it. */
    if (madvise(memory + page * PAGE, len * PAGE, INSTALL) != 0) return 0;
    for (size_t at = page; at < page + len; at++) version[at] = 0;
    /* What lies around may come back meanwhile. */
    size_t from = page < 8 ? 0 : page - 8, to = page + len + 8 > pages ? pages : page + len + 8;
    for (size_t at = from; at < to; at++) {
        if (at < page || at >= page + len) {
            if (compare(at)) return 1;
        } else if (!is_guarded(at)) {
            printf("wrong page %zu of %zu: its guard is gone\n", at, pages);
            fflush(stdout);
            return 1;
        }
    }
    madvise(memory + page * PAGE, len * PAGE, REMOVE);
    return compare(page + next() % len);
}

static void on_bus(int signal) {
    (void)signal;
    siglongjmp(bus_jump, 1);
}

static int lost(void) {
    struct sigaction action = {.sa_handler = on_bus, .sa_flags = SA_NODEFER};
    sigaction(SIGBUS, &action, NULL);
    volatile size_t gone = 0;
    for (volatile size_t page = 0; page < pages; page++) {
        if (sigsetjmp(bus_jump, 1)) {
            gone++;
            continue;
        }
        if (compare(page)) return 1;
    }
    printf("lost %zu\n", (size_t)gone);
    fflush(stdout);
    return 0;
}

/* The child ends its agent's part, if it thinks that it has one, and uses what is its own. */
static int robust_fork(long (*call)(long, struct clone_args *, size_t)) {
    struct clone_args arguments = {.exit_signal = SIGCHLD};
    pid_t child = (pid_t)call(SYS_clone3, &arguments, sizeof arguments);
    if (child == 0) {
        alarm(60);
        int bad = check();
        struct sock_filter code[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog filter = {sizeof code / sizeof *code, code};
        bad |= prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) != 0;
        for (size_t page = 1; page < 11; page++) version[page] = 0;
        madvise(memory + PAGE, 10 * PAGE, MADV_DONTNEED);
        bad |= check();
        munmap(memory, pages * PAGE);
        /* Large enough to be managed. */
        memset(map(4 << 20), 1, 4 << 20);
        usleep(200000);
        _exit(bad ? 3 : 0);
    }
    return after_fork(child);
}

static long by_libc(long number, struct clone_args *arguments, size_t size) { return syscall(number, arguments, size); }
static long by_hand(long number, struct clone_args *arguments, size_t size) {
    return bare(number, (long)arguments, (long)size, 0, 0, 0);
}

static int part_fork(void) {
    const size_t kept = 16;
    if (madvise(memory, kept * PAGE, MADV_DONTFORK) != 0) return perror("MADV_DONTFORK"), 1;
    pid_t child = fork();
    if (child == 0) {
        for (size_t page = kept; page < pages; page++)
            if (compare(page)) _exit(3);
        _exit(0);
    }
    madvise(memory, kept * PAGE, MADV_DOFORK);
    return after_fork(child);
}

/* A block of the allocator's that is a mapping of its own: half of its pages are alike, the others are like none. */
static uint8_t *block;
static const size_t block_pages = 2048;

static void block_page(uint64_t *out, size_t page) {
    uint64_t x = page < block_pages / 2 ? page % 8 + 1 : page + ((uint64_t)getpid() << 32);
    for (size_t i = 0; i < PAGE / 8; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        out[i] = page < block_pages / 2 ? x : x % 1000;
    }
}

/* Its first whole page. */
static uint8_t *block_start(void) { return (uint8_t *)(((uintptr_t)block + PAGE - 1) & ~(PAGE - 1)); }

static int make_block(void) {
    block = malloc((block_pages + 1) * PAGE);
    for (size_t page = 0; page < block_pages; page++) block_page((uint64_t *)(block_start() + page * PAGE), page);
    return 0;
}

static int grow_block(void) {
    size_t offset = (size_t)(block_start() - block);
    uint8_t *grown = realloc(block, 2 * block_pages * PAGE);
    if (!grown) return -1;
    block = grown;
    for (size_t page = 0; page < block_pages; page++) {
        uint64_t want[PAGE / 8];
        block_page(want, page);
        if (memcmp(block + offset + page * PAGE, want, PAGE) == 0) continue;
        printf("wrong page %zu of a block that grew\n", page);
        fflush(stdout);
        return 1;
    }
    return 0;
}

/* Counts in a word of each page. */
static void *count_up(void *argument) {
    size_t mine = (size_t)argument;
    for (uint64_t turn = 1; !stop_threads; turn++)
        for (size_t page = mine; page < pages; page += 4) {
            volatile uint64_t *word = (volatile uint64_t *)(memory + page * PAGE) + 511;
            if (turn > 1 && *word != turn - 1) {
                printf("wrong page %zu of %zu: a write is gone\n", page, pages);
                fflush(stdout);
                threads_bad = 1;
                return NULL;
            }
            *word = turn;
        }
    return NULL;
}

static int wipe(void) {
    pthread_t threads[4];
    stop_threads = threads_bad = 0;
    for (size_t i = 0; i < 4; i++) pthread_create(&threads[i], NULL, count_up, (void *)i);
    int bad = madvise(memory, pages * PAGE, MADV_WIPEONFORK) != 0;
    if (bad) perror("MADV_WIPEONFORK");
    usleep(100000);
    stop_threads = 1;
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    for (size_t page = 0; page < pages; page++) ((uint64_t *)(memory + page * PAGE))[511] = 0;
    /* The word that was counted in is the only one that changed. */
    for (size_t page = 0; page < pages && !bad && !threads_bad; page++) {
        uint64_t want[PAGE / 8];
        content(want, page, version[page]);
        if (memcmp(memory + page * PAGE, want, PAGE - 8) == 0) continue;
        printf("wrong page %zu of %zu after MADV_WIPEONFORK\n", page, pages);
        fflush(stdout);
        bad = 1;
    }
    pid_t child = fork();
    if (child == 0) {
        for (size_t i = 0; i < pages * PAGE; i++)
            if (memory[i]) _exit(3);
        _exit(0);
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0) {
        printf("wrong child of MADV_WIPEONFORK, status %x\n", status);
        fflush(stdout);
        return 1;
    }
    return bad | threads_bad;
}

static uint8_t *map(size_t len);

// Advice on memory with a hole is answered as by the kernel.
static int advise_holes(void) {
    uint8_t *at = map(3 * PAGE);
    const int advices[] = {MADV_COLD, MADV_PAGEOUT, MADV_WILLNEED};
    for (int hole = 0; hole < 2; hole++) {
        for (size_t i = 0; i < sizeof advices / sizeof *advices; i++) {
            long said = bare(SYS_madvise, (long)at, 3 * PAGE, advices[i], 0, 0);
            errno = 0;
            int done = madvise(at, 3 * PAGE, advices[i]);
            if (done != (said ? -1 : 0) || errno != -said || said != (hole ? -ENOMEM : 0)) {
                printf("advice %d: %d and %d, not %ld\n", advices[i], done, errno, said);
                fflush(stdout);
                return 1;
            }
        }
        if (munmap(at + PAGE, PAGE) != 0) exit(2);
    }
    return 0;
}

static uint8_t *map(size_t len) {
    uint8_t *at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) exit(2);
    madvise(at, len, MADV_NOHUGEPAGE);
    return at;
}

int main(int argc, char **argv) {
    pages = (argc > 1 ? strtoul(argv[1], NULL, 10) : 16) << 8;
    memory = map(pages * PAGE);
    version = calloc(pages, sizeof *version);
    for (size_t page = 0; page < pages; page++)
        if (page % 11) rewrite(page);
    printf("ready\n");
    fflush(stdout);
    char line[128];
    while (fgets(line, sizeof line, stdin)) {
        char word[32] = "", what[32] = "";
        long count = 0;
        sscanf(line, "%31s %ld", word, &count);
        sscanf(line, "%*s %31s", what);
        int bad = 0;
        if (!strcmp(word, "check")) {
            bad = check();
        } else if (!strcmp(word, "peek")) {
            for (long i = 0; i < count && !bad; i++) bad = compare(next() % pages);
        } else if (!strcmp(word, "write")) {
            for (long i = 0; i < count; i++) rewrite(next() % pages);
        } else if (!strcmp(word, "discard") || !strcmp(word, "rawdiscard")) {
            for (long i = 0; i < count && !bad; i++) {
                size_t page = next() % pages, len = 1 + next() % 9;
                if (page + len > pages) len = pages - page;
                if (word[0] == 'r')
                    bare(SYS_madvise, (long)(memory + page * PAGE), len * PAGE, MADV_DONTNEED, 0, 0);
                else
                    madvise(memory + page * PAGE, len * PAGE, MADV_DONTNEED);
                for (size_t at = page; at < page + len; at++) version[at] = 0;
                bad = compare(page + next() % len);
            }
        } else if (!strcmp(word, "guard")) {
            for (long i = 0; i < count && !bad; i++) bad = guard();
        } else if (!strcmp(word, "chroot")) {
            bad = chroot("/proc/self/fd") != 0;
        } else if (!strcmp(word, "track")) {
            bad = track();
        } else if (!strcmp(word, "fork")) {
            bad = after_fork(fork());
        } else if (!strcmp(word, "fill")) {
            for (size_t page = 0; page < pages; page++) rewrite(page);
        } else if (!strcmp(word, "partfork")) {
            bad = part_fork();
        } else if (!strcmp(word, "clone3")) {
            bad = robust_fork(by_libc);
        } else if (!strcmp(word, "barefork")) {
            bad = robust_fork(by_hand);
        } else if (!strcmp(word, "hide")) {
            mprotect(memory, pages * PAGE, PROT_NONE);
            pid_t child = fork();
            mprotect(memory, pages * PAGE, PROT_READ | PROT_WRITE);
            bad = after_fork(child);
        } else if (!strcmp(word, "hidemove")) {
            mprotect(memory, pages * PAGE, PROT_NONE);
            bad = move_on_small_stack();
            mprotect(memory, pages * PAGE, PROT_READ | PROT_WRITE);
        } else if (!strcmp(word, "hidetrack")) {
            uint8_t *upper = memory + pages / 2 * PAGE;
            size_t all = pages;
            mprotect(upper, (all - all / 2) * PAGE, PROT_NONE);
            pages = all / 2;
            bad = track();
            pages = all;
            mprotect(upper, (all - all / 2) * PAGE, PROT_READ | PROT_WRITE);
            if (!bad) bad = check();
        } else if (!strcmp(word, "rawfork")) {
            bad = after_fork((pid_t)bare(SYS_clone, SIGCHLD, 0, 0, 0, 0));
        } else if (!strcmp(word, "waitfork")) {
            bad = wait_fork();
        } else if (!strcmp(word, "move") || !strcmp(word, "baremove")) {
            uint8_t *to = map(pages * PAGE);
            const int how = MREMAP_MAYMOVE | MREMAP_FIXED;
            uint8_t *moved = *word == 'm' ? mremap(memory, pages * PAGE, pages * PAGE, how, to)
                                          : (uint8_t *)bare(SYS_mremap, (long)memory, pages * PAGE, pages * PAGE, how, (long)to);
            if (moved == to) {
                memory = moved;
            } else if (moved == MAP_FAILED && errno == ENOMEM) {
                munmap(to, pages * PAGE);
                bad = -1;
            } else {
                printf("wrong mremap\n");
                return 1;
            }
        } else if (!strcmp(word, "populate")) {
            if (madvise(memory, pages * PAGE, MADV_POPULATE_WRITE) != 0) bad = (perror("madvise"), 1);
        } else if (!strcmp(word, "seal")) {
            bad = syscall(462, memory, pages * PAGE, 0) != 0;
        } else if (!strcmp(word, "rawseal")) {
            bad = bare(462, (long)memory, pages * PAGE, 0, 0, 0) != 0;
        } else if (!strcmp(word, "unmap")) {
            size_t first = next() % (pages / 2), len = pages / 4;
            munmap(memory + first * PAGE, len * PAGE);
            if (mmap(memory + first * PAGE, len * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                     0) == MAP_FAILED)
                return 2;
            for (size_t at = first; at < first + len; at++) version[at] = 0;
            bad = compare(first);
            for (size_t at = first; at < first + len; at += 2) rewrite(at);
        } else if (!strcmp(word, "block")) {
            bad = make_block();
        } else if (!strcmp(word, "grow")) {
            bad = grow_block();
        } else if (!strcmp(word, "wipe")) {
            bad = wipe();
        } else if (!strcmp(word, "storm") || !strcmp(word, "work")) {
            bare_calls = word[0] == 's';
            bad = storm(count);
        } else if (!strcmp(word, "holes")) {
            bad = advise_holes();
        } else if (!strcmp(word, "advise")) {
            int advice = !strcmp(what, "cold") ? MADV_COLD : !strcmp(what, "pageout") ? MADV_PAGEOUT : MADV_WILLNEED;
            if (madvise(memory, pages * PAGE, advice) != 0) bad = (perror("madvise"), 1);
        } else if (!strcmp(word, "lost")) {
            if (lost()) return 1;
            continue;
        } else {
            return 2;
        }
        if (bad > 0) return 1;
        puts(bad ? "refused" : "right");
        fflush(stdout);
    }
    return 0;
}
