//! The address of an image in a fleet's store.

use std::fmt;
use std::str::FromStr;

/// Longest name or tag, bytes.
const NAME_MAX: usize = 128;

/// What holds the objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreAddress {
    /// A bucket, and what all names in it begin with.
    S3 { bucket: String, prefix: String },
    /// A directory.
    Directory(String),
    /// An address below which a server has the files of a store. It is only read.
    Http(String),
}

/// The store's own address.
impl fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreAddress::S3 { bucket, prefix } if prefix.is_empty() => write!(f, "s3://{bucket}"),
            StoreAddress::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
            StoreAddress::Directory(path) => write!(f, "file://{path}"),
            StoreAddress::Http(url) => f.write_str(url),
        }
    }
}

impl StoreAddress {
    /// The store at `place` of `host`. `end` is what an image's address has after that, for messages.
    fn new(scheme: &str, host: &str, place: &str, end: &str) -> Result<Self, String> {
        let is_path = |place: &str| place.split('/').all(|part| !matches!(part, "" | "." | ".."));
        if !place.is_empty() && !is_path(place) {
            return Err("an address of a store has no empty part, no . and no ..".into());
        }
        Ok(match scheme {
            "s3" if host.is_empty() => return Err(format!("s3://BUCKET/PREFIX{end}: no bucket")),
            "s3" => StoreAddress::S3 { bucket: host.into(), prefix: place.into() },
            "file" if !host.is_empty() || place.is_empty() => return Err(format!("file:///DIR{end}: no directory")),
            "file" => StoreAddress::Directory(format!("/{place}")),
            "http" | "https" if host.is_empty() => return Err(format!("{scheme}://HOST/PATH{end}: no host")),
            "http" | "https" => StoreAddress::Http(format!("{scheme}://{host}/{place}").trim_end_matches('/').into()),
            _ => return Err("stores have addresses of s3://, file://, https:// and http://".into()),
        })
    }
}

/// The address of a store, without an image.
impl FromStr for StoreAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (scheme, rest) = split(text)?;
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, place) = rest.split_once('/').unwrap_or((rest, ""));
        check_host(host)?;
        StoreAddress::new(scheme, host, place, "")
    }
}

/// The scheme of an address, and what comes after it.
fn split(text: &str) -> Result<(&str, &str), String> {
    // No message repeats the address: it may hold a password.
    let (scheme, rest) =
        text.split_once("://").ok_or("not an address of a store: s3://, file://, https:// or http://")?;
    if rest.contains(['?', '#']) || rest.chars().any(char::is_control) {
        return Err("an address of a store has no ?, no # and no control characters".into());
    }
    Ok((scheme, rest))
}

fn check_host(host: &str) -> Result<(), String> {
    if host.contains('@') {
        return Err("an address of a store holds no login: other users see it among the processes".into());
    }
    Ok(())
}

/// An image in a fleet's store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub store_address: StoreAddress,
    pub name: String,
    pub tag: String,
}

impl Address {
    /// Returns true if `text` is the address of an image in a fleet's store, or should be; otherwise a registry has it.
    pub fn is_meant(text: &str) -> bool {
        text.contains("://")
    }

    /// The image's address.
    pub fn whole(&self) -> String {
        format!("{}/{}:{}", self.store_address, self.name, self.tag)
    }

    /// Where the store has the image's manifest.
    pub fn manifest(&self) -> String {
        format!("images/{}/{}", self.name, self.tag)
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (scheme, rest) = split(text)?;
        let (host, path) = rest.split_once('/').ok_or("an address of a store ends with the image: /NAME[:TAG]")?;
        check_host(host)?;
        if path.starts_with('/') {
            return Err("an address of a store has no empty part, no . and no ..".into());
        }
        let (place, image) = path.rsplit_once('/').unwrap_or(("", path));
        let store_address = StoreAddress::new(scheme, host, place, "/NAME[:TAG]")?;
        let (name, tag) = image.split_once(':').unwrap_or((image, "latest"));
        for part in [name, tag] {
            let proper = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if part.is_empty() || part.len() > NAME_MAX || part.starts_with('.') || !part.chars().all(proper) {
                return Err("name and tag of an image in a store have letters, digits, - _ and . only".into());
            }
        }
        Ok(Self { store_address, name: name.into(), tag: tag.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_store_image_and_tag() {
        for (text, whole, manifest) in [
            ("s3://bucket/a/b/app:2", "s3://bucket/a/b/app:2", "images/app/2"),
            ("s3://bucket/app", "s3://bucket/app:latest", "images/app/latest"),
            ("file:///srv/fleet/app:1.0", "file:///srv/fleet/app:1.0", "images/app/1.0"),
            ("https://host:8443/x/app", "https://host:8443/x/app:latest", "images/app/latest"),
            ("http://host/app:1", "http://host/app:1", "images/app/1"),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!((address.whole(), address.manifest()), (whole.into(), manifest.into()));
        }
    }

    #[test]
    fn a_store_has_an_address_of_its_own() {
        for (text, shown) in [
            ("s3://bucket", "s3://bucket"),
            ("s3://bucket/a/b/", "s3://bucket/a/b"),
            ("file:///srv/fleet", "file:///srv/fleet"),
        ] {
            assert_eq!(text.parse::<StoreAddress>().unwrap().to_string(), shown);
        }
        for text in
            ["app:1", "s3://", "s3://key:secret@bucket", "file:///", "file://host/x", "s3://b//x", "s3://b/?secret"]
        {
            let error = text.parse::<StoreAddress>().unwrap_err();
            assert!(!error.contains("secret") && !error.contains('\n'), "{text}: {error}");
        }
    }

    #[test]
    fn what_is_no_address_is_refused_and_not_repeated() {
        for text in [
            "s3:///app",
            "s3://bucket",
            "s3://bucket/",
            "s3://bucket/a//app",
            "s3://bucket//app",
            "s3://bucket/../app",
            "s3://bucket/app:",
            "s3://bucket/.app",
            "s3://bucket/app:1:2",
            "s3://bucket/app@sha256:00",
            "s3://key:secret@bucket/app",
            "https://user:secret@host/app",
            "https://host/app?secret=1",
            "file://host/dir/app",
            "file:///app",
            "ftp://host/app",
        ] {
            let error = text.parse::<Address>().unwrap_err();
            assert!(!error.contains("secret") && !error.contains('\n'), "{text}: {error}");
        }
    }
}
