# The Python package (python/): a wheel with the runtime library and the program, and the package's tests.

WHEEL_BUILD := $(BUILD)-wheel

.PHONY: wheel wheel-library check-wheel check-python check-engines

# A wheel brings the libraries that its binaries need; MPI and CUDA belong to a machine. Debian's shared HDF5 reads
# from S3 through curl, which wants LDAP, Kerberos and twenty more: the static one does without when the two objects of
# that driver are left out, to which nothing else in it refers.
HDF5_ARCHIVE := $(patsubst -L%,%/libhdf5.a,$(firstword $(shell pkg-config --libs-only-L hdf5 2>/dev/null)))
WHEEL_HDF5   := $(WHEEL_BUILD)/libhdf5-local.a
WHEEL_LIBS   := $(WHEEL_HDF5) -lsz -lz $(shell pkg-config --libs $(filter-out hdf5,$(PKGS)) 2>/dev/null)

# The rows of all metrics, for wheels: the one of the library alone brings no program to ask.
METRICS_JSON := $(BUILD)/metrics.json
$(METRICS_JSON): $(BUILD)/kvbudget
	$(Q)$< help metrics --json > $@.part && mv $@.part $@

wheel: deps-base $(WHEEL_HDF5) $(METRICS_JSON)
	@$(MAKE) $(PARALLEL) BUILD=$(WHEEL_BUILD) MPI=0 CUDA=0 PKG_LIBS='$(WHEEL_LIBS)' $(WHEEL_BUILD)/kvbudget \
	    $(WHEEL_BUILD)/libkvbudget.so
	@PYTHON='$(PYTHON)' tools/scripts/make-wheel.sh program $(WHEEL_BUILD) $(VERSION) $(BUILD)/wheel \
	    $(METRICS_JSON)

$(WHEEL_HDF5): $(HDF5_ARCHIVE)
	@mkdir -p $(@D)
	$(Q)cp $< $@ && $(AR) d $@ H5FDros3.o H5FDs3comms.o

# Without the program, so without GSL: Apache-2.0. The one symbol that is newer than glibc 2.14 is log(), of which
# glibc still has the older name.
wheel-library: deps-base $(METRICS_JSON)
	@$(MAKE) $(PARALLEL) BUILD=$(WHEEL_BUILD)-library CPPFLAGS='$(CPPFLAGS) -include python/old_glibc.h' \
	    $(WHEEL_BUILD)-library/libkvbudget.so
	@PYTHON='$(PYTHON)' tools/scripts/make-wheel.sh library $(WHEEL_BUILD)-library $(VERSION) $(BUILD)/wheel-library \
	    $(METRICS_JSON)

# Not part of CI: PyTorch is downloaded each time, unless KVBUDGET_VENV has it.
check-wheel: wheel wheel-library
	@PYTHON='$(PYTHON)' tools/scripts/check-wheel.sh $(BUILD)/wheel "$$(tools/scripts/get-model.sh)"

check-python: all
	@PYTHON='$(PYTHON)' tools/scripts/check-python.sh $(BUILD)

# Not part of CI: OpenVINO takes a minute to convert the model.
check-engines: all
	@tests/peer/engines.sh $(BUILD)
