#!/usr/bin/env bash
# The runtime library on 64-bit ARM: built by Debian's cross compiler, its unit tests run by qemu's emulation. Installs
# both where it may; where they cannot be had it says so and checks nothing.
set -u
cd "$(dirname "$0")/../.." || exit 1
CC=aarch64-linux-gnu-gcc
BUILD=${BUILD:-build}-aarch64
cjson=/usr/lib/aarch64-linux-gnu/libcjson.so

is_there() { command -v "$CC" qemu-aarch64-static >/dev/null && [ -e "$cjson" ] && [ -e "${cjson%cjson.so}check.a" ]; }
if ! is_there && [ "$(id -u)" = 0 ] && command -v dpkg >/dev/null; then
    { dpkg --add-architecture arm64 && apt-get update -qq && apt-get install -y -qq --no-install-recommends \
        gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static libcjson-dev:arm64 check:arm64; } >/dev/null 2>&1
fi
if ! is_there; then
    echo "skip - aarch64: needs Debian's gcc-aarch64-linux-gnu, qemu-user-static, libcjson-dev:arm64 and check:arm64"
    echo '0 passed, 0 failed'
    exit 0
fi

make --no-print-directory CC="$CC" BUILD="$BUILD" CUDA=0 MPI=0 LIBS='-lcjson -lm' runtime-tests || exit 1
passed=0 failed=0
for test in "$BUILD"/tests/test_runtime_*; do
    [ -x "$test" ] || continue
    # Check's forked tests never come back under qemu.
    result=$(CK_FORK=no KVB_BUILD=$BUILD KVB_ROOT=$PWD timeout 300 qemu-aarch64-static -L /usr/aarch64-linux-gnu \
        "$test" 2>&1)
    read -r checks wrong < <(
        sed -n 's/^[0-9]*%: Checks: \([0-9]*\), Failures: \([0-9]*\), Errors: \([0-9]*\)$/\1 \2+\3/p' <<<"$result"
    )
    wrong=$((${wrong:-1}))
    if [ -z "${checks:-}" ] || [ "$wrong" -gt 0 ]; then printf '%s\n%s\n' "$test" "$result"; fi
    passed=$((passed + ${checks:-1} - wrong)) failed=$((failed + wrong))
    unset checks wrong
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
