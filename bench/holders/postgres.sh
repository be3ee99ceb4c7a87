# Holds a file in the shared buffers of a PostgreSQL server: `sh postgres.sh FILE BLOCK BINARIES`; see README.md.
set -e
# The server does not run as root, and its user must reach its directory.
dir=$(mktemp -d /var/tmp/pagefold-bench-postgres.XXXXXX)
trap 'rm -rf "$dir"' EXIT
as='env HOME=/ PGHOST='$dir
[ "$(id -u)" != 0 ] || { chown postgres "$dir"; as="setpriv --reuid=postgres --regid=postgres --clear-groups $as"; }
cp "$1" "$dir/data.in"
chmod 644 "$dir/data.in"
$as "$3/initdb" -D "$dir/data" -U postgres --no-sync >/dev/null
$as "$3/postgres" -D "$dir/data" -k "$dir" -c listen_addresses= -c shared_buffers=256MB -c fsync=off -c logging_collector=off 2>/dev/null &
server=$!
trap 'kill -INT $server; wait $server; rm -rf "$dir"' EXIT
ask() { $as "$3/psql" -U postgres -qAtc "$4" postgres; }
until ask "$@" 'select 1' >/dev/null 2>&1; do sleep 0.1; done
blocks=$(($(stat -c %s "$1") / $2))
ask "$@" 'create table held (place int, data bytea)'
ask "$@" 'alter table held alter data set storage external'
ask "$@" "insert into held with f as materialized (select pg_read_binary_file('$dir/data.in') as d)
          select i, substr(d, i * $2 + 1, $2) from f, generate_series(0, $blocks - 1) as i"
echo ready
read -r line
held=$(ask "$@" "select md5(string_agg(data, ''::bytea order by place)) from held")
if [ "$held" = "$(md5sum <"$1" | cut -d' ' -f1)" ]; then echo right; else echo wrong; fi
