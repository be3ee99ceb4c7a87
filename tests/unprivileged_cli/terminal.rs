//! Names that come from outside never control the terminal.

use crate::tool::{Tool, text};

#[test]
fn names_of_files_do_not_write_to_the_terminal() {
    let tool = Tool::new();
    std::fs::create_dir(tool.dir.path().join("d\x1b[1m")).expect("a directory");
    std::fs::write(tool.dir.path().join("d\x1b[1m/r\x1b[31med\n.raw"), [7; 8192]).expect("a file");
    for (args, name) in [
        (["disk", "scan", "d\x1b[1m"], "d?[1m/r?[31med?.raw "),
        (["scan", "--tree", "d\x1b[1m"], " d?[1m\n"),
        (["image", "scan", "d\x1b[1m"], " d?[1m\n"),
    ] {
        let shown = tool.run(&args);
        assert!(shown.status.success(), "{args:?}: {}", text(&shown.stderr));
        let shown = text(&shown.stdout);
        assert!(shown.contains(name) && !shown.contains('\x1b'), "{args:?}: {shown:?}");
    }
}

#[test]
fn images_do_not_write_to_the_terminal_through_errors() {
    let tool = Tool::new();
    let layout = tool.dir.path().join("layout");
    std::fs::create_dir(&layout).unwrap();
    std::fs::write(layout.join("oci-layout"), "{}").unwrap();
    let manifest = |digest| {
        serde_json::json!({ "digest": digest, "size": 0,
        "annotations": { "org.opencontainers.image.ref.name": "a\u{1b}[2Jb\npagefold: all is well" } })
    };
    let both = serde_json::json!({ "manifests": [manifest("1"), manifest("2")] });
    std::fs::write(layout.join("index.json"), both.to_string()).unwrap();
    let refused = tool.run(&["image", "import", "--name", "a:1", "layout"]);
    let said = text(&refused.stderr);
    assert!(said.contains("choose one with --ref") && said.contains("a?[2Jb?pagefold"), "{said:?}");
    assert!(said.lines().count() == 1 && !said.contains('\x1b'), "{said:?}");
}
