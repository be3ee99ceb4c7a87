//! What a newcomer's shell and `man` get from the tool parses there, covers every command, and every
//! command shows examples.

use std::io::Write;
use std::process::{Command, Output, Stdio};

fn pagefold(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagefold")).args(args).env("NO_COLOR", "1").output().expect("the tool runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the tool writes UTF-8")
}

/// Names of the commands in a help text; none if it lists none.
fn listed(help: &str) -> Vec<String> {
    let Some(list) = help.split("Commands:").nth(1) else { return Vec::new() };
    let list = list.split("Options:").next().unwrap_or(list);
    let first = |line: &str| line.split_whitespace().next().map(str::to_owned);
    list.lines()
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(first)
        .filter(|name| name != "help")
        .collect()
}

/// Names of all commands.
fn commands() -> Vec<String> {
    listed(&text(&pagefold(&["--help"]).stdout))
}

fn exists(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

#[test]
fn every_command_shows_examples() {
    let commands = commands();
    assert!(commands.len() >= 4, "{commands:?}");
    for command in commands {
        let help = text(&pagefold(&[&command, "--help"]).stdout);
        assert!(help.contains("Examples:"), "{command} --help shows no examples");
        for member in listed(&help) {
            let help = text(&pagefold(&[&command, &member, "--help"]).stdout);
            assert!(help.contains("Examples:"), "{command} {member} --help shows no examples");
        }
    }
}

/// What the tool offers a shell for the last of these words, one a line.
fn offered(words: &[&str], environment: &[(&str, &str)]) -> Vec<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(["--", "pagefold"]).args(words).envs(environment.iter().copied());
    command.env("_CLAP_COMPLETE_INDEX", words.len().to_string()).env("_CLAP_IFS", "\n");
    let output = command.env("PAGEFOLD_COMPLETE", "bash").output().expect("the tool runs");
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn completions_parse_in_their_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = pagefold(&["completions", shell]);
        assert!(script.status.success() && text(&script.stdout).contains("PAGEFOLD_COMPLETE"), "{shell}");
        let check: &[&str] = match shell {
            "bash" | "zsh" => &["-n"],
            "fish" => &["--no-execute"],
            _ => continue,
        };
        if !exists(shell) {
            println!("SKIPPED: no {shell} here to parse its completions");
            continue;
        }
        let mut parser = Command::new(shell).args(check).stdin(Stdio::piped()).spawn().expect("the shell starts");
        parser.stdin.take().expect("a pipe").write_all(&script.stdout).expect("the shell reads");
        assert!(parser.wait().expect("the shell ends").success(), "{shell} does not parse its completions");
    }
    assert_eq!(pagefold(&["completions", "tcsh"]).status.code(), Some(2));
    let asked = Command::new(env!("CARGO_BIN_EXE_pagefold")).env("PAGEFOLD_COMPLETE", "tcsh").output();
    let asked = asked.expect("the tool runs");
    assert_eq!((asked.status.code(), text(&asked.stderr).lines().count()), (Some(1), 1), "{}", text(&asked.stderr));
}

#[test]
fn completions_offer_what_there_is_and_nothing_that_is_hidden() {
    let all = offered(&[""], &[]);
    commands().iter().for_each(|command| assert!(all.contains(command), "{command} of {all:?}"));
    assert!(!all.iter().any(|name| ["demo-client", "keeper"].contains(&name.as_str())), "{all:?}");
    assert!(!offered(&["daemon", "--o"], &[]).iter().any(|name| name.contains("on-demand")));
    // A process that is no client, and this test's own.
    let pid = std::process::id().to_string();
    assert!(offered(&["attach", &pid], &[]).contains(&pid));
    assert!(!offered(&["detach", &pid], &[("PAGEFOLD_SOCKET", "/nowhere")]).contains(&pid));
}

#[test]
fn shells_complete_the_names_of_images() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name).display().to_string();
    std::fs::create_dir(at("tree")).expect("a directory");
    std::fs::write(at("tree/file"), "text").expect("a file");
    let store = at("store");
    for name in ["app:1", "app:2", "web"] {
        let built = pagefold(&["image", "--store", &store, "build", "--name", name, &at("tree")]);
        assert!(built.status.success(), "{}", text(&built.stderr));
    }
    assert_eq!(offered(&["image", "rm", "app"], &[("PAGEFOLD_STORE", &store)]), ["app:1", "app:2"]);
    assert_eq!(offered(&["image", "exec", "w"], &[("PAGEFOLD_STORE", &store)]), ["web"]);
    assert_eq!(offered(&["image", "--domain", ""], &[("PAGEFOLD_STORE", &store)]), ["default"]);
    // A store that is not there is no error, and is not made.
    assert!(offered(&["image", "rm", "app"], &[("PAGEFOLD_STORE", &at("none"))]).is_empty());
    assert!(!dir.path().join("none").exists());
    let directory = std::path::Path::new(env!("CARGO_BIN_EXE_pagefold")).parent().expect("a directory");
    let path = format!("{}:{}", directory.display(), std::env::var("PATH").expect("text"));
    let in_shell = |shell: &str, script: &str| {
        let mut command = Command::new(shell);
        command.args(["-c", script]).env("PATH", &path).env("PAGEFOLD_STORE", &store).env("HOME", dir.path());
        let output = command.output().expect("the shell runs");
        assert!(output.stderr.is_empty(), "{shell}: {}", text(&output.stderr));
        text(&output.stdout).split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    // Bash takes the words apart at colons and equals signs, and inserts what comes after the last of them.
    let bash = |words: &str, last: &str| {
        let script = format!(
            "source <(pagefold completions bash) && COMP_WORDS=({words}) && COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)) && \
             _pagefold pagefold '{last}' && echo \"${{COMPREPLY[@]}}\""
        );
        in_shell("bash", &script)
    };
    assert_eq!(bash("pagefold image rm app", "app"), ["app:1", "app:2"]);
    assert_eq!(bash("pagefold image rm app :", ""), ["1", "2"]);
    assert_eq!(bash("pagefold image rm app : 2", "2"), ["2"]);
    assert_eq!(bash("pagefold image rm web app : 1", "1"), ["1"]);
    assert_eq!(bash("pagefold image --domain = de", "de"), ["default"]);
    assert_eq!(bash("pagefold image export --format = o", "o"), ["oci"]);
    if exists("fish") {
        let script = "pagefold completions fish | source; complete -C 'pagefold image rm app'";
        assert_eq!(in_shell("fish", script), ["app:1", "app:2"]);
    } else {
        println!("SKIPPED: no fish here to complete");
    }
}

#[test]
fn man_renders_every_manual_page() {
    let dir = tempfile::tempdir().expect("a directory");
    let made = pagefold(&["man", &dir.path().display().to_string()]);
    assert!(made.status.success(), "{}", text(&made.stderr));
    let main = std::fs::read_to_string(dir.path().join("man1/pagefold.1")).expect("the tool's own page");
    for section in ["ENVIRONMENT", "EXIT STATUS", "FILES"] {
        assert!(main.contains(&format!(".SH \"{section}\"")), "{section}");
    }
    let members = |command: &String| -> Vec<String> {
        let below = listed(&text(&pagefold(&[command, "--help"]).stdout));
        below.iter().map(|member| format!("{command}-{member}")).collect()
    };
    let all = commands();
    let pages: Vec<String> = all.iter().flat_map(members).chain(all.iter().cloned()).collect();
    assert!(pages.iter().any(|page| page == "image-build"), "{pages:?}");
    let of_commands = pages.iter().map(|command| format!("man1/pagefold-{command}.1"));
    for name in of_commands.chain(["man5/pagefold.toml.5".to_owned(), "man7/pagefold.7".to_owned()]) {
        let page = dir.path().join(&name);
        assert!(std::fs::metadata(&page).is_ok_and(|meta| meta.len() > 200), "{} is missing", page.display());
        if !exists("man") {
            println!("SKIPPED: no man here to render {}", page.display());
            continue;
        }
        let shown =
            Command::new("man").args(["--warnings", "-l"]).arg(&page).env("MANPAGER", "cat").output().expect("man");
        let errors = text(&shown.stderr);
        if !shown.status.success() && errors.contains("minimized") {
            println!("SKIPPED: man is a stub here");
            return;
        }
        assert!(shown.status.success() && errors.trim().is_empty(), "{}: {errors}", page.display());
        let sections: &[&str] = if name.ends_with(".1") { &["SYNOPSIS", "EXIT STATUS"] } else { &["DESCRIPTION"] };
        for section in sections.iter().chain(["SEE ALSO"].iter()) {
            assert!(text(&shown.stdout).contains(section), "{section} is not in {}", page.display());
        }
    }
}

#[test]
fn a_directory_that_cannot_be_made_is_one_line() {
    let refused = pagefold(&["man", "/proc/nowhere"]);
    assert_eq!(refused.status.code(), Some(1));
    let errors = text(&refused.stderr);
    assert!(errors.starts_with("pagefold: man: cannot write into /proc/nowhere: "), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

#[test]
fn doctor_says_the_same_in_text_json_and_exit_status() {
    let plain = pagefold(&["doctor"]);
    let json = pagefold(&["doctor", "--json"]);
    let findings: serde_json::Value = serde_json::from_slice(&json.stdout).expect("doctor --json prints JSON");
    let works = findings["merging_works"].as_bool().expect("merging_works");
    assert_eq!(plain.status.code(), Some(if works { 0 } else { 1 }));
    assert_eq!(json.status.code(), plain.status.code());
    let listed = findings["findings"].as_array().expect("findings");
    let missing = listed.iter().any(|item| item["needed"] == true && item["works"] == false);
    assert_eq!(works, !missing);
    for item in listed {
        assert!(text(&plain.stdout).contains(item["name"].as_str().expect("a name")));
        assert_eq!(item.get("cure").is_some(), item["works"] == false, "a cure for what does not work: {item}");
    }
    assert!(text(&plain.stdout).contains("Domains are walls."));
    assert!(!text(&plain.stdout).contains('\x1b'), "no colours into a pipe");
}
