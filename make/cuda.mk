# Everything about CUDA: the compiler, the cuda backend, and its tests on a real and on the emulated device.
#
# The cuda backend is built if nvcc of CUDA 12 or later is found: in CUDA_HOME, in PATH, or where
# tools/scripts/get-cuda.sh has put it (`make check` calls that). `make CUDA=0` builds without. CUDA's runtime is
# linked statically and cuBLAS opened when it is used, so that the program runs on machines without either.
# -fmad=false: multiplications and additions are fused only where the source says fmaf.
ifneq ($(CUDA),0)
NVCC     ?= $(shell \
            for n in "$${CUDA_HOME:-/nonexistent}/bin/nvcc" nvcc "$$(tools/scripts/get-cuda.sh --path)/bin/nvcc"; do \
                r=$$("$$n" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\).*/\1/p'); \
                if [ "$${r:-0}" -ge 12 ]; then realpath "$$(command -v "$$n")"; break; fi; done)
CUDA_LIB := $(addprefix $(patsubst %/bin/nvcc,%,$(NVCC))/,lib64 lib targets/x86_64-linux/lib)
CUDART   := $(firstword $(wildcard $(addsuffix /libcudart_static.a,$(CUDA_LIB))))
endif
CUDA     ?= $(if $(and $(NVCC),$(CUDART),$(shell command -v $(firstword $(CXX)) 2>/dev/null)),1,0)

# Test programs of backends: the judge of all backends, and a model compared with the reference.
# The sanitised build judges the cpu backend's float32 and bf16x3, and each emulator at one precision: it is slow, and
# all precisions handle memory with the same code.
WITH_SANITISERS  := $(findstring -fsanitize,$(CFLAGS))
JUDGED_CPU       := cpu_bf16x3 $(if $(WITH_SANITISERS),,cpu_bf16)
JUDGED_EMULATED  := $(if $(WITH_SANITISERS),emulated_bf16x3,emulated emulated_bf16x3 emulated_bf16)
JUDGED_CUDA     := cuda cuda_bf16x3 cuda_bf16
CUDA_SHOWN      := not built in$(if $(NVCC),,: no nvcc of CUDA 12 or later, see tools/scripts/get-cuda.sh)
judge_names      = $(addprefix $(BUILD)/tests/test_profiler_backend_,$(1))

ifeq ($(CUDA),1)
$(if $(and $(NVCC),$(CUDART)),,$(error CUDA=1: no nvcc of CUDA 12 or later with libcudart_static.a was found; \
    set CUDA_HOME, or run tools/scripts/get-cuda.sh))
# Machine code for the GPUs of this machine, or for sm_80 if it has none (each takes the compiler 10 seconds); for newer
# GPUs the driver compiles the PTX.
CUDA_KNOWN := $(patsubst sm_%,%,$(shell $(NVCC) --list-gpu-code 2>/dev/null))
ifeq ($(origin CUDA_ARCHS),undefined)
CUDA_ARCHS := $(or $(filter $(CUDA_KNOWN),$(sort $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader \
              2>/dev/null | tr -d '. '))),80)
endif
CUDA_PTX   := $(firstword $(CUDA_ARCHS))
NVCC_FLAGS  = -O3 -lineinfo -std=c++20 -fmad=false -I. -Werror all-warnings -ccbin $(CXX) -MMD -MP \
              $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
              -gencode arch=compute_$(CUDA_PTX),code=compute_$(CUDA_PTX) \
              -Xcompiler -Wall,-Wextra,-fPIC,-fvisibility=hidden,-fno-threadsafe-statics,-fno-exceptions,-fno-rtti
FLAGS_profiler_backend_backend := -DKVB_CUDA
CUDA_OBJ   := $(BUILD)/profiler/backend/backend_cuda.o
CUDA_SHOWN := $(NVCC) for $(addprefix sm_,$(CUDA_ARCHS))
LIBS       += $(CUDART) -ldl -lpthread -lrt
CUDA_TESTS := $(call judge_names,$(JUDGED_CUDA)) $(BUILD)/tests/test_profiler_cuda_device
endif

.PHONY: cuda-compiler check-cuda check-cuda-build
UNIT_BIN      += $(call judge_names,$(JUDGED_CPU) $(JUDGED_EMULATED) $(if $(CUDA_TESTS),$(JUDGED_CUDA))) \
                 $(BUILD)/tests/test_profiler_families_emulated
EMULATED      := $(BUILD)/tests/backend_cuda_emulated.o

$(BUILD)/profiler/backend/backend_cuda.o: profiler/backend/backend_cuda.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(SAY) NVCC $<
	$(Q)$(NVCC) $(NVCC_FLAGS) -c $< -o $@

# The cuda backend, compiled as C++ for the emulated device of tests/cuda; its names differ, so that a program can hold
# the real one too. If this machine has fused multiply-add, fmaf is one instruction: same bits in a fifth of the time.
FLAGS_EMULATED := $(if $(shell grep -sow -m 1 fma /proc/cpuinfo),-mfma) -x c++ -std=c++20 -Itests/cuda -I. \
    -Wall -Wextra -Wno-unknown-pragmas -ffp-contract=off \
    $(foreach b,cuda cuda_bf16x3 cuda_bf16,-Dbackend_$(b)=backend_$(b)_emulated)
$(EMULATED): profiler/backend/backend_cuda.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(SAY) CXX $@
	$(Q)$(CXX) $(FLAGS_EMULATED) $(WERROR) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@

# The judge of all backends: its parts are compiled once for backends that differ only in precision.
# judge_for KIND, FLAGS: sets JUDGE_KIND, the inputs of a program of that kind
define judge_for
JUDGE_$(1) := tests/unit/test_profiler_backend.c \
    $(patsubst tests/unit/%.c,$(BUILD)/tests/judge_$(1)/%.o,$(sort $(wildcard tests/unit/judge*.c)))
$(BUILD)/tests/judge_$(1)/%.o: tests/unit/%.c $(BUILD)/flags
	@mkdir -p $$(@D)
	$$(SAY) CC $$@
	$$(Q)$$(COMPILE) $(CHECKED) $(2) -c $$< -o $$@
endef
$(eval $(call judge_for,plain))
$(eval $(call judge_for,emulated,-DEMULATED))
$(eval $(call judge_for,tiles,-DEMULATED_TILES))

# Programs for the cpu backend's other precisions, for the emulated device and, if nvcc was found, for a real one.
# judge NAME, BACKEND, OBJECTS
judge = $(call add_program,tests/test_profiler_backend_$(1),$(JUDGE_$(if $(3),emulated,plain)) $(3) \
    $(call archives,profiler),$(CHECKED) -DJUDGE_OF=backend_$(2) $(if $(3),-DEMULATED), \
    $(CHECK_LIBS) $(if $(3),-lstdc++))
$(call add_program,tests/test_profiler_backend,$(JUDGE_plain) $(call archives,profiler),$(CHECKED),$(CHECK_LIBS))
$(foreach t,$(JUDGED_CPU) $(if $(CUDA_TESTS),$(JUDGED_CUDA)),$(call judge,$(t),$(t)))
$(foreach t,$(JUDGED_EMULATED),$(call judge,$(t),$(patsubst emulated%,cuda%_emulated,$(t)),$(EMULATED)))

# Tests of device memory, of errors that persist, and of a model compared with the reference.
CUDA_UNIT := tests/unit/test_profiler_cuda.c
$(call add_program,tests/test_profiler_families_emulated,tests/unit/test_profiler_families.c $(EMULATED) \
    $(call archives,profiler),$(CHECKED) -DEMULATED,$(CHECK_LIBS) -lstdc++)
$(call add_program,tests/test_profiler_cuda,$(CUDA_UNIT) $(EMULATED) $(call archives,profiler),$(CHECKED) -DEMULATED, \
    $(CHECK_LIBS) -lstdc++)
$(call add_program,tests/test_profiler_cuda_device,$(CUDA_UNIT) $(call archives,profiler),$(CHECKED),$(CHECK_LIBS))

check-cuda-build: $(CUDA_TESTS) $(HELPERS)

# On a machine with a GPU: compares operations and a model with the reference, and runs compute-sanitizer.
check-cuda: deps cuda-compiler
	@$(MAKE) $(PARALLEL) all check-cuda-build
	@BUILD=$(BUILD) tools/scripts/check-cuda.sh

cuda-compiler: deps
	@$(if $(or $(filter 1,$(CUDA)),$(findstring command,$(origin CUDA))),:,tools/scripts/get-cuda.sh --optional)

# The cpu backend on the tile unit (AMX), whose instructions tests/tiles emulates in C, so that it is tested on any
# machine with AVX-512 and bfloat16. A second program tests only its products.
JUDGED_TILES := $(if $(WITH_SANITISERS),tiles_bf16x3,tiles tiles_bf16x3 tiles_bf16)
TILES        := $(BUILD)/tests/packed_tiles_emulated.o
UNIT_BIN     += $(call judge_names,$(JUDGED_TILES)) $(BUILD)/tests/test_profiler_packed_tiles
$(TILES): $(BUILD)/tests/%_emulated.o: profiler/backend/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(SAY) CC $@
	$(Q)$(COMPILE) -DEMULATED_TILES -Itests/tiles -c $< -o $@
tiles_program = $(call add_program,tests/$(1),$(2) $(TILES) $(call archives,profiler), \
    $(CHECKED) -DEMULATED_TILES -Itests/tiles $(3),$(CHECK_LIBS))
$(foreach t,$(JUDGED_TILES),$(call tiles_program,test_profiler_backend_$(t),$(JUDGE_tiles), \
    -DJUDGE_OF=backend_$(patsubst tiles%,cpu%,$(t))))
$(call tiles_program,test_profiler_packed_tiles,tests/unit/test_profiler_packed.c)

# Must follow the last addition to UNIT_BIN: make expands prerequisites when it reads a rule.
check-build: $(UNIT_BIN)
