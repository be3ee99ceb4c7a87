//! What the registers of a stopped thread say, and how they send it elsewhere.

use crate::instructions::Words;
use crate::memory::Memory;
use crate::trace::Registers;
use pagefold_os::Range;

pub(crate) use architecture::{at_instructions, at_of, is_64_bit, is_in_restartable_sequence, words};

#[cfg(target_arch = "x86_64")]
mod architecture {
    use super::{Memory, Range, Registers, Words};

    /// True if they are those of 64-bit code.
    pub(crate) fn is_64_bit(registers: &Registers) -> bool {
        registers.cs == 0x33
    }

    /// They, with the instructions at `at` as what comes next.
    pub(crate) fn at_instructions(registers: &Registers, at: u64) -> Registers {
        // No system call: the kernel would restart it, with the instructions' registers.
        Registers { rip: at, orig_rax: u64::MAX, ..*registers }
    }

    /// What the instructions need for `purpose`, with the registers as the thread is to have them when it goes on.
    pub(crate) fn words(purpose: Words, registers: &Registers, mask: u64) -> Words {
        // What the kernel does when a thread goes on that was stopped in a call: it makes the call again. Numbers of the
        // kernel's own.
        const RESTART: [i64; 3] = [-512, -513, -514];
        const RESTART_BLOCK: i64 = -516;
        const SYSCALL_LEN: u64 = 2;
        let in_call = registers.orig_rax as i64 >= 0;
        let (rax, rip) = match registers.rax as i64 {
            result if in_call && RESTART.contains(&result) => (registers.orig_rax, registers.rip - SYSCALL_LEN),
            RESTART_BLOCK if in_call => (libc::SYS_restart_syscall as u64, registers.rip - SYSCALL_LEN),
            _ => (registers.rax, registers.rip),
        };
        Words {
            all_signals: u64::MAX,
            mask,
            flags: registers.eflags,
            rsp: registers.rsp,
            rax,
            rdi: registers.rdi,
            rsi: registers.rsi,
            rdx: registers.rdx,
            r10: registers.r10,
            r8: registers.r8,
            r9: registers.r9,
            rcx: registers.rcx,
            r11: registers.r11,
            rip,
            rbx: registers.rbx,
            ..purpose
        }
    }

    /// True if `thread` stands within a restartable sequence: the kernel would abort that, had it not been sent elsewhere.
    pub(crate) fn is_in_restartable_sequence(thread: i32, memory: &Memory, registers: &Registers) -> bool {
        const GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
        let mut configuration = [0u64; 3];
        // SAFETY: the kernel writes at most as many bytes as it is told.
        let got = unsafe {
            let len = size_of_val(&configuration);
            libc::ptrace(GET_RSEQ_CONFIGURATION as _, thread, len, (&raw mut configuration).cast::<libc::c_void>())
        };
        if got <= 0 || configuration[0] == 0 {
            return false;
        }
        let word = |at: u64| {
            let mut bytes = [0; 8];
            memory.read(at, &mut bytes).ok().map(|()| u64::from_ne_bytes(bytes))
        };
        // The descriptor's address stands behind two numbers of a processor; in it, start and length behind version and
        // flags.
        let Some(descriptor) = word(configuration[0] + 8).filter(|at| *at != 0) else { return false };
        match (word(descriptor + 8), word(descriptor + 16)) {
            (Some(start), Some(len)) => (start..start.saturating_add(len)).contains(&registers.rip),
            _ => true,
        }
    }

    /// The instruction that comes next.
    pub(crate) fn at_of(registers: &Registers) -> Range {
        Range { start: registers.rip, end: registers.rip + 1 }
    }
}

/// No program is entered on another architecture so far.
#[cfg(not(target_arch = "x86_64"))]
mod architecture {
    use super::{Memory, Range, Registers, Words};

    pub(crate) fn is_64_bit(_: &Registers) -> bool {
        false
    }

    pub(crate) fn at_instructions(registers: &Registers, _: u64) -> Registers {
        *registers
    }

    pub(crate) fn words(purpose: Words, _: &Registers, mask: u64) -> Words {
        Words { mask, ..purpose }
    }

    pub(crate) fn is_in_restartable_sequence(_: i32, _: &Memory, _: &Registers) -> bool {
        true
    }

    pub(crate) fn at_of(_: &Registers) -> Range {
        Range { start: 0, end: 0 }
    }
}
