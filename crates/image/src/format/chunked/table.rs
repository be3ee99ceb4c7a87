//! The table of contents: which frames of a packed layer hold which content.

use super::headers::{self, ArchivePart};
use crate::digest::Digest;
use crate::error::{Result, input};
use serde::Deserialize;
use std::ops::Range;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    version: u64,
    entries: Vec<Entry>,
    /// The digest of the packed copy of the headers.
    tar_split_digest: Option<String>,
}

/// An entry of the table. Its name and metadata are not read: the archive's headers have them.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    digest: String,
    #[serde(default)]
    offset: u64,
    #[serde(default)]
    end_offset: u64,
}

/// The content of a file in a packed layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// The digest of the file.
    pub digest: Digest,
    /// Bytes of the file.
    pub size: u64,
    /// The frames that unpack to it.
    pub packed: Range<u64>,
}

/// What a layer's table says, as far as it can be used.
#[derive(Clone, Debug)]
pub struct TableOfContents {
    /// The contents in the order of the layer. They do not overlap.
    pub(super) contents: Vec<Content>,
    /// Where the archive's frames end.
    pub(super) archive_end: u64,
    headers_digest: Option<Digest>,
    /// The archive without its contents, if there is a copy of its headers.
    pub(super) archive_parts: Option<Vec<ArchivePart>>,
}

impl TableOfContents {
    /// Reads the table of a layer with frames that end at `archive_end`.
    ///
    /// # Errors
    /// Another format; contents that overlap, or are outside of the layer.
    pub fn parse(document: &[u8], archive_end: u64) -> Result<Self> {
        let document: Document =
            serde_json::from_slice(document).map_err(|error| input!("table of contents: {error}"))?;
        if document.version != 1 {
            return Err(input!("table of contents: version {}, only 1 is known", document.version));
        }
        let mut contents = Vec::new();
        // Other programs write tables in which only the beginnings stand; their frames hold more than the content.
        for entry in document.entries.iter().filter(|entry| entry.kind == "reg" && entry.end_offset > 0) {
            if entry.size == 0 {
                continue;
            }
            let packed = entry.offset..entry.end_offset;
            if packed.is_empty() || packed.end > archive_end {
                return Err(input!("table of contents: content at {packed:?} of {archive_end} bytes"));
            }
            contents.push(Content { digest: Digest::parse(&entry.digest)?, size: entry.size, packed });
        }
        contents.sort_unstable_by_key(|content| content.packed.start);
        let overlap = contents.windows(2).find(|pair: &&[Content]| pair[0].packed.end > pair[1].packed.start);
        if let Some([one, next]) = overlap {
            return Err(input!("table of contents: contents at {:?} and {:?} overlap", one.packed, next.packed));
        }
        let headers_digest = document.tar_split_digest.map(|digest| Digest::parse(&digest)).transpose()?;
        Ok(Self { contents, archive_end, headers_digest, archive_parts: None })
    }

    /// The contents, in the order of the layer.
    pub fn contents(&self) -> &[Content] {
        &self.contents
    }

    /// The digest of the packed copy of the headers.
    pub(super) fn headers_digest(&self) -> Option<Digest> {
        self.headers_digest
    }

    /// Takes over the unpacked copy of the headers.
    ///
    /// # Errors
    /// Another format; other contents than the table has.
    pub fn add_headers(&mut self, text: &[u8]) -> Result<()> {
        self.archive_parts = Some(headers::parse(text, self.contents.iter().map(|content| content.size))?);
        Ok(())
    }
}
