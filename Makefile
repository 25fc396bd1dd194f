# kvbudget: everything that is built goes to $(BUILD). make/ has the rest: tests.mk (test programs and passes), cuda.mk
# (CUDA), python.mk (wheels), install.mk (installation).
# The two commands that matter on a fresh machine: `make quickstart` and `make check`; `make help` lists the rest.

VERSION   := 0.1.0
SOVERSION := 0

# The user's own CC, CFLAGS, CPPFLAGS, LDFLAGS, PREFIX, DESTDIR are respected; what the project needs is added to them.
ifeq ($(origin CC),default)
CC       := gcc
endif
ifeq ($(origin CXX),default)
CXX      := g++
endif
AR       ?= ar
OBJCOPY  ?= objcopy
PREFIX   ?= /usr/local
LIBDIR   ?= $(PREFIX)/lib
BUILD    ?= build
# Without -march=native: the binary runs on any machine of the architecture. The heavy loops are in oneDNN, which picks
# vector instructions at run time, and the cpu backend compiles its own loops for several instruction sets. -g1: a
# backtrace has lines; to debug, give CFLAGS='-O0 -g'.
CFLAGS   ?= -O2 -g1
PYTHON   ?= python3
JOBS     ?= $(shell nproc 2>/dev/null || echo 2)
V        ?= 0
Q        := $(if $(filter 1,$(V)),,@)
SAY       = $(if $(filter 1,$(V)),@:,@printf '  %-5s %s\n')
PARALLEL  = --no-print-directory -j$(JOBS)

WARN     := -Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wcast-qual \
            -Wundef -Wvla -Wformat=2
WERROR   ?=
# -D_GNU_SOURCE: getopt_long, mkostemp, qsort_r.
# -ffp-contract=off: every build computes the same sums, at the price of fused multiply-add in our own loops; FLAGS_
# below has the exceptions. -fPIC: costs a percent or two; the same objects serve the static and the shared library.
BASE     := -std=c11 -D_GNU_SOURCE -DKVBUDGET_VERSION='"$(VERSION)"' -I. -fopenmp -ffp-contract=off \
            -fvisibility=hidden -fPIC $(WARN) $(WERROR)

# Per-file flags: FLAGS_<path with _ for / and without .c>. Only sums that the reference judges by tolerance may fuse.
FLAGS_profiler_backend_backend_cpu_loops := -ffp-contract=fast
# Files that implement tables of operations: not every operation needs all of its parameters.
$(foreach f,$(wildcard profiler/metric/scorer_*.c) $(addprefix profiler/backend/,backend_ref.c backend_host.c \
    backend_cpu.c packed_steps.c packed_tiles.c) profiler/weights/dequant.c evaluator/policy.c evaluator/task.c, \
    $(eval FLAGS_$(subst /,_,$(f:.c=)) := -Wno-unused-parameter))
FLAGS_evaluator_attend           := -ffp-contract=fast
FLAGS_runtime_attend             := -ffp-contract=fast
# Loops that -O2 makes slower, those of refit.c by two fifths (clang has no cost model to choose). Files and commands
# compute little; they compile in two thirds of the time.
ifneq ($(filter -O2,$(CFLAGS)),)
LOOPS := $(if $(findstring clang,$(CC)),-O3,-fvect-cost-model=dynamic)
$(foreach f,evaluator/attend runtime/attend runtime/refit $(addprefix profiler/, \
    backend/backend_cpu_loops backend/backend_cpu_attention metric/scorer_parts model/oracle), \
    $(eval FLAGS_$(subst /,_,$(f)) += $(LOOPS)))
$(foreach f,$(wildcard formats/*.c profiler/profile*.c profiler/text/jinja*.c profiler/weights/gguf.c \
    profiler/weights/weights*.c tools/*.c tools/*/*.c), \
    $(eval FLAGS_$(subst /,_,$(f:.c=)) += -O1))
endif

PKGS         := libcjson hdf5 gsl libpcre2-8 libutf8proc libcrypto
PKG_CFLAGS   := $(shell pkg-config --cflags $(PKGS) 2>/dev/null)
PKG_LIBS     := $(shell pkg-config --libs $(PKGS) 2>/dev/null)
CJSON_CFLAGS := $(shell pkg-config --cflags libcjson 2>/dev/null)
CJSON_LIBS   := $(shell pkg-config --libs libcjson 2>/dev/null)
CHECK_CFLAGS := $(shell pkg-config --cflags check 2>/dev/null)
CHECK_LIBS   := $(shell pkg-config --libs check 2>/dev/null)
LIBS         := $(PKG_LIBS) -ldnnl -lm

# MPI divides a profile among processes (mpirun -n N kvbudget profile ...). If MPI is found it is built in, and used
# only by processes that a launcher started. If not, or with MPI=0: tools/ranks_none.c instead of tools/ranks_mpi.c.
MPI ?= $(if $(shell pkg-config --exists ompi-c 2>/dev/null && echo yes),1,0)
ifeq ($(MPI),1)
MPI_CFLAGS := $(patsubst -I%,-isystem %,$(shell pkg-config --cflags ompi-c 2>/dev/null))
FLAGS_tools_ranks_mpi += $(MPI_CFLAGS)
MPI_LIBS   := $(shell pkg-config --libs ompi-c 2>/dev/null)
NO_MPI_SRC := tools/ranks_none.c
else
NO_MPI_SRC := tools/ranks_mpi.c
endif

# -MMD -MP: the compiler writes down the headers as dependencies.
COMPILE = $(CC) $(BASE) $(PKG_CFLAGS) $(CPPFLAGS) $(CFLAGS) -MMD -MP

# ----------------------------------------------------------------------------------------------------------------------
# The folders of code, and for each the folders that it may include, in the order in which a linker wants their
# archives. Solver and profiler exchange files on disk and never include each other (`make lint` checks every include).
# Each module becomes an archive; the profiler's five folders go into one.
MODULES  := runtime formats solver study profiler evaluator
TOOLS    := tools tools/cmd tools/report
PROFILER := $(addprefix profiler/,weights text backend model metric)

USES_formats          := runtime
USES_solver           := formats runtime
USES_study            := solver formats runtime
USES_profiler/weights := formats runtime
USES_profiler/text    := profiler/weights formats runtime
USES_profiler/backend := profiler/weights formats runtime
USES_profiler/model   := profiler/backend profiler/weights formats runtime
USES_profiler/metric  := profiler/model profiler/backend profiler/weights formats runtime
USES_profiler         := $(PROFILER) formats runtime
USES_evaluator        := profiler study solver formats runtime
USES_tools            := evaluator profiler study solver formats runtime

# objects FOLDERS. archives MODULE: its own archive, if it has one, and those of all modules that it uses.
objects  = $(patsubst %.c,$(BUILD)/%.o,$(filter-out $(NO_MPI_SRC),$(sort $(wildcard $(addsuffix /*.c,$(1))))))
archive  = $(BUILD)/lib$(1)-module.a
archives = $(foreach m,$(filter $(MODULES),$(1) $(USES_$(1))),$(call archive,$(m)))

# program NAME, INPUTS [, FLAGS [, LIBRARIES]]: builds $(BUILD)/NAME from sources, objects and archives.
define program
$(BUILD)/$(1): $(2) $(BUILD)/flags
	@mkdir -p $$(@D)
	$(SAY) LD $$@
	$(Q)$$(COMPILE) $(3) -o $$@ $(2) $$(LDFLAGS) $(4) $$(LIBS)
endef
add_program = $(eval $(call program,$(1),$(2),$(3),$(4)))

PAGE_CSS  := $(BUILD)/tools/report/page_css
TOOL_OBJ  := $(foreach d,$(TOOLS),$(call objects,$(d))) $(PAGE_CSS).o
SONAME    := libkvbudget.so.$(SOVERSION)
EXAMPLES  := $(patsubst runtime/examples/%.c,$(BUILD)/examples/%,$(sort $(wildcard runtime/examples/*.c)))
HELPERS   := $(addprefix $(BUILD)/tests/,tiny_model score_layer tokens logits)

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.PHONY: all help deps deps-base quickstart lint format golden showconfig install install-runtime uninstall clean FORCE

##: make quickstart   install what is missing, build, get the default model, tune a table for it, show budgets
##: make check        install what is missing, build, run all tests: unit, command line, real model, sanitised, fuzz
##:
##: make all          build/kvbudget and the runtime library (static and shared)
##: make check-long   the larger runs: comparisons with the published Python code, long texts
##: make san          the tests under AddressSanitizer and UndefinedBehaviorSanitizer alone
##: make fuzz         fuzz every reader for FUZZ_SECONDS=60 each (clang; with gcc the corpora are replayed)
##: make bench-quality  tune four real models (1.9 GB to fetch, hours) and write the results to docs/models.csv
##: make bench-board  compare kvbudget with every press of kvpress, on four models (hours; resumes where it was stopped)
##: make bench        measure every command on this machine, as CSV; PEER_PYTHON=... to compare with PyTorch
##: make check-aarch64  the runtime library on 64-bit ARM, cross-compiled and emulated (Debian)
##: make check-cuda   with a GPU: operations and a model against the reference, compute-sanitizer
##: make wheel        a wheel of the Python package with the library and the program, in $(BUILD)/wheel
##: make wheel-library a wheel with only the library, all of it Apache-2.0, in $(BUILD)/wheel-library
##: make check-wheel  test both wheels in a fresh environment, following python/README.md (downloads PyTorch)
##: make check-python the Python package's tests, in their own environment (pinned torch, transformers, kvpress: 6 GB)
##: make check-engines  compare a table in OpenVINO's runtime with transformers (needs check-python's environment)
##: make check-docs   run the command blocks of README and docs as they are written; LONG=1: slow ones too
##: make lint         check style, that headers are self-contained, exported symbols, includes, shell scripts
##: make format       rewrite the sources in the project's style (clang-format)
##: make golden       regenerate tests/golden with the Python references in a virtual environment
##: make deps         install the packages that are missing (with root or sudo; otherwise lists them)
##: make showconfig   show what was detected and which flags are used
##: make install      install to PREFIX=/usr/local, below DESTDIR; `make uninstall` removes the same files
##: make install-runtime  install only the library (needs cJSON only), for pkg-config and CMake
##: make clean        remove the build folders (never downloads or results)
##:
##: Variables: CC CXX CFLAGS CPPFLAGS LDFLAGS PREFIX LIBDIR DESTDIR BUILD JOBS PYTHON; WERROR=-Werror; V=1 (show
##: commands); MPI=0, CUDA=0 (without); NVCC CUDA_HOME CUDA_ARCHS; FUZZ_CC

all: $(BUILD)/kvbudget $(BUILD)/libkvbudget.a $(BUILD)/libkvbudget.so $(HELPERS)

$(call add_program,kvbudget,$(TOOL_OBJ) $(call archives,tools),,$(MPI_LIBS))
$(call add_program,tests/tiny_model,tests/tiny_model.c $(call archives,profiler))
$(foreach p,score_layer tokens logits,$(call add_program,tests/$(p),tests/peer/$(p).c $(call archives,profiler)))
$(call add_program,tests/bytes_rows,tests/peer/bytes_rows.c $(call archives,solver))
$(call add_program,tests/task_score,tests/peer/task_score.c $(call archives,evaluator))

help:
	@sed -n 's/^##: \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

include make/tests.mk make/cuda.mk make/python.mk make/install.mk

# ----------------------------------------------------------------------------------------------------------------------
# Objects and archives. $(BUILD)/flags is written again when any flag changes, also one of a single file, so that a
# build folder never mixes two kinds of objects.
ALL_FLAGS := $(strip $(COMPILE) $(CXX) $(LDFLAGS) $(LIBS) MPI=$(MPI) CUDA=$(CUDA) $(NVCC) $(NVCC_FLAGS) \
             $(foreach f,$(sort $(filter FLAGS_%,$(.VARIABLES))),$(f)=$($(f))))
ifneq ($(strip $(file <$(BUILD)/flags)),$(ALL_FLAGS))
$(BUILD)/flags: FORCE
endif
$(BUILD)/flags: export KVB_FLAGS = $(ALL_FLAGS)
$(BUILD)/flags:
	@mkdir -p $(@D)
	@test -e $(@D)/.gitignore || echo '*' > $(@D)/.gitignore # whatever the folder's name
	@printf '%s\n' "$$KVB_FLAGS" > $@

ifeq ($(PKG_LIBS),)
# Without this rule, a missing package would show up as a header that is not found.
$(BUILD)/%.o: %.c
	@echo "kvbudget: pkg-config does not find all of: $(PKGS)." \
	    "Run 'make deps' first (or 'make check', 'make quickstart')." >&2; exit 1

$(BUILD)/runtime/%.o: runtime/%.c $(BUILD)/flags # needs only cJSON
	@mkdir -p $(@D)
	$(SAY) CC $<
	$(Q)$(COMPILE) $(CJSON_CFLAGS) $(FLAGS_$(subst /,_,runtime/$*)) -c $< -o $@
else
$(BUILD)/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(SAY) CC $<
	$(Q)$(COMPILE) $(FLAGS_$(subst /,_,$*)) -c $< -o $@
endif

# The style sheet of `kvbudget report` as C strings, so that the program contains it and the source stays a .css file.
$(PAGE_CSS).c: tools/report/page.css
	@mkdir -p $(@D)
	$(SAY) GEN $@
	$(Q){ printf '#include "tools/report/page.h"\nconst char *const page_css[] = {\n'; \
	    sed -e 's/[\\"?]/\\&/g' -e 's/.*/"&\\n",/' tools/report/page.css; \
	    printf 'NULL};\n'; } > $@

$(PAGE_CSS).o: $(PAGE_CSS).c $(BUILD)/flags
	$(SAY) CC $<
	$(Q)$(COMPILE) -c $< -o $@

define module
$(call archive,$(1)): $(call objects,$(1) $(filter $(1)/%,$(PROFILER)))
	$(Q)rm -f $$@ && $(AR) rcs $$@ $$^
endef
$(foreach m,$(MODULES),$(eval $(call module,$(m))))
$(call archive,profiler): $(CUDA_OBJ)

# The public library is runtime/ alone. -fvisibility=hidden exports only what the header marks KVB_API from the shared
# one; for the static one the objects are merged and hidden names made local, so that they cannot clash with others.
$(BUILD)/libkvbudget.a: $(call objects,runtime)
	$(SAY) AR $@
	$(Q)$(CC) -r -nostdlib -o $(BUILD)/libkvbudget.o $^ && $(OBJCOPY) --localize-hidden $(BUILD)/libkvbudget.o
	$(Q)rm -f $@ && $(AR) rcs $@ $(BUILD)/libkvbudget.o

$(BUILD)/$(SONAME): $(call objects,runtime)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -shared -Wl,-soname,$(SONAME) -Wl,--no-undefined -o $@ $^ $(CJSON_LIBS) -lm

$(BUILD)/libkvbudget.so: $(BUILD)/$(SONAME)
	$(Q)ln -sf $(SONAME) $@

# The examples are built as a user would build them: public header, shared library, nothing else.
$(BUILD)/examples/%: runtime/examples/%.c $(BUILD)/libkvbudget.so $(BUILD)/flags
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) -std=c99 $(WARN) -Iruntime $(CPPFLAGS) $(CFLAGS) -o $@ $< -L$(BUILD) -Wl,-rpath,'$$ORIGIN/..' \
	    $(LDFLAGS) -lkvbudget -lm

golden: all
	@PYTHON=$(PYTHON) tests/golden/regenerate.sh

quickstart: deps-base
	@$(MAKE) $(PARALLEL) all
	@BUILD=$(BUILD) tools/scripts/quickstart.sh

deps:
	@tools/scripts/install-deps.sh $(if $(findstring command,$(origin MPI)),$(if $(filter 1,$(MPI)),mpi),mpi)

deps-base:
	@tools/scripts/install-deps.sh

FOLDERS := $(MODULES) $(PROFILER) $(TOOLS) tests tests/unit tests/fuzz runtime/examples
lint: $(BUILD)/libkvbudget.so $(BUILD)/libkvbudget.a
	@CC='$(CC)' BUILD=$(BUILD) LINT_FLAGS='$(BASE) $(PKG_CFLAGS)' FOLDERS='$(FOLDERS)' TOOLS='$(TOOLS)' \
	    USES='$(foreach m,$(MODULES) $(PROFILER),$(m): $(USES_$(m));)' tools/scripts/lint.sh

format:
	clang-format -i $(sort $(wildcard $(addsuffix /*.[ch],$(FOLDERS))))

showconfig:
	@printf '%-12s %s\n' version '$(VERSION)' compiler "$$($(CC) --version 2>/dev/null | head -n 1)" CC '$(CC)' \
	    CFLAGS '$(CFLAGS)' CPPFLAGS '$(CPPFLAGS)' LDFLAGS '$(LDFLAGS)' BASE '$(subst ','\'',$(BASE))' BUILD '$(BUILD)' \
	    PREFIX '$(PREFIX)' LIBDIR '$(LIBDIR)' JOBS '$(JOBS)'
	@for p in $(PKGS) check; do \
	    printf '%-12s %s\n' "$$p" "$$(pkg-config --modversion "$$p" 2>/dev/null || echo 'missing: run make deps')"; done
	@printf '%-12s %s\n' oneDNN "$$(printf '#include <oneapi/dnnl/dnnl_version.h>\n%s\n' \
	    'DNNL_VERSION_MAJOR DNNL_VERSION_MINOR DNNL_VERSION_PATCH' | $(CC) $(CPPFLAGS) -E -P - 2>/dev/null | tail -n 1 | \
	    tr ' ' . | grep '[0-9]' || echo 'missing: run make deps')"
	@printf '%-12s %s\n' MPI \
	    '$(if $(filter 1,$(MPI)),$(shell pkg-config --modversion ompi-c 2>/dev/null) (OpenMPI),not built in)'
	@printf '%-12s %s\n' CUDA '$(CUDA_SHOWN)'
	@printf '%-12s %s\n' fuzzing \
	    '$(if $(FUZZ_CC),$(FUZZ_CC) if it links libFuzzer,clang not found: corpora are replayed with $(CC))'
	@printf '%-12s %s\n' lint "$$(for t in clang-format shellcheck cppcheck nm; do \
	    command -v $$t >/dev/null && printf '%s ' $$t || printf '(no %s) ' $$t; done)"

clean:
	rm -rf $(BUILD) $(SAN_BUILD) $(BUILD)-fuzz

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
