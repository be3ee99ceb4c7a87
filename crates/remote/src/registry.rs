//! One repository of a registry: manifests, blobs, uploads.
//!
//! oci-client speaks the protocol. Manifests alone are fetched here: it would read a manifest of any size into memory.

use crate::credentials;
use crate::error::{Error, Result, shorten};
use base64::Engine;
use bytes::Bytes;
use futures_util::Stream;
use oci_client::client::{BlobResponse, ClientConfig, ClientProtocol, SizedStream};
use oci_client::errors::{DigestError, OciDistributionError};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use pagefold_image::config::Limits;
use pagefold_image::digest::Digest;
use reqwest::header::{ACCEPT, HeaderValue};
use std::net::IpAddr;
use std::ops::Range;
use std::time::Duration;

/// Manifests and indexes of both formats.
const MANIFESTS: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";

/// The type of the manifests that are pushed.
pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// The type of an index.
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// The name in requests.
pub const AGENT: &str = concat!("pagefold/", env!("CARGO_PKG_VERSION"));

/// Tries of a request, each after a longer pause, as long as errors pass.
pub const TRIES: u32 = 5;

/// The pause before the second try.
const PAUSE: Duration = Duration::from_millis(150);

/// How long a registry of this machine has to answer with TLS.
const PROBE: Duration = Duration::from_secs(5);

/// The pause after the failed try `number`, from 0 on.
pub fn pause(number: u32) -> Duration {
    PAUSE * 2u32.pow(number)
}

/// Calls `request` until it succeeds, or fails for good.
pub async fn retry<T, F: Future<Output = Result<T>>>(mut request: impl FnMut() -> F) -> Result<T> {
    for number in 0..TRIES - 1 {
        match request().await {
            Err(Error::Passing(_)) => tokio::time::sleep(pause(number)).await,
            other => return other,
        }
    }
    request().await
}

/// The manifests that refer to another one, as an index.
pub enum Referrers {
    /// The registry lists them.
    Listed(Vec<u8>),
    /// Clients list them under this tag; there is none yet, or this one.
    Tag(String, Option<Vec<u8>>),
}

/// A repository of a registry, with the login for it.
pub struct Registry {
    client: Client,
    http: reqwest::Client,
    scheme: &'static str,
    reference: Reference,
    login: RegistryAuth,
    token: Option<String>,
}

impl Registry {
    /// Logs in to the registry of `reference`. A registry of this machine may speak HTTP without TLS, as docker has it;
    /// others only with `plain_http`. A server that sends nothing for `timeout` has failed.
    ///
    /// # Errors
    /// No connection; a login that is refused.
    pub async fn connect(
        reference: &Reference,
        plain_http: bool,
        timeout: Duration,
        operation: RegistryOperation,
    ) -> Result<Self> {
        let login = credentials::find(reference)?;
        let build = || reqwest::Client::builder().user_agent(AGENT).read_timeout(timeout).connect_timeout(timeout);
        let http = build().build()?;
        let host = reference.resolve_registry();
        let is_plain =
            plain_http || is_loopback(host) && !speaks_tls(&build().timeout(PROBE.min(timeout)).build()?, host).await;
        let config = ClientConfig {
            protocol: if is_plain { ClientProtocol::Http } else { ClientProtocol::Https },
            read_timeout: Some(timeout),
            connect_timeout: Some(timeout),
            user_agent: AGENT,
            // As containerd does it: some registries do not take a blob in parts.
            use_monolithic_push: true,
            ..ClientConfig::default()
        };
        let client = Client::try_from(config)?;
        let scheme = if is_plain { "http" } else { "https" };
        let mut registry = Self { client, http, scheme, reference: reference.clone(), login, token: None };
        registry.token =
            retry(async || registry.log_in(operation).await).await.map_err(|error| registry.name(error))?;
        Ok(registry)
    }

    /// Gets a token for the operation, if the registry gives tokens.
    async fn log_in(&self, operation: RegistryOperation) -> Result<Option<String>> {
        let token = self.client.auth(&self.reference, &self.login, operation).await?;
        // Sending it, the client would panic.
        if token.as_ref().is_some_and(|token| HeaderValue::from_str(&format!("Bearer {token}")).is_err()) {
            return Err(Error::Said("the registry's token server answers without a token".into()));
        }
        Ok(token)
    }

    /// Adds the registry to an error. A server's text that repeats the login does not show it.
    pub fn name(&self, error: Error) -> Error {
        let host = self.reference.registry();
        let text = |text: String| format!("{host}: {}", hide(text, &self.secrets()));
        match error {
            Error::Said(said) => Error::Said(text(said)),
            Error::Passing(said) => Error::Passing(text(said)),
            Error::Image(error) => Error::Image(error),
        }
    }

    /// What no text shows.
    fn secrets(&self) -> Vec<String> {
        let mut secrets: Vec<String> = self.token.iter().cloned().collect();
        if let RegistryAuth::Basic(name, password) = &self.login {
            secrets.push(base64::engine::general_purpose::STANDARD.encode(format!("{name}:{password}")));
            secrets.push(password.clone());
        }
        secrets
    }

    /// The manifest or index that the reference names, or the one with `digest`, and its digest.
    ///
    /// # Errors
    /// None of that name; one with another digest; one that is too large.
    pub async fn manifest(&self, digest: Option<Digest>) -> Result<(Vec<u8>, Digest)> {
        let wanted = match (digest, self.reference.digest()) {
            (None, Some(named)) => Some(Digest::parse(named)?),
            (digest, _) => digest,
        };
        let which = wanted.map(|digest| digest.to_string());
        let which = which.as_deref().or(self.reference.tag()).unwrap_or("latest");
        let bytes = retry(async || self.manifest_bytes(which).await).await.map_err(|error| self.name(error))?;
        let found = Digest::of(&bytes);
        match wanted {
            Some(expected) if expected != found => {
                let (expected, found) = (expected.to_string(), found.to_string());
                let what = format!("{}: manifest", self.reference.registry());
                Err(pagefold_image::Error::Digest { what, expected, found }.into())
            }
            _ => Ok((bytes, found)),
        }
    }

    async fn manifest_bytes(&self, which: &str) -> Result<Vec<u8>> {
        match self.get(&format!("manifests/{which}"), MANIFESTS).await? {
            (200..=299, bytes) => Ok(bytes),
            (status, bytes) => Err(Error::of_status(status, &String::from_utf8_lossy(&bytes))),
        }
    }

    /// The manifests that refer to the one with digest `subject`, as an index: of a registry that can choose, those of type
    /// `kind`.
    ///
    /// # Errors
    /// No connection; a registry that fails.
    pub async fn referrers(&self, subject: Digest, kind: &str) -> Result<Referrers> {
        let asked = format!("referrers/{subject}?artifactType={}", kind.replace('+', "%2B"));
        if let (200..=299, bytes) = self.get(&asked, INDEX).await? {
            return Ok(Referrers::Listed(bytes));
        }
        let tag = subject.to_string().replace(':', "-");
        match self.get(&format!("manifests/{tag}"), INDEX).await? {
            (200..=299, bytes) => Ok(Referrers::Tag(tag, Some(bytes))),
            (404, _) => Ok(Referrers::Tag(tag, None)),
            (status, bytes) => Err(Error::of_status(status, &String::from_utf8_lossy(&bytes))),
        }
    }

    /// What the registry answers about `what` of the repository, and how.
    async fn get(&self, what: &str, accept: &str) -> Result<(u16, Vec<u8>)> {
        let (host, repository) = (self.reference.resolve_registry(), self.reference.repository());
        let url = format!("{}://{host}/v2/{repository}/{what}", self.scheme);
        let mut request = self.http.get(url).header(ACCEPT, accept);
        // Only a registry that gives no tokens asks for the password itself.
        request = match (&self.token, &self.login) {
            (Some(token), _) => request.bearer_auth(token),
            (None, RegistryAuth::Basic(name, password)) => request.basic_auth(name, Some(password)),
            _ => request,
        };
        let mut response = request.send().await?;
        let most = Limits::default().json_bytes as usize;
        let mut bytes = Vec::new();
        while let Some(piece) = response.chunk().await? {
            if bytes.len() + piece.len() > most {
                return Err(Error::Said(format!("a manifest of more than {most} bytes")));
            }
            bytes.extend_from_slice(&piece);
        }
        Ok((response.status().as_u16(), bytes))
    }

    /// The blob `digest`, of which nothing is larger than a JSON document may be.
    ///
    /// # Errors
    /// None of that digest; one with another digest or size.
    pub async fn document(&self, digest: Digest, size: u64) -> Result<Vec<u8>> {
        use futures_util::StreamExt;
        let most = Limits::default().json_bytes;
        if size > most {
            return Err(Error::Said(format!("{digest}: {size} bytes of JSON; {most} are allowed")));
        }
        let read = async || {
            let mut bytes = Vec::new();
            let (mut stream, _) = self.blob(digest, 0).await?;
            while let Some(piece) = stream.next().await {
                match piece {
                    Err(error) if is_end(&error) => break,
                    piece => bytes.extend_from_slice(&piece?),
                }
                if bytes.len() as u64 > size {
                    return Err(Error::Said(format!("{digest}: more than the {size} bytes that the manifest says")));
                }
            }
            Ok(bytes)
        };
        let bytes = retry(read).await.map_err(|error| self.name(error))?;
        let found = Digest::of(&bytes);
        if found == digest {
            return Ok(bytes);
        }
        let (what, expected, found) = (self.reference.registry().into(), digest.to_string(), found.to_string());
        Err(pagefold_image::Error::Digest { what, expected, found }.into())
    }

    /// The bytes of a blob from `offset` on, or all of them: the second value is where they begin. They are not checked.
    ///
    /// # Errors
    /// None of that digest; no connection.
    pub async fn blob(&self, digest: Digest, offset: u64) -> Result<(SizedStream, u64)> {
        let name = digest.to_string();
        match self.client.pull_blob_stream_partial(&self.reference, name.as_str(), offset, None).await? {
            BlobResponse::Full(stream) => Ok((stream, 0)),
            BlobResponse::Partial(stream) => Ok((stream, offset)),
        }
    }

    /// The bytes of a range of a blob; `None` if the registry does not send ranges. They are not checked.
    ///
    /// # Errors
    /// None of that digest; no connection.
    pub async fn range(&self, digest: Digest, range: Range<u64>) -> Result<Option<SizedStream>> {
        let (name, length) = (digest.to_string(), range.end - range.start);
        let part = self.client.pull_blob_stream_partial(&self.reference, name.as_str(), range.start, Some(length));
        match part.await? {
            BlobResponse::Full(_) => Ok(None),
            BlobResponse::Partial(stream) => Ok(Some(stream)),
        }
    }

    /// Returns true if the registry has the blob.
    ///
    /// # Errors
    /// No connection; a login that may not read.
    pub async fn has_blob(&self, digest: &str) -> Result<bool> {
        Ok(self.client.blob_exists(&self.reference, digest).await?)
    }

    /// Uploads a blob of `size` bytes.
    ///
    /// # Errors
    /// No connection; a login that may not write; an error of `bytes`.
    pub async fn push_blob(
        &self,
        digest: &str,
        size: u64,
        bytes: impl Stream<Item = Result<Bytes, OciDistributionError>> + Send + 'static,
    ) -> Result<()> {
        self.client.push_blob_stream(&self.reference, bytes, digest, Some(size)).await?;
        Ok(())
    }

    /// Stores the manifest of type `media_type` under `name`, its digest or a tag, or without one under the reference's own.
    ///
    /// # Errors
    /// No connection; a login that may not write; a registry that takes no such manifest.
    pub async fn push_manifest(&self, name: Option<&str>, media_type: &'static str, manifest: Vec<u8>) -> Result<()> {
        let (host, repository) = (self.reference.registry().to_string(), self.reference.repository().to_string());
        let place = match name {
            None => self.reference.clone(),
            Some(name) if name.contains(':') => Reference::with_digest(host, repository, name.into()),
            Some(name) => Reference::with_tag(host, repository, name.into()),
        };
        self.client.push_manifest_raw(&place, manifest, HeaderValue::from_static(media_type)).await?;
        Ok(())
    }
}

/// Returns true if a blob has come to its end, and oci-client has found that it has another digest.
pub fn is_end(error: &std::io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<DigestError>())
}

/// Returns true if `host`, with or without a port, is this machine.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((name, _)) => name,
        None => host.split(':').next().unwrap_or(host),
    };
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Returns true if the registry answers a request with TLS.
async fn speaks_tls(http: &reqwest::Client, host: &str) -> bool {
    http.get(format!("https://{host}/v2/")).send().await.is_ok()
}

/// The text without the `secrets`.
pub fn hide(text: String, secrets: &[String]) -> String {
    let secrets = secrets.iter().filter(|secret| !secret.is_empty());
    shorten(&secrets.fold(text, |text, secret| text.replace(secret.as_str(), "***")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_loopback() {
        for (host, loopback) in [
            ("localhost", true),
            ("localhost:5000", true),
            ("127.0.0.1:5000", true),
            ("127.9.9.9", true),
            ("[::1]:5000", true),
            ("localhost.example:5000", false),
            ("127.0.0.1.example", false),
            ("[::2]:5000", false),
            ("10.0.0.1", false),
        ] {
            assert_eq!(is_loopback(host), loopback, "{host}");
        }
    }

    #[test]
    fn a_text_that_repeats_the_login_does_not_show_it() {
        let secrets = ["pass word".to_string(), String::new(), "dG9rZW4=".into()];
        assert_eq!(hide("you sent pass word and dG9rZW4=".into(), &secrets), "you sent *** and ***");
    }
}
