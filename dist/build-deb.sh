#!/bin/sh
# Makes the Debian packages pagefold, pagefold-snapshotter, pagefold-remote, libforrest0 and libforrest-dev from what cargo built.
#   cargo build --release -p pagefold -p pagefold-snapshotter -p pagefold-remote -p forrest && dist/build-deb.sh
#   dist/build-deb.sh --binary PATH --snapshotter PATH --remote PATH --forrest DIR --out DIR
# Without a built snapshotter or pagefold-remote its package is left out. Needs dpkg-deb and the built program, which writes
# its own manual pages and completions. With strip(1) at hand debugging symbols are left out. DEBFULLNAME and DEBEMAIL name the
# maintainer, HOMEPAGE the home page; SOURCE_DATE_EPOCH makes the packages reproducible.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
built=${CARGO_TARGET_DIR:-$here/target}/release
binary=$built/pagefold snapshotter=$built/pagefold-snapshotter remote=$built/pagefold-remote forrest=$built out=$here/target/debian
while [ $# -gt 0 ]; do
    case $1 in
    --binary) binary=${2:?a path} ;;
    --snapshotter) snapshotter=${2:?a path} ;;
    --remote) remote=${2:?a path} ;;
    --forrest) forrest=${2:?a directory} ;;
    --out) out=${2:?a directory} ;;
    *) sed -n '2,7s/^# //p' "$0" >&2; exit 2 ;;
    esac
    shift 2
done
fail() { echo "build-deb.sh: $*" >&2; exit 1; }
command -v dpkg-deb >/dev/null || fail "dpkg-deb is not here; install dpkg"
for file in "$binary" "$forrest/libforrest.so" "$forrest/libforrest.a"; do
    [ -f "$file" ] || fail "no $file; run cargo build --release -p pagefold -p forrest"
done
umask 022
architecture=$(dpkg --print-architecture)
triplet=$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null) || triplet=$(uname -m)-linux-gnu
upstream=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$here/Cargo.toml")
version=$upstream-1
maintainer="${DEBFULLNAME:-pagefold} <${DEBEMAIL:-pagefold@localhost}>"
: "${SOURCE_DATE_EPOCH:=$(git -C "$here" log -1 --format=%ct 2>/dev/null || date +%s)}"
export SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# put MODE SOURCE PACKAGE/PATH
put() { install -D -m "$1" "$2" "$work/$3"; }
slim() { if command -v strip >/dev/null; then strip "$@"; fi; }
# The newest version of the C library that a file asks for.
libc_of() { grep -aoE 'GLIBC_[0-9]+\.[0-9.]*[0-9]' "$1" | sort -uV | tail -1 | sed 's/GLIBC_//'; }

# doc PACKAGE: what every package has below /usr/share/doc.
doc() {
    docs=$work/$1/usr/share/doc/$1
    mkdir -p "$docs"
    {
        echo "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/"
        echo "Upstream-Name: pagefold"
        echo
        echo "Files: *"
        echo "Copyright: $(date -u -d "@$SOURCE_DATE_EPOCH" +%Y) the authors of pagefold"
        echo "License: MIT or Apache-2.0"
        echo
        echo "License: MIT"
        sed 's/^$/./; s/^/ /' "$here/LICENSE-MIT"
        echo
        echo "License: Apache-2.0"
        echo " On Debian systems the text is in /usr/share/common-licenses/Apache-2.0."
    } > "$docs/copyright"
    {
        echo "pagefold ($version) unstable; urgency=medium"
        echo
        echo "  * See changelog.gz for what is new."
        echo
        echo " -- $maintainer  $(date -u -R -d "@$SOURCE_DATE_EPOCH")"
    } | gzip -9n > "$docs/changelog.Debian.gz"
    gzip -9nc "$here/CHANGELOG.md" > "$docs/changelog.gz"
    chmod 644 "$docs"/*
}

# pack PACKAGE SECTION DEPENDS RECOMMENDS SUMMARY, the long description from standard input
pack() {
    root=$work/$1
    mkdir -p "$root/DEBIAN"
    {
        echo "Package: $1"
        echo "Source: pagefold"
        echo "Version: $version"
        echo "Architecture: $architecture"
        echo "Maintainer: $maintainer"
        echo "Section: $2"
        echo "Priority: optional"
        if [ -n "${HOMEPAGE:-}" ]; then echo "Homepage: $HOMEPAGE"; fi
        echo "Installed-Size: $(du -k --apparent-size -s "$root" | cut -f1)"
        if [ -n "$3" ]; then echo "Depends: $3"; fi
        if [ -n "$4" ]; then echo "Recommends: $4"; fi
        case $1 in libforrest*) echo "Multi-Arch: same" ;; esac
        echo "Description: $5"
        sed 's/^/ /'
    } > "$root/DEBIAN/control"
    (cd "$root" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | LC_ALL=C sort -z | xargs -0 md5sum) \
        > "$root/DEBIAN/md5sums"
    chmod 644 "$root/DEBIAN/control" "$root/DEBIAN/md5sums"
    mkdir -p "$out"
    dpkg-deb --root-owner-group --build "$root" "$out/$1_${version}_$architecture.deb"
}

tool() {
    p=pagefold
    put 755 "$binary" $p/usr/bin/pagefold
    slim "$work/$p/usr/bin/pagefold"
    "$binary" man "$work/man"
    (cd "$work/man" && find . -type f) | while read -r page; do
        gzip -9n "$work/man/$page"
        put 644 "$work/man/$page.gz" "$p/usr/share/man/$page.gz"
    done
    for shell in bash zsh fish; do "$binary" completions $shell > "$work/$shell"; done
    put 644 "$work/bash" $p/usr/share/bash-completion/completions/pagefold
    put 644 "$work/zsh" $p/usr/share/zsh/vendor-completions/_pagefold
    put 644 "$work/fish" $p/usr/share/fish/vendor_completions.d/pagefold.fish
    put 644 "$here/dist/pagefold.toml" $p/etc/pagefold/pagefold.toml
    put 644 "$here/dist/systemd/pagefold.service" $p/usr/lib/systemd/system/pagefold.service
    put 644 "$here/dist/systemd/pagefold-user.service" $p/usr/lib/systemd/user/pagefold.service
    put 644 "$here/dist/systemd/pagefold@.service" "$p/usr/lib/systemd/system/pagefold@.service"
    put 644 "$here/dist/sysctl/50-pagefold.conf" $p/usr/lib/sysctl.d/50-pagefold.conf
    put 644 "$here/dist/udev/70-pagefold.rules" $p/usr/lib/udev/rules.d/70-pagefold.rules
    (cd "$here/dist" && find examples grafana prometheus libvirt -type f 2>/dev/null) | while read -r file; do
        mode=644
        if [ -x "$here/dist/$file" ]; then mode=755; fi
        put $mode "$here/dist/$file" "$p/usr/share/pagefold/$file"
    done
    doc $p
    for script in postinst prerm postrm; do put 755 "$here/dist/deb/$script" $p/DEBIAN/$script; done
    echo /etc/pagefold/pagefold.toml > "$work/$p/DEBIAN/conffiles"
    pack $p admin "libc6 (>= $(libc_of "$binary")), libgcc-s1" "fuse3, procps, udev" \
        "one copy of every page, deduplicated from user space" << 'END'
Hosts that run many similar virtual machines, sandboxes, containers and
processes hold the same bytes many times: in live memory, in the page cache of
disk images and image trees, in cold memory. pagefold finds equal pages and
keeps one, on a stock kernel of 6.8 or later, with no patch and no module.
END
}

containers() {
    p=pagefold-snapshotter
    put 755 "$snapshotter" $p/usr/bin/pagefold-snapshotter
    slim "$work/$p/usr/bin/pagefold-snapshotter"
    put 644 "$here/dist/systemd/pagefold-snapshotter.service" $p/usr/lib/systemd/system/pagefold-snapshotter.service
    doc $p
    for script in postinst prerm postrm; do put 755 "$here/dist/deb/snapshotter.$script" $p/DEBIAN/$script; done
    pack $p admin "libc6 (>= $(libc_of "$snapshotter")), libgcc-s1" "containerd, pagefold" \
        "containerd's snapshots in an image store" << 'END'
A proxy plugin for containerd that keeps layers and containers in an image
store of pagefold: equal files of any two containers share page cache.
END
}

registries() {
    p=pagefold-remote
    put 755 "$remote" $p/usr/bin/pagefold-remote
    slim "$work/$p/usr/bin/pagefold-remote"
    doc $p
    pack $p admin "libc6 (>= $(libc_of "$remote")), libgcc-s1, pagefold" "ca-certificates" \
        "pagefold's images from container registries and to them" << 'END'
The program that pagefold image pull and pagefold image push run: it brings
images from container registries into an image store, without the layers that
the store has, and uploads images of the store.
END
}

# The very files that install.sh lays out, in Debian's places.
library() {
    DESTDIR=$work/forrest "$here/crates/forrest/install.sh" /usr "$forrest"
    from=$work/forrest/usr lib=usr/lib/$triplet p=libforrest0
    slim --strip-unneeded "$from/lib/libforrest.so.$upstream"
    slim --strip-debug "$from/lib/libforrest.a"
    put 644 "$from/lib/libforrest.so.$upstream" "$p/$lib/libforrest.so.$upstream"
    ln -s "libforrest.so.$upstream" "$work/$p/$lib/libforrest.so.0"
    doc $p
    mkdir -p "$work/$p/DEBIAN"
    echo "libforrest 0 libforrest0 (>= $upstream)" > "$work/$p/DEBIAN/shlibs"
    echo "activate-noawait ldconfig" > "$work/$p/DEBIAN/triggers"
    pack $p libs "libc6 (>= $(libc_of "$forrest/libforrest.so")), libgcc-s1" "" \
        "key-value store in memory, private or shared by processes" << 'END'
forrest keeps keys and values in memory, private to a process or shared by
name between several, any of which may be killed at any instruction.
END
    p=libforrest-dev
    mkdir -p "$work/$p/$lib"
    ln -s libforrest.so.0 "$work/$p/$lib/libforrest.so"
    put 644 "$from/lib/libforrest.a" "$p/$lib/libforrest.a"
    put 644 "$from/include/forrest.h" $p/usr/include/forrest.h
    sed "s|^libdir=.*|libdir=\${prefix}/lib/$triplet|" "$from/lib/pkgconfig/forrest.pc" > "$work/forrest.pc"
    put 644 "$work/forrest.pc" "$p/$lib/pkgconfig/forrest.pc"
    gzip -9n "$from/share/man/man3/forrest.3"
    put 644 "$from/share/man/man3/forrest.3.gz" $p/usr/share/man/man3/forrest.3.gz
    doc $p
    pack $p libdevel "libforrest0 (= $version), libc6-dev" "" \
        "key-value store in memory, development files" << 'END'
forrest keeps keys and values in memory, private to a process or shared by
name between several. This package has its C header, static library, manual
page and pkg-config file.
END
}

tool
if [ -f "$snapshotter" ]; then containers; else echo "no $snapshotter: its package is left out"; fi
if [ -f "$remote" ]; then registries; else echo "no $remote: its package is left out"; fi
library
