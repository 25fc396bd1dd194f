// The log of a refinement, as a stop or a slip of the hand may leave it.
#include "evaluator/damage_log.h"
#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char KEY[DAMAGE_KEY] = "00000000000000000000000000000000000000000000000000000000000000ff";
    damage_log *log;
    kvb_error err;
    if (damage_log_open(&log, NULL, &err) != KVB_OK) return 0;
    damage_log_parse(log, (const char *)data, size, "fuzz.cells", &err);
    const damage_value *found = damage_log_find(log, KEY);
    if (found && !(isfinite(found->kl) && isfinite(found->flips) && isfinite(found->nll))) abort();
    damage_log_close(log, KVB_OK, NULL);
    return 0;
}
