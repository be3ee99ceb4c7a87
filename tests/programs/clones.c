/* A program that is cloned from a template: from a file that it maps privately (TEMPLATE in the environment names it), or by forks
 * (CLONES says how many). A clone reads all of the template and writes to half of it: pages that other clones write too, elsewhere.
 * Each byte has a value that is known; a wrong one ends the program with status 3.
 *
 * The argument is the number of the clone, or "make": then the program writes the file, and waits. Commands come by standard input, a
 * line each: WORD COUNT. The answer is a line: "right", and the number of the area's first page. Clones by fork answer to their
 * parent. */
#define _GNU_SOURCE
#include "known_bytes.h"
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

#define PAGE 4096ul
#define PAGES 4096ul
#define WRITTEN (PAGES / 2)
#define CLONES_MAX 8
#define DISCARDED UINT64_MAX

static unsigned char *area;
static int is_of_file;
/* What page i holds: below PAGES the template's page of that number, from there on contents of clones; DISCARDED zeros. */
static uint64_t held[PAGES];
static uint64_t seed;

static void fail(const char *what, unsigned long page)
{
	fprintf(stderr, "clones: %s: page %lu is wrong\n", what, page);
	_exit(3);
}

static void fill(unsigned char *memory, unsigned long page)
{
	for (unsigned long i = 0; i < PAGE / 8; i++)
		((volatile uint64_t *)(memory + page * PAGE))[i] = word(held[page], 0, i);
}

static void check(const char *what)
{
	for (unsigned long page = 0; page < PAGES; page++)
		for (unsigned long i = 0; i < PAGE / 8; i++)
			if (((volatile uint64_t *)(area + page * PAGE))[i] != (held[page] == DISCARDED ? 0 : word(held[page], 0, i)))
				fail(what, page);
}

/* Writes what all clones write, in an order of its own, to pages of its own choice. */
static void diverge(uint64_t clone)
{
	static uint32_t pages[PAGES];
	seed = state_of(clone + 1);
	for (unsigned long page = 0; page < PAGES; page++)
		pages[page] = page;
	for (unsigned long page = PAGES; page-- > 1;) {
		unsigned long other = below(&seed, page + 1);
		uint32_t swapped = pages[page];
		pages[page] = pages[other];
		pages[other] = swapped;
	}
	for (unsigned long content = 0; content < WRITTEN; content++) {
		held[pages[content]] = PAGES + content;
		fill(area, pages[content]);
	}
}

/* Writes what no other clone holds. */
static void writes(unsigned long count)
{
	while (count--) {
		unsigned long page = below(&seed, PAGES);
		held[page] = 2 * PAGES + below(&seed, 1ul << 40);
		fill(area, page);
	}
}

/* The template's own page returns where a file is below. */
static void discards(unsigned long count)
{
	while (count--) {
		unsigned long page = below(&seed, PAGES);
		if (madvise(area + page * PAGE, PAGE, MADV_DONTNEED))
			fail("madvise", page);
		held[page] = is_of_file ? page : DISCARDED;
	}
}

static void serve(FILE *in, FILE *out)
{
	char what[32];
	unsigned long count;
	fprintf(out, "ready\n");
	fflush(out);
	while (fscanf(in, "%31s %lu", what, &count) == 2) {
		if (!strcmp(what, "write"))
			writes(count);
		else if (!strcmp(what, "discard"))
			discards(count);
		check(what);
		fprintf(out, "right %lu\n", (unsigned long)area / PAGE);
		fflush(out);
	}
	check("in the end");
}

static void answers(FILE *out, const char *answer)
{
	char line[64];
	if (!fgets(line, sizeof line, out) || strncmp(line, answer, strlen(answer)))
		fail("a clone", 0);
}

/* Forks the clones, and passes each command on to all of them. */
static void zygote(unsigned long count)
{
	FILE *in[CLONES_MAX], *out[CLONES_MAX];
	pid_t clones[CLONES_MAX];
	if (count > CLONES_MAX)
		fail("CLONES", count);
	for (unsigned long clone = 0; clone < count; clone++) {
		int to[2], from[2];
		if (pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC))
			fail("pipe", clone);
		clones[clone] = fork();
		if (clones[clone] < 0)
			fail("fork", clone);
		if (!clones[clone]) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			for (unsigned long other = 0; other < clone; other++) {
				fclose(in[other]);
				fclose(out[other]);
			}
			close(to[1]);
			close(from[0]);
			diverge(clone);
			serve(fdopen(to[0], "r"), fdopen(from[1], "w"));
			_exit(0);
		}
		close(to[0]);
		close(from[1]);
		in[clone] = fdopen(to[1], "w");
		out[clone] = fdopen(from[0], "r");
		answers(out[clone], "ready");
	}
	printf("ready\n");
	fflush(stdout);
	char what[32];
	unsigned long number;
	while (scanf("%31s %lu", what, &number) == 2) {
		for (unsigned long clone = 0; clone < count; clone++) {
			fprintf(in[clone], "%s %lu\n", what, number);
			fflush(in[clone]);
			answers(out[clone], "right");
		}
		check("the zygote");
		printf("right %lu\n", (unsigned long)area / PAGE);
		fflush(stdout);
	}
	for (unsigned long clone = 0; clone < count; clone++) {
		int status;
		fclose(in[clone]);
		if (waitpid(clones[clone], &status, 0) != clones[clone] || !WIFEXITED(status) || WEXITSTATUS(status))
			fail("a clone", status);
	}
	check("the zygote in the end");
}

int main(int argc, char **argv)
{
	const char *path = getenv("TEMPLATE"), *clones = getenv("CLONES");
	int makes = argc > 1 && !strcmp(argv[1], "make");
	is_of_file = path != NULL;
	int fd = path ? open(path, makes ? O_RDWR | O_CREAT : O_RDONLY, 0600) : -1;
	if (path && (fd < 0 || (makes && ftruncate(fd, PAGES * PAGE))))
		fail(path, 0);
	int flags = makes ? MAP_SHARED : path ? MAP_PRIVATE : MAP_PRIVATE | MAP_ANONYMOUS;
	area = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, flags, fd, 0);
	if (area == MAP_FAILED)
		fail("mmap", 0);
	if (!path)
		madvise(area, PAGES * PAGE, MADV_NOHUGEPAGE);
	for (unsigned long page = 0; page < PAGES; page++)
		held[page] = page;
	for (unsigned long page = 0; page < PAGES && (makes || !path); page++)
		fill(area, page);
	check("the template");
	if (clones) {
		zygote(strtoul(clones, NULL, 10));
		return 0;
	}
	if (!makes)
		diverge(argc > 1 ? strtoul(argv[1], NULL, 10) : 0);
	serve(stdin, stdout);
	return 0;
}
