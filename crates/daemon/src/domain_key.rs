//! What tells domains apart, and how long one lives without clients.

use std::time::Duration;

/// A user id and the name that this user gave to the domain: users never share one.
pub(crate) type DomainKey = (u32, String);

/// How long a domain without clients is kept: its index of page contents serves the clients that come next.
pub(crate) const DOMAIN_IDLE: Duration = Duration::from_secs(60);

/// The name of the domain of clients that name none.
pub(crate) const UNNAMED_DOMAIN: &str = "default";
