#!/usr/bin/env bash
# Tests the runtime library on 64-bit ARM: builds it with Debian's cross compiler, and runs its unit tests under qemu's
# emulation. Installs both if it may; if they cannot be had, it says so and checks nothing.
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
# Forked tests of the library Check never return under qemu.
CK_FORK=no EMULATOR='qemu-aarch64-static -L /usr/aarch64-linux-gnu' exec tests/run.sh unit="$BUILD"
