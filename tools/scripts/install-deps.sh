#!/bin/sh
# Installs what kvbudget needs on Debian and its relatives. Asks for each thing itself, not for its package, so
# libraries that came another way count too. When nothing is missing it is silent, quick and never touches the network.
# With the argument `mpi` also OpenMPI, which a run on one machine does not need: where it cannot be had, only a line
# says so.
set -u

CC=${CC:-gcc}
CXX=${CXX:-g++}
PYTHON=${PYTHON:-python3}

# CC and CXX may be several words, such as "ccache gcc", as for make.
# shellcheck disable=SC2086 # lists of words
header() { printf '#include <%s>\n' "$1" | $CC ${CPPFLAGS:-} -E - >/dev/null 2>&1; }
# Words of one line: the Debian package, then the command that succeeds when it is there.
probe() {
    package=$1
    shift
    "$@" >/dev/null 2>&1 || echo "$package"
}

missing_packages() {
    probe gcc command -v "${CC%% *}"
    probe make command -v make
    probe libc6-dev header stdio.h
    probe pkg-config command -v pkg-config
    probe libdnnl-dev header oneapi/dnnl/dnnl.h
    probe libhdf5-dev pkg-config --exists hdf5
    probe libcjson-dev pkg-config --exists libcjson
    probe libgsl-dev pkg-config --exists gsl
    probe libpcre2-dev pkg-config --exists libpcre2-8
    probe libutf8proc-dev pkg-config --exists libutf8proc
    probe libssl-dev pkg-config --exists libcrypto
    probe check pkg-config --exists check
    probe g++ command -v "${CXX%% *}"
    probe python3 "$PYTHON" -c 'import json, zipfile'
    probe python3-pip "$PYTHON" -c 'import pip'
    probe ca-certificates certificates
}

certificates() { [ -s "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" ] || [ -d /etc/pki/tls/certs ]; }

optional_packages() {
    [ "${1:-}" = mpi ] || return 0
    probe libopenmpi-dev pkg-config --exists ompi-c
    probe openmpi-bin command -v mpirun
}

missing=$(missing_packages | tr '\n' ' ')
missing=${missing% }
optional=$(optional_packages "$@" | tr '\n' ' ')
optional=${optional% }
[ -n "$missing$optional" ] || exit 0

if [ "$(id -u)" = 0 ]; then
    as_root=
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root='sudo -n'
else
    as_root=none
fi
without_optional() {
    echo "kvbudget: goes on without $optional: what needs them is left out, and its tests are skipped" >&2
}
if [ "$as_root" = none ] || ! command -v apt-get >/dev/null 2>&1; then
    if [ -z "$missing" ]; then
        without_optional
        exit 0
    fi
    {
        echo "kvbudget: these Debian packages (or what your system calls them) are missing:"
        echo "    $missing"
        if command -v apt-get >/dev/null 2>&1; then
            echo "Neither root nor sudo without a password is available here. Please run:"
            echo "    sudo apt-get install $missing"
        else
            echo "There is no apt-get here; please install them and run this again."
        fi
    } >&2
    exit 1
fi

echo "Installing: $missing${missing:+ }$optional"
# An update that fails (one unreachable source among several) need not stop the installation; apt-get install says if it
# does.
$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq update \
    || echo "kvbudget: apt-get update failed; trying to install anyway" >&2
# shellcheck disable=SC2086 # a list of words
install_all() { [ $# = 0 ] || $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
    --no-install-recommends "$@" >/dev/null; }
# shellcheck disable=SC2086 # a list of words
if ! install_all $missing; then
    echo "kvbudget: apt-get could not install: $missing" >&2
    exit 1
fi
# shellcheck disable=SC2086 # a list of words
install_all $optional || without_optional

missing=$(missing_packages | tr '\n' ' ')
missing=${missing% }
if [ -n "$missing" ]; then
    echo "kvbudget: still not usable after the installation: $missing" >&2
    echo \
        "Another compiler or Python may come first in PATH: CC=$CC is $(command \
        -v "${CC%% *}"), PYTHON=$PYTHON is $(command -v "$PYTHON")." >&2
    exit 1
fi
