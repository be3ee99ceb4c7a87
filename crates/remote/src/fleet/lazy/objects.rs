//! The objects of a mounted image as they come: what a program waits for before all else, then what the start profile
//! names, and the rest when no program has waited for a while.
//!
//! Threads of a fixed number take one request after the other. A request for an object that a program waits for takes its
//! neighbours in the pack along: they are its neighbours in the tree, and the way to the server costs more than they do.

use crate::error::{Error, Result};
use crate::fleet::bucket::Bucket;
use crate::fleet::objects::{GAP, InPack, Needs, ObjectPiece, Request, from_other_packs, missing, put, unpack_piece};
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

/// Most bytes of a request for what no program waits for.
const REQUEST_MAX: u32 = 4 << 20;

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
    packed: Vec<InPack>,
    places: HashMap<usize, usize>,
    work: Mutex<Work>,
    news: Condvar,
    bytes: AtomicU64,
    /// What was said last: an error that comes again and again is said once.
    said: Mutex<String>,
}

impl Objects {
    /// The objects of `needs`, of which the store `has` some.
    pub fn new(runtime: Handle, bucket: Arc<Bucket>, build: &Arc<Build<'static>>, needs: Needs, has: &[bool]) -> Self {
        let numbers = needs.objects.iter().enumerate().map(|(number, (digest, _))| (*digest, number)).collect();
        let (packed, _) = needs.pieces();
        let places = packed.iter().enumerate().map(|(place, (_, piece))| (piece.object, place)).collect();
        let states = has.iter().map(|has| if *has { State::Here } else { State::Absent }).collect();
        let work = Work {
            states,
            missing: needs.missing,
            wanted: VecDeque::new(),
            waiting: HashMap::new(),
            first: VecDeque::new(),
            rest: VecDeque::new(),
            rest_workers: 0,
            waited: None,
            paused: None,
            end: None,
        };
        Self {
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
        }
    }

    /// Notes that the objects `first` are to be fetched before they are opened, and then all others, unless `only_opened`.
    pub fn with_requests(mut self, first: &[Digest], only_opened: bool) -> Self {
        let first = first.iter().filter_map(|digest| self.number(digest));
        let first = self.in_requests(first.filter(|object| self.is_missing(*object)), PROFILE_GAP);
        let small = self.packed.iter().map(|(_, piece)| piece.object);
        let large = (0..self.needs.objects.len()).filter(|object| self.needs.is_large(*object));
        let all = small.chain(large.filter(|object| self.is_missing(*object))).filter(|_| !only_opened);
        let rest = self.in_requests(all, GAP);
        let work = self.work.get_mut().expect("no panic while held");
        (work.first, work.rest) = (first, rest);
        self
    }

    /// Returns true if the store did not have the object at the beginning.
    fn is_missing(&self, object: usize) -> bool {
        self.needs.locations.contains_key(&(object, 0))
    }

    /// Requests for missing `objects`: large ones one by one, and small ones in ranges of their packs with gaps of at most
    /// `gap` bytes. A range stands where its first object does.
    fn in_requests(&self, objects: impl Iterator<Item = usize>, gap: u32) -> VecDeque<Request> {
        let mut seen = HashSet::new();
        let objects: Vec<usize> = objects.filter(|object| seen.insert(*object)).collect();
        let (mut requests, mut taken) = (VecDeque::new(), HashSet::new());
        for object in objects {
            if taken.contains(&object) {
                continue;
            }
            let mut request = self.request(object, REQUEST_MAX, gap, |other| seen.contains(&other));
            request.pieces.retain(|piece| taken.insert(piece.object));
            requests.push_back(request);
        }
        requests
    }

    /// The request for missing object `object`. A small one brings those behind it in its pack that are `wanted`, up to
    /// `most` bytes in all and with no gap above `gap`. Of a large one it has the first piece: a worker asks for them all.
    fn request(&self, object: usize, most: u32, gap: u32, wanted: impl Fn(usize) -> bool) -> Request {
        let Some(&place) = self.places.get(&object) else {
            let (pack, offset, packed) = self.needs.locations[&(object, 0)];
            return Request { pack, pieces: vec![ObjectPiece { object, number: 0, offset, packed }] };
        };
        let (pack, first) = self.packed[place];
        let mut request = Request { pack, pieces: vec![first] };
        for (other, piece) in &self.packed[place + 1..] {
            let end = request.end();
            let is_near = *other == pack && piece.offset >= end && piece.offset - end <= gap;
            if !is_near || piece.offset + piece.packed - first.offset > most {
                break;
            }
            if wanted(piece.object) {
                request.pieces.push(*piece);
            }
        }
        request
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
                let absent = |other: usize| work.states[other] == State::Absent;
                let request = self.request(object, AROUND, PROFILE_GAP, absent);
                work = self.bring(work, request).0;
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
        let is_large = self.needs.is_large(request.pieces[0].object);
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
        let bytes = match answer.and_then(|bytes| bytes.ok_or_else(|| missing(&request.pack))) {
            Ok(bytes) => bytes,
            Err(error) => return request.pieces.iter().map(|piece| (piece.object, again(&error))).collect(),
        };
        self.count_bytes(bytes.len() as u64);
        let mut bad = BTreeMap::new();
        for piece in &request.pieces {
            let object = self.needs.objects[piece.object];
            let begin = (piece.offset - request.begin()) as usize;
            let packed = bytes.get(begin..begin + piece.packed as usize).unwrap_or_default();
            let plain = |number| unpack_piece(&request.pack, packed, object.1, number);
            if let Err(error) = put(build, object, plain) {
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
            let (pack, offset, packed) = self.needs.locations[&(number, piece)];
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

/// The same error for each object of a request.
fn again(error: &Error) -> Error {
    match error {
        Error::Passing(text) => Error::Passing(text.clone()),
        error => Error::Said(error.to_string()),
    }
}
