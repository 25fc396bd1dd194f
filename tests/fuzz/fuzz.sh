#!/usr/bin/env bash
# Runs every libFuzzer target of a folder for some seconds each: tests/fuzz/fuzz.sh BUILD-fuzz/fuzz SECONDS
# New inputs are kept in BUILD-fuzz/corpus (never in git), findings in BUILD-fuzz/findings. After fixing a finding, copy
# it to tests/fuzz/corpus/<name>, so that `make check` replays it from then on.
set -u
cd "$(dirname "$0")/../.." || exit 1
folder=$1 seconds=$2
JOBS=${JOBS:-$(nproc 2>/dev/null || echo 2)}
build=$(dirname "$folder")
mkdir -p "$build/findings" "$build/logs"

fuzz_one() {
    local target=$1 name
    name=$(basename "$target")
    name=${name#fuzz_}
    mkdir -p "$build/corpus/$name"
    local args=(-max_total_time="$seconds" -timeout=25 -rss_limit_mb=3072 -malloc_limit_mb=2048 -print_final_stats=1
        -artifact_prefix="$build/findings/$name-" "$build/corpus/$name")
    [ -d "tests/fuzz/corpus/$name" ] && args+=("tests/fuzz/corpus/$name")
    [ -f "tests/fuzz/$name.dict" ] && args+=(-dict="tests/fuzz/$name.dict")
    if "$target" "${args[@]}" >"$build/logs/$name" 2>&1; then
        printf '%-14s %9s runs  %6s inputs kept  no finding\n' "$name" \
            "$(sed -n 's/^stat::number_of_executed_units: *//p' "$build/logs/$name")" \
            "$(find "$build/corpus/$name" -type f | wc -l)"
    else
        printf '%-14s FINDING: see %s\n' "$name" "$build/logs/$name"
        grep -m 3 -E 'ERROR|SUMMARY|Test unit written' "$build/logs/$name" | sed 's/^/    /'
        return 1
    fi
}

failed=0 found=0
for target in "$folder"/fuzz_*; do
    if [ ! -x "$target" ] || [ ! -f "$target" ]; then continue; fi
    found=1
    while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n || failed=1; done
    fuzz_one "$target" &
done
while [ -n "$(jobs -p)" ]; do
    wait -n
    code=$?
    [ "$code" = 127 ] && break # none left
    [ "$code" = 0 ] || failed=1
done
[ "$found" = 1 ] || { echo "no fuzz targets in $folder" >&2 && exit 1; }
exit "$failed"
