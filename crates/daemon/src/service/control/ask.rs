//! The asking side of the control socket: sends a request, waits for its answer, and names a daemon that hangs.

use super::verbs::{Answer, Request};
use pagefold_os::{procfs, sock};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes of an answer that are received at a time.
const BUFFER_BYTES: usize = 32 << 10;

/// How long a daemon may take to answer a quick request. While it works on a longer one it must answer quick requests of
/// other connections within this time.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// Time between two looks whether a silent daemon is alive.
const LOOK: Duration = Duration::from_secs(1);

/// Asks the daemon at `socket` and waits for its answer: [`PATIENCE`] for a quick request; for a longer one as long as the
/// daemon answers quick requests meanwhile.
///
/// # Errors
/// `NotFound` or `ConnectionRefused` if no daemon listens there, `InvalidData` if it answers nonsense, `UnexpectedEof` if it
/// hangs up, `TimedOut`, with what to do about it, if it does not answer.
pub fn ask(socket: &Path, request: &Request) -> io::Result<Answer> {
    ask_within(socket, request, PATIENCE)
}

/// As [`ask`], with `patience` in place of [`PATIENCE`].
///
/// # Errors
/// As [`ask`].
pub fn ask_within(socket: &Path, request: &Request, patience: Duration) -> io::Result<Answer> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, InvalidData, UnexpectedEof};
    let text = exchange(socket, request, patience);
    let text = text.and_then(|text| if text.is_empty() { Err(ConnectionReset.into()) } else { Ok(text) });
    let text = text.map_err(|error| match error.kind() {
        BrokenPipe | ConnectionReset => {
            io::Error::new(UnexpectedEof, "it hung up: it ended, or serves as many as it can")
        }
        _ => error,
    })?;
    serde_json::from_slice(&text).map_err(|error| io::Error::new(InvalidData, error))
}

/// The bytes of the answer.
fn exchange(socket: &Path, request: &Request, patience: Duration) -> io::Result<Vec<u8>> {
    let path = socket.as_os_str().as_bytes();
    let connection = sock::connect_within(path, millis(patience))
        .map_err(|errno| with_cure(sock::in_time(errno.into(), patience), None))?;
    let pid = sock::peer(&connection).ok().map(|peer| peer.pid).filter(|pid| *pid > 0);
    sock::set_timeout(&connection, millis(LOOK.min(patience)))?;
    sock::send(&connection, &serde_json::to_vec(request)?, &[])?;
    let mut text = Vec::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut heard = Instant::now();
    loop {
        let error = match sock::receive(&connection, &mut buffer, 0) {
            Ok((0, _)) => return Ok(text),
            Ok((got, _)) => {
                text.extend_from_slice(&buffer[..got]);
                heard = Instant::now();
                continue;
            }
            Err(errno) => sock::in_time(errno.into(), patience),
        };
        let goes_on = error.kind() == io::ErrorKind::TimedOut
            && !pid.is_some_and(procfs::is_stopped)
            // Moving or comparing terabytes takes long: whether such a daemon hangs shows by a quick request.
            && if request.is_quick() { heard.elapsed() < patience } else { answers_quickly(socket, patience) };
        if !goes_on {
            return Err(with_cure(error, pid));
        }
    }
}

fn millis(time: Duration) -> u64 {
    // Zero would mean no limit.
    time.as_millis().clamp(1, u64::MAX.into()) as u64
}

/// False if the daemon at `socket` does not answer even a quick request in time.
fn answers_quickly(socket: &Path, patience: Duration) -> bool {
    let asked = ask_within(socket, &Request::Counts {}, patience);
    !asked.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut)
}

/// `error`, with what the operator can do about a silent daemon, process `pid`.
fn with_cure(error: io::Error, pid: Option<i32>) -> io::Error {
    if error.kind() != io::ErrorKind::TimedOut {
        return error;
    }
    let said = match pid {
        Some(pid) if procfs::is_stopped(pid) => format!("process {pid} is stopped; kill -CONT {pid} lets it go on"),
        Some(pid) => format!(
            "{error} from process {pid}; if it stays so, kill -KILL {pid}: clients keep what they have, and greet the next daemon"
        ),
        None => format!("{error}; is it stopped?"),
    };
    io::Error::new(error.kind(), said)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::Verified;
    use pagefold_os::fd::Fd;

    const SHORT: Duration = Duration::from_millis(50);

    fn listener() -> (tempfile::TempDir, std::path::PathBuf, Fd) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = sock::listen(path.as_os_str().as_bytes()).unwrap();
        (dir, path, listener)
    }

    #[test]
    fn a_daemon_that_accepts_no_connections_times_out() {
        let (_dir, path, _listener) = listener();
        let mut waiting = Vec::new();
        while let Ok(connection) = sock::connect_within(path.as_os_str().as_bytes(), 50) {
            waiting.push(connection);
        }
        let error = ask_within(&path, &Request::Status {}, SHORT).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(error.to_string(), "no word in 50ms; is it stopped?");
    }

    #[test]
    fn a_daemon_that_does_not_answer_is_named() {
        let (_dir, path, _listener) = listener();
        for request in [Request::Status {}, Request::Verify {}, Request::Pause { pid: None }] {
            let error = ask_within(&path, &request, SHORT).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{request:?}");
            let me = format!("no word in 50ms from process {}; ", std::process::id());
            assert!(error.to_string().starts_with(&me), "{error}");
        }
    }

    #[test]
    fn long_work_is_waited_for_as_long_as_quick_requests_are_answered() {
        let (_dir, path, listener) = listener();
        let daemon = std::thread::spawn(move || {
            let reply = |connection: Fd, answer: &Answer| {
                let mut request = [0; 100];
                let (got, _) = sock::receive(&connection, &mut request, 0).unwrap();
                sock::send(&connection, &serde_json::to_vec(answer).unwrap(), &[]).unwrap();
                serde_json::from_slice::<Request>(&request[..got]).unwrap()
            };
            let work = sock::accept(&listener).unwrap();
            assert_eq!(reply(sock::accept(&listener).unwrap(), &Answer::Status(Box::default())), Request::Counts {});
            reply(work, &Answer::Verified(Verified::default()))
        });
        // Longer than this machine may take for a quick request.
        let answer = ask_within(&path, &Request::Verify {}, Duration::from_secs(60));
        assert_eq!(answer.unwrap(), Answer::Verified(Verified::default()));
        assert_eq!(daemon.join().unwrap(), Request::Verify {});
    }
}
