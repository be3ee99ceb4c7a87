#!/bin/sh
# systemd.sh DIR TOOL PROGRAM DIST SERVICES: a systemd as first process of namespaces of its own, over a copy of this root
# that is thrown away, with the units and examples in DIST as the package installs them. The script SERVICES writes more
# units below $root, and DIR/probe.sh, which says into DIR/said what holds.
set -e
dir=$1
mount --make-rprivate /
mkdir -p "$dir/at"
mount -t tmpfs tmpfs "$dir/at"
mkdir "$dir/at/up" "$dir/at/work" "$dir/at/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$dir/at/up,workdir=$dir/at/work" "$dir/at/root"
root=$dir/at/root
mount -t proc proc "$root/proc"
# Nothing here changes what the machine outside has.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
# A group outlives the systemd that made it, and with it what its unit forbids: a service of the same name would inherit that.
find "$root"/sys/fs/cgroup/*.slice -depth -type d -exec rmdir {} \; 2>/dev/null || :
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mount --rbind /dev "$root/dev"
mkdir "$root/run/said"
mount --bind "$dir" "$root/run/said"
# Nothing of this machine's own is to start.
rm -rf "$root"/etc/systemd/system/*.wants "$root"/lib/systemd/system/*.wants
install "$2" "$root/usr/bin/pagefold"
install "$3" "$root/usr/bin/silent"
rm -rf "$root/etc/pagefold"
install -Dm 644 -t "$root/usr/share/pagefold/examples" "$4"/examples/*.conf
install -m 644 "$4/systemd/pagefold.service" "$4/systemd/pagefold@.service" "$root/etc/systemd/system/"
# As the udev rule has it, on a node of our own.
grep -q '^kvm:' "$root/etc/group" || echo 'kvm:x:64056:' >> "$root/etc/group"
cp -a /dev/userfaultfd "$dir/at/userfaultfd"
chroot "$root" chgrp kvm /run/said/at/userfaultfd 2>/dev/null ||
    chgrp "$(sed -n 's/^kvm:[^:]*:\([0-9]*\):.*/\1/p' "$root/etc/group")" "$dir/at/userfaultfd"
chmod 660 "$dir/at/userfaultfd"
mount --bind "$dir/at/userfaultfd" "$root/dev/userfaultfd"
cat > "$root/etc/systemd/system/probe.service" <<E
[Unit]
DefaultDependencies=no
After=pagefold.service
[Service]
Type=oneshot
ExecStart=/bin/sh /run/said/probe.sh
E
printf '[Unit]\nDefaultDependencies=no\nWants=pagefold.service probe.service\n' \
    > "$root/etc/systemd/system/probe.target"
. "$5"
# Not by chroot(1) alone: a daemon in a mount namespace of its own would see paths from the machine's root on.
cd "$root"
mkdir -p old
pivot_root . old
exec chroot . /usr/bin/env -i container=other PATH=/usr/bin:/bin:/usr/sbin:/sbin sh -c 'umount -l /old && exec \
    /lib/systemd/systemd --system --unit=probe.target --log-target=console --show-status=0'
