//! Merged memory behaves as anonymous memory does: each test runs one scenario of `programs/semantics/` under
//! `pagefold run`; the program waits until its pages are merged and then compares every byte.

mod common;

use common::{Daemon, Reaped, can_merge, finish, installed, semantics, skipped};
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

fn scenario(name: &str, options: &[&str]) {
    scenario_under(&[], name, options);
}

/// A scenario in a program that has rights to execute all of its memory.
fn executable_scenario(name: &str, options: &[&str]) {
    scenario_with(&[("EXECUTABLE", "1")], &[], name, options);
}

fn scenario_under(daemon_options: &[&str], name: &str, options: &[&str]) {
    scenario_with(&[], daemon_options, name, options);
}

fn scenario_with(variables: &[(&str, &str)], daemon_options: &[&str], name: &str, options: &[&str]) {
    let needed: Vec<String> = pagefold_protocol::seccomp_filter::needed().map(|number| number.to_string()).collect();
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let daemon = Daemon::start(daemon_options);
    let mut command = daemon.run(options);
    command.envs(variables.iter().copied());
    command.env("NEEDED", needed.join(",")).env("DAEMON", daemon.pid().to_string()).arg(program).arg(name);
    let (status, out, err) = finish(&mut command, 400);
    if status.code() == Some(77) {
        return skipped(out.trim().trim_start_matches("SKIPPED: "));
    }
    assert!(status.success(), "{name}: {status}\n{out}{err}");
    let end = daemon.status();
    assert!(end["totals"]["pages_merged"].as_u64() > Some(0), "nothing was merged: {end}");
    daemon.verify();
}

/// The daemon's client that runs a scenario, which waits for its input, and the first line that it says.
fn asked(daemon: &Daemon, program: &std::path::Path, name: &str) -> (Reaped, String) {
    let mut command = daemon.run(&[]);
    command.arg(program).arg(name).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut client = Reaped(command.spawn().expect("a client"));
    let mut line = String::new();
    BufReader::new(client.0.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    (client, line)
}

macro_rules! scenarios {
    ($scenario:ident: $($test:ident: $name:literal $($option:literal)*;)*) => {
        $(#[test] fn $test() { $scenario($name, &[$($option),*]); })*
    };
}

scenarios! {
    executable_scenario:
    writers_of_code_lose_no_write: "writers";
    writers_of_code_lose_no_write_to_unmergeable: "unmergeable-writers";
    children_read_right_code_whenever_they_are_forked: "forks";
    code_that_is_discarded_reads_zero: "dontneed";
    code_that_is_discarded_by_a_raw_instruction_reads_zero: "dontneed-raw";
    discards_of_code_race_with_merging: "dontneed-racing";
    code_grows_moves_shrinks: "remap";
    unshared_code_moves: "remap-healed";
    mprotect_of_code_is_obeyed: "protect";
    attributes_of_code_are_kept: "flags";
    guards_in_code_hold: "guards";
    huge_pages_of_code_are_split_where_it_pays: "huge";
    all_memory_that_can_be_executed: "all" "--manage=all";
}

scenarios! {
    scenario:
    writers_lose_no_write: "writers";
    writers_lose_no_write_to_unmergeable: "unmergeable-writers";
    writers_lose_no_write_to_locks: "lock-writers";
    children_read_right_whenever_they_are_forked: "forks";
    a_program_that_forks_all_the_time_is_merged: "forks-at-pace";
    an_orphan_keeps_its_pages: "orphan";
    a_program_goes_on_without_its_first_thread: "main-ends";
    children_need_no_daemon_to_discard: "child-without-daemon";
    children_in_a_namespace_of_processes_have_agents: "process-namespace";
    vfork_exec_and_spawn: "vforks";
    a_parent_keeps_rights_that_its_vforked_child_gives_up: "vforks-with-less";
    a_daemon_keeps_its_pages_and_merges_on: "daemonize";
    dontneed_gives_zeros: "dontneed";
    dontneed_by_syscall_gives_zeros: "dontneed-syscall";
    dontneed_by_a_raw_instruction_gives_zeros: "dontneed-raw";
    a_discard_continues_after_a_hole: "dontneed-hole";
    discards_at_a_limit_give_zeros: "dontneed-at-a-limit";
    discards_race_with_merging: "dontneed-racing";
    free_gives_old_bytes_or_zeros: "lazy-free";
    madv_remove_changes_nothing: "hole-punch";
    munmap_whole_and_in_part: "unmap";
    no_mapping_appears_in_a_hole_of_the_program: "holes";
    advice_ends_with_its_mapping_even_if_the_call_fails: "failed-maps";
    mremap_grows_moves_shrinks: "remap";
    mremap_moves_several_mappings_or_none: "remap-several";
    mremap_moves_unshared_memory: "remap-healed";
    mremap_as_another_user_returns_what_the_kernel_returns: "remap-as-another";
    mremap_keeps_the_marks_of_parts: "remap-marked";
    mprotect_is_obeyed: "protect";
    memory_with_a_key_is_left_alone: "keys";
    a_key_goes_before_advice: "keys-and-advice";
    locked_pages_are_right: "lock";
    a_length_that_is_refused_changes_nothing: "lengths";
    locked_memory_is_left_alone: "locks";
    locked_memory_is_left_alone_under_all: "locks" "--manage=all";
    locks_stay_on_memory_that_cannot_be_unmerged: "locks-at-a-limit";
    children_do_not_inherit_locks: "locks-and-children";
    unmergeable_gives_private_memory: "unmergeable";
    wipe_on_fork_wipes: "wipe-on-fork";
    a_sealed_mapping_stays: "sealed";
    sealed_memory_reads_zero_after_a_discard: "seal-and-discard";
    memory_sealed_by_a_raw_instruction_reads_zero_after_a_discard: "seal-raw";
    raw_discards_of_memory_sealed_by_a_raw_instruction: "seal-and-discard-raw";
    guards_hold_and_leave_zeros: "guards";
    guards_by_raw_calls_hold: "guards-raw";
    the_programs_own_userfaultfd_comes_first: "own-userfaultfd";
    blocks_are_tracked_one_after_another: "tracked-blocks";
    no_write_is_lost_during_probes_by_userfaultfd: "probes";
    runs_of_equal_pages_cross_mapping_borders: "straddle";
    rights_that_change_by_raw_calls: "rights-raw";
    code_is_executed_and_changed_while_it_is_merged: "execute";
    code_is_merged_under_all: "execute" "--manage=all";
    attributes_are_kept: "flags";
    attributes_are_kept_by_raw_discards: "flags-raw";
    more_marks_than_the_agent_records_are_obeyed: "marks";
    huge_pages_are_split_where_it_pays: "huge";
    signals_interrupt_anything: "signals";
    handlers_have_small_stacks: "small-stacks";
    handlers_make_the_calls_they_interrupt: "signals-nested";
    a_filter_by_prctl: "seccomp-prctl";
    writers_lose_no_write_to_filters: "seccomp-writers";
    a_filter_is_the_childrens_too: "seccomp-child" "--manage=all";
    children_do_not_inherit_the_agents_mappings: "no-segments-in-children";
    a_filter_for_all_threads: "seccomp-tsync";
    a_sandbox_that_lets_the_agent_work: "sandbox";
    a_sandbox_installed_before_anything_is_merged: "sandbox-first";
    a_sandbox_that_allows_only_the_listed_calls: "sandbox-listed";
    a_program_may_close_everything: "close-all";
    a_closed_descriptor_is_closed_immediately: "closed-at-once";
    a_program_may_become_another_user: "identity";
    a_program_that_is_not_dumpable_is_left_alone: "not-dumpable";
    a_program_may_lose_access_to_proc: "no-proc";
    no_thread_keeps_given_up_privileges: "privileges";
    no_thread_keeps_given_up_privileges_under_all: "privileges" "--manage=all";
    no_thread_keeps_privileges_given_up_in_a_handler: "privileges-in-handlers";
    landlock_binds_the_agent: "landlock";
    a_program_may_enter_a_user_namespace: "user-namespace";
    a_program_may_enter_a_mount_namespace: "mount-namespace";
    reads_past_the_page_cache: "direct" ;
    registered_buffers: "uring";
    registered_buffers_when_the_agent_leaves: "uring-leaving";
    registered_buffers_when_mappings_move: "uring-remap";
    registered_buffers_when_blocks_grow: "uring-realloc" "--manage=all";
    system_calls_on_merged_memory: "system-calls";
    all_memory: "all" "--manage=all";
    memory_in_small_mappings: "small-mappings" "--manage=all";
    memory_in_more_mappings_than_one_list_holds: "many-mappings" "--manage=all";
    the_agents_own_memory_is_left_alone: "all-that-is-listed";
    all_memory_when_no_place_is_left: "all-after-reservations" "--manage=all";
    memory_merge_by_prctl: "memory-merge";
    blocks_of_the_allocator: "blocks" "--manage=all";
    blocks_that_are_never_freed: "blocks-kept" "--manage=all";
    blocks_that_end_while_they_are_merged: "marked-blocks";
    blocks_lie_side_by_side: "side-by-side" "--manage=all";
    memory_of_dead_slots_comes_back: "decay";
    writes_here_and_there_cost_no_mappings: "scatter";
    a_program_that_counts_its_threads_does_not_see_the_agent: "tasks";
}

/// A library registers its handlers of forks before the agent does, and takes a lock there with which it discards elsewhere.
#[test]
fn forks_go_on_beside_a_library_that_locks_for_them() {
    if !can_merge() || installed("cc").is_none() {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let (library, program) = (dir.path().join("libpurge.so"), dir.path().join("atfork"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/atfork.c");
    let compile = |args: &[&str], out: &std::path::Path, last: Option<&std::path::Path>| {
        let mut cc = std::process::Command::new("cc");
        cc.args(["-O2", "-Wall", "-Werror", "-pthread"]).args(args).arg("-o").arg(out).arg(source).args(last);
        let done = cc.output().expect("cc runs");
        assert!(done.status.success(), "cc: {}", String::from_utf8_lossy(&done.stderr));
    };
    compile(&["-shared", "-fPIC", "-DLIBRARY"], &library, None);
    compile(&["-Wl,-rpath,$ORIGIN"], &program, Some(&library));
    for options in [["--manage=all"], ["--cold"]] {
        let daemon = Daemon::start(&["--no-keeper"]);
        let (status, out, err) = finish(daemon.run(&options).arg(&program), 400);
        assert!(status.success(), "{options:?}: {status}\n{out}{err}");
    }
}

/// Debuggers start programs so, that each run is as the last.
#[test]
fn addresses_are_random_where_the_kernels_are() {
    let (Some(program), Some(setarch)) = (semantics().filter(|_| can_merge()), installed("setarch")) else { return };
    let daemon = Daemon::start(&["--no-keeper"]);
    let place = |by: &[&std::ffi::OsStr]| {
        let (status, out, err) = finish(daemon.run(&[]).args(by).arg(program).arg("place"), 120);
        assert!(status.success(), "{status} {err}");
        out
    };
    let fixed = [setarch.as_os_str(), "-R".as_ref()];
    assert_eq!(place(&fixed), place(&fixed));
    assert_ne!(place(&[]), place(&[]));
}

#[test]
fn huge_pages_lose_no_write_while_they_are_merged_whole() {
    scenario_under(&["--scan-interval", "50ms"], "huge-writers", &[]);
}

/// One freeze takes at most 64 pages, except for huge pages that are merged whole.
#[test]
fn huge_pages_that_have_twins_are_merged_whole() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let daemon = Daemon::start(&["--no-keeper", "--scan-interval", "100ms"]);
    let (mut client, line) = asked(&daemon, program, "huge-whole");
    if line.starts_with("SKIPPED") {
        return skipped(line.trim());
    }
    assert_eq!(line, "merged\n");
    let status = daemon.status();
    let freezes = status["clients"][0]["freezes"].as_u64().expect("a number");
    let merged = status["totals"]["pages_merged"].as_u64().expect("a number");
    assert!(freezes > 0 && merged / freezes > 64, "{merged} pages merged in {freezes} freezes");
    daemon.verify();
    client.0.stdin.take().expect("a pipe").write_all(b"\n").expect("the client reads");
    assert!(client.0.wait().expect("it ends").success());
}

#[test]
fn a_heap_that_ends_and_grows_again_is_fresh_memory() {
    scenario_under(&["--scan-interval", "20ms"], "heap", &["--manage=all"]);
}

#[test]
fn a_core_dump_holds_merged_pages() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    if pattern.trim().contains(['|', '/', '@']) {
        return skipped("core dumps go elsewhere on this machine");
    }
    let daemon = Daemon::start(&[]);
    let (status, out, err) = finish(daemon.run(&[]).arg(program).arg("core"), 400);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGABRT), "{status} {out}{err}");
    let mut entries = std::fs::read_dir(daemon.dir.path()).expect("the directory").flatten();
    let core = entries.find(|entry| entry.file_name().to_string_lossy().starts_with("core"));
    let Some(core) = core else { return skipped("this machine writes no core files") };
    let mut check = std::process::Command::new(program);
    let (status, out, err) = finish(check.arg("core-check").arg(core.path()), 60);
    assert!(status.success(), "{out}{err}");
}

#[test]
fn giving_up_privileges_does_not_wait_for_a_stopped_daemon() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    if !common::root() {
        return skipped("needs root to give something up");
    }
    let daemon = Daemon::start(&["--no-keeper"]);
    let (mut client, line) = asked(&daemon, program, "less-with-nobody-there");
    assert_eq!(line, "ready\n");
    // SAFETY: a child of ours, which is killed when the test ends.
    assert_eq!(unsafe { libc::kill(daemon.pid(), libc::SIGSTOP) }, 0);
    // As many as may wait there.
    let mut waiting = Vec::new();
    let path = daemon.socket.as_os_str().as_encoded_bytes();
    while let Ok(one) = pagefold_os::sock::connect_within(path, 100) {
        waiting.push(one);
        assert!(waiting.len() < 10_000, "the daemon takes connections");
    }
    client.0.stdin.take().expect("a pipe").write_all(b"\n").expect("the client reads");
    common::wait_for("the client to end", 120, || matches!(client.0.try_wait(), Ok(Some(_))));
    assert!(client.0.wait().expect("it has ended").success());
}

#[test]
fn memory_that_is_no_longer_mergeable_is_left_alone_immediately() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let daemon = Daemon::start(&["--no-keeper", "--scan-interval", "100ms"]);
    let mut command = daemon.run(&[]);
    command.arg(program).arg("memory-merge-ends").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut client = Reaped(command.spawn().expect("a client"));
    let (mut input, output) = (client.0.stdin.take().expect("a pipe"), client.0.stdout.take().expect("a pipe"));
    let mut output = BufReader::new(output);
    let pages = || daemon.status()["totals"]["pages"].as_u64().expect("a number");
    for (what, is_so) in [("managed", true), ("let alone", false)] {
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
        assert_eq!(line, "done\n");
        common::wait_for(&format!("the memory to be {what}"), 120, || (pages() >= 4096) == is_so);
        // Twice a second the agent looks whether memory came unseen, and has all listed: that is over now.
        std::thread::sleep(std::time::Duration::from_secs(2));
        input.write_all(b"\n").expect("the client reads");
    }
    assert!(client.0.wait().expect("it ends").success());
}
