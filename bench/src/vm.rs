//! Real guests: QEMU boots the distribution's kernel with a busybox root, whose shell runs commands from the console.

use crate::process::{Failure, Running};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

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
    ///
    /// # Errors
    /// What is missing, and the package that has it.
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
        let (kernel, version, modules) =
            find_kernel().ok_or("guests need a kernel with modules (linux-image-cloud-amd64)")?;
        let initramfs = initramfs(dir, &modules)?;
        Ok(Boot { kernel, initramfs, version })
    }
}

/// The newest kernel in /boot whose modules are there, and the modules for an ext4 file system on a virtio disk.
fn find_kernel() -> Option<(PathBuf, String, Vec<PathBuf>)> {
    let mut kernels: Vec<PathBuf> = std::fs::read_dir("/boot").ok()?.flatten().map(|entry| entry.path()).collect();
    kernels.sort();
    kernels.into_iter().rev().find_map(|kernel| {
        let version = kernel.file_name()?.to_str()?.strip_prefix("vmlinuz-")?.to_owned();
        let home = Path::new("/lib/modules").join(&version);
        let table = std::fs::read_to_string(home.join("modules.dep")).ok()?;
        let mut modules: Vec<PathBuf> = Vec::new();
        // The checksum is looked up by name at mount time, so no dependency names its module.
        for driver in ["virtio_pci.ko", "virtio_blk.ko", "crc32c_generic.ko", "ext4.ko"] {
            // A driver that is built in has no line.
            let Some(line) = table.lines().find(|line| line.split(':').next().is_some_and(|n| n.ends_with(driver)))
            else {
                continue;
            };
            // What it depends on comes after the colon, the last one first to load.
            for name in line.split([':', ' ']).filter(|part| !part.is_empty()).rev() {
                let module = home.join(name);
                if !modules.contains(&module) {
                    modules.push(module);
                }
            }
        }
        (!modules.is_empty()).then_some((kernel, version, modules))
    })
}

/// Makes the initial file system: a shell that runs each line it reads and says when it is done.
fn initramfs(dir: &Path, modules: &[PathBuf]) -> Result<PathBuf, Failure> {
    let root = dir.join("guest-root");
    for name in ["bin", "dev", "proc", "sys", "lib", "mnt"] {
        std::fs::create_dir_all(root.join(name))?;
    }
    std::fs::copy("/bin/busybox", root.join("bin/busybox"))?;
    let mut init = "#!/bin/busybox sh\n/bin/busybox --install /bin\nexport PATH=/bin\nmount -t proc none /proc\n\
                    mount -t devtmpfs none /dev\n"
        .to_owned();
    for (n, module) in modules.iter().enumerate() {
        std::fs::copy(module, root.join(format!("lib/{n}.ko")))?;
        init.push_str(&format!("insmod /lib/{n}.ko\n"));
    }
    init.push_str(
        "while ! [ -b /dev/vda ]; do sleep 0.1; done\nstty -echo\necho GUEST-DONE 0 up\n\
         while read -r line; do\n  said=$(eval \"$line\" 2>&1 | tail -n 1)\n  echo GUEST-DONE $((n += 1)) $said\ndone\n",
    );
    let path = root.join("init");
    std::fs::write(&path, init)?;
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let archive = dir.join("guest-root.cpio");
    let mut cpio = Command::new("cpio");
    cpio.args(["--quiet", "-o", "-H", "newc"]).current_dir(&root).stdin(Stdio::piped());
    let mut child = cpio.stdout(std::fs::File::create(&archive)?).spawn()?;
    let mut names = ".\nbin\nbin/busybox\ndev\nproc\nsys\nlib\nmnt\ninit\n".to_owned();
    (0..modules.len()).for_each(|n| names.push_str(&format!("lib/{n}.ko\n")));
    child.stdin.take().ok_or("no pipe")?.write_all(names.as_bytes())?;
    if !child.wait()?.success() {
        return Err("cpio failed".into());
    }
    Ok(archive)
}

/// How a guest is set up.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// Its memory.
    pub memory_mib: usize,
    /// Its disk, as QEMU's `-drive` takes it (`file=…,format=raw,cache=none`), or nothing but `extra`.
    pub drive: String,
    /// How it runs; plain emulation if not said.
    pub accel: Option<String>,
    /// More arguments for QEMU.
    pub extra: Vec<String>,
    /// What runs QEMU (`pagefold run …`), if anything.
    pub under: Vec<String>,
    /// Environment of that.
    pub env: Vec<(String, String)>,
    /// Control group it is charged to: its directory.
    pub group: Option<PathBuf>,
}

/// A guest that runs.
pub struct Guest {
    process: Running,
    input: ChildStdin,
    said: Arc<Mutex<String>>,
    commands: usize,
}

impl Guest {
    /// Starts a guest; [`Guest::ready`] waits for it.
    ///
    /// # Errors
    /// QEMU cannot be started.
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
        command.args(&setup.extra).envs(setup.env.iter().cloned());
        if let Some(group) = &setup.group {
            crate::group::join(&mut command, group);
        }
        let errors =
            if std::env::var_os("PAGEFOLD_BENCH_VERBOSE").is_some() { Stdio::inherit() } else { Stdio::null() };
        let mut process = Running::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors))?;
        let input = process.0.stdin.take().ok_or("no pipe")?;
        let mut output = process.0.stdout.take().ok_or("no pipe")?;
        let said = Arc::new(Mutex::new(String::new()));
        let to = said.clone();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(got @ 1..) = output.read(&mut bytes) {
                to.lock()
                    .expect("no thread panics while it holds the lock")
                    .push_str(&String::from_utf8_lossy(&bytes[..got]));
            }
        });
        Ok(Guest { process, input, said, commands: 0 })
    }

    /// Waits until the guest has booted.
    ///
    /// # Errors
    /// It ended, or says nothing.
    pub fn ready(&mut self) -> Result<(), Failure> {
        self.wait().map(drop)
    }

    /// Begins a command of the guest's shell; [`Guest::wait`] waits for its end.
    ///
    /// # Errors
    /// The guest is gone.
    pub fn begin(&mut self, command: &str) -> Result<(), Failure> {
        self.commands += 1;
        Ok(self.input.write_all(format!("{command}\n").as_bytes())?)
    }

    /// Waits for the end of the last command and returns the last line it said.
    ///
    /// # Errors
    /// The guest ended, or is silent for too long.
    pub fn wait(&mut self) -> Result<String, Failure> {
        let mark = format!("GUEST-DONE {} ", self.commands);
        let started = Instant::now();
        loop {
            {
                let said = self.said.lock().expect("no thread panics while it holds the lock");
                if let Some(at) = said.find(&mark)
                    && let Some(line) = said[at + mark.len()..].split_once('\n')
                {
                    return Ok(line.0.trim().to_owned());
                }
            }
            if self.process.0.try_wait()?.is_some() || started.elapsed() > SILENCE_MAX {
                let said = self.said.lock().expect("no thread panics while it holds the lock");
                let tail: String = said.chars().rev().take(400).collect::<Vec<_>>().into_iter().rev().collect();
                return Err(format!("a guest is gone or silent; it said last: {tail}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Runs a command to its end.
    ///
    /// # Errors
    /// As [`Guest::wait`].
    pub fn run(&mut self, command: &str) -> Result<String, Failure> {
        self.begin(command)?;
        self.wait()
    }

    /// QEMU's process.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }
}

/// Whether all guests said the same, and something.
///
/// # Errors
/// They did not.
pub fn same(said: &[String]) -> Result<(), Failure> {
    match said.windows(2).all(|pair| pair[0] == pair[1]) && !said.iter().any(String::is_empty) {
        true => Ok(()),
        false => Err(format!("guests read different things: {said:?}").into()),
    }
}

/// Runs one command on all guests at the same time and returns what each said.
///
/// # Errors
/// As [`Guest::wait`].
pub fn all(guests: &mut [Guest], command: &str) -> Result<Vec<String>, Failure> {
    guests.iter_mut().try_for_each(|guest| guest.begin(command))?;
    guests.iter_mut().map(Guest::wait).collect()
}
