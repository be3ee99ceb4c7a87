//! Memory that the program takes without an interposed call: blocks that the C library's allocator maps by internal calls,
//! and the heap. Under `--manage all` both are managed once they are listed, so the agent must notice that there is more to
//! list.

use pagefold_os::PAGE_SIZE;
use pagefold_os::fd::Fd;

/// How much must come before it is listed, in bytes: a list reads all mappings.
const GROWTH_MIN: u64 = 1 << 20;

/// How much private writable memory the process has, against what it had when its mappings were listed.
#[derive(Debug)]
pub(crate) struct RssWatch {
    /// Kept open, for the program may move to where no /proc is. Nothing is seen where none was at the start.
    statm: Option<Fd>,
    /// Pages when the mappings were listed, or fewer since.
    listed: u64,
}

impl RssWatch {
    /// Begins with what there is now.
    pub(crate) fn begin() -> RssWatch {
        let mut watch =
            RssWatch { statm: Fd::open(c"/proc/thread-self/statm", libc::O_RDONLY, 0).ok(), listed: u64::MAX };
        watch.note_listed();
        watch
    }

    /// What there is now is about to be listed.
    pub(crate) fn note_listed(&mut self) {
        if let Some(pages) = self.pages() {
            self.listed = pages;
        }
    }

    /// True, once, if so much came that it is to be listed.
    pub(crate) fn has_grown(&mut self) -> bool {
        self.pages().is_some_and(|pages| self.has_grown_to(pages))
    }

    fn has_grown_to(&mut self, pages: u64) -> bool {
        let grown = pages.saturating_sub(self.listed) >= GROWTH_MIN / PAGE_SIZE as u64;
        // What goes makes room for what comes.
        if grown || pages < self.listed {
            self.listed = pages;
        }
        grown
    }

    /// The sixth number: private writable memory. Mapped files and reservations come and go without concerning us.
    fn pages(&self) -> Option<u64> {
        let mut text = [0u8; 128];
        let got = self.statm.as_ref()?.read_at(&mut text, 0).ok()?;
        let pages = str::from_utf8(text.get(..got)?).ok()?.split_ascii_whitespace().nth(5)?.parse().ok()?;
        // Without memory: the process is about to end.
        (pages > 0).then_some(pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_news_once() {
        let mut watch = RssWatch { statm: None, listed: 1000 };
        assert!(!watch.has_grown(), "nothing is seen without /proc");
        assert!(!watch.has_grown_to(1000) && !watch.has_grown_to(1255));
        assert!(watch.has_grown_to(1256) && !watch.has_grown_to(1256));
        // Less, and then what there was before: that is other memory.
        assert!(!watch.has_grown_to(500) && watch.has_grown_to(1000) && !watch.has_grown_to(1000));
        // By and by.
        assert_eq!((1000..1600).filter(|&pages| watch.has_grown_to(pages)).collect::<Vec<_>>(), [1256, 1512]);
    }

    #[test]
    fn a_mapping_is_growth() {
        let watch = RssWatch::begin();
        let before = watch.pages().expect("a file of /proc");
        // Far more than other tests take meanwhile.
        let more = pagefold_os::mem::Mapping::anonymous(16 << 30).expect("a mapping");
        let pages = watch.pages().expect("a file of /proc");
        assert!(pages > before + (8 << 30) / PAGE_SIZE as u64, "{before} {pages}");
        drop(more);
    }
}
