//! What a daemon leaves to the next one: with the keeper, and with the service manager.

pub(crate) mod adopt;
pub(crate) mod deposit;
pub(crate) mod keeper;
pub(crate) mod pending_children;
pub(crate) mod records;
pub(crate) mod shutdown;
