// Memory for the program's own modules. There is nothing to be done about a lack of it: outputs are written atomically
// and long runs resume, so a run that stops here has lost nothing. Each function prints one line that says what was
// asked for and how much, and exits with status 1; none returns NULL. runtime/ uses none of this, since an engine that
// links it must not be ended by it: it returns KVB_MEMORY.
#pragma once
#include <stddef.h>

// count objects of `size` bytes each, all zero; one byte for none. `what` names them in the plural, for the message
// ("token ids"). The caller frees it.
void *need(size_t count, size_t size, const char *what);
// The same of a block that grows or shrinks, as realloc: what is new holds anything.
void *need_more(void *old, size_t count, size_t size, const char *what);
// A copy of count objects.
void *need_copy(const void *from, size_t count, size_t size, const char *what);
// p itself, which a library made; NULL is a lack of memory.
void *needed(void *p, const char *what);
// A text as printf would print it.
char *need_text(const char *format, ...) __attribute__((format(printf, 1, 2)));
