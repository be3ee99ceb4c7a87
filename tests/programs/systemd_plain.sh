# For systemd.sh: services without a drop-in, restricted as packaged services are. Rules of the configuration attach them.
restricted='NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectProc=invisible
ProcSubset=pid
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native
CapabilityBoundingSet=
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources'
# service NAME SETTINGS
service() {
    printf '[Unit]\nDefaultDependencies=no\n[Service]\nExecStart=/usr/bin/silent\n%s\n' "$2" \
        > "$root/etc/systemd/system/$1.service"
}
service loose 'User=daemon'
service deaf 'RestrictAddressFamilies=AF_INET'
for name in one two; do
    service root-$name 'SystemCallFilter=@system-service'
    service user-$name "User=daemon
$restricted"
done
mkdir -p "$root/etc/pagefold"
cat > "$root/etc/pagefold/pagefold.toml" <<'E'
[[attach]]
cgroup = "system.slice/root-one.service"
domain = "app"

[[attach]]
cgroup = "system.slice/root-two.service"
domain = "app"

[[attach]]
exe = "/usr/bin/silent"
user = "daemon"
min = "8M"
domain = "app"
E
cat > "$dir/probe.sh" <<'E'
export PATH=/usr/bin:/bin:/usr/sbin:/sbin
say() { echo "$*" >> /run/said/said; }
pid() { systemctl show -p MainPID --value "$1"; }
# until_true WHAT COMMAND
until_true() {
    what=$1
    shift
    tries=0
    while [ $tries -lt 600 ]; do
        "$@" > /dev/null 2>&1 && { say "$what"; return; }
        tries=$((tries + 1))
        sleep 0.2
    done
    say "not $what: $(pagefold status 2>&1 | tr '\n' ' ')"
}
status() { pagefold status --json 2>/dev/null; }
is_up() { status > /dev/null; }
has_attached() { [ "$(status | grep -c '"attached": true')" = "$1" ]; }
shares() { [ "$(status | sed -n 's/^    "pages_sharing": \([0-9]*\),*$/\1/p' | head -1)" -gt "$1" ]; }
names() { status | grep -q "$1"; }
services="root-one root-two user-one user-two"
say up
until_true answers is_up
systemctl start loose deaf $services
# The packaged unit as it is attaches what has no filter, also of another user. Of the rest it names the cure.
until_true 'attached without a filter' has_attached 1
until_true 'cure in the status' names filters.conf
say "refused: $(pagefold attach --backend agent "$(pid root-one)" 2>&1)"
cure=$(pagefold doctor | sed -n 's/^ *-> \(.*filters.conf.*\)$/\1/p')
say "cure: $cure"
sh -c "$cure" || say 'the cure failed'
until_true 'attached all' has_attached 5
until_true merged shares 15000
pagefold verify > /dev/null && say verified
for name in $services; do
    grep -q '^Seccomp:.2$' "/proc/$(pid $name)/status" || say "$name has no filter"
done
say "deaf: $(pagefold attach --backend agent "$(pid deaf)" 2>&1)"
until_true parked pagefold park "$(pid user-one)"
until_true unparked pagefold unpark "$(pid user-one)"
for name in loose $services; do
    until_true "left $name" pagefold detach "$(pid $name)"
    grep -l pagefold "/proc/$(pid $name)/maps" "/proc/$(pid $name)"/task/*/comm >> /run/said/said
done
# No rule attaches them again.
sleep 3
until_true 'stays left' has_attached 0
for name in loose deaf $services; do say "$(systemctl is-active $name) $(systemctl show -p NRestarts --value $name) $name"; done
say END
E
