//! The command line and the environment of a command.

use super::run::ExecOptions;
use crate::error::{Error, Result};
use crate::store::ImageRecord;
use std::ffi::OsString;

/// Program and arguments: the operator's, or else the image's own.
pub(super) fn command(record: &ImageRecord, run: &ExecOptions) -> Result<(OsString, Vec<OsString>)> {
    let config = &record.config;
    let own = config.entrypoint.iter().chain(&config.cmd).map(OsString::from).collect();
    let words: Vec<OsString> = if run.command.is_empty() { own } else { run.command.clone() };
    let Some((program, arguments)) = words.split_first() else {
        return Err(Error::Refused(format!(
            "exec: image {} has no command of its own; give one after --",
            record.name
        )));
    };
    Ok((program.clone(), arguments.to_vec()))
}

/// The environment: a default path and home, the image's variables, and the operator's, each over the ones before.
pub(super) fn variables(record: &ImageRecord, run: &ExecOptions, home: String) -> Vec<(String, String)> {
    let mut variables: Vec<(String, String)> = vec![
        ("PATH".into(), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into()),
        ("HOME".into(), home),
    ];
    if let Ok(term) = std::env::var("TERM") {
        variables.push(("TERM".into(), term));
    }
    let pairs = record.config.env.iter().chain(&run.env).filter_map(|pair| pair.split_once('='));
    variables.extend(pairs.map(|(name, value)| (name.into(), value.into())));
    variables
}
