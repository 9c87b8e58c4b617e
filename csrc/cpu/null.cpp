// csrc/cpu/<stem>.cpp: the op in plain C++. It serves users without a GPU and is the oracle the
// kernel is tested against.
#include "api/null.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace mf::cpu {

void null(const NullParams& params, int threads) {
  constexpr int64_t kChunk = 1 << 20;  // below this, starting threads costs more than copying
  MF_CHECK(params.bytes >= 0, "bytes is ", params.bytes, "; wanted at least 0");
  const int64_t chunks = (params.bytes + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(threads) if (chunks > 1)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t begin = chunk * kChunk;
    const int64_t length = std::min(kChunk, params.bytes - begin);
    std::memcpy(static_cast<char*>(params.output) + begin, static_cast<const char*>(params.input) + begin, length);
  }
}

}  // namespace mf::cpu
