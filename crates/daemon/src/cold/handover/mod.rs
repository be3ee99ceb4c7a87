//! What a daemon leaves to the next one.

pub(crate) mod adopt;
pub(crate) mod keeper;
pub(crate) mod pending_children;
