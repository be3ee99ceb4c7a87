//! What tells domains apart.

/// A user id and the name that this user gave to the domain: users never share one.
pub(crate) type DomainKey = (u32, String);
