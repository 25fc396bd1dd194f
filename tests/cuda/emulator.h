// What a test may ask of the emulated device (cuda_runtime.h beside this file).
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The order in which the threads of a block run between two barriers: right code gives the same bits in each. Unless
// they ascend, a warp runs as far ahead of the others as barriers let it.
typedef enum emulator_order { THREADS_ASCEND, THREADS_DESCEND, THREADS_SHUFFLED } emulator_order;
void emulator_set_order(emulator_order order);

// Whether the stream runs only when somebody waits for it. A missing wait, or a host array that is changed before the
// device has read it, shows as wrong numbers then.
void emulator_set_lazy(bool lazy);

void emulator_set_memory(size_t bytes);    // of the device; what is taken already counts
size_t emulator_memory_taken(void);        // bytes of device memory
void emulator_set_devices(int count);      // what cudaGetDeviceCount finds
void emulator_fail_launch(int64_t number); // the launch that fails, counted from now; negative: none

#ifdef __cplusplus
}
#endif
