// Memory allocation for the program's own modules. If memory runs out, each function prints one line that says what was
// asked for and how much, and exits with status 1; none returns NULL. That is safe because outputs are written
// atomically and long runs can be resumed. runtime/ does not use this: a library must not end the engine that links it,
// so it returns KVB_MEMORY.
#pragma once
#include <stddef.h>

// Names what is called before the program ends, so that nothing half-written stays behind.
void need_before_stopping(void (*clean)(void));

// Allocates `count` objects of `size` bytes each, all zero (at least one byte). `what` names them in the plural, for
// the message ("token ids"). The caller frees the block.
void *need(size_t count, size_t size, const char *what);
// Resizes a block as realloc does; new bytes are not initialised.
void *need_more(void *old, size_t count, size_t size, const char *what);
// Makes room for one more object after n of them: the array doubles when n is a power of two.
void *need_one_more(void *old, size_t n, size_t size, const char *what);
// Returns a copy of count objects.
void *need_copy(const void *from, size_t count, size_t size, const char *what);
// Returns p, which a library allocated; NULL means that memory ran out.
void *needed(void *p, const char *what);
// Frees each argument, a block or NULL.
#define free_all(...) free_each((void *[]){__VA_ARGS__}, sizeof((void *[]){__VA_ARGS__}) / sizeof(void *))
void free_each(void *const *blocks, size_t n);
// Returns the text that printf would print; the caller frees it.
char *need_text(const char *format, ...) __attribute__((format(printf, 1, 2)));
