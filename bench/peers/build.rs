//! Compiles the peers that are not Rust, when their feature asks for them.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cpp")]
    {
        println!("cargo:rerun-if-changed=src/trees.cc");
        cc::Build::new().cpp(true).std("c++17").opt_level(3).file("src/trees.cc").compile("trees");
    }
}
