#!/bin/sh
# libvirt.sh DIR [EMULATOR]: a libvirtd in namespaces of its own that starts two guests. By EMULATOR, with the daemon at
# $SOCKET; or as DIR/guest.xml describes them, by libvirt's own user. Says into DIR/said how far it is, and waits to be ended.
dir=$1
say() { echo "$*" >> "$dir/said"; }
mount --make-rprivate /
for at in /etc/libvirt /var/lib/libvirt /run/libvirt /var/cache/libvirt /var/log/libvirt; do
    mkdir -p $at && mount -t tmpfs tmpfs $at || { say "ABSENT: no tmpfs at $at"; exit 1; }
done
mkdir -p /var/lib/libvirt/qemu /var/log/libvirt/qemu
# The user that libvirt's package makes, which it asks for whoever runs the guests.
getent passwd libvirt-qemu >/dev/null || {
    (cat /etc/passwd; echo 'libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin') > "$dir/passwd"
    mount --bind "$dir/passwd" /etc/passwd
}
getent group libvirt-qemu >/dev/null || {
    (cat /etc/group; echo 'libvirt-qemu:x:64055:') > "$dir/group"
    mount --bind "$dir/group" /etc/group
}
chown libvirt-qemu:libvirt-qemu /var/lib/libvirt/qemu
[ $# -lt 2 ] || printf 'user = "root"\ngroup = "root"\n' > /etc/libvirt/qemu.conf
cat >> /etc/libvirt/qemu.conf <<E
stdio_handler = "file"
cgroup_controllers = []
namespaces = []
security_driver = "none"
remember_owner = 0
E
printf 'auth_unix_rw = "none"\n' > /etc/libvirt/libvirtd.conf
libvirtd > "$dir/libvirtd.log" 2>&1 &
for name in plain one two; do
    if [ $# -lt 2 ]; then
        sed "s,NAME,pagefold-$name,g" "$dir/guest.xml" > "$dir/$name.xml"
        continue
    fi
    emulator=$2
    [ $name != plain ] || emulator=$(command -v qemu-system-x86_64)
    cat > "$dir/$name.xml" <<E
<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>pagefold-$name</name><memory unit='MiB'>64</memory><os><type arch='x86_64'>hvm</type></os>
  <devices><emulator>$emulator</emulator><memballoon model='none'/></devices>
  <qemu:commandline>
    <qemu:env name='PATH' value='$PATH'/>
    <qemu:env name='PAGEFOLD_SOCKET' value='$SOCKET'/>
  </qemu:commandline>
</domain>
E
done
tries=0
until timeout 10 virsh -c qemu:///system version >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 20 ] || { say "ABSENT: $(tail -1 "$dir/libvirtd.log")"; exit 1; }
    sleep 0.5
done
# Where libvirt starts no guest at all, there is nothing to try.
timeout 120 virsh -c qemu:///system create "$dir/plain.xml" >> "$dir/virsh.log" 2>&1 &&
    timeout 120 virsh -c qemu:///system destroy pagefold-plain >> "$dir/virsh.log" 2>&1 || {
    say "ABSENT: $(tail -2 "$dir/virsh.log" | tr '\n' ' ')"
    exit 1
}
for name in one two; do
    timeout 120 virsh -c qemu:///system create "$dir/$name.xml" >> "$dir/virsh.log" 2>&1 || {
        say "FAILED: $(tail -2 "$dir/virsh.log" | tr '\n' ' ')"
        exit 1
    }
done
say "RUNNING $(timeout 120 virsh -c qemu:///system list --name | grep -c pagefold-)"
sleep 600
