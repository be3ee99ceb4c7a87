# For systemd.sh: services that a drop-in puts under pagefold.
for name in one two cold user-one user-two; do
    printf '[Unit]\nDefaultDependencies=no\n[Service]\nExecStart=/usr/bin/silent\n' \
        > "$root/etc/systemd/system/$name.service"
    mkdir -p "$root/etc/systemd/system/$name.service.d"
    sed "s,/usr/bin/program,/usr/bin/silent," "$4/examples/service.conf" \
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
