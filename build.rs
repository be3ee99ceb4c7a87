//! Builds both forms of the agent, and leaves them where the tool embeds them from.
//!
//! The agent is another shape of artefact (a library without the standard
//! library, aborting on panic) than the tool, so cargo is asked for it in a
//! build directory of its own. `cargo install` works as well, for the agent's
//! sources lie in the same workspace.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    for path in [
        "crates/agent/src",
        "crates/agent/Cargo.toml",
        "crates/os/src",
        "crates/protocol/src",
        "crates/protocol/Cargo.toml",
        "crates/os/Cargo.toml",
        "Cargo.lock",
        "build.rs",
    ] {
        println!("cargo::rerun-if-changed={path}");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let target = env::var("TARGET").expect("cargo sets it");
    for (feature, name, flags) in
        [("preload", "PAGEFOLD_AGENT_SO", &[][..]), ("attached", "PAGEFOLD_ATTACHED_AGENT_SO", &ATTACHED)]
    {
        // One directory for both: what they depend on is built once. The next form takes the name of this one's file.
        let built = build_agent(&root, &out.join("agents"), &target, feature, flags);
        let kept = out.join(format!("{feature}.so"));
        std::fs::copy(built, &kept).expect("the build directory can be written");
        println!("cargo::rustc-env={name}={}", kept.display());
    }
}

/// How the form that enters programs is linked: it begins by itself and needs no library; code lies apart from data.
const ATTACHED: [&str; 5] =
    ["-nostdlib", "-Wl,-e,entered", "-Wl,-z,max-page-size=4096", "-Wl,-z,separate-code", "-Wl,-Bsymbolic"];

/// Builds the agent with `feature`, linked with `flags`, below `out`; returns its file.
fn build_agent(root: &Path, out: &Path, target: &str, feature: &str, flags: &[&str]) -> PathBuf {
    let mut cargo = Command::new(env::var_os("CARGO").expect("cargo sets it"));
    cargo
        .current_dir(root)
        .args(["rustc", "--quiet", "--package", "pagefold-agent", "--lib", "--crate-type", "cdylib"])
        .args(["--features", feature, "--profile", "agent", "--target", target])
        .arg("--target-dir")
        .arg(out)
        .arg("--")
        .args(flags.iter().map(|flag| format!("-Clink-arg={flag}")));
    // Flags meant for the tool (sanitizers, cfgs of models) are not the agent's.
    for name in
        ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER"]
    {
        cargo.env_remove(name);
    }
    let status = cargo.status().expect("cargo runs");
    assert!(status.success(), "the {feature} agent did not build");
    out.join(target).join("agent/libpagefold_agent.so")
}
