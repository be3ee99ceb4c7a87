//! A KVM guest of a few instructions: its memory is merged while it writes.
//!
//! Two processes each run a guest of a few instructions in 32-bit mode. Every
//! round the guest reads all its pages, adding up their second words, and
//! increments the first word of each eighth page. Both guests hold the same
//! bytes otherwise: pages that are not written are merged, written pages break,
//! and guest and host must agree about every byte at the end of every round.

#![cfg(target_arch = "x86_64")]

mod common;

use common::{Daemon, Reaped, can_merge, skipped, wait_for};
use kvm_bindings::{kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit};
use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout, Stdio};

/// Bytes of a guest's data.
const DATA: usize = 48 << 20;
/// Where the data begins in the guest.
const BASE: usize = 1 << 20;
/// The guest writes one page in this many.
const EACH: usize = 8;
const PAGE: usize = 4096;
/// The guest tells the sum of a round here, and that a round is done.
const SUM_PORT: u16 = 0x10;

core::arch::global_asm!(
    ".pushsection .rodata",
    ".code32",
    "guest_code:",
    "2: mov esi, {base}",
    "   mov ecx, {pages}",
    "   xor eax, eax",
    "3: add eax, [esi + 4]",
    "   add esi, {page}",
    "   dec ecx",
    "   jnz 3b",
    "   mov esi, {base}",
    "   mov ecx, {written}",
    "4: inc dword ptr [esi]",
    "   add esi, {stride}",
    "   dec ecx",
    "   jnz 4b",
    "   mov dx, {port}",
    "   out dx, eax",
    "   jmp 2b",
    "guest_code_end:",
    ".code64",
    ".popsection",
    base = const BASE,
    pages = const DATA / PAGE,
    page = const PAGE,
    written = const DATA / PAGE / EACH,
    stride = const EACH * PAGE,
    port = const SUM_PORT,
);

unsafe extern "C" {
    static guest_code: u8;
    static guest_code_end: u8;
}

/// The word at `at` of the data, before any guest wrote.
fn word(at: usize) -> u32 {
    (at as u32).wrapping_mul(0x9E37_79B9).rotate_left(13) ^ 0x5bd1_e995
}

/// The virtual machine monitor: one round per line that it reads.
fn monitor() {
    let len = BASE + DATA;
    // SAFETY: a fresh mapping of ours; the advice is what an embedder's monitor gives.
    let memory = unsafe {
        let at = libc::mmap(
            core::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        assert_ne!(at, libc::MAP_FAILED);
        assert_eq!(libc::madvise(at, len, libc::MADV_MERGEABLE), 0);
        at.cast::<u8>()
    };
    for at in (0..DATA).step_by(4) {
        // SAFETY: inside the mapping, aligned.
        unsafe { memory.add(BASE + at).cast::<u32>().write(word(at)) };
    }
    // SAFETY: both labels bound the guest's instructions, which fit below the data.
    unsafe {
        let (from, to) = (&raw const guest_code, &raw const guest_code_end);
        core::ptr::copy_nonoverlapping(from, memory.add(PAGE), to.offset_from(from) as usize);
    }
    let vm = Kvm::new().expect("/dev/kvm").create_vm().expect("a machine");
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: len as u64,
        userspace_addr: memory as u64,
    };
    // SAFETY: the memory lives until the process ends.
    unsafe { vm.set_user_memory_region(region) }.expect("memory");
    let mut vcpu = vm.create_vcpu(0).expect("a processor");
    let mut sregs = vcpu.get_sregs().expect("registers");
    for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
        (segment.base, segment.limit, segment.g, segment.db, segment.s, segment.present) = (0, 0xffff_ffff, 1, 1, 1, 1);
    }
    (sregs.cs.selector, sregs.cs.type_) = (8, 11);
    for segment in [&mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
        (segment.selector, segment.type_) = (16, 3);
    }
    sregs.cr0 |= 1;
    vcpu.set_sregs(&sregs).expect("registers");
    vcpu.set_regs(&kvm_regs { rip: PAGE as u64, rflags: 2, ..Default::default() }).expect("registers");
    let sum = (0..DATA).step_by(PAGE).fold(0u32, |sum, at| sum.wrapping_add(word(at + 4)));
    println!("ready");
    let mut rounds = 0u32;
    for line in std::io::stdin().lock().lines() {
        if line.is_err() {
            break;
        }
        loop {
            match vcpu.run().expect("the guest runs") {
                VcpuExit::IoOut(SUM_PORT, bytes) => {
                    let told = u32::from_le_bytes(bytes.try_into().expect("a word"));
                    assert_eq!(told, sum, "the guest read other bytes in round {rounds}");
                    break;
                }
                VcpuExit::Intr => {}
                other => panic!("the guest left with {other:?}"),
            }
        }
        rounds += 1;
        for at in (0..DATA).step_by(4) {
            // SAFETY: inside the mapping; the guest rests.
            let seen = unsafe { memory.add(BASE + at).cast::<u32>().read() };
            let written = at.is_multiple_of(EACH * PAGE);
            let wanted = if written { word(at).wrapping_add(rounds) } else { word(at) };
            assert_eq!(seen, wanted, "byte {at:#x} after {rounds} rounds");
        }
        println!("round {rounds}");
    }
}

/// Not a test of its own: the monitor's process, when the test below starts it.
#[test]
fn monitor_of_a_guest() {
    if std::env::var_os("PAGEFOLD_TEST_MONITOR").is_some() {
        monitor();
    }
}

struct Guest {
    _monitor: Reaped,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Guest {
    fn start(daemon: &Daemon) -> Guest {
        let mut command = daemon.run(&[]);
        command.arg(std::env::current_exe().expect("our own path"));
        command.args(["monitor_of_a_guest", "--exact", "--nocapture", "--test-threads=1"]);
        command.env("PAGEFOLD_TEST_MONITOR", "1").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the monitor starts");
        let (input, output) = child.stdin.take().zip(child.stdout.take()).expect("pipes");
        let mut guest = Guest { _monitor: Reaped(child), input, output: BufReader::new(output) };
        guest.expect("ready");
        guest
    }

    fn expect(&mut self, wanted: &str) {
        let mut line = String::new();
        loop {
            line.clear();
            let got = self.output.read_line(&mut line).expect("the monitor speaks");
            assert_ne!(got, 0, "the monitor ended before it said {wanted:?}");
            // The harness's own words come first, on the same line.
            if line.trim_end().ends_with(wanted) {
                return;
            }
        }
    }

    fn round(&mut self, number: usize) {
        self.input.write_all(b"\n").expect("the monitor listens");
        self.expect(&format!("round {number}"));
    }
}

#[test]
fn a_guests_memory_is_merged_while_it_writes() {
    if !can_merge() {
        return;
    }
    if let Err(error) = Kvm::new() {
        return skipped(&format!("/dev/kvm: {error}"));
    }
    let daemon = Daemon::start(&["--scan-interval", "100ms"]);
    let mut guests: Vec<Guest> = (0..2).map(|_| Guest::start(&daemon)).collect();
    // All but the pages that guests write, in both.
    let still = 2 * (DATA / PAGE - DATA / PAGE / EACH) as i64;
    let mut round = 0;
    let mut work = |guests: &mut Vec<Guest>| {
        round += 1;
        guests.iter_mut().for_each(|guest| guest.round(round));
    };
    wait_for("the guests' memory to be shared", 120, || {
        work(&mut guests);
        daemon.total("pages_sharing") * 10 >= still * 9
    });
    for _ in 0..20 {
        work(&mut guests);
    }
    // The guests rest. A page that was written is shared if it equals its twin, and left otherwise; all are verified.
    std::thread::sleep(std::time::Duration::from_millis(500));
    daemon.verify();
    work(&mut guests);
    assert!(daemon.total("pages_sharing") * 10 >= still * 9, "{}", daemon.status()["totals"]);
}
