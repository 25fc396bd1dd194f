#!/usr/bin/env bash
# `make install-runtime` on a machine that has only cJSON: programs find the library with pkg-config and CMake.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
case $KVB_BUILD in *-san) end ;; esac # it would be built without the sanitisers
CC=${CC:-gcc}

# Imitates a machine without HDF5, GSL and the others: pkg-config finds only cJSON.
mkdir pc
cp "$(pkg-config --variable=pcfiledir libcjson)/libcjson.pc" pc/
prefix=$T/root/opt/kvb
holds 'make install-runtime' env PKG_CONFIG_LIBDIR="$T/pc" make --no-print-directory -s -C "$KVB_ROOT" BUILD="$T/b" \
    CC="$CC" CFLAGS=-O1 MPI=0 CUDA=0 PREFIX="$prefix" install-runtime
holds 'seven files' [ "$(find "$prefix" ! -type d | wc -l)" = 7 ]
absent 'of the library alone' "$prefix/bin"

# The program: example 1, copied as a user would, with a table of the generated model.
tiny_inputs
"$KVB" profile tiny.gguf calib.jsonl -o run.h5 --new-tokens 4 --metric keydiff --quiet \
    && "$KVB" solve run.h5 -m keydiff -o t.safetensors --quiet >solve.out
cp "$KVB_ROOT/runtime/examples/01_evict.c" app.c
run() { "$@" t.safetensors 0.8 4096; }
run "$KVB_BUILD/examples/01_evict" >expected.out

export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
# shellcheck disable=SC2046,SC2086
holds 'a program by pkg-config' $CC app.c $(pkg-config --cflags --libs kvbudget) -o by-pkg-config
LD_LIBRARY_PATH=$prefix/lib run ./by-pkg-config >pkg-config.out 2>&1
same 'says the same' pkg-config.out expected.out

if ! command -v cmake >/dev/null; then
    skip 'a program by CMake: cmake is not installed'
    end
fi
mv "$T/root" "$T/moved" # an archive may be unpacked anywhere
cat >CMakeLists.txt <<'CMAKE'
cmake_minimum_required(VERSION 3.16)
project(app C)
find_package(kvbudget 0.1 REQUIRED)
add_executable(shared app.c)
target_link_libraries(shared kvbudget::kvbudget)
add_executable(static app.c)
target_link_libraries(static kvbudget::static)
CMAKE
holds 'CMake finds it' cmake -S . -B cmake -DCMAKE_PREFIX_PATH="$T/moved/opt/kvb" -DCMAKE_C_COMPILER="${CC##* }"
holds 'and links it' cmake --build cmake
for kind in shared static; do
    run "cmake/$kind" >cmake.out 2>&1
    same "a program by CMake, $kind" cmake.out expected.out
done
sed -i 's/kvbudget 0.1/kvbudget 9.0/' CMakeLists.txt
cmake -S . -B newer -DCMAKE_PREFIX_PATH="$T/moved/opt/kvb" >cmake.out 2>&1 && not_ok 'an older version was taken'
says 'a version that is too old is refused' 'kvbudgetConfig.cmake, version: ' cmake.out
end
