//! The copy of an archive's headers behind the table, in the form of tar-split: JSON documents one after another, each with
//! bytes of the archive, or for the content of a file.

use crate::error::{Result, input};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use std::borrow::Cow;

/// A document of the copy.
#[derive(Deserialize)]
struct Document<'a> {
    #[serde(rename = "type")]
    kind: u32,
    #[serde(default)]
    size: u64,
    #[serde(borrow, default)]
    payload: Option<Cow<'a, str>>,
}

const CONTENT: u32 = 1;
const BYTES: u32 = 2;

/// The next bytes of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ArchivePart {
    /// These: headers and padding.
    Bytes(Vec<u8>),
    /// The next of the table's contents.
    Content,
}

/// Reads the copy that is unpacked to `text`. `sizes` are those of the table's contents, which the copy must have too.
///
/// # Errors
/// Another format; other contents.
pub(super) fn parse(text: &[u8], mut sizes: impl Iterator<Item = u64>) -> Result<Vec<ArchivePart>> {
    let mut archive_parts = Vec::new();
    for document in serde_json::Deserializer::from_slice(text).into_iter::<Document>() {
        let document = document.map_err(|error| input!("copy of the headers: {error}"))?;
        match document.kind {
            // Every file has one, also if it is empty, a link or a directory.
            CONTENT if document.size == 0 => {}
            CONTENT if sizes.next() == Some(document.size) => archive_parts.push(ArchivePart::Content),
            BYTES => {
                let payload = document.payload.unwrap_or_default();
                let bytes = STANDARD.decode(&*payload).map_err(|error| input!("copy of the headers: {error}"))?;
                match archive_parts.last_mut() {
                    Some(ArchivePart::Bytes(before)) => before.extend(bytes),
                    _ => archive_parts.push(ArchivePart::Bytes(bytes)),
                }
            }
            _ => return Err(input!("copy of the headers: it has other contents than the table")),
        }
    }
    if sizes.next().is_some() {
        return Err(input!("copy of the headers: it has fewer contents than the table"));
    }
    Ok(archive_parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_contents_of_the_table_and_no_others() {
        let parse = |text: &str, sizes: &[u64]| parse(text.as_bytes(), sizes.iter().copied());
        let text = r#"{"type":2,"payload":"aGVhZA==","position":0}
            {"type":1,"name":"dir","payload":null,"position":1}
            {"type":2,"payload":"ZXI=","position":2}
            {"type":1,"name":"a","size":5,"payload":"AAAAAAAAAAA=","position":3}
            {"type":1,"name_raw":"/w==","size":7,"payload":"AAAAAAAAAAA=","position":4}
            {"type":2,"payload":"ZW5k","position":5}"#;
        let bytes = |text: &[u8]| ArchivePart::Bytes(text.to_vec());
        let expected = [bytes(b"header"), ArchivePart::Content, ArchivePart::Content, bytes(b"end")];
        assert_eq!(parse(text, &[5, 7]).unwrap(), expected);
        for (sizes, text) in [
            (&[5][..], text.to_string()),
            (&[7, 5], text.into()),
            (&[5, 7, 1], text.into()),
            (&[5, 7], text.replace("\"type\":2", "\"type\":3")),
            (&[5, 7], text.replace("ZXI=", "Z?")),
            (&[5, 7], text[..text.len() - 3].into()),
        ] {
            assert!(parse(&text, sizes).is_err(), "{text}");
        }
    }
}
