#include "tools/report/compared.h"
#include <stdio.h>

void add_allocators(results *to, const compared *with)
{
    cJSON *list = cJSON_AddArrayToObject(to->settings, "allocators");
    for (size_t i = 0; i < with->n_allocators; i++) {
        const allocator *a = &with->allocators[i];
        char sha256[65] = "";
        if (a->kind == ALLOCATOR_TABLE && sscanf(a->identity, "table %64s", sha256) == 1)
            results_input(to, "table", a->label, sha256);
        cJSON *o = cJSON_CreateObject();
        cJSON_AddItemToArray(list, o);
        cJSON_AddStringToObject(o, "label", a->label);
        cJSON_AddStringToObject(o, "identity", a->identity);
    }
}
