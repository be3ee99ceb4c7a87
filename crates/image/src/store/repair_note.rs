//! The note of objects that link farms lack, or hold another file of: what the next repair has to look at.
//!
//! A process writes the note before the object or the link farm is changed: it may be killed at any moment, and the next
//! build must know that a repair is due. While a repair is running, the objects it works on are noted in a second file;
//! what is noted meanwhile is for the next repair.

use super::Store;
use crate::digest::Digest;
use crate::error::{At, Result};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// The digests of a note. Half a digest at the end, of a process that was killed, is left out.
fn digests(note: &[u8]) -> Vec<Digest> {
    note.as_chunks().0.iter().map(|raw| Digest(*raw)).collect()
}

impl Store {
    /// The note. It belongs to no image, so the collector leaves it.
    pub(crate) fn repair_note(&self) -> PathBuf {
        self.path("trees").join("shelves-incomplete")
    }

    fn running_repair_note(&self) -> PathBuf {
        self.path("trees").join("shelves-mending")
    }

    /// Notes objects that link farms lack, or are about to hold another file of.
    pub(crate) fn note_for_repair(&self, objects: &[Digest]) -> Result<()> {
        let path = self.repair_note();
        let mut file = File::options().append(true).create(true).mode(0o600).open(&path).at(&path)?;
        let bytes: Vec<u8> = objects.iter().flat_map(|object| object.0).collect();
        file.write_all(&bytes).at(&path)
    }

    /// Returns true if some link farm may lack an object that the store has, or hold another file of it.
    pub(crate) fn is_repair_due(&self) -> bool {
        if self.running_repair_note().exists() {
            return true;
        }
        let note = match fs::read(self.repair_note()) {
            Err(error) => return error.kind() != ErrorKind::NotFound,
            Ok(note) => note,
        };
        // Half a digest may be that of any object.
        let is_cut = note.is_empty() || !note.len().is_multiple_of(size_of::<Digest>());
        is_cut || digests(&note).iter().any(|object| self.object_path(object).exists())
    }

    /// Starts a repair, under the exclusive lock of the link farms: takes over the note, and that of a repair that did
    /// not end. Returns the noted objects.
    pub(crate) fn begin_repair(&self) -> Result<Vec<Digest>> {
        let (note, running) = (self.repair_note(), self.running_repair_note());
        if let Ok(left) = fs::read(&running) {
            self.note_for_repair(&digests(&left))?;
        }
        match fs::rename(&note, &running) {
            Err(error) if error.kind() == ErrorKind::NotFound => File::create(&running).map(drop).at(&running)?,
            other => other.at(&note)?,
        }
        Ok(digests(&fs::read(&running).at(&running)?))
    }

    /// Ends a repair, after the objects that are still missing were noted again.
    pub(crate) fn end_repair(&self) -> Result<()> {
        let running = self.running_repair_note();
        fs::remove_file(&running).at(&running)
    }
}
