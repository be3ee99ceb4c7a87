//! Clients that lie, flood or keep silent: they are dropped, a good client beside them goes on, the daemon lives.

mod common;

use common::{Daemon, Reaped, can_merge, semantics, wait_for};
use pagefold_os::fd::Fd;
use pagefold_os::sock;
use pagefold_protocol::channel::Channel;
use pagefold_protocol::message::{Op, Packet, RegionEntry};
use std::os::unix::ffi::OsStrExt;
use std::process::Stdio;

/// A greeting that was accepted: the socket and the channel.
struct Accepted {
    socket: Fd,
    channel: Channel,
}

/// A daemon that sends no request for this long, in milliseconds, sends none any more.
const SILENCE_MS: u64 = 3_000;

fn connect(daemon: &Daemon) -> Fd {
    let socket = sock::connect(daemon.socket.as_os_str().as_bytes()).expect("the daemon listens");
    sock::set_timeout(&socket, SILENCE_MS).expect("a timeout");
    socket
}

/// A client that is taken; the daemon may have the ones before still, of which one process may have four.
fn greet(daemon: &Daemon) -> Accepted {
    let mut taken = None;
    wait_for("a greeting to be taken", 120, || {
        taken = try_to_greet(daemon);
        taken.is_some()
    });
    taken.expect("waited for")
}

fn try_to_greet(daemon: &Daemon) -> Option<Accepted> {
    let socket = connect(daemon);
    // The processors are busy with the good client.
    sock::set_timeout(&socket, 120_000).expect("a timeout");
    let pagemap = Fd::open(c"/proc/self/pagemap", libc::O_RDONLY, 0).expect("pagemap");
    sock::send(&socket, Packet::new(Op::Hello).bytes(), &[pagemap.raw()]).expect("hello");
    let mut buffer = [0; size_of::<Packet>()];
    let (_, mut fds) = sock::receive(&socket, &mut buffer, 0).ok()?;
    sock::set_timeout(&socket, SILENCE_MS).expect("a timeout");
    let channel = fds.take(0)?;
    let channel = Channel::open(channel).expect("mapped");
    sock::send(&socket, Packet::new(Op::Ready).bytes(), &[]).expect("ready");
    Some(Accepted { socket, channel })
}

impl Accepted {
    /// Answers every request by `answer` until the daemon hangs up, or `most` requests; returns how many came.
    fn serve(&self, most: usize, mut answer: impl FnMut(&Accepted, Packet) -> Packet) -> usize {
        let mut buffer = [0; size_of::<Packet>()];
        for served in 0..most {
            match sock::receive(&self.socket, &mut buffer, 0) {
                Ok((got, _)) if got > 0 => {}
                _ => return served,
            }
            let Some(request) = Packet::parse(&buffer) else { return served };
            if sock::send(&self.socket, answer(self, request).bytes(), &[]).is_err() {
                return served;
            }
        }
        most
    }
}

fn regions(entries: &[(u64, u64)]) -> impl FnMut(&Accepted, Packet) -> Packet {
    let entries = entries.to_vec();
    move |me, request| {
        if request.op != Op::Regions as u32 || request.a == 1 {
            return Packet { count: 0, ..request };
        }
        for (index, (start, end)) in entries.iter().enumerate() {
            me.channel.put_answer(index, RegionEntry { start: *start, end: *end, inode: 0, slot: 0 });
        }
        Packet { count: entries.len() as u64, ..request }
    }
}

/// A false answer, with its name.
type Lie = (&'static str, Box<dyn FnMut(&Accepted, Packet) -> Packet>);

#[test]
fn hostile_clients_harm_themselves_only() {
    let Some(program) = semantics().filter(|_| can_merge()) else { return };
    let mut daemon = Daemon::start(&["--workers", "3"]);
    let mut command = daemon.run(&[]);
    command.arg(program).arg("writers").stdout(Stdio::null());
    let mut good = Reaped(command.spawn().expect("a client"));

    // What is no greeting at all.
    for bytes in [&b""[..], b"x", b"{", b"{\"what\":1}", &[0; 112], &[255; 112], &[b'{'; 60_000]] {
        let socket = connect(&daemon);
        let _ = sock::send(&socket, bytes, &[]);
        let mut buffer = [0; 4096];
        let _ = sock::receive(&socket, &mut buffer, 0);
    }
    // Greetings with no descriptor, with a wrong one, of another version.
    let null = Fd::open(c"/dev/null", libc::O_RDWR, 0).expect("/dev/null");
    let hello = Packet::new(Op::Hello);
    for (packet, fds) in [
        (hello, vec![]),
        (hello, vec![null.raw()]),
        (Packet { version: 99, ..hello }, vec![null.raw()]),
        (Packet { text: [0xff; 64], ..hello }, vec![null.raw(); 8]),
    ] {
        let socket = connect(&daemon);
        sock::send(&socket, packet.bytes(), &fds).expect("sent");
        let mut buffer = [0; 4096];
        let welcome = sock::receive(&socket, &mut buffer, 0).ok().and_then(|(got, _)| Packet::parse(&buffer[..got]));
        assert!(welcome.is_none_or(|packet| packet.status != 0 || packet.op != Op::Welcome as u32), "{welcome:?}");
    }
    // Agents that answer nonsense are hung up on.
    let lies: [Lie; 7] = [
        ("counts too many", Box::new(|_, request| Packet { count: u64::MAX, ..request })),
        ("answers another request", Box::new(|_, request| Packet { sequence: request.sequence + 7, ..request })),
        ("answers something else", Box::new(|_, request| Packet { op: Op::Hello as u32, ..request })),
        ("unaligned regions", Box::new(regions(&[(0x1001, 0x5000)]))),
        ("regions that end before they begin", Box::new(regions(&[(0x9000, 0x1000)]))),
        ("regions that overlap", Box::new(regions(&[(0x1000, 0x9000), (0x2000, 0x3000)]))),
        ("regions where no memory is", Box::new(regions(&[(0x1000, !0xfff)]))),
    ];
    for (what, lie) in lies {
        let served = greet(&daemon).serve(500, lie);
        assert!(served < 500, "{what}: still served");
    }
    // Agents that claim what they do not have, much of it, and are answered in kind.
    for claim in [vec![(0x1000, 0x2000)], vec![(1 << 40, (1 << 40) + (1 << 38))], vec![(1 << 46, 1 << 47)]] {
        greet(&daemon).serve(20, regions(&claim));
    }
    // Agents that are silent, and one that floods.
    let silent: Vec<Accepted> = (0..3).map(|_| greet(&daemon)).collect();
    let flood = greet(&daemon);
    for _ in 0..2_000 {
        if sock::send(&flood.socket, Packet::new(Op::Ready).bytes(), &[]).is_err() {
            break;
        }
    }
    assert!(daemon.is_alive(), "the daemon died");
    let mut status = None;
    wait_for("the good client to end", 120, || {
        status = good.0.try_wait().expect("wait");
        status.is_some()
    });
    assert!(status.is_some_and(|status| status.success()), "the good client suffered: {status:?}");
    drop((silent, flood));
    wait_for("the daemon to forget them", 60, || daemon.status()["clients"].as_array().is_some_and(Vec::is_empty));
    assert!(daemon.is_alive(), "the daemon died");
}
