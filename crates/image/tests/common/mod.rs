//! What the tests of images share.

use pagefold_image::build;
use pagefold_image::build::Omissions;
use pagefold_image::progress::Progress;
use pagefold_image::store::{ImageRecord, RunConfig, Store};
use pagefold_image::{Result, stat};
use std::path::Path;

/// Builds the directory as an image.
pub fn build_dir(store: &Store, name: &str, dir: &Path) -> Result<ImageRecord> {
    build_to_run(store, name, dir, RunConfig::default())
}

/// Like [`build_dir`], with the settings that `exec` reads from the record.
pub fn build_to_run(store: &Store, name: &str, dir: &Path, config: RunConfig) -> Result<ImageRecord> {
    let (build, mut notes) = (store.build()?, Omissions::default());
    let tree = build::from_directory(&build, dir, Default::default(), &mut notes, &Progress::silent())?;
    build.publish(name, &tree, "test", config, notes.lines())
}

/// The damage that a verification of all images finds.
pub fn damaged(store: &Store) -> Vec<stat::Damage> {
    stat::verify(store, &[], false).unwrap().damaged
}
