// Per-sample weight gradients of convolutions: which algorithm, and which thread computes what.

// The tile of Winograd's algorithm, 0 for none. Transforming the sums back is paid once per sample, so the
// larger tile pays from 9 tiles on, if most of their places lie in the plane, and the smaller one from 16 on
// (AMD Zen 5).
INLINE int tile_size(const Convolution& s) {
  const bool possible = s.kh == 3 && s.kw == 3 && s.sh == 1 && s.sw == 1 && s.dh == 1 && s.dw == 1 &&
                        s.groups == 1 && s.C % L == 0 && s.F % L == 0;
  const int64_t tiles = ceil_div(s.Ho, 4) * ceil_div(s.Wo, 4), places = s.Ho * s.Wo;
  if (!possible || places < 64) return 0;
  return tiles >= 9 && 16 * tiles * 5 <= places * 7 ? 4 : 2;
}

// The threads' share of a call. A unit is a sample or, where there are fewer samples than threads, a range of
// filters.
struct Shares {
  const Convolution& s;
  const float *x, *d;
  float* out;
  int64_t out_stride, filters, panels, parts;  // filters: of a group, or of all where groups share vectors
  int tile;
  bool past_cache;
  int failed;

  void operator()(int64_t thread, int64_t threads) {
    const int64_t units = s.b * parts, from = units * thread / threads, to = units * (thread + 1) / threads;
    if (from == to) return;
    const Scratch scratch(tile              ? Plan(s, tile).floats
                          : is_depthwise(s) ? depthwise_scratch(s)
                                            : direct_scratch(s));
    if (!scratch.data) {
      __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t u = from; u < to; ++u) {
      const int64_t n = u / parts, part = u % parts;
      const int64_t f0 = panels * part / parts * 2 * L;
      const int64_t f1 = min(filters, panels * (part + 1) / parts * 2 * L);
      const auto sample = tile == 4         ? winograd<4>
                          : tile == 2       ? winograd<2>
                          : is_depthwise(s) ? depthwise
                                            : direct;
      sample(s, x + n * s.H * s.W * s.C, d + n * s.Ho * s.Wo * s.F, out + n * out_stride, f0, f1,
             scratch.data, past_cache);
    }
#if LANES > 4
    if (past_cache) _mm_sfence();
#endif
  }
};

constexpr int64_t CACHE_BYTES = 1 << 20;

static int conv_weight(int threads, const float* x, const float* d, float* out, int64_t out_stride,
                       const Convolution& s, int use_winograd) {
  const int64_t filters = is_depthwise(s) ? s.F : s.F / s.groups, panels = ceil_div(filters, 2 * L);
  const int64_t parts = s.b < threads ? min(panels, ceil_div(threads, max(s.b, 1))) : 1;
  // Results larger than a cache are written past it, which saves reading their lines first.
  const int64_t size = s.kh * s.kw * s.C / s.groups * s.F;
  const bool aligned = (uintptr_t)out % 64 == 0 && out_stride % 16 == 0 && s.F / s.groups % L == 0;
  const bool past_cache = aligned && s.b * size * 4 > CACHE_BYTES;
  const int tile = use_winograd ? tile_size(s) : 0;
  Shares shares = {s, x, d, out, out_stride, filters, panels, parts, tile, past_cache, 0};
  parallel((int)min(threads, s.b * parts), shares);
  return shares.failed;
}
