//! Programs that bring an allocator of their own: their blocks are not taken for the C library's.

mod common;

use common::{Daemon, can_merge, finish, installed, skipped};
use std::path::Path;
use std::process::Command;

/// Threads that allocate, grow and free blocks of a byte to 512 KiB, and look whether each is as they left it.
const PROGRAM: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
enum { BLOCKS = 400 };
static unsigned next(unsigned *seed) { return (*seed = *seed * 1103515245 + 12345) >> 8; }
static size_t length(unsigned *seed) { return 1 + next(seed) % (1u << (8 + next(seed) % 12)); }
static void *work(void *number) {
    unsigned seed = (long)number + 1;
    char *block[BLOCKS] = {0};
    size_t len[BLOCKS];
    long bad = 0;
    for (int step = 0; step < 60000; step++) {
        int at = next(&seed) % BLOCKS;
        char fill = at % 5 + 1;
        if (!block[at]) {
            block[at] = malloc(len[at] = length(&seed));
            memset(block[at], fill, len[at]);
            continue;
        }
        for (size_t byte = 0; byte < len[at]; byte += 997) bad += block[at][byte] != fill;
        if (next(&seed) % 4 == 0) {
            size_t longer = length(&seed), both = longer < len[at] ? longer : len[at];
            block[at] = realloc(block[at], longer);
            for (size_t byte = 0; byte < both; byte += 997) bad += block[at][byte] != fill;
            memset(block[at], fill, len[at] = longer);
        } else {
            free(block[at]);
            block[at] = NULL;
        }
        if (step % 2000 == 0) usleep(30000);
    }
    for (int at = 0; at < BLOCKS; at++) free(block[at]);
    return (void *)bad;
}
int main(void) {
    pthread_t threads[6];
    long bad = 0;
    void *here;
    for (long number = 0; number < 6; number++) pthread_create(&threads[number], NULL, work, (void *)number);
    for (int number = 0; number < 6; number++) {
        pthread_join(threads[number], &here);
        bad += (long)here;
    }
    printf("bad %ld\n", bad);
    return bad != 0;
}
"#;

#[test]
fn blocks_of_other_allocators_are_left_to_them() {
    if !can_merge() || installed("cc").is_none() {
        return;
    }
    let (daemon, dir) = (Daemon::start(&["--no-keeper"]), tempfile::tempdir().expect("a directory"));
    let (source, program) = (dir.path().join("program.c"), dir.path().join("program"));
    std::fs::write(&source, PROGRAM).expect("a file");
    for name in ["libtcmalloc_minimal.so.4", "libmimalloc.so.2"] {
        let Some(allocator) = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"]
            .iter()
            .map(|folder| Path::new(folder).join(name))
            .find(|path| path.exists())
        else {
            skipped(&format!("there is no {name}"));
            continue;
        };
        let mut cc = Command::new("cc");
        // Found before the C library, and behind what is preloaded.
        cc.args(["-O1", "-pthread", "-Wl,--no-as-needed"]).arg("-o").arg(&program).arg(&source).arg(&allocator);
        let done = cc.output().expect("cc runs");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        for how in ["--all", "--cold"] {
            let (status, out, err) = finish(daemon.run(&[how]).arg(&program), 240);
            assert!(status.success() && out == "bad 0\n", "{name} {how}: {status}\n{out}{err}");
        }
    }
}
