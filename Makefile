# kvbudget: one Makefile, everything built lands in $(BUILD).
# The two commands that matter on a fresh machine: `make quickstart` and `make check`; `make help` lists the rest.

VERSION   := 0.1.0
SOVERSION := 0

# The user's own CC, CFLAGS, CPPFLAGS, LDFLAGS, PREFIX, DESTDIR are respected; what the project needs is added to them.
ifeq ($(origin CC),default)
CC       := gcc
endif
AR       ?= ar
OBJCOPY  ?= objcopy
PREFIX   ?= /usr/local
LIBDIR   ?= $(PREFIX)/lib
BUILD    ?= build
# -O3 without -march=native: the binary runs on any machine of the architecture. The heavy loops are in oneDNN, which picks the
# vector units at run time, and backend_cpu.c builds its own loops for several.
CFLAGS   ?= -O3 -g
PYTHON   ?= python3
JOBS     ?= $(shell nproc 2>/dev/null || echo 2)
V        ?= 0
Q        := $(if $(filter 1,$(V)),,@)
SAY       = $(if $(filter 1,$(V)),@:,@printf '  %-5s %s\n')

WARN     := -Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wcast-qual -Wundef -Wvla -Wformat=2
WERROR   ?=
# -D_GNU_SOURCE: getopt_long, mkostemp, qsort_r.
# -ffp-contract=off: costs fused multiply-add in our own loops, buys the same sums in every build; see FLAGS_ below for the exception.
# -fPIC: a percent or two of speed, so that the same objects serve the static and the shared library.
BASE     := -std=c11 -D_GNU_SOURCE -DKVBUDGET_VERSION='"$(VERSION)"' -I. -fopenmp -ffp-contract=off -fvisibility=hidden -fPIC $(WARN) $(WERROR)

# Per-file flags: FLAGS_<path with _ for / and without .c>. Only sums that the reference backend judges by tolerance may fuse.
FLAGS_profiler_backend_cpu_loops := -ffp-contract=fast
FLAGS_evaluator_attend := -ffp-contract=fast

PKGS     := libcjson hdf5 gsl libpcre2-8 libcrypto
PKG_CFLAGS   := $(shell pkg-config --cflags $(PKGS) 2>/dev/null)
PKG_LIBS     := $(shell pkg-config --libs $(PKGS) 2>/dev/null)
CJSON_LIBS   := $(shell pkg-config --libs libcjson 2>/dev/null)
CHECK_CFLAGS := $(shell pkg-config --cflags check 2>/dev/null)
CHECK_LIBS   := $(shell pkg-config --libs check 2>/dev/null)
LIBS     := $(PKG_LIBS) -ldnnl -lm

# MPI shares a profile out among processes (mpirun -n N kvbudget profile ...). Found: built in, and touched only by processes that a
# launcher started. Not found, or `make MPI=0`: tools/ranks_none.c instead of tools/ranks_mpi.c.
MPI      ?= $(if $(shell pkg-config --exists ompi-c 2>/dev/null && echo yes),1,0)
ifeq ($(MPI),1)
FLAGS_tools_ranks_mpi := $(patsubst -I%,-isystem %,$(shell pkg-config --cflags ompi-c 2>/dev/null))
MPI_LIBS   := $(shell pkg-config --libs ompi-c 2>/dev/null)
NO_MPI_SRC := tools/ranks_none.c
else
NO_MPI_SRC := tools/ranks_mpi.c
endif

# The cuda backend is built where nvcc of CUDA 12 or later is found: in CUDA_HOME, in PATH, or where tools/get-cuda.sh has put it (`make
# check` asks for that). `make CUDA=0` builds without. CUDA's runtime is linked statically and cuBLAS opened when it is used, so that the
# program runs on machines without either. -fmad=false: sums fuse where the source says fmaf, and nowhere else.
ifeq ($(origin CXX),default)
CXX      := g++
endif
CXX_FOUND := $(shell command -v $(firstword $(CXX)) 2>/dev/null)
ifneq ($(CUDA),0)
NVCC     ?= $(shell for n in "$${CUDA_HOME:-/nonexistent}/bin/nvcc" nvcc "$$(tools/get-cuda.sh --path)/bin/nvcc"; do \
                r=$$("$$n" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\).*/\1/p'); \
                if [ "$${r:-0}" -ge 12 ]; then realpath "$$(command -v "$$n")"; break; fi; done)
NVCC_HOME := $(patsubst %/bin/nvcc,%,$(NVCC))
CUDART   := $(firstword $(wildcard $(addprefix $(NVCC_HOME)/,lib64/libcudart_static.a lib/libcudart_static.a targets/x86_64-linux/lib/libcudart_static.a)))
endif
CUDA     ?= $(if $(and $(NVCC),$(CUDART),$(CXX_FOUND)),1,0)
ifeq ($(CUDA),1)
$(if $(and $(NVCC),$(CUDART)),,$(error CUDA=1: no nvcc of CUDA 12 or later with libcudart_static.a was found; set CUDA_HOME, or run tools/get-cuda.sh))
# Real code for these, as far as the compiler knows them; sm_80's runs on 8.6 and 8.9 too, and its PTX is compiled by the driver for what lies
# between and ahead.
ifeq ($(origin CUDA_ARCHS),undefined)
CUDA_KNOWN := $(shell $(NVCC) --list-gpu-code 2>/dev/null)
CUDA_ARCHS := $(foreach a,80 90 100 120,$(if $(filter sm_$(a),$(CUDA_KNOWN)),$(a)))
endif
NVCC_FLAGS  = -O3 -lineinfo -std=c++20 -fmad=false -I. -Werror all-warnings -ccbin $(CXX) -MMD -MP $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
              -gencode arch=compute_$(firstword $(CUDA_ARCHS)),code=compute_$(firstword $(CUDA_ARCHS)) \
              -Xcompiler -Wall,-Wextra,-fPIC,-fvisibility=hidden,-fno-threadsafe-statics,-fno-exceptions,-fno-rtti
FLAGS_profiler_backend := -DKVB_CUDA
CUDA_OBJ   := $(BUILD)/profiler/backend_cuda.o
LIBS       += $(CUDART) -ldl -lpthread -lrt
endif

# -MMD -MP: headers are dependencies, found by the compiler.
COMPILE  = $(CC) $(BASE) $(PKG_CFLAGS) $(CPPFLAGS) $(CFLAGS) -MMD -MP

# The sanitised build: half the speed or less, finds what the tests alone cannot. -O1 keeps its stack traces readable.
SAN_BUILD  := $(BUILD)-san
SAN_CFLAGS := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
# Without CUDA: sanitisers do not see into its code; the emulated device, built with them, does (tests/cuda).
SAN_MAKE    = $(MAKE) BUILD=$(SAN_BUILD) CFLAGS='$(SAN_CFLAGS)' CUDA=0

# Fuzzing needs clang and its libFuzzer; with gcc the same targets replay their corpus through tests/fuzz/driver.c.
FUZZ_CC      ?= $(firstword $(shell command -v clang clang-19 clang-18 clang-17 clang-16 clang-15 clang-14 2>/dev/null))
FUZZ_SECONDS ?= 60
FUZZ_CFLAGS  := -O1 -g -fno-omit-frame-pointer -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -Wno-pass-failed

# ---------------------------------------------------------------------------------------------------------------------------
# An arrow between two folders is always a file on disk: solver and profiler never include each other (checked by `make lint`).
MODULES  := runtime formats solver profiler evaluator
OBJ       = $(patsubst %.c,$(BUILD)/%.o,$(filter-out $(NO_MPI_SRC),$(sort $(wildcard $(1)/*.c))))
LIB       = $(BUILD)/lib$(1)-module.a

DEPS_runtime  := runtime
DEPS_formats  := formats runtime
DEPS_solver   := solver formats runtime
DEPS_profiler := profiler formats runtime
DEPS_evaluator := evaluator profiler formats runtime
DEPS_tools    := evaluator profiler solver formats runtime
module_libs    = $(foreach m,$(DEPS_$(word 2,$(subst _, ,$(1)))),$(call LIB,$(m)))

UNIT_SRC  := $(sort $(wildcard tests/unit/test_*.c))
UNIT_BIN  := $(patsubst tests/unit/%.c,$(BUILD)/tests/%,$(UNIT_SRC)) $(addprefix $(BUILD)/tests/test_profiler_backend_,cpu_bf16x3 cpu_bf16 emulated emulated_bf16x3 emulated_bf16) \
             $(if $(filter 1,$(CUDA)),$(addprefix $(BUILD)/tests/test_profiler_backend_,cuda cuda_bf16x3 cuda_bf16))
FUZZ_SRC  := $(sort $(wildcard tests/fuzz/fuzz_*.c))
FUZZ_BIN  := $(patsubst tests/fuzz/%.c,$(BUILD)/fuzz/%,$(FUZZ_SRC))
TINY      := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/tiny_model.c tests/score_layer.c))
EXAMPLES  := $(patsubst runtime/examples/%.c,$(BUILD)/examples/%,$(sort $(wildcard runtime/examples/*.c)))
SONAME    := libkvbudget.so.$(SOVERSION)

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.PHONY: all help deps deps-base cuda-compiler quickstart check check-inner check-build check-long san fuzz fuzz-build bench bench-memory bench-cuda cuda-pack check-cuda-build lint format golden showconfig install uninstall clean

##: make quickstart   install what is missing, build, get the default model, profile, solve, write tables, show the budgets
##: make check        install what is missing, build, run all tests: unit, command line, real model, sanitised, fuzz corpora
##:
##: make all          build/kvbudget and the runtime library (static and shared)
##: make check-long   the larger runs: comparisons with the published Python code, long texts
##: make san          the tests under AddressSanitizer and UndefinedBehaviorSanitizer alone
##: make fuzz         fuzz every reader for FUZZ_SECONDS=60 each (clang; with gcc the corpora are replayed)
##: make bench        measure profile and solve on this machine: CSV, roofline table; PEER_PYTHON=... beside PyTorch
##: make bench-cuda   with a GPU: operations against the reference, compute-sanitizer, seconds of a model of the shape of Llama 3.1 8B
##: make cuda-pack    the programs that bench-cuda runs, with their libraries, as one archive for a machine without compiler or internet
##: make bench-memory peak memory against the context's length: LAYERS=4 (0: all), TOKENS="1024 ... 32768", SVG=FILE
##: make lint         style, headers that stand alone, exported symbols, includes between folders, shell scripts
##: make format       rewrite the sources in the project's style (clang-format)
##: make golden       regenerate tests/golden with the Python references in a virtual environment
##: make deps         install the packages that are missing (root or sudo; else lists them)
##: make showconfig   what was detected and which flags are used
##: make install      to PREFIX=/usr/local, below DESTDIR; `make uninstall` removes the same files
##: make clean        remove the build folders (never downloads or results)
##:
##: Variables: CC CFLAGS CPPFLAGS LDFLAGS PREFIX LIBDIR DESTDIR BUILD JOBS PYTHON WERROR=-Werror V=1 (show commands) MPI=0 CUDA=0 (without)

all: $(BUILD)/kvbudget $(BUILD)/libkvbudget.a $(BUILD)/libkvbudget.so $(TINY)

help:
	@sed -n 's/^##: \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

deps:
	@tools/install-deps.sh $(if $(findstring command,$(origin MPI)),$(if $(filter 1,$(MPI)),mpi),mpi)

deps-base:
	@tools/install-deps.sh

showconfig:
	@printf '%-12s %s\n' version '$(VERSION)' compiler "$$($(CC) --version 2>/dev/null | head -n 1)" CC '$(CC)' CFLAGS '$(CFLAGS)' \
	    CPPFLAGS '$(CPPFLAGS)' LDFLAGS '$(LDFLAGS)' BASE '$(subst ','\'',$(BASE))' BUILD '$(BUILD)' PREFIX '$(PREFIX)' LIBDIR '$(LIBDIR)' JOBS '$(JOBS)'
	@for p in $(PKGS) check; do printf '%-12s %s\n' "$$p" "$$(pkg-config --modversion "$$p" 2>/dev/null || echo 'missing: run make deps')"; done
	@printf '%-12s %s\n' oneDNN "$$(printf '#include <oneapi/dnnl/dnnl_version.h>\nDNNL_VERSION_MAJOR DNNL_VERSION_MINOR DNNL_VERSION_PATCH\n' \
	    | $(CC) $(CPPFLAGS) -E -P - 2>/dev/null | tail -n 1 | tr ' ' . | grep '[0-9]' || echo 'missing: run make deps')"
	@printf '%-12s %s\n' MPI '$(if $(filter 1,$(MPI)),$(shell pkg-config --modversion ompi-c 2>/dev/null) (OpenMPI),not built in)'
	@printf '%-12s %s\n' CUDA '$(if $(filter 1,$(CUDA)),$(NVCC) for $(addprefix sm_,$(CUDA_ARCHS)),not built in$(if $(NVCC),,: no nvcc of CUDA 12 or later, see tools/get-cuda.sh))'
	@printf '%-12s %s\n' fuzzing '$(if $(FUZZ_CC),$(FUZZ_CC) if it links libFuzzer,clang not found: corpora are replayed with $(CC))'
	@printf '%-12s %s\n' lint "$$(for t in clang-format shellcheck cppcheck nm; do command -v $$t >/dev/null && printf '%s ' $$t || printf '(no %s) ' $$t; done)"

# ---------------------------------------------------------------------------------------------------------------------------
# Objects and module archives. $(BUILD)/flags changes when the flags do, so a build folder never mixes two kinds of objects.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@test -e $(@D)/.gitignore || echo '*' > $(@D)/.gitignore # whatever the folder's name
	@printf '%s\n' '$(subst ','\'',$(COMPILE) $(FLAGS_profiler_backend_cpu_loops) $(LDFLAGS) MPI=$(MPI) CUDA=$(CUDA) $(NVCC) $(NVCC_FLAGS))' | cmp -s - $@ || printf '%s\n' '$(subst ','\'',$(COMPILE) $(FLAGS_profiler_backend_cpu_loops) $(LDFLAGS) MPI=$(MPI) CUDA=$(CUDA) $(NVCC) $(NVCC_FLAGS))' > $@
FORCE:

ifeq ($(PKG_LIBS),)
# A missing package would otherwise show up as a header that is not found.
$(BUILD)/%.o: %.c
	@echo "kvbudget: pkg-config does not find all of: $(PKGS). Run 'make deps' first (or 'make check', 'make quickstart')." >&2; exit 1
else
$(BUILD)/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(SAY) CC $<
	$(Q)$(COMPILE) $(FLAGS_$(subst /,_,$*)) -c $< -o $@
endif

define module
$(call LIB,$(1)): $(call OBJ,$(1))
	$(Q)rm -f $$@ && $(AR) rcs $$@ $$^
endef
$(foreach m,$(MODULES),$(eval $(call module,$(m))))
$(call LIB,profiler): $(CUDA_OBJ)

$(BUILD)/profiler/backend_cuda.o: profiler/backend_cuda.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(SAY) NVCC $<
	$(Q)$(NVCC) $(NVCC_FLAGS) -c $< -o $@

$(BUILD)/kvbudget: $(call OBJ,tools) $(foreach m,$(DEPS_tools),$(call LIB,$(m)))
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -fopenmp -o $@ $^ $(LIBS) $(MPI_LIBS)

# The public library is runtime/ alone. -fvisibility=hidden leaves only what the header marks KVB_API in the shared one; for the static
# one the objects are merged and hidden names made local, so that they cannot clash with those of the program that links it.
$(BUILD)/libkvbudget.a: $(call OBJ,runtime)
	$(SAY) AR $@
	$(Q)$(CC) -r -nostdlib -o $(BUILD)/libkvbudget.o $^ && $(OBJCOPY) --localize-hidden $(BUILD)/libkvbudget.o
	$(Q)rm -f $@ && $(AR) rcs $@ $(BUILD)/libkvbudget.o

$(BUILD)/$(SONAME): $(call OBJ,runtime)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -shared -Wl,-soname,$(SONAME) -Wl,--no-undefined -o $@ $^ $(CJSON_LIBS) -lm

$(BUILD)/libkvbudget.so: $(BUILD)/$(SONAME)
	$(Q)ln -sf $(SONAME) $@

$(TINY): $(BUILD)/tests/%: tests/%.c $(BUILD)/flags $(foreach m,$(DEPS_profiler),$(call LIB,$(m)))
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(COMPILE) -o $@ $< $(foreach m,$(DEPS_profiler),$(call LIB,$(m))) $(LDFLAGS) $(LIBS)

$(BUILD)/tests/bench_solver: tests/bench_solver.c $(BUILD)/tools/svg.o $(BUILD)/tools/viridis.o $(BUILD)/flags $(foreach m,$(DEPS_solver),$(call LIB,$(m)))
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(COMPILE) -o $@ $< $(BUILD)/tools/svg.o $(BUILD)/tools/viridis.o $(foreach m,$(DEPS_solver),$(call LIB,$(m))) $(LDFLAGS) $(LIBS)

CUDA_BENCH := $(addprefix $(BUILD)/tests/,bench_cuda bench_cuda_ops)
$(CUDA_BENCH): $(BUILD)/tests/%: tests/%.c $(BUILD)/flags $(foreach m,$(DEPS_profiler),$(call LIB,$(m)))
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(COMPILE) -o $@ $< $(foreach m,$(DEPS_profiler),$(call LIB,$(m))) $(LDFLAGS) $(LIBS)

$(BUILD)/tests/draw_memory: tests/draw_memory.c $(BUILD)/flags $(BUILD)/tools/svg.o $(BUILD)/tools/viridis.o
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(COMPILE) -o $@ $< $(BUILD)/tools/svg.o $(BUILD)/tools/viridis.o $(LDFLAGS) $(LIBS)

# The examples are built as a user would build them: public header, shared library, nothing else.
$(BUILD)/examples/%: runtime/examples/%.c $(BUILD)/libkvbudget.so $(BUILD)/flags
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) -std=c99 $(WARN) -Iruntime $(CPPFLAGS) $(CFLAGS) -o $@ $< -L$(BUILD) -Wl,-rpath,'$$ORIGIN/..' $(LDFLAGS) -lkvbudget -lm

# A unit test links only the module it is named after and what that module may use: tests/unit/test_<module>_<what>.c;
# test_tools_<what>.c links the objects of tools/ as well, except main.
TOOL_PARTS := $(filter-out $(BUILD)/tools/kvbudget.o $(BUILD)/tools/cmd_%.o,$(call OBJ,tools))
EMULATED := $(BUILD)/tests/backend_cuda_emulated.o
unit_objects = $(if $(filter test_tools_%,$(1)),$(TOOL_PARTS))$(if $(filter test_profiler_cuda,$(1)),$(EMULATED))
define unit
$(BUILD)/tests/$(1): tests/unit/$(1).c tests/unit/unit.h $(BUILD)/flags $(call unit_objects,$(1)) $(call module_libs,$(1))
	@mkdir -p $$(@D)
	$(SAY) LD $$@
	$(Q)$(COMPILE) $(if $(filter $(EMULATED),$(call unit_objects,$(1))),-DEMULATED) -Itests/unit $(CHECK_CFLAGS) -o $$@ $$< $(call unit_objects,$(1)) $(call module_libs,$(1)) $(LDFLAGS) $(CHECK_LIBS) $(LIBS) $(if $(call unit_objects,$(1)),$(MPI_LIBS) -lstdc++)
endef
$(foreach t,$(notdir $(basename $(UNIT_SRC))),$(eval $(call unit,$(t))))

# The cuda backend, compiled as C++ for the emulated device of tests/cuda, and the judge of all backends compiled for it, for the cpu
# backend's other precisions and, where nvcc was found, for the real device.
$(EMULATED): profiler/backend_cuda.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(SAY) CXX $@
	$(Q)$(CXX) -x c++ -std=c++20 -Itests/cuda -I. -Dbackend_cuda=backend_cuda_emulated -Dbackend_cuda_bf16x3=backend_cuda_bf16x3_emulated -Dbackend_cuda_bf16=backend_cuda_bf16_emulated -Dbackend_cuda_random_matrix=random_matrix_emulated -Wall -Wextra -Wno-unknown-pragmas $(WERROR) -ffp-contract=off $(CPPFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@

define judge
$(BUILD)/tests/test_profiler_backend_$(1): tests/unit/test_profiler_backend.c tests/unit/unit.h $(BUILD)/flags $(2) $(call module_libs,test_profiler_backend)
	@mkdir -p $$(@D)
	$(SAY) LD $$@
	$(Q)$(COMPILE) -DJUDGED=backend_$(if $(filter emulated%,$(1)),cuda$(patsubst emulated%,%,$(1))_emulated -DEMULATED,$(1)) -Itests/unit $(CHECK_CFLAGS) -o $$@ $$< $(2) $(call module_libs,test_profiler_backend) $(LDFLAGS) $(CHECK_LIBS) $(LIBS) -lstdc++
endef
$(eval $(call judge,cpu_bf16x3))
$(eval $(call judge,cpu_bf16))
$(foreach t,emulated emulated_bf16x3 emulated_bf16,$(eval $(call judge,$(t),$(EMULATED))))
ifeq ($(CUDA),1)
$(foreach t,cuda cuda_bf16x3 cuda_bf16,$(eval $(call judge,$(t))))
$(BUILD)/tests/test_profiler_cuda_device: tests/unit/test_profiler_cuda.c tests/unit/unit.h $(BUILD)/flags $(call module_libs,test_profiler_cuda)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(COMPILE) -Itests/unit $(CHECK_CFLAGS) -o $@ $< $(call module_libs,test_profiler_cuda) $(LDFLAGS) $(CHECK_LIBS) $(LIBS)
endif

# A fuzz target may use any module; the linker takes what it needs. $(FUZZ_MAIN) is the replay driver or libFuzzer's main.
FUZZ_MAIN ?= tests/fuzz/driver.c
define fuzz_target
$(BUILD)/fuzz/$(1): tests/fuzz/$(1).c $(filter %.c,$(FUZZ_MAIN)) $(BUILD)/flags $(foreach m,$(DEPS_tools),$(call LIB,$(m)))
	@mkdir -p $$(@D)
	$(SAY) LD $$@
	$(Q)$(COMPILE) -o $$@ $$< $(FUZZ_MAIN) $(foreach m,$(DEPS_tools),$(call LIB,$(m))) $(LDFLAGS) $(LIBS)
endef
$(foreach t,$(notdir $(basename $(FUZZ_SRC))),$(eval $(call fuzz_target,$(t))))

# ---------------------------------------------------------------------------------------------------------------------------
# Tests. `check` calls make again after installing packages, because pkg-config is asked when a Makefile is read.
check: deps cuda-compiler
	@$(MAKE) --no-print-directory check-inner

cuda-compiler: deps
	@$(if $(or $(filter 1,$(CUDA)),$(findstring command,$(origin CUDA))),:,tools/get-cuda.sh --optional)

check-build: all $(UNIT_BIN) $(FUZZ_BIN) $(EXAMPLES) check-cuda-build

check-inner:
	@$(MAKE) --no-print-directory -j$(JOBS) check-build
	@$(SAN_MAKE) --no-print-directory -j$(JOBS) check-build
	@tests/run.sh unit=$(BUILD) cli=$(BUILD) real=$(BUILD) unit=$(SAN_BUILD) cli=$(SAN_BUILD) real=$(SAN_BUILD) fuzz=$(SAN_BUILD)

san: deps
	@$(SAN_MAKE) --no-print-directory -j$(JOBS) check-build
	@tests/run.sh unit=$(SAN_BUILD) cli=$(SAN_BUILD) real=$(SAN_BUILD) fuzz=$(SAN_BUILD)

check-long: deps
	@$(MAKE) --no-print-directory -j$(JOBS) check-build
	@tests/run.sh long=$(BUILD)

# clang without its runtimes (Debian: libclang-rt-14-dev, libomp-dev) compiles, but cannot link such a program: so try it.
fuzz: deps
	@if printf 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d && n > 9; }\n' | \
	    '$(or $(FUZZ_CC),clang)' -fopenmp -fsanitize=fuzzer,address,undefined -x c - -o /dev/null 2>/dev/null; then \
	    $(MAKE) --no-print-directory -j$(JOBS) BUILD=$(BUILD)-fuzz CC='$(FUZZ_CC)' FUZZ_MAIN='-fsanitize=fuzzer' CFLAGS='$(FUZZ_CFLAGS)' fuzz-build && \
	    tests/fuzz/fuzz.sh $(BUILD)-fuzz/fuzz $(FUZZ_SECONDS); \
	else \
	    echo "No clang that links libFuzzer (Debian: apt-get install clang libclang-rt-14-dev libomp-dev): replaying the corpora only."; \
	    $(SAN_MAKE) --no-print-directory -j$(JOBS) fuzz-build && tests/run.sh fuzz=$(SAN_BUILD); \
	fi

fuzz-build: $(FUZZ_BIN)

bench: deps
	@$(MAKE) --no-print-directory -j$(JOBS) all $(BUILD)/tests/bench_solver
	@$(BUILD)/tests/bench_solver greedy $(BUILD)/greedy.problem | tee $(BUILD)/greedy.csv
	@$(PYTHON) tools/peer/heap_solver.py $(BUILD)/greedy.problem $(BUILD)/greedy.csv
	@$(BUILD)/tests/bench_solver sizes
	@BUILD=$(BUILD) tools/bench.sh

# On a machine with a GPU: operations against the reference, compute-sanitizer, and the speed of a model of 8B shape.
bench-cuda: deps cuda-compiler
	@$(MAKE) --no-print-directory -j$(JOBS) all check-cuda-build
	@BUILD=$(BUILD) tools/check-cuda.sh

cuda-pack: deps cuda-compiler
	@$(MAKE) --no-print-directory -j$(JOBS) all check-cuda-build
	@BUILD=$(BUILD) tools/check-cuda.sh --pack $(BUILD)/check-cuda.tar.xz

check-cuda-build: $(if $(filter 1,$(CUDA)),$(addprefix $(BUILD)/tests/test_profiler_backend_,cuda cuda_bf16x3 cuda_bf16) $(BUILD)/tests/test_profiler_cuda_device $(CUDA_BENCH) $(TINY))

bench-memory: deps
	@$(MAKE) --no-print-directory -j$(JOBS) all $(BUILD)/tests/draw_memory
	@BUILD=$(BUILD) tools/bench_memory.sh

golden: all
	@PYTHON=$(PYTHON) tests/golden/regenerate.sh

quickstart: deps-base
	@$(MAKE) --no-print-directory -j$(JOBS) all
	@BUILD=$(BUILD) tools/quickstart.sh

lint: $(BUILD)/libkvbudget.so $(BUILD)/libkvbudget.a
	@CC='$(CC)' BUILD=$(BUILD) LINT_FLAGS='$(BASE) $(PKG_CFLAGS)' tools/lint.sh

format:
	clang-format -i $(sort $(wildcard $(addsuffix /*.[ch],$(MODULES) tools tests tests/unit tests/fuzz runtime/examples)))

# ---------------------------------------------------------------------------------------------------------------------------
install: all
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(LIBDIR)/pkgconfig
	install -m 755 $(BUILD)/kvbudget $(DESTDIR)$(PREFIX)/bin/kvbudget
	install -m 644 runtime/kvbudget.h $(DESTDIR)$(PREFIX)/include/kvbudget.h
	install -m 644 $(BUILD)/libkvbudget.a $(DESTDIR)$(LIBDIR)/libkvbudget.a
	install -m 755 $(BUILD)/$(SONAME) $(DESTDIR)$(LIBDIR)/$(SONAME)
	ln -sf $(SONAME) $(DESTDIR)$(LIBDIR)/libkvbudget.so
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(patsubst $(PREFIX)/%,$${prefix}/%,$(LIBDIR))|' -e 's|@VERSION@|$(VERSION)|' runtime/kvbudget.pc.in > $(DESTDIR)$(LIBDIR)/pkgconfig/kvbudget.pc

uninstall:
	rm -f $(DESTDIR)$(PREFIX)/bin/kvbudget $(DESTDIR)$(PREFIX)/include/kvbudget.h $(addprefix $(DESTDIR)$(LIBDIR)/,libkvbudget.a $(SONAME) libkvbudget.so pkgconfig/kvbudget.pc)

clean:
	rm -rf $(BUILD) $(SAN_BUILD) $(BUILD)-fuzz

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
