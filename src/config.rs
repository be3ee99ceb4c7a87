//! The configuration file: defaults for options, in TOML.
//!
//! There is no second list of options. A key is an option of the command line without its dashes, and its value is
//! read by that option's own parser, so file and command line cannot drift apart. What the file says becomes the
//! option's default, and so the command line wins.

use crate::attach_rules;
use crate::error::Error;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use std::ffi::OsString;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The file as it is shipped.
pub(crate) const SHIPPED: &str = include_str!("../dist/pagefold.toml");

/// The file of the whole machine.
const SYSTEM: &str = "/etc/pagefold/pagefold.toml";

/// What is named in place of a file where none is to be read; `./none` is a file.
const NO_FILE: &str = "none";

/// No file is this long.
const BYTES_MAX: u64 = 1 << 20;

/// A table of the file and the command whose options are its keys.
struct Section {
    name: &'static str,
    command: &'static [&'static str],
    /// Options that mean one call and no other, or are keys of another table.
    not_keys: &'static [&'static str],
    /// If there are any, the table has these keys only, each with its option.
    renamed: &'static [(&'static str, &'static str)],
}

impl Section {
    /// The option that `key` stands for.
    fn option_of<'a>(&self, key: &'a str) -> Option<&'a str> {
        if self.renamed.is_empty() {
            return Some(key);
        }
        self.renamed.iter().find(|(name, _)| *name == key).map(|(_, option)| *option)
    }

    /// The key that stands for `option`.
    fn key_of<'a>(&self, option: &'a str) -> &'a str {
        self.renamed.iter().find(|(_, id)| *id == option).map_or(option, |(name, _)| *name)
    }
}

/// The keys above all tables: options that several commands share.
const SHARED: &[&str] = &["socket"];

const SECTIONS: &[Section] = &[
    Section {
        name: "daemon",
        command: &["daemon"],
        not_keys: &["replace", "park_idle", "park_within", "reserve"],
        renamed: &[],
    },
    Section {
        name: "park",
        command: &["daemon"],
        not_keys: &[],
        renamed: &[("idle", "park_idle"), ("within", "park_within"), ("reserve", "reserve")],
    },
    Section { name: "run", command: &["run"], not_keys: &[], renamed: &[] },
    // A mount in the background is a second call of the same command, in the foreground.
    Section { name: "disk", command: &["disk", "mount"], not_keys: &["background", "nbd", "json"], renamed: &[] },
    Section { name: "image", command: &["image"], not_keys: &[], renamed: &[] },
];

/// The option of the daemon that may also be a list of tables.
const ATTACH: &str = "attach";

/// Options that mean nothing without another one.
const NEEDS: &[(&str, &str, &str)] = &[("run", "refault_budget", "cold"), ("run", "tier_max", "cold")];

/// One setting: the table (empty for shared keys), the option's name, its value as on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Setting {
    section: &'static str,
    id: String,
    value: String,
}

/// Arguments by which this very command is started again, whatever the file then says.
static AGAIN: OnceLock<Vec<OsString>> = OnceLock::new();

/// The file that --config named, absolute; or [`NO_FILE`].
static NAMED: OnceLock<PathBuf> = OnceLock::new();

/// Lets the daemon that `run` starts read the file that this call was told to read.
pub fn pass_on(child: &mut std::process::Command) {
    if let Some(path) = NAMED.get() {
        child.env("PAGEFOLD_CONFIG", path);
    }
}

/// The arguments of this call, with what the configuration file added written out; the file is not read again.
pub fn arguments() -> Vec<OsString> {
    AGAIN.get().cloned().unwrap_or_else(|| std::env::args_os().skip(1).collect())
}

/// Reads the command line over the configuration file. Wrong usage ends the process as clap has it.
///
/// # Errors
/// One line that names file, line and key, and how this command reports failure of its own.
pub fn parse(command: Command) -> Result<ArgMatches, (Error, u8)> {
    let command = with_values(command);
    // Help and wrong usage come before a file that may be broken.
    // To take the parser's command apart would take as long as to parse.
    let mut parser = std::mem::ManuallyDrop::new(command.clone());
    let matches = parser.try_get_matches_from_mut(std::env::args_os()).unwrap_or_else(exit);
    let failed = if matches.subcommand_name() == Some("run") { crate::exit::FAILED } else { 1 };
    let in_environment = || std::env::var_os("PAGEFOLD_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from);
    let named = matches.get_one::<PathBuf>("config").cloned().or_else(in_environment);
    if let (Some(path), Ok(here)) = (&named, std::env::current_dir()) {
        let _ = NAMED.set(if path.as_os_str() == NO_FILE { path.clone() } else { here.join(path) });
    }
    if !takes_defaults(&command, &matches) {
        return Ok(matches);
    }
    let mut settings = files(named).and_then(|paths| load(&command, &paths)).map_err(|error| (error, failed))?;
    store_in_environment(&mut settings, matches.subcommand_name());
    socket_in_environment(&mut settings).map_err(|error| (error, failed))?;
    let mut command = apply(command, &settings);
    // Most often there is no file; to read the line once more takes as long as many a command.
    let matches = if settings.is_empty() { matches } else { command.clone().try_get_matches().unwrap_or_else(exit) };
    check_needs(&mut command, &matches);
    if let Some(("daemon", daemon)) = matches.subcommand() {
        let _ = AGAIN.set(again(&command, daemon));
    }
    Ok(matches)
}

/// Shows help, or what is wrong, and ends. With `run` the status of wrong usage might be taken for the program's own.
fn exit<T>(error: clap::Error) -> T {
    let _ = error.print();
    let mut words = std::env::args_os().skip(1);
    let mut word = words.next();
    while let Some(option) = word.as_ref().and_then(|word| word.to_str()).filter(|word| word.starts_with("--config")) {
        word = if option == "--config" { words.nth(1) } else { words.next() };
    }
    let is_run = word.is_some_and(|word| word == "run");
    let failed = error.exit_code() != 0;
    std::process::exit(if is_run && failed { crate::exit::FAILED.into() } else { error.exit_code() })
}

/// The environment's store of images counts more than the file's. Where it has none, what looks at stores in this process
/// and in the daemon's successors finds the file's there; programs that `run` and `image exec` become do not.
fn store_in_environment(settings: &mut Vec<Setting>, command: Option<&str>) {
    let is_store = |setting: &Setting| setting.section == "image" && setting.id == "store";
    if std::env::var_os("PAGEFOLD_STORE").is_some_and(|path| !path.is_empty()) {
        settings.retain(|setting| !is_store(setting));
    } else if let Some(Ok(path)) =
        settings.iter().find(|setting| is_store(setting)).map(|s| std::path::absolute(&s.value))
        && !matches!(command, Some("run" | "image"))
    {
        // SAFETY: no other thread runs yet.
        unsafe { std::env::set_var("PAGEFOLD_STORE", path) };
    }
}

/// The environment's socket counts more than the file's: below `run` it is the one that the program is a client of.
fn socket_in_environment(settings: &mut Vec<Setting>) -> Result<(), Error> {
    let Some(path) = std::env::var_os("PAGEFOLD_SOCKET").filter(|path| !path.is_empty()) else { return Ok(()) };
    let path = path.into_string().map_err(|path| format!("PAGEFOLD_SOCKET: {}: not UTF-8 text", path.display()))?;
    settings.retain(|setting| !(setting.section.is_empty() && setting.id == "socket"));
    settings.push(Setting { section: "", id: "socket".to_owned(), value: path });
    Ok(())
}

/// Makes each switch that is a key take a value: `--read-only=false` wins over `read_only = true` in the file.
fn with_values(mut command: Command) -> Command {
    for section in SECTIONS {
        let ids: Vec<String> = keys(&command, section).map(|arg| arg.get_id().to_string()).collect();
        command = at(command, section.command, &mut |command| {
            command.mut_args(|arg| {
                let key = ids.iter().any(|id| arg.get_id() == id.as_str());
                if !key || !matches!(arg.get_action(), ArgAction::SetTrue) {
                    return arg;
                }
                arg.action(ArgAction::Set)
                    .value_parser(clap::value_parser!(bool))
                    .num_args(0..=1)
                    .require_equals(true)
                    .default_missing_value("true")
                    .default_value("false")
                    .hide_default_value(true)
                    .hide_possible_values(true)
                    .value_name("BOOL")
            })
        });
    }
    command
}

/// Changes the command at `path` below `command`.
fn at(command: Command, path: &[&str], change: &mut dyn FnMut(Command) -> Command) -> Command {
    match path {
        [] => change(command),
        [first, rest @ ..] => {
            let first: &str = first;
            command.mut_subcommand(first, |below| at(below, rest, change))
        }
    }
}

fn find<'a>(command: &'a Command, path: &[&str]) -> &'a Command {
    path.iter().fold(command, |command, name| {
        command.find_subcommand(name).unwrap_or_else(|| panic!("no command {name} for the configuration"))
    })
}

/// The options that are keys of `section`.
fn keys<'a>(command: &'a Command, section: &Section) -> impl Iterator<Item = &'a Arg> {
    let Section { not_keys, renamed, .. } = *section;
    find(command, section.command).get_arguments().filter(move |arg| {
        let id = arg.get_id().as_str();
        let own = !not_keys.contains(&id) && !SHARED.contains(&id) && !["config", "help", "version"].contains(&id);
        let own = own && (renamed.is_empty() || renamed.iter().any(|(_, option)| *option == id));
        own && !arg.is_hide_set() && arg.get_long().is_some()
    })
}

/// True if the called command has an option that the file may set.
fn takes_defaults(command: &Command, matches: &ArgMatches) -> bool {
    let mut path = Vec::new();
    let (mut here, mut below) = (command, matches);
    while let Some((name, next)) = below.subcommand() {
        path.push(name);
        (here, below) = (find(here, &[name]), next);
    }
    here.get_arguments().any(|arg| SHARED.contains(&arg.get_id().as_str()))
        || SECTIONS.iter().any(|section| path.starts_with(section.command))
}

/// The files to read, the one that counts most last: only `named`, if the caller or the environment names one.
fn files(named: Option<PathBuf>) -> Result<Vec<PathBuf>, Error> {
    if let Some(path) = named {
        return Ok(if path.as_os_str() == NO_FILE { Vec::new() } else { vec![path] });
    }
    let user = std::env::var_os("XDG_CONFIG_HOME")
        .filter(|dir| Path::new(dir).is_absolute())
        .map(PathBuf::from)
        .or_else(|| {
            std::env::var_os("HOME").filter(|home| !home.is_empty()).map(|home| Path::new(&home).join(".config"))
        })
        .map(|dir| dir.join("pagefold/pagefold.toml"));
    let mut files = Vec::new();
    for path in [Some(PathBuf::from(SYSTEM)), user].into_iter().flatten() {
        match std::fs::metadata(&path) {
            Ok(found) if path != Path::new(SYSTEM) => {
                let me = pagefold_os::user::effective();
                // `sudo` may keep HOME: then the file belongs to a user that must not configure what root does.
                if found.uid() != me && found.uid() != 0 {
                    return Err(format!(
                        "{}: belongs to user {}, not to you; name it by --config, or use --config none",
                        path.display(),
                        found.uid()
                    )
                    .into());
                }
                files.push(path);
            }
            Ok(_) => files.push(path),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => {}
            // The home of a service's user is hidden from it, or HOME was inherited.
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied && path != Path::new(SYSTEM) => {}
            Err(error) => return Err(format!("{}: cannot read: {error}", path.display()).into()),
        }
    }
    Ok(files)
}

fn load(command: &Command, paths: &[PathBuf]) -> Result<Vec<Setting>, Error> {
    let mut settings: Vec<Setting> = Vec::new();
    for path in paths {
        let read = || -> std::io::Result<Vec<u8>> {
            let mut bytes = Vec::new();
            std::fs::File::open(path)?.take(BYTES_MAX + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = read().map_err(|error| format!("{}: cannot read: {error}", path.display()))?;
        if bytes.len() as u64 > BYTES_MAX {
            return Err(format!("{}: longer than 1 MiB: no configuration", path.display()).into());
        }
        let text = String::from_utf8(bytes).map_err(|error| {
            let line = 1 + error.as_bytes()[..error.utf8_error().valid_up_to()].iter().filter(|b| **b == b'\n').count();
            format!("{}:{line}: not UTF-8 text", path.display())
        })?;
        for new in settings_of(command, &text).map_err(|wrong| wrong.show(path, &text))? {
            settings.retain(|old| (old.section, &old.id) != (new.section, &new.id));
            settings.push(new);
        }
    }
    Ok(settings)
}

/// What is wrong with a file, and where.
#[derive(Debug)]
struct Wrong {
    at: usize,
    /// Empty if the text is no TOML.
    key: String,
    what: String,
}

impl Wrong {
    fn new(span: Range<usize>, key: impl Into<String>, what: impl Into<String>) -> Wrong {
        Wrong { at: span.start, key: key.into(), what: what.into() }
    }

    fn show(self, path: &Path, text: &str) -> String {
        let line = 1 + text.as_bytes()[..self.at.min(text.len())].iter().filter(|byte| **byte == b'\n').count();
        let key = if self.key.is_empty() { String::new() } else { format!("{}: ", self.key) };
        format!("{}:{line}: {key}{}", path.display(), self.what.replace('\n', " "))
    }
}

/// Reads a file's text.
fn settings_of(command: &Command, text: &str) -> Result<Vec<Setting>, Wrong> {
    let table = DeTable::parse(text)
        .map_err(|error| Wrong::new(error.span().unwrap_or(0..0), "", format!("no TOML: {}", error.message())))?;
    let mut settings = Vec::new();
    for (name, value) in table.get_ref() {
        let (key, span) = (name.get_ref().as_ref(), name.span());
        if SHARED.contains(&key) {
            // Every command that has it has the same: the first one's parser serves.
            let arg = find(command, &["daemon"]).get_arguments().find(|arg| arg.get_id() == key);
            let value = checked(arg.expect("a shared option"), key, value.span(), value.get_ref())?;
            settings.push(Setting { section: "", id: key.to_owned(), value });
            continue;
        }
        if key == ATTACH {
            settings.push(Setting { section: "daemon", id: ATTACH.to_owned(), value: attach_rules_of(value)? });
            continue;
        }
        let Some(section) = SECTIONS.iter().find(|section| section.name == key) else {
            let tables: Vec<String> = SECTIONS.iter().map(|section| format!("[{}]", section.name)).collect();
            let what = format!("unknown; there are {} and {}, [[{ATTACH}]]", SHARED.join(", "), tables.join(", "));
            return Err(Wrong::new(span, key, what));
        };
        let Some(inner) = value.get_ref().as_table() else {
            return Err(Wrong::new(span, key, format!("is a table: write [{key}] above its keys")));
        };
        for (name, value) in inner {
            let full = format!("{key}.{}", name.get_ref());
            let option = section.option_of(name.get_ref());
            let Some(arg) = keys(command, section).find(|arg| Some(arg.get_id().as_str()) == option) else {
                let mut known: Vec<&str> =
                    keys(command, section).map(|arg| section.key_of(arg.get_id().as_str())).collect();
                known.sort_unstable();
                let what = format!("unknown key; [{key}] has {}", known.join(", "));
                return Err(Wrong::new(name.span(), full, what));
            };
            let value = checked(arg, &full, value.span(), value.get_ref())?;
            settings.push(Setting { section: section.name, id: arg.get_id().to_string(), value });
        }
    }
    if settings.iter().filter(|setting| setting.section == "daemon" && setting.id == ATTACH).count() > 1 {
        return Err(Wrong::new(0..0, ATTACH, "is there twice: as a key of [daemon] and as tables"));
    }
    Ok(settings)
}

/// The tables `[[attach]]`, a rule each, as `--attach` would have them.
fn attach_rules_of(value: &Spanned<DeValue<'_>>) -> Result<String, Wrong> {
    let tables: Option<Vec<_>> = value
        .get_ref()
        .as_array()
        .map(|array| array.iter().filter_map(|rule| Some((rule.span(), rule.get_ref().as_table()?))).collect());
    let Some(tables) = tables.filter(|tables| !tables.is_empty()) else {
        return Err(Wrong::new(
            value.span(),
            ATTACH,
            format!("is a list of tables: write [[{ATTACH}]] above each rule"),
        ));
    };
    let mut rules = Vec::new();
    for (span, table) in tables {
        let mut conditions = Vec::new();
        for (name, value) in table {
            let key = format!("{ATTACH}.{}", name.get_ref());
            let text = plain(value.get_ref()).filter(|text| !text.contains([',', ';']));
            let Some(text) = text else {
                return Err(Wrong::new(
                    value.span(),
                    key,
                    "takes a string, number, true or false, without `,` and `;`",
                ));
            };
            conditions.push(format!("{}={text}", name.get_ref()));
        }
        let rule = conditions.join(",");
        attach_rules::parse(&rule).map_err(|why| Wrong::new(span, ATTACH, why))?;
        rules.push(rule);
    }
    Ok(rules.join(";"))
}

/// The value as the command line would have it, if its type is the option's and the option's parser takes it.
fn checked(arg: &Arg, key: &str, span: Range<usize>, value: &DeValue<'_>) -> Result<String, Wrong> {
    let text = plain(value);
    let kind = arg.get_value_names().and_then(|names| names.first()).map_or("", |name| name.as_str());
    let (fits, wanted) = match kind {
        "BOOL" => (value.is_bool(), "true or false"),
        // What may also be `auto` is a number or that word.
        "N" | "MS" | "S" => (value.is_integer() || value.is_str(), "a whole number"),
        "SIZE" => (value.is_integer() || value.is_str(), "a size, such as \"512M\""),
        "TIME" | "SECONDS" => (value.is_integer() || value.is_float() || value.is_str(), "a time, such as \"5s\""),
        "PERCENT" => (value.is_integer() || value.is_float() || value.is_str(), "a percentage, such as 1"),
        _ => (value.is_str(), "a string in quotes"),
    };
    let Some(text) = text.filter(|_| fits) else {
        return Err(Wrong::new(span, key, format!("takes {wanted}, not {}", article(value.type_str()))));
    };
    let refused = |why: String| Wrong::new(span.clone(), key, why);
    // The option's parser is asked by calling a command that has this one option.
    let arg = arg.clone().required(false).global(false);
    let long = format!("--{}={text}", arg.get_long().unwrap_or_default());
    let probe = Command::new("pagefold").no_binary_name(true).arg(arg);
    match probe.try_get_matches_from([long]) {
        Ok(_) => Ok(text),
        Err(error) => {
            let why = std::error::Error::source(&error).map(ToString::to_string);
            let values = error.get(clap::error::ContextKind::ValidValue).map(|values| format!("one of {values}"));
            Err(refused(format!("`{text}`: {}", why.or(values).unwrap_or_else(|| format!("takes {wanted}")))))
        }
    }
}

/// A value as people write it on the command line; `None` for tables, lists and dates.
fn plain(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => {
            i64::from_str_radix(number.as_str(), number.radix()).ok().map(|number| number.to_string())
        }
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        DeValue::Boolean(value) => Some(value.to_string()),
        DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

fn article(noun: &str) -> String {
    format!("{} {noun}", if noun.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" })
}

/// Makes the settings the options' defaults.
fn apply(mut command: Command, settings: &[Setting]) -> Command {
    for setting in settings {
        // A default of clap's lives as long as the process.
        let value: &'static str = Box::leak(setting.value.clone().into_boxed_str());
        let set = |command: Command| {
            let mine = |arg: &Arg| arg.get_id() == setting.id.as_str();
            if command.get_arguments().any(mine) {
                command.mut_arg(setting.id.as_str(), |arg| arg.default_value(value))
            } else {
                command
            }
        };
        command = match SECTIONS.iter().find(|section| section.name == setting.section) {
            Some(section) => at(command, section.command, &mut |command| set(command)),
            None => command.mut_subcommands(set),
        };
    }
    command
}

/// Refuses options of the command line without what they need, wherever that is said.
fn check_needs(command: &mut Command, matches: &ArgMatches) {
    let Some((name, below)) = matches.subcommand() else { return };
    for (_, option, needed) in NEEDS.iter().filter(|(command, ..)| *command == name) {
        let given = below.value_source(option) == Some(ValueSource::CommandLine);
        if given && !below.get_one::<bool>(needed).copied().unwrap_or(false) {
            let text = format!("--{} needs --{needed}", option.replace('_', "-"));
            command.build();
            let called = command.find_subcommand_mut(name).expect("it was called");
            exit(called.error(clap::error::ErrorKind::MissingRequiredArgument, text))
        }
    }
}

/// Arguments that mean what command line and file meant together.
fn again(command: &Command, daemon: &ArgMatches) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = ["daemon", "--config", "none"].map(OsString::from).to_vec();
    for arg in find(command, &["daemon"]).get_arguments() {
        let (id, Some(long)) = (arg.get_id().as_str(), arg.get_long()) else { continue };
        if id == "config" || !daemon.try_contains_id(id).unwrap_or(false) {
            continue;
        }
        if matches!(arg.get_action(), ArgAction::SetTrue) {
            if daemon.get_flag(id) {
                arguments.push(format!("--{long}").into());
            }
        } else if let Some(value) = daemon.get_raw(id).and_then(|mut values| values.next()) {
            let mut argument = OsString::from(format!("--{long}="));
            argument.push(value);
            arguments.push(argument);
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use std::collections::BTreeMap;

    fn command() -> Command {
        with_values(crate::Cli::command())
    }

    fn wrong(text: &str) -> String {
        settings_of(&command(), text).map_err(|wrong| wrong.show(Path::new("f"), text)).expect_err(text)
    }

    /// The file with every key's comment sign taken away, and which keys it said have no default.
    fn uncommented() -> (String, Vec<String>) {
        let (mut text, mut without, mut section, mut none) = (String::new(), Vec::new(), String::new(), false);
        for line in SHIPPED.lines() {
            if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                section = name.to_owned();
            }
            // A key is commented by `#`, prose by `# `.
            match line.strip_prefix('#') {
                Some(key) if key.starts_with(|c: char| c.is_ascii_lowercase()) => {
                    let name = key.split_whitespace().next().unwrap_or_default();
                    if none {
                        without.push(format!("{section}.{name}"));
                    }
                    text.push_str(key);
                    none = false;
                }
                Some(prose) => none |= prose.contains("No default"),
                None => {
                    none = false;
                    text.push_str(line);
                }
            }
            text.push('\n');
        }
        (text, without)
    }

    #[test]
    fn the_shipped_file_sets_nothing() {
        assert_eq!(settings_of(&command(), SHIPPED).expect("it parses"), []);
    }

    #[test]
    fn the_shipped_file_names_every_option_with_its_default() {
        let command = command();
        let (text, without) = uncommented();
        let settings = settings_of(&command, &text).map_err(|wrong| wrong.show(Path::new("f"), &text)).expect("taken");
        let found: BTreeMap<String, String> = settings
            .into_iter()
            .map(|setting| (format!("{}.{}", setting.section, setting.id), setting.value))
            .collect();
        let mut expected = BTreeMap::new();
        let mut note = |section: &str, arg: &Arg| {
            let name = format!("{section}.{}", arg.get_id());
            let default = arg.get_default_values().first().map(|value| value.to_string_lossy().into_owned());
            assert_eq!(default.is_none(), without.contains(&name), "{name}: the file must say `No default`, or not");
            expected.insert(name.clone(), default.unwrap_or_else(|| found.get(&name).cloned().unwrap_or_default()));
        };
        for section in SECTIONS {
            keys(&command, section).for_each(|arg| note(section.name, arg));
        }
        let daemon = find(&command, &["daemon"]);
        daemon.get_arguments().filter(|arg| SHARED.contains(&arg.get_id().as_str())).for_each(|arg| note("", arg));
        assert_eq!(found, expected);
        // Every option of the daemon that people may use, but for where the file is and help itself.
        for arg in daemon.get_arguments().filter(|arg| !arg.is_hide_set() && arg.get_long().is_some()) {
            let id = arg.get_id().as_str();
            let known = ["daemon", "park", ""].iter().any(|section| found.contains_key(&format!("{section}.{id}")));
            assert!(known || id == "replace" || ["config", "help", "version"].contains(&id), "--{id} has no key");
        }
    }

    #[test]
    fn the_shipped_file_tells_what_each_option_does() {
        let lines: Vec<&str> = SHIPPED.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let key = line.strip_prefix('#').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_lowercase()));
            assert!(!key || (index > 0 && lines[index - 1].starts_with("# ")), "{line}: no explanation above it");
        }
    }

    #[test]
    fn rules_may_be_tables() {
        let text = "[[attach]]\nexe = \"/usr/bin/qemu-*\"\nmin = \"64M\"\n\n[[attach]]\nuser = 0\ndomain = \"d\"\n";
        let settings = settings_of(&command(), text).map_err(|wrong| wrong.show(Path::new("f"), text)).expect("taken");
        let [setting] = &settings[..] else { panic!("{settings:?}") };
        assert_eq!((setting.section, setting.id.as_str()), ("daemon", "attach"));
        let rules = attach_rules::parse(&setting.value).expect("rules");
        let expected = attach_rules::parse("exe=/usr/bin/qemu-*,min=64M; user=0,domain=d").expect("rules");
        assert_eq!(rules, expected);
    }

    #[test]
    fn what_is_wrong_is_said_with_line_and_key() {
        for (text, expected) in [
            ("[daemon]\nperod = 2\n", "f:2: daemon.perod: unknown key; [daemon] has allow_idle_states, "),
            ("\n[demon]\n", "f:2: demon: unknown; there are socket and [daemon], "),
            ("daemon = 3", "f:1: daemon: is a table"),
            (
                "[daemon]\nkeep_cold_on_exit = \"yes\"",
                "f:2: daemon.keep_cold_on_exit: takes true or false, not a string",
            ),
            ("[daemon]\nkeep_cold_on_exit = 1", "f:2: daemon.keep_cold_on_exit: takes true or false, not an integer"),
            ("[daemon]\npool_max = true", "f:2: daemon.pool_max: takes a size, such as \"512M\", not a boolean"),
            ("[daemon]\npool_max = \"12 bananas\"", "f:2: daemon.pool_max: `12 bananas`: "),
            ("[daemon]\nworkers = 0", "f:2: daemon.workers: `0`: "),
            ("[daemon]\nworkers = -1", "f:2: daemon.workers: `-1`: "),
            ("[daemon]\nworkers = 2.5", "f:2: daemon.workers: takes a whole number, not a float"),
            (
                "[daemon]\nscan_interval = 1979-05-27",
                "f:2: daemon.scan_interval: takes a time, such as \"5s\", not a datetime",
            ),
            ("[daemon]\n\n\nscan_interval = \"1ms\"", "f:4: daemon.scan_interval: `1ms`: "),
            ("[daemon]\nmetrics = \"0.0.0.0:9199\"", "f:2: daemon.metrics: `0.0.0.0:9199`: "),
            ("[daemon]\nrefault_budget = 99", "f:2: daemon.refault_budget: `99`: "),
            ("[park]\npark_idle = \"5m\"", "f:2: park.park_idle: unknown key; [park] has idle, reserve, within"),
            ("[daemon]\npark_idle = \"5m\"", "f:2: daemon.park_idle: unknown key"),
            ("[park]\nidle = \"0s\"", "f:2: park.idle: `0s`: takes at least 100ms, or never"),
            ("[park]\nwithin = \"soon\"", "f:2: park.within: `soon`: `soon` is no time"),
            ("[daemon]\nno_keeper = true", "f:2: daemon.no_keeper: unknown key"),
            ("[daemon]\nconfig = \"x\"", "f:2: daemon.config: unknown key"),
            ("[run]\nbackend = \"magic\"", "f:2: run.backend: `magic`: one of "),
            ("[run]\ndomain = 7", "f:2: run.domain: takes a string in quotes, not an integer"),
            ("[disk]\nworkers = 1000", "f:2: disk.workers: `1000`: "),
            ("[disk]\nbackground = true", "f:2: disk.background: unknown key"),
            ("[image]\nstore = [1]", "f:2: image.store: takes a string in quotes, not an array"),
            ("socket = 1", "f:1: socket: takes a string in quotes, not an integer"),
            ("attach = 1", "f:1: attach: is a list of tables: write [[attach]]"),
            ("[attach]\nexe = \"/bin/x\"", "f:1: attach: is a list of tables: write [[attach]]"),
            ("\n[[attach]]\nmin = 3\n", "f:2: attach: `min=3` would attach every program"),
            ("[[attach]]\nexe = \"/a,b\"\n", "f:2: attach.exe: takes a string, number, true or false, without"),
            ("[[attach]]\nsize = 3\n", "f:1: attach: `size` is no key"),
            ("[daemon]\nscan_interval = \n", "f:2: no TOML: "),
            ("[daemon]\nscan_interval = 2\nscan_interval = 3\n", "f:3: no TOML: "),
        ] {
            let said = wrong(text);
            assert!(said.starts_with(expected), "{text:?}: {said}");
            assert_eq!(said.lines().count(), 1, "{said}");
        }
    }

    #[test]
    fn the_command_line_wins_over_the_file_and_the_file_over_what_is_built_in() {
        let file = "socket = \"/f/s\"\n[daemon]\nworkers = 3\nkeep_cold_on_exit = true\nscan_interval = \"7s\"\npool_max = \"1G\"\n\
            [park]\nidle = \"5m\"\nwithin = \"7s\"\n[run]\ncold = true\n[disk]\ncache_size = \"2G\"\n[image]\ndomain = \"d\"\n";
        let settings = settings_of(&command(), file).expect("good");
        let parse = |args: &[&str]| {
            let args = std::iter::once("pagefold").chain(args.iter().copied());
            apply(command(), &settings).try_get_matches_from(args).expect("good arguments")
        };
        let raw = |matches: &ArgMatches, id: &str| {
            let mut below = matches;
            while let Some((_, next)) = below.subcommand() {
                below = next;
            }
            below.get_raw(id).and_then(|mut values| values.next()).map(|value| value.to_string_lossy().into_owned())
        };
        let daemon = parse(&["daemon", "--workers", "5", "--keep-cold-on-exit=false"]);
        assert_eq!(raw(&daemon, "workers").as_deref(), Some("5"));
        assert_eq!(raw(&daemon, "keep_cold_on_exit").as_deref(), Some("false"));
        assert_eq!(raw(&daemon, "scan_interval").as_deref(), Some("7s"));
        assert_eq!(raw(&daemon, "pool_max").as_deref(), Some("1G"));
        assert_eq!(raw(&daemon, "park_idle").as_deref(), Some("5m"));
        assert_eq!(raw(&parse(&["daemon", "--park-within=3s"]), "park_within").as_deref(), Some("3s"));
        assert_eq!(raw(&daemon, "cold_scan_interval").as_deref(), Some("5s"));
        assert_eq!(raw(&daemon, "socket").as_deref(), Some("/f/s"));
        assert_eq!(raw(&parse(&["status"]), "socket").as_deref(), Some("/f/s"));
        assert_eq!(raw(&parse(&["status", "--socket", "/x"]), "socket").as_deref(), Some("/x"));
        assert_eq!(raw(&parse(&["run", "--", "ls"]), "cold").as_deref(), Some("true"));
        assert_eq!(raw(&parse(&["run", "--cold=false", "--", "ls"]), "cold").as_deref(), Some("false"));
        assert_eq!(raw(&parse(&["disk", "mount", "a", "b"]), "cache_size").as_deref(), Some("2G"));
        assert_eq!(raw(&parse(&["image", "ls"]), "domain").as_deref(), Some("d"));
        assert_eq!(raw(&parse(&["image", "ls", "--domain", "e"]), "domain").as_deref(), Some("e"));
        assert_eq!(raw(&parse(&["image", "--domain", "e", "ls"]), "domain").as_deref(), Some("e"));
    }

    #[test]
    fn a_successor_works_as_its_predecessor_did() {
        let settings =
            settings_of(&command(), "[daemon]\nkeep_cold_on_exit = true\nscan_interval = \"7s\"\n").expect("good");
        let command = apply(command(), &settings);
        let args = ["pagefold", "daemon", "--workers", "5", "--no-keeper"];
        let matches = command.clone().try_get_matches_from(args).expect("good");
        let (_, daemon) = matches.subcommand().expect("daemon");
        let again = again(&command, daemon);
        for part in
            ["--workers=5", "--keep-cold-on-exit=true", "--scan-interval=7s", "--no-keeper", "--cold-policy=auto"]
        {
            assert!(again.iter().any(|argument| argument == part), "{part} is not in {again:?}");
        }
        // It is a call of the tool without the file.
        let plain = with_values(crate::Cli::command());
        let matches =
            plain.try_get_matches_from(std::iter::once(OsString::from("pagefold")).chain(again)).expect("good");
        assert!(
            matches.subcommand().is_some_and(|(_, daemon)| daemon.get_one::<bool>("keep_cold_on_exit") == Some(&true))
        );
    }
}
