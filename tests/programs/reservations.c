/* Memory that is reserved without rights and opened piece by piece, or mapped where the program wants it, as allocators do. One
 * command per line on standard input:
 *   check       compare every byte
 *   merged      how many pages are the pool's, of each area, and of the islands
 *   storm MS    threads close, discard, replace, move, unmap and open parts for so long, each within an area of its own
 *   settle      opens what is closed, writes all
 *   fork        a child compares every byte
 * Each answers "right ...", or "wrong ..." and ends. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { AREAS = 3, AREA_PIECES = 512, PIECE_PAGES = 16, GROUP = 16, ISLANDS = 6000 };
#define PAGE 4096UL
#define PIECE (PIECE_PAGES * PAGE)
#define RESERVED (1UL << 40)
#define RW (PROT_READ | PROT_WRITE)
#define PLAIN (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

/* What a piece holds: closed, zeros, or the pages of its seed. */
enum { CLOSED = -1, ZEROS = 0 };
static char *area[AREAS], *islands;
static int holds[AREAS][AREA_PIECES];
static volatile int ended;
static FILE *maps;

static void wrong(const char *what, size_t number) {
    printf("wrong %s %zu in process %d\n", what, number, getpid());
    fflush(stdout);
    _exit(1);
}

static void refused(const char *what) {
    char text[100];
    snprintf(text, sizeof text, "%s (%s)", what, strerror(errno));
    wrong(text, 0);
}

static void *must(void *at, const char *what) {
    if (at == MAP_FAILED) refused(what);
    return at;
}

static void must_be(int result, const char *what) {
    if (result) refused(what);
}

static char *piece(int number, int at) { return area[number] + at * PIECE; }

static uint64_t word(int seed, size_t at) {
    return seed == ZEROS ? 0 : (seed * 0x9E3779B97F4A7C15ULL) ^ (at * 0xD1B54A32D192ED03ULL);
}

static void fill(int number, int at, int seed) {
    uint64_t *words = (uint64_t *)piece(number, at);
    for (size_t i = 0; i < PIECE / 8; i++) words[i] = word(seed, i);
    holds[number][at] = seed;
}

static void compare(int number, int at) {
    const uint64_t *words = (const uint64_t *)piece(number, at);
    if (holds[number][at] != CLOSED)
        for (size_t i = 0; i < PIECE / 8; i++)
            if (words[i] != word(holds[number][at], i)) wrong("word of area", number);
}

static void compare_all(void) {
    for (int number = 0; number < AREAS; number++)
        for (int at = 0; at < AREA_PIECES; at++) compare(number, at);
    for (size_t i = 0; i < ISLANDS; i++)
        if (*(uint64_t *)(islands + 2 * i * PAGE) != i % 3 + 1) wrong("island", i);
}

/* One thing that allocators do to a piece. */
static void change(int number, int at, uint64_t random) {
    char *start = piece(number, at);
    compare(number, at);
    if (holds[number][at] == CLOSED) {
        if (random % 2) must_be(mprotect(start, PIECE, RW), "open");
        else must(mmap(start, PIECE, RW, PLAIN | MAP_FIXED, -1, 0), "open anew");
        holds[number][at] = ZEROS;
        compare(number, at);
        fill(number, at, 1 + random / 2 % 4);
        return;
    }
    switch (random % 7) {
    case 0:
        must_be(madvise(start, PIECE, MADV_DONTNEED), "discard");
        must_be(mprotect(start, PIECE, PROT_NONE), "close");
        holds[number][at] = CLOSED;
        break;
    case 1:
        must(mmap(start, PIECE, PROT_NONE, PLAIN | MAP_FIXED, -1, 0), "replace");
        holds[number][at] = CLOSED;
        break;
    case 2:
        must_be(mprotect(start, PIECE, PROT_NONE), "close for a moment");
        must_be(mprotect(start, PIECE, RW), "open again");
        break;
    case 3:
        /* So much that it counts as a mapping of its own. */
        at -= at % GROUP, start = piece(number, at);
        must_be(munmap(start, GROUP * PIECE), "unmap");
        if (mmap(start, GROUP * PIECE, RW, PLAIN, -1, 0) != start) wrong("place that was wanted", at);
        for (int i = 0; i < GROUP; i++) holds[number][at + i] = ZEROS;
        break;
    case 4:
        must(mremap(start, PIECE, PIECE, MREMAP_MAYMOVE | MREMAP_FIXED, islands - 4 * RESERVED / 1024 + number * PIECE), "move");
        must(mremap(islands - 4 * RESERVED / 1024 + number * PIECE, PIECE, PIECE, MREMAP_MAYMOVE | MREMAP_FIXED, start), "move back");
        break;
    case 5:
        must_be(madvise(start, PIECE, MADV_DONTNEED), "discard");
        holds[number][at] = ZEROS;
        break;
    default:
        fill(number, at, 1 + random / 7 % 4);
    }
    compare(number, at);
}

static void *work(void *argument) {
    int number = (long)argument;
    uint64_t seed = number + 1;
    while (!ended) {
        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
        change(number, seed % (AREA_PIECES / 2), seed >> 20);
        compare(number, AREA_PIECES / 2 + (seed >> 40) % (AREA_PIECES / 2));
    }
    return NULL;
}

static void storm(long ms) {
    pthread_t threads[AREAS];
    ended = 0;
    for (long number = 0; number < AREAS; number++) pthread_create(&threads[number], NULL, work, (void *)number);
    usleep(ms * 1000);
    ended = 1;
    for (int number = 0; number < AREAS; number++) pthread_join(threads[number], NULL);
}

static void child(void) {
    pid_t pid = fork();
    int status;
    if (pid == 0) {
        compare_all();
        for (int at = 0; at < 40; at++) change(at % AREAS, at, at * 7919 + 13);
        compare_all();
        _exit(0);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status) wrong("child", pid);
}

static void settle(void) {
    for (int number = 0; number < AREAS; number++)
        for (int at = 0; at < AREA_PIECES; at++) {
            if (holds[number][at] == CLOSED) change(number, at, at);
            fill(number, at, 1 + at % 4);
        }
}

static size_t merged(char *start, size_t len) {
    char line[512];
    size_t pages = 0, from, to, first = (size_t)start, end = first + len;
    rewind(maps);
    while (fgets(line, sizeof line, maps))
        if (strstr(line, "memfd:pagefold-pool") && sscanf(line, "%zx-%zx", &from, &to) == 2 && from < end && to > first)
            pages += ((to < end ? to : end) - (from > first ? from : first)) / PAGE;
    return pages;
}

int main(void) {
    char line[64];
    maps = fopen("/proc/self/maps", "r");
    setvbuf(maps, malloc(1 << 16), _IOFBF, 1 << 16);
    char *reserved = must(mmap(NULL, RESERVED, PROT_NONE, PLAIN, -1, 0), "reserve");
    /* Pages with pages between that are closed, below all else. */
    islands = reserved + RESERVED / 64;
    for (size_t i = 0; i < ISLANDS; i++) {
        must_be(mprotect(islands + 2 * i * PAGE, PAGE, RW), "island");
        *(uint64_t *)(islands + 2 * i * PAGE) = i % 3 + 1;
    }
    /* Opened by mprotect, or mapped over, piece by piece; and mapped at a place that is wanted. */
    area[0] = reserved + RESERVED / 2, area[1] = reserved + RESERVED / 4 * 3;
    area[2] = must(mmap(reserved + RESERVED + (1UL << 30), AREA_PIECES * PIECE, RW, PLAIN, -1, 0), "wanted");
    for (int at = 0; at < AREA_PIECES; at++) {
        must_be(mprotect(piece(0, at), PIECE, RW), "open");
        must(mmap(piece(1, at), PIECE, RW, PLAIN | MAP_FIXED, -1, 0), "map");
        for (int number = 0; number < AREAS; number++) fill(number, at, 1 + at % 4);
    }
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        if (strncmp(line, "storm", 5) == 0) storm(atol(line + 5));
        if (strncmp(line, "fork", 4) == 0) child();
        if (strncmp(line, "settle", 6) == 0) settle();
        if (strncmp(line, "merged", 6) == 0) {
            printf("right");
            for (int number = 0; number < AREAS; number++) printf(" %zu", merged(area[number], AREA_PIECES * PIECE));
            printf(" %zu\n", merged(islands, 2 * ISLANDS * PAGE));
        } else {
            compare_all();
            puts("right");
        }
        fflush(stdout);
    }
    _exit(0);
}
