#!/usr/bin/env bash
# Takes every figure of llds and forrest beside its peers and writes them to this directory, as JSON with the machine,
# the versions and the commit. About 35 minutes on two quiet cores, with 9 GiB of memory free; KEYS, LARGE, ROUNDS and
# CLOCK make it shorter or kinder to a machine that others use:
#   KEYS=1000000 LARGE=10000000 ROUNDS=1 CLOCK=cpu bench/record/structures.sh
# What is slow and far behind (maps under one lock, trees with a node per key) is taken once, everything else in rounds.
set -euo pipefail
cd "$(dirname "$0")/../.."
keys=${KEYS:-10000000} large=${LARGE:-100000000} rounds=${ROUNDS:-3} clock=${CLOCK:-wall}
out=${OUT:-bench/record}
cargo build --quiet --release -p pagefold-bench --features peers,cpp-peers
bench=${CARGO_TARGET_DIR:-target}/release/pagefold-bench

take() { # NAME ARGUMENTS...
    local name=$1
    shift
    echo "$(date +%T) $name: pagefold bench $*" >&2
    "$bench" "$@" --clock "$clock" --json >"$out/$name.json.new"
    mv "$out/$name.json.new" "$out/$name.json"
}

near=sd-tree,sd-tree-grown,b-tree,forrest,std-hash-sharded,papaya,dashmap,scc-hash-map,congee
far=std-hash-lock,std-btree-lock,forrest-ordered,scc-hash-index,scc-tree-index,skiplist,masstree
far=$far,rb-tree-lock,absl-btree-lock,libcuckoo,tbb,liburcu
fit=sd-tree,b-tree,forrest,dashmap,scc-hash-map # at most 7 GiB for 10^8 keys, with a second one for batched inserts

take index-uniform index --keys "$keys" --rounds "$rounds" --threads 2 --only "$near"
take index-one-thread index --keys "$keys" --rounds 1 --threads 1 --only "$near"
take index-far index --keys "$keys" --rounds 1 --threads 2 --only "$far"
take index-large index --keys "$large" --rounds 1 --threads 2 --only "$fit"
take index-zipf index --keys "$keys" --rounds "$rounds" --threads 2 --mix read --dist zipf \
    --only sd-tree,b-tree,forrest,papaya,dashmap,scc-hash-map,congee
take index-growth index --keys "$large" --rounds 1 --threads 1 --growth --only sd-tree,b-tree,forrest,dashmap
take index-growth-trees index --keys "$keys" --rounds 1 --threads 1 --growth --only congee,rb-tree-lock
# Simulated by cachegrind, so with fewer keys.
take index-tlb index --keys $((keys / 10)) --rounds 1 --tlb
take kv-source kv --keys "$keys" --rounds 1 --tables source
take kv-source-small kv --keys $((keys / 10)) --rounds "$rounds" --tables source
take kv-shared kv --keys "$keys" --rounds 1 --tables shared
