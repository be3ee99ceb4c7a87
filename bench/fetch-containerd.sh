#!/bin/bash
# Builds containerd, whose snapshotters are the peers of `pagefold bench containers`, into DIR from its source as a Go module.
# For systems whose release has an older one. It needs Go.
#
#   bench/fetch-containerd.sh [DIR]    default: ${CARGO_TARGET_DIR:-target}/bench-images/containerd
set -euo pipefail
dir=${1:-${CARGO_TARGET_DIR:-target}/bench-images/containerd}
version=${CONTAINERD_VERSION:-v2.4.2}
[ ! -e "$dir/containerd" ] || exit 0
source=$(go mod download -json "github.com/containerd/containerd/v2@$version" | sed -n 's/^\t"Dir": "\(.*\)",*$/\1/p')
rm -rf "$dir.new" && mkdir -p "$dir.new"
out=$(cd "$dir.new" && pwd)
cd "$source"
CGO_ENABLED=0 go build -buildvcs=false -tags no_btrfs -o "$out" \
    -ldflags "-X github.com/containerd/containerd/v2/version.Version=$version" \
    ./cmd/containerd ./cmd/containerd-shim-runc-v2 ./cmd/ctr
cd - >/dev/null
rm -rf "$dir" && mv "$dir.new" "$dir"
