//! Entering a program that runs already, static or not, and stopping it for a moment later.
//!
//! [`enter`](enter::enter) borrows one thread of the program for a few microseconds: it has the thread map memory and start
//! the agent's first thread, and return to what it did. [`with_stopped`](stop::with_stopped) runs a closure while no thread
//! of the program runs.
//!
//! The tracer may be killed at any instant. It changes a thread of the program by one call, which sets its registers;
//! whatever the thread needs after that is in the program's own memory by then (see [`borrow`]).
//!
//! * [`trace`]: the calls of ptrace(2), typed.
//! * [`stop`]: all threads of a program are stopped for the length of a closure.
//! * [`memory`]: reading and writing another program's memory, and room for a few instructions in it.
//! * [`image`]: the agent's file, placed at an address.
//! * [`borrow`]: the instructions that a borrowed thread executes.
//! * [`enter`]: the steps of an entry, and of leaving.

pub mod borrow;
mod call_names;
pub mod enter;
pub mod image;
pub mod memory;
pub mod stop;
pub mod trace;
