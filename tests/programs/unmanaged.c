/* Memory that pagefold leaves alone, 8 MiB for each reason. Commands on standard input, each answered by "right":
 *   fill   maps and writes all of it; beside it 8 MiB that are managed */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MIB (1UL << 20)
#define LEN (8 * MIB)
#define SMALL (64UL << 10)
#define RW (PROT_READ | PROT_WRITE)

static void must(int holds, const char *what) {
    if (holds) return;
    perror(what);
    exit(1);
}

static void write_pages(char *at, size_t len) {
    for (size_t i = 0; i < len; i += 4096) *(size_t *)(at + i) = i + 1;
}

/* Apart from its neighbours, so that the kernel joins nothing with it. */
static char *map(size_t len, int flags, int fd) {
    char *room = mmap(NULL, len + 2 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(room != MAP_FAILED, "room");
    char *at = mmap(room + MIB, len, RW, flags | MAP_FIXED, fd, 0);
    must(at != MAP_FAILED, "mmap");
    return at;
}

static char *filled(int flags) {
    char *at = map(LEN, flags | MAP_ANONYMOUS, -1);
    write_pages(at, LEN);
    return at;
}

static void watch(char *at) {
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register range = {.range = {(size_t)at, LEN}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    int uffd = syscall(SYS_userfaultfd, O_CLOEXEC);
    must(uffd >= 0 && ioctl(uffd, UFFDIO_API, &api) == 0 && ioctl(uffd, UFFDIO_REGISTER, &range) == 0, "userfaultfd");
}

static void fill(void) {
    filled(MAP_PRIVATE);
    filled(MAP_SHARED);
    must(mlock(filled(MAP_PRIVATE), LEN) == 0, "mlock");
    must(madvise(filled(MAP_PRIVATE), LEN, MADV_DONTDUMP) == 0, "MADV_DONTDUMP");
    must(madvise(filled(MAP_PRIVATE), LEN, MADV_WIPEONFORK) == 0, "MADV_WIPEONFORK");
    must(mprotect(filled(MAP_PRIVATE), LEN, PROT_READ) == 0, "mprotect");
    madvise(filled(MAP_PRIVATE), LEN, MADV_UNMERGEABLE);
    watch(filled(MAP_PRIVATE));
    for (size_t at = 0; at < LEN; at += SMALL) write_pages(map(SMALL, MAP_PRIVATE | MAP_ANONYMOUS, -1), SMALL);
    char path[] = "/var/tmp/unmanaged-XXXXXX";
    int file = mkstemp(path);
    must(file >= 0 && unlink(path) == 0, "mkstemp");
    char *bytes = filled(MAP_PRIVATE);
    must(write(file, bytes, LEN) == (ssize_t)LEN && munmap(bytes, LEN) == 0, "file");
    char *copies = map(LEN, MAP_PRIVATE, file);
    write_pages(copies, LEN);
}

int main(void) {
    char line[64];
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        if (strncmp(line, "fill", 4) == 0) fill();
        puts("right");
        fflush(stdout);
    }
    _exit(0);
}
