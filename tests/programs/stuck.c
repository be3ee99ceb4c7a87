/* A program that a server of files keeps waiting. It fills 16 MiB with bytes that it can compute again. Commands on standard
 * input, each answered by "right":
 *   map PATH   one thread reads the first page of this file, and another maps memory meanwhile, once it is told to
 *   wait       tells it; now both wait for the server
 *   join       waits for the end of both
 *   check      compares its bytes */
#define _GNU_SOURCE
#include "known_bytes.h"
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGES = 4096, WORDS = 512 };

static sem_t told;
static volatile char *file;

static void must(int holds, const char *what)
{
	if (holds) return;
	perror(what);
	exit(1);
}

static void *reads(void *unused)
{
	(void)unused;
	return (void *)(uintptr_t)file[0];
}

static void *maps(void *unused)
{
	(void)unused;
	sem_wait(&told);
	must(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED, "mmap");
	return NULL;
}

int main(void)
{
	uint64_t *memory = mmap(NULL, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(memory != MAP_FAILED, "mmap");
	for (uint64_t page = 0; page < PAGES; page++)
		for (uint64_t at = 0; at < WORDS; at++) memory[page * WORDS + at] = word(page, 0, at);
	pthread_t threads[2];
	char line[4096] = "", *said = "ready";
	do {
		line[strcspn(line, "\n")] = 0;
		if (strncmp(line, "map ", 4) == 0) {
			int fd = open(line + 4, O_RDONLY);
			must(fd >= 0, line + 4);
			file = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
			must(file != MAP_FAILED && madvise((void *)file, 4096, MADV_RANDOM) == 0, "mmap of the file");
			sem_init(&told, 0, 0);
			must(pthread_create(&threads[1], NULL, maps, NULL) == 0, "pthread_create");
			must(pthread_create(&threads[0], NULL, reads, NULL) == 0, "pthread_create");
		} else if (strcmp(line, "wait") == 0) {
			sem_post(&told);
		} else if (strcmp(line, "join") == 0) {
			for (int i = 0; i < 2; i++) must(pthread_join(threads[i], NULL) == 0, "pthread_join");
		} else if (strcmp(line, "check") == 0) {
			for (uint64_t page = 0; page < PAGES; page++)
				for (uint64_t at = 0; at < WORDS; at++)
					if (memory[page * WORDS + at] != word(page, 0, at)) said = "wrong";
		}
		puts(said);
		fflush(stdout);
		if (strcmp(said, "ready") == 0) said = "right";
	} while (fgets(line, sizeof line, stdin));
	_exit(0);
}
