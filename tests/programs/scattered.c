/* A program whose pages are equal to those of its other instances, in an order of its own: no two neighbours match. It writes, forks,
 * discards and locks; with FILTERED in its environment most calls are forbidden to it. Each byte has a value that is known; a wrong one ends the program with status 3.
 *
 * The argument is the number of the order. Commands come by standard input, a line each: WORD COUNT. The answer is a line: "right",
 * and the number of the area's first page. */
#define _GNU_SOURCE
#include "known_bytes.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
#define PAGES 8192ul
/* Memory that the program marks itself. */
#define MARKED (512 * PAGE)

static unsigned char *area, *marked;
/* What page i holds: numbers below PAGES are the contents that all instances have, DISCARDED zeros. */
#define DISCARDED UINT32_MAX
static uint32_t held[PAGES];
static uint64_t seed;
static int tracking;

static void fail(const char *what, unsigned long page)
{
	fprintf(stderr, "scattered: %s: page %lu is wrong\n", what, page);
	_exit(3);
}

static void fill(unsigned long page)
{
	for (unsigned long i = 0; i < PAGE / 8; i++)
		((volatile uint64_t *)(area + page * PAGE))[i] = word(held[page], 0, i);
}

static void check(const char *what)
{
	for (unsigned long page = 0; page < PAGES; page++)
		for (unsigned long i = 0; i < PAGE / 8; i++)
			if (((volatile uint64_t *)(area + page * PAGE))[i] != (held[page] == DISCARDED ? 0 : word(held[page], 0, i)))
				fail(what, page);
	for (unsigned long at = 0; at < MARKED; at++)
		if (((volatile unsigned char *)marked)[at] != 7)
			fail("marked memory", at / PAGE);
}

/* All calls are forbidden but those of this list, as a sandbox does it: a forbidden one ends the program. */
static void filter(void)
{
	static const int allowed[] = {SYS_read, SYS_write, SYS_madvise, SYS_mmap, SYS_munmap, SYS_brk, SYS_newfstatat, SYS_exit_group};
	struct sock_filter code[2 * sizeof allowed / sizeof *allowed + 2] = {
	    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
	unsigned short len = 1;
	for (unsigned i = 0; i < sizeof allowed / sizeof *allowed; i++) {
		code[len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], 0, 1);
		code[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	}
	code[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
	struct sock_fprog program = {len, code};
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		fail("a filter", 0);
}

/* Contents that no other instance has. */
static void writes(unsigned long count)
{
	while (count--) {
		unsigned long page = below(&seed, PAGES);
		held[page] = PAGES + below(&seed, 1ul << 30);
		fill(page);
	}
}

static void discard(unsigned long count)
{
	while (count--) {
		unsigned long page = below(&seed, PAGES);
		held[page] = DISCARDED;
		if (madvise(area + page * PAGE, PAGE, MADV_DONTNEED))
			fail("madvise", page);
	}
}

static void forks(unsigned long count)
{
	while (count--) {
		pid_t child = fork();
		if (!child) {
			check("a child");
			writes(200);
			discard(50);
			check("a child's own");
			_exit(0);
		}
		writes(50);
		int status;
		if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status))
			fail("a child", status);
	}
}

/* Registers the first pages with a userfaultfd of its own, writes to them, and lets them go. */
static void track(unsigned long count)
{
	int fd = syscall(SYS_userfaultfd, O_CLOEXEC);
	struct uffdio_api api = {.api = UFFD_API};
	struct uffdio_register range = {{(unsigned long)area, count * PAGE}, UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP, 0};
	if (fd < 0 || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &range))
		fail("userfaultfd", errno);
	for (unsigned long page = 0; page < count; page += 7) {
		held[page] = PAGES + page;
		fill(page);
	}
	sleep(1);
	check("tracked");
	tracking = fd;
}

int main(int argc, char **argv)
{
	seed = state_of(argc > 1 ? strtoul(argv[1], NULL, 10) : 0);
	/* Between pages without rights, so that the kernel joins nothing with them. */
	unsigned char *room = mmap(NULL, (PAGES + 3) * PAGE + MARKED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	area = room + PAGE;
	marked = area + (PAGES + 1) * PAGE;
	if (room == MAP_FAILED || mprotect(area, PAGES * PAGE, PROT_READ | PROT_WRITE)
	    || mprotect(marked, MARKED, PROT_READ | PROT_WRITE))
		fail("mmap", 0);
	madvise(area, PAGES * PAGE, MADV_NOHUGEPAGE);
	memset(marked, 7, MARKED);
	if (getenv("MARKS"))
		madvise(marked, MARKED, MADV_MERGEABLE);
	for (unsigned long page = 0; page < PAGES; page++)
		held[page] = page;
	for (unsigned long page = PAGES; page-- > 1;) {
		unsigned long other = below(&seed, page + 1);
		uint32_t content = held[page];
		held[page] = held[other];
		held[other] = content;
	}
	for (unsigned long page = 0; page < PAGES; page++)
		fill(page);
	if (getenv("FILTERED"))
		filter();
	printf("ready\n");
	fflush(stdout);
	char what[32];
	unsigned long count;
	while (scanf("%31s %lu", what, &count) == 2) {
		if (!strcmp(what, "write"))
			writes(count);
		else if (!strcmp(what, "discard"))
			discard(count);
		else if (!strcmp(what, "fork"))
			forks(count);
		else if (!strcmp(what, "track"))
			track(count);
		else if (!strcmp(what, "untrack"))
			close(tracking);
		else if (!strcmp(what, "forbidden"))
			getpid();
		else if (!strcmp(what, "lock") && mlock(area, count * PAGE))
			fail("mlock", count);
		check(what);
		printf("right %lu\n", (unsigned long)area / PAGE);
		fflush(stdout);
	}
	check("in the end");
	return 0;
}
