// Children of all kinds, and a process after the end of its first thread.
#include "common.h"

#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <spawn.h>

static pid_t raw_clone(void) { return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); }

static int cloned(void *argument) {
    check(argument, "in a child by clone(3)");
    return 0;
}

static char clone_stack[64 << 10] __attribute__((aligned(16)));

static void forks(void) {
    struct region r = fill(2048, 16, 3000);
    uint64_t seed = 5;
    size_t most = 0;
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    pid_t (*ways[])(void) = {fork, raw_clone, plain_fork};
    // On a busy machine little is merged between two forks; more and calmer rounds follow there.
    for (int round = 0; round < 45 || (most <= 100 && round < 145); round++) {
        // Writing gives the merger something to do at the moment of the fork.
        madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
        for (size_t i = 0; i < (round < 45 ? 512 : 32); i++) {
            size_t page = draw(&seed) % r.pages;
            fill_page(r.at + page * PAGE, number_of(&r, page));
        }
        nap(round < 45 ? draw(&seed) % 250 : 500);
        size_t here = pool_pages(r.at, r.pages * PAGE);
        if (here > most) most = here;
        pid_t child;
        if (round % 4 == 3) {
            child = clone(cloned, clone_stack + sizeof clone_stack, SIGCHLD, &r);
        } else {
            child = ways[round % 4]();
            if (child == 0) {
                check(&r, "in a child");
                fill_page(r.at + PAGE * (round % r.pages), 9);
                CHECK(page_is(r.at + PAGE * (round % r.pages), 9), "the child's write is gone");
                _exit(0);
            }
        }
        CHECK(child > 0, "fork");
        CHECK(ended_well(child), "the child of round %d (way %d) is wrong", round, round % 4);
        check(&r, "in the parent of a fork");
    }
    CHECK(most > 100, "only %zu pages were ever merged", most);
}

static void *fork_at_pace(void *end) {
    while (!atomic_load((atomic_int *)end)) {
        pid_t child = fork();
        if (child == 0) _exit(0);
        CHECK(ended_well(child), "a child");
        nap(50);
    }
    return NULL;
}

// A server that forks for each job: what it holds meanwhile is merged like any other program's.
static void forks_at_pace(void) {
    atomic_int end = 0;
    pthread_t forker;
    pthread_create(&forker, NULL, fork_at_pace, &end);
    struct region r = merged(2048);
    atomic_store(&end, 1);
    pthread_join(forker, NULL);
    check(&r, "after the last child");
}

// A child's agent serves merged pages before a daemon has answered it.
static void child_without_daemon(void) {
    const char *number = getenv("DAEMON");
    CHECK(number, "no DAEMON");
    struct region r = merged(1024);
    wait_merged(&r, r.pages);
    CHECK(kill(atoi(number), SIGSTOP) == 0, "SIGSTOP");
    pid_t child = fork();
    if (child == 0) {
        // A range that is registered for discards is registered for missing pages too.
        for (double began = now(); !flag_at(r.at, " um"); nap(10)) CHECK(now() - began < WAIT_MAX, "no agent serves merged pages");
        CHECK(raw(SYS_madvise, (long)r.at, 128 * PAGE, MADV_DONTNEED, 0, 0, 0) == 0, "MADV_DONTNEED");
        for (size_t i = 0; i < 128; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes", i);
        CHECK(mlock(r.at + 256 * PAGE, 256 * PAGE) == 0 || errno == ENOMEM || errno == EPERM, "mlock");
        for (size_t i = 128; i < r.pages; i++) CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu is wrong", i);
        CHECK(setgid(getgid()) == 0, "setgid");
        exit(0);
    }
    int well = ended_well(child);
    CHECK(kill(atoi(number), SIGCONT) == 0, "SIGCONT");
    CHECK(well, "the child was wrong");
    check(&r, "in the parent");
}

// A process that cannot make threads any more keeps no merged page; its children are in the new namespace and have agents.
static void process_namespace(void) {
    struct region r = merged(1024);
    if (unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) SKIP("no namespaces for this user");
    check(&r, "in a new namespace");
    CHECK(raw(SYS_madvise, (long)r.at, 128 * PAGE, MADV_DONTNEED, 0, 0, 0) == 0, "MADV_DONTNEED");
    for (size_t i = 0; i < 128; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes", i);
    CHECK(pool_pages(r.at, r.pages * PAGE) == 0, "%zu pages are merged without an agent", pool_pages(r.at, r.pages * PAGE));
    pid_t child = fork();
    if (child == 0) {
        merged(1024);
        exit(0);
    }
    CHECK(ended_well(child), "the child has no agent");
}

// After the end of its first thread, the process's directory in /proc shows no memory any more.
static void *goes_on(void *argument) {
    struct region r = *(struct region *)argument;
    char text[512] = "";
    for (double began = now(); !strstr(text, ") Z ");) {
        CHECK(now() - began < WAIT_MAX, "the first thread goes on");
        int file = open("/proc/self/stat", O_RDONLY);
        CHECK(file >= 0 && read(file, text, sizeof text - 1) > 0, "stat");
        close(file);
        nap(10);
    }
    CHECK(madvise(r.at, 128 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    CHECK(raw(SYS_madvise, (long)r.at + 128 * PAGE, 128 * PAGE, MADV_DONTNEED, 0, 0, 0) == 0, "raw MADV_DONTNEED");
    for (size_t i = 0; i < 256; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes", i);
    char *moved = mremap(r.at + 512 * PAGE, 512 * PAGE, 1024 * PAGE, MREMAP_MAYMOVE);
    CHECK(moved != MAP_FAILED, "mremap");
    for (size_t i = 0; i < 512; i++) CHECK(page_is(moved + i * PAGE, number_of(&r, 512 + i)), "page %zu is wrong, moved", i);
    for (size_t i = 256; i < 512; i++) CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu is wrong", i);
    merged(1024);
    exit(0);
}

static void main_ends(void) {
    static struct region r;
    r = merged(1024);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, goes_on, &r) == 0, "pthread_create");
    pthread_exit(NULL);
}

// The child keeps the parent's merged pages after the parent has ended and its slots are freed.
static void orphan(void) {
    struct region r = merged(1024);
    int ends[2];
    CHECK(pipe(ends) == 0, "pipe");
    pid_t child = fork();
    if (child == 0) {
        pid_t grandchild = fork();
        if (grandchild > 0) _exit(0);
        nap(300);
        check(&r, "after the parent's end");
        struct region other = fill(1024, 16, 77000);
        madvise(other.at, other.pages * PAGE, MADV_MERGEABLE);
        nap(1500);
        check(&r, "after the parent's slots were given up");
        check(&other, "of the child's own");
        write_all(&r, 123456, "in an orphan");
        CHECK(write(ends[1], "k", 1) == 1, "write");
        _exit(0);
    }
    CHECK(ended_well(child), "the child failed");
    munmap(r.at, r.pages * PAGE);
    close(ends[1]);
    char answer = 0;
    CHECK(read(ends[0], &answer, 1) == 1 && answer == 'k', "the grandchild failed");
}

static void vforks(void) {
    struct region r = merged(1024);
    for (int round = 0; round < 20; round++) {
        pid_t child = vfork();
        if (child == 0) {
            execl("/bin/true", "true", NULL);
            _exit(1);
        }
        CHECK(child > 0 && ended_well(child), "vfork and exec");
        char *arguments[] = {"true", NULL};
        CHECK(posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ) == 0, "posix_spawn");
        CHECK(ended_well(child), "posix_spawn's program");
        CHECK(system("exit 0") == 0, "system");
        check(&r, "after vfork");
    }
    wait_merged(&r, 500);
}

// A vforked child has its parent's memory until it executes another program. When it gives up rights, the parent keeps its own.
static void vforks_with_less(void) {
    struct region r = merged(1024);
    long before = agent_thread();
    for (int turn = 0; turn < 2; turn++) {
        pid_t child = vfork();
        if (child == 0) {
            if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) _exit(1);
            if (turn && geteuid() == 0 && (setgroups(0, NULL) || setgid(65534) || setuid(65534))) _exit(2);
            execl("/bin/true", "true", NULL);
            _exit(3);
        }
        CHECK(child > 0 && ended_well(child), "vfork, less rights, and exec");
        CHECK(pool_pages(r.at, r.pages * PAGE) > 0, "the child has unmerged its parent");
        CHECK(agent_thread() == before, "the agent is another or gone");
    }
    // The child installs a filter that forbids a call which only the agent's library makes.
    char *small = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(small != MAP_FAILED && madvise(small, 64 * PAGE, MADV_MERGEABLE) == 0, "memory");
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigprocmask, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    pid_t child = vfork();
    if (child == 0) {
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) _exit(1);
        _exit(munmap(small, 64 * PAGE) == 0 ? 0 : 2);
    }
    CHECK(child > 0 && ended_well(child), "vfork, a filter, and munmap");
    check(&r, "after vfork");
    struct region later = merged(1024);
    check(&later, "merged later");
}

static void daemonize(void) {
    struct region r = merged(1024);
    int ends[2];
    CHECK(pipe(ends) == 0, "pipe");
    pid_t child = fork();
    if (child == 0) {
        setsid();
        if (fork() > 0) _exit(0);
        if (chdir("/") != 0) _exit(1);
        for (int fd = 3; fd < 64; fd++)
            if (fd != ends[1]) close(fd);
        nap(500);
        check(&r, "in a daemon");
        // Merging continues here too.
        struct region own = fill(1024, 16, 880000);
        mark_mergeable(&own);
        wait_merged(&own, 700);
        check(&own, "in a daemon");
        write_all(&r, 5555, "in a daemon");
        CHECK(write(ends[1], "k", 1) == 1, "write");
        _exit(0);
    }
    CHECK(ended_well(child), "the child failed");
    close(ends[1]);
    char answer = 0;
    CHECK(read(ends[0], &answer, 1) == 1 && answer == 'k', "the daemon failed");
    check(&r, "in the parent of a daemon");
}

static void wipe_on_fork(void) {
    struct region r = merged(1024);
    CHECK(madvise(r.at, 512 * PAGE, MADV_WIPEONFORK) == 0, "MADV_WIPEONFORK");
    pid_t child = fork();
    if (child == 0) {
        for (size_t i = 0; i < r.pages; i++)
            CHECK(i < 512 ? page_is_zero(r.at + i * PAGE) : page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu", i);
        _exit(0);
    }
    CHECK(ended_well(child), "the child of MADV_WIPEONFORK");
    check(&r, "after MADV_WIPEONFORK");
    // These are two mappings to the kernel, which may refuse to move them as one.
    char *moved = mremap(r.at, r.pages * PAGE, 2 * r.pages * PAGE, MREMAP_MAYMOVE);
    if (moved != MAP_FAILED) r.at = moved;
    child = fork();
    if (child == 0) _exit(page_is_zero(r.at) && page_is_zero(r.at + 511 * PAGE) ? 0 : 1);
    CHECK(ended_well(child), "what is to be wiped was not, after mremap");
    // A program that marks all of its memory as mergeable includes this.
    struct region wiped = fill(1024, 256, 1000);
    madvise(wiped.at, wiped.pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(madvise(wiped.at, wiped.pages * PAGE, MADV_WIPEONFORK) == 0, "MADV_WIPEONFORK");
    CHECK(madvise(wiped.at, wiped.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    struct region other = merged(1024);
    nap(1500);
    child = fork();
    if (child == 0) {
        for (size_t i = 0; i < wiped.pages; i++) CHECK(page_is_zero(wiped.at + i * PAGE), "page %zu is not wiped", i);
        _exit(0);
    }
    CHECK(ended_well(child), "what is to be wiped was merged");
    check(&wiped, "in the parent");
    check(&other, "beside");
    // The kernel reports a hole with ENOMEM; the memory around it is wiped all the same.
    struct region holed = fill(1024, 256, 1000);
    madvise(holed.at, holed.pages * PAGE, MADV_NOHUGEPAGE);
    CHECK(munmap(holed.at + 512 * PAGE, PAGE) == 0, "munmap");
    CHECK(madvise(holed.at, holed.pages * PAGE, MADV_WIPEONFORK) == -1 && errno == ENOMEM, "MADV_WIPEONFORK of a hole");
    madvise(holed.at, holed.pages * PAGE, MADV_MERGEABLE);
    struct region more = merged(1024);
    nap(1500);
    child = fork();
    if (child == 0) {
        for (size_t i = 0; i < holed.pages; i++)
            if (i != 512) CHECK(page_is_zero(holed.at + i * PAGE), "page %zu beside a hole is not wiped", i);
        _exit(0);
    }
    CHECK(ended_well(child), "what is to be wiped beside a hole was merged");
    check(&more, "beside the hole");
}

// Children do not inherit the agent's own mappings: those would keep segments alive that the pool has released.
static void no_segments_in_children(void) {
    merged(1024);
    // By a bare system call, so that the child has no agent.
    pid_t child = raw(SYS_clone, SIGCHLD, 0, 0, 0, 0, 0);
    if (child == 0) {
        FILE *maps = fopen("/proc/thread-self/maps", "r");
        CHECK(maps, "maps");
        char line[512], mode[8];
        while (fgets(line, sizeof line, maps))
            CHECK(sscanf(line, "%*s %4s", mode) != 1 || mode[3] != 's' || !strstr(line, "pagefold"), "inherited: %s", line);
        _exit(0);
    }
    CHECK(ended_well(child), "the child has mappings of the agent");
}

const struct scenario fork_scenarios[] = {
    {"forks", forks},
    {"forks-at-pace", forks_at_pace},
    {"orphan", orphan},
    {"child-without-daemon", child_without_daemon},
    {"process-namespace", process_namespace},
    {"main-ends", main_ends},
    {"vforks", vforks},
    {"vforks-with-less", vforks_with_less},
    {"daemonize", daemonize},
    {"wipe-on-fork", wipe_on_fork},
    {"no-segments-in-children", no_segments_in_children},
    {0},
};
