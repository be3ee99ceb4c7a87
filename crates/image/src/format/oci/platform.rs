//! What an image's programs run on.

use crate::error::{Error, input};
use serde::Deserialize;
use std::fmt;
use std::str::FromStr;

/// An operating system and an architecture as images name them, such as `linux/arm64` or `linux/arm/v7`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Platform {
    /// Of the processor.
    pub architecture: String,
    /// Operating system.
    pub os: String,
    /// Of the architecture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl Platform {
    /// This machine's.
    pub fn host() -> Platform {
        let architecture = architecture_name(std::env::consts::ARCH).to_owned();
        Platform { architecture, os: "linux".into(), variant: None }
    }

    /// The platform that a configuration names, if it names one.
    pub(super) fn of_parts(os: &str, architecture: &str, variant: &str) -> Option<Platform> {
        let variant = (!variant.is_empty()).then(|| variant.to_owned());
        let platform = Platform { architecture: architecture.into(), os: os.into(), variant };
        (!os.is_empty() && !architecture.is_empty()).then_some(platform)
    }

    /// True if an image for this platform is one for `wanted`.
    pub fn fits(&self, wanted: &Platform) -> bool {
        let is_variant = wanted.variant.is_none() || self.full_variant() == wanted.full_variant();
        self.os == wanted.os && self.architecture == wanted.architecture && is_variant
    }

    /// True if its variant is the one that is meant where none is named.
    pub(super) fn is_usual(&self) -> bool {
        self.full_variant() == Platform { variant: None, ..self.clone() }.full_variant()
    }

    fn full_variant(&self) -> &str {
        match (&self.variant, self.architecture.as_str()) {
            (Some(variant), _) => variant,
            (None, "arm64") => "v8",
            (None, "arm") => "v7",
            (None, "amd64") => "v1",
            (None, _) => "",
        }
    }
}

/// The name that images give to an architecture.
fn architecture_name(name: &str) -> &str {
    match name {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

impl FromStr for Platform {
    type Err = Error;

    fn from_str(text: &str) -> Result<Platform, Error> {
        let parts: Vec<&str> = text.split('/').collect();
        let platform = match parts[..] {
            [os, architecture] => Platform::of_parts(os, architecture_name(architecture), ""),
            [os, architecture, variant] if !variant.is_empty() => {
                Platform::of_parts(os, architecture_name(architecture), variant)
            }
            _ => None,
        };
        platform.ok_or_else(|| input!("{text:?} is no platform; they look like linux/arm64 or linux/arm/v7"))
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        self.variant.iter().try_for_each(|variant| write!(f, "/{variant}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn platforms_are_compared_as_engines_compare_them() {
        let parse = |text: &str| text.parse::<Platform>().unwrap();
        for (have, wanted, fits) in [
            ("linux/arm64/v8", "linux/arm64", true),
            ("linux/arm64", "linux/aarch64/v8", true),
            ("linux/arm/v6", "linux/arm", true),
            ("linux/arm/v6", "linux/arm/v7", false),
            ("linux/arm", "linux/arm/v7", true),
            ("windows/amd64", "linux/x86_64", false),
            ("linux/amd64/v3", "linux/amd64/v1", false),
        ] {
            assert_eq!(parse(have).fits(&parse(wanted)), fits, "{have} for {wanted}");
        }
        assert_eq!(parse("linux/x86_64").to_string(), "linux/amd64");
        assert_eq!(
            ["linux/arm/v6", "linux/arm/v7", "linux/amd64"].map(|text| parse(text).is_usual()),
            [false, true, true]
        );
        for wrong in ["", "linux", "arm64", "linux/", "/arm64", "linux/arm/", "linux/arm/v7/x"] {
            assert!(wrong.parse::<Platform>().is_err(), "{wrong}");
        }
    }
}
