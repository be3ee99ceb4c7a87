//! The images that a fleet's store names: listed, and taken away.

use super::bucket::{Access, Bucket, Listed};
use crate::address::{Address, StoreAddress};
use crate::common::{Server, say};
use crate::error::{Error, Result};
use serde_json::json;
use std::collections::HashSet;
use std::time::SystemTime;

/// Where manifests are.
const PLACE: &str = "images/";

/// Lists the images of a store.
///
/// # Errors
/// No connection; a server that lists nothing.
pub async fn list(server: &Server, store_address: &StoreAddress) -> Result<()> {
    let bucket = Bucket::open(store_address, Access::Read, server.plain_http, server.timeout)?;
    let mut images: Vec<(Address, Listed)> = Vec::new();
    for file in bucket.list(PLACE).await? {
        // Other files are no images: those that a host was writing when it died, and what others have put there.
        let named = file.path.strip_prefix(PLACE).and_then(|path| path.split_once('/'));
        let address = named.and_then(|(name, tag)| format!("{store_address}/{name}:{tag}").parse().ok());
        images.extend(address.map(|address| (address, file)));
    }
    images.sort_by(|(a, _), (b, _)| (&a.name, &a.tag).cmp(&(&b.name, &b.tag)));
    if !server.json {
        return images.iter().try_for_each(|(address, _)| say(&address.whole()));
    }
    let shown = images.iter().map(|(address, file)| {
        let written = file.written.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        json!({ "name": address.name, "tag": address.tag, "reference": address.whole(), "written_s": written })
    });
    say(&format!("{:#}", json!(shown.collect::<Vec<_>>())))
}

/// Takes the images `names`, each NAME or NAME:TAG, away from a store. What only they need goes with the next collection.
///
/// # Errors
/// A name that is none, or that the store does not have: then nothing is taken away. No connection; a login that may not
/// remove.
pub async fn take_away(server: &Server, store_address: &StoreAddress, names: &[String]) -> Result<()> {
    let parse = |name: &String| -> Result<Address> {
        let address = if name.contains('/') {
            Err("a NAME or NAME:TAG is wanted".into())
        } else {
            format!("{store_address}/{name}").parse()
        };
        address.map_err(|error: String| Error::Said(format!("{name}: {error}")))
    };
    let addresses: Vec<Address> = names.iter().map(parse).collect::<Result<_>>()?;
    let bucket = Bucket::open(store_address, Access::Write, server.plain_http, server.timeout)?;
    let there: HashSet<String> = bucket.list(PLACE).await?.into_iter().map(|file| file.path).collect();
    if let Some(missing) = addresses.iter().find(|address| !there.contains(&address.manifest())) {
        let whole = missing.whole();
        return Err(Error::Said(format!(
            "{whole}: the store has no such image (see image ls --remote {store_address})"
        )));
    }
    for address in &addresses {
        bucket.remove(&address.manifest()).await?;
    }
    let removed: Vec<String> = addresses.iter().map(|address| format!("{}:{}", address.name, address.tag)).collect();
    if server.json { say(&format!("{:#}", json!({ "removed": removed }))) } else { Ok(()) }
}
