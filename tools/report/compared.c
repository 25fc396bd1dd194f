#include "tools/report/compared.h"

bool add_allocators(cJSON *report, const compared *with)
{
    cJSON *list = cJSON_AddArrayToObject(report, "allocators");
    bool good = list != NULL;
    for (size_t i = 0; good && i < with->n_allocators; i++) {
        cJSON *o = cJSON_CreateObject();
        good = o && cJSON_AddItemToArray(list, o) && cJSON_AddStringToObject(o, "label", with->allocators[i].label) &&
               cJSON_AddStringToObject(o, "identity", with->allocators[i].identity);
    }
    return good;
}
