//! Leases: a push tells collections on all hosts that it is in progress.
//!
//! A lease is a file of the store. The push writes it before it looks which packs there are, again each minute, and removes
//! it at its end. A push that failed or died leaves a lease that nothing writes again; collections take it for dead after
//! ten minutes. Both times are of the store's clock, so hosts need not agree on the time.

use super::bucket::{Bucket, Listed};
use crate::common::random;
use crate::error::{Error, Result};
use bytes::Bytes;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

/// Time after which a lease that is not written again is dead.
pub const LIFE: Duration = Duration::from_secs(600);

/// Time between two writes of a lease.
const RENEWAL: Duration = Duration::from_secs(60);

/// Where leases are.
const PLACE: &str = "leases";

/// A new name below `place`.
///
/// # Errors
/// The system's.
pub fn unique(place: &str) -> Result<String> {
    Ok(format!("{place}/{:032x}", u128::from_le_bytes(random()?)))
}

/// The leases that are alive at the time `now` of the store's clock, and the dead ones.
///
/// # Errors
/// No connection.
pub async fn list(bucket: &Bucket, now: SystemTime) -> Result<(Vec<Listed>, Vec<Listed>)> {
    let is_alive = |lease: &Listed| lease.age(now) < LIFE;
    Ok(bucket.list(PLACE).await?.into_iter().partition(is_alive))
}

/// The lease of a push in progress.
pub struct Lease<'a> {
    runtime: &'a Runtime,
    bucket: Arc<Bucket>,
    path: String,
    renewal: JoinHandle<()>,
}

impl<'a> Lease<'a> {
    /// Writes a lease, and writes it again as long as the value lives.
    ///
    /// # Errors
    /// No connection; a login that may not write.
    pub fn take(runtime: &'a Runtime, bucket: Arc<Bucket>) -> Result<Self> {
        let path = unique(PLACE)?;
        runtime.block_on(bucket.put(&path, Bytes::new()))?;
        let (renewed, at) = (bucket.clone(), path.clone());
        let renewal = runtime.spawn(async move {
            loop {
                tokio::time::sleep(RENEWAL).await;
                // A collection that took the push for dead has removed it, and must see that it stays so.
                if let Ok(true) = is_there(&renewed, &at).await {
                    let _ = renewed.put(&at, Bytes::new()).await;
                }
            }
        });
        Ok(Self { runtime, bucket, path, renewal })
    }

    /// Removes the lease: the push has ended. A push that fails leaves its lease to die, because a server may still do what
    /// a lost request has asked for.
    pub fn end(self) {
        self.renewal.abort();
        let _ = self.runtime.block_on(self.bucket.remove(&self.path));
    }

    /// Fails if a collection has taken this push for dead: packs that it relies on may be gone.
    ///
    /// # Errors
    /// The lease is gone; no connection.
    pub fn check(&self) -> Result<()> {
        if self.runtime.block_on(is_there(&self.bucket, &self.path))? {
            return Ok(());
        }
        Err(Error::Said("a collection took this push for dead, because it was stopped for long; push again".into()))
    }
}

async fn is_there(bucket: &Bucket, path: &str) -> Result<bool> {
    Ok(bucket.get(path, 0).await?.is_some())
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.renewal.abort();
    }
}
