//! Rules by which a daemon attaches programs, as the command line and the configuration file write them.

use crate::units;
use pagefold_daemon::AttachRule;
use std::ffi::CString;

/// The number of the user `name`, which may be a number itself.
///
/// # Errors
/// One line: there is no such user.
pub fn user_id(name: &str) -> Result<u32, String> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let wanted = CString::new(name).map_err(|_| "a name has no NUL byte")?;
    // SAFETY: the name ends with a NUL byte, and no other thread of this command asks for users.
    let entry = unsafe { libc::getpwnam(wanted.as_ptr()) };
    // SAFETY: the library returns nothing, or an entry of its own that stays until the next question.
    unsafe { entry.as_ref() }.map(|entry| entry.pw_uid).ok_or_else(|| format!("there is no user {name}"))
}

/// Reads rules with `;` between them, each of conditions with `,` between them.
///
/// # Errors
/// One line: which part is wrong, and what it may be.
pub fn parse(text: &str) -> Result<Vec<AttachRule>, String> {
    text.split(';').map(|rule| parse_rule(rule.trim())).collect()
}

fn parse_rule(text: &str) -> Result<AttachRule, String> {
    let mut rule = AttachRule { domain: "default".into(), ..AttachRule::default() };
    for condition in text.split(',') {
        let (key, value) =
            condition.trim().split_once('=').filter(|(_, value)| !value.is_empty()).ok_or_else(|| {
                format!("`{condition}` is no KEY=VALUE; keys are exe, cgroup, user, min, domain, cold")
            })?;
        match key {
            "exe" => rule.programs.exe = Some(CString::new(value).map_err(|_| "a pattern has no NUL byte")?),
            "cgroup" => rule.programs.cgroup = Some(value.into()),
            "user" => rule.programs.user = Some(user_id(value)?),
            "min" => rule.programs.rss_min = units::size(value)?,
            "cold" => rule.cold = value.parse().map_err(|_| format!("`{value}`: cold is true or false"))?,
            "domain" if value.len() <= 64 => rule.domain = value.into(),
            "domain" => return Err("a domain's name has 64 bytes at most".into()),
            _ => return Err(format!("`{key}` is no key; keys are exe, cgroup, user, min, domain, cold")),
        }
    }
    if rule.programs.exe.is_none() && rule.programs.cgroup.is_none() && rule.programs.user.is_none() {
        return Err(format!("`{text}` would attach every program: add exe, cgroup or user"));
    }
    Ok(rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_condition_by_condition() {
        let rules = parse("exe=/usr/bin/qemu-*, min=64M,domain=guests; cgroup=machine.slice,user=0,cold=true").unwrap();
        assert_eq!(rules.len(), 2);
        assert_eq!(rules[0].programs.exe, Some(c"/usr/bin/qemu-*".into()));
        assert_eq!((rules[0].programs.rss_min, rules[0].domain.as_str()), (64 << 20, "guests"));
        assert_eq!(rules[1].programs.cgroup.as_deref(), Some("machine.slice"));
        assert_eq!((rules[1].programs.user, rules[1].domain.as_str()), (Some(0), "default"));
        assert_eq!([rules[0].cold, rules[1].cold], [false, true]);
    }

    #[test]
    fn wrong_rules_name_what_is_wrong() {
        for (text, part) in [
            ("min=64M", "would attach every program"),
            ("exe", "is no KEY=VALUE"),
            ("exe=", "is no KEY=VALUE"),
            ("exe=/bin/*,size=3", "`size` is no key"),
            ("user=no-such-user-here", "there is no user"),
            ("exe=/bin/*;", "is no KEY=VALUE"),
            ("exe=/bin/*,min=many", "size"),
            ("exe=/bin/*,cold=yes", "cold is true or false"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
