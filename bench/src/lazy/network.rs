//! A network between this machine and itself: what goes through it comes late, and no faster than the link.
//!
//! The kernel's own (netem) is not everywhere; this one moves bytes of TCP connections. An end of a connection is a thread
//! that holds back what it has read until it is due.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Bytes that a connection has on its way at most, pieces of [`PIECE`].
const WINDOW: usize = 256;

/// Bytes that are read at once.
const PIECE: usize = 16 << 10;

/// One direction of the link.
struct Direction {
    delay: Duration,
    bytes_per_s: f64,
    free_at: Mutex<Instant>,
    moved: AtomicU64,
}

impl Direction {
    /// When `bytes` that are sent now have arrived.
    fn due(&self, bytes: usize) -> Instant {
        let mut free_at = self.free_at.lock().expect("no panic while held");
        *free_at = (*free_at).max(Instant::now()) + Duration::from_secs_f64(bytes as f64 / self.bytes_per_s);
        self.moved.fetch_add(bytes as u64, Ordering::Relaxed);
        *free_at + self.delay
    }
}

/// A link to a server. Its threads end with the program.
pub struct Link {
    /// Where the server is to be found through the link.
    pub address: SocketAddr,
    from_server: Arc<Direction>,
}

impl Link {
    /// A link to `server` with this time for the way there and back, and so many bits a second in each direction.
    pub fn to(server: SocketAddr, there_and_back: Duration, bits_per_s: f64) -> io::Result<Link> {
        let direction = || {
            Arc::new(Direction {
                delay: there_and_back / 2,
                bytes_per_s: bits_per_s / 8.0,
                free_at: Mutex::new(Instant::now()),
                moved: AtomicU64::new(0),
            })
        };
        let (to_server, from_server) = (direction(), direction());
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let link = Link { address: listener.local_addr()?, from_server: from_server.clone() };
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (there, back) = (to_server.clone(), from_server.clone());
                std::thread::spawn(move || {
                    // The handshake takes the way there and back before the first byte is sent.
                    std::thread::sleep(there_and_back);
                    if let Ok(server) = TcpStream::connect(server) {
                        let _ = connect(client, server, there, back);
                    }
                });
            }
        });
        Ok(link)
    }

    /// Bytes that have come from the server.
    pub fn moved(&self) -> u64 {
        self.from_server.moved.load(Ordering::Relaxed)
    }
}

fn connect(client: TcpStream, server: TcpStream, there: Arc<Direction>, back: Arc<Direction>) -> io::Result<()> {
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    pass(client.try_clone()?, server.try_clone()?, there);
    pass(server, client, back);
    Ok(())
}

/// Passes on what `from` sends, when it is due.
fn pass(mut from: TcpStream, to: TcpStream, direction: Arc<Direction>) {
    let (sender, pieces) = mpsc::sync_channel(WINDOW);
    std::thread::spawn(move || deliver(to, pieces));
    std::thread::spawn(move || {
        let mut buffer = vec![0; PIECE];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if sender.send((direction.due(count), buffer[..count].to_vec())).is_err() {
                break;
            }
        }
    });
}

fn deliver(mut to: TcpStream, pieces: Receiver<(Instant, Vec<u8>)>) {
    for (due, bytes) in pieces {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            return;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Write);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_whole_late_and_no_faster_than_the_link() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = server.local_addr().unwrap();
        std::thread::spawn(move || {
            for mut stream in server.incoming().flatten() {
                let mut asked = [0; 4];
                stream.read_exact(&mut asked).unwrap();
                stream.write_all(&[7; 100_000]).unwrap();
            }
        });
        // 100,000 bytes at 8 Mbit/s are a tenth of a second.
        let link = Link::to(at, Duration::from_millis(20), 8e6).unwrap();
        let began = Instant::now();
        let mut client = TcpStream::connect(link.address).unwrap();
        client.write_all(b"give").unwrap();
        let mut got = Vec::new();
        client.read_to_end(&mut got).unwrap();
        assert!(got == [7; 100_000] && link.moved() == 100_000);
        assert!(began.elapsed() >= Duration::from_millis(140), "{:?}", began.elapsed());
    }
}
