# The test programs, and the targets that run them: check, san, check-long, fuzz, bench.

# The sanitised build: half the speed or less, but it finds errors that tests miss. -O1 keeps stack traces readable.
# Without CUDA: sanitisers cannot check device code; the emulated device (tests/cuda) is built with them instead.
SAN_BUILD  := $(BUILD)-san
SAN_CFLAGS := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
SANITISED   = $(PARALLEL) BUILD=$(SAN_BUILD) CFLAGS='$(SAN_CFLAGS)' CUDA=0

# Fuzzing needs clang and its libFuzzer; with gcc the same targets replay their corpus through tests/fuzz/driver.c.
# clang without its runtimes (Debian: libclang-rt-14-dev, libomp-dev) compiles such a program, but cannot link it, so
# FUZZ_LINKS tries it.
FUZZ_CC      ?= $(firstword $(shell command -v clang clang-19 clang-18 clang-17 clang-16 clang-15 clang-14 2>/dev/null))
FUZZ_SECONDS ?= 60
FUZZ_MAIN    ?= tests/fuzz/driver.c
FUZZ_CFLAGS  := -O1 -g -fno-omit-frame-pointer -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all \
                -Wno-pass-failed
FUZZ_LINKS    = $(if $(FUZZ_CC),$(shell \
                echo 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d && n > 9; }' | \
                $(FUZZ_CC) -fopenmp -fsanitize=fuzzer,address,undefined -x c - -o /dev/null 2>/dev/null && echo yes))

UNIT     := $(notdir $(basename $(sort $(wildcard tests/unit/test_*.c))))
FUZZ     := $(notdir $(basename $(sort $(wildcard tests/fuzz/fuzz_*.c))))
UNIT_BIN := $(addprefix $(BUILD)/tests/,$(UNIT))
FUZZ_BIN := $(addprefix $(BUILD)/fuzz/,$(FUZZ))
# Tests compile in half the time with -O1, and the code that they test keeps its flags. The user's CFLAGS are kept.
CHECKED  := $(if $(filter file,$(origin CFLAGS)),-O1) -Itests/unit $(CHECK_CFLAGS)

# A unit test, tests/unit/test_<module>_<what>.c, links only its module and those that the module may use;
# test_tools_<what>.c links the objects of tools/ as well, except main and the commands. make/cuda.mk has the tests of
# backends. A fuzz target may use any module, and those objects of tools/ that FUZZ_PARTS_x names; $(FUZZ_MAIN) is the
# replay driver or libFuzzer's main. UNIT_FLAGS_x: flags of one test; the memory test replaces malloc and its like.
EMULATED_UNIT := test_profiler_cuda test_profiler_backend
UNIT_FLAGS_test_runtime_memory := -Wl,--wrap=malloc -Wl,--wrap=calloc -Wl,--wrap=realloc -Wl,--wrap=free
TOOL_PART  := $(filter-out $(BUILD)/tools/kvbudget.o $(patsubst %.c,$(BUILD)/%.o, \
              $(shell grep -lE '^const cli_command cmd_' $(addsuffix /*.c,$(TOOLS)))),$(TOOL_OBJ))
module_of   = $(firstword $(foreach m,$(MODULES),$(if $(filter $(notdir $(m)),$(word 2,$(subst _, ,$(1)))),$(m))) tools)
unit_inputs = tests/unit/$(1).c $(if $(filter test_tools_%,$(1)),$(TOOL_PART)) $(call archives,$(call module_of,$(1)))
unit_libs   = $(CHECK_LIBS) $(if $(filter test_tools_%,$(1)),$(MPI_LIBS))
$(foreach t,$(filter-out $(EMULATED_UNIT),$(UNIT)),$(call add_program,tests/$(t),$(call unit_inputs,$(t)), \
    $(CHECKED) $(UNIT_FLAGS_$(t)),$(call unit_libs,$(t))))
FUZZ_PARTS_fuzz_results := $(addprefix $(BUILD)/tools/,report/results.o json_print.o)
$(foreach t,$(FUZZ),$(call add_program,fuzz/$(t),tests/fuzz/$(t).c $(FUZZ_PARTS_$(t)) $(filter %.c,$(FUZZ_MAIN)) \
    $(call archives,tools),$(filter-out %.c,$(FUZZ_MAIN))))

$(call add_program,tests/bench_solver,tests/peer/bench_solver.c $(call archives,solver))

# Makes one file call fail; tests/faults/faults.py preloads it into the program.
FAULT_SHIM := $(BUILD)/tests/fault_shim.so
$(FAULT_SHIM): tests/faults/fault_shim.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) -std=c11 -O2 $(WARN) $(WERROR) -fPIC -shared -o $@ $< -ldl

# ----------------------------------------------------------------------------------------------------------------------
.PHONY: check check-inner check-build check-aarch64 runtime-tests check-docs check-long san fuzz fuzz-build fuzz-run \
    fuzz-replay bench bench-quality bench-board

# `check` calls make again after installing packages, because pkg-config runs while the Makefile is read.
check: deps cuda-compiler
	@$(MAKE) --no-print-directory check-inner

# Runs the commands of the pages on a small model and short texts; LONG=1: on the full ones, and slow commands too.
# PAGES: only these and README.md; KEEP: a folder in which to keep the copies of the tree.
check-docs: deps-base
	@$(MAKE) $(PARALLEL) all
	@$(PYTHON) tests/docs/check_docs.py $(BUILD) $(PAGES) $(KEEP:%=--keep %) $(if $(filter 1,$(LONG)),--long) \
	    --jobs $(JOBS)

runtime-tests: $(filter $(BUILD)/tests/test_runtime_%,$(UNIT_BIN))

check-aarch64:
	@BUILD=$(BUILD) tools/scripts/check-aarch64.sh

check-build: all $(UNIT_BIN) $(FAULT_SHIM) $(EXAMPLES) check-cuda-build

# Sanitised: unit tests, the memory pass of the command line, and corpora; `make san` runs everything sanitised.
check-inner:
	@$(MAKE) $(PARALLEL) check-build
	@$(MAKE) $(SANITISED) check-build fuzz-build
	@tests/run.sh unit=$(BUILD) cli=$(BUILD) real=$(BUILD) \
	    unit=$(SAN_BUILD) memory=$(SAN_BUILD) fuzz=$(SAN_BUILD)

san: deps
	@$(MAKE) $(SANITISED) check-build fuzz-build
	@tests/run.sh unit=$(SAN_BUILD) cli=$(SAN_BUILD) real=$(SAN_BUILD) fuzz=$(SAN_BUILD)

check-long: deps
	@$(MAKE) $(PARALLEL) check-build
	@tests/run.sh long=$(BUILD)

fuzz: deps
	@$(MAKE) $(if $(FUZZ_LINKS),$(PARALLEL) BUILD=$(BUILD)-fuzz CC='$(FUZZ_CC)' CFLAGS='$(FUZZ_CFLAGS)' \
	    FUZZ_MAIN='-fsanitize=fuzzer' fuzz-run,$(SANITISED) fuzz-replay)

fuzz-build: $(FUZZ_BIN)

fuzz-run: fuzz-build
	@tests/fuzz/fuzz.sh $(BUILD)/fuzz $(FUZZ_SECONDS)

fuzz-replay: fuzz-build
	@echo "No clang that links libFuzzer (Debian: apt-get install clang libclang-rt-14-dev libomp-dev):" \
	    "replaying the corpora only."
	@tests/run.sh fuzz=$(BUILD)

bench: deps
	@$(MAKE) $(PARALLEL) all $(BUILD)/tests/bench_solver
	@$(BUILD)/tests/bench_solver greedy $(BUILD)/greedy.problem | tee $(BUILD)/greedy.csv
	@$(PYTHON) tests/peer/heap_solver.py $(BUILD)/greedy.problem $(BUILD)/greedy.csv
	@$(BUILD)/tests/bench_solver sizes
	@BUILD=$(BUILD) tools/scripts/bench.sh

bench-quality: deps
	@$(MAKE) $(PARALLEL) $(BUILD)/kvbudget $(BUILD)/tests/tokens
	@BUILD=$(BUILD) tools/scripts/bench_quality.sh >$(BUILD)/models.csv && mv $(BUILD)/models.csv docs/models.csv

# BOARD: arguments of tests/peer/board.py, such as --budget 30. Measurements are kept, so that it can be interrupted.
bench-board: deps
	@$(MAKE) $(PARALLEL) all
	@BUILD=$(BUILD) PYTHON='$(PYTHON)' tests/peer/board.sh $(BOARD)
