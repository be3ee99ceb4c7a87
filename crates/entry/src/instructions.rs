//! The instructions that a borrowed thread executes: it maps the agent's memory, starts the agent's first thread, and goes
//! back to what it did. Or, without an agent, it tells the kernel that KSM may merge the program's memory.
//!
//! The thread uses none of the program's stack, for that may have no room, and leaves every register as it was. Whatever it
//! needs stands in [`Words`] beside the instructions before its registers are set, so a tracer that dies after that is not
//! missed. Signals wait from the first call to the last; the new thread lets all of them wait for ever.
//!
//! The new thread waits until the agent's code is written, ten seconds at most, and else unmaps everything and ends.

use pagefold_os::Range;

/// What the instructions read: the tracer fills it in. In the order of the words behind the instructions.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Words {
    /// Every signal.
    pub all_signals: u64,
    /// Signals that the thread let wait.
    pub mask: u64,
    /// Where the agent's memory begins. Without an agent: 1 if KSM may merge the program's memory, 0 if not.
    pub base: u64,
    /// Length of the agent's memory; 0 without an agent.
    pub len: u64,
    /// Where the part of it begins that can be written.
    pub data: u64,
    /// Length of that part.
    pub data_len: u64,
    /// End of the stack of the agent's first thread.
    pub stack: u64,
    /// The entry page.
    pub page: u64,
    /// Where the agent's code begins.
    pub begin: u64,
    /// How long the new thread sleeps between two looks: seconds.
    pub sleep_s: u64,
    /// Nanoseconds.
    pub sleep_ns: u64,
    /// Registers of the thread, to be restored.
    pub flags: u64,
    /// As its name says, and so below.
    pub rsp: u64,
    /// Restored.
    pub rax: u64,
    /// Restored.
    pub rdi: u64,
    /// Restored.
    pub rsi: u64,
    /// Restored.
    pub rdx: u64,
    /// Restored.
    pub r10: u64,
    /// Restored.
    pub r8: u64,
    /// Restored.
    pub r9: u64,
    /// Restored.
    pub rcx: u64,
    /// Restored.
    pub r11: u64,
    /// Where it goes on.
    pub rip: u64,
    /// How the agent's code may become executable: [`CODE_IN_PLACE`], [`CODE_OF_FILE`] or both.
    pub ways: u64,
    /// Restored.
    pub rbx: u64,
}

/// By mprotect(2), where it was written.
pub const CODE_IN_PLACE: u64 = 1;
/// By a mapping of a file that the new thread makes.
pub const CODE_OF_FILE: u64 = 2;

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .rodata.pagefold_borrow, \"a\"",
    ".balign 16",
    ".globl pagefold_borrow_begin, pagefold_borrow_leave, pagefold_borrow_words, pagefold_borrow_end",
    ".hidden pagefold_borrow_begin, pagefold_borrow_leave, pagefold_borrow_words, pagefold_borrow_end",
    "pagefold_borrow_begin:",
    // A mark by which a later entry knows what an unfinished one left; jumped over.
    ".byte 0xeb, 14",
    ".ascii \"pagefold-entry\"",
    // Of the words, 128 bytes in: offsets from there are a byte each.
    "lea rbx, [rip + 90f + 128]",
    // rt_sigprocmask(SIG_SETMASK, all, NULL, 8)
    "mov eax, 14",
    "mov edi, 2",
    "lea rsi, [rbx - 128]",
    "xor edx, edx",
    "mov r10d, 8",
    "syscall",
    "cmp qword ptr [rbx - 128 + 24], 0",
    "jne 1f",
    // prctl(PR_SET_MEMORY_MERGE, base, 0, 0, 0)
    "mov eax, 157",
    "mov edi, 67",
    "mov rsi, [rbx - 128 + 16]",
    "xor edx, edx",
    "xor r10d, r10d",
    "xor r8d, r8d",
    "syscall",
    "jmp 3f",
    "1:",
    // mmap(base, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | MAP_NORESERVE, -1, 0)
    "mov eax, 9",
    "mov rdi, [rbx - 128 + 16]",
    "mov rsi, [rbx - 128 + 24]",
    "mov edx, 3",
    "mov r10d, 0x104022",
    "or r8, -1",
    "xor r9d, r9d",
    "syscall",
    "cmp rax, [rbx - 128 + 16]",
    "jne 3f",
    // mmap(data, data_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0)
    "mov eax, 9",
    "mov rdi, [rbx - 128 + 32]",
    "mov rsi, [rbx - 128 + 40]",
    "mov edx, 3",
    "mov r10d, 0x4032",
    "or r8, -1",
    "xor r9d, r9d",
    "syscall",
    "cmp rax, [rbx - 128 + 32]",
    "jne 2f",
    // clone(ATTACHED_THREAD_FLAGS, stack, &thread, &thread, 0)
    "mov eax, 56",
    "mov edi, 0x003d0f00",
    "mov rsi, [rbx - 128 + 48]",
    "mov rdx, [rbx - 128 + 56]",
    "lea rdx, [rdx + 4]",
    "mov r10, rdx",
    "xor r8d, r8d",
    "syscall",
    "test rax, rax",
    "jz 4f",
    "js 2f",
    "mov rax, [rbx - 128 + 56]",
    "mov dword ptr [rax + 8], 1",
    "jmp 3f",
    // munmap(base, len)
    "2:",
    "mov eax, 11",
    "mov rdi, [rbx - 128 + 16]",
    "mov rsi, [rbx - 128 + 24]",
    "syscall",
    // Back. No signal comes while the stack pointer is not the program's.
    "3:",
    "lea rsp, [rbx - 128 + 88]",
    "popfq",
    "mov rsp, [rbx - 128 + 96]",
    // rt_sigprocmask(SIG_SETMASK, mask, NULL, 8); from here on nothing changes the flags.
    "mov eax, 14",
    "mov edi, 2",
    "lea rsi, [rbx - 128 + 8]",
    "mov edx, 0",
    "mov r10d, 8",
    "syscall",
    "mov rax, [rbx - 128 + 104]",
    "mov rdi, [rbx - 128 + 112]",
    "mov rsi, [rbx - 128 + 120]",
    "mov rdx, [rbx - 128 + 128]",
    "mov r10, [rbx - 128 + 136]",
    "mov r8, [rbx - 128 + 144]",
    "mov r9, [rbx - 128 + 152]",
    "mov rcx, [rbx - 128 + 160]",
    "mov r11, [rbx - 128 + 168]",
    "mov rbx, [rip + 90f + 192]",
    "jmp qword ptr [rip + 90f + 176]",
    // The new thread waits for the agent's code.
    "4:",
    "mov r12, [rbx - 128 + 56]",
    "mov r13d, 10000",
    "5:",
    "mov eax, [r12]",
    "cmp eax, 1",
    "je 6f",
    "cmp eax, 3",
    "je 7f",
    "dec r13d",
    "jz 7f",
    // nanosleep(&sleep, NULL)
    "mov eax, 35",
    "lea rdi, [rbx - 128 + 72]",
    "xor esi, esi",
    "syscall",
    "jmp 5b",
    // The code is there.
    "6:",
    "mov rbp, [rbx - 128 + 16]",
    "mov r15, [rbx - 128 + 32]",
    "sub r15, rbp",
    "test byte ptr [rbx - 128 + 184], 1",
    "jz 8f",
    // mprotect(base, data - base, PROT_READ | PROT_EXEC)
    "mov eax, 10",
    "mov rdi, rbp",
    "mov rsi, r15",
    "mov edx, 5",
    "syscall",
    "test rax, rax",
    "jz 9f",
    // No memory may become executable here (MemoryDenyWriteExecute= of systemd). A file may be mapped so. The program's
    // table of descriptors never shows it.
    "8:",
    "test byte ptr [rbx - 128 + 184], 2",
    "jz 7f",
    // close_range(0, ~0, CLOSE_RANGE_UNSHARE)
    "mov eax, 436",
    "xor edi, edi",
    "or esi, -1",
    "mov edx, 2",
    "syscall",
    "test rax, rax",
    "jnz 7f",
    // memfd_create(name, MFD_CLOEXEC | MFD_EXEC)
    "mov eax, 319",
    "lea rdi, [rip + 91f]",
    "mov esi, 0x11",
    "syscall",
    "test rax, rax",
    "js 7f",
    "mov r14, rax",
    // write(file, base, data - base)
    "mov eax, 1",
    "mov rdi, r14",
    "mov rsi, rbp",
    "mov rdx, r15",
    "syscall",
    "cmp rax, r15",
    "jne 7f",
    // mmap(base, data - base, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, file, 0)
    "mov eax, 9",
    "mov rdi, rbp",
    "mov rsi, r15",
    "mov edx, 5",
    "mov r10d, 0x12",
    "mov r8, r14",
    "xor r9d, r9d",
    "syscall",
    "cmp rax, rbp",
    "jne 7f",
    // close(file)
    "mov eax, 3",
    "mov rdi, r14",
    "syscall",
    "9:",
    "mov rdi, r12",
    "xor ebp, ebp",
    "call qword ptr [rbx - 128 + 64]",
    "ud2",
    "7:",
    "mov rdi, [rbx - 128 + 16]",
    "mov rsi, [rbx - 128 + 24]",
    // munmap(rdi, rsi), exit(0): the agent comes here, too, when it leaves.
    "pagefold_borrow_leave:",
    "mov eax, 11",
    "syscall",
    "mov eax, 60",
    "xor edi, edi",
    "syscall",
    "ud2",
    "91:",
    ".asciz \"pagefold-agent\"",
    ".balign 8",
    "pagefold_borrow_words:",
    "90:",
    "pagefold_borrow_end:",
    ".popsection",
);

#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    static pagefold_borrow_begin: u8;
    static pagefold_borrow_leave: u8;
    static pagefold_borrow_words: u8;
}

/// The first bytes of the instructions, of whatever version.
pub const MARK: [u8; 16] = *b"\xeb\x0epagefold-entry";

/// The instructions, without their words; nothing where there are none for this processor.
fn instructions() -> &'static [u8] {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: both labels belong to one section of this program, the second behind the first.
    unsafe {
        let begin = &raw const pagefold_borrow_begin;
        std::slice::from_raw_parts(begin, (&raw const pagefold_borrow_words).offset_from_unsigned(begin))
    }
    #[cfg(not(target_arch = "x86_64"))]
    &[]
}

/// Length of instructions and words. As short as can be: kernels leave some 900 bytes in their page of code.
pub fn len() -> usize {
    instructions().len() + size_of::<Words>()
}

/// True if programs can be entered on this processor.
pub fn is_supported() -> bool {
    !instructions().is_empty()
}

/// Where the code that leaves lies if the instructions lie at `at`.
pub fn leave_at(at: u64) -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: both labels belong to one section of this program.
    return at
        + unsafe { (&raw const pagefold_borrow_leave).offset_from_unsigned(&raw const pagefold_borrow_begin) } as u64;
    #[cfg(not(target_arch = "x86_64"))]
    at
}

/// Where the instructions lie if the code that leaves lies at `leave_at`.
pub fn code_at(leave_at: u64) -> Option<u64> {
    leave_at.checked_sub(self::leave_at(0))
}

/// The words behind the instructions that `read` gives, if they are ours and of this version.
pub fn words(read: impl Fn(&mut [u8]) -> bool) -> Option<Words> {
    let mut bytes = vec![0; len()];
    let (code, words) = bytes.split_at_mut_checked(instructions().len())?;
    let (code_len, words_len) = (code.len(), size_of::<Words>());
    if words.len() < words_len || !read(&mut bytes) || bytes[..code_len] != *instructions() {
        return None;
    }
    // SAFETY: as many bytes are there, and the structure is `repr(C)` of words, of which any bytes are one.
    Some(unsafe { bytes[code_len..].as_ptr().cast::<Words>().read_unaligned() })
}

/// Instructions and words as they lie in the program's memory.
pub fn code(words: &Words) -> Vec<u8> {
    let mut code = instructions().to_vec();
    // SAFETY: the structure is `repr(C)` of words without padding.
    code.extend_from_slice(unsafe {
        std::slice::from_raw_parts(std::ptr::from_ref(words).cast::<u8>(), size_of::<Words>())
    });
    code
}

/// The addresses that the instructions take from `at` on.
pub fn range(at: u64) -> Range {
    Range { start: at, end: at + len() as u64 }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    #[test]
    fn the_instructions_fit_where_kernels_leave_room() {
        // Debian's 7.3 leaves 911 bytes; room to find them at a multiple of 16, and a margin before them.
        assert!(super::len() + 16 + 16 <= 911, "{} bytes", super::len());
    }
}
