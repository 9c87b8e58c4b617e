// Small device memory that outlives a call.
#pragma once

#include <cstdint>

#if defined(MOSE_FAST_WITH_CUDA)

namespace mf {

// `count` zeroed tickets for kernels of the current stream of the current device, by which a
// kernel's blocks find out which of them is the last (atomicInc that wraps to 0): each kernel
// leaves them zero, as it found them, so that all kernels that run one after the other take the
// same. Those are the eager ones of a stream, or those of one stream in one capture: graphs may be
// replayed at the same time, also beside eager work. Allocated at the first call, captured or not,
// and never freed, since a graph may be replayed at any time: 16 KiB for each stream and capture.
uint32_t* tickets(int64_t count);

}  // namespace mf

#endif
