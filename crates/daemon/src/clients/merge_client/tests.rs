//! A client; the test is its agent.

use super::*;
use crate::clients::connection::tests::does_not_wait_for_files_that_are_slow_to_close;

#[test]
fn a_client_that_sends_files_that_are_slow_to_close_is_gone_without_a_wait() {
    let packet = Packet { sequence: 1, ..Packet::new(Op::Regions) };
    does_not_wait_for_files_that_are_slow_to_close(packet.bytes(), |peer| {
        assert_eq!(link(peer).regions(), Err(Gone));
    });
}

/// A client behind `peer`.
fn link(peer: Connection) -> MergeClient {
    MergeClient {
        requests: AgentRequests::new(Arc::new(peer)),
        pagemap: Fd::open(c"/proc/self/pagemap", libc::O_RDONLY, 0).expect("our own"),
        shared: Arc::new(SharedClient::of(0)),
        held: HeldSegments::new(),
        keeps_earlier: true,
        lacks_earlier: BTreeSet::new(),
        scan: Vec::new(),
        room: 0,
        away: false,
        attached: None,
        policy: (Leftover::Private, (0, "test".into())),
        handed: (0, 0),
    }
}

/// What `ask` gets of a client. Its agent answers by `answer`: a packet and the descriptors that it carries.
fn answered<T>(
    mut answer: impl FnMut(&Packet, &SharedClient) -> (Packet, Vec<i32>) + Send,
    ask: impl FnOnce(&mut MergeClient) -> T,
) -> T {
    let (ours, theirs) = sock::pair().expect("a pair");
    let mut client = link(ours.into());
    let shared = client.shared.clone();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut buffer = [0; size_of::<Packet>()];
            while let Ok((got, _)) = sock::receive(&theirs, &mut buffer, 0)
                && let Some(request) = Packet::parse(&buffer[..got])
            {
                let (answer, fds) = answer(&request, &shared);
                if sock::send(&theirs, answer.bytes(), &fds).is_err() {
                    return;
                }
            }
        });
        let got = ask(&mut client);
        client.requests.shut();
        got
    })
}

/// What the daemon gets of a client that lists every second page, `count` in all; if it `repeats`, each list is the
/// first one.
fn listed(count: usize, repeats: bool) -> Result<Option<Vec<Range>>, Gone> {
    let list = |request: &Packet, shared: &SharedClient| {
        let first = if repeats { 0 } else { (request.b / PAGE).div_ceil(2) as usize };
        let len = (count - first).min(LIST_MAX);
        for index in 0..len {
            let range = Range::pages_from(2 * (first + index) as u64 * PAGE, 1);
            let entry = RegionEntry { start: range.start, end: range.end, inode: 0, slot: 0 };
            shared.channel.put_answer(index, entry);
        }
        (Packet { count: len as u64, ..*request }, Vec::new())
    };
    answered(list, |client| client.regions())
}

#[test]
fn only_memory_files_are_taken_for_earlier_segments() {
    let segment = memfd::create(c"earlier", PAGE).expect("a file");
    let null = Fd::open(c"/dev/null", libc::O_RDONLY, 0).expect("it is there");
    let mut asked = 0;
    let give = |request: &Packet, _: &SharedClient| {
        asked += 1;
        let fds = match request.a {
            7 => vec![segment.raw()],
            8 => vec![null.raw(), segment.raw()],
            _ => Vec::new(),
        };
        (*request, fds)
    };
    answered(give, |client| {
        let file = client.open_earlier(7).expect("a segment");
        assert_eq!(memfd::len_and_inode(file.raw()), memfd::len_and_inode(segment.raw()));
        for _ in 0..3 {
            assert!(client.open_earlier(8).is_none() && client.open_earlier(9).is_none());
        }
        assert_eq!(client.name_earlier_segments(&[]), Ok(()));
        assert!(!client.keeps_earlier_segments() && client.open_earlier(7).is_none());
    });
    assert_eq!(asked, 4, "it is not asked again for what it has not, and for nothing once all have numbers");
}

#[test]
fn a_segment_with_a_number_is_held_if_the_agent_says_so() {
    let names: Vec<(u64, u32)> = (0..LIST_MAX as u32 + 2).map(|id| (u64::from(id) + 100, id)).collect();
    let (mut lists, mut last) = (0, 0);
    let take_even = |request: &Packet, shared: &SharedClient| {
        (lists, last) = (lists + 1, request.a);
        for index in 0..request.count as usize {
            let EarlierSegment { inode, id } = shared.channel.request(index);
            assert_eq!(inode, id + 100);
            shared.channel.put_answer(index, u64::from(id % 2 == 0));
        }
        (*request, Vec::new())
    };
    answered(take_even, |client| {
        assert_eq!(client.name_earlier_segments(&names), Ok(()));
        // The last of those that share a place is there.
        let has = |id: u32| client.held.has(id, u64::from(id) + 100);
        assert_eq!((has(0), has(1), has(LIST_MAX as u32)), (false, false, true));
    });
    assert_eq!((lists, last), (2, 1), "the last list is known for it");
    let refuse = |request: &Packet, _: &SharedClient| (Packet { status: libc::ENOSYS, ..*request }, Vec::new());
    answered(refuse, |client| {
        assert_eq!(client.name_earlier_segments(&names), Ok(()));
        assert_eq!(client.held.len(), 0, "an agent of an earlier version");
    });
}

#[test]
fn long_lists_of_regions_are_asked_for_to_their_end() {
    for count in [0, 1, LIST_MAX - 1, LIST_MAX, LIST_MAX + 1, 3 * LIST_MAX + 7] {
        let regions = listed(count, false).expect("it lives").expect("it can tell");
        assert!(regions.iter().copied().eq((0..count).map(|index| Range::pages_from(2 * index as u64 * PAGE, 1))));
    }
}

#[test]
fn a_client_whose_list_does_not_end_is_asked_a_limited_number_of_times() {
    let regions = listed(REGIONS_MAX + 3 * LIST_MAX, false).expect("it lives").expect("it can tell");
    assert_eq!(regions.len(), REGIONS_MAX);
    assert_eq!(listed(2 * LIST_MAX, true), Err(Gone), "a list that begins again");
}

/// The program waits for a batch, so its size bounds the wait: whatever pieces there are, and none is lost.
#[test]
fn batches_of_unshared_pages_are_small() {
    let range = |first: u64, pages: u64| Range::pages_from(first * PAGE, pages);
    let large: Vec<Range> = (0..2000).map(|index| range(index * 128, 128)).collect();
    let small: Vec<Range> = (0..3000).map(|index| range(index * 2, 1)).collect();
    let mixed: Vec<Range> = (0..500).map(|index| range(index * 200, 1 + index * 7 % 128)).collect();
    for ranges in [&large, &small, &mixed, &vec![range(0, 600), range(600, 1)], &Vec::new()] {
        let all: Vec<&[Range]> = batches(ranges, UNSHARE_PAGES).collect();
        assert_eq!(&all.concat(), ranges);
        assert!(
            all.iter().all(|batch| batch.len() == 1 || pages_of(batch) <= UNSHARE_PAGES && batch.len() <= LIST_MAX)
        );
        // And no smaller than they need be: each request costs a message.
        assert!(all.windows(2).all(|two| pages_of(two[0]) + two[1][0].pages() > UNSHARE_PAGES));
    }
    assert_eq!(batches(&large, UNSHARE_PAGES).count(), 500);
}
