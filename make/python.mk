# The Python package (python/): a wheel with the runtime library and the program, and the package's tests.

WHEEL_BUILD := $(BUILD)-wheel

.PHONY: wheel wheel-library check-wheel check-python check-engines

# A wheel contains the libraries that its binaries need; MPI and CUDA depend on the machine and are left out. Debian's
# shared HDF5 reads from S3 through curl, which needs LDAP, Kerberos and twenty more libraries. The static one does not,
# once the two objects of that driver are removed; nothing else in it refers to them.
HDF5_ARCHIVE := $(patsubst -L%,%/libhdf5.a,$(firstword $(shell pkg-config --libs-only-L hdf5 2>/dev/null)))
WHEEL_HDF5   := $(WHEEL_BUILD)/libhdf5-local.a
WHEEL_LIBS   := $(WHEEL_HDF5) -lsz -lz $(shell pkg-config --libs $(filter-out hdf5,$(PKGS)) 2>/dev/null)

# All metrics as JSON, for wheels: the wheel with only the library has no program that could list them.
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

# Without the program and therefore without GSL: all of it is Apache-2.0. The only symbol newer than glibc 2.14 is
# log(), and glibc still has its older version.
wheel-library: deps-base $(METRICS_JSON)
	@$(MAKE) $(PARALLEL) BUILD=$(WHEEL_BUILD)-library CPPFLAGS='$(CPPFLAGS) -include python/old_glibc.h' \
	    $(WHEEL_BUILD)-library/libkvbudget.so
	@PYTHON='$(PYTHON)' tools/scripts/make-wheel.sh library $(WHEEL_BUILD)-library $(VERSION) $(BUILD)/wheel-library \
	    $(METRICS_JSON)

# Not part of CI: downloads PyTorch each time, unless the environment KVBUDGET_VENV has it.
check-wheel: wheel wheel-library
	@PYTHON='$(PYTHON)' tools/scripts/check-wheel.sh $(BUILD)/wheel "$$(tools/scripts/get-model.sh)"

check-python: all
	@PYTHON='$(PYTHON)' tools/scripts/check-python.sh $(BUILD)

# Not part of CI: OpenVINO takes a minute to convert the model.
check-engines: all
	@tests/peer/engines.sh $(BUILD)
