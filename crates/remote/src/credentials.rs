//! Logins as podman and docker keep them, in the files and helper programs of both.

use crate::error::{Error, Result};
use base64::Engine;
use oci_client::Reference;
use oci_client::secrets::RegistryAuth;
use serde::Deserialize;
use std::collections::HashMap;
use std::env;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A file of logins.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    #[serde(default)]
    auths: HashMap<String, Login>,
    #[serde(default)]
    cred_helpers: HashMap<String, String>,
    #[serde(default)]
    creds_store: String,
}

#[derive(Deserialize)]
struct Login {
    #[serde(default)]
    auth: String,
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
    #[serde(default)]
    identitytoken: String,
}

/// What a helper program answers.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// The login for the registry of `reference`; anonymous if there is none.
///
/// # Errors
/// A file that cannot be read, a helper program that fails.
pub fn find(reference: &Reference) -> Result<RegistryAuth> {
    for path in files() {
        if let Some(login) = find_in(&path, reference)? {
            return Ok(login);
        }
    }
    Ok(RegistryAuth::Anonymous)
}

/// The files that may hold logins, in the order in which podman looks. A file that the environment names is the only one.
fn files() -> Vec<PathBuf> {
    let directory = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(only) = directory("REGISTRY_AUTH_FILE") {
        return vec![only];
    }
    let user = rustix::process::getuid().as_raw();
    let runtime = directory("XDG_RUNTIME_DIR").map(|dir| dir.join("containers"));
    let home = directory("HOME");
    let configuration = directory("XDG_CONFIG_HOME").or_else(|| Some(home.as_ref()?.join(".config")));
    let docker = directory("DOCKER_CONFIG").or_else(|| Some(home.as_ref()?.join(".docker")));
    [
        Some(runtime.unwrap_or_else(|| format!("/run/containers/{user}").into()).join("auth.json")),
        configuration.map(|dir| dir.join("containers/auth.json")),
        docker.map(|dir| dir.join("config.json")),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The login in the file `path`, if it is there and has one.
fn find_in(path: &Path, reference: &Reference) -> Result<Option<RegistryAuth>> {
    let text = match fs::read(path) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        other => other.map_err(|error| Error::Said(format!("{}: {error}", path.display())))?,
    };
    // The parser's text could show a part of the file.
    let bad = || Error::Said(format!("{}: not a file of logins as podman and docker write it", path.display()));
    let file: File = serde_json::from_slice(&text).map_err(|_| bad())?;
    let keys = keys(reference);
    let server = keys.last().expect("the registry");
    let helper = keys.iter().find_map(|key| file.cred_helpers.get(key));
    if let Some(name) = helper.or(Some(&file.creds_store)).filter(|name| !name.is_empty())
        && let Some(login) = ask(name, server)?
    {
        return Ok(Some(login));
    }
    let plain: HashMap<&str, &Login> = file.auths.iter().map(|(key, login)| (host_and_path(key), login)).collect();
    let Some(login) = keys.iter().find_map(|key| plain.get(host_and_path(key))) else { return Ok(None) };
    if !login.identitytoken.is_empty() {
        return Err(needs_password(server));
    }
    if !login.username.is_empty() {
        return Ok(Some(RegistryAuth::Basic(login.username.clone(), login.password.clone())));
    }
    if login.auth.is_empty() {
        // docker leaves such an entry where a helper program has the login.
        return Ok(None);
    }
    let decoded = base64::engine::general_purpose::STANDARD.decode(login.auth.trim()).map_err(|_| bad())?;
    let text = String::from_utf8(decoded).map_err(|_| bad())?;
    let (name, password) = text.split_once(':').ok_or_else(bad)?;
    // docker pads passwords with zeros.
    Ok(Some(RegistryAuth::Basic(name.into(), password.trim_end_matches('\0').into())))
}

/// The names under which the login may be kept, the most specific first, and the registry's last.
fn keys(reference: &Reference) -> Vec<String> {
    let registry = reference.registry();
    let mut path = format!("{registry}/{}", reference.repository());
    let mut keys = vec![path.clone()];
    while let Some(end) = path.rfind('/') {
        path.truncate(end);
        keys.push(path.clone());
    }
    if matches!(registry, "docker.io" | "index.docker.io" | "registry-1.docker.io") {
        keys.extend(["docker.io", "registry-1.docker.io", "index.docker.io"].map(String::from));
        // docker's own name for it.
        keys.push("https://index.docker.io/v1/".into());
    }
    keys
}

/// A key without scheme and without the version of the registry's interface, which old versions of docker wrote.
fn host_and_path(key: &str) -> &str {
    let key = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let key = key.trim_end_matches('/');
    key.strip_suffix("/v1").or_else(|| key.strip_suffix("/v2")).unwrap_or(key)
}

fn needs_password(server: &str) -> Error {
    Error::Said(format!("{server}: the login is an identity token; log in with a password or an access token instead"))
}

/// Asks a helper program for the login; `None` if it has none.
fn ask(name: &str, server: &str) -> Result<Option<RegistryAuth>> {
    let program = format!("docker-credential-{name}");
    let failed = |what: &str| Error::Said(format!("{program}: {what}"));
    if name.contains(|sign: char| !sign.is_ascii_alphanumeric() && !matches!(sign, '-' | '_' | '.')) {
        return Err(failed("not a name of a helper program"));
    }
    let mut child = Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| failed(&error.to_string()))?;
    // A program that ends without reading has said why by its exit status.
    let _ = child.stdin.take().expect("piped").write_all(server.as_bytes());
    let output = child.wait_with_output().map_err(|error| failed(&error.to_string()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stdout);
        return if text.contains("not found") { Ok(None) } else { Err(failed("ended with an error")) };
    }
    // The parser's text could show a part of the answer.
    let answer: Answer = serde_json::from_slice(&output.stdout).map_err(|_| failed("no login in its answer"))?;
    match answer.username.as_str() {
        "<token>" => Err(needs_password(server)),
        _ => Ok(Some(RegistryAuth::Basic(answer.username, answer.secret))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn login_of(file: &str, reference: &str) -> Result<Option<RegistryAuth>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("auth.json");
        fs::write(&path, file).unwrap();
        find_in(&path, &reference.parse().unwrap())
    }

    fn basic(name: &str, password: &str) -> RegistryAuth {
        RegistryAuth::Basic(name.into(), password.into())
    }

    #[test]
    fn the_most_specific_login_is_taken() {
        // user:secret, other:words
        let file = r#"{"auths": {"registry.example": {"auth": "dXNlcjpzZWNyZXQ="}, "registry.example/team/app": {"auth": "b3RoZXI6d29yZHM="},
            "https://index.docker.io/v1/": {"username": "hub", "password": "p:w"}, "http://old.example/v2/": {"auth": "dXNlcjpzZWNyZXQ="}}}"#;
        for (reference, login) in [
            ("registry.example/team/app:1", Some(basic("other", "words"))),
            ("registry.example/team/other", Some(basic("user", "secret"))),
            ("redis:7", Some(basic("hub", "p:w"))),
            ("docker.io/library/redis:7", Some(basic("hub", "p:w"))),
            ("old.example/x", Some(basic("user", "secret"))),
            ("registry.example.org/team/app", None),
        ] {
            assert_eq!(login_of(file, reference).unwrap(), login, "{reference}");
        }
    }

    #[test]
    fn a_file_that_is_none_is_named_and_not_shown() {
        for file in [
            "secret",
            r#"{"auths": {"registry.example": {"auth": "c2VjcmV0"}}}"#,
            r#"{"auths": {"registry.example": {"auth": "!"}}}"#,
        ] {
            let error = login_of(file, "registry.example/x").unwrap_err().to_string();
            assert!(error.contains("auth.json") && !error.contains("secret"), "{error}");
        }
        let token = r#"{"auths": {"registry.example": {"auth": "dXNlcjo=", "identitytoken": "secret"}}}"#;
        let error = login_of(token, "registry.example/x").unwrap_err().to_string();
        assert!(error.contains("identity token") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn a_helper_has_a_plain_name() {
        for name in ["../../bin/sh", "a b", "x;y"] {
            let file = format!(r#"{{"credHelpers": {{"registry.example": "{name}"}}}}"#);
            assert!(login_of(&file, "registry.example/x").unwrap_err().to_string().contains("not a name"), "{name}");
        }
    }
}
