# The Python package (python/): a wheel with the runtime library and the program, and the package's tests.

WHEEL_BUILD := $(BUILD)-wheel

.PHONY: wheel check-wheel check-python

# Without MPI and CUDA: a wheel brings the libraries that its binaries need, and those two belong to a machine.
wheel: deps-base
	@$(MAKE) $(PARALLEL) BUILD=$(WHEEL_BUILD) MPI=0 CUDA=0 $(WHEEL_BUILD)/kvbudget $(WHEEL_BUILD)/libkvbudget.so
	@PYTHON='$(PYTHON)' tools/scripts/make-wheel.sh $(WHEEL_BUILD) $(VERSION) $(BUILD)/wheel

# Not part of CI: PyTorch is downloaded each time, unless KVBUDGET_VENV has it.
check-wheel: wheel
	@PYTHON='$(PYTHON)' tools/scripts/check-wheel.sh $(BUILD)/wheel "$$(tools/scripts/get-model.sh)"

check-python: all
	@PYTHON='$(PYTHON)' tools/scripts/check-python.sh $(BUILD)
