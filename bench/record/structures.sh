#!/usr/bin/env bash
# Takes every figure of llds and forrest beside its peers and writes them to this directory, as JSON with the machine,
# the versions and the commit. About an hour on two quiet cores; KEYS, ROUNDS and CLOCK make it shorter or kinder to a
# machine that others use:
#   KEYS=1000000 ROUNDS=3 CLOCK=cpu bench/record/structures.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
keys=${KEYS:-30000000} rounds=${ROUNDS:-5} clock=${CLOCK:-wall}
out=${OUT:-bench/record}
cargo build --quiet --release -p pagefold-bench --features peers,cpp-peers
bench=${CARGO_TARGET_DIR:-target}/release/pagefold-bench

take() { # NAME ARGUMENTS...
    local name=$1
    shift
    echo "$name: pagefold bench $*" >&2
    "$bench" "$@" --json >"$out/$name.json.new"
    mv "$out/$name.json.new" "$out/$name.json"
}

take index-uniform index --keys "$keys" --rounds "$rounds" --clock "$clock"
take index-zipf index --keys "$keys" --rounds "$rounds" --clock "$clock" --mix read --dist zipf
take index-growth index --keys "$keys" --rounds "$rounds" --clock "$clock" --growth --threads 1 \
    --only sd-tree,b-tree,forrest,dashmap,congee,rb-tree-lock
take index-tlb index --keys "$keys" --rounds "$rounds" --tlb
take kv-source kv --keys 10000000 --rounds "$rounds" --clock "$clock" --tables source
take kv-shared kv --keys 10000000 --rounds "$rounds" --clock "$clock" --tables shared
