// The headers that every back end's decisions come from, as a plain program: g++ and nvcc (host
// side) must make the same.
//
//   host_decisions philox c0 c1 c2 c3 k0 k1        the four output words of one Philox call, hexadecimal
//   host_decisions exponential                     exact::exponential at i / 40000, i = -12000 ... 12000, as raw fp64
//   host_decisions views SEED COUNT HEIGHT WIDTH   CRC-32 of COUNT views of the SCR recipe, by check_views
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/augment_parameters.h"

namespace {

uint32_t crc32(uint32_t crc, const void* data, size_t bytes) {
  static const std::vector<uint32_t> table = [] {
    std::vector<uint32_t> values(256);
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) {
        value = value & 1 ? value >> 1 ^ 0xEDB88320u : value >> 1;
      }
      values[i] = value;
    }
    return values;
  }();
  crc = ~crc;
  for (size_t i = 0; i < bytes; ++i) {
    crc = table[(crc ^ static_cast<const uint8_t*>(data)[i]) & 255] ^ crc >> 8;
  }
  return ~crc;
}

uint32_t word(const char* text) { return static_cast<uint32_t>(std::strtoul(text, nullptr, 16)); }

// In sequences 0, 1, ... of up to a million views: all codes of a sequence, then all its factors.
uint32_t check_views(uint64_t seed, int64_t count, int32_t height, int32_t width) {
  constexpr int64_t kSequence = 1000000;
  const mf::AugmentRecipe recipe{0.5, 0.2, 0.2, 1.0, 0.8, 0.4, 0.4, 0.4, 0.1};
  uint32_t crc = 0;
  for (int64_t first = 0; first < count; first += kSequence) {
    std::vector<int32_t> codes;
    std::vector<float> factors;
    for (int64_t i = 0; i < kSequence && first + i < count; ++i) {
      const auto view = mf::draw_augment_parameters(recipe, seed, static_cast<uint64_t>(first / kSequence),
                                                    static_cast<uint32_t>(i), height, width);
      codes.insert(codes.end(), view.code, view.code + mf::AugmentParameters::kCodes);
      factors.insert(factors.end(), view.factor, view.factor + mf::AugmentParameters::kFactors);
    }
    crc = crc32(crc, codes.data(), codes.size() * sizeof(int32_t));
    crc = crc32(crc, factors.data(), factors.size() * sizeof(float));
  }
  return crc;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 8 && std::strcmp(argv[1], "philox") == 0) {
    const mf::PhiloxWords r =
        mf::philox4x32_10({{word(argv[2]), word(argv[3]), word(argv[4]), word(argv[5])}}, word(argv[6]), word(argv[7]));
    std::printf("%08" PRIx32 " %08" PRIx32 " %08" PRIx32 " %08" PRIx32 "\n", r.word[0], r.word[1], r.word[2],
                r.word[3]);
  } else if (argc == 2 && std::strcmp(argv[1], "exponential") == 0) {
    for (int i = -12000; i <= 12000; ++i) {
      const double value = mf::exact::exponential(i / 40000.0);
      std::fwrite(&value, sizeof(value), 1, stdout);
    }
  } else if (argc == 6 && std::strcmp(argv[1], "views") == 0) {
    std::printf("%08" PRIx32 "\n", check_views(std::strtoull(argv[2], nullptr, 10), std::atoll(argv[3]),
                                               std::atoi(argv[4]), std::atoi(argv[5])));
  } else {
    std::fprintf(
        stderr,
        "arguments do not fit; wanted philox, exponential or views with theirs, as the head of the source says\n");
    return 2;
  }
  return 0;
}
