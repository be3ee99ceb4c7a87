//! The arguments of `pagefold image`.

use crate::{completion_values, units};
use clap::ValueEnum;
use pagefold_image::Error as ImageError;
use pagefold_image::config::Limits;
use pagefold_image::mount::{self, MountKind};
use pagefold_image::oci::Platform;
use pagefold_image::store::{check_domain, check_name};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// The domain where none is named.
pub const DEFAULT_DOMAIN: &str = "default";

/// Store trees by content and mount them so that equal files share page cache
#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold image build --name web:1 ./rootfs
  pagefold image import --name redis:7 ./redis.tar
  pagefold image mount web:1 /mnt/web
  pagefold image exec web:1 -- /bin/ls /
  pagefold image stat --json
  pagefold image umount /mnt/web
  pagefold image rm web:1; pagefold image gc

Equal files share memory within a domain, never across domains: give each owner of data a --domain.
The store: --store, else $PAGEFOLD_STORE, else /var/lib/pagefold/images (root) or ~/.local/share/pagefold/images.")]
pub struct Args {
    /// Directory of the store
    #[arg(long, global = true, value_name = "DIR")]
    pub store: Option<PathBuf>,
    /// Trust boundary: nothing is shared across domains
    #[arg(long, global = true, default_value = DEFAULT_DOMAIN, value_name = "NAME", value_parser = checked(check_domain), add = completion_values::domains_of_images())]
    pub domain: String,
    #[command(subcommand)]
    pub action: Action,
}

#[derive(clap::Subcommand)]
pub enum Action {
    /// Store a directory, a tar archive (`-` for standard input) or an OCI image under a name
    Build(BuildArgs),
    /// Store an OCI layout, OCI archive or docker-archive under a name
    Import(ImportArgs),
    /// Store an image of a registry or a fleet's store under a name
    Pull(PullArgs),
    /// Upload an image to a registry or a fleet's store
    Push(PushArgs),
    /// Mount an image
    Mount(MountArgs),
    /// Unmount an image
    #[command(after_help = "Examples:
  pagefold image umount /mnt
  pagefold image umount --lazy /mnt")]
    Umount {
        /// Where it is mounted
        #[arg(add = completion_values::image_mounts())]
        mountpoint: PathBuf,
        /// Detach now, end when the last user is gone; a mount of kind `directory` must be unused first
        #[arg(long)]
        lazy: bool,
        /// One JSON document
        #[arg(long)]
        json: bool,
    },
    /// List images, or the files of one
    #[command(after_help = "Examples:
  pagefold image ls
  pagefold image ls app:1
  pagefold image ls app:1 --json | jq -r .path
  pagefold image ls --remote s3://BUCKET/fleet")]
    #[command(mut_args(of_remote))]
    Ls {
        /// Image whose files to list
        #[arg(add = completion_values::images())]
        name: Option<String>,
        /// List the images of a fleet's store instead: s3://BUCKET/PREFIX, file:///DIR
        #[arg(long, value_name = "URL", conflicts_with = "name")]
        remote: Option<String>,
        #[command(flatten)]
        registry: RegistryArgs,
    },
    /// Show what images take on disk and in memory, and what sharing saves now
    #[command(after_help = "Examples:
  pagefold image stat
  pagefold image stat app:1 app:2
  pagefold image stat --json | jq .memory_saved_bytes
  sudo pagefold image stat --any /proc/PID-1/root /proc/PID-2/root

--any needs no store. It counts memory that several names show once, and what equal files hold twice. It reads files of
equal size that are in memory, and evicts what this reading loads. Only root learns which files on overlayfs show the
same memory.")]
    Stat {
        /// Images to show (all by default)
        #[arg(add = completion_values::images())]
        names: Vec<String>,
        /// Look at the files of these directories instead, whatever is mounted there
        #[arg(long, value_name = "DIR", num_args = 1.., conflicts_with = "names")]
        any: Vec<PathBuf>,
        /// One JSON document
        #[arg(long)]
        json: bool,
    },
    /// Read every object and compare it with its name
    #[command(after_help = "Examples:
  pagefold image verify
  sudo pagefold image verify --check-frames app:1

Exit status: 0 if all is whole, 1 if something is damaged, or frames may not be looked at.")]
    Verify {
        /// Images to verify (all by default)
        #[arg(add = completion_values::images())]
        names: Vec<String>,
        /// Also compare page frames (root): mounted files must map the objects' own memory
        #[arg(long)]
        check_frames: bool,
        /// One JSON document
        #[arg(long)]
        json: bool,
    },
    /// Remove what no image, mount or build needs
    Gc(GcArgs),
    /// Forget images (gc frees their space)
    #[command(after_help = "Examples:
  pagefold image rm app:1 app:2 && pagefold image gc
  pagefold image rm --remote s3://BUCKET/fleet app:1")]
    #[command(mut_args(of_remote))]
    Rm {
        /// Images to forget
        #[arg(required = true, add = completion_values::images())]
        names: Vec<String>,
        /// Take them away from a fleet's store instead: s3://BUCKET/PREFIX, file:///DIR
        #[arg(long, value_name = "URL")]
        remote: Option<String>,
        #[command(flatten)]
        registry: RegistryArgs,
    },
    /// Write an image as tar, OCI layout or self-contained EROFS image
    #[command(after_help = "Examples:
  pagefold image export app:1 app.tar
  pagefold image export web - | ssh b pagefold image build --name web -
  pagefold image export --format oci app:1 ./layout")]
    Export {
        /// Image to write
        #[arg(add = completion_values::images())]
        name: String,
        /// File or, for oci, new directory; `-` writes a tar to standard output
        output: PathBuf,
        /// Format
        #[arg(long, value_enum, default_value_t = Format::Tar)]
        format: Format,
    },
    /// Run a command with an image as its root
    Exec(ExecArgs),
    /// Predict what storing directories would save, before anything is built
    #[command(after_help = "Examples:
  pagefold image scan ./rootfs-1 ./rootfs-2
  pagefold image scan --json ./rootfs-*")]
    Scan {
        /// Directories to compare
        #[arg(required = true)]
        dirs: Vec<PathBuf>,
        /// One JSON document
        #[arg(long)]
        json: bool,
    },
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold image build --name app:1 ./rootfs
  pagefold image build --name app:1 app.tar.zst
  docker export web | pagefold image build --name web:1 -

A second build of an unchanged directory reads only what stat says has changed. What cannot be kept
(devices, owners a user may not give) is left out and said. Progress shows on a terminal only.")]
pub struct BuildArgs {
    /// Name to store it under
    #[arg(long, value_parser = checked(check_name))]
    pub name: String,
    /// Directory, tar archive (plain, gzip, zstd, xz or bzip2), OCI layout, or `-`
    pub path: PathBuf,
    /// Do not go into other file systems: where one is mounted there is an empty directory
    #[arg(long, short = 'x')]
    pub one_file_system: bool,
    /// Read every file even if stat says it is unchanged
    #[arg(long)]
    pub rehash: bool,
    /// Take the path as it is, even if it looks like an OCI image
    #[arg(long)]
    pub plain: bool,
    /// Also write the self-contained form for native mounts (Linux 7.0 inode_share)
    #[arg(long)]
    pub native: bool,
    /// One JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  skopeo copy docker://redis:7 oci-archive:redis.tar
  pagefold image import --name redis:7 redis.tar
  podman save redis:7 | pagefold image import --name redis:7 -
  pagefold image import --name app:2 --ref v2 --max-bytes 20G ./layout")]
pub struct ImportArgs {
    /// Name to store it under
    #[arg(long, value_parser = checked(check_name))]
    pub name: String,
    /// OCI layout or skopeo's `dir:`, an archive of a layout, or what `podman save` and `docker save` write (`-` for
    /// standard input)
    pub path: PathBuf,
    /// Tag (`redis:7` finds `docker.io/library/redis:7`) or digest to take when there are several images
    #[arg(long = "ref", value_name = "TAG")]
    pub reference: Option<String>,
    /// What its programs run on, such as linux/arm64, when there are images for several [default: this machine]
    #[arg(long, value_name = "OS/ARCH")]
    pub platform: Option<Platform>,
    #[command(flatten)]
    pub limits: LimitArgs,
    /// One JSON document
    #[arg(long)]
    pub json: bool,
}

/// What an image's layers may hold.
#[derive(clap::Args)]
pub struct LimitArgs {
    /// Most bytes of unpacked content, of all layers together
    #[arg(long, value_name = "SIZE", default_value = "1T", value_parser = units::size)]
    pub max_bytes: u64,
    /// Most entries, of all layers together
    #[arg(long, value_name = "COUNT", default_value_t = Limits::default().entries)]
    pub max_entries: u64,
}

#[derive(clap::Args)]
pub struct RegistryArgs {
    /// Talk to the registry or S3 server without TLS; a registry of this machine may do without in any case
    #[arg(long)]
    pub plain_http: bool,
    /// Try again after such a time without a byte
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = units::duration)]
    pub timeout: Duration,
    /// One JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold image pull redis:7
  pagefold image pull --platform linux/arm64 registry.example/app:2
  pagefold image pull localhost:5000/app@sha256:DIGEST
  pagefold image pull s3://BUCKET/fleet/app:2

Layers that an image of the store has too are neither fetched nor unpacked. A pull that was killed goes on where it
ended. Logins are those of podman login and docker login. Of a fleet's store (s3://, file://, https://, http://) only
objects that the store lacks are fetched; logins are those of the environment (AWS_ACCESS_KEY_ID and so on).
Needs pagefold-remote, a program of its own.")]
pub struct PullArgs {
    /// Image as podman and docker name it: without a registry it is docker.io's. Or its address in a fleet's store:
    /// s3://BUCKET/PREFIX/NAME:TAG, file:///DIR/NAME:TAG, https://HOST/PATH/NAME:TAG
    #[arg(value_name = "REF")]
    pub reference: String,
    /// Name to store it under [default: REF; of a fleet's store NAME:TAG]
    #[arg(long, value_parser = checked(check_name))]
    pub name: Option<String>,
    /// What its programs run on, such as linux/arm64 [default: this machine]
    #[arg(long, value_name = "OS/ARCH")]
    pub platform: Option<Platform>,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub registry: RegistryArgs,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold image push app:1 registry.example/team/app:1
  pagefold image push web localhost:5000/web --json
  pagefold image push app:1 s3://BUCKET/fleet/app:1

In a registry the image becomes one layer: the same image always the same bytes. Only what the registry lacks is
uploaded. What exec --record-profile has learned goes along, and a pull brings it. Logins are those of podman login and
docker login. To a fleet's store (s3://, file://) only objects that it lacks are uploaded, packed; logins are those of
the environment (AWS_ACCESS_KEY_ID and so on). Needs pagefold-remote, a program of its own.")]
pub struct PushArgs {
    /// Image to upload
    #[arg(add = completion_values::images())]
    pub name: String,
    /// Name of the image in the registry, or its address in a fleet's store: s3://BUCKET/PREFIX/NAME:TAG,
    /// file:///DIR/NAME:TAG
    #[arg(value_name = "REF")]
    pub reference: String,
    #[command(flatten)]
    pub registry: RegistryArgs,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold image gc --dry-run
  pagefold image gc
  pagefold image gc --remote s3://BUCKET/fleet --dry-run

With --remote packs go that no image of a fleet's store names. Hosts may push at the same time. It needs pagefold-remote,
a program of its own, and logins as push does. image rm --remote takes an image away before.")]
#[command(mut_args(of_remote))]
pub struct GcArgs {
    /// Say what would go, remove nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Collect in a fleet's store instead: s3://BUCKET/PREFIX, file:///DIR
    #[arg(long, value_name = "URL")]
    pub remote: Option<String>,
    /// Of a fleet's store keep packs that are younger: a push that was killed goes on with them
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = units::duration, requires = "remote")]
    pub keep: Duration,
    /// Wait so long at most for pushes in progress; what they may need stays for the next collection
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = units::duration, requires = "remote")]
    pub wait: Duration,
    #[command(flatten)]
    pub registry: RegistryArgs,
}

/// Options that are of use only where something is far away need `--remote`.
fn of_remote(option: clap::Arg) -> clap::Arg {
    match option.get_id().as_str() {
        "plain_http" | "timeout" => option.requires("remote"),
        _ => option,
    }
}

/// A name that `check` has nothing against.
fn checked(check: fn(&str) -> Result<(), ImageError>) -> impl Fn(&str) -> Result<String, String> + Clone {
    move |name| check(name).map(|()| name.to_owned()).map_err(|error| error.to_string())
}

#[derive(clap::Args)]
pub struct MountOptions {
    /// How the metadata is mounted
    #[arg(long, value_enum, default_value_t = KindArg::Auto)]
    pub kind: KindArg,
    /// Directory that keeps changes; without it the mount is read-only
    #[arg(long, value_name = "DIR")]
    pub upper: Option<PathBuf>,
    /// Ignore set-user-id bits
    #[arg(long)]
    pub nosuid: bool,
    /// Refuse device nodes
    #[arg(long)]
    pub nodev: bool,
    /// Refuse to run programs
    #[arg(long)]
    pub noexec: bool,
    /// Do not prefetch what `exec --record-profile` has recorded
    #[arg(long)]
    pub no_prefetch: bool,
}

impl MountOptions {
    pub fn options(&self) -> mount::Options {
        mount::Options {
            kind: match self.kind {
                KindArg::Auto => MountKind::Auto,
                KindArg::Native => MountKind::Native,
                KindArg::Erofs => MountKind::Erofs,
                KindArg::Loop => MountKind::Loop,
                KindArg::Directory => MountKind::Directory,
            },
            upper: self.upper.clone(),
            nosuid: self.nosuid,
            nodev: self.nodev,
            noexec: self.noexec,
            no_prefetch: self.no_prefetch,
            coming: None,
        }
    }
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold image mount app:1 /mnt
  pagefold image mount app:1 /mnt --upper ./changes --nosuid --nodev
  pagefold image mount app:1 /mnt --json
  pagefold image mount --lazy s3://BUCKET/fleet/app:1 /mnt

With --lazy an image of a fleet's store is mounted at once, and its files come as programs open them. A process in the
background fetches first what `exec --record-profile` recorded before the push, then what is opened, then the rest; with
the last of it the store has the image. Files that are here are read without that process. It needs root and
pagefold-remote, a program of its own; logins are those of `image pull`.")]
#[command(mut_args(of_lazy))]
pub struct MountArgs {
    /// Image to mount; with --lazy its address: s3://BUCKET/PREFIX/NAME:TAG, file:///DIR/NAME:TAG,
    /// https://HOST/PATH/NAME:TAG
    #[arg(add = completion_values::images())]
    pub name: String,
    /// Directory to mount it on; what is in it is hidden meanwhile
    pub mountpoint: PathBuf,
    #[command(flatten)]
    pub options: MountOptions,
    /// Mount an image of a fleet's store, of which nothing needs to be here
    #[arg(long)]
    pub lazy: bool,
    /// With --lazy: name to store it under [default: NAME:TAG]
    #[arg(long = "name", value_name = "NAME", value_parser = checked(check_name), requires = "lazy")]
    pub store_as: Option<String>,
    /// With --lazy: fetch only what is opened; the store gets the image if that was all of it
    #[arg(long, requires = "lazy")]
    pub only_opened: bool,
    #[command(flatten)]
    pub registry: RegistryArgs,
}

/// Options about a server are of use only with `--lazy`.
fn of_lazy(option: clap::Arg) -> clap::Arg {
    match option.get_id().as_str() {
        "plain_http" | "timeout" => option.requires("lazy"),
        _ => option,
    }
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  pagefold image exec app:1 -- /bin/sh
  pagefold image exec app:1 --rw --bind ./data:/data -e HOME=/root -- env
  sudo pagefold image exec app:1 --record-profile=20 -- /usr/bin/server

With --record-profile the image remembers what the command read; later starts prefetch it.
Without a command the image's own is run. It takes this process over: its exit status and signals are passed on.
Exit status of exec itself: 125 if it fails, 126 if the command cannot be run, 127 if it is not found.")]
pub struct ExecArgs {
    /// Image to run in
    #[arg(add = completion_values::images())]
    pub name: String,
    #[command(flatten)]
    pub options: MountOptions,
    /// Let the command write; changes vanish at its end
    #[arg(long)]
    pub rw: bool,
    /// Show a host path in the tree
    #[arg(long = "bind", value_name = "HOST:TREE", value_parser = bind)]
    pub binds: Vec<(PathBuf, PathBuf)>,
    /// Set an environment variable; a name alone passes the caller's on
    #[arg(long = "env", short = 'e', value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// Record what the command reads, for at most SECONDS, so that later starts prefetch it (root)
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "60")]
    pub record_profile: Option<u32>,
    /// User to run as, by name in the tree or number (root; the image's own by default)
    #[arg(long, short = 'u', value_name = "USER[:GROUP]", default_value = "", hide_default_value = true)]
    pub user: String,
    /// Directory of the tree to start in (the image's own by default)
    #[arg(long, value_name = "DIR", default_value = "", hide_default_value = true)]
    pub workdir: String,
    /// Command and its arguments (the image's own by default)
    #[arg(last = true)]
    pub command: Vec<OsString>,
}

fn bind(text: &str) -> Result<(PathBuf, PathBuf), String> {
    let (from, to) = text.split_once(':').ok_or("give HOST:TREE")?;
    Ok((PathBuf::from(from), PathBuf::from(to)))
}

#[derive(Clone, Copy, clap::ValueEnum)]
pub enum KindArg {
    /// The best this kernel and user have
    Auto,
    /// Self-contained EROFS with inode_share (Linux 7.0)
    Native,
    /// EROFS metadata from the plain file (Linux 6.12, root)
    Erofs,
    /// EROFS metadata through a loop device (root)
    Loop,
    /// Metadata directory (rootless from Linux 6.16)
    Directory,
}

impl KindArg {
    /// Its name as an argument.
    pub fn name(self) -> String {
        self.to_possible_value().expect("none is hidden").get_name().to_owned()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// One tar archive
    Tar,
    /// OCI layout with one layer
    Oci,
    /// EROFS image with data and fingerprints
    Erofs,
}
