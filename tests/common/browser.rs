//! A headless browser, spoken to through pipes by the DevTools protocol: no port, no driver.

use crate::common::skipped;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Only ends a test that hangs.
const LIMIT: Duration = Duration::from_secs(180);

/// A browser with one page.
pub struct Browser {
    child: Child,
    to: File,
    answers: std::sync::mpsc::Receiver<Value>,
    session: Option<String>,
    asked: u64,
    events: Vec<Value>,
    _profile: tempfile::TempDir,
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Its process group: a browser is many processes.
        // SAFETY: kill takes no pointers. The group's leader was not waited for, so its pid is not reused.
        unsafe { libc::kill(-(self.child.id() as i32), libc::SIGKILL) };
        let _ = self.child.wait();
    }
}

impl Browser {
    /// Starts one; `None`, after saying so, if there is none here.
    pub fn start() -> Option<Browser> {
        let names = ["chromium", "chromium-browser", "google-chrome", "chrome"];
        let has = |name: &&&str| {
            Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
        };
        let Some(name) = names.iter().find(has) else {
            skipped("no chromium here (apt-get install chromium)");
            return None;
        };
        let profile = tempfile::tempdir().expect("a directory");
        let (theirs_in, ours_out) = std::io::pipe().expect("a pipe");
        let (ours_in, theirs_out) = std::io::pipe().expect("a pipe");
        let mut command = Command::new(name);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]);
        command.args(["--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"]);
        command.arg(format!("--user-data-dir={}", profile.path().display())).arg("about:blank");
        command.env("HOME", profile.path()).process_group(0).stdout(Stdio::null()).stderr(Stdio::null());
        let (input, output) = (theirs_in.as_raw_fd(), theirs_out.as_raw_fd());
        // SAFETY: these calls are safe between fork and exec. The protocol wants its pipes at 3 and 4, and one of ours
        // may be there already: both go above first.
        unsafe {
            command.pre_exec(move || {
                let high =
                    [libc::fcntl(input, libc::F_DUPFD_CLOEXEC, 10), libc::fcntl(output, libc::F_DUPFD_CLOEXEC, 10)];
                if high.contains(&-1) || libc::dup2(high[0], 3) == -1 || libc::dup2(high[1], 4) == -1 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let child = command.spawn().expect("the browser starts");
        drop((theirs_in, theirs_out));
        let (sender, answers) = std::sync::mpsc::channel();
        std::thread::spawn(move || listen(ours_in, &sender));
        let to = File::from(OwnedFd::from(ours_out));
        let mut browser =
            Browser { child, to, answers, session: None, asked: 0, events: Vec::new(), _profile: profile };
        let target = browser.ask("Target.createTarget", json!({ "url": "about:blank" }))["targetId"].clone();
        let attached = browser.ask("Target.attachToTarget", json!({ "targetId": target, "flatten": true }));
        browser.session = Some(attached["sessionId"].as_str().expect("a session").to_owned());
        for domain in ["Runtime", "Log", "Network", "Page"] {
            browser.ask(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    /// Sends a request of the protocol and returns its result.
    pub fn ask(&mut self, method: &str, params: Value) -> Value {
        self.asked += 1;
        let mut request = json!({ "id": self.asked, "method": method, "params": params });
        if let Some(session) = &self.session {
            request["sessionId"] = json!(session);
        }
        let mut text = serde_json::to_vec(&request).expect("JSON");
        text.push(0);
        self.to.write_all(&text).expect("the browser listens");
        let deadline = Instant::now() + LIMIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = self.answers.recv_timeout(left).unwrap_or_else(|error| panic!("{method}: {error}"));
            if answer["id"] == self.asked {
                assert!(answer.get("error").is_none(), "{method}: {answer}");
                return answer["result"].clone();
            }
            self.events.push(answer);
        }
    }

    /// Goes to `url`.
    pub fn open(&mut self, url: &str) {
        let went = self.ask("Page.navigate", json!({ "url": url }));
        assert!(went.get("errorText").is_none(), "{went}");
    }

    /// The value of `expression` in the page.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let answer = self.ask("Runtime.evaluate", json!({ "expression": expression, "returnByValue": true }));
        // A page that is not there yet has not the names of its script: that is no value, and not the end.
        answer["result"]["value"].clone()
    }

    /// All addresses that were asked for so far.
    pub fn requests(&self) -> Vec<String> {
        let sent = self.events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
        sent.filter_map(|event| Some(event["params"]["request"]["url"].as_str()?.to_owned())).collect()
    }

    /// What the console says, except greetings: errors, warnings, exceptions, refusals of the policy.
    pub fn complaints(&self) -> Vec<String> {
        let complains = |event: &&Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown" | "Log.entryAdded") => true,
            Some("Runtime.consoleAPICalled") => event["params"]["type"] != "log",
            Some("Network.loadingFailed") => event["params"]["canceled"] != true,
            _ => false,
        };
        self.events.iter().filter(complains).map(|event| event["params"].to_string()).collect()
    }
}

fn listen(from: PipeReader, sender: &std::sync::mpsc::Sender<Value>) {
    let mut from = BufReader::new(from);
    let mut message = Vec::new();
    while from.read_until(0, &mut message).is_ok_and(|got| got > 0) {
        message.pop();
        let Ok(value) = serde_json::from_slice(&message) else { return };
        if sender.send(value).is_err() {
            return;
        }
        message.clear();
    }
}
