//! The objects of a mounted image as they come: what a program waits for before all else, then what the start profile
//! names, and the rest when no program has waited for a while.
//!
//! Threads of a fixed number take one request after the other. A request for an object that a program waits for takes its
//! neighbours in the pack along: they are its neighbours in the tree, and the way to the server costs more than they do.

use crate::error::{Error, Result};
use crate::fleet::bucket::Bucket;
use crate::fleet::objects::{Needs, Piece, Request, from_other_packs, missing, put, unpack_piece};
use crate::fleet::packs::pack_path;
use futures_util::StreamExt;
use pagefold_image::build::Build;
use pagefold_image::digest::Digest;
use pagefold_image::fleet::piece_count;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// Threads that fetch.
const WORKERS: usize = 8;

/// Of these, most that fetch what no program waits for and no profile names.
const REST_WORKERS: usize = 3;

/// Requests for the pieces of one large object at the same time.
const PIECES_AT_ONCE: usize = 4;

/// Bytes of a request for an object that a program waits for, with its neighbours: what a fast network moves while the
/// question is on its way.
const AROUND: u32 = 512 << 10;

/// Bytes between two pieces of the profile that are fetched along.
const PROFILE_GAP: u32 = 64 << 10;

/// For so long no program must have waited before the rest is fetched.
const QUIET: Duration = Duration::from_secs(1);

/// The longest pause after a request for the rest has failed.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Why an object cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// There is no room for it.
    Full,
    /// It could not be fetched, or read.
    Lost,
}

/// What the main thread waits for.
pub enum Event {
    /// The time is over.
    Time,
    /// All objects are here.
    Whole,
    /// The mount has ended, or is to be left; why if that was not its last user's doing.
    End(Option<String>),
}

/// An open that waits.
type Waiter = Box<dyn FnOnce(Result<File, Failure>) + Send>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Absent,
    Coming,
    Here,
}

/// What is to be fetched, and which opens wait for it.
struct Work {
    states: Vec<State>,
    missing: usize,
    /// Objects that programs wait for.
    wanted: VecDeque<usize>,
    waiting: HashMap<usize, Vec<Waiter>>,
    first: VecDeque<Request>,
    rest: VecDeque<Request>,
    rest_workers: usize,
    /// When a program last had to wait.
    waited: Option<Instant>,
    /// Until when the rest is not asked for, and the pause that led there.
    paused: Option<(Instant, Duration)>,
    end: Option<Option<String>>,
}

/// The objects of an image.
pub struct Objects {
    runtime: Handle,
    bucket: Arc<Bucket>,
    /// Gone when the mount has ended: a thread that still waits for a server must not keep what the build has staged.
    build: Weak<Build<'static>>,
    needs: Needs,
    numbers: HashMap<Digest, usize>,
    /// The missing objects of one piece, in the order of the packs, and the place of each there.
    packed: Vec<(Digest, Piece)>,
    places: HashMap<usize, usize>,
    work: Mutex<Work>,
    news: Condvar,
    bytes: AtomicU64,
    /// What was said last: an error that comes again and again is said once.
    said: Mutex<String>,
}

impl Objects {
    /// The objects of `needs`, of which the store `has` some. Those of `first` are fetched first, and `rest` at the end.
    pub fn new(
        runtime: Handle,
        bucket: Arc<Bucket>,
        build: &Arc<Build<'static>>,
        needs: Needs,
        has: &[bool],
        first: &[Digest],
        rest: Vec<Request>,
    ) -> Self {
        let numbers: HashMap<Digest, usize> =
            needs.objects.iter().enumerate().map(|(number, (digest, _))| (*digest, number)).collect();
        let mut packed = Vec::new();
        for (&(object, number), &(pack, offset, bytes)) in &needs.places {
            if piece_count(needs.objects[object].1) == 1 {
                packed.push((pack, Piece { object, number, offset, packed: bytes }));
            }
        }
        packed.sort_by_key(|(pack, piece)| (*pack, piece.offset));
        let places = packed.iter().enumerate().map(|(place, (_, piece))| (piece.object, place)).collect();
        let states: Vec<State> = has.iter().map(|has| if *has { State::Here } else { State::Absent }).collect();
        let work = Work {
            states,
            missing: needs.missing,
            wanted: VecDeque::new(),
            waiting: HashMap::new(),
            first: VecDeque::new(),
            rest: one_each(rest, &needs),
            rest_workers: 0,
            waited: None,
            paused: None,
            end: None,
        };
        let mut objects = Self {
            runtime,
            bucket,
            build: Arc::downgrade(build),
            needs,
            numbers,
            packed,
            places,
            work: Mutex::new(work),
            news: Condvar::new(),
            bytes: AtomicU64::new(0),
            said: Mutex::default(),
        };
        let first = objects.in_requests(first, has);
        objects.work.get_mut().expect("no panic while held").first = first;
        objects
    }

    /// Requests for what a start reads: large objects one by one, and small ones in ranges of their packs. A range stands
    /// where its first object does.
    fn in_requests(&self, digests: &[Digest], has: &[bool]) -> VecDeque<Request> {
        let (mut requests, mut seen) = (VecDeque::<Request>::new(), HashSet::new());
        let wanted: Vec<usize> = digests
            .iter()
            .filter_map(|digest| self.numbers.get(digest).copied())
            .filter(|object| !has[*object] && seen.insert(*object))
            .collect();
        let mut taken = HashSet::new();
        for object in &wanted {
            let Some(&place) = self.places.get(object) else {
                requests.extend(self.large(*object));
                continue;
            };
            if taken.contains(object) {
                continue;
            }
            let mut pieces = self.range(place, super::REQUEST_MAX, PROFILE_GAP, |other| seen.contains(&other));
            pieces.retain(|piece| taken.insert(piece.object));
            requests.push_back(Request { pack: self.packed[place].0, pieces });
        }
        requests
    }

    /// The request for an object of several pieces. It has the first alone: a worker asks for all of them.
    fn large(&self, object: usize) -> Option<Request> {
        let &(pack, offset, packed) = self.needs.places.get(&(object, 0))?;
        Some(Request { pack, pieces: vec![Piece { object, number: 0, offset, packed }] })
    }

    /// The piece at `place`, and those behind it in its pack that are `wanted`, up to `most` bytes in all and with no gap
    /// above `gap`.
    fn range(&self, place: usize, most: u32, gap: u32, wanted: impl Fn(usize) -> bool) -> Vec<Piece> {
        let (pack, first) = self.packed[place];
        let mut pieces = vec![first];
        let mut end = first.offset + first.packed;
        for (other, piece) in &self.packed[place + 1..] {
            let is_near = *other == pack && piece.offset >= end && piece.offset - end <= gap;
            if !is_near || piece.offset + piece.packed - first.offset > most {
                break;
            }
            if wanted(piece.object) {
                pieces.push(*piece);
                end = piece.offset + piece.packed;
            }
        }
        pieces
    }

    /// Starts the threads that fetch.
    ///
    /// # Errors
    /// The system's.
    pub fn start(self: &Arc<Self>) -> Result<()> {
        for _ in 0..WORKERS {
            let objects = self.clone();
            let thread = std::thread::Builder::new().name("fetch".into()).spawn(move || objects.work_on());
            thread.map_err(|error| Error::Said(format!("a thread: {error}")))?;
        }
        Ok(())
    }

    /// The number of an object of the image.
    pub fn number(&self, digest: &Digest) -> Option<usize> {
        self.numbers.get(digest).copied()
    }

    /// The bytes of an object.
    pub fn size(&self, object: usize) -> Option<u64> {
        self.needs.objects.get(object).map(|object| object.1)
    }

    /// Calls `then` with the object's file, at once if it is here.
    pub fn open(&self, object: usize, then: impl FnOnce(Result<File, Failure>) + Send + 'static) {
        let mut work = self.lock();
        match work.states.get(object) {
            None => drop(work),
            Some(State::Here) => {
                drop(work);
                return then(self.file(object));
            }
            Some(state) => {
                if *state == State::Absent && !work.wanted.contains(&object) {
                    work.wanted.push_back(object);
                }
                work.waited = Some(Instant::now());
                work.waiting.entry(object).or_default().push(Box::new(then));
                drop(work);
                return self.news.notify_all();
            }
        }
        then(Err(Failure::Lost));
    }

    fn file(&self, object: usize) -> Result<File, Failure> {
        let build = self.build.upgrade().ok_or(Failure::Lost)?;
        build.open_object(&self.needs.objects[object].0).map_err(|error| {
            self.say(&error.to_string());
            Failure::Lost
        })
    }

    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().expect("no panic while held")
    }

    /// Counts bytes that came.
    pub fn count_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes that have come.
    pub fn bytes_fetched(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Writes a line to standard error, unless it was the last one too.
    pub fn say(&self, text: &str) {
        let mut said = self.said.lock().expect("no panic while held");
        if *said != text {
            text.clone_into(&mut said);
            eprintln!("pagefold: {}", pagefold_os::sanitize::clean(text));
        }
    }

    /// The mount has ended.
    pub fn end(&self, why: Option<String>) {
        self.lock().end.get_or_insert(why);
        self.news.notify_all();
    }

    /// Waits for at most `patience`; an image that `is_stored` already is no event.
    pub fn wait(&self, patience: Duration, is_stored: bool) -> Event {
        let until = Instant::now() + patience;
        let mut work = self.lock();
        loop {
            if let Some(why) = &work.end {
                return Event::End(why.clone());
            }
            if work.missing == 0 && !is_stored {
                return Event::Whole;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Event::Time;
            }
            work = self.news.wait_timeout(work, left).expect("no panic while held").0;
        }
    }

    /// Fetches until the mount ends.
    fn work_on(&self) {
        let mut work = self.lock();
        loop {
            if work.end.is_some() || work.missing == 0 {
                return;
            }
            if let Some(object) = work.wanted.pop_front() {
                if work.states[object] != State::Absent {
                    continue;
                }
                let request = match self.places.get(&object) {
                    Some(&place) => {
                        let absent = |other: usize| work.states[other] == State::Absent;
                        Some(Request {
                            pack: self.packed[place].0,
                            pieces: self.range(place, AROUND, PROFILE_GAP, absent),
                        })
                    }
                    None => self.large(object),
                };
                work = request.map_or_else(|| self.lock(), |request| self.bring(work, request).0);
                continue;
            }
            if let Some(request) = work.first.pop_front() {
                work = self.bring(work, request).0;
                continue;
            }
            let pause = work.pause();
            if pause.is_zero()
                && work.rest_workers < REST_WORKERS
                && let Some(request) = work.rest.pop_front()
            {
                work.rest_workers += 1;
                let failed;
                (work, failed) = self.bring(work, request);
                work.rest_workers -= 1;
                if let Some(request) = failed {
                    work.rest.push_back(request);
                    let pause = work.paused.map_or(QUIET, |(_, pause)| (2 * pause).min(PAUSE_MAX));
                    work.paused = Some((Instant::now() + pause, pause));
                }
                continue;
            }
            work = if pause.is_zero() || work.rest.is_empty() {
                self.news.wait(work).expect("no panic while held")
            } else {
                self.news.wait_timeout(work, pause).expect("no panic while held").0
            };
        }
    }

    /// Fetches what of a request is absent. Returns the request if something of it could not be fetched.
    fn bring<'a>(
        &'a self,
        mut work: MutexGuard<'a, Work>,
        mut request: Request,
    ) -> (MutexGuard<'a, Work>, Option<Request>) {
        request.pieces.retain(|piece| work.states[piece.object] == State::Absent);
        if request.pieces.is_empty() {
            return (work, None);
        }
        for piece in &request.pieces {
            work.states[piece.object] = State::Coming;
        }
        drop(work);
        let is_large = self.needs.objects[request.pieces[0].object].1 > pagefold_image::fleet::PIECE;
        let bad = match self.build.upgrade() {
            Some(build) if is_large => self.look_elsewhere(&build, self.fetch_large(&build, &request)),
            Some(build) => self.look_elsewhere(&build, self.fetch_small(&build, &request)),
            None => {
                request.pieces.iter().map(|piece| (piece.object, Error::Said("the mount has ended".into()))).collect()
            }
        };
        let is_bad = |object: usize| bad.contains_key(&object);
        let mut work = self.lock();
        let mut waiting = Vec::new();
        for piece in &request.pieces {
            let object = piece.object;
            work.states[object] = if is_bad(object) { State::Absent } else { State::Here };
            work.missing -= usize::from(!is_bad(object));
            waiting.extend(work.waiting.remove(&object).map(|waiters| (object, waiters)));
        }
        if bad.is_empty() {
            work.paused = None;
        }
        let has_ended = work.end.is_some();
        drop(work);
        if let Some((object, error)) = bad.first_key_value()
            && !has_ended
        {
            let more = if bad.len() > 1 { format!(" and {} more", bad.len() - 1) } else { String::new() };
            self.say(&format!("object {}{more}: {error}", self.needs.objects[*object].0));
        }
        for (object, waiters) in waiting {
            for waiter in waiters {
                waiter(match bad.get(&object) {
                    None => self.file(object),
                    Some(Error::Image(error)) if error.is_full_or_read_only() => Err(Failure::Full),
                    Some(_) => Err(Failure::Lost),
                });
            }
        }
        self.news.notify_all();
        let failed = (!bad.is_empty()).then_some(request);
        (self.lock(), failed)
    }

    /// Fetches objects of one piece each. Returns those that did not come.
    fn fetch_small(&self, build: &Build, request: &Request) -> BTreeMap<usize, Error> {
        let range = request.begin().into()..request.end().into();
        let answer = self.runtime.block_on(self.bucket.range(&pack_path(&request.pack), range));
        let answer = answer.and_then(|bytes| bytes.ok_or_else(|| missing(&request.pack)));
        let mut bad = BTreeMap::new();
        self.count_bytes(answer.as_ref().map_or(0, |bytes| bytes.len() as u64));
        for piece in &request.pieces {
            let object = self.needs.objects[piece.object];
            let begin = (piece.offset - request.begin()) as usize;
            let plain = match &answer {
                Ok(bytes) => {
                    let packed = bytes.get(begin..begin + piece.packed as usize).unwrap_or_default();
                    unpack_piece(&request.pack, packed, object.1, piece.number)
                }
                Err(error) => Err(again(error)),
            };
            let mut plain = Some(plain);
            let next = |_| plain.take().unwrap_or_else(|| Err(Error::Said("it has one piece".into())));
            if let Err(error) = put(build, object, next) {
                bad.insert(piece.object, error);
            }
        }
        bad
    }

    /// Fetches an object of several pieces. Returns it if it did not come.
    fn fetch_large(&self, build: &Build, request: &Request) -> BTreeMap<usize, Error> {
        let number = request.pieces[0].object;
        let object = self.needs.objects[number];
        let ask = |piece: u32| async move {
            let Some(&(pack, offset, packed)) = self.needs.places.get(&(number, piece)) else {
                return Err(Error::Said("a piece without a place".into()));
            };
            let range = u64::from(offset)..u64::from(offset + packed);
            let bytes = self.bucket.range(&pack_path(&pack), range).await?.ok_or_else(|| missing(&pack))?;
            self.count_bytes(bytes.len() as u64);
            unpack_piece(&pack, &bytes, object.1, piece)
        };
        let count = piece_count(object.1) as u32;
        let mut pieces = Box::pin(futures_util::stream::iter(0..count).map(ask).buffered(PIECES_AT_ONCE));
        let next = |_| {
            let next = self.runtime.block_on(pieces.next());
            next.unwrap_or_else(|| Err(Error::Said("its pieces have ended".into())))
        };
        put(build, object, next).err().map(|error| (number, error)).into_iter().collect()
    }

    /// Looks in other packs for objects that are damaged or withheld. Returns those that did not come from there either.
    fn look_elsewhere(&self, build: &Build, mut bad: BTreeMap<usize, Error>) -> BTreeMap<usize, Error> {
        let lost = bad.iter().filter_map(|(object, error)| match error {
            Error::Said(text) => Some((*object, text.clone())),
            _ => None,
        });
        let mut lost: BTreeMap<usize, String> = lost.collect();
        let asked: Vec<usize> = lost.keys().copied().collect();
        if asked.is_empty() {
            return bad;
        }
        match from_other_packs(&self.runtime, &self.bucket, build, &self.needs, &mut lost) {
            Ok(bytes) => {
                self.count_bytes(bytes);
                bad.retain(|object, _| !asked.contains(object) || lost.contains_key(object));
            }
            Err(error) => self.say(&error.to_string()),
        }
        bad
    }
}

impl Work {
    /// How long the rest has to wait.
    fn pause(&self) -> Duration {
        let now = Instant::now();
        let quiet = self.waited.map_or(Duration::ZERO, |waited| (waited + QUIET).saturating_duration_since(now));
        let pause = self.paused.map_or(Duration::ZERO, |(until, _)| until.saturating_duration_since(now));
        quiet.max(pause)
    }
}

/// The requests with each large object once: a plan has a request for each run of its pieces.
fn one_each(requests: Vec<Request>, needs: &Needs) -> VecDeque<Request> {
    let is_large = |piece: &Piece| piece_count(needs.objects[piece.object].1) > 1;
    let (mut seen, mut out) = (HashSet::new(), VecDeque::new());
    for mut request in requests {
        let (large, small): (Vec<Piece>, Vec<Piece>) = request.pieces.into_iter().partition(is_large);
        for piece in large {
            if seen.insert(piece.object) {
                out.push_back(Request { pack: request.pack, pieces: vec![piece] });
            }
        }
        if !small.is_empty() {
            request.pieces = small;
            out.push_back(Request { pack: request.pack, pieces: request.pieces });
        }
    }
    out
}

/// The same error for each object of a request.
fn again(error: &Error) -> Error {
    match error {
        Error::Passing(text) => Error::Passing(text.clone()),
        error => Error::Said(error.to_string()),
    }
}
