// Settings and counters of the emulated device (cuda_runtime.h beside this file), for tests.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The order in which the threads of a block run between two barriers: correct code gives the same bits in every order.
// Unless they ascend, a warp runs ahead of the others until a barrier.
typedef enum emulator_order { THREADS_ASCEND, THREADS_DESCEND, THREADS_SHUFFLED } emulator_order;
void emulator_set_order(emulator_order order);

// Sets whether the stream runs only when the program waits for it. Then a missing wait, or a host array that is changed
// before the device has read it, shows as wrong numbers.
void emulator_set_lazy(bool lazy);

void emulator_set_memory(size_t bytes);    // of the device, including what is allocated already
size_t emulator_memory_taken(void);        // bytes of allocated device memory
void emulator_set_devices(int count);      // the result of cudaGetDeviceCount
void emulator_fail_launch(int64_t number); // which launch fails, 0 for the next; negative: none

#ifdef __cplusplus
}
#endif
