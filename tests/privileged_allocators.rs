//! Programs that bring an allocator of their own: their blocks are not taken for the C library's.

mod common;

use common::{Daemon, can_merge, finish, installed, skipped};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
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

/// Compiles `text` in `dir` by cc, with these arguments after the source.
fn compiled(dir: &Path, text: &str, arguments: &[&OsStr]) -> PathBuf {
    let (source, program) = (dir.join("program.c"), dir.join("program"));
    std::fs::write(&source, text).expect("a file");
    let done = Command::new("cc").arg("-O1").arg("-o").arg(&program).arg(&source).args(arguments).output();
    let done = done.expect("cc runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    program
}

#[test]
fn blocks_of_other_allocators_are_left_to_them() {
    if !can_merge() || installed("cc").is_none() {
        return;
    }
    let (daemon, dir) = (Daemon::start(&["--no-keeper"]), tempfile::tempdir().expect("a directory"));
    for name in ["libtcmalloc_minimal.so.4", "libmimalloc.so.2"] {
        let Some(allocator) = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"]
            .iter()
            .map(|folder| Path::new(folder).join(name))
            .find(|path| path.exists())
        else {
            skipped(&format!("there is no {name}"));
            continue;
        };
        // Found before the C library, and behind what is preloaded.
        let arguments = ["-pthread".as_ref(), "-Wl,--no-as-needed".as_ref(), allocator.as_os_str()];
        let program = compiled(dir.path(), PROGRAM, &arguments);
        for how in ["--manage=all", "--cold"] {
            let (status, out, err) = finish(daemon.run(&[how]).arg(&program), 240);
            assert!(status.success() && out == "bad 0\n", "{name} {how}: {status}\n{out}{err}");
        }
    }
}

/// An executable with an allocator that maps by bare calls, and begins each block with words that the C library's has there,
/// too.
const OWN: &str = r#"
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
enum { PAGE = 4096, BLOCKS = 16, MIB = 1 << 20, SEEN = 1024 };
static char small[4 << 20];
static size_t used;
static long bare(long number, long a, long b, long c, long d, long e, long f) {
#ifdef __x86_64__
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#else
    _exit(77);
#endif
}
void *malloc(size_t size) {
    if (size < MIB) {
        size = (size + 31) & ~15ul;
        if (used + size > sizeof small) return NULL;
        used += size;
        return small + used - size;
    }
    size_t len = (size + 16 + PAGE - 1) & ~(PAGE - 1ul);
    size_t *block = (size_t *)bare(SYS_mmap, 0, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    block[0] = 0;
    block[1] = len | 2;
    return block + 2;
}
void free(void *block) {
    char *at = block;
    if (at && (at < small || at >= small + sizeof small)) bare(SYS_munmap, (long)at - 16, ((long *)at)[-1] & ~7, 0, 0, 0, 0);
}
void *calloc(size_t count, size_t size) { return malloc(count * size); }
void *realloc(void *block, size_t size) {
    void *fresh = malloc(size);
    if (block && fresh) memmove(fresh, block, size);
    return fresh;
}
static FILE *maps;
static size_t merged(char *start, size_t len) {
    char line[512];
    size_t pages = 0, from, to;
    rewind(maps);
    while (fgets(line, sizeof line, maps))
        if (strstr(line, "memfd:pagefold-pool") && strstr(line, " rw-p ") && sscanf(line, "%zx-%zx", &from, &to) == 2 &&
            from < (size_t)start + len && to > (size_t)start)
            pages += (to - from) / PAGE;
    return pages;
}
static void fill(char *at, size_t pages) {
    for (size_t page = 0; page < pages; page++)
        for (size_t byte = 16; byte < PAGE; byte++) at[page * PAGE + byte] = page % 64 + byte;
}
int main(void) {
    static char *block[BLOCKS];
    char *seen = mmap(NULL, SEEN * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    maps = fopen("/proc/self/maps", "r");
    fill(seen, SEEN);
    for (int i = 0; i < BLOCKS; i++) {
        block[i] = malloc(MIB);
        fill(block[i] - 16, MIB / PAGE);
    }
    for (int turn = 0; turn < 1200 && merged(seen, SEEN * PAGE) < SEEN / 2; turn++) usleep(100000);
    sleep(3);
    size_t bad = 0, there = merged(seen, SEEN * PAGE);
    for (int i = 0; i < BLOCKS; i++) bad += merged(block[i] - 16, MIB);
    printf("%zu pages of blocks are merged, %s\n", bad, there < SEEN / 2 ? "and too few beside" : "and others");
    fflush(stdout);
    _exit(bad || there < SEEN / 2);
}
"#;

#[test]
fn an_executable_may_bring_its_allocator() {
    if !can_merge() || installed("cc").is_none() {
        return;
    }
    let (daemon, dir) = (Daemon::start(&["--no-keeper"]), tempfile::tempdir().expect("a directory"));
    let program = compiled(dir.path(), OWN, &["-fno-builtin".as_ref(), "-rdynamic".as_ref()]);
    let (status, out, err) = finish(daemon.run(&["--manage=all"]).arg(&program), 240);
    if status.code() == Some(77) {
        return skipped("bare calls are written for x86-64 only");
    }
    assert!(status.success(), "{status}\n{out}{err}");
}
