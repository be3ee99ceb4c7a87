#!/bin/sh
# Runs the C tests under valgrind, and under AddressSanitizer with the library built by a nightly toolchain.
# What is not installed is skipped, and said. Exits 1 if a tool finds anything.
#   crates/forrest/tests/sanitize.sh [valgrind|asan]...
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ $# -gt 0 ] || set -- valgrind asan
for tool in "$@"; do
    case $tool in
    valgrind)
        command -v valgrind >/dev/null || { echo "SKIPPED: valgrind is not installed"; continue; }
        # valgrind does not know AVX-512 and cannot reserve 256 GiB, so build for the plain architecture;
        # the store halves its reservation until it fits.
        cargo build -q --manifest-path "$here/Cargo.toml" --lib
        "$here/install.sh" "$work/v" "$target/debug"
        cc -g -Wall -Wextra -Werror "$here/tests/c/check.c" -I"$work/v/include" "$work/v/lib/libforrest.a" \
            -lpthread -lm -ldl -o "$work/check-v"
        # --soname-synonyms keeps valgrind's malloc; fork children are checked too.
        if valgrind --quiet --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite \
            --trace-children=no "$work/check-v"; then
            echo "valgrind: ok"
        else
            echo "valgrind: FAILED"; exit 1
        fi
        ;;
    asan)
        rustup toolchain list 2>/dev/null | grep -q nightly || { echo "SKIPPED: no nightly toolchain"; continue; }
        RUSTFLAGS="-Zsanitizer=address" cargo +nightly build -q --manifest-path "$here/Cargo.toml" --lib \
            --target x86_64-unknown-linux-gnu --target-dir "$target/asan"
        runtime=$(echo "$(rustc +nightly --print sysroot)"/lib/rustlib/x86_64-unknown-linux-gnu/lib/librustc*_rt.asan.a)
        [ -f "$runtime" ] || { echo "SKIPPED: the nightly toolchain has no AddressSanitizer runtime"; continue; }
        # The C side is instrumented too, and runs on the same runtime as the library.
        cc -g -c -fsanitize=address -Wall "$here/tests/c/check.c" -I"$here/include" -o "$work/check.o"
        cc -g "$work/check.o" "$target/asan/x86_64-unknown-linux-gnu/debug/libforrest.a" \
            -Wl,--whole-archive "$runtime" -Wl,--no-whole-archive -Wl,--export-dynamic \
            -lstdc++ -lpthread -lm -ldl -lrt -o "$work/check-a"
        if ASAN_OPTIONS=detect_leaks=1 "$work/check-a"; then
            echo "asan: ok"
        else
            echo "asan: FAILED"; exit 1
        fi
        ;;
    *) echo "usage: sanitize.sh [valgrind|asan]..." >&2; exit 2 ;;
    esac
done
