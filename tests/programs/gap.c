/* A program that notes how long it waits for its own memory. `gap MIB` fills that much memory with pages that another such program
 * has too, and touches a page every 50 microseconds, every eighth time by a write. Each line of input is answered by one line with
 * the longest touch, and the longest time from one touch to the next, both in microseconds since the last line. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define PAGE 4096UL

static volatile uint64_t *memory;
static size_t pages;
static _Atomic uint64_t longest_touch, longest_gap;

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void note(_Atomic uint64_t *most, uint64_t ns) {
    if (ns > atomic_load(most)) atomic_store(most, ns);
}

static void *touch(void *unused) {
    (void)unused;
    uint64_t seed = 88172645463325252ULL, last = now();
    for (uint64_t count = 0;; count++) {
        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
        volatile uint64_t *page = memory + seed % pages * (PAGE / 8);
        uint64_t before = now();
        uint64_t value = *page;
        if (value != seed % pages + 1) {
            printf("wrong %lu\n", (unsigned long)(seed % pages));
            exit(1);
        }
        if (count % 8 == 0) *page = value;
        uint64_t after = now();
        note(&longest_touch, after - before);
        note(&longest_gap, after - last);
        last = after;
        nanosleep(&(struct timespec){0, 50000}, 0);
    }
}

int main(int argc, char **argv) {
    size_t bytes = (argc > 1 ? strtoul(argv[1], 0, 10) : 64) << 20;
    pages = bytes / PAGE;
    memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    madvise((void *)memory, bytes, MADV_NOHUGEPAGE);
    for (size_t page = 0; page < pages; page++)
        for (size_t word = 0; word < PAGE / 8; word++) memory[page * (PAGE / 8) + word] = page + 1;
    pthread_t thread;
    if (pthread_create(&thread, 0, touch, 0)) return 2;
    puts("ready");
    fflush(stdout);
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        printf("%lu %lu\n", (unsigned long)(atomic_exchange(&longest_touch, 0) / 1000),
               (unsigned long)(atomic_exchange(&longest_gap, 0) / 1000));
        fflush(stdout);
    }
    return 0;
}
