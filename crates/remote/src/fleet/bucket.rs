//! Files of a fleet's store: read, written, listed, through servers that are busy or gone for a while.

use crate::address::StoreAddress;
use crate::error::{Error, Result, shorten};
use crate::registry::{AGENT, hide, retry};
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::AmazonS3Builder;
use object_store::client::HttpError;
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{
    ClientOptions, Error as StoreError, GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, RetryConfig,
    UpdateVersion,
};
use std::env;
use std::fs;
use std::ops::Range;
use std::time::{Duration, SystemTime};

/// How much longer than an answer the upload of a pack may take.
const UPLOAD_FACTOR: u32 = 20;

/// Variables with what no message shows.
const SECRETS: [&str; 3] = ["AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN"];

/// A file of the store.
pub struct Listed {
    pub path: String,
    pub bytes: u64,
    /// When it was written, by the clock of the store.
    pub written: SystemTime,
}

impl Listed {
    /// How old it is at the time `now` of the store's clock.
    pub fn age(&self, now: SystemTime) -> Duration {
        now.duration_since(self.written).unwrap_or_default()
    }
}

/// What a store is opened for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    /// Files are written and removed.
    Write,
    /// The same, and the directory of a new store is made.
    Create,
}

/// What is read of a file, and which version of it that was.
pub type Read = (Vec<u8>, UpdateVersion);

/// The files of a fleet's store.
pub struct Bucket {
    store: Box<dyn ObjectStore>,
    shown: String,
    timeout: Duration,
    secrets: Vec<String>,
}

impl Bucket {
    /// Opens a store. A server that sends nothing for `timeout` has failed.
    ///
    /// # Errors
    /// A store that cannot be written; settings in the environment that do not fit.
    pub fn open(store_address: &StoreAddress, access: Access, plain_http: bool, timeout: Duration) -> Result<Self> {
        let secrets: Vec<String> = SECRETS.iter().filter_map(|name| env::var(name).ok()).collect();
        let shown = store_address.to_string();
        let options = ClientOptions::new()
            .with_user_agent(AGENT.parse().expect("letters"))
            .with_connect_timeout(timeout)
            .with_timeout(timeout.saturating_mul(UPLOAD_FACTOR));
        // Each request is tried again here, and nowhere else.
        let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let failed = |error: StoreError| Error::Said(format!("{shown}: {}", hide(text_of(&error), &secrets)));
        let store: Box<dyn ObjectStore> = match store_address {
            StoreAddress::S3 { bucket, prefix } => {
                let from_env = AmazonS3Builder::from_env().with_bucket_name(bucket);
                let is_plain = plain_http || env::var("AWS_ALLOW_HTTP").is_ok_and(|value| value == "true");
                let options = options.with_allow_http(is_plain);
                let s3 = from_env
                    .with_client_options(options)
                    .with_retry(once)
                    .with_disable_bulk_delete(true)
                    .build()
                    .map_err(failed)?;
                Box::new(PrefixStore::new(s3, Path::from(prefix.as_str())))
            }
            StoreAddress::Directory(path) => {
                let path = std::path::Path::new(path);
                if access == Access::Create && !path.exists() {
                    // No directory above it is made: a typing error must not make one.
                    fs::create_dir(path).map_err(|error| Error::Said(format!("{}: {error}", path.display())))?;
                }
                let directory = LocalFileSystem::new_with_prefix(path);
                let directory = directory.map_err(|_| Error::Said(format!("{}: no such directory", path.display())))?;
                Box::new(directory.with_fsync(true))
            }
            StoreAddress::Http(_) if access != Access::Read => {
                return Err(Error::Said(format!("{shown}: a store is only read by http; name its s3:// or file://")));
            }
            StoreAddress::Http(url) => {
                let builder = HttpBuilder::new().with_url(url);
                let options = options.with_allow_http(true);
                Box::new(builder.with_client_options(options).with_retry(once).build().map_err(failed)?)
            }
        };
        Ok(Self { store, shown, timeout, secrets })
    }

    /// The file `path` if it is there and has at most `most` bytes.
    ///
    /// # Errors
    /// No connection; a file that is larger.
    pub async fn get(&self, path: &str, most: u64) -> Result<Option<Read>> {
        let found = retry(|| self.bytes(path, None, most)).await.map_err(|error| self.name(path, error))?;
        Ok(found.map(|(meta, bytes)| (bytes, UpdateVersion { e_tag: meta.e_tag, version: meta.version })))
    }

    /// A part of the file `path`, if the file is there. It is shorter if the file is.
    ///
    /// # Errors
    /// No connection; a file that ends before.
    pub async fn range(&self, path: &str, range: Range<u64>) -> Result<Option<Vec<u8>>> {
        let most = range.end - range.start;
        let found = retry(|| self.bytes(path, Some(range.clone()), most)).await;
        found.map(|found| found.map(|(_, bytes)| bytes)).map_err(|error| self.name(path, error))
    }

    async fn bytes(
        &self,
        path: &str,
        range: Option<Range<u64>>,
        most: u64,
    ) -> Result<Option<(object_store::ObjectMeta, Vec<u8>)>> {
        let options = GetOptions { range: range.map(GetRange::Bounded), ..GetOptions::default() };
        let answer = match self.in_time(self.store.get_opts(&Path::from(path), options)).await? {
            Err(StoreError::NotFound { .. }) => return Ok(None),
            other => other.map_err(|error| self.error(&error))?,
        };
        let (meta, mut bytes) = (answer.meta.clone(), Vec::new());
        let mut pieces = answer.into_stream();
        while let Some(piece) = self.in_time(pieces.next()).await? {
            bytes.extend_from_slice(&piece.map_err(|error| self.error(&error))?);
            if bytes.len() as u64 > most {
                return Err(Error::Said(format!("more than {most} bytes")));
            }
        }
        Ok(Some((meta, bytes)))
    }

    /// Writes the file `path`.
    ///
    /// # Errors
    /// No connection; a login that may not write.
    pub async fn put(&self, path: &str, bytes: Bytes) -> Result<()> {
        let put = || async {
            let put = self.store.put(&Path::from(path), bytes.clone().into()).await;
            put.map(drop).map_err(|error| self.error(&error))
        };
        retry(put).await.map_err(|error| self.name(path, error))
    }

    /// Writes the file `path` if it has not changed since it was `before`, as far as the store can tell. Returns false if it
    /// has.
    ///
    /// # Errors
    /// No connection; a login that may not write.
    pub async fn put_unless_changed(&self, path: &str, bytes: Bytes, before: Option<&UpdateVersion>) -> Result<bool> {
        let put = || async {
            let mode = match before {
                None => PutMode::Create,
                Some(version) if version.e_tag.is_some() => PutMode::Update(version.clone()),
                Some(_) => PutMode::Overwrite,
            };
            let location = Path::from(path);
            let put = match self.store.put_opts(&location, bytes.clone().into(), mode.into()).await {
                // Directories, and servers that are said to know no conditions.
                Err(StoreError::NotImplemented { .. }) => self.store.put(&location, bytes.clone().into()).await,
                other => other,
            };
            match put {
                Err(StoreError::AlreadyExists { .. } | StoreError::Precondition { .. }) => {
                    // An earlier try may have done it, and its answer was lost.
                    let there = self.bytes(path, None, bytes.len() as u64).await;
                    Ok(matches!(there, Ok(Some((_, there))) if there == bytes))
                }
                other => other.map(|_| true).map_err(|error| self.error(&error)),
            }
        };
        retry(put).await.map_err(|error| self.name(path, error))
    }

    /// The files below `path`.
    ///
    /// # Errors
    /// No connection; a server that lists nothing.
    pub async fn list(&self, path: &str) -> Result<Vec<Listed>> {
        let list = || async {
            let (mut files, mut listed) = (Vec::new(), self.store.list(Some(&Path::from(path))));
            while let Some(meta) = self.in_time(listed.try_next()).await?.map_err(|error| self.error(&error))? {
                files.push(Listed {
                    path: meta.location.to_string(),
                    bytes: meta.size,
                    written: meta.last_modified.into(),
                });
            }
            Ok(files)
        };
        retry(list).await.map_err(|error| self.name(path, error))
    }

    /// Removes the file `path`, if it is there.
    ///
    /// # Errors
    /// No connection; a login that may not remove.
    pub async fn remove(&self, path: &str) -> Result<()> {
        let remove = || async {
            match self.in_time(self.store.delete(&Path::from(path))).await? {
                Ok(()) | Err(StoreError::NotFound { .. }) => Ok(()),
                Err(error) => Err(self.error(&error)),
            }
        };
        retry(remove).await.map_err(|error| self.name(path, error))
    }

    /// What `future` gives, unless the server sends nothing for too long.
    async fn in_time<T>(&self, future: impl Future<Output = T>) -> Result<T> {
        let late = |_| Error::Passing(format!("no answer for {} s", self.timeout.as_secs_f64()));
        tokio::time::timeout(self.timeout, future).await.map_err(late)
    }

    fn error(&self, error: &StoreError) -> Error {
        let text = text_of(error);
        let status = status_of(error);
        let said = match status {
            Some(status @ (401 | 403)) => format!(
                "the store answers {status}: it wants other credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), or has \
                 no such object"
            ),
            Some(status) => format!("the store answers {status}"),
            None => hide(text, &self.secrets),
        };
        let may_pass = match status {
            Some(status) => status == 408 || status == 429 || status >= 500,
            None => causes(error).any(|cause| cause.is::<HttpError>()),
        };
        if may_pass { Error::Passing(said) } else { Error::Said(said) }
    }

    /// Adds the file to an error.
    fn name(&self, path: &str, error: Error) -> Error {
        match error {
            Error::Said(text) => Error::Said(format!("{}/{path}: {text}", self.shown)),
            Error::Passing(text) => Error::Passing(format!("{}/{path}: {text}", self.shown)),
            other => other,
        }
    }
}

fn causes<'a>(error: &'a StoreError) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |error| error.source())
}

/// The last cause of an error: those before it repeat it, with addresses.
fn text_of(error: &StoreError) -> String {
    causes(error).last().map_or(String::new(), |cause| shorten(&cause.to_string()))
}

/// The status with which a server has refused. The type that holds it is private to the client, so it is read from the text.
fn status_of(error: &StoreError) -> Option<u16> {
    let text = causes(error).last()?.to_string();
    let rest = text.strip_prefix("Server returned non-2xx status code: ")?;
    rest.get(..3)?.parse().ok()
}
