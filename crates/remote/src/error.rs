//! Why a pull or push fails, and whether it is worth a second try.
//!
//! No text has an address's query, which may be a signature, and none has an answer to a login, which may repeat the login.

use oci_client::errors::{OciDistributionError, OciErrorCode};
use std::error::Error as _;
use std::io;

/// Longest text of a server in a message, characters.
const TEXT_MAX: usize = 300;

/// Why a pull or push fails.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store, or what an image consists of.
    #[error(transparent)]
    Image(#[from] pagefold_image::Error),
    /// What another try will not change.
    #[error("{0}")]
    Said(String),
    /// What another try may change: a connection that broke, a server that is busy.
    #[error("{0}")]
    Passing(String),
}

/// What this crate's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The beginning of a server's text.
pub fn shorten(text: &str) -> String {
    let text = text.trim();
    let short: String = text.chars().take(TEXT_MAX).collect();
    if short.len() < text.len() { short + "…" } else { short }
}

/// The text of a request's error with its causes, and without its address.
fn text_of(error: reqwest::Error) -> String {
    let error = error.without_url();
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    shorten(&text)
}

impl Error {
    /// The answer `status` of a registry, with what it says about it.
    pub fn of_status(status: u16, text: &str) -> Self {
        let text = shorten(text);
        let colon = if text.is_empty() { "" } else { ": " };
        match status {
            401 | 403 => Error::Said(format!(
                "the registry answers {status}: it wants another login (podman login, docker login), or has no such image"
            )),
            404 => Error::Said(format!("the registry answers 404: no such image{colon}{text}")),
            429 | 500.. => Error::Passing(format!("the registry answers {status}{colon}{text}")),
            _ => Error::Said(format!("the registry answers {status}{colon}{text}")),
        }
    }
}

impl From<reqwest::Error> for Error {
    fn from(error: reqwest::Error) -> Self {
        if let Some(status) = error.status() {
            return Error::of_status(status.as_u16(), "");
        }
        let is_lasting = error.is_builder() || error.is_redirect();
        let text = text_of(error);
        if is_lasting { Error::Said(text) } else { Error::Passing(text) }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        if !error.get_ref().is_some_and(|inner| inner.is::<reqwest::Error>()) {
            return Error::Passing(shorten(&error.to_string()));
        }
        let inner = error.into_inner().and_then(|inner| inner.downcast::<reqwest::Error>().ok());
        inner.map_or_else(|| Error::Passing("the connection failed".into()), |inner| (*inner).into())
    }
}

impl From<OciDistributionError> for Error {
    fn from(error: OciDistributionError) -> Self {
        match error {
            OciDistributionError::RequestError(error) => error.into(),
            OciDistributionError::IoError(error) => error.into(),
            OciDistributionError::UnauthorizedError { .. } | OciDistributionError::AuthenticationFailure(_) => {
                Error::of_status(401, "")
            }
            OciDistributionError::ServerError { code, message, .. } => Error::of_status(code, &message),
            OciDistributionError::RegistryError { envelope, .. } => {
                let is_busy = envelope.errors.iter().any(|error| matches!(error.code, OciErrorCode::Toomanyrequests));
                let is_login = |code: &OciErrorCode| matches!(code, OciErrorCode::Unauthorized | OciErrorCode::Denied);
                if envelope.errors.iter().any(|error| is_login(&error.code)) {
                    return Error::of_status(401, "");
                }
                let said = format!("the registry says: {}", shorten(&envelope.to_string()));
                if is_busy { Error::Passing(said) } else { Error::Said(said) }
            }
            // Its text is that of the answer.
            OciDistributionError::RegistryTokenDecodeError(_) => {
                Error::Said("the registry's token server answers without a token".into())
            }
            other => Error::Said(shorten(&other.to_string())),
        }
    }
}
