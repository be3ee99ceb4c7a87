//! Compiles the peers that are not Rust, when their feature asks for them.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cpp")]
    {
        println!("cargo:rerun-if-changed=src/maps.cc");
        cc::Build::new().cpp(true).std("c++17").opt_level(3).file("src/maps.cc").compile("maps");
        for library in
            ["tbb", "absl_throw_delegate", "absl_raw_logging_internal", "urcu-cds", "urcu-memb", "urcu-common"]
        {
            println!("cargo:rustc-link-lib={library}");
        }
    }
}
