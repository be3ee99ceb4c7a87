/* A static program that knows nothing of pagefold, and does to its memory whatever programs do: it discards, forks, moves, unmaps and
 * maps again, by bare calls, in several threads. Each byte has a value that is known; a wrong one ends the program with status 3.
 *
 * Commands come by standard input, a line each: WORD COUNT. The answer is a line: "right", and how often memory was mapped anew. */
#define _GNU_SOURCE
#include "known_bytes.h"
/* The compiler for musl finds no headers of the kernel. */
#if __has_include(<linux/seccomp.h>)
#include <linux/filter.h>
#include <linux/seccomp.h>
#endif
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul

static unsigned char *area;
/* Its length in pages: as many as `AREA_PAGES` says. */
static unsigned long pages = 4096;
/* What page i holds: 0 the bytes that all instances have, DISCARDED zeros, anything else a version of its own. */
#define DISCARDED UINT32_MAX
static uint32_t *version;
static volatile int churning;
static volatile unsigned long churned;

static void fail(const char *what, unsigned long page)
{
	fprintf(stderr, "attached: %s: page %lu is wrong\n", what, page);
	_exit(3);
}

static void fill(unsigned char *at, uint64_t page, uint64_t version)
{
	for (unsigned long i = 0; i < PAGE / 8; i++)
		((volatile uint64_t *)at)[i] = word(page, version, i);
}

static void compare(const char *what, const unsigned char *at, uint64_t page, uint32_t version)
{
	for (unsigned long i = 0; i < PAGE / 8; i++)
		if (((volatile const uint64_t *)at)[i] != (version == DISCARDED ? 0 : word(page, version, i)))
			fail(what, page);
}

static uint64_t seed = FIRST_STATE;

static void check(const char *what)
{
	for (unsigned long i = 0; i < pages; i++)
		compare(what, area + i * PAGE, i, version[i]);
}

/* Discards pages, sees zeros at once, and writes some of them anew: often what all instances hold. */
static void discard(unsigned long count, uint64_t *state, const char *what)
{
	while (count--) {
		unsigned long first = below(state, pages), len = 1 + below(state, 16);
		if (first + len > pages)
			len = pages - first;
		if (madvise(area + first * PAGE, len * PAGE, MADV_DONTNEED))
			fail("madvise", first);
		for (unsigned long i = first; i < first + len; i++) {
			version[i] = DISCARDED;
			compare(what, area + i * PAGE, i, DISCARDED);
			if (below(state, 4)) {
				version[i] = below(state, 3) ? 0 : 1 + below(state, 1000);
				fill(area + i * PAGE, i, version[i]);
			}
		}
	}
}

static void writes(unsigned long count)
{
	while (count--) {
		unsigned long i = below(&seed, pages);
		version[i] = 1 + below(&seed, 1000);
		fill(area + i * PAGE, i, version[i]);
	}
}

static void wait_for(pid_t child, const char *what)
{
	int status;
	if (child < 0)
		fail("fork", 0);
	while (waitpid(child, &status, 0) < 0)
		;
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		fail(what, status);
}

/* A child sees what its parent had, and its discards and writes are its own; so does a child of the child. */
static void forks(unsigned long count)
{
	while (count--) {
		uint64_t state = seed + count * 7919;
		pid_t child = fork();
		if (!child) {
			check("a child");
			discard(20, &state, "a discard of a child");
			pid_t second = fork();
			if (!second) {
				check("a child of a child");
				discard(20, &state, "a discard of a child of a child");
				_exit(0);
			}
			wait_for(second, "a child of a child");
			check("a child after its child");
			_exit(0);
		}
		writes(4);
		wait_for(child, "a child");
	}
	check("after forks");
}

#define KEPT 64
static struct { pid_t pid; int to, from; } kept[KEPT];
static int kept_count;

/* Children that stay: each discards when it is told to, and sees what it discarded before. */
static void keep(unsigned long count)
{
	while (count--) {
		int to[2], from[2];
		char byte;
		if (kept_count == KEPT || pipe(to) || pipe(from))
			fail("a pipe", kept_count);
		uint64_t state = seed + kept_count * 7919 + 1;
		pid_t child = fork();
		if (child < 0)
			fail("fork", 0);
		if (!child) {
			close(to[1]);
			close(from[0]);
			while (read(to[0], &byte, 1) == 1) {
				check("a child that stays");
				discard(20, &state, "a discard of a child that stays");
				check("a child that stays, after its discards");
				if (write(from[1], &byte, 1) != 1)
					_exit(5);
			}
			_exit(0);
		}
		close(to[0]);
		close(from[1]);
		kept[kept_count].pid = child;
		kept[kept_count].to = to[1];
		kept[kept_count++].from = from[0];
	}
}

static void tell(unsigned long count)
{
	char byte = 0;
	while (count--) {
		for (int i = 0; i < kept_count; i++)
			if (write(kept[i].to, &byte, 1) != 1)
				fail("telling a child", i);
		for (int i = 0; i < kept_count; i++)
			if (read(kept[i].from, &byte, 1) != 1)
				fail("a child that stays", i);
	}
}

static void end_kept(void)
{
	for (int i = kept_count; i-- > 0;) {
		close(kept[i].to);
		close(kept[i].from);
		wait_for(kept[i].pid, "a child that stays");
	}
	kept_count = 0;
}

/* Moves pieces away and back; what is left behind reads zero, what was discarded stays so. Nothing is unmapped by it: the kernel
 * would give a hole to another thread. */
static void moves(unsigned long count)
{
	const int flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
	unsigned char *away = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	while (count--) {
		unsigned long first = below(&seed, pages - 64), len = 1 + below(&seed, 64);
		unsigned char *at = area + first * PAGE;
		/* One mapping at a time, as the kernel wants it: pieces of one page always are. */
		for (unsigned long i = 0; i < len; i++) {
			if (mremap(at + i * PAGE, PAGE, PAGE, flags, away + i * PAGE) == MAP_FAILED)
				fail("mremap", first + i);
			compare("left behind", at + i * PAGE, first + i, DISCARDED);
			compare("moved away", away + i * PAGE, first + i, version[first + i]);
			if (!below(&seed, 8)) {
				madvise(away + i * PAGE, PAGE, MADV_DONTNEED);
				version[first + i] = DISCARDED;
				compare("discarded away", away + i * PAGE, first + i, DISCARDED);
			}
			if (mremap(away + i * PAGE, PAGE, PAGE, flags, at + i * PAGE) == MAP_FAILED)
				fail("mremap back", first + i);
			compare("left behind away", away + i * PAGE, first + i, DISCARDED);
			compare("moved back", at + i * PAGE, first + i, version[first + i]);
		}
	}
	munmap(away, 64 * PAGE);
}

/* Unmaps and maps anew at the same address, as allocators do: the kernel gives the same addresses to another thread. */
static void *churn(void *number)
{
	uint64_t state = (uintptr_t)number * 2654435761u + 1;
	while (churning) {
		unsigned long len = 256 + below(&state, 512), v = below(&state, 2) ? 0 : 5 + (uintptr_t)number;
		unsigned char *at = mmap(NULL, len * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (at == MAP_FAILED)
			fail("mmap", len);
		for (unsigned long i = 0; i < len; i++)
			fill(at + i * PAGE, i, v);
		/* Long enough for some of it to be merged. */
		if (!below(&state, 4))
			usleep(100000 + below(&state, 300000));
		for (unsigned long i = 0; i < len; i++)
			compare("churn", at + i * PAGE, i, v);
		if (munmap(at, len * PAGE))
			fail("munmap", len);
		churned++;
	}
	return NULL;
}

static void *calls(void *unused)
{
	(void)unused;
	/* A call that a stop interrupts fails with EINTR only where the kernel says so; this one goes on. */
	while (churning) {
		struct timespec time = {0, 2000000};
		if (clock_nanosleep(CLOCK_MONOTONIC, 0, &time, NULL))
			fail("clock_nanosleep", 0);
	}
	return NULL;
}

/* Says where, and what is mapped there. */
static void fault(int number, siginfo_t *info, void *context)
{
	static char maps[1 << 16];
	ssize_t got;
	FILE *file = fopen("/proc/self/maps", "r");
	fprintf(stderr, "attached: signal %d, code %d, at %p, instruction %#llx\n", number, info->si_code, info->si_addr,
		(unsigned long long)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP]);
	while (file && (got = fread(maps, 1, sizeof maps, file)) > 0)
		fwrite(maps, 1, got, stderr);
	_exit(4);
}

#ifdef SECCOMP_MODE_FILTER
/* From now on the kernel ends the program at any call but its own and those that `ALLOWED` lists, by their numbers. */
static void allow_only(char *listed)
{
	static const int own[] = {SYS_read, SYS_write, SYS_mmap, SYS_munmap, SYS_mremap, SYS_madvise, SYS_clone, SYS_clone3, SYS_fork,
		SYS_vfork, SYS_wait4, SYS_exit, SYS_exit_group, SYS_futex, SYS_nanosleep, SYS_clock_nanosleep, SYS_rt_sigprocmask,
		SYS_rt_sigreturn, SYS_set_robust_list, SYS_rseq, SYS_sched_yield, SYS_brk, SYS_getpid, SYS_gettid, SYS_kill, SYS_newfstatat,
		SYS_restart_syscall};
	struct sock_filter filter[512];
	unsigned short count = 0;
	filter[count++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (unsigned long i = 0; i < sizeof own / sizeof *own; i++) {
		filter[count++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, own[i], 0, 1);
		filter[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	}
	for (char *one = strtok(listed, ","); one && count < 500; one = strtok(NULL, ",")) {
		filter[count++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, strtoul(one, NULL, 10), 0, 1);
		filter[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	}
	filter[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
	struct sock_fprog program = {count, filter};
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		_exit(2);
}
#else
static void allow_only(char *listed)
{
	(void)listed;
	_exit(2);
}
#endif

int main(int argc, char **argv)
{
	struct sigaction action = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO};
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	int threads = argc > 1 ? atoi(argv[1]) : 0;
	pthread_t other[16];
	char line[64], what[32];
	unsigned long count;
	/* As the heaps of some runtimes. */
	int execute = getenv("EXECUTABLE") ? PROT_EXEC : 0;
	if (getenv("AREA_PAGES"))
		pages = strtoul(getenv("AREA_PAGES"), NULL, 10);
	version = calloc(pages, sizeof *version);
	if (!version || pages < 128)
		return 2;
	area = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE | execute, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	seed += getpid();
	for (unsigned long i = 0; i < pages; i++)
		fill(area + i * PAGE, i, 0);
	churning = 1;
	for (int i = 0; i < threads && i < 15; i++)
		pthread_create(&other[i], NULL, i == 0 ? calls : churn, (void *)(uintptr_t)i);
	if (getenv("ALLOWED"))
		allow_only(getenv("ALLOWED"));
	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin) && sscanf(line, "%31s %lu", what, &count) == 2) {
		if (!strcmp(what, "check"))
			check("check");
		else if (!strcmp(what, "reset"))
			for (unsigned long i = 0; i < pages; i++) {
				version[i] = 0;
				fill(area + i * PAGE, i, 0);
			}
		else if (!strcmp(what, "discard"))
			discard(count, &seed, "a discard");
		else if (!strcmp(what, "write"))
			writes(count);
		else if (!strcmp(what, "fork"))
			forks(count);
		else if (!strcmp(what, "move"))
			moves(count);
		else if (!strcmp(what, "mark")) {
			if (madvise(area, pages * PAGE, MADV_MERGEABLE))
				fail("MADV_MERGEABLE", 0);
		} else if (!strcmp(what, "keep"))
			keep(count);
		else if (!strcmp(what, "tell"))
			tell(count);
		else if (!strcmp(what, "end"))
			end_kept();
		else
			return 2;
		printf("right %lu\n", churned);
		fflush(stdout);
	}
	churning = 0;
	for (int i = 0; i < threads && i < 15; i++)
		pthread_join(other[i], NULL);
	return 0;
}
