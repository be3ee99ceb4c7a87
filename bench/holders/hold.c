/* Holds a file in blocks from malloc, those of a second thread's arena if a third argument is given; see README.md. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *path;
static size_t block, count;
static char **blocks;

static void *load(void *unused)
{
	FILE *file = fopen(path, "r");
	size_t room = 0;
	char *read;

	(void)unused;
	if (!file)
		exit(1);
	setvbuf(file, NULL, _IONBF, 0);
	while ((read = malloc(block)) && fread(read, 1, block, file) == block) {
		if (count == room) {
			room = room ? 2 * room : 1024;
			blocks = realloc(blocks, room * sizeof(*blocks));
			if (!blocks)
				exit(1);
		}
		blocks[count++] = read;
	}
	free(read);
	fclose(file);
	return NULL;
}

static int is_right(void)
{
	FILE *file = fopen(path, "r");
	char *expected = malloc(block);
	size_t at;

	if (!file || !expected)
		return 0;
	for (at = 0; at < count; at++)
		if (fread(expected, 1, block, file) != block || memcmp(expected, blocks[at], block))
			return 0;
	return fread(expected, 1, block, file) < block;
}

int main(int argc, char **argv)
{
	pthread_t thread;

	if (argc < 3)
		return 2;
	path = argv[1];
	block = strtoul(argv[2], NULL, 10);
	if (argc == 3)
		load(NULL);
	else if (pthread_create(&thread, NULL, load, NULL) || pthread_join(thread, NULL))
		return 1;
	puts("ready");
	fflush(stdout);
	if (getchar() == EOF)
		return 1;
	puts(is_right() ? "right" : "wrong");
	return 0;
}
