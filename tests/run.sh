#!/usr/bin/env bash
# Runs test passes and adds up their counts: tests/run.sh PASS=BUILD...
#   unit=BUILD  every Check program BUILD/tests/test_*, under the command EMULATOR if that is set
#   cli=BUILD   every tests/cli/*.sh that needs no download, on the program in BUILD
#   memory=BUILD  as cli=, without tests about numbers or texts: the plain pass runs these, and unit tests check the
#               memory of the code behind them; a sanitised program takes three times as long
#   real=BUILD  tests/cli/real_*.sh: the default model, downloaded once
#   long=BUILD  tests/cli/long_*.sh
#   fuzz=BUILD  replays the corpora of tests/fuzz with BUILD/fuzz/fuzz_*
# All passes share one queue, longest tests first, so that cores are not idle at the end; tests of long= run one after
# the other, since each uses all cores.
# ONLY=PATTERN runs only the tests whose name contains PATTERN. The last line is "N passed, N failed"; the exit status
# is 1 if anything failed or nothing ran.
set -u
cd "$(dirname "$0")/.." || exit 1

# One and a half times as many as there are cores: tests also wait for disks and for each other.
cores=$(nproc 2>/dev/null || echo 2)
JOBS=${JOBS:-$((cores + cores / 2))}
ONLY=${ONLY:-}
# Files are small and short-lived: they go to memory if it has room, not to a disk that waits for each fsync.
if [ -z "${TMPDIR:-}" ] && [ -w /dev/shm ] && [ "$(df -Pk /dev/shm | awk 'END { print $4 }')" -gt 4000000 ]; then
    TMPDIR=/dev/shm
fi
work=$(mktemp -d "${TMPDIR:-/tmp}/kvbudget-test.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# Sanitisers report leaks, and stack traces for undefined behaviour. OpenMP waits passively, since several programs
# share the cores.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:abort_on_error=0:allocator_may_return_null=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export KVB_ROOT=$PWD LC_ALL=C

# run_test NUMBER KIND BUILD NAME COMMAND...: writes "passed failed skipped cpu" to $work/NUMBER.sum and prints one
# line. CPU seconds (user and system) say what a test costs, also on a busy machine.
run_test() {
    local number=$1 kind=$2 build=$3 shown=$3 name=$4 log=$work/$1.log code=0 passed=0 failed=0 skipped=0 cpu
    local start=$SECONDS
    shift 4
    mkdir -p "$work/$number.tmp"
    case $build in /*) ;; *) build=$PWD/$build ;; esac
    KVB_BUILD=$build TMPDIR=$work/$number.tmp timeout -k 10 "${TEST_TIMEOUT:-1800}" "$@" >"$log" 2>&1 </dev/null \
        || code=$?
    times >"$work/$number.times" # of this shell and its children; in a pipe it would be those of a subshell
    cpu=$(awk 'NR == 2 { split($1 $2, t, /m|s/); printf "%.1f", 60 * (t[1] + t[3]) + t[2] + t[4] }' \
        "$work/$number.times")
    case $kind in
    unit) # Check: "100%: Checks: 12, Failures: 0, Errors: 0"
        read -r passed failed < <(sed \
            -n 's/^[0-9]*%: Checks: \([0-9]*\), Failures: \([0-9]*\), Errors: \([0-9]*\)$/\1 \2 \3/p' "$log" |
            awk '{ c += $1; f += $2 + $3 } END { print c - f, f }')
        [ "$code" = 0 ] || [ "$failed" -gt 0 ] || failed=1
        [ $((passed + failed)) -gt 0 ] || failed=1
        ;;
    fuzz)
        if [ "$code" = 0 ]; then passed=1; else failed=1; fi
        ;;
    *) # tests/cli/lib.sh: a line per check, and a closing line; if that is missing, the script ended early
        passed=$(grep -c '^ok - ' "$log")
        failed=$(grep -c '^not ok - ' "$log")
        skipped=$(grep -c '^skip - ' "$log")
        if [ "$failed" = 0 ] && { [ "$code" != 0 ] || ! grep -qx 'end of tests' "$log"; }; then failed=1; fi
        ;;
    esac
    echo "$passed $failed $skipped $cpu" >"$work/$number.sum"
    [ "$((passed + failed + skipped))" = 0 ] && return # a script that does not apply to this build
    rm -rf "$work/$number.tmp"
    {
        printf '%-4s %-10s %-34s %4d passed %3d failed  %4d s %7s s of CPU\n' "$kind" "$shown" "$name" "$passed" \
            "$failed" $((SECONDS - start)) "$cpu"
        grep '^skip - ' "$log" | sed 's/^skip - /     SKIPPED: /'
        if [ "$failed" != 0 ]; then
            echo "---- output of $kind $shown $name (exit status $code)"
            if [ "$kind" = unit ]; then tail -n 80 "$log"; else grep -v '^ok - ' "$log" | tail -n 80; fi
            echo "----"
        fi
    } >"$work/$number.out"
    cat "$work/$number.out"
}

# Prints roughly how many seconds a test takes on two cores, so that long ones start first; a sanitised one takes about
# three times as long.
seconds_of() { # KIND BUILD NAME
    local seconds=2
    case $3 in
    real_model | constraints | refine) seconds=30 ;;
    *backend_* | test_profiler_backend | test_profiler_spec | errors | faults | malloc_faults | metrics | ranks)
        seconds=15 ;;
    test_profiler_cuda | *packed_tiles | test_profiler_profile | test_formats_* | test_solver_* | real_* | eval | \
        chain | studies | validate | compute | memory | install | recommend | report | folders) seconds=6 ;;
    esac
    case $2 in *-san) seconds=$((3 * seconds)) ;; esac
    echo $seconds
}

queue=()
queue_test() { # KIND BUILD NAME COMMAND...
    case "$2/$3" in *"$ONLY"*) queue+=("$(seconds_of "$1" "$2" "$3") $*") ;; esac
}

for pass in "$@"; do
    kind=${pass%%=*} build=${pass#*=}
    case $kind in
    unit)
        for t in "$build"/tests/test_*; do
            [ -x "$t" ] && [ -f "$t" ] && queue_test unit "$build" "$(basename "$t")" ${EMULATOR:+"$EMULATOR"} "$t"
        done
        ;;
    cli | memory | real | long)
        for t in tests/cli/*.sh; do
            name=$(basename "$t" .sh)
            case $name in lib) continue ;; real_*) own=real ;; long_*) own=long ;; *) own=cli ;; esac
            [ "$own" = "${kind/memory/cli}" ] || continue
            case $kind/$name in
            memory/constraints | memory/compute | memory/help | memory/ranks) continue ;;
            memory/memory | memory/refine) continue ;;
            esac
            queue_test "${kind/memory/cli}" "$build" "$name" bash "$t"
        done
        ;;
    fuzz)
        for t in "$build"/fuzz/fuzz_*; do
            if [ ! -x "$t" ] || [ ! -f "$t" ]; then continue; fi
            name=$(basename "$t")
            queue_test fuzz "$build" "$name" "$t" "tests/fuzz/corpus/${name#fuzz_}"
        done
        ;;
    *)
        echo "tests/run.sh: unknown pass '$kind'" >&2
        exit 2
        ;;
    esac
done

number=0
while read -r _ kind words; do
    case $kind in '') continue ;; long) workers=1 ;; *) workers=$JOBS ;; esac
    while [ "$(jobs -rp | wc -l)" -ge "$workers" ]; do wait -n; done
    number=$((number + 1))
    # shellcheck disable=SC2086 # words of a command; paths of builds and tests have no blanks
    run_test "$number" "$kind" $words &
done < <(printf '%s\n' "${queue[@]}" | sort -s -n -r -k 1,1)
wait

cat "$work"/*.sum 2>/dev/null | awk -v seconds="$SECONDS" '
    { passed += $1; failed += $2; skipped += $3; cpu += $4 }
    END {
        if (skipped) printf "%d SKIPPED (see above)\n", skipped
        printf "%d test programs in %d s, %d s of CPU\n%d passed, %d failed\n", NR, seconds, cpu, passed, failed
        exit failed > 0 || passed == 0
    }'
