//! Real guests: QEMU boots the distribution's kernel with a busybox root; its shell runs commands from the console.

use crate::process::{Failure, Running};
pub use boot::Console;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

#[path = "../../tests/common/boot.rs"]
mod boot;

/// A guest that is silent for this long is broken: emulation on a busy machine is slow, but not that slow.
const SILENCE_MAX: Duration = Duration::from_secs(240);

/// What guests boot from.
pub struct Boot {
    kernel: PathBuf,
    initramfs: PathBuf,
    /// The guest kernel's version.
    pub version: String,
}

impl Boot {
    /// Prepares kernel and initial file system in `dir`.
    /// The error names what is missing, and the package that has it.
    pub fn prepare(dir: &Path) -> Result<Boot, Failure> {
        for (program, package) in [
            ("/usr/bin/qemu-system-x86_64", "qemu-system-x86"),
            ("/bin/busybox", "busybox-static"),
            ("/usr/bin/cpio", "cpio"),
        ] {
            if !Path::new(program).exists() {
                return Err(format!("guests need {program} ({package})").into());
            }
        }
        let kernel = boot::kernel(&DRIVERS).ok_or("guests need a kernel with modules (linux-image-cloud-amd64)")?;
        let initramfs = boot::initramfs(dir, Path::new("/bin/busybox"), &kernel.modules, INIT, &[])?;
        Ok(Boot { kernel: kernel.path, initramfs, version: kernel.version })
    }
}

/// A shell that runs each line it reads and says when it is done.
const INIT: &str = "/bin/busybox --install /bin
export PATH=/bin
mount -t proc none /proc
while ! [ -b /dev/vda ]; do sleep 0.1; done
stty -echo
echo GUEST-DONE 0 up
while read -r line; do
  said=$(eval \"$line\" 2>&1 | tail -n 1)
  echo GUEST-DONE $((n += 1)) $said
done
";

/// Modules for an ext4 file system on a virtio disk. The checksum's is looked up at mount time: no dependency names it.
const DRIVERS: [&str; 4] = ["virtio_pci.ko", "virtio_blk.ko", "crc32c_generic.ko", "ext4.ko"];

/// How a guest is set up.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// Its memory.
    pub memory_mib: usize,
    /// Its disk, as QEMU's `-drive` takes it (`file=…,format=raw,cache=none`), or empty for none.
    pub drive: String,
    /// How it runs; plain emulation if not said.
    pub accel: Option<String>,
    /// What runs QEMU (`pagefold run …`), if anything.
    pub under: Vec<String>,
    /// Control group it is charged to: its directory.
    pub group: Option<PathBuf>,
}

/// A guest that runs.
pub struct Guest {
    process: Running,
    input: ChildStdin,
    console: Console,
    commands: usize,
}

impl Guest {
    /// Starts a guest; [`Guest::ready`] waits for it.
    pub fn start(boot: &Boot, setup: &Setup) -> Result<Guest, Failure> {
        let mut words = setup.under.clone();
        words.push("qemu-system-x86_64".to_owned());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg("-accel").arg(setup.accel.as_deref().unwrap_or("tcg"));
        command.args(["-nodefaults", "-no-reboot", "-display", "none"]);
        command.args(["-serial", "stdio", "-m"]).arg(setup.memory_mib.to_string()).arg("-kernel").arg(&boot.kernel);
        command.arg("-initrd").arg(&boot.initramfs);
        command.args(["-append", "console=ttyS0 quiet panic=-1 no_timer_check tsc=unstable"]);
        if !setup.drive.is_empty() {
            command.arg("-drive").arg(format!("{},if=virtio", setup.drive));
        }
        if let Some(group) = &setup.group {
            crate::group::join(&mut command, group);
        }
        let mut process = Running::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()))?;
        let input = process.0.stdin.take().ok_or("no pipe")?;
        let console = Console::read(process.0.stdout.take().ok_or("no pipe")?);
        Ok(Guest { process, input, console, commands: 0 })
    }

    /// Waits until the guest has booted.
    pub fn ready(&mut self) -> Result<(), Failure> {
        self.wait().map(drop)
    }

    /// Begins a command of the guest's shell; [`Guest::wait`] waits for its end.
    pub fn begin(&mut self, command: &str) -> Result<(), Failure> {
        self.commands += 1;
        Ok(self.input.write_all(format!("{command}\n").as_bytes())?)
    }

    /// Waits for the end of the last command and returns the last line it said.
    pub fn wait(&mut self) -> Result<String, Failure> {
        let mark = format!("GUEST-DONE {} ", self.commands);
        let started = Instant::now();
        loop {
            if let Some(line) = self.console.after(&mark) {
                return Ok(line);
            }
            if self.process.0.try_wait()?.is_some() || started.elapsed() > SILENCE_MAX {
                let said = self.console.text();
                let tail: String = said.chars().rev().take(400).collect::<Vec<_>>().into_iter().rev().collect();
                return Err(format!("a guest is gone or silent; it said last: {tail}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// QEMU's process.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }
}

/// Whether all guests said the same, and something.
pub fn same(said: &[String]) -> Result<(), Failure> {
    match said.windows(2).all(|pair| pair[0] == pair[1]) && !said.iter().any(String::is_empty) {
        true => Ok(()),
        false => Err(format!("guests read different things: {said:?}").into()),
    }
}

/// Runs one command on all guests at the same time and returns what each said.
pub fn all(guests: &mut [Guest], command: &str) -> Result<Vec<String>, Failure> {
    guests.iter_mut().try_for_each(|guest| guest.begin(command))?;
    guests.iter_mut().map(Guest::wait).collect()
}
