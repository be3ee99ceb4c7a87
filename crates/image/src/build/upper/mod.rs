//! Upper directories of overlayfs: the changes of a container, or a layer that an engine has unpacked, as a tree.
//!
//! The files become objects without a copy: [`apply`] hard-links them into the store. A file is copied instead if any other
//! process may still write to it. Until the caller has recorded the new tree, the upper directory stays as it is, and a
//! caller that was killed can start again. Then the caller ends the upper directory by [`release`]; a caller that gives the
//! commit up calls [`unshare`], because a later write to the directory would change an object.

mod apply;
mod links;
mod root;

pub use apply::{Options, apply};
pub use links::{release, unshare};
pub use root::copy_root;
