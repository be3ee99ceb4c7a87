//! The limits that stop hostile input before the machine's own limits do.

/// What one import may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most entries, of all layers together, counting directories that only paths name; 10^7 by default.
    pub entries: u64,
    /// Most bytes of names, link targets and extended attributes, which stay in memory, of all layers together; 1 GiB by
    /// default.
    pub names_bytes: u64,
    /// Most bytes of unpacked content, of all layers together; 1 TiB by default.
    pub bytes: u64,
    /// Most a compressed stream may grow, once it is past `ratio_from_bytes`: 200 times by default.
    pub ratio: u64,
    /// Unpacked bytes before the ratio counts: 64 MiB by default.
    pub ratio_from_bytes: u64,
    /// Most bytes of one entry's extended headers: 1 MiB by default.
    pub header_bytes: u64,
    /// Most bytes of a JSON document: 4 MiB by default (the registries' own limit).
    pub json_bytes: u64,
    /// Most layers: 500 by default, what overlayfs takes.
    pub layers: usize,
}

impl Limits {
    /// What is left for the layers above one that has used `used`.
    pub(crate) fn without(self, used: Used) -> Self {
        Self {
            entries: self.entries - used.entries,
            names_bytes: self.names_bytes - used.names_bytes,
            bytes: self.bytes - used.bytes,
            ..self
        }
    }
}

/// What an archive has used of the [`Limits`] for all layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Entries, counting directories that only paths name.
    pub entries: u64,
    /// Bytes of names, link targets and extended attributes.
    pub names_bytes: u64,
    /// Bytes of content.
    pub bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            entries: 10_000_000,
            names_bytes: 1 << 30,
            bytes: 1 << 40,
            ratio: 200,
            ratio_from_bytes: 64 << 20,
            header_bytes: 1 << 20,
            json_bytes: 4 << 20,
            layers: 500,
        }
    }
}
