//! The command line as a whole: all commands share one style, and do what their help texts and documents say.

#[path = "../common/mod.rs"]
mod common;

mod arguments;
mod daemon;
mod demo;
mod disk;
mod export;
mod help;
mod images;
mod import;
mod inherited;
mod old_kernel;
mod output;
mod registry;
mod terminal;
mod tool;
