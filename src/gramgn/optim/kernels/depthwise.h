// Depthwise convolutions, m = F / C filters of each channel:
//
//   dW[kh, kw, f] = sum over y, x of  X[y sh - ph + kh dh, x sw - pw + kw dw, f / m] * D[y, x, f]
//
// Vectors hold filters; X is copied, with zeros on both sides, two vectors of filters at a time.
constexpr int DEPTH_WIDTH = 2 * L, MOST_TAPS = (REGISTERS - 3) / 2;

// out[t] (+)= sum over rows and places of the vectors A[r, i + t dilation] * B[r, i] for taps t < T.
template <int T>
NOINLINE void depthwise_taps(const Places& p, int64_t a_tap, const float* a, const float* b, const Block& out) {
  Vector sum[T][2] = {};
  for (int64_t r = 0; r < p.rows; ++r) {
    const float *ai = a + r * p.a_row, *bi = b + r * p.b_row;
    for (int64_t i = 0; i < p.places; ++i) {
      const Vector b0 = load(bi), b1 = load(bi + L);
      UNROLL
      for (int t = 0; t < T; ++t) {
        sum[t][0] += load(ai + t * a_tap) * b0;
        sum[t][1] += load(ai + t * a_tap + L) * b1;
      }
      ai += p.a_place;
      bi += p.b_place;
    }
  }
  UNROLL
  for (int t = 0; t < T; ++t) {
    out.put(t, 0, sum[t][0]);
    out.put(t, 1, sum[t][1]);
  }
}

struct DepthwiseTable {
  void (*of[MOST_TAPS + 1])(const Places&, int64_t, const float*, const float*, const Block&);
  template <int T>
  constexpr void fill() {
    of[T] = depthwise_taps<T>;
    if constexpr (T > 1) fill<T - 1>();
  }
  constexpr DepthwiseTable() : of() { fill<MOST_TAPS>(); }
};
constexpr DepthwiseTable DEPTHWISE;

INLINE bool is_depthwise(const Convolution& s) { return s.groups > 1 && s.groups == s.C; }

INLINE int64_t depthwise_scratch(const Convolution& s) {
  const int64_t rows = (slab_rows(s) - 1) * s.sh + (s.kh - 1) * s.dh + 1;
  return rows * (input_columns(s, slab_columns(s)) * DEPTH_WIDTH + PACKED_GAP) +
         slab_rows(s) * (slab_columns(s) * DEPTH_WIDTH + PACKED_GAP) + MOST_TAPS * DEPTH_WIDTH;
}

// Read a range of memory so that it is in the cache.
NOINLINE void touch(const float* from, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) (void)*(volatile const float*)(from + i);
}

// One sample, filters f0 .. f1.
static void depthwise(const Convolution& s, const float* x, const float* d, float* out, int64_t f0,
                      int64_t f1, float* scratch, bool) {
  const int64_t m = s.F / s.C, rows = slab_rows(s), columns = slab_columns(s);
  float *sums = scratch, *packed_d = sums + MOST_TAPS * DEPTH_WIDTH;
  float* packed_x = packed_d + rows * (columns * DEPTH_WIDTH + PACKED_GAP);
  for (int64_t y = 0; y < s.Ho; y += rows)
    for (int64_t i = 0; i < s.Wo; i += columns) {
      const Slab t = {y, min(s.Ho, y + rows), i, min(s.Wo, i + columns)};
      const int64_t first = t.x0 * s.sw - s.pw;
      const Range ys = {t.y0, t.y1}, xs = {t.x0, t.x1}, met = input_rows(s, t);
      const Range columns_in = {first, first + input_columns(s, xs.size())};
      const Range in_plane = {max(0, columns_in.from), min(s.W, columns_in.to)};
      // Reading in order what the panels will read in pieces lets the hardware's prefetchers follow.
      for (int64_t r = met.from; r < met.to; ++r) touch(x + (r * s.W + in_plane.from) * s.C, in_plane.size() * s.C);
      touch(d + (t.y0 * s.Wo + t.x0) * s.F, ((t.y1 - t.y0 - 1) * s.Wo + t.x1 - t.x0) * s.F);
      for (int64_t f = f0; f < f1; f += DEPTH_WIDTH) {
        const int64_t width = min(DEPTH_WIDTH, f1 - f);
        const bool add = y > 0 || i > 0, whole_panel = width == DEPTH_WIDTH;
        const Plane X = pack({x + f / m, 0, s.W * s.C, s.C}, s.W, met, columns_in, width, DEPTH_WIDTH,
                             packed_x, m, f % m);
        Plane D = {d + f, 0, s.Wo * s.F, s.F};
        if (!whole_panel) D = pack(D, s.Wo, ys, xs, width, DEPTH_WIDTH, packed_d);
        for (int64_t h = 0; h < s.kh; ++h) {
          const Range in = inside(ys, s.sh, h * s.dh - s.ph, s.H);
          const Places p = {in.size(), xs.size(), s.sh * X.row_step, s.sw * X.step, D.row_step, D.step, L};
          for (int64_t w = 0, n, left = ceil_div(s.kw, MOST_TAPS); left > 0; --left, w += n) {
            n = ceil_div(s.kw - w, left);
            const float* a = X.at(in.from * s.sh + h * s.dh - s.ph, first + w * s.dw);
            const float* b = D.at(in.from, t.x0);
            const Block block = {out + (h * s.kw + w) * s.F + f, s.F, L, add, false};
            if (whole_panel) {
              DEPTHWISE.of[n](p, s.dw * X.step, a, b, block);
            } else {
              DEPTHWISE.of[n](p, s.dw * X.step, a, b, {sums, DEPTH_WIDTH, L, false, false});
              put(sums, n, 2, false, width, block);
            }
          }
        }
      }
    }
}
