// How a launcher tells a process that it is one of several.
#include "tools/ranks.h"
#include <stdlib.h>

bool ranks_launched(void)
{
    static const char *const set_by_launchers[] = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"};
    for (size_t i = 0; i < sizeof set_by_launchers / sizeof *set_by_launchers; i++)
        if (getenv(set_by_launchers[i])) return true;
    return false;
}
