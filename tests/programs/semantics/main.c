// A program with memory that pagefold merges, one scenario per run: it waits until its pages are
// shown from the pool, treats them as its argument says, and compares every byte with what
// anonymous memory would show. Exit status: 0 right, 1 wrong (one line on stderr), 77 cannot be
// tried here (one line on stdout).
#include "common.h"

#include <sys/personality.h>

extern const struct scenario advice_scenarios[],
    all_memory_scenarios[],
    devices_scenarios[],
    discard_scenarios[],
    fork_scenarios[],
    guards_scenarios[],
    huge_scenarios[],
    locks_scenarios[],
    advice_scenarios[],
    mappings_scenarios[],
    mremap_scenarios[],
    pool_scenarios[],
    privileges_scenarios[],
    process_scenarios[],
    rights_scenarios[],
    seals_scenarios[],
    seccomp_scenarios[],
    serve_scenarios[],
    signals_scenarios[],
    userfaultfd_scenarios[],
    writers_scenarios[];

static const struct scenario *const topics[] = {
    advice_scenarios,
    all_memory_scenarios,
    devices_scenarios,
    discard_scenarios,
    fork_scenarios,
    guards_scenarios,
    huge_scenarios,
    locks_scenarios,
    advice_scenarios,
    mappings_scenarios,
    mremap_scenarios,
    pool_scenarios,
    privileges_scenarios,
    process_scenarios,
    rights_scenarios,
    seals_scenarios,
    seccomp_scenarios,
    serve_scenarios,
    signals_scenarios,
    userfaultfd_scenarios,
    writers_scenarios,
};

void core_check(const char *path);

int main(int count, char **arguments) {
    CHECK(count >= 2, "usage: semantics SCENARIO");
    if (strcmp(arguments[1], "core-check") == 0 && count == 3) {
        core_check(arguments[2]);
        return 0;
    }
    // All memory that may be read may be executed, as that of some runtimes.
    if (getenv("EXECUTABLE")) CHECK(personality(READ_IMPLIES_EXEC) >= 0, "personality");
    for (size_t i = 0; i < sizeof topics / sizeof *topics; i++)
        for (const struct scenario *one = topics[i]; one->name; one++)
            if (strcmp(one->name, arguments[1]) == 0) {
                one->run();
                return 0;
            }
    CHECK(0, "no scenario %s", arguments[1]);
}
