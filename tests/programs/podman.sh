#!/bin/sh
# podman.sh DIR PROGRAM: two containers of podman that run PROGRAM with the environment of DIR/env, until DIR/stop is
# there. In a mount and control group namespace of its own. Exit status 3: podman runs no container here.
# What the containers say goes to DIR/one and DIR/two.
set -eu
dir=$1
mount --make-rprivate /
# crun refuses the mixture of both versions of control groups that some machines have.
umount -R /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
root=$dir/root
mkdir -p "$root/proc" "$root/sys" "$root/dev" "$root/tmp" "$root/etc" "$root/run"
install "$2" "$root/silent"
ldd "$2" | grep -oE '/[^ ]+' | while read -r file; do install -D "$(readlink -f "$file")" "$root$file"; done
# The agent and the socket are found at the same paths as outside.
agent=$(sed -n 's/^LD_PRELOAD=\([^:]*\).*/\1/p' "$dir/env")
socket=$(sed -n 's/^PAGEFOLD_SOCKET=//p' "$dir/env")
engine() {
    podman --root "$dir/podman" --runroot "$dir/podman-run" --tmpdir "$dir/podman-tmp" \
        --cgroup-manager cgroupfs "$@"
}
# start NAME ARGUMENTS, the last of them the program's
start() {
    name=$1
    shift
    engine run --rm --name "pagefold-test-$name" --network none --cgroups=disabled --ulimit nofile=1024:1024 \
        --ulimit nproc=4096:4096 "$@"
}
# Where no container runs at all, there is nothing to try.
timeout 120 podman --version >/dev/null && start plain --rootfs "$root:O" /silent once > "$dir/plain" || exit 3
for name in one two; do
    start $name --env-file "$dir/env" -v "$agent:$agent:ro" -v "$socket:$socket" \
        --rootfs "$root:O" /silent > "$dir/$name" &
    eval "$name=\$!"
done
while [ ! -e "$dir/stop" ]; do
    kill -0 "$one" && kill -0 "$two" || exit 1
    sleep 0.2
done
engine kill pagefold-test-one pagefold-test-two >/dev/null
wait || true
