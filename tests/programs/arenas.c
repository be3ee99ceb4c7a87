/* Threads with data in small blocks of the C library's malloc, which gives each thread an arena. Six hold the same bytes, one
 * holds more than one heap has room for. One command per line on standard input:
 *   check       compare every byte
 *   merged      how many pages of blocks are the pool's, in first heaps and in later ones
 *   storm MS    for so long the holders write and compare, while others allocate, look for zeros from calloc, free, trim and fork,
 *               and threads come, fill heaps, let them go and end
 *   fork        a child compares every byte
 * Each answers "right ...", or "wrong ..." and ends. */
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { HOLDERS = 6, BLOCKS = 300, DEEP_BLOCKS = 1800, CHURNERS = 3, COMERS = 2, CHURNED = 300 };
#define PAGE 4096UL
#define HEAP (64UL << 20)
/* Words of a block that takes twelve pages with its size, so that those of one heap lie alike. */
#define WHOLE (12 * PAGE / 8 - 1)

struct block {
    uint64_t *words;
    size_t count, number;
    /* The word that its holder writes, and what it wrote last. */
    uint64_t last;
};
static struct block held[HOLDERS][BLOCKS], deep[DEEP_BLOCKS];
static pthread_barrier_t filled;
static volatile int ended;
static FILE *maps;

static uint64_t mixed(uint64_t x) {
    x ^= x >> 31, x *= 0x9E3779B97F4A7C15ULL, x ^= x >> 29;
    return x;
}

static void wrong(const char *what, size_t number) {
    printf("wrong %s %zu in process %d\n", what, number, getpid());
    fflush(stdout);
    _exit(1);
}

static size_t changed_word(const struct block *block) { return mixed(block->number + 1) % block->count; }

static uint64_t word(const struct block *block, size_t at) {
    return at == changed_word(block) ? block->last : mixed(block->number << 32 | at);
}

static void fill(struct block *block, size_t number, size_t count) {
    block->number = number;
    block->count = count;
    block->words = malloc(block->count * 8);
    if (!block->words) wrong("malloc", number);
    for (size_t at = 0; at < block->count; at++) block->words[at] = word(block, at);
}

static void compare(const struct block *block, const char *what) {
    for (size_t at = 0; at < block->count; at++)
        if (block->words[at] != word(block, at)) wrong(what, at);
}

static void compare_all(void) {
    for (int holder = 0; holder < HOLDERS; holder++)
        for (int i = 0; i < BLOCKS; i++) compare(&held[holder][i], "block of a holder");
    for (int i = 0; i < DEEP_BLOCKS; i++) compare(&deep[i], "block of later heaps");
}

/* Writes now and then, compares always; half of the blocks never change. */
static void hold_for_a_moment(int holder, uint64_t *seed) {
    for (int turn = 0; turn < 20; turn++) {
        struct block *block = &held[holder][(*seed = mixed(*seed + turn)) % BLOCKS];
        compare(block, "word");
        if (block->number % 2) block->words[changed_word(block)] = block->last = *seed;
    }
    usleep(500);
}

static pthread_mutex_t turn_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turn_begins = PTHREAD_COND_INITIALIZER, turn_ends = PTHREAD_COND_INITIALIZER;
static int turn, resting;

static void *hold(void *number) {
    int holder = (long)number, last = 0;
    uint64_t seed = holder + 1;
    for (int i = 0; i < BLOCKS; i++) fill(&held[holder][i], i, 64 + mixed(i) % 12000);
    pthread_barrier_wait(&filled);
    for (;;) {
        pthread_mutex_lock(&turn_lock);
        resting++;
        pthread_cond_signal(&turn_ends);
        while (turn == last) pthread_cond_wait(&turn_begins, &turn_lock);
        last = turn;
        resting--;
        pthread_mutex_unlock(&turn_lock);
        while (!ended) hold_for_a_moment(holder, &seed);
    }
    return NULL;
}

static void *go_deep(void *unused) {
    (void)unused;
    for (int i = 0; i < DEEP_BLOCKS; i++) fill(&deep[i], 10000 + i % 100, WHOLE);
    pthread_barrier_wait(&filled);
    for (;;) pause();
    return NULL;
}

static void must_be(const char *block, size_t len, char byte, const char *what) {
    for (size_t at = 0; at < len; at++)
        if (block[at] != byte) wrong(what, at);
}

/* Allocates, grows and frees, for a time or so many steps. */
static void churn(uint64_t seed, long steps) {
    char *block[CHURNED] = {0};
    size_t len[CHURNED];
    for (long step = 0; steps ? step < steps : !ended; step++) {
        int at = (seed = mixed(seed + step)) % CHURNED;
        char byte = at % 3 + 1;
        if (block[at]) must_be(block[at], len[at], byte, "byte of a churner");
        if (!block[at]) {
            len[at] = 1 + (seed >> 20) % (1UL << (8 + (seed >> 50) % 9));
            block[at] = calloc(1, len[at]);
            must_be(block[at], len[at], 0, "byte from calloc");
        } else if (seed >> 63) {
            len[at] = 1 + (seed >> 20) % 60000;
            block[at] = realloc(block[at], len[at]);
        } else {
            free(block[at]);
            block[at] = NULL;
            if ((seed >> 40) % 256 == 0) malloc_trim(0);
            continue;
        }
        memset(block[at], byte, len[at]);
    }
    for (int at = 0; at < CHURNED; at++) free(block[at]);
}

static void *churn_on(void *number) {
    churn((long)number + 100, 0);
    return NULL;
}

/* Comes, fills an arena's heaps, lets them go from the end, and ends. */
static void *come(void *unused) {
    (void)unused;
    enum { MANY = 1600 };
    static __thread struct block block[MANY];
    for (int i = 0; i < MANY; i++) fill(&block[i], 20000 + i % 100, WHOLE);
    usleep(100000);
    for (int i = MANY; i-- > 0;) {
        compare(&block[i], "word of who came");
        free(block[i].words);
    }
    return NULL;
}

static void *come_and_go(void *unused) {
    (void)unused;
    while (!ended) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, come, NULL)) wrong("thread", 0);
        pthread_join(thread, NULL);
    }
    return NULL;
}

static void child(void) {
    pid_t pid = fork();
    if (pid < 0) wrong("fork", 0);
    if (pid == 0) {
        /* What the holders wrote in that moment is not told apart. */
        for (int i = 0; i < DEEP_BLOCKS; i++) compare(&deep[i], "word in a child");
        for (int holder = 0; holder < HOLDERS; holder++)
            for (int i = 0; i < BLOCKS; i += 2) compare(&held[holder][i], "word in a child");
        churn(getpid(), 2000);
        _exit(0);
    }
    int status;
    if (waitpid(pid, &status, 0) != pid || status != 0) wrong("child", status);
}

static void *fork_on(void *unused) {
    (void)unused;
    while (!ended) {
        child();
        usleep(50000);
    }
    return NULL;
}

static void storm(long ms) {
    pthread_t threads[CHURNERS + COMERS + 1];
    int count = 0;
    ended = 0;
    pthread_mutex_lock(&turn_lock);
    turn++;
    pthread_cond_broadcast(&turn_begins);
    pthread_mutex_unlock(&turn_lock);
    for (long number = 0; number < CHURNERS; number++) pthread_create(&threads[count++], NULL, churn_on, (void *)number);
    for (int number = 0; number < COMERS; number++) pthread_create(&threads[count++], NULL, come_and_go, NULL);
    pthread_create(&threads[count++], NULL, fork_on, NULL);
    usleep(ms * 1000);
    ended = 1;
    while (count > 0) pthread_join(threads[--count], NULL);
    pthread_mutex_lock(&turn_lock);
    while (resting < HOLDERS) pthread_cond_wait(&turn_ends, &turn_lock);
    pthread_mutex_unlock(&turn_lock);
}

/* True if the block lies in the first heap of its arena: the arena is in the same heap. */
static int is_first(const struct block *block) {
    uint64_t heap = (uint64_t)block->words & ~(HEAP - 1);
    return (*(uint64_t *)heap & ~(HEAP - 1)) == heap;
}

static void count_merged(const struct block *blocks, size_t count, uint64_t from, uint64_t to, size_t pages[2]) {
    for (size_t i = 0; i < count; i++) {
        uint64_t start = ((uint64_t)blocks[i].words + PAGE - 1) & ~(PAGE - 1);
        uint64_t end = (uint64_t)(blocks[i].words + blocks[i].count) & ~(PAGE - 1);
        start = start < from ? from : start, end = end > to ? to : end;
        if (start < end) pages[!is_first(&blocks[i])] += (end - start) / PAGE;
    }
}

static void merged(size_t pages[2]) {
    char line[512];
    uint64_t from, to;
    rewind(maps);
    while (fgets(line, sizeof line, maps))
        if (strstr(line, "memfd:pagefold-pool") && strstr(line, " rw-p ") && sscanf(line, "%lx-%lx", &from, &to) == 2) {
            for (int holder = 0; holder < HOLDERS; holder++) count_merged(held[holder], BLOCKS, from, to, pages);
            count_merged(deep, DEEP_BLOCKS, from, to, pages);
        }
}

int main(void) {
    char line[64];
    pthread_t thread;
    size_t later = 0;
    maps = fopen("/proc/self/maps", "r");
    setvbuf(maps, malloc(1 << 16), _IOFBF, 1 << 16);
    /* Blocks stay small ones. */
    mallopt(M_MMAP_THRESHOLD, 128 << 10);
    pthread_barrier_init(&filled, NULL, HOLDERS + 2);
    for (long number = 0; number < HOLDERS; number++) pthread_create(&thread, NULL, hold, (void *)number);
    pthread_create(&thread, NULL, go_deep, NULL);
    pthread_barrier_wait(&filled);
    for (int i = 0; i < DEEP_BLOCKS; i++) later += !is_first(&deep[i]);
    if (later < DEEP_BLOCKS / 8 || !is_first(&deep[0])) wrong("later heaps", later);
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        size_t pages[2] = {0};
        if (strncmp(line, "storm", 5) == 0) storm(atol(line + 5));
        if (strncmp(line, "fork", 4) == 0) child();
        if (strncmp(line, "merged", 6) == 0) merged(pages);
        else compare_all();
        printf("right %zu %zu\n", pages[0], pages[1]);
        fflush(stdout);
    }
    _exit(0);
}
