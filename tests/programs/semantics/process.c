// Descriptors and threads: the agent is not visible among them.
#include "common.h"

#include <poll.h>
#include <sched.h>
#include <sys/stat.h>

static void close_all(void) {
    struct region r = fill(1024, 16, 1000);
    mark_mergeable(&r);
    for (int fd = 3; fd < 1024; fd++) close(fd);
    raw(SYS_close_range, 3, ~0u, 0, 0, 0, 0);
    wait_merged(&r, 700);
    check(&r, "with every descriptor closed");
    // The program's table has no descriptor of the agent.
    for (int fd = 3; fd < 64; fd++) CHECK(fcntl(fd, F_GETFD) == -1, "descriptor %d is not the program's", fd);
    write_all(&r, 11000, "with every descriptor closed");
}

// The agent's thread exists but has not run yet: a descriptor that the program closes meanwhile is closed.
static void closed_at_once(void) {
    struct region r = fill(1024, 256, 1000);
    madvise(r.at, r.pages * PAGE, MADV_NOHUGEPAGE);
    int ends[2];
    CHECK(pipe(ends) == 0, "pipe");
    cpu_set_t before, one;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0, "sched_getaffinity");
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    // The agent shares this processor, and a real-time thread does not yield to it.
    if (sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1}) != 0) SKIP("no right to real time");
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0, "sched_setaffinity");
    CHECK(madvise(r.at, r.pages * PAGE, MADV_MERGEABLE) == 0, "MADV_MERGEABLE");
    close(ends[1]);
    struct pollfd end = {.fd = ends[0], .events = POLLIN};
    int hung = poll(&end, 1, 0) == 1 && end.revents & POLLHUP;
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0, "sched_setaffinity");
    CHECK(sched_setscheduler(0, SCHED_OTHER, &(struct sched_param){0}) == 0, "sched_setscheduler");
    CHECK(hung, "a pipe that was closed is open");
    close(ends[0]);
    wait_merged(&r, 700);
    check(&r, "after all");
}

static void *wait_for_end(void *end) {
    while (!atomic_load((atomic_int *)end)) nap(1);
    return NULL;
}

static unsigned long threads_by(int dir, const char *path) {
    struct stat at, plain;
    CHECK(fstatat(dir, path, &at, 0) == 0, "fstatat %s", path);
    if (*path == '/') {
        CHECK(stat(path, &plain) == 0, "stat %s", path);
        CHECK(plain.st_nlink == at.st_nlink, "%s has %lu and %lu links", path, (unsigned long)plain.st_nlink, (unsigned long)at.st_nlink);
    }
    return at.st_nlink - 2;
}

// The number of threads in /proc/self/stat, read by a stream; the other fields are the kernel's.
static long threads_told(void) {
    FILE *file = fopen("/proc/self/stat", "r");
    char line[1024] = "", name[64];
    CHECK(file && fgets(line, sizeof line, file) && fclose(file) == 0, "/proc/self/stat");
    int pid, parent;
    long count;
    CHECK(sscanf(line, "%d (%63[^)]) %*c %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %ld", &pid, name, &parent, &count) == 4, "%s", line);
    CHECK(pid == getpid() && parent == getppid() && strcmp(name, "semantics") == 0 && line[strlen(line) - 1] == '\n', "%s", line);
    return count;
}

// Chromium's sandbox requires a process of one thread and counts the directories in /proc/self/task: the agent is not counted.
static void tasks(void) {
    struct region r = merged(1024);
    struct stat kernels;
    CHECK(syscall(SYS_newfstatat, AT_FDCWD, "/proc/self/task", &kernels, 0) == 0, "newfstatat");
    CHECK(kernels.st_nlink > 3, "the agent has no thread here");
    int proc = open("/proc/", O_RDONLY | O_DIRECTORY);
    char own[64];
    snprintf(own, sizeof own, "/proc/%d/task//", getpid());
    atomic_int end = 0;
    pthread_t thread;
    for (unsigned long count = 1; count <= 2; count++) {
        unsigned long counts[] = {threads_by(proc, "self/task/"), threads_by(proc, "self/task"), threads_by(proc, own), threads_by(-1, "/proc/self/task")};
        for (int i = 0; i < 4; i++) CHECK(counts[i] == count, "%lu threads by name %d, not %lu", counts[i], i, count);
        CHECK(threads_told() == (long)count, "%ld threads are shown, not %lu", threads_told(), count);
        if (count == 1) CHECK(pthread_create(&thread, NULL, wait_for_end, &end) == 0, "pthread_create");
    }
    atomic_store(&end, 1);
    pthread_join(thread, NULL);
    // A write beyond RLIMIT_FSIZE would end the program by a signal: reading the stream must write nothing.
    struct rlimit before, none;
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0, "getrlimit");
    none = before;
    none.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_FSIZE, &none) == 0, "setrlimit");
    threads_told();
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0, "setrlimit");
    // Another process's directory, and a directory elsewhere with the same name.
    pid_t child = fork();
    if (child == 0) {
        nap(60000);
        _exit(0);
    }
    snprintf(own, sizeof own, "/proc/%d/task", child);
    struct stat seen;
    CHECK(stat(own, &seen) == 0 && syscall(SYS_newfstatat, AT_FDCWD, own, &kernels, 0) == 0, "stat %s", own);
    CHECK(seen.st_nlink == kernels.st_nlink || seen.st_nlink == kernels.st_nlink - 1, "%lu links", (unsigned long)seen.st_nlink);
    CHECK(seen.st_nlink >= 3, "a child without threads");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    char dir[] = "/tmp/tasks-XXXXXX";
    CHECK(mkdtemp(dir) && chdir(dir) == 0 && mkdir("self", 0700) == 0 && mkdir("self/task", 0700) == 0, "a directory");
    CHECK(stat("self/task", &seen) == 0 && seen.st_nlink <= 2 && seen.st_nlink >= 1, "%lu links of a directory", (unsigned long)seen.st_nlink);
    CHECK(rmdir("self/task") == 0 && rmdir("self") == 0 && rmdir(dir) == 0, "rmdir");
    CHECK(stat("self/task", &seen) == -1 && errno == ENOENT, "stat of nothing");
    CHECK(fstatat(proc, "", &seen, AT_EMPTY_PATH) == 0 && S_ISDIR(seen.st_mode), "fstatat of a descriptor");
    close(proc);
    check(&r, "after all");
}

const struct scenario process_scenarios[] = {
    {"close-all", close_all},
    {"closed-at-once", closed_at_once},
    {"tasks", tasks},
    {0},
};
