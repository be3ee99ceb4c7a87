// A library that discards memory with a lock held that its fork handlers take, as allocators with a thread that purges do
// (LIBRARY); and a program that forks while that goes on.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGES = 50, FORKS = 1000 };

void purge(char *at);
int own_memory(void);

#ifdef LIBRARY
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *own;
static int handled;

static int map_and_discard(void) {
    if (own) munmap(own, 4 << 20);
    own = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (own == MAP_FAILED) return 1;
    own[4096] = 1;
    return madvise(own, 4 << 20, MADV_DONTNEED) != 0 || own[4096] != 0;
}

// Handlers may use memory as anybody.
static void before(void) {
    pthread_mutex_lock(&lock);
    if (map_and_discard()) handled = -1;
}

static void after(void) {
    if (map_and_discard() || handled < 0) handled = -1;
    else handled++;
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void begin(void) { pthread_atfork(before, after, after); }

void purge(char *at) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < PAGES; i++) madvise(at + i * 4096, 4096, MADV_DONTNEED);
    pthread_mutex_unlock(&lock);
}

int own_memory(void) { return handled; }
#else
static void *purge_on(void *at) {
    for (;;) {
        purge(at);
        usleep(50);
    }
    return NULL;
}

int main(void) {
    // Ends what is stuck.
    alarm(120);
    char *at = mmap(NULL, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_t thread;
    if (at == MAP_FAILED || pthread_create(&thread, NULL, purge_on, at) != 0) return 2;
    for (int i = 1; i <= FORKS; i++) {
        int status;
        pid_t child = fork();
        if (child == 0) _exit(own_memory() == i ? 0 : 1);
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0 || own_memory() != i) {
            fprintf(stderr, "fork %d went wrong\n", i);
            return 1;
        }
    }
    return 0;
}
#endif
