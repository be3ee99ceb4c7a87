// Filters of system calls (seccomp(2)).
#include "common.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>

int filter_flags;
void install(int by_syscall, struct sock_filter *code, size_t count) {
    struct sock_fprog program = {count, code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no_new_privs");
    if (by_syscall) CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, filter_flags, &program) == 0, "seccomp");
    else CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0, "PR_SET_SECCOMP");
}

// Appends `answer` for each of `count` calls to a filter that has loaded the number of the call; returns the next index.
static size_t answer_each(struct sock_filter *code, size_t at, const int *calls, size_t count, unsigned answer) {
    for (size_t i = 0; i < count; i++) {
        code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], 0, 1);
        code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, answer);
    }
    return at;
}

// Allows `count` calls and kills for all others.
static void allow_only(int by_syscall, const int *allowed, size_t count) {
    struct sock_filter code[2 * count + 2];
    size_t at = 0;
    code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    at = answer_each(code, at, allowed, count, SECCOMP_RET_ALLOW);
    code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    install(by_syscall, code, at);
}

static void install_filter(int by_syscall) {
    // A strict filter: calls that a finished program needs, and none that only the agent uses.
    int allowed[] = {SYS_write, SYS_exit_group, SYS_exit, SYS_clock_nanosleep, SYS_nanosleep, SYS_futex, SYS_rt_sigreturn,
                     SYS_clock_gettime, SYS_munmap, SYS_mmap, SYS_madvise, SYS_mprotect, SYS_brk, SYS_newfstatat, SYS_fstat};
    allow_only(by_syscall, allowed, sizeof allowed / sizeof *allowed);
}

static void seccomp_by(int by_syscall) {
    struct region r = merged(1024);
    install_filter(by_syscall);
    check(&r, "behind a filter");
    for (size_t i = 0; i < 100; i++) fill_page(r.at + i * PAGE, number_of(&r, i));
    struct timespec rest = {1, 0};
    clock_nanosleep(CLOCK_MONOTONIC, 0, &rest, NULL);
    check(&r, "behind a filter, later");
    CHECK(madvise(r.at + 200 * PAGE, 100 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED behind a filter");
    for (size_t i = 200; i < 300; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes", i);
    write_all(&r, 91000, "behind a filter");
}

// Kills the process for calls that an agent makes when it starts, and only then.
static void forbid_what_an_agent_starts_with(void) {
    struct sock_filter code[8];
    int forbidden[] = {SYS_memfd_create, SYS_close_range};
    size_t at = 0;
    code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    at = answer_each(code, at, forbidden, 2, SECCOMP_RET_KILL_PROCESS);
    code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    install(0, code, at);
}

// An agent that ends because of a filter unmerges pages that other threads are writing to, executable ones too.
static void seccomp_writers(void) {
    for (int round = 0; round < 8; round++) {
        pid_t child = fork();
        if (child == 0) {
            struct region r = fill(1024, 16, 50);
            fill_counted(&r);
            mark_mergeable(&r);
            wait_merged(&r, 700);
            CHECK(mprotect(r.at, r.pages * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0, "mprotect");
            pthread_t counter;
            CHECK(pthread_create(&counter, NULL, count_in, &r) == 0, "pthread_create");
            nap(round);
            forbid_what_an_agent_starts_with();
            nap(10);
            atomic_store(&resting, 1);
            pthread_join(counter, NULL);
            check_counts(&r);
            CHECK(pool_pages(r.at, r.pages * PAGE) == 0, "%zu pages are left in the pool", pool_pages(r.at, r.pages * PAGE));
            _exit(0);
        }
        CHECK(ended_well(child), "writers while a filter comes");
    }
}

// A child inherits the filter that ended the agent, and must not start an agent.
static void seccomp_child(void) {
    struct region r = merged(1024);
    forbid_what_an_agent_starts_with();
    check(&r, "behind a filter");
    pid_t child = fork();
    if (child == 0) {
        struct region own = fill(2048, 16, 500);
        nap(500);
        check(&own, "in a child behind a filter");
        check(&r, "in a child behind a filter");
        _exit(0);
    }
    CHECK(ended_well(child), "the child behind a filter");
}

static void seccomp_prctl(void) { seccomp_by(0); }
static void seccomp_tsync(void) {
    filter_flags = SECCOMP_FILTER_FLAG_TSYNC;
    seccomp_by(1);
}

// An agent that stays under a filter still merges, unshares, unmerges, and receives events of discards that no library sees.
static void work_on(struct region *r, const char *when) {
    check(r, when);
    struct region later = merged(1024);
    for (size_t i = 0; i < 64; i++) fill_page(later.at + i * PAGE, number_of(&later, i));
    nap(1500);
    check(&later, when);
    raw(SYS_madvise, (long)(later.at + 200 * PAGE), 100 * PAGE, MADV_DONTNEED, 0, 0, 0);
    for (size_t i = 200; i < 300; i++) CHECK(page_is_zero(later.at + i * PAGE), "page %zu shows old bytes %s", i, when);
    CHECK(madvise(r->at, r->pages * PAGE, MADV_UNMERGEABLE) == 0, "MADV_UNMERGEABLE %s", when);
    check(r, when);
    write_all(r, 92000, when);
    CHECK(munmap(later.at, later.pages * PAGE) == 0, "munmap %s", when);
}

// Like QEMU's sandbox: new threads are allowed; new processes and the choice of processors are not.
static void install_sandbox(void) {
    const int threads = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_SETTLS;
    const int refused[] = {SYS_execve, SYS_execveat, SYS_sched_setaffinity, SYS_sched_setscheduler, SYS_setpriority,
#ifdef SYS_fork
                           SYS_fork, SYS_vfork,
#endif
                           SYS_setuid, SYS_setsid, SYS_reboot, SYS_mount};
    struct sock_filter code[64];
    size_t at = 0;
    code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    at = answer_each(code, at, refused, sizeof refused / sizeof *refused, SECCOMP_RET_KILL_PROCESS);
    at = answer_each(code, at, (int[]){SYS_clone3}, 1, SECCOMP_RET_ERRNO | ENOSYS);
    code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 4);
    code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args));
    code[at++] = (struct sock_filter)BPF_STMT(BPF_ALU | BPF_AND | BPF_K, threads);
    code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, threads, 1, 0);
    code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter_flags = SECCOMP_FILTER_FLAG_TSYNC;
    install(1, code, at);
}

static void sandbox(void) {
    struct region r = merged(1024);
    install_sandbox();
    work_on(&r, "in a sandbox");
}

// The filter is installed before there is anything to merge: the agent's thread must exist by then.
static void sandbox_first(void) {
    install_sandbox();
    struct region r = merged(1024);
    work_on(&r, "in a sandbox that came first");
}

// The filter allows the calls that the agent declares as needed, and a few that this program makes.
static void sandbox_listed(void) {
    int allowed[256] = {SYS_exit_group, SYS_clock_nanosleep, SYS_nanosleep, SYS_newfstatat, SYS_brk, SYS_lseek, SYS_rt_sigreturn};
    size_t count = 7;
    const char *list = getenv("NEEDED");
    CHECK(list, "no list");
    for (char *end; *list && count < 256; list = *end ? end + 1 : end) allowed[count++] = (int)strtol(list, &end, 10);
    struct region r = merged(1024);
    filter_flags = SECCOMP_FILTER_FLAG_TSYNC;
    allow_only(1, allowed, count);
    work_on(&r, "with what is needed alone");
}

const struct scenario seccomp_scenarios[] = {
    {"seccomp-prctl", seccomp_prctl},
    {"seccomp-child", seccomp_child},
    {"seccomp-writers", seccomp_writers},
    {"seccomp-tsync", seccomp_tsync},
    {"sandbox", sandbox},
    {"sandbox-first", sandbox_first},
    {"sandbox-listed", sandbox_listed},
    {0},
};
