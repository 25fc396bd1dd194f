# install, install-runtime (the library alone) and uninstall, below DESTDIR.

# Of the packages that `make deps` installs, the runtime library needs only cJSON.
CMAKEDIR   := $(LIBDIR)/cmake/kvbudget
FILL_IN     = sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(patsubst $(PREFIX)/%,$${prefix}/%,$(LIBDIR))|' \
              -e 's|@VERSION@|$(VERSION)|' -e 's|@SONAME@|$(SONAME)|' \
              -e "s|@INCLUDE@|$$(realpath -m --relative-to='$(CMAKEDIR)' '$(PREFIX)/include')|"

# Recipes do not quote these folders: names that a shell would split or interpret are refused before anything is done.
.PHONY: folders
folders: export KVB_FOLDERS = $(DESTDIR)$(PREFIX)$(LIBDIR)
folders:
	@case "$$KVB_FOLDERS" in *[[:space:]\'\"\`\$$\;\&\|\<\>\(\)\*\?\[\#\\]*) \
	    echo "DESTDIR, PREFIX or LIBDIR holds a blank or a character that the shell reads otherwise: choose a folder" \
	        "without, and move the files there" >&2; exit 1;; esac

# The texts that `kvbudget tune` reads, and the ready tables.
TEXTS := $(wildcard calib-data/*.jsonl calib-data/plain/*.txt calib-data/eval/*.txt tables/*.safetensors \
         tables/*/*.safetensors)

install: folders all install-runtime
	install -d $(DESTDIR)$(PREFIX)/bin
	install -m 755 $(BUILD)/kvbudget $(DESTDIR)$(PREFIX)/bin/kvbudget
	for f in $(TEXTS); do install -D -m 644 $$f $(DESTDIR)$(PREFIX)/share/kvbudget/$$f || exit 1; done

install-runtime: folders $(BUILD)/libkvbudget.a $(BUILD)/libkvbudget.so
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(CMAKEDIR)
	install -m 644 runtime/kvbudget.h $(DESTDIR)$(PREFIX)/include/kvbudget.h
	install -m 644 $(BUILD)/libkvbudget.a $(DESTDIR)$(LIBDIR)/libkvbudget.a
	install -m 755 $(BUILD)/$(SONAME) $(DESTDIR)$(LIBDIR)/$(SONAME)
	ln -sf $(SONAME) $(DESTDIR)$(LIBDIR)/libkvbudget.so
	$(FILL_IN) runtime/kvbudget.pc.in > $(DESTDIR)$(LIBDIR)/pkgconfig/kvbudget.pc
	$(FILL_IN) runtime/kvbudgetConfig.cmake.in > $(DESTDIR)$(CMAKEDIR)/kvbudgetConfig.cmake
	$(FILL_IN) runtime/kvbudgetConfigVersion.cmake.in > $(DESTDIR)$(CMAKEDIR)/kvbudgetConfigVersion.cmake

# Keeps tables that `kvbudget tables --add` has put beside ours.
uninstall: folders
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/share/kvbudget/,$(TEXTS))
	rmdir $(addprefix $(DESTDIR)$(PREFIX)/share/kvbudget,/calib-data/plain /calib-data/eval /calib-data \
	    /tables/packed /tables/refit /tables/refit-packed /tables /) 2>/dev/null || true
	rm -f $(addprefix $(DESTDIR)$(PREFIX)/,bin/kvbudget include/kvbudget.h) \
	    $(addprefix $(DESTDIR)$(LIBDIR)/,libkvbudget.a $(SONAME) libkvbudget.so pkgconfig/kvbudget.pc) \
	    $(addprefix $(DESTDIR)$(CMAKEDIR)/,kvbudgetConfig.cmake kvbudgetConfigVersion.cmake)
