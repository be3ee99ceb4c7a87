//! One packed layer from a registry, through broken connections.

use crate::error::{Error, Result};
use crate::registry::{Registry, TRIES, is_end, pause};
use futures_util::StreamExt;
use pagefold_image::digest::Digest;
use pagefold_image::progress::Progress;
use pagefold_image::store::Download;

/// A try that has brought so many bytes counts as the first one.
const GAIN: u64 = 1 << 20;

/// The tries of one transfer that have failed.
#[derive(Default)]
pub struct FailedTries(u32);

impl FailedTries {
    /// Counts a try that has brought `gained` bytes and failed as `text` says, and waits for the next one.
    ///
    /// # Errors
    /// That failure, if it was the last try.
    pub async fn count(&mut self, gained: u64, text: String) -> Result<()> {
        self.0 = if gained >= GAIN { 1 } else { self.0 + 1 };
        if self.0 == TRIES {
            return Err(Error::Passing(text));
        }
        tokio::time::sleep(pause(self.0 - 1)).await;
        Ok(())
    }
}

/// Brings the `size` bytes of `digest` into `download`, from where an earlier pull has ended. Returns how many bytes came.
///
/// # Errors
/// A layer with another digest or size, of which nothing is kept; no connection; a full store.
pub async fn fetch(
    registry: &Registry,
    (digest, size): (Digest, u64),
    download: &mut Download,
    progress: &Progress,
) -> Result<u64> {
    if download.bytes() > size {
        download.restart()?;
    }
    progress.add(download.bytes(), false);
    let (mut from_before, mut moved) = (download.bytes(), 0);
    loop {
        moved += complete(registry, (digest, size), download, progress).await.map_err(|error| registry.name(error))?;
        match download.check(&format!("layer {digest}"), digest) {
            Ok(()) => return Ok(moved),
            Err(error) => {
                download.restart()?;
                // The bytes of an earlier pull may have been lost with the machine's power.
                if std::mem::take(&mut from_before) == 0 {
                    return Err(error.into());
                }
            }
        }
    }
}

/// Appends what is missing of the blob. Returns how many bytes came.
async fn complete(
    registry: &Registry,
    (digest, size): (Digest, u64),
    download: &mut Download,
    progress: &Progress,
) -> Result<u64> {
    let (mut moved, mut failed) = (0, FailedTries::default());
    while download.bytes() < size {
        let before = moved;
        match append(registry, (digest, size), download, &mut moved, progress).await {
            Ok(()) => break,
            Err(Error::Passing(text)) => failed.count(moved - before, text).await?,
            Err(error) => return Err(error),
        }
    }
    Ok(moved)
}

/// Appends what one request gives. Counts the bytes in `moved`, also those of a request that fails.
async fn append(
    registry: &Registry,
    (digest, size): (Digest, u64),
    download: &mut Download,
    moved: &mut u64,
    progress: &Progress,
) -> Result<()> {
    let (mut stream, begin) = registry.blob(digest, download.bytes()).await?;
    if begin < download.bytes() {
        // The registry does not know how to send a part.
        download.restart()?;
    }
    while let Some(piece) = stream.next().await {
        let piece = match piece {
            Ok(piece) => piece,
            // The length and the digest are checked below, with messages of their own.
            Err(error) if is_end(&error) => break,
            Err(error) => return Err(error.into()),
        };
        *moved += piece.len() as u64;
        if download.bytes() + piece.len() as u64 > size {
            download.restart()?;
            let text = format!("layer {digest}: more than the {size} bytes that the manifest says");
            // The answer to a request for a part may have been the whole.
            return Err(if begin > 0 { Error::Passing(text) } else { Error::Said(text) });
        }
        download.append(&piece)?;
        progress.add(piece.len() as u64, false);
    }
    if download.bytes() < size {
        let bytes = download.bytes();
        return Err(Error::Passing(format!("layer {digest}: ended after {bytes} of {size} bytes")));
    }
    Ok(())
}
