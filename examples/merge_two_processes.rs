//! Two processes that hold the same pages, merged through the library.
//!
//! Run `pagefold daemon --scan-interval 1s` in one terminal and this example in another:
//!
//! ```sh
//! cargo run --release -- daemon --scan-interval 1s &
//! cargo run --release --example merge_two_processes
//! ```
//!
//! The example starts itself a second time; both fill a region with the same
//! bytes. After a few seconds their proportional memory has halved. Then one of
//! them writes, and the other does not see it.

use pagefold_agent::client::{Client, Region};
use std::io::{BufRead, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const LEN: usize = 64 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let default = if std::env::var_os("XDG_RUNTIME_DIR").is_some() && !Path::new("/run/pagefold/daemon.sock").exists() {
        format!("{}/pagefold/daemon.sock", std::env::var("XDG_RUNTIME_DIR")?)
    } else {
        "/run/pagefold/daemon.sock".to_owned()
    };
    let socket = std::env::var("PAGEFOLD_SOCKET").unwrap_or(default);
    let client = Client::connect(Path::new(&socket), "example")?;
    let mut region = Region::new(&client, LEN)?;
    for (number, page) in region.chunks_exact_mut(4096).enumerate() {
        page.fill(number as u8 | 1);
        page[..8].copy_from_slice(&number.to_le_bytes());
    }
    if std::env::args().nth(1).as_deref() == Some("second") {
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line)?;
        println!("second process: byte 100 is still {}", region[100]);
        return Ok(());
    }
    let mut second = Command::new(std::env::current_exe()?)
        .arg("second")
        .env("PAGEFOLD_SOCKET", &socket)
        .stdin(Stdio::piped())
        .spawn()?;
    let memory = || pagefold_os::procfs::memory(std::process::id() as i32).map(|memory| memory.pss >> 20).unwrap_or(0);
    println!("first process: {} MiB", memory());
    for _ in 0..30 {
        std::thread::sleep(Duration::from_millis(500));
        if memory() < 48 {
            break;
        }
    }
    if memory() >= 48 {
        // A client works without a daemon as with one; the second process ends with its input.
        return Err(format!(
            "nothing was merged in 15 s: does a daemon listen at {socket}? pagefold daemon starts one"
        )
        .into());
    }
    println!("first process, its half of what both share: {} MiB", memory());
    region[100] = 7;
    println!("first process: byte 100 is now {}", region[100]);
    if let Some(mut input) = second.stdin.take() {
        writeln!(input, "go on")?;
    }
    second.wait()?;
    Ok(())
}
