//! What the tests of pulls and pushes share: stores, images, and a registry that does as it is told.

// Each test program uses a part of this.
#![allow(dead_code)]

pub mod chunked;
pub mod fleet;

use base64::Engine;
use pagefold_image::store::Store;
use serde_json::{Value, json};
use sha2::Digest;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The program under test.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_pagefold-remote");

/// How long any wait of a test may take.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn digest(bytes: &[u8]) -> String {
    let hash = sha2::Sha256::digest(bytes);
    hash.iter().fold("sha256:".to_string(), |text, byte| text + &format!("{byte:02x}"))
}

/// Bytes that do not compress, other ones for each `seed`.
pub fn noise(seed: u32, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    fastrand::Rng::with_seed(u64::from(seed)).fill(&mut bytes);
    bytes
}

/// A layer with these files, as a tar archive.
pub fn layer(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, path, *bytes).unwrap();
    }
    archive.into_inner().unwrap()
}

/// An image as a registry has it.
#[derive(Clone, Default)]
pub struct Image {
    /// By digest: the configuration and the packed layers.
    pub blobs: BTreeMap<String, Vec<u8>>,
    /// The digests of the packed layers, lowest first.
    pub layers: Vec<String>,
    pub config: String,
    pub manifest: Vec<u8>,
}

/// A layer as a registry has it.
pub struct Packed {
    pub blob: Vec<u8>,
    pub annotations: BTreeMap<String, String>,
    /// The digest of the unpacked layer, by the configuration.
    pub diff_id: String,
    pub media_type: &'static str,
}

/// The layer, packed with gzip.
pub fn gzip(layer: &[u8]) -> Packed {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(layer).unwrap();
    Packed {
        blob: gzip.finish().unwrap(),
        annotations: BTreeMap::new(),
        diff_id: digest(layer),
        media_type: "application/vnd.oci.image.layer.v1.tar+gzip",
    }
}

/// The image of these layers for an architecture.
pub fn image_for(architecture: &str, layers: &[Vec<u8>]) -> Image {
    image_of(architecture, layers.iter().map(|layer| gzip(layer)).collect())
}

/// The same of packed layers.
pub fn image_of(architecture: &str, layers: Vec<Packed>) -> Image {
    let mut image = Image::default();
    let mut descriptors = Vec::new();
    let diff_ids: Vec<String> = layers.iter().map(|layer| layer.diff_id.clone()).collect();
    for Packed { blob, annotations, media_type, .. } in layers {
        let name = digest(&blob);
        let size = blob.len();
        descriptors.push(json!({ "mediaType": media_type, "digest": name, "size": size, "annotations": annotations }));
        image.layers.push(name.clone());
        image.blobs.insert(name, blob);
    }
    let config = json!({ "architecture": architecture, "os": "linux", "config": { "Cmd": ["/bin/app"] },
        "rootfs": { "type": "layers", "diff_ids": diff_ids } });
    let config = serde_json::to_vec(&config).unwrap();
    image.config = digest(&config);
    let manifest = json!({ "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": image.config, "size": config.len() },
        "layers": descriptors });
    image.blobs.insert(image.config.clone(), config);
    image.manifest = serde_json::to_vec(&manifest).unwrap();
    image
}

pub fn image(layers: &[Vec<u8>]) -> Image {
    image_for(host_architecture(), layers)
}

pub fn host_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// A request as the registry has received it.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub method: String,
    pub path: String,
    /// By name in lower case.
    pub headers: BTreeMap<String, String>,
    /// As many bytes as a header announces.
    pub body: Vec<u8>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// What the registry sends.
#[derive(Clone, Default)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Says so many bytes in place of the body's own number.
    pub said_length: Option<usize>,
    /// Sends so many bytes of the body only.
    pub sent: Option<usize>,
    /// Keeps the connection open afterwards, and sends no more.
    pub stalls: bool,
    /// Repeats the body until the client ends the connection.
    pub endless: bool,
}

pub fn answer(status: u16, body: &[u8]) -> Answer {
    Answer { status, body: body.to_vec(), ..Answer::default() }
}

impl Answer {
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }
}

/// What a registry answers; the number is how many requests for the same path came before.
type Rule = dyn Fn(&Request, usize) -> Answer + Send + Sync;

/// A registry in this process. Its threads end with the test program.
pub struct Server {
    pub host: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub fn start(rule: impl Fn(&Request, usize) -> Answer + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1", rule)
    }

    pub fn start_at(address: &str, rule: impl Fn(&Request, usize) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let requests: Arc<Mutex<Vec<Request>>> = Arc::default();
        let (rule, log): (Arc<Rule>, _) = (Arc::new(rule), requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (rule, log) = (rule.clone(), log.clone());
                // A client that ends a connection is no failure of the server.
                std::thread::spawn(move || drop(serve(stream, &*rule, &log)));
            }
        });
        Self { host, requests }
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// The requests whose path ends with `end`.
    pub fn asked_for(&self, end: &str) -> Vec<Request> {
        self.requests().into_iter().filter(|request| request.path.ends_with(end)).collect()
    }

    pub fn forget(&self) {
        self.requests.lock().unwrap().clear();
    }
}

fn serve(mut stream: TcpStream, rule: &Rule, log: &Mutex<Vec<Request>>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = Vec::new();
    reader.by_ref().take(1 << 16).read_until(b'\n', &mut line)?;
    // The first bytes of TLS are none.
    let Ok(line) = String::from_utf8(line) else { return Ok(()) };
    let mut words = line.split_whitespace();
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(()) };
    let mut request = Request { method: method.into(), path: path.into(), ..Request::default() };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim().split_once(':') else { break };
        request.headers.insert(name.to_lowercase(), value.trim().into());
    }
    let length = request.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    reader.by_ref().take(length).read_to_end(&mut request.body)?;
    let before = {
        let mut log = log.lock().unwrap();
        let before = log.iter().filter(|other| other.path == request.path).count();
        log.push(request.clone());
        before
    };
    let answer = rule(&request, before);
    let length = answer.said_length.unwrap_or(answer.body.len());
    let mut head = format!("HTTP/1.1 {} Status\r\nconnection: close\r\n", answer.status);
    if !answer.endless {
        head += &format!("content-length: {length}\r\n");
    }
    for (name, value) in &answer.headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all((head + "\r\n").as_bytes())?;
    if request.method == "HEAD" {
        return Ok(());
    }
    stream.write_all(&answer.body[..answer.sent.unwrap_or(answer.body.len())])?;
    if answer.endless {
        loop {
            stream.write_all(&answer.body)?;
        }
    }
    if answer.stalls {
        // The client ends the connection, or the test program ends.
        let _ = reader.read(&mut [0]);
    }
    Ok(())
}

/// What an honest registry with the images of repository `app` answers, by tag.
pub fn honest(request: &Request, images: &[(&str, &Image)]) -> Answer {
    if request.path == "/v2/" {
        return answer(200, b"{}");
    }
    let name = request.path.rsplit('/').next().unwrap();
    if request.path.contains("/manifests/") {
        let found = images.iter().find(|(tag, image)| *tag == name || digest(&image.manifest) == name);
        return found.map_or(answer(404, b"{}"), |(_, image)| answer(200, &image.manifest));
    }
    let Some(blob) = images.iter().find_map(|(_, image)| image.blobs.get(name)) else { return answer(404, b"{}") };
    let range = request.header("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    match range.and_then(|(begin, end)| Some((begin.parse::<usize>().ok()?, end))) {
        Some((begin, end)) if begin < blob.len() => {
            let end = end.parse().unwrap_or(usize::MAX).min(blob.len() - 1);
            let range = format!("bytes {begin}-{end}/{}", blob.len());
            answer(206, &blob[begin..=end]).with("content-range", &range)
        }
        Some(_) => answer(416, b""),
        None => answer(200, blob),
    }
}

/// A store, and a home without logins.
pub struct Host {
    pub dir: tempfile::TempDir,
    /// Seconds for a server that sends nothing. A busy machine takes its time, too.
    pub timeout: u32,
}

impl Host {
    pub fn new() -> Self {
        Self::in_dir(tempfile::tempdir().unwrap())
    }

    pub fn in_dir(dir: tempfile::TempDir) -> Self {
        Self { dir, timeout: 60 }
    }

    /// One that soon takes a server that sends nothing for a broken one.
    pub fn impatient() -> Self {
        Self { timeout: 2, ..Self::new() }
    }

    pub fn store_path(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    pub fn store(&self) -> Store {
        Store::open(&self.store_path(), "default").unwrap()
    }

    /// The program with the store and no other settings than a test makes.
    pub fn command(&self, action: &str, name: &str, reference: &str) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args([action, "--json", "--domain=default", &self.timeout(), "--name", name]);
        command.arg("--store").arg(self.store_path()).arg(reference);
        self.without_settings(&mut command);
        command
    }

    fn timeout(&self) -> String {
        format!("--timeout={}", self.timeout)
    }

    /// A collection in a fleet's store, which keeps what is younger than so many seconds.
    pub fn collection(&self, keep: u32, address: &str) -> Command {
        self.fleet_command("gc", &[&format!("--keep={keep}"), address])
    }

    /// What is done with a fleet's store as a whole.
    pub fn fleet_command(&self, action: &str, words: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args([action, "--json", &self.timeout()]).args(words);
        self.without_settings(&mut command);
        command
    }

    fn without_settings(&self, command: &mut Command) {
        command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("HOME", self.dir.path()).env("XDG_RUNTIME_DIR", self.dir.path().join("run"));
    }

    pub fn pull(&self, server: &Server, tag: &str) -> Output {
        self.command("pull", tag, &format!("{}/app:{tag}", server.host)).output().unwrap()
    }

    /// Keeps a login for `server`, in the file and the form of podman.
    pub fn log_in(&self, server: &str, name: &str, password: &str) {
        let dir = self.dir.path().join("run/containers");
        fs::create_dir_all(&dir).unwrap();
        let words = base64::engine::general_purpose::STANDARD.encode(format!("{name}:{password}"));
        let login = json!({ "auths": { server: { "auth": words } } });
        fs::write(dir.join("auth.json"), login.to_string()).unwrap();
    }

    /// The packed layers that pulls have left, with their sizes.
    pub fn downloads(&self) -> BTreeMap<String, u64> {
        let entries = fs::read_dir(self.store_path().join("domains/default/downloads")).into_iter().flatten().flatten();
        entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len())).collect()
    }

    /// The bytes of a file of an image.
    pub fn file(&self, name: &str, path: &str) -> Option<Vec<u8>> {
        use pagefold_image::tree::{Data, FileKind};
        let store = self.store();
        let mut tree = store.tree(&store.image(name).unwrap().digest).unwrap();
        let id = tree.find(path.as_bytes())?;
        match &tree.inode(id).kind {
            FileKind::File(Data::Inline(bytes)) => Some(bytes.to_vec()),
            FileKind::File(Data::Object(digest, _)) => Some(fs::read(store.object_path(digest)).unwrap()),
            _ => None,
        }
    }
}

/// The document that the program has printed.
pub fn ok(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What the program has said of its failure.
pub fn failed(output: &Output) -> String {
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Waits until `is_true`.
pub fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_true() {
        assert!(began.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
