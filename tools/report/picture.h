// Where a picture goes, and in what form: as SVG, which all drawing code writes, or as PDF or PNG, which librsvg and
// cairo make of that.
#pragma once
#include "formats/atomic_file.h"

typedef enum picture_form { PICTURE_SVG, PICTURE_PDF, PICTURE_PNG } picture_form;

enum { PICTURE_PNG_SCALE = 2 }; // pixels of a PNG for one of the SVG: sharp in print and on dense screens

enum { PICTURE_PATH_SIZE = 4096 };

typedef struct picture {
    FILE *svg; // draw here
    picture_form form;
    atomic_file file;
    char *text; // what was drawn, where the form is not SVG
    size_t size;
    char path[PICTURE_PATH_SIZE];
} picture;

// By the name's ending: .svg, .pdf, .png. KVB_ARGUMENT: another ending; KVB_UNSUPPORTED: PDF or PNG in a program that
// was built without librsvg, or on a machine without it. To be asked before the work that a picture shows.
kvb_status picture_check(const char *path, kvb_error *err);
// Begins a picture; what is opened must be closed. Errors: those of picture_check() and atomic_file_begin();
// KVB_MEMORY.
kvb_status picture_open(picture *p, const char *path, kvb_error *err);
// Closes it and leaves nothing. Does nothing on a zero struct or a closed one.
void picture_abandon(picture *p);
// Puts what was drawn in place, whole or not at all. Errors also: KVB_FORMAT where librsvg refuses it.
kvb_status picture_close(picture *p, kvb_error *err);
