// Small device memory that outlives a call.
#pragma once

#include <cstdint>

#if defined(MOSE_FAST_WITH_CUDA)

namespace mf {

// `count` zeroed tickets for kernels of the current stream of the current device, by which a
// kernel's blocks find out which of them is the last (atomicInc that wraps to 0): each kernel
// leaves them zero, as it found them, so that all kernels of a stream take the same. Allocated at a
// stream's first call, captured or not, and never freed. A captured graph keeps the tickets of the
// stream that it was captured on: two graphs captured on one stream must not be replayed at the
// same time, nor one beside eager work on that stream.
uint32_t* tickets(int64_t count);

}  // namespace mf

#endif
