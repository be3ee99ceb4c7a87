/* A program as hosts run them: fills 16 MiB with bytes that every copy of it has, and compares them until its end. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { WORDS = (16 << 20) / 8 };

static unsigned long at(unsigned long index) { return (index + 1) * 0x9e3779b97f4a7c15ul ^ index >> 7; }

/* With an argument it ends once it is ready. */
int main(int argc, char **argv) {
    (void)argv;
    unsigned long *memory = mmap(0, WORDS * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 1;
    for (unsigned long index = 0; index < WORDS; index++) memory[index] = at(index);
    puts("ready");
    fflush(stdout);
    if (argc > 1) return 0;
    for (;;) {
        usleep(200000);
        for (unsigned long index = 0; index < WORDS; index++)
            if (memory[index] != at(index)) {
                puts("wrong");
                fflush(stdout);
                return 1;
            }
    }
}
