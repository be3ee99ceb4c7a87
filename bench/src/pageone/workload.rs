//! Processes that hold known data: they are merged, and they prove that their data stays theirs.

use crate::instance::Instance;
use crate::process::{self, Failure};
use crate::stats::{self, quantile};
use clap::ValueEnum;
use pagefold_agent::client::{Client, Region};
use pagefold_os::{PAGE_SIZE, procfs};
use std::io::BufRead;
use std::path::Path;
use std::time::{Duration, Instant};

/// Pages in one synthetic file: 20 MB.
const FILE_PAGES: u64 = 5120;

/// How the data lies in the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PageLayout {
    /// Files of 20 MB in an order of each process's own.
    Files,
    /// The same, each page with a prefix of zeros.
    Zero,
    /// Single pages in an order of each process's own: no two duplicates are neighbours. Our worst case.
    Scattered,
    /// As `Files`, in memory that is asked to be huge pages, as that of virtual machines is.
    Huge,
}

impl PageLayout {
    /// Its name, as options have it.
    pub fn name(self) -> String {
        self.to_possible_value().expect("no layout is skipped").get_name().to_owned()
    }

    fn unit(self) -> u64 {
        if self == PageLayout::Scattered { 1 } else { FILE_PAGES }
    }
}

/// The size of a workload.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// How the data lies.
    pub layout: PageLayout,
    /// Processes.
    pub processes: u64,
    /// MiB of each.
    pub mib: u64,
    /// How much of it all of them hold, in percent. The rest is each one's own.
    pub equal_percent: u64,
}

impl Shape {
    /// Pages of all processes.
    pub fn pages(&self) -> u64 {
        self.processes * self.mib * 256
    }
}

/// Processes that hold data and obey the driver.
pub struct Workload(Vec<Instance>);

impl Workload {
    /// Starts the processes; each has memory, managed through `socket` if there is one, with nothing in it yet.
    pub fn start(shape: Shape, socket: Option<&Path>) -> Result<Workload, Failure> {
        let mut workload = Workload(Vec::new());
        for number in 0..shape.processes {
            let mut command = process::own("pageone")?;
            command.args(["--client", &shape.layout.name()]);
            command.args([shape.mib, shape.equal_percent, number].map(|number| number.to_string()));
            if let Some(socket) = socket {
                command.arg(socket);
            }
            let member = Instance::start(&mut command)?;
            member.expect("made")?;
            workload.0.push(member);
        }
        Ok(workload)
    }

    /// Fills all memory, one process after the other: filling is not measured, and two processes would disturb each other.
    pub fn fill(&mut self) -> Result<(), Failure> {
        self.0.iter_mut().try_for_each(|member| {
            member.send("fill")?;
            Ok(member.expect("full")?)
        })
    }

    /// Has all processes do `order` and waits until each has said `wanted`.
    pub fn tell(&mut self, order: &str, wanted: &str) -> Result<(), Failure> {
        self.order(order)?;
        Ok(self.0.iter().try_for_each(|member| member.expect(wanted))?)
    }

    fn order(&mut self, order: &str) -> Result<(), Failure> {
        Ok(self.0.iter_mut().try_for_each(|member| member.send(order))?)
    }

    /// Has the processes write to pages anywhere for `time`, `rate` writes a second in all; content stays as it is. Calls
    /// `meanwhile` while they do, and returns how many writes there were and the longest of their 99 % times, in
    /// nanoseconds.
    pub fn churn(
        &mut self,
        rate: u64,
        time: Duration,
        meanwhile: impl FnOnce(&Workload),
    ) -> Result<(u64, u64), Failure> {
        let each = rate as f64 / self.0.len() as f64;
        self.order(&format!("churn {each} {}", time.as_millis()))?;
        meanwhile(self);
        self.0.iter().try_fold((0, 0), |(writes, longest), member| {
            let said = member.line()?;
            let (count, p99) = said.split_once(' ').ok_or("no count of writes")?;
            Ok((writes + count.parse::<u64>()?, longest.max(p99.parse()?)))
        })
    }

    /// Has each process take a page fault every few milliseconds for `time`, in memory that is not managed; calls
    /// `meanwhile` while they do.
    pub fn fault_elsewhere<T>(&mut self, time: Duration, meanwhile: impl FnOnce() -> T) -> Result<T, Failure> {
        self.order(&format!("fault {}", time.as_millis()))?;
        let result = meanwhile();
        self.0.iter().try_for_each(|member| member.expect("faulted"))?;
        Ok(result)
    }

    /// Has the first process write to its first `pages` pages; returns how long each write took, in nanoseconds, ascending.
    pub fn write_to(&mut self, pages: u64) -> Result<Vec<u64>, Failure> {
        let member = self.0.first_mut().ok_or("no process")?;
        member.send(&format!("write {pages}"))?;
        let said = member.line()?;
        let mut times = said.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>()?;
        times.sort_unstable();
        Ok(times)
    }

    /// Proves that every process holds what it wrote.
    pub fn check(&mut self) -> Result<(), Failure> {
        self.tell("check", "intact")
    }

    /// The processes.
    pub fn pids(&self) -> Vec<i32> {
        self.0.iter().map(Instance::pid).collect()
    }

    /// Sum of the processes' proportional memory, in bytes.
    pub fn pss(&self) -> u64 {
        self.pids().into_iter().filter_map(|pid| procfs::memory(pid).ok()).map(|memory| memory.pss).sum()
    }
}

enum Memory {
    Ours(Region),
    Plain(pagefold_os::mem::Mapping),
}

/// A process of the workload.
pub fn member(args: &[String]) -> Result<(), Failure> {
    let [layout, mib, equal, number, socket @ ..] = args else { return Err("--client: too few words".into()) };
    let layout = PageLayout::from_str(layout, false)?;
    let (mib, number): (u64, u64) = (mib.parse()?, number.parse()?);
    let pages = mib * 256;
    let len = pages as usize * PAGE_SIZE;
    let mut memory = match socket.first() {
        Some(socket) => Memory::Ours(Region::new(&Client::connect(Path::new(socket), "bench")?, len)?),
        None => Memory::Plain(pagefold_os::mem::Mapping::anonymous(len)?),
    };
    if layout == PageLayout::Huge {
        let bytes = bytes(&mut memory);
        // SAFETY: the range is the whole mapping, which `bytes` borrows; the advice changes no byte.
        unsafe { pagefold_os::mem::advise(bytes.as_ptr() as u64, bytes.len() as u64, libc::MADV_HUGEPAGE) }?;
    }
    let order = order(layout, pages, pages * equal.parse::<u64>()? / 100, number);
    let zero = layout == PageLayout::Zero;
    let mut written = 0;
    println!("made");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let bytes = bytes(&mut memory);
        match line.split_whitespace().collect::<Vec<_>>().as_slice() {
            ["fill"] => {
                for (place, id) in order.iter().enumerate() {
                    fill(&mut bytes[place * PAGE_SIZE..][..PAGE_SIZE], *id, zero);
                }
                println!("full");
            }
            ["merge"] => {
                // SAFETY: the range is the whole mapping, which `bytes` borrows; merging keeps its content.
                unsafe { pagefold_os::mem::advise(bytes.as_ptr() as u64, bytes.len() as u64, libc::MADV_MERGEABLE) }?;
                println!("merging");
            }
            ["write", count] => {
                written = count.parse::<usize>()?.min(pages as usize);
                let mut times = String::new();
                for place in 0..written {
                    let byte = &raw mut bytes[place * PAGE_SIZE];
                    let began = Instant::now();
                    // SAFETY: the pointer is into `bytes`, by the index just checked; volatile, so that the write happens
                    // here.
                    unsafe { byte.write_volatile(!byte.read_volatile()) };
                    times.push_str(&format!("{} ", began.elapsed().as_nanos()));
                }
                println!("{times}");
            }
            ["churn", rate, millis] => {
                let (rate, time) = (rate.parse::<f64>()?, Duration::from_millis(millis.parse()?));
                let (mut times, mut random) = (Vec::new(), fastrand::Rng::with_seed(number));
                let began = Instant::now();
                while began.elapsed() < time {
                    while (times.len() as f64) < began.elapsed().min(time).as_secs_f64() * rate {
                        let place = random.u64(0..pages) as usize;
                        let byte = &raw mut bytes[place * PAGE_SIZE];
                        let before = Instant::now();
                        // SAFETY: the pointer is into `bytes`, by the index just checked; volatile, so that it is written
                        // although nothing changes.
                        unsafe { byte.write_volatile(byte.read_volatile()) };
                        times.push(before.elapsed().as_nanos() as u64);
                        if began.elapsed() > time {
                            break;
                        }
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                times.sort_unstable();
                println!("{} {}", times.len(), quantile(&times, 0.99).unwrap_or(0));
            }
            ["fault", millis] => {
                let (time, began) = (Duration::from_millis(millis.parse()?), Instant::now());
                let elsewhere = pagefold_os::mem::Mapping::anonymous(PAGE_SIZE)?;
                while began.elapsed() < time {
                    // SAFETY: the mapping is ours and one page long; no reference to it exists.
                    unsafe {
                        elsewhere.as_ptr().write_volatile(1);
                        pagefold_os::mem::advise(elsewhere.addr(), PAGE_SIZE as u64, libc::MADV_DONTNEED)?;
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
                println!("faulted");
            }
            ["check"] => {
                let mut expected = vec![0; PAGE_SIZE];
                let right = order.iter().enumerate().all(|(place, id)| {
                    fill(&mut expected, *id, zero);
                    if place < written {
                        expected[0] = !expected[0];
                    }
                    bytes[place * PAGE_SIZE..][..PAGE_SIZE] == expected[..]
                });
                println!("{}", if right { "intact" } else { "wrong" });
            }
            _ => break,
        }
    }
    Ok(())
}

fn bytes(memory: &mut Memory) -> &mut [u8] {
    match memory {
        Memory::Ours(region) => region,
        // SAFETY: the mapping is readable, writable and `len` bytes long, and is borrowed mutably through `memory`.
        Memory::Plain(map) => unsafe { std::slice::from_raw_parts_mut(map.as_ptr(), map.len()) },
    }
}

/// Which page's content lies at each place: one of the first `equal`, which all processes have, or one of its own.
fn order(layout: PageLayout, pages: u64, equal: u64, number: u64) -> Vec<u64> {
    let unit = layout.unit();
    let units = stats::order(pages.div_ceil(unit) as usize, number);
    let ids = units.into_iter().flat_map(|first| first as u64 * unit..(first as u64 * unit + unit).min(pages));
    ids.map(|id| if id < equal { id } else { id | (number + 1) << 40 }).collect()
}

/// Writes the content of page `id`: random, after a prefix of zeros (0 to 256 bytes) if `zero`.
fn fill(page: &mut [u8], id: u64, zero: bool) {
    fastrand::Rng::with_seed(id).fill(page);
    if zero {
        let prefix = (id.wrapping_mul(0xD134_2543_DE82_EF95) >> 40) as usize % 257;
        page[..prefix].fill(0);
    }
}
