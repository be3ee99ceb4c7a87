//! containerd's snapshot interface, as generated from its protocol files (`proto/README.md`).

#![allow(missing_docs, clippy::all, rustdoc::all)]

/// Types that several of its services share.
pub mod types {
    include!(concat!(env!("CARGO_MANIFEST_DIR"), "/generated/containerd.types.rs"));
}

/// Its services. The nesting is what the generated code expects.
pub mod services {
    pub mod snapshots {
        pub mod v1 {
            include!(concat!(env!("CARGO_MANIFEST_DIR"), "/generated/containerd.services.snapshots.v1.rs"));
        }
    }
}

pub use services::snapshots::v1::*;
pub use types::Mount;
