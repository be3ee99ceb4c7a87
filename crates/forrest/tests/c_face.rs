//! Programs in C and C++ compile against the installed header and do what it says, linked with the shared and with the
//! static library; and the header declares exactly what the code defines.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where cargo puts libforrest.so and libforrest.a for a test: beside its program.
fn built() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_path_buf()
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        println!("SKIPPED: {program} is not installed");
    }
    found
}

/// Whether there are libraries of the system for a program that needs none of them when it runs.
fn has_static_libraries(compiler: &str, folder: &Path) -> bool {
    let source = folder.join("empty.c");
    std::fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let mut link = Command::new(compiler);
    let linked =
        link.args(["-static", "-lpthread", "-lm", "-o"]).arg(folder.join("empty")).arg(&source).output().unwrap();
    if !linked.status.success() {
        println!("SKIPPED: {compiler} -static: no static libraries of the system");
    }
    linked.status.success()
}

#[test]
fn c_and_cpp_programs_run_against_the_installed_library() {
    if !has("cc") || !has("pkg-config") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    run(Command::new(here().join("install.sh")).arg(root.path()).arg(built()).env_remove("DESTDIR"));
    let pkg_config = |arguments: &[&str]| -> Vec<String> {
        let text = run(Command::new("pkg-config")
            .args(arguments)
            .arg("forrest")
            .env("PKG_CONFIG_PATH", root.path().join("lib/pkgconfig")));
        text.split_whitespace().map(str::to_owned).collect()
    };
    let soname = run(Command::new("readelf").arg("-d").arg(root.path().join("lib/libforrest.so")));
    assert!(soname.contains("[libforrest.so.0]"), "{soname}");
    let check = here().join("tests/c/check.c");
    let port = here().join("examples/libforrest_port.c");
    let cpp = here().join("tests/c/check.cpp");
    for (compiler, standard, source, expected) in [
        ("cc", "-std=gnu99", &check, "ok"),
        ("cc", "-std=gnu11", &port, "1000 keys set, read and deleted; hash of key0 is d5abaea0efc0e080"),
        ("c++", "-std=c++11", &cpp, "ok"),
    ] {
        if !has(compiler) {
            continue;
        }
        let program = root.path().join("program");
        // Shared: found by soname.
        run(Command::new(compiler)
            .args(["-g", "-Wall", "-Wextra", "-Werror", standard])
            .arg(source)
            .args(pkg_config(&["--cflags", "--libs"]))
            .args(["-lpthread", "-o"])
            .arg(&program));
        let out = run(Command::new(&program).env("LD_LIBRARY_PATH", root.path().join("lib")));
        assert_eq!(out.trim(), expected, "{source:?}, shared");
        // Static: the archive by name, with what it needs from the system; and all of it.
        let needs: Vec<String> = pkg_config(&["--libs", "--static"]).into_iter().filter(|l| l != "-lforrest").collect();
        for all in [false, true] {
            if all && !has_static_libraries(compiler, root.path()) {
                continue;
            }
            run(Command::new(compiler)
                .args(["-g", standard])
                .args(all.then_some("-static"))
                .arg(source)
                .args(pkg_config(&["--cflags"]))
                .arg(root.path().join("lib/libforrest.a"))
                .args(&needs)
                .arg("-o")
                .arg(&program));
            assert_eq!(run(&mut Command::new(&program)).trim(), expected, "{source:?}, static, all {all}");
        }
    }
}

/// A C declaration of a Rust type, with the name it declares.
fn c_declaration(rust: &str, name: &str) -> String {
    let rust = rust.trim();
    let pointer = |rest: &str, constant: &str| {
        let inner = c_declaration(rest, "");
        format!("{constant}{}*{name}", if inner.ends_with('*') { inner } else { format!("{} ", inner.trim()) })
    };
    if let Some(rest) = rust.strip_prefix("*const ") {
        return pointer(rest, "const ");
    }
    if let Some(rest) = rust.strip_prefix("*mut ") {
        return pointer(rest, "");
    }
    let plain = match rust {
        "c_int" => "int",
        "c_uint" => "unsigned int",
        "c_char" => "char",
        "c_void" => "void",
        "u64" => "uint64_t",
        "i64" => "int64_t",
        other => other,
    };
    if name.is_empty() { plain.to_owned() } else { format!("{plain} {name}") }
}

fn squeeze(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace("* ", "*").replace("( ", "(")
}

/// Parts of `text` between `start` and `end`.
fn between<'t>(text: &'t str, start: &str, end: &str) -> Vec<&'t str> {
    text.match_indices(start).map(|(at, _)| &text[at + start.len()..]).map(|t| &t[..t.find(end).unwrap()]).collect()
}

/// "name: type" pairs as C declarations.
fn arguments(list: &str) -> Vec<String> {
    list.split(',')
        .map(str::trim)
        .filter(|argument| !argument.is_empty())
        .map(|argument| argument.split_once(':').unwrap())
        .map(|(name, kind)| c_declaration(kind, name.trim().trim_start_matches("pub ")))
        .collect()
}

#[test]
fn header_and_code_are_equal() {
    let files = std::fs::read_dir(here().join("src/capi")).unwrap();
    let code: String = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect();
    let code: String = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let header = std::fs::read_to_string(here().join("include/forrest.h")).unwrap();
    let mut plain = String::new();
    let mut rest = header.as_str();
    while let Some((before, after)) = rest.split_once("/*") {
        plain.push_str(before);
        rest = after.split_once("*/").unwrap().1;
    }
    plain.push_str(rest);

    // Functions.
    let mut ours: BTreeMap<String, String> = BTreeMap::new();
    for text in between(&code, "extern \"C\" fn ", " {") {
        let Some((name, rest)) = text.split_once('(') else { continue };
        if name.is_empty() {
            continue;
        }
        let (list, result) = rest.rsplit_once(") -> ").unwrap();
        let list = arguments(list);
        let list = if list.is_empty() { "void".to_owned() } else { list.join(", ") };
        ours.insert(name.to_owned(), squeeze(&format!("{}({list})", c_declaration(result, name))));
    }
    let mut theirs: BTreeMap<String, String> = BTreeMap::new();
    for statement in plain.split(';') {
        // The last line that begins a declaration; `extern "C" {` and preprocessor lines may come before it.
        let statement = squeeze(&statement.lines().filter(|l| !l.starts_with('#')).collect::<Vec<_>>().join(" "));
        let statement = statement.rsplit('{').next().unwrap().trim().trim_start_matches("} ").to_owned();
        if statement.contains("typedef") || !statement.contains('(') {
            continue;
        }
        let name = statement.split('(').next().unwrap().rsplit([' ', '*']).next().unwrap().to_owned();
        theirs.insert(name, statement);
    }
    assert!(ours.len() > 25, "{ours:?}");
    assert_eq!(ours, theirs);
    let manual = std::fs::read_to_string(here().join("man/forrest.3")).unwrap();
    for name in ours.keys() {
        assert!(
            manual.split(|c: char| c != '_' && !c.is_alphanumeric()).any(|word| word == name),
            "{name} in forrest.3"
        );
    }
    for kind in ["forrest_visit", "forrest_each"] {
        let before = header.split(&format!("(*{kind})")).next().unwrap();
        assert!(before.rsplit("/*").next().unwrap().contains("Must return."), "{kind}");
    }

    // Constants.
    let mut ours: BTreeMap<String, String> = BTreeMap::new();
    for kind in ["c_int", "c_uint"] {
        for text in between(&code, "pub const ", ";") {
            if let Some((name, value)) = text.split_once(&format!(": {kind} = ")) {
                ours.insert(name.to_owned(), value.to_owned());
            }
        }
    }
    let mut theirs: BTreeMap<String, String> = BTreeMap::new();
    for text in between(&plain, "enum {", "}") {
        for line in text.split(',').map(str::trim).filter(|line| !line.is_empty()) {
            let (name, value) = line.split_once(" = ").unwrap();
            theirs.insert(name.to_owned(), value.to_owned());
        }
    }
    assert!(ours.len() > 20);
    assert_eq!(ours, theirs);
    let limit = |name: &str| -> usize {
        let line = plain.lines().find(|line| line.starts_with(&format!("#define {name} "))).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(limit("FORREST_KEY_BYTES_MAX"), forrest::KEY_BYTES_MAX);
    assert_eq!(limit("FORREST_VALUE_BYTES_MAX"), forrest::VALUE_BYTES_MAX);

    // Structures, field by field.
    let mut structures = 0;
    for text in between(&code, "#[repr(C)]\npub struct ", "\n}") {
        let (name, fields) = text.split_once(" {").unwrap();
        if name == "FORREST" {
            continue;
        }
        let expected = squeeze(&arguments(fields).join("; "));
        let found = between(&plain, &format!("typedef struct {name} {{"), "}");
        assert_eq!(squeeze(found[0]).trim_end_matches(';'), expected, "{name}");
        structures += 1;
    }
    assert_eq!(structures, 4);

    // Callbacks.
    for (name, expected) in [
        ("forrest_visit", "*mut c_void, *const c_void, size_t, *const c_void, size_t) -> c_int"),
        ("forrest_each", "*mut c_void, size_t, *const c_void, size_t)"),
    ] {
        let text = squeeze(between(&code, &format!("pub type {name} ="), ">;")[0]);
        assert_eq!(text, squeeze(&format!("Option<unsafe extern \"C\" fn({expected}")));
        let declared = squeeze(between(&plain, &format!("(*{name})("), ")")[0]);
        let types: Vec<String> = declared
            .split(',')
            .map(|one| one.trim().trim_end_matches(|c: char| c.is_ascii_lowercase() || c == '_').trim().to_owned())
            .collect();
        let list = expected.split(')').next().unwrap();
        let wanted: Vec<String> = list.split(", ").map(|kind| squeeze(&c_declaration(kind, "x"))).collect();
        let wanted: Vec<String> = wanted.iter().map(|one| one.trim_end_matches('x').trim().to_owned()).collect();
        assert_eq!(types, wanted, "{name}");
    }
}

#[test]
fn two_copies_of_the_library_in_a_process_see_each_other_s_threads_alive() {
    type Open = unsafe extern "C" fn(*const libc::c_char, *const libc::c_void, *mut *mut libc::c_void) -> libc::c_int;
    type Close = unsafe extern "C" fn(*mut libc::c_void) -> libc::c_int;
    let library = std::ffi::CString::new(built().join("libforrest.so").to_str().unwrap()).unwrap();
    // SAFETY: a library of our own, which stays loaded, and two of its functions as its header declares them.
    let (open, close) = unsafe {
        let library = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        assert!(!library.is_null());
        let (open, close) =
            (libc::dlsym(library, c"forrest_open".as_ptr()), libc::dlsym(library, c"forrest_close".as_ptr()));
        assert!(!open.is_null() && !close.is_null());
        (std::mem::transmute::<*mut libc::c_void, Open>(open), std::mem::transmute::<*mut libc::c_void, Close>(close))
    };
    let name = format!("test-copies-{}", std::process::id());
    let store = forrest::Options::new().limit_bytes(16 << 20).create(&name).unwrap();
    let named = std::ffi::CString::new(name.as_str()).unwrap();
    store.set(b"key", &[5; 300]).unwrap();
    let mut handle = std::ptr::null_mut();
    // SAFETY: a NUL-terminated name, the default options, and a place for the handle.
    let opened = unsafe { open(named.as_ptr(), std::ptr::null(), &raw mut handle) };
    let recovered = store.stats().recovery_count;
    let _ = forrest::Store::remove(&name);
    assert_eq!((opened, recovered), (0, 0));
    // SAFETY: the handle just opened.
    assert_eq!(unsafe { close(handle) }, 0);
    assert_eq!(store.get(b"key").unwrap(), &[5; 300]);
}

#[test]
fn a_value_is_copied_only_into_the_memory_of_the_caller() {
    use forrest::capi::*;
    const BYTES: usize = 256 << 20;
    // SAFETY: the child calls functions of our own, malloc among them, which is usable after fork, and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: sets a timer of this process.
        unsafe { libc::alarm(60) };
        let mut handle = std::ptr::null_mut();
        let (mut length, mut copy) = (0, std::ptr::null_mut());
        let mut buffer = vec![0u8; 3000];
        // SAFETY: all pointers are valid for their lengths.
        let codes = unsafe {
            let opened = forrest_open(std::ptr::null(), std::ptr::null(), &raw mut handle);
            let value = vec![1u8; BYTES];
            let set = forrest_set(handle, c"long".as_ptr().cast(), 4, value.as_ptr().cast(), BYTES);
            drop(value);
            // No more memory than there is now, and a little.
            let pages: u64 =
                std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').next().unwrap().parse().unwrap();
            let limit = pages * 4096 + (16 << 20);
            let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
            let limited = libc::setrlimit(libc::RLIMIT_AS, &raw const limit);
            let key = c"long".as_ptr().cast();
            let asked = forrest_get(handle, key, 4, std::ptr::null_mut(), 0, &raw mut length);
            let small = forrest_get(handle, key, 4, buffer.as_mut_ptr().cast(), buffer.len(), &raw mut length);
            let copied = forrest_get_copy(handle, key, 4, &raw mut copy, std::ptr::null_mut());
            [opened, set, limited, asked, small, copied]
        };
        let right = codes == [0, 0, 0, FORREST_TOO_SMALL, FORREST_TOO_SMALL, FORREST_NO_MEMORY] && length == BYTES;
        // SAFETY: _exit ends the child without running destructors of the parent's threads.
        unsafe { libc::_exit(if right && copy.is_null() { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waitpid writes only the status; the child was just forked.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
}
