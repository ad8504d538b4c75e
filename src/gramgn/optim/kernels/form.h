// One form of all kernels. Included once per form, with LANES (floats of a vector), REGISTERS (vector registers)
// and FORM (namespace) defined, and with the compiler's target set. Nothing here may call an inline function or
// template from outside this namespace: the linker keeps one copy of it, perhaps with the wrong instructions.

namespace gramgn {
namespace FORM {

constexpr int L = LANES;
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Bits __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE Vector load(const float* p) { return *(const Unaligned*)p; }
INLINE void store(float* p, Vector v) { *(Unaligned*)p = v; }
// Past the cache, to an aligned address.
#if LANES == 16
INLINE void stream(float* p, Vector v) { _mm512_stream_ps(p, (__m512)v); }
#elif LANES == 8
INLINE void stream(float* p, Vector v) { _mm256_stream_ps(p, (__m256)v); }
#else
INLINE void stream(float* p, Vector v) { store(p, v); }
#endif
INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a < b ? b : a; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t whole(int64_t floats) { return ceil_div(floats, L) * L; }  // rounded up to vectors

INLINE Vector magnitude(Vector v) { return (Vector)((Bits)v & 0x7fffffff); }

INLINE float sum_of_lanes(Vector v) {
  float sums[L];
  store(sums, v);
  for (int half = L / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

// Memory aligned to cache lines; data is null if there is none.
struct Scratch {
  float* data;
  explicit Scratch(int64_t floats) : data((float*)aligned_alloc(64, ceil_div(floats + 1, 16) * 64)) {}
  ~Scratch() { free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

// clang-format off: the order matters
#include "micro.h"
#include "direct.h"
#include "depthwise.h"
#include "winograd.h"
#include "conv.h"
#include "linalg.h"
// clang-format on

}  // namespace FORM
}  // namespace gramgn

#undef LANES
#undef REGISTERS
#undef FORM
