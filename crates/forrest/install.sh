#!/bin/sh
# Installs forrest's C face: header, static and shared library, pkg-config file, man page.
#   cargo build --release -p forrest && crates/forrest/install.sh /usr/local target/release
# With DESTDIR set, files go below it.
set -eu
prefix=${1:?usage: install.sh PREFIX [DIRECTORY OF libforrest.so AND libforrest.a]}
here=$(cd "$(dirname "$0")" && pwd)
built=${2:-${CARGO_TARGET_DIR:-$here/../../target}/release}
root=${DESTDIR:-}$prefix
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$here/../../Cargo.toml")
soname=libforrest.so.0
for file in libforrest.so libforrest.a; do
    [ -f "$built/$file" ] || { echo "install.sh: no $built/$file; run cargo build --release -p forrest" >&2; exit 1; }
done
mkdir -p "$root/include" "$root/lib/pkgconfig" "$root/share/man/man3"
install -m 644 "$here/include/forrest.h" "$root/include/forrest.h"
install -m 755 "$built/libforrest.so" "$root/lib/libforrest.so.$version"
ln -sf "libforrest.so.$version" "$root/lib/$soname"
ln -sf "$soname" "$root/lib/libforrest.so"
install -m 644 "$built/libforrest.a" "$root/lib/libforrest.a"
install -m 644 "$here/man/forrest.3" "$root/share/man/man3/forrest.3"
sed -e "s|@prefix@|$prefix|" -e "s|@version@|$version|" "$here/forrest.pc.in" > "$root/lib/pkgconfig/forrest.pc"
