//! Compiles the peers that are not Rust, when their feature asks for them.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cpp-peers")]
    {
        println!("cargo:rerun-if-changed=peers/index_peers.cc");
        cc::Build::new().cpp(true).std("c++17").opt_level(3).file("peers/index_peers.cc").compile("index_peers");
        for library in
            ["tbb", "absl_throw_delegate", "absl_raw_logging_internal", "urcu-cds", "urcu-memb", "urcu-common"]
        {
            println!("cargo:rustc-link-lib={library}");
        }
    }
}
