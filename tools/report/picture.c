#include "tools/report/picture.h"
#include "runtime/fail.h"
#include <stdlib.h>
#include <string.h>

#ifdef KVB_RSVG
// librsvg brings some thirty libraries along, which every start of the program would otherwise load; so it is loaded
// when a picture needs it.
#include <cairo-pdf.h>
#include <dlfcn.h>
#include <librsvg/rsvg.h>

// Every function that is used, as its header declares it.
#define FUNCTIONS(X)                            \
    X(rsvg_handle_new_from_data)                \
    X(rsvg_handle_get_intrinsic_size_in_pixels) \
    X(rsvg_handle_render_document)              \
    X(g_object_unref)                           \
    X(cairo_create)                             \
    X(cairo_destroy)                            \
    X(cairo_scale)                              \
    X(cairo_status)                             \
    X(cairo_status_to_string)                   \
    X(cairo_pdf_surface_create_for_stream)      \
    X(cairo_image_surface_create)               \
    X(cairo_surface_write_to_png_stream)        \
    X(cairo_surface_finish)                     \
    X(cairo_surface_status)                     \
    X(cairo_surface_destroy)

typedef struct painter {
#define FIELD(name) __typeof__(name) *name;
    FUNCTIONS(FIELD)
#undef FIELD
} painter;

// The library stays loaded: its own libraries cannot be unloaded.
static kvb_status load_painter(painter *out, const char *path, kvb_error *err)
{
    void *library = dlopen("librsvg-2.so.2", RTLD_NOW | RTLD_GLOBAL); // finds what it needs itself: cairo, GObject
    bool found = library != NULL;
#define LOAD(name)                                           \
    {                                                        \
        void *symbol = found ? dlsym(library, #name) : NULL; \
        found = symbol != NULL;                              \
        memcpy(&out->name, &symbol, sizeof symbol);          \
    }
    FUNCTIONS(LOAD)
#undef LOAD
    if (found) return KVB_OK;
    return kvb_fail(
        err, KVB_UNSUPPORTED,
        "%s: PDF and PNG need librsvg (Debian: apt-get install librsvg2-2); it could not be loaded; or write "
        "an .svg",
        path);
}

static cairo_status_t write_to_file(void *file, const unsigned char *data, unsigned size)
{
    return fwrite(data, 1, size, file) == size ? CAIRO_STATUS_SUCCESS : CAIRO_STATUS_WRITE_ERROR;
}

// Draws the SVG on a surface of its size in the file. Returns what cairo says.
static cairo_status_t paint(const painter *with, RsvgHandle *svg, picture *p, GError **refusal)
{
    double width = 0, height = 0, scale = p->form == PICTURE_PNG ? PICTURE_PNG_SCALE : 1;
    with->rsvg_handle_get_intrinsic_size_in_pixels(svg, &width, &height);
    const RsvgRectangle all = {0, 0, width, height};
    cairo_surface_t *surface =
        p->form == PICTURE_PDF
            ? with->cairo_pdf_surface_create_for_stream(write_to_file, p->file.stream, width, height)
            : with->cairo_image_surface_create(CAIRO_FORMAT_ARGB32, (int)(scale * width), (int)(scale * height));
    cairo_t *to = with->cairo_create(surface);
    with->cairo_scale(to, scale, scale);
    with->rsvg_handle_render_document(svg, to, &all, refusal);
    cairo_status_t status = with->cairo_status(to);
    with->cairo_destroy(to);
    if (status == CAIRO_STATUS_SUCCESS && p->form == PICTURE_PNG)
        status = with->cairo_surface_write_to_png_stream(surface, write_to_file, p->file.stream);
    with->cairo_surface_finish(surface);
    if (status == CAIRO_STATUS_SUCCESS) status = with->cairo_surface_status(surface);
    with->cairo_surface_destroy(surface);
    return status;
}

static kvb_status convert(picture *p, kvb_error *err)
{
    painter with;
    kvb_status status = load_painter(&with, p->path, err);
    if (status != KVB_OK) return status;
    GError *refusal = NULL;
    RsvgHandle *svg = with.rsvg_handle_new_from_data((const guint8 *)p->text, p->size, &refusal);
    cairo_status_t painted = svg ? paint(&with, svg, p, &refusal) : CAIRO_STATUS_SUCCESS;
    if (svg) with.g_object_unref(svg);
    if (refusal) return kvb_fail(err, KVB_FORMAT, "%s: librsvg: %s", p->path, refusal->message);
    if (painted == CAIRO_STATUS_SUCCESS) return KVB_OK;
    return kvb_fail(err, painted == CAIRO_STATUS_NO_MEMORY ? KVB_MEMORY : KVB_IO, "%s: cairo: %s", p->path,
                    with.cairo_status_to_string(painted));
}

static kvb_status can_convert(const char *path, kvb_error *err)
{
    painter with;
    return load_painter(&with, path, err);
}
#else
static kvb_status can_convert(const char *path, kvb_error *err)
{
    return kvb_fail(err, KVB_UNSUPPORTED,
                    "%s: this program was built without librsvg, so it cannot write PDF and PNG; write an .svg", path);
}

static kvb_status convert(picture *p, kvb_error *err)
{
    return can_convert(p->path, err);
}
#endif

static bool find_form(const char *path, picture_form *out)
{
    static const char *const endings[] = {[PICTURE_SVG] = ".svg", [PICTURE_PDF] = ".pdf", [PICTURE_PNG] = ".png"};
    size_t length = strlen(path);
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        size_t n = strlen(endings[i]);
        *out = (picture_form)i;
        if (length > n && strcmp(path + length - n, endings[i]) == 0) return true;
    }
    return false;
}

kvb_status picture_check(const char *path, kvb_error *err)
{
    picture_form form;
    if (!find_form(path, &form))
        return kvb_fail(err, KVB_ARGUMENT, "%s: expected a name that ends in .svg, .pdf or .png", path);
    return form == PICTURE_SVG ? KVB_OK : can_convert(path, err);
}

kvb_status picture_open(picture *p, const char *path, kvb_error *err)
{
    *p = (picture){0};
    if ((size_t)snprintf(p->path, sizeof p->path, "%s", path) >= sizeof p->path)
        return kvb_fail(err, KVB_ARGUMENT, "%s: the path is too long", path);
    kvb_status status = picture_check(path, err);
    (void)find_form(path, &p->form); // it has one of the three
    if (status == KVB_OK) status = atomic_file_begin(&p->file, path, err);
    if (status != KVB_OK) return status;
    p->svg = p->form == PICTURE_SVG ? p->file.stream : open_memstream(&p->text, &p->size);
    if (p->svg) return KVB_OK;
    atomic_file_abandon(&p->file);
    return kvb_fail(err, KVB_MEMORY, "%s: not enough memory", path);
}

void picture_abandon(picture *p)
{
    if (p->svg && p->form != PICTURE_SVG) (void)fclose(p->svg); // memory
    free(p->text);
    atomic_file_abandon(&p->file);
    *p = (picture){0};
}

kvb_status picture_close(picture *p, kvb_error *err)
{
    kvb_status status = KVB_OK;
    if (p->form != PICTURE_SVG) {
        bool whole = fclose(p->svg) == 0 && p->text;
        p->svg = NULL;
        status = whole ? convert(p, err) : kvb_fail(err, KVB_MEMORY, "%s: not enough memory", p->path);
    }
    if (status == KVB_OK) status = atomic_file_commit(&p->file, err);
    p->svg = NULL;
    free(p->text);
    p->text = NULL;
    atomic_file_abandon(&p->file); // nothing, where it was put in place
    return status;
}
