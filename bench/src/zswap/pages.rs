//! Real pages: the memory of live programs and guests.

use crate::files::data_ranges;
use crate::instance::Instance;
use crate::process::{Running, wait_for};
use crate::redis::Redis;
use crate::restore::{Undo, folder};
use crate::vm::Console;
use pagefold_os::pagemap::{ENTRY_BYTES, PageEntry};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The longest time for a guest to reach its shell, and to read the files.
const SHELL_MAX: Duration = Duration::from_secs(180);

/// Present anonymous memory of a process, up to `bytes_max` bytes.
fn memory_of(pid: u32, bytes_max: usize) -> io::Result<Vec<u8>> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut pages = Vec::new();
    for line in maps.lines() {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let anonymous = fields.get(5).is_none_or(|name| *name == "[heap]");
        let Some((start, end)) = fields[0].split_once('-').filter(|_| fields[1].starts_with("rw") && anonymous) else {
            continue;
        };
        let parse = |text| u64::from_str_radix(text, 16).map_err(io::Error::other);
        let (start, end) = (parse(start)?, parse(end)?);
        let mut page = [0; 4096];
        for at in (start..end).step_by(4096) {
            let (mut entry, offset) = ([0; ENTRY_BYTES], at / 4096 * ENTRY_BYTES as u64);
            if pages.len() >= bytes_max || pagemap.read_exact_at(&mut entry, offset).is_err() {
                break;
            }
            // Only present pages: others hold nothing.
            if PageEntry::from_bytes(entry).is_present() && memory.read_exact_at(&mut page, at).is_ok() {
                pages.extend_from_slice(&page);
            }
        }
    }
    Ok(pages)
}

/// Half a Python heap of records, half a redis-server with a data set, as they lie in memory.
pub fn unrelated(bytes: usize) -> io::Result<Vec<u8>> {
    let program = "import json,sys\n\
        rows=[{'id':i,'name':f'user {i*7919%100003}','mail':f'u{i}@example.org','tags':[i%7,i%11],'score':i*0.37} \
        for i in range(int(sys.argv[1]))]\n\
        text=[json.dumps(r) for r in rows[::3]]\nprint('ready',flush=True)\nsys.stdin.read()\n";
    let rows = (bytes / 2 / 600).to_string();
    let mut command = Command::new("python3");
    command.args(["-c", program, &rows]);
    let python = Instance::start(&mut command)?;
    python.ready().map_err(io::Error::other)?;
    let mut pages = memory_of(python.pid() as u32, bytes / 2)?;
    drop(python);
    match redis(bytes / 2) {
        Ok(found) => pages.extend(found),
        Err(error) => eprintln!("SKIPPED: redis-server: {error}"),
    }
    if pages.is_empty() { Err(io::Error::other("no pages")) } else { Ok(pages) }
}

fn redis(bytes: usize) -> io::Result<Vec<u8>> {
    let (dir, _gone) = folder("redis")?;
    let redis = Redis::start(Command::new("redis-server"), &dir)?;
    // Values as caches hold them: a few hundred bytes of text with numbers in it.
    let entry = |key: usize| {
        let value = format!(
            "{{\"session\":\"{:016x}\",\"user\":{key},\"path\":\"/shop/item/{}\",\"cart\":[{},{},{}],\"agent\":\"Mozilla/5.0 (X11; \
             Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/12{}.0.0.0 Safari/537.36\",\"seen\":{}}}",
            (key as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            key % 977,
            key % 13,
            key % 101,
            key % 7,
            key % 9,
            1_700_000_000 + key * 37
        );
        (format!("session:{key}"), value.repeat(2))
    };
    redis.set((0..bytes / 700).map(entry))?;
    memory_of(redis.process.0.id(), bytes)
}

/// Memory of guests that were booted apart from one kernel and one initial file system, under emulation.
pub fn guests(count: usize) -> io::Result<Vec<u8>> {
    let find = |prefix: &str| -> io::Result<PathBuf> {
        let entries = fs::read_dir("/boot")?.filter_map(Result::ok).map(|entry| entry.path());
        let fits = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix));
        entries.filter(fits).max().ok_or_else(|| io::Error::other(format!("no /boot/{prefix}*")))
    };
    let (kernel, initrd) = (find("vmlinuz-")?, find("initrd.img-")?);
    let mut running = Vec::new();
    for number in 0..count {
        let memory = PathBuf::from(format!("/dev/shm/pagefold-bench-guest-{}-{number}", std::process::id()));
        let gone = Undo::remove(memory.clone());
        let mut command = Command::new("qemu-system-x86_64");
        command.args("-accel tcg -cpu max -smp 1 -m 512 -nographic -no-reboot -net none".split(' ')).arg("-object");
        command.arg(format!("memory-backend-file,id=m,size=512M,mem-path={},share=on", memory.display()));
        command.args(["-machine", "pc,memory-backend=m", "-kernel"]).arg(&kernel).arg("-initrd").arg(&initrd);
        command.args(["-append", "console=ttyS0 quiet break=premount"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        running.push((Running::start(&mut command)?, memory, gone));
    }
    for (number, (guest, ..)) in running.iter_mut().enumerate() {
        let (Some(output), Some(mut input)) = (guest.0.stdout.take(), guest.0.stdin.take()) else { continue };
        let console = Console::read(output);
        let shows = |mark: &str| wait_for(mark, SHELL_MAX, || console.text().contains(mark).then_some(()));
        shows("(initramfs)")?;
        // Each guest copies another part of the files, so that their memories differ as guests' do.
        writeln!(
            input,
            "n=0; find /usr /lib /bin -type f 2>/dev/null | while read f; do n=$((n+1)); \
             [ $((n % 4)) = {} ] || cat \"$f\" >> /tmp/copy$((n % 7)) 2>/dev/null; done; echo all-''read",
            number % 4
        )?;
        shows("all-read")?;
    }
    let mut pages = Vec::new();
    for (_, memory, _) in &running {
        let file = File::open(memory)?;
        let mut page = [0; 4096];
        // Pages that the guest never touched are holes of the file.
        for at in data_ranges(&file).into_iter().flat_map(|range| range.step_by(4096)) {
            file.read_exact_at(&mut page, at)?;
            pages.extend_from_slice(&page);
        }
    }
    Ok(pages)
}
