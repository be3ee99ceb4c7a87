#!/bin/sh
# systemd.sh DIR TOOL PROGRAM UNITS: a systemd as first process of namespaces of its own, over a copy of this root that
# is thrown away, with the units in UNITS and two services that a drop-in puts under pagefold. Says into
# DIR/said what holds.
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
install -m 644 "$4/pagefold.service" "$4/pagefold@.service" "$root/etc/systemd/system/"
# As the udev rule has it, on a node of our own.
grep -q '^kvm:' "$root/etc/group" || echo 'kvm:x:64056:' >> "$root/etc/group"
cp -a /dev/userfaultfd "$dir/at/userfaultfd"
chroot "$root" chgrp kvm /run/said/at/userfaultfd 2>/dev/null ||
    chgrp "$(sed -n 's/^kvm:[^:]*:\([0-9]*\):.*/\1/p' "$root/etc/group")" "$dir/at/userfaultfd"
chmod 660 "$dir/at/userfaultfd"
mount --bind "$dir/at/userfaultfd" "$root/dev/userfaultfd"
for name in one two cold user-one user-two; do
    printf '[Unit]\nDefaultDependencies=no\n[Service]\nExecStart=/usr/bin/silent\n' \
        > "$root/etc/systemd/system/$name.service"
    mkdir -p "$root/etc/systemd/system/$name.service.d"
    sed "s,/usr/bin/program,/usr/bin/silent," "$4/../examples/service.conf" \
        > "$root/etc/systemd/system/$name.service.d/pagefold.conf"
done
# The calls that services may make, where their units limit them; systemd kills a service for any other call.
for name in two cold; do echo 'SystemCallFilter=@system-service' >> "$root/etc/systemd/system/$name.service"; done
sed -i 's,run --manage all,run --cold,' "$root/etc/systemd/system/cold.service.d/pagefold.conf"
for name in user-one user-two; do
    # The same for a service that gives up root: the daemon of its user.
    sed -i -e 's,pagefold.service,pagefold@daemon.service,; s,/run/pagefold/,/run/pagefold-daemon/,' \
        -e 's,^ExecStart=$,User=daemon\nSupplementaryGroups=kvm\n&,' \
        "$root/etc/systemd/system/$name.service.d/pagefold.conf"
done
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
cat > "$dir/probe.sh" <<'E'
export PATH=/usr/bin:/bin:/usr/sbin:/sbin
say() { echo "$*" >> /run/said/said; }
# until_merged WHAT ARGUMENTS, of status
until_merged() {
    what=$1
    shift
    tries=0
    while [ $tries -lt 900 ]; do
        sharing=$(pagefold status --json "$@" 2>/dev/null |
            sed -n 's/^    "pages_sharing": \([0-9]*\),*$/\1/p' | head -1)
        if [ "${sharing:-0}" -gt 7000 ]; then say "$what"; return; fi
        tries=$((tries + 1))
        sleep 0.2
    done
    say "not $what: $(pagefold status "$@" 2>&1 | head -3 | tr '\n' ' ')"
}
say up
tries=0
until pagefold status >/dev/null 2>&1 || [ $tries -ge 600 ]; do tries=$((tries + 1)); sleep 0.1; done
say "$(systemctl is-active pagefold) pagefold"
systemctl start one two
say "$(systemctl is-active one) one"
say "$(systemctl is-active two) two"
until_merged merged
pagefold verify >/dev/null && say verified
systemctl start cold
tries=0
until pagefold park "$(systemctl show -p MainPID --value cold)" | grep -q '^4,0' || [ $tries -ge 300 ]; do
    tries=$((tries + 1)); sleep 0.2
done
sleep 1
say "$(systemctl is-active cold) under a filter, $(systemctl show -p NRestarts --value cold) times anew"
systemctl stop cold
# Killed: systemd starts the next one, programs go on and find it.
old=$(systemctl show -p MainPID --value pagefold)
kill -9 "$old"
tries=0
until [ "$(systemctl show -p MainPID --value pagefold)" -gt "$old" ] 2>/dev/null || [ $tries -ge 600 ]; do
    tries=$((tries + 1)); sleep 0.1
done
tries=0
until pagefold status >/dev/null 2>&1 && systemctl -q is-active pagefold || [ $tries -ge 600 ]; do
    tries=$((tries + 1)); sleep 0.1
done
say "$(systemctl is-active pagefold) again"
systemctl restart one two
until_merged "merged again"
systemctl start user-one user-two
say "$(systemctl is-active pagefold@daemon) of a user"
until_merged "merged of a user" --socket /run/pagefold-daemon/daemon.sock
pagefold verify --socket /run/pagefold-daemon/daemon.sock >/dev/null && say "verified of a user"
service=$(systemctl show -p MainPID --value user-one)
say "user $(systemctl show -p User --value pagefold@daemon) $(stat -c %U "/proc/$service")"
say END
E
exec chroot "$root" /usr/bin/env -i container=other PATH=/usr/bin:/bin:/usr/sbin:/sbin \
    /lib/systemd/systemd --system --unit=probe.target --log-target=console --show-status=0
