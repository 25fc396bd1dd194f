// For the wheel of the library alone, so that it loads with glibc 2.14 and later: log() of before 2.29 is the same
// function, but that it also sets errno.
#include <features.h>
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver log, log@GLIBC_2.2.5");
#endif
