//! Builds the preload agent and leaves it where the tool embeds it from.
//!
//! The agent is another shape of artefact (a library without the standard
//! library, aborting on panic) than the tool, so cargo is asked for it in a
//! build directory of its own. `cargo install` works as well, for the agent's
//! sources lie in the same workspace.

use std::env;
use std::path::PathBuf;
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
    let mut cargo = Command::new(env::var_os("CARGO").expect("cargo sets it"));
    cargo
        .current_dir(&root)
        .args(["rustc", "--quiet", "--package", "pagefold-agent", "--lib", "--crate-type", "cdylib"])
        .args(["--features", "preload", "--profile", "agent", "--target", &target])
        .arg("--target-dir")
        .arg(out.join("agent"));
    // Flags meant for the tool (sanitizers, cfgs of models) are not the agent's.
    for name in
        ["RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER"]
    {
        cargo.env_remove(name);
    }
    let status = cargo.status().expect("cargo runs");
    assert!(status.success(), "the preload agent did not build");
    let built = out.join("agent").join(&target).join("agent/libpagefold_agent.so");
    println!("cargo::rustc-env=PAGEFOLD_AGENT_SO={}", built.display());
}
