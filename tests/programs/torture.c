/* A static program that makes bare system calls on memory that is being merged, as fast as it can, and counts them. Each byte has a
 * value that is known; a wrong one ends the program with status 3.
 *
 * Commands come by standard input, a line each: WORD COUNT.
 *   discard N   MADV_DONTNEED of short runs, which must read zeros, by two threads
 *   fork N      children that compare what they see
 *   map N       mappings and unmappings, by four threads: the kernel gives one the addresses of another
 *   check 1     every byte of the area
 * The answer is a line: "right", and how often the word's call was made. */
#define _GNU_SOURCE
#include "bare_call.h"
#include "known_bytes.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
#define WORDS (PAGE / 8)
#define THREADS 4

static unsigned long pages;
static unsigned char *area;
/* 1 for a page that reads zeros, 0 for one with the bytes that all instances have. Each page is one thread's. */
static unsigned char *is_zero;

static void fail(const char *what, unsigned long page, unsigned long at, uint64_t have)
{
	fprintf(stderr, "torture: %s: page %lu, word %lu: %016lx\n", what, page, at, (unsigned long)have);
	_exit(3);
}

static void fill(volatile uint64_t *at, uint64_t page, uint64_t version)
{
	for (unsigned long i = 0; i < WORDS; i++)
		at[i] = word(page, version, i);
}

static void compare(const char *what, const volatile uint64_t *at, uint64_t page, uint64_t version)
{
	for (unsigned long i = 0; i < WORDS; i++)
		if (at[i] != word(page, version, i))
			fail(what, page, i, at[i]);
}

static void compare_zero(const char *what, const volatile uint64_t *at, uint64_t page)
{
	for (unsigned long i = 0; i < WORDS; i++)
		if (at[i])
			fail(what, page, i, at[i]);
}

static volatile uint64_t *page_at(unsigned long page)
{
	return (volatile uint64_t *)(area + page * PAGE);
}

static void check_page(const char *what, unsigned long page)
{
	if (is_zero[page])
		compare_zero(what, page_at(page), page);
	else
		compare(what, page_at(page), page, 0);
}

static void check(const char *what)
{
	for (unsigned long page = 0; page < pages; page++)
		check_page(what, page);
}

struct job {
	unsigned long number, count;
	uint64_t state;
};

/* Each thread has its own part of the area. */
static void *discard(void *argument)
{
	struct job *job = argument;
	unsigned long part = pages / 2, begin = job->number * part;
	for (unsigned long turn = 0; turn < job->count; turn++) {
		unsigned long len = 1 + below(&job->state, 4), first = begin + below(&job->state, part - len);
		/* What was there must have been right. */
		check_page("before a discard", first);
		if (bare_call(SYS_madvise, (long)page_at(first), len * PAGE, MADV_DONTNEED, 0, 0, 0))
			fail("madvise", first, 0, 0);
		for (unsigned long page = first; page < first + len; page++) {
			compare_zero("a discard", page_at(page), page);
			is_zero[page] = below(&job->state, 8) == 0;
			if (!is_zero[page])
				fill(page_at(page), page, 0);
		}
	}
	return NULL;
}

static unsigned long forks(unsigned long count, uint64_t *state)
{
	for (unsigned long turn = 0; turn < count; turn++) {
		uint64_t seed = *state ^ (turn * 2654435761u);
		long child = bare_call(SYS_clone, SIGCHLD, 0, 0, 0, 0, 0);
		if (child < 0)
			fail("clone", turn, 0, child);
		if (!child) {
			for (int i = 0; i < 64; i++)
				check_page("a child", below(&seed, pages));
			/* Its discards are its own. */
			unsigned long page = below(&seed, pages);
			bare_call(SYS_madvise, (long)page_at(page), PAGE, MADV_DONTNEED, 0, 0, 0);
			compare_zero("a discard of a child", page_at(page), page);
			if (turn % 256 == 0) {
				is_zero[page] = 1;
				check("all of a child");
			}
			bare_call(SYS_exit_group, 0, 0, 0, 0, 0, 0);
		}
		/* Meanwhile some pages are written and discarded, so that there is always something to merge. */
		for (int i = 0; i < 8; i++) {
			unsigned long page = below(state, pages);
			if (below(state, 2))
				bare_call(SYS_madvise, (long)page_at(page), PAGE, MADV_DONTNEED, 0, 0, 0);
			fill(page_at(page), page, 0);
			is_zero[page] = 0;
		}
		int status = 0;
		if (bare_call(SYS_wait4, child, (long)&status, 0, 0, 0, 0) != child || status)
			fail("a child's end", turn, 0, status);
	}
	return count;
}

#define LONG 256
struct mapping {
	unsigned char *at;
	unsigned long len, version;
};

static unsigned long renew(struct mapping *mapping, unsigned long len, unsigned long version)
{
	if (mapping->at) {
		for (unsigned long page = 0; page < mapping->len; page++)
			compare("a mapping", (void *)(mapping->at + page * PAGE), page, mapping->version);
		if (bare_call(SYS_munmap, (long)mapping->at, mapping->len * PAGE, 0, 0, 0, 0))
			fail("munmap", mapping->len, 0, 0);
	}
	long at = bare_call(SYS_mmap, 0, len * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (at < 0 && at > -4096)
		fail("mmap", len, 0, at);
	*mapping = (struct mapping){(unsigned char *)at, len, version};
	for (unsigned long page = 0; page < len; page++) {
		compare_zero("a new mapping", (void *)(at + page * PAGE), page);
		fill((void *)(at + page * PAGE), page, version);
	}
	return 2;
}

/* A few mappings of one page come and go at once; others live long enough to be merged, and leave holes that the first ones get. */
static void *map(void *argument)
{
	struct job *job = argument;
	struct mapping quick[4] = {0}, lasting[LONG] = {0};
	unsigned long calls = 0;
	while (calls < job->count) {
		if (below(&job->state, 1024) == 0)
			calls += renew(&lasting[below(&job->state, LONG)], 32 + below(&job->state, 64), 0);
		else
			calls += renew(&quick[below(&job->state, 4)], 1 + below(&job->state, 2), 1 + job->number);
	}
	for (int i = 0; i < 4; i++)
		if (quick[i].at)
			munmap(quick[i].at, quick[i].len * PAGE);
	for (int i = 0; i < LONG; i++)
		if (lasting[i].at) {
			for (unsigned long page = 0; page < lasting[i].len; page++)
				compare("a mapping at the end", (void *)(lasting[i].at + page * PAGE), page, 0);
			munmap(lasting[i].at, lasting[i].len * PAGE);
		}
	job->count = calls;
	return NULL;
}

static unsigned long by_threads(int threads, unsigned long count, void *(*work)(void *), uint64_t *state)
{
	pthread_t thread[THREADS];
	struct job job[THREADS];
	unsigned long done = 0;
	for (int i = 0; i < threads; i++) {
		job[i] = (struct job){i, (count + threads - 1) / threads, below(state, UINT64_MAX) | 1};
		if (pthread_create(&thread[i], NULL, work, &job[i]))
			fail("a thread", i, 0, 0);
	}
	for (int i = 0; i < threads; i++) {
		pthread_join(thread[i], NULL);
		done += job[i].count;
	}
	return done;
}

int main(int argc, char **argv)
{
	char line[64], what[32];
	unsigned long count;
	uint64_t state = FIRST_STATE + getpid();
	pages = argc > 1 ? strtoul(argv[1], NULL, 10) : 0;
	if (pages < 16)
		return 2;
	area = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	is_zero = calloc(pages, 1);
	if (area == MAP_FAILED || !is_zero)
		return 2;
	for (unsigned long page = 0; page < pages; page++)
		fill(page_at(page), page, 0);
	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin) && sscanf(line, "%31s %lu", what, &count) == 2) {
		unsigned long done = 1;
		if (!strcmp(what, "discard"))
			done = by_threads(2, count, discard, &state);
		else if (!strcmp(what, "fork"))
			done = forks(count, &state);
		else if (!strcmp(what, "map"))
			done = by_threads(THREADS, count, map, &state);
		else if (!strcmp(what, "check"))
			check("check");
		else
			return 2;
		printf("right %lu\n", done);
		fflush(stdout);
	}
	return 0;
}
