//! The writer: the same tree always gives the same bytes.
//!
//! The mounted form has the same tree in fewer blocks: the kernel reads each block of metadata singly, and a starting
//! program waits for it.

use super::inodes::write_inodes;
use super::plan::{Layout, PREFIX_TABLE_OFFSET, Plan};
use super::superblock::write_superblock;
use crate::digest::Digest;
use crate::error::Result;
use crate::tree::Tree;

/// A written image.
pub struct Image {
    /// The image's first bytes: all of it for [`Layout::Metadata`].
    pub head: Vec<u8>,
    /// The objects to append after `head`, in order; each starts on a block.
    pub data: Vec<(Digest, u64)>,
}

/// Writes `tree` as an EROFS image.
///
/// # Errors
/// A tree the format cannot hold: more than 2^32 blocks, too many attribute bytes on one file.
pub fn write(tree: &Tree, layout: Layout) -> Result<Image> {
    let plan = Plan::new(tree, layout)?;
    let mut head = vec![0u8; plan.head_bytes as usize];
    head[PREFIX_TABLE_OFFSET..][..plan.prefix_table.len()].copy_from_slice(&plan.prefix_table);
    write_inodes(&plan, &mut head);
    write_superblock(&plan, &mut head);
    Ok(Image { head, data: plan.objects })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::erofs::{Limits, read};
    use crate::layout;

    /// Upper layers and metadata directories of earlier versions lead into the mounted form: other bytes would be another
    /// form, with another name.
    #[test]
    fn the_mounted_form_has_the_bytes_of_earlier_versions() {
        let mounted = write(&layout::tests::tree(), Layout::Mount).unwrap();
        let expected = "11bb5d953e8eba5a59a30991f9a730c56cadc4f7ab9f074f945fe90559093448";
        assert_eq!(Digest::of(&mounted.head).hex(), expected);
        assert!(mounted.data.is_empty());
    }

    #[test]
    fn the_mounted_form_takes_half_the_inode_blocks() {
        let tree = layout::tests::tree();
        let size = |layout| write(&tree, layout).unwrap().head.len();
        let (named, mounted) = (size(Layout::Metadata), size(Layout::Mount));
        assert!(700 * 192 < named && mounted < named - 700 * 80, "{named} {mounted}");
    }

    #[test]
    fn each_form_needs_nothing_but_the_tree_and_is_written_the_same_twice() {
        let tree = layout::tests::tree();
        for form in [Layout::Metadata, Layout::Mount, Layout::Full] {
            let (first, second) = (write(&tree, form).unwrap(), write(&tree, form).unwrap());
            assert!(first.head == second.head && first.data == second.data, "{form:?}");
            let objects = if form == Layout::Full { tree.objects().len() } else { 0 };
            assert_eq!(first.data.len(), objects, "{form:?}");
        }
        // The form that names an image holds the whole tree.
        let named = write(&tree, Layout::Metadata).unwrap().head;
        let again = read(&named, Limits::default()).unwrap();
        assert!(write(&again, Layout::Metadata).unwrap().head == named);
    }
}
