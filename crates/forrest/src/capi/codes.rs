//! Codes: what functions of the C face return, and how errors and panics become codes.
//!
//! The numbers are part of the interface: `forrest.h` has the same, by test.
//! Each has its text in [`forrest_error_text`].

use crate::error::Error;
use libc::{c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Done.
pub const FORREST_OK: c_int = 0;
/// There is no entry of this key, or no store of this name.
pub const FORREST_NOT_FOUND: c_int = 1;
/// There is an entry, or a store, already.
pub const FORREST_EXISTS: c_int = 2;
/// The value is not the expected one.
pub const FORREST_MISMATCH: c_int = 3;
/// The value does not fit the buffer; its length was stored.
pub const FORREST_TOO_SMALL: c_int = 4;
/// An argument is NULL or out of range.
pub const FORREST_INVALID: c_int = 5;
/// The handle is not open.
pub const FORREST_BAD_HANDLE: c_int = 6;
/// The handle was opened before fork; open it again in the child.
pub const FORREST_FORKED: c_int = 7;
/// The memory limit is reached, or that of the part of the table to which the key's hash leads.
pub const FORREST_FULL: c_int = 8;
/// The system has no memory left.
pub const FORREST_NO_MEMORY: c_int = 9;
/// The key is too long.
pub const FORREST_KEY_TOO_LONG: c_int = 10;
/// The value is too long.
pub const FORREST_VALUE_TOO_LONG: c_int = 11;
/// The value is not a number of 8 bytes.
pub const FORREST_NOT_A_NUMBER: c_int = 12;
/// The name cannot name a store.
pub const FORREST_BAD_NAME: c_int = 13;
/// The file is not a store, or was made with other settings.
pub const FORREST_FOREIGN: c_int = 14;
/// The store was written by another version.
pub const FORREST_VERSION: c_int = 15;
/// The store was written on another kind of machine.
pub const FORREST_ARCHITECTURE: c_int = 16;
/// The store is truncated or damaged.
pub const FORREST_DAMAGED: c_int = 17;
/// Too many threads or handles use stores, or a callback wants to close a handle that is in use.
pub const FORREST_BUSY: c_int = 18;
/// The system refused something; errno says what, or is 0.
pub const FORREST_SYSTEM: c_int = 19;
/// An error inside the library.
pub const FORREST_INTERNAL: c_int = 20;

/// The store does not keep its keys in order; a shared one cannot.
pub const FORREST_NOT_ORDERED: c_int = 21;
/// The file of this name belongs to another user, or other users may write it.
pub const FORREST_UNTRUSTED: c_int = 22;
/// Processes of another pid or time namespace use the store.
pub const FORREST_NAMESPACE: c_int = 23;

/// An error on its way out.
pub(super) struct Code(pub(super) c_int);

impl From<Error> for Code {
    fn from(error: Error) -> Code {
        use llds::arena::Error as Arena;
        if let Error::Arena(Arena::Io(source) | Arena::Reserve { source, .. } | Arena::NoMemory { source }) = &error {
            // SAFETY: errno is this thread's own.
            unsafe { *libc::__errno_location() = source.raw_os_error().unwrap_or(0) };
        }
        Code(code_of(&error))
    }
}

impl From<c_int> for Code {
    fn from(code: c_int) -> Code {
        Code(code)
    }
}

fn code_of(error: &Error) -> c_int {
    use llds::arena::Error as Arena;
    match error {
        Error::KeyTooLong { .. } => FORREST_KEY_TOO_LONG,
        Error::ValueTooLong { .. } => FORREST_VALUE_TOO_LONG,
        Error::NotANumber { .. } => FORREST_NOT_A_NUMBER,
        Error::Name(_) => FORREST_BAD_NAME,
        Error::NotFound(_) => FORREST_NOT_FOUND,
        Error::Exists(_) => FORREST_EXISTS,
        Error::Untrusted { .. } => FORREST_UNTRUSTED,
        Error::Crowded { .. } | Error::TooMany { .. } => FORREST_FULL,
        Error::Settings(_) => FORREST_FOREIGN,
        Error::NotOrdered | Error::OrderedShared => FORREST_NOT_ORDERED,
        Error::Arena(error) => match error {
            Arena::Full { .. } => FORREST_FULL,
            Arena::Reserve { .. } | Arena::NoMemory { .. } => FORREST_NO_MEMORY,
            Arena::TooManyThreads => FORREST_BUSY,
            Arena::Forked => FORREST_FORKED,
            Arena::Foreign => FORREST_FOREIGN,
            Arena::Version { .. } => FORREST_VERSION,
            Arena::Architecture { .. } => FORREST_ARCHITECTURE,
            Arena::Truncated { .. } | Arena::Damaged(_) => FORREST_DAMAGED,
            Arena::Namespace => FORREST_NAMESPACE,
            _ => FORREST_SYSTEM,
        },
    }
}

/// Runs a call: errors become codes, a panic becomes FORREST_INTERNAL.
#[inline]
pub(super) fn guard(run: impl FnOnce() -> Result<(), Code>) -> c_int {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => FORREST_OK,
        Ok(Err(Code(code))) => code,
        Err(_) => FORREST_INTERNAL,
    }
}

/// Returns the text of an error code; never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn forrest_error_text(code: c_int) -> *const c_char {
    let text = match code {
        FORREST_OK => c"success",
        FORREST_NOT_FOUND => c"not found",
        FORREST_EXISTS => c"exists already",
        FORREST_MISMATCH => c"the value is not the expected one",
        FORREST_TOO_SMALL => c"the buffer is too small; the needed length was stored",
        FORREST_INVALID => c"an argument is NULL or out of range",
        FORREST_BAD_HANDLE => c"the handle is not open",
        FORREST_FORKED => c"the handle was opened before fork; open it again in the child",
        FORREST_FULL => c"the store is full: its memory limit is in use, or the part of the table for keys of like hashes; delete entries of this size or larger, or make a larger or a keyed store",
        FORREST_NO_MEMORY => c"the system has no memory left",
        FORREST_KEY_TOO_LONG => c"the key is longer than FORREST_KEY_BYTES_MAX",
        FORREST_VALUE_TOO_LONG => c"the value is longer than FORREST_VALUE_BYTES_MAX",
        FORREST_NOT_A_NUMBER => c"the value is not a number of 8 bytes",
        FORREST_BAD_NAME => c"the name must have 1 to 200 bytes of UTF-8 without '/', not beginning with '.'",
        FORREST_FOREIGN => c"the file is not a store, or was made with other settings",
        FORREST_VERSION => c"the store was written by another version",
        FORREST_ARCHITECTURE => c"the store was written on another kind of machine",
        FORREST_DAMAGED => c"the store is truncated or damaged; remove it",
        FORREST_BUSY => c"too many threads or handles, or a callback closes a handle that is in use",
        FORREST_SYSTEM => c"the system refused",
        FORREST_INTERNAL => c"an error inside the library",
        FORREST_NOT_ORDERED => c"the store does not keep its keys in order; a shared one cannot",
        FORREST_NAMESPACE => c"processes of another pid or time namespace use the store; share theirs to use it too",
        FORREST_UNTRUSTED => c"the file of this name is another user's, or others may write it; choose another name",
        _ => c"unknown error code",
    };
    text.as_ptr()
}
