//! Layers as zstd:chunked has them, written here: the tests bend them.

use super::{Packed, digest};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The annotations' names.
pub const POSITION: &str = "io.github.containers.zstd-chunked.manifest-position";
pub const CHECKSUM: &str = "io.github.containers.zstd-chunked.manifest-checksum";
pub const HEADERS: &str = "io.github.containers.zstd-chunked.tarsplit-position";

/// A content of so many bytes is cut into chunks.
const CHUNK: usize = 100_000;

pub fn frame(bytes: &[u8]) -> Vec<u8> {
    let mut packed = vec![0; zstd_safe::compress_bound(bytes.len())];
    let length = zstd_safe::compress(&mut packed[..], bytes, 3).unwrap();
    packed.truncate(length);
    packed
}

/// The copy of a layer's headers.
pub fn headers(layer: &[u8]) -> Vec<u8> {
    let (mut documents, mut at) = (Vec::new(), 0);
    let bytes = |bytes: &[u8]| json!({ "type": 2, "payload": STANDARD.encode(bytes) }).to_string();
    let mut archive = tar::Archive::new(layer);
    for file in archive.entries().unwrap() {
        let file = file.unwrap();
        let begin = file.raw_file_position() as usize;
        documents.push(bytes(&layer[at..begin]));
        at = begin + file.size() as usize;
        let name = String::from_utf8_lossy(&file.path_bytes()).into_owned();
        documents.push(json!({ "type": 1, "name": name, "size": file.size(), "payload": null }).to_string());
    }
    documents.push(bytes(&layer[at..]));
    documents.join("\n").into_bytes()
}

/// The frames of a layer, and what its table says.
fn frames(layer: &[u8]) -> (Vec<u8>, Value) {
    let (mut blob, mut entries, mut at) = (Vec::new(), Vec::new(), 0);
    let mut archive = tar::Archive::new(layer);
    for file in archive.entries().unwrap() {
        let file = file.unwrap();
        let name = String::from_utf8_lossy(&file.path_bytes()).into_owned();
        let size = file.size() as usize;
        if !file.header().entry_type().is_file() || size == 0 {
            let kind = if file.header().entry_type().is_file() { "reg" } else { "dir" };
            entries.push(json!({ "type": kind, "name": name }));
            continue;
        }
        let begin = file.raw_file_position() as usize;
        blob.extend(frame(&layer[at..begin]));
        let content = &layer[begin..begin + size];
        let offset = blob.len();
        let mut chunks = Vec::new();
        for (number, chunk) in content.chunks(CHUNK).enumerate() {
            let (place, digest) = (number * CHUNK, digest(chunk));
            chunks.push(json!({ "type": "chunk", "name": name, "offset": blob.len(), "chunkSize": chunk.len(),
                "chunkOffset": place, "chunkDigest": digest }));
            blob.extend(frame(chunk));
        }
        entries.push(json!({ "type": "reg", "name": name, "size": size, "digest": digest(content), "mode": 420,
            "modtime": "1970-01-01T00:00:00Z", "offset": offset, "endOffset": blob.len() }));
        entries.extend(chunks.into_iter().skip(1));
        at = begin + size;
    }
    blob.extend(frame(&layer[at..]));
    (blob, json!({ "version": 1, "entries": entries }))
}

/// Bytes that readers of zstd skip.
fn skipped(bytes: &[u8]) -> Vec<u8> {
    [&[0x50, 0x2a, 0x4d, 0x18][..], &(bytes.len() as u32).to_le_bytes(), bytes].concat()
}

/// The layer with its table.
pub fn chunked(layer: &[u8]) -> Packed {
    bent(layer, |_| ())
}

/// The layer with a table that `bend` has changed.
pub fn bent(layer: &[u8], bend: impl FnOnce(&mut Value)) -> Packed {
    let (_, mut table) = frames(layer);
    bend(&mut table);
    with_table(layer, &serde_json::to_vec(&table).unwrap(), &[])
}

/// The layer with a table and a copy of the headers, both changed by `bend`.
pub fn with_headers(layer: &[u8], bend: impl FnOnce(&mut Value, &mut Vec<u8>)) -> Packed {
    let (_, mut table) = frames(layer);
    let mut headers = headers(layer);
    table["tarSplitDigest"] = digest(&frame(&headers)).into();
    bend(&mut table, &mut headers);
    with_table(layer, &serde_json::to_vec(&table).unwrap(), &headers)
}

/// The layer with `table` as its table, and with a copy of the headers if there is one.
pub fn with_table(layer: &[u8], table: &[u8], headers: &[u8]) -> Packed {
    let (mut blob, _) = frames(layer);
    let packed = frame(table);
    let position = format!("{}:{}:{}:1", blob.len() + 8, packed.len(), table.len());
    let mut annotations = BTreeMap::from([(POSITION.into(), position), (CHECKSUM.into(), digest(&packed))]);
    blob.extend(skipped(&packed));
    if !headers.is_empty() {
        let packed = frame(headers);
        annotations.insert(HEADERS.into(), format!("{}:{}:{}", blob.len() + 8, packed.len(), headers.len()));
        blob.extend(skipped(&packed));
    }
    blob.extend(skipped(&[0; 64]));
    Packed { blob, annotations, diff_id: digest(layer), media_type: "application/vnd.oci.image.layer.v1.tar+zstd" }
}
