//! Gives the shared library its soname: the number changes when a program built before can no longer use it.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libforrest.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
