#!/bin/sh
# podman_plain.sh DIR ARGUMENTS: podman with all of its own below DIR.
set -eu
dir=$1
shift
mount --make-rprivate /
# crun refuses the mixture of both versions of control groups that some machines have.
umount /sys/fs/cgroup/unified 2>/dev/null || true
exec podman --root "$dir/podman" --runroot "$dir/podman-run" --tmpdir "$dir/podman-tmp" --cgroup-manager cgroupfs "$@"
