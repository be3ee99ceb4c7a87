//! The contents: their references and their bytes.

use super::{Tier, Unreadable, Worker};
use crate::arena::{NoSlot, ReserveClass};
use crate::codec::{Codec, Coder, Dictionary, PATCH_HEAD};
use crate::layout::{HEADER_WORDS, Meta, PATCHES_SHIFT, REFS_MASK, Shown, TICK_SHIFT};
use crate::stats::count;
use pagefold_os::{PAGE_SIZE, Page};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

impl Tier {
    /// Writes a content with one reference.
    pub(crate) fn write_content(
        &self,
        fingerprint: u64,
        meta: Meta,
        payload: &[u8],
        reserve_class: ReserveClass,
    ) -> Result<usize, NoSlot> {
        let at = self.arena.new_content(payload.len(), reserve_class)?;
        // Pairs with the fence in `attempt`: a reader that sees any of the words below also sees the raised version of
        // the page that had the slot's earlier content.
        fence(Ordering::Release);
        let words = &self.arena.words()[at..at + HEADER_WORDS + payload.len().div_ceil(8)];
        words[0].store(fingerprint, Ordering::Relaxed);
        words[1].store(meta.word(), Ordering::Relaxed);
        let tick = self.tick.load(Ordering::Relaxed) as u16;
        words[2].store(1 | u64::from(tick) << TICK_SHIFT, Ordering::Relaxed);
        for (word, chunk) in words[HEADER_WORDS..].iter().zip(payload.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
        self.count_content(meta, 1);
        Ok(at)
    }

    pub(crate) fn count_content(&self, meta: Meta, change: i64) {
        let counters = &self.counters;
        let by_kind = match meta.is_on_disk() {
            true => Some(&counters.contents_on_disk),
            false => Codec::from_number(meta.codec_number()).and_then(|codec| counters.contents_of(codec)),
        };
        for counter in [Some(&counters.contents), by_kind].into_iter().flatten() {
            counter.fetch_add(change as u64, Ordering::Relaxed);
        }
        counters.payload_bytes.fetch_add((change * meta.resident_len() as i64) as u64, Ordering::Relaxed);
    }

    pub(crate) fn meta(&self, at: usize) -> Meta {
        Meta::from_word(self.arena.word(at + 1).load(Ordering::Relaxed))
    }

    /// First word of the payload: the base of a patch, or the offset in the file of a written-back content.
    pub(crate) fn payload_word(&self, at: usize) -> u64 {
        self.arena.word(at + HEADER_WORDS).load(Ordering::Relaxed)
    }

    /// Adds a reference; the caller holds one.
    pub(crate) fn add_ref(&self, at: usize) {
        self.arena.word(at + 2).fetch_add(1, Ordering::Relaxed);
    }

    /// Takes a reference to a content that may have been freed; false if it has.
    pub(super) fn try_ref(&self, at: usize) -> bool {
        if !self.arena.is_slot(at as u64, 0) {
            return false;
        }
        let fingerprint = self.arena.word(at).load(Ordering::Relaxed);
        let shard = self.contents.shard(fingerprint, self.arena.words());
        let alive = shard.holds(at);
        if alive {
            self.add_ref(at);
        }
        alive
    }

    /// Drops a reference; the last one frees the content.
    pub(crate) fn release(&self, at: usize) {
        let mut at = at;
        loop {
            let words = self.arena.words();
            let mut shard = self.contents.shard(words[at].load(Ordering::Relaxed), words);
            if words[at + 2].fetch_sub(1, Ordering::AcqRel) & REFS_MASK != 1 {
                return;
            }
            shard.remove(at);
            drop(shard);
            let meta = self.meta(at);
            let base = (meta.codec == Codec::Patch as u8).then(|| self.payload_word(at) as usize);
            if let Some(disk) = self.disk.as_ref().filter(|_| meta.is_on_disk()) {
                disk.remove_live(self.payload_word(at), meta.len as usize);
            }
            self.count_content(meta, -1);
            self.arena.free_content(at);
            match base {
                // A patch held a reference to its base.
                Some(base) => {
                    words[base + 2].fetch_sub(1 << PATCHES_SHIFT, Ordering::Relaxed);
                    at = base;
                }
                None => return,
            }
        }
    }

    /// Adds a reference to the content of a page word. The caller keeps that content from being freed.
    pub(crate) fn share_word(&self, word: u64) {
        match Shown::from_word(word) {
            Shown::Content(at) => self.add_ref(at as usize),
            Shown::Fill(_) => count(&self.counters.pages_filled),
            Shown::Nothing | Shown::Lost => {}
        }
    }

    /// Drops the reference of a page word that was replaced or cleared.
    pub(crate) fn release_word(&self, word: u64) {
        match Shown::from_word(word) {
            Shown::Content(at) => self.release(at as usize),
            Shown::Fill(_) => {
                self.counters.pages_filled.fetch_sub(1, Ordering::Relaxed);
            }
            Shown::Nothing | Shown::Lost => {}
        }
    }

    /// The dictionary for new contents: its number, 0 for none, and its digested form.
    pub(crate) fn current_dictionary(&self) -> (u8, Option<&Dictionary>) {
        let number = self.dictionary.load(Ordering::Acquire);
        (number, self.dictionary_of(number))
    }

    pub(crate) fn dictionary_of(&self, number: u8) -> Option<&Dictionary> {
        self.dictionaries.get(usize::from(number).checked_sub(1)?)?.get().map(Arc::as_ref)
    }

    /// Copies a payload out of a slot that may be freed and reused meanwhile; `None` if the slot cannot hold one.
    pub(super) fn copy_out<'a>(&self, at: usize, buffer: &'a mut [u8; PAGE_SIZE + 8]) -> Option<(u64, Meta, &'a [u8])> {
        let words = self.arena.words();
        let header = words.get(at..at + HEADER_WORDS)?;
        let fingerprint = header[0].load(Ordering::Relaxed);
        let meta = Meta::from_word(header[1].load(Ordering::Relaxed));
        let len = meta.resident_len();
        let payload = words.get(at + HEADER_WORDS..at + HEADER_WORDS + len.div_ceil(8))?;
        for (chunk, word) in buffer.get_mut(..payload.len() * 8)?.chunks_exact_mut(8).zip(payload) {
            chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        Some((fingerprint, meta, &buffer[..len]))
    }

    /// Reads a content into `page` and verifies it. The caller holds a reference to it.
    pub(crate) fn read_content(&self, at: usize, worker: &mut Worker, page: &mut Page) -> Result<(), Unreadable> {
        let Worker { coder, payload, base_payload, base, ahead, .. } = worker;
        let (fingerprint, meta, bytes) = self.copy_out(at, payload).ok_or(Unreadable::Damaged("length"))?;
        let codec = Codec::from_number(meta.codec_number()).ok_or(Unreadable::Damaged("codec"))?;
        let mut bytes = bytes;
        if meta.is_on_disk() {
            let disk = self.disk.as_ref().ok_or(Unreadable::Damaged("no backing file"))?;
            let offset = u64::from_le_bytes(bytes.try_into().unwrap_or([0; 8]));
            let from_disk = base_payload.get_mut(..meta.len as usize).ok_or(Unreadable::Damaged("length"))?;
            disk.read(offset, from_disk, ahead).map_err(Unreadable::Io)?;
            count(&self.counters.loads_from_disk);
            bytes = from_disk;
            if codec == Codec::Patch {
                return Err(Unreadable::Damaged("a patch in the file"));
            }
            return self.decode_verified(coder, bytes, meta, None, fingerprint, page).map_err(Unreadable::Damaged);
        }
        let base = match codec {
            Codec::Patch => Some(self.read_base(bytes, coder, base_payload, base).map_err(Unreadable::Damaged)?),
            _ => None,
        };
        self.decode_verified(coder, bytes, meta, base, fingerprint, page).map_err(Unreadable::Damaged)
    }

    /// Reads the base of a patch. It is not verified itself: a wrong base gives a wrong fingerprint of the patched page.
    pub(super) fn read_base<'a>(
        &self,
        patch: &[u8],
        coder: &mut Coder,
        buffer: &mut [u8; PAGE_SIZE + 8],
        base: &'a mut Page,
    ) -> Result<&'a Page, &'static str> {
        let at = patch.get(..PATCH_HEAD).and_then(|head| head.try_into().ok()).map(u64::from_le_bytes);
        let at = usize::try_from(at.ok_or("length")?).map_err(|_| "base of the patch")?;
        let (_, meta, bytes) = self.copy_out(at, buffer).ok_or("base of the patch")?;
        let codec = Codec::from_number(meta.codec).filter(|codec| *codec != Codec::Patch).ok_or("base of the patch")?;
        coder.decode(codec, bytes, self.dictionary_of(meta.dictionary), None, base)?;
        Ok(base)
    }

    /// Decodes a payload into `page` and compares the page's fingerprint.
    pub(super) fn decode_verified(
        &self,
        coder: &mut Coder,
        payload: &[u8],
        meta: Meta,
        base: Option<&Page>,
        fingerprint: u64,
        page: &mut Page,
    ) -> Result<(), &'static str> {
        let codec = Codec::from_number(meta.codec_number()).ok_or("codec")?;
        let dictionary = self.dictionary_of(meta.dictionary);
        if meta.dictionary != 0 && dictionary.is_none() {
            return Err("dictionary");
        }
        coder.decode(codec, payload, dictionary, base, page)?;
        if self.hasher.fingerprint(page) == fingerprint { Ok(()) } else { Err("checksum") }
    }
}
