// A program that gives up users, capabilities, rights or namespaces.
#include "common.h"

#include <dirent.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>

// Reads, writes and discards memory that was merged, then waits for another merge and does so again.
static void still_works(struct region *r, uint64_t base, const char *when) {
    check(r, when);
    write_all(r, base, when);
    nap(800);
    for (size_t i = 0; i < r->pages; i++) CHECK(page_is(r->at + i * PAGE, base + i), "page %zu is wrong %s", i, when);
    CHECK(madvise(r->at, 100 * PAGE, MADV_DONTNEED) == 0 && page_is_zero(r->at), "a discard %s", when);
}

static void identity(void) {
    struct region r = merged(1024);
    if (geteuid() != 0) SKIP("needs root to become another user");
    CHECK(setgid(65534) == 0 && setuid(65534) == 0, "setuid");
    still_works(&r, 12000, "as another user");
}

// A process that is not dumpable cannot read its own files in /proc.
static void not_dumpable(void) {
    struct region r = merged(1024);
    CHECK(mprotect(r.at, 128 * PAGE, PROT_READ) == 0, "mprotect");
    CHECK(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0, "PR_SET_DUMPABLE");
    CHECK(pool_pages(r.at, r.pages * PAGE) == 0, "%zu pages are merged without an agent", pool_pages(r.at, r.pages * PAGE));
    CHECK(mprotect(r.at, 128 * PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
    check(&r, "unmerged");
    write_all(&r, 53000, "unmerged");
}

// Without free descriptors, and then without /proc, merged memory can be discarded and unmerged, and other memory locked.
static void no_proc(void) {
    static char plain[16];
    struct region r = merged(1024);
    char dir[] = "/tmp/semantics-XXXXXX";
    CHECK(mkdtemp(dir), "mkdtemp");
    CHECK((kept_maps = fopen("/proc/self/maps", "r")), "maps");
    struct rlimit before, none;
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0, "getrlimit");
    none = before;
    none.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit");
    CHECK(madvise(r.at, 128 * PAGE, MADV_DONTFORK) == 0, "MADV_DONTFORK");
    CHECK(madvise(r.at, 32 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED without descriptors");
    CHECK(madvise(r.at + 32 * PAGE, 32 * PAGE, MADV_FREE) == 0, "MADV_FREE without descriptors");
    CHECK(mlock(plain, sizeof plain) == 0 || errno == ENOMEM || errno == EPERM, "mlock without descriptors");
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0, "setrlimit");
    CHECK(flag_at(r.at, " dc"), "MADV_DONTFORK is forgotten");
    CHECK(chdir(dir) == 0 && rmdir(dir) == 0, "chdir");
    if (chroot(".") != 0) SKIP("no right to chroot");
    CHECK(access("/proc/self", F_OK) != 0, "chroot");
    CHECK(mlock(plain, sizeof plain) == 0 || errno == ENOMEM || errno == EPERM, "mlock");
    CHECK(madvise(r.at + 64 * PAGE, 64 * PAGE, MADV_DONTNEED) == 0, "MADV_DONTNEED");
    CHECK(raw(SYS_madvise, (long)r.at + 128 * PAGE, 128 * PAGE, MADV_DONTNEED, 0, 0, 0) == 0, "raw MADV_DONTNEED");
    for (size_t i = 0; i < 256; i++) CHECK(page_is_zero(r.at + i * PAGE), "page %zu shows old bytes", i);
    CHECK(pool_pages(r.at, 256 * PAGE) == 0, "discarded pages are shown from the pool");
    CHECK(pool_pages(r.at, r.pages * PAGE) >= 512, "nothing is merged any more");
    for (size_t i = 256; i < r.pages; i++) CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu is wrong", i);
    CHECK(setuid(65534) == 0, "setuid");
    CHECK(pool_pages(r.at, r.pages * PAGE) == 0, "%zu pages are merged without an agent", pool_pages(r.at, r.pages * PAGE));
    for (size_t i = 256; i < r.pages; i++) CHECK(page_is(r.at + i * PAGE, number_of(&r, i)), "page %zu is wrong, unmerged", i);
    write_all(&r, 52000, "unmerged");
}

long one_of_many_calls(int turn) {
    struct { uint32_t version; int pid; } head = {0x20080522, 0};
    struct { uint32_t effective, permitted, inheritable; } data[2];
    struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog filter = {1, &allow};
    gid_t groups[] = {65534, 65533};
    switch (turn) {
    case 0: return prctl(PR_CAPBSET_DROP, 22 /* CAP_SYS_BOOT */, 0, 0, 0);
    case 1:
        if (syscall(SYS_capget, &head, data) != 0) return -1;
        data[0].effective = data[0].permitted &= ~(1u << 23 /* CAP_SYS_NICE */);
        return syscall(SYS_capset, &head, data);
    case 2: return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    case 3: return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0);
    case 4: return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter);
    case 5: return setgroups(2, groups);
    case 6: return syscall(SYS_setresgid, 65534, 65534, 65534);
    case 7: return setreuid(-1, 65534) || seteuid(0) || setuid(65534);
    default: return 1;
    }
}

// The credentials of `task` as text, from its status in /proc.
static void powers(const char *task, char *text, size_t room) {
    static const char *const names[] = {"Uid:", "Gid:", "Groups:", "CapPrm:", "CapBnd:", "NoNewPrivs:", "Seccomp_filters:"};
    char path[300], line[512];
    snprintf(path, sizeof path, "/proc/self/task/%s/status", task);
    FILE *file = fopen(path, "r");
    size_t len = 0;
    text[0] = 0;
    if (!file) return;
    while (fgets(line, sizeof line, file))
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            if (strncmp(line, names[i], strlen(names[i])) == 0) len += snprintf(text + len, room - len, "%s", line);
    fclose(file);
}

// Checks that all threads have the same credentials; returns their number. A thread that has ended stays listed for a moment.
static size_t all_threads_have_the_same(int turn) {
    double began = now();
again:;
    char own[4096], others[4096], number[16];
    snprintf(number, sizeof number, "%d", getpid());
    powers(number, own, sizeof own);
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks, "/proc/self/task");
    size_t threads = 0;
    for (struct dirent *task; (task = readdir(tasks));) {
        if (task->d_name[0] == '.') continue;
        threads++;
        powers(task->d_name, others, sizeof others);
        if (strcmp(own, others) != 0 && now() - began < 10) {
            closedir(tasks);
            nap(1);
            goto again;
        }
        CHECK(strcmp(own, others) == 0, "after call %d a thread has\n%snot\n%s", turn, others, own);
    }
    closedir(tasks);
    return threads;
}

// No thread of the program keeps what the program gives up, even by calls that change the calling thread only.
static void privileges(void) {
    if (geteuid() != 0) SKIP("needs root to give something up");
    struct region r = merged(1024);
    CHECK(all_threads_have_the_same(0) == 2, "no agent");
    for (int turn = 0; turn <= 7; turn++) {
        CHECK(one_of_many_calls(turn) == 0, "call %d", turn);
        // While a thread may still choose users and groups, it has given up none; the agent need not follow.
        if (turn < 5 || turn == 7) CHECK(all_threads_have_the_same(turn) == 2, "no agent after call %d", turn);
    }
    CHECK(setuid(0) != 0, "the program became root again");
    still_works(&r, 14000, "with nothing left");
}

// Gives up a capability at a line of input, when no daemon answers the agent.
static void less_with_nobody_there(void) {
    struct region r = fill(64, 16, 1000);
    printf("ready\n");
    fflush(stdout);
    CHECK(getchar() == '\n', "a line");
    madvise(r.at, r.pages * PAGE, MADV_MERGEABLE);
    nap(200);
    CHECK(one_of_many_calls(1) == 0, "capset");
    check(&r, "with less");
}

// A handler interrupts memory calls and forks; the child gives up a capability in the handler, or calls on after it.
static volatile sig_atomic_t gave_up;
static void on_privileged_tick(int signal) {
    (void)signal;
    int before = errno, status;
    pid_t child = plain_fork();
    if (child == 0) {
        if (one_of_many_calls(1) != 0) _exit(2);
        if (atomic_fetch_add(&ticks, 1) % 2) _exit(0);
        gave_up = 1;
        errno = before;
        return;
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (status != 0) _exit(3);
    atomic_fetch_add(&ticks, 1);
    errno = before;
    next_tick();
}

static void privileges_in_handlers(void) {
    if (geteuid() != 0) SKIP("needs root to give something up");
    struct region r = merged(1024);
    char *beside = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(beside != MAP_FAILED, "mmap");
    start_ticks(on_privileged_tick, 2000);
    while (atomic_load(&ticks) < 100 && !gave_up) {
        CHECK(munmap(beside, PAGE) == 0, "munmap among signals");
        CHECK(mmap(beside, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == beside, "mmap");
    }
    stop_ticks();
    if (gave_up) CHECK(mprotect(beside, PAGE, PROT_READ) == 0, "mprotect");
    size_t threads = all_threads_have_the_same(1);
    CHECK(threads == 2, "%zu threads, %s", threads, gave_up ? "with less" : "with all");
    check(&r, "after signals");
}

// No file shows the Landlock rules of a thread, so a new agent thread, which inherits them, replaces the old one.
static void landlock(void) {
    struct { uint64_t files; } rules = {1 << 1 /* LANDLOCK_ACCESS_FS_WRITE_FILE */};
    int set = syscall(444 /* landlock_create_ruleset */, &rules, sizeof rules, 0);
    if (set < 0) SKIP("no Landlock here");
    struct region r = merged(1024);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS");
    long before = agent_thread();
    CHECK(syscall(446 /* landlock_restrict_self */, set, 0) == 0, "landlock_restrict_self");
    CHECK(before != 0 && agent_thread() != before, "the agent's thread is the same, %ld", before);
    check(&r, "behind Landlock");
    write_all(&r, 15000, "behind Landlock");
}

static void user_namespace(void) {
    struct region r = merged(1024);
    if (unshare(CLONE_NEWUSER) != 0) {
        if (errno == EPERM || errno == ENOSPC) SKIP("no user namespaces here");
        CHECK(0, "unshare: a process of one thread may");
    }
    check(&r, "in a user namespace");
    write_all(&r, 13000, "in a user namespace");
    CHECK(madvise(r.at, 100 * PAGE, MADV_DONTNEED) == 0 && page_is_zero(r.at), "a discard in a namespace");
}

// The kernel refuses setns(2) to a thread that shares its root directory with another thread, such as the agent.
static void mount_namespace(void) {
    struct region r = merged(1024);
    int space = open("/proc/self/ns/mnt", O_RDONLY);
    CHECK(space >= 0, "no namespaces");
    if (syscall(SYS_setns, space, CLONE_NEWNS) != 0 && errno == EPERM) SKIP("no right to change namespaces");
    for (int turn = 0; turn < 2; turn++) {
        CHECK((turn ? setns(space, CLONE_NEWNS) : syscall(SYS_setns, space, CLONE_NEWNS)) == 0, "setns in turn %d", turn);
        check(&r, "in a namespace");
        struct region later = merged(1024);
        CHECK(munmap(later.at, later.pages * PAGE) == 0, "munmap");
    }
}

const struct scenario privileges_scenarios[] = {
    {"identity", identity},
    {"not-dumpable", not_dumpable},
    {"no-proc", no_proc},
    {"privileges", privileges},
    {"less-with-nobody-there", less_with_nobody_there},
    {"privileges-in-handlers", privileges_in_handlers},
    {"landlock", landlock},
    {"user-namespace", user_namespace},
    {"mount-namespace", mount_namespace},
    {0},
};
