//! Programs under a sanitizer or valgrind, which check every access, and programs with another library that answers system
//! calls: they run as they do without pagefold.

mod common;

use common::{Daemon, can_merge, finish, installed, skipped};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Memory of its own and of the allocator's, children, a thread, and a failed lookup that leaves an error behind.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
static void *copy(void *from) {
    char *to = malloc(1 << 20);
    memcpy(to, from, 1 << 20);
    return to;
}
int main(void) {
    const size_t size = 16 << 20;
    char *block = malloc(size), *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(block, 7, size);
    memset(map, 5, size);
    madvise(map, size, MADV_MERGEABLE);
    dlsym(RTLD_DEFAULT, "there is no such symbol");
    sleep(2);
    pthread_t thread;
    void *copied;
    if (pthread_create(&thread, NULL, copy, map) || pthread_join(thread, &copied)) return 2;
    pid_t child = fork();
    if (child == 0) _exit(map[size - 1] == 5 && block[size - 1] == 7 ? 0 : 3);
    int status;
    waitpid(child, &status, 0);
    block = realloc(block, 2 * size);
    if (madvise(map, size / 2, MADV_DONTNEED)) return 4;
    printf("said %d %d %d %d %d\n", status, block[size - 1], map[0], map[size - 1], *(char *)copied);
    free(copied);
    munmap(map, size);
    free(block);
    return 0;
}
"#;
const SAID: &str = "said 0 7 0 5 5\n";

fn compiled(dir: &Path, name: &str, options: &[&str]) -> Option<PathBuf> {
    let (source, program) = (dir.join("program.c"), dir.join(name));
    std::fs::write(&source, PROGRAM).expect("a file");
    let mut cc = Command::new("cc");
    cc.args(["-g", "-O1", "-pthread"]).args(options).arg("-o").arg(&program).arg(&source).arg("-ldl");
    let done = cc.output().expect("cc runs");
    if !done.status.success() {
        skipped(&format!("cc {options:?}: {}", String::from_utf8_lossy(&done.stderr).lines().next().unwrap_or("")));
    }
    done.status.success().then_some(program)
}

/// Runs `program` by `by`, without pagefold and with all its memory merged or cold.
fn same_with_and_without(daemon: &Daemon, by: &[&str], program: &Path) {
    let mut plain = Command::new(by.first().map_or(program, Path::new));
    if let Some((_, rest)) = by.split_first() {
        plain.args(rest).arg(program);
    }
    let (status, out, err) = finish(&mut plain, 120);
    if !status.success() || out != SAID {
        return skipped(&format!("{by:?} {}: {status} {err}", program.display()));
    }
    for how in ["--manage=all", "--cold"] {
        let (status, out, err) = finish(daemon.run(&[how]).args(by).arg(program), 120);
        assert!(status.success() && out == SAID, "{how} {by:?} {}: {status}\n{out}{err}", program.display());
    }
}

#[test]
fn sanitized_programs_run() {
    if !can_merge() || installed("cc").is_none() {
        return;
    }
    let (daemon, dir) = (Daemon::start(&["--no-keeper"]), tempfile::tempdir().expect("a directory"));
    for kind in ["address", "thread", "undefined"] {
        if let Some(program) = compiled(dir.path(), kind, &[&format!("-fsanitize={kind}")]) {
            same_with_and_without(&daemon, &[], &program);
        }
    }
}

#[test]
fn programs_run_under_valgrind() {
    if !can_merge() || installed("cc").is_none() || installed("valgrind").is_none() {
        return;
    }
    let (daemon, dir) = (Daemon::start(&["--no-keeper"]), tempfile::tempdir().expect("a directory"));
    if let Some(program) = compiled(dir.path(), "plain", &[]) {
        same_with_and_without(&daemon, &["valgrind", "-q", "--error-exitcode=9", "--leak-check=full"], &program);
    }
}

/// Its loader ends a program in which a name of glibc's is missing. The agent stands aside.
#[test]
fn programs_of_another_c_library_run() {
    let Some(cc) = installed("musl-gcc").filter(|_| can_merge()) else { return };
    let (daemon, dir) = (Daemon::start(&["--no-keeper"]), tempfile::tempdir().expect("a directory"));
    let (source, program) = (dir.path().join("program.c"), dir.path().join("program"));
    std::fs::write(&source, PROGRAM).expect("a file");
    let done = Command::new(cc).args(["-O1", "-pthread", "-o"]).args([&program, &source]).output().expect("cc runs");
    assert!(done.status.success(), "musl-gcc: {}", String::from_utf8_lossy(&done.stderr));
    same_with_and_without(&daemon, &[], &program);
    let (_, _, err) = finish(daemon.run(&[]).arg(&program), 120);
    assert!(err.contains("is linked with musl, where the agent stands aside: "), "{err}");
}

/// A library that plays a file and a device (LIBRARY), as fakeroot, padsp and umockdev do, and passes on all else by the
/// kernel's number; and a program that sees them.
const PLAYED: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef LIBRARY
int fstatat(int dir, const char *path, struct stat *to, int flags) {
    if (strcmp(path, "/played") != 0) return syscall(SYS_newfstatat, dir, path, to, flags);
    memset(to, 0, sizeof *to);
    to->st_uid = 12345;
    return 0;
}
int stat(const char *path, struct stat *to) { return fstatat(AT_FDCWD, path, to, 0); }
int ioctl(int fd, unsigned long request, ...) {
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    return request == 0x5042 ? 42 : syscall(SYS_ioctl, fd, request, argument);
}
#else
int main(void) {
    struct stat seen;
    if (stat("/played", &seen) != 0 || seen.st_uid != 12345) return 1;
    seen.st_uid = 0;
    if (fstatat(AT_FDCWD, "/played", &seen, 0) != 0 || seen.st_uid != 12345) return 2;
    if (stat("/", &seen) != 0 || !S_ISDIR(seen.st_mode)) return 3;
    if (stat("/there/is/no/such/file", &seen) != -1 || errno != ENOENT) return 4;
    if (ioctl(0, 0x5042, 0) != 42) return 5;
    return ioctl(-1, 0x5043, 0) == -1 && errno == EBADF ? 0 : 6;
}
#endif
"#;

#[test]
fn calls_answered_by_another_library_are_seen() {
    if !can_merge() || installed("cc").is_none() {
        return;
    }
    let (daemon, dir) = (Daemon::start(&["--no-keeper"]), tempfile::tempdir().expect("a directory"));
    let [source, library, program] = ["played.c", "libplay.so", "played"].map(|name| dir.path().join(name));
    std::fs::write(&source, PLAYED).expect("a file");
    for (options, out) in [(&["-shared", "-fPIC", "-DLIBRARY"][..], &library), (&[], &program)] {
        let done =
            Command::new("cc").arg("-O1").args(options).arg("-o").args([out, &source]).output().expect("cc runs");
        assert!(done.status.success(), "cc: {}", String::from_utf8_lossy(&done.stderr));
    }
    let mut plain = Command::new(&program);
    for command in [&mut plain, daemon.run(&["--manage=all"]).arg(&program), daemon.run(&["--cold"]).arg(&program)] {
        let (status, out, err) = finish(command.env("LD_PRELOAD", &library), 120);
        assert!(status.success(), "{status}\n{out}{err}");
    }
}
