//! Entering a program that runs already, static or not, and stopping it for a moment later.
//!
//! [`enter`](enter::enter) borrows one thread of the program for a few microseconds: it has the thread map memory and start
//! the agent's first thread, and return to what it did. [`with_stopped`](stop::with_stopped) runs a closure while no thread
//! of the program runs.
//!
//! The tracer may be killed at any instant. It changes a thread of the program by one call, which sets its registers;
//! whatever the thread needs after that is in the program's own memory by then (see [`instructions`]).
//!
//! * [`trace`]: the calls of ptrace(2), typed.
//! * [`stop`]: all threads of a program are stopped for the length of a closure.
//! * [`memory`]: reading and writing another program's memory, and room for a few instructions in it.
//! * [`image`]: the agent's file, placed at an address.
//! * [`instructions`]: the instructions that a borrowed thread executes.
//! * [`look`]: may the program be entered, and if not, why not.
//! * [`enter`]: the steps of an entry.
//! * [`connection`]: the socket to an agent that is there.
//! * [`leave`]: what an entry left in the program is taken out again.
//! * [`merged_by_ksm`]: the kernel's KSM merges the program's memory; no agent comes in.

pub mod agent_thread;
mod borrowed_thread;
mod call_names;
pub mod connection;
pub mod enter;
pub mod error;
pub mod image;
pub mod instructions;
pub mod layout;
pub mod leave;
pub mod look;
pub mod memory;
pub mod merged_by_ksm;
mod registers;
pub mod stop;
pub mod trace;
mod waits;
