// What stands in the page besides its content: its style and its script, lines that the build makes of page.css and
// page.js.
#pragma once

extern const char *const page_css[]; // ends with NULL
extern const char *const page_js[];
