#!/bin/bash
# Puts composefs' own tools, a peer of `pagefold bench erofs`, into DIR as Debian's testing release builds them, with the
# libraries they want; nothing is installed. For systems whose release does not have the package.
#
#   bench/fetch-composefs.sh [DIR]     default: ${CARGO_TARGET_DIR:-target}/bench-images/composefs
set -euo pipefail
dir=${1:-${CARGO_TARGET_DIR:-target}/bench-images/composefs}
suite=${COMPOSEFS_SUITE:-forky}
[ ! -e "$dir/run/mkcomposefs" ] || exit 0
mirror=$(apt-get indextargets --format '$(REPO_URI) $(COMPONENT)' | awk '$2 == "main" && !/security/ { print $1; exit }')
[ -n "$mirror" ] || { echo "fetch-composefs: apt knows no Debian mirror" >&2; exit 1; }
apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$apt"/{lists/partial,archives/partial,etc/apt.conf.d,etc/preferences.d,state}
touch "$apt/state/status"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] $mirror $suite main" >"$apt/etc/sources.list"
# An apt of its own: an empty system, so that every library comes along.
cat >"$apt/apt.conf" <<CONF
Dir::Etc "$apt/etc";
Dir::Etc::sourcelist "$apt/etc/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::State "$apt/state";
Dir::State::lists "$apt/lists";
Dir::State::status "$apt/state/status";
Dir::Cache "$apt";
Dir::Cache::archives "$apt/archives";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Check-Valid-Until "false";
CONF
export APT_CONFIG=$apt/apt.conf
apt-get -qq update
apt-get -qq install --download-only -y --no-install-recommends composefs
rm -rf "$dir.new" && mkdir -p "$dir.new"
for package in "$apt"/archives/*.deb; do dpkg-deb -x "$package" "$dir.new"; done
for package in "$apt"/archives/composefs_*.deb; do dpkg-deb -f "$package" Version >"$dir.new/version"; done
# The tools are run by their own loader, with their own libraries.
mkdir "$dir.new/run"
for tool in mkcomposefs mount.composefs; do
    cat >"$dir.new/run/$tool" <<'RUN'
#!/bin/bash
here=$(dirname "$(dirname "$(readlink -f "$0")")")
exec "$here"/usr/lib/*-linux-gnu/ld-linux-*.so.* --library-path "$(echo "$here"/usr/lib/*-linux-gnu)" "$here"/usr/*bin/"${0##*/}" "$@"
RUN
    chmod +x "$dir.new/run/$tool"
done
rm -rf "$dir" && mv "$dir.new" "$dir"
