# Holds a file in values of a redis server: `sh redis.sh FILE BLOCK DIRECTORY`; see README.md.
set -e
socket=$3/redis.sock
redis-server --port 0 --unixsocket "$socket" --save '' --appendonly no --dir "$3" >/dev/null &
server=$!
trap 'kill $server' EXIT
until redis-cli -s "$socket" ping >/dev/null 2>&1; do sleep 0.1; done
split -b "$2" -d -a 5 "$1" "$3/block."
for block in "$3"/block.*; do redis-cli -s "$socket" -x set "${block##*/}" <"$block" >/dev/null; done
echo ready
read -r line
for block in "$3"/block.*; do
    redis-cli -s "$socket" --raw get "${block##*/}" | head -c "$2" | cmp -s - "$block" || { echo wrong; exit; }
done
echo right
