// Per-sample weight gradients of convolutions as matrix products straight from memory:
//
//   dW[kh, kw, c, f] = sum over y, x of  X[y sh - ph + kh dh, x sw - pw + kw dw, c] * D[y, x, f]
//
// For every tap (kh, kw) this is X^T D over the places (y, x) whose input lies in the plane. Nothing is copied, except
//
// - X, with zeros on both sides, where a group has few channels: one product then covers the kw C neighbouring
//   numbers that a whole row of the kernel meets;
// - D, with zeros, where its filters do not fill the vectors.
//
// For a single vector of filters, where the micro-kernel would load as often as it multiplies, its vectors are the D
// of up to three rows of the kernel instead; for less than half a vector of filters, they are channels of X.

// A part of the output plane, such that X and D of it stay in the cache while channels, filters and taps pass.
struct Slab {
  int64_t y0, y1, x0, x1;
};
constexpr int64_t SLAB_PLACES = 512, SLAB_BYTES = 256 * 1024;
INLINE int64_t slab_places(const Convolution& s) {
  return min(SLAB_PLACES, max(64, SLAB_BYTES / (4 * (s.C * s.sh * s.sw + s.F))));
}
INLINE int64_t slab_rows(const Convolution& s) { return max(1, min(s.Ho, slab_places(s) / s.Wo)); }
INLINE int64_t slab_columns(const Convolution& s) { return min(s.Wo, slab_places(s)); }

struct Range {
  int64_t from, to;
  int64_t size() const { return to > from ? to - from : 0; }
};

// Outputs i of those in `of` whose input i stride + offset lies in the plane.
INLINE Range inside(Range of, int64_t stride, int64_t offset, int64_t inputs) {
  const int64_t from = offset < 0 ? ceil_div(-offset, stride) : 0, last = inputs - 1 - offset;
  return {max(of.from, from), last < 0 ? 0 : min(of.to, last / stride + 1)};
}

// Rows of X that the slab meets, and the number of columns including those outside the plane.
INLINE Range input_rows(const Convolution& s, const Slab& t) {
  return {max(0, t.y0 * s.sh - s.ph), min(s.H, (t.y1 - 1) * s.sh - s.ph + (s.kh - 1) * s.dh + 1)};
}
INLINE int64_t input_columns(const Convolution& s, int64_t columns) {
  return (columns - 1) * s.sw + (s.kw - 1) * s.dw + 1;
}

// Floats between packed rows, so that they do not lie multiples of 4 KiB apart.
constexpr int64_t PACKED_GAP = 16;

// X or D: the numbers of the place (row, column) of the plane are at data + origin + row row_step + column
// step.
struct Plane {
  const float* data;
  int64_t origin, row_step, step;
  const float* at(int64_t row, int64_t column) const {
    return data + (origin + row * row_step + column * step);
  }
};

// Copy rows and columns of a plane of this width, `size` numbers of each place, filled up with zeros to
// `step`; columns outside the plane are zero. With `repeat`, every number is copied that many times; the
// first `skip` copies are left out.
NOINLINE Plane pack(const Plane& p, int64_t width, Range rows, Range columns, int64_t size, int64_t step, float* to,
                    int64_t repeat = 1, int64_t skip = 0) {
  const int64_t row_step = columns.size() * step + PACKED_GAP;
  const Plane packed = {to, -rows.from * row_step - columns.from * step, row_step, step};
  const int64_t left = min(max(columns.from, 0), columns.to), right = max(min(columns.to, width), left);
  for (int64_t r = rows.from; r < rows.to; ++r, to += row_step) {
    float* at = to + (left - columns.from) * step;
    memset(to, 0, (at - to) * sizeof(float));
    memset(at + (right - left) * step, 0, (columns.to - right) * step * sizeof(float));
    if (size == step && size == p.step && repeat == 1) {
      memcpy(at, p.at(r, left), (right - left) * step * sizeof(float));
      continue;
    }
    for (int64_t i = left; i < right; ++i, at += step) {
      const float* from = p.at(r, i);
      int64_t c = 0;
      if (repeat == 1)
        for (; c + L <= size; c += L) store(at + c, load(from + c));
      for (; c < size; ++c) at[c] = from[repeat == 1 ? c : (skip + c) / repeat];
      for (; c < step; ++c) at[c] = 0;
    }
  }
  return packed;
}

// Whether one product covers a row of the kernel.
INLINE bool joint(const Convolution& s) { return s.kw > 1 && s.dw == 1 && s.C / s.groups < most(2); }

// Numbers of packed D and X.
INLINE int64_t packed_outputs(const Convolution& s) {
  return (slab_rows(s) + 2 * (s.kh - 1) * s.dh) * (slab_columns(s) * 2 * L + PACKED_GAP);
}
INLINE int64_t packed_inputs(const Convolution& s) {
  const int64_t rows = (slab_rows(s) - 1) * s.sh + (s.kh - 1) * s.dh + 1;
  return joint(s) ? rows * (input_columns(s, slab_columns(s)) * (s.C / s.groups) + PACKED_GAP) : 0;
}
INLINE int64_t direct_scratch(const Convolution& s) { return MOST_SUMS * L + packed_outputs(s) + packed_inputs(s); }

// Sums [m, V vectors] to a block: `width` numbers of each vector or, in order, of all vectors.
NOINLINE void put(const float* sums, int64_t m, int V, bool each, int64_t width, const Block& block) {
  for (int64_t i = 0; i < m; ++i)
    for (int v = 0; v < V; ++v) {
      const float* from = sums + (i * V + v) * L;
      float* to = block.data + i * block.row + v * block.vector;
      const int64_t size = each ? width : min(L, width - v * L);
      for (int64_t j = 0; j < size; ++j) to[j] = block.add ? to[j] + from[j] : from[j];
    }
}

// The products of one or two vectors of filters with all channels of a group.
struct Panel {
  const Convolution& s;
  const Plane &X, D;
  const Range columns;
  const int64_t width;
  float *out, *sums;
  bool past_cache;
  Ahead& ahead;

  // Add rows y of D to kernel row h: V vectors of filters, or (by_rows) one vector of filters for V kernel
  // rows from h on, where vector v meets row y - v dh.
  void product(int64_t h, int V, bool by_rows, Range y, bool add, bool last) const {
    const int64_t C = s.C / s.groups, size = joint(s) ? s.kw * C : C, taps = joint(s) ? 1 : s.kw;
    for (int64_t w = 0; w < taps; ++w) {
      const int64_t offset = w * s.dw - s.pw;
      const Range x = joint(s) ? columns : inside(columns, s.sw, offset, s.W);
      const float* a = X.at(y.from * s.sh + h * s.dh - s.ph, x.from * s.sw + offset);
      const float* b = D.at(y.from, x.from);
      const int64_t b_vector = by_rows ? -s.dh * D.row_step : L;
      Places p = {y.size(), x.size(), s.sh * X.row_step, s.sw * X.step, D.row_step, D.step, b_vector};
      if (p.a_row == p.places * p.a_place && p.b_row == p.places * p.b_place) p.places *= p.rows, p.rows = 1;
      for (int64_t k = 0, m, left = ceil_div(size, most(V)); left > 0; --left, k += m) {
        m = ceil_div(size - k, left);
        ahead.lines = ceil_div(ahead.row_lines * m * V, ahead.row_sums);
        const Block block = {out + ((h * s.kw + w) * C + k) * s.F, s.F, by_rows ? s.kw * C * s.F : L, add,
                             past_cache && last};
        if (width % L == 0) {
          MICRO.of[V][m](p, a + k, b, block, ahead);
        } else {
          MICRO.of[V][m](p, a + k, b, {sums, V * L, L, false, false}, ahead);
          put(sums, m, V, by_rows, width, block);
        }
      }
    }
  }
};

// Whether vectors hold channels, because filters would fill less than half of one.
INLINE bool few_filters(const Convolution& s) { return s.F / s.groups <= L / 2 && s.C / s.groups % L == 0; }

// What one slab adds to all filters of one group, if there are few.
static void few_filters_slab(const Convolution& s, const Slab& t, const float* x, const float* d, float* out,
                             bool add, float* sums, Ahead& ahead) {
  const int64_t C = s.C / s.groups, F = s.F / s.groups;
  const Plane X = {x, 0, s.W * s.C, s.C}, D = {d, 0, s.Wo * s.F, s.F};
  for (int64_t h = 0; h < s.kh; ++h)
    for (int64_t w = 0; w < s.kw; ++w) {
      const int64_t row_offset = h * s.dh - s.ph, offset = w * s.dw - s.pw;
      const Range rows = inside({t.y0, t.y1}, s.sh, row_offset, s.H);
      const Range columns = inside({t.x0, t.x1}, s.sw, offset, s.W);
      const Places p = {rows.size(), columns.size(), D.row_step, D.step, s.sh * X.row_step, s.sw * X.step, L};
      const float* a = D.at(rows.from, columns.from);
      const float* b = X.at(rows.from * s.sh + row_offset, columns.from * s.sw + offset);
      for (int64_t c = 0, V; c < C; c += V * L) {
        V = min(MOST_VECTORS, (C - c) / L);
        ahead.lines = ceil_div(ahead.row_lines * V * L, s.kh * s.kw * s.C);
        MICRO.of[V][F](p, a, b + c, {sums, V * L, L, false, false}, ahead);
        float* to = out + ((h * s.kw + w) * C + c) * s.F;
        for (int64_t j = 0; j < V * L; ++j, to += s.F)
          for (int64_t f = 0; f < F; ++f) to[f] = add ? to[f] + sums[f * V * L + j] : sums[f * V * L + j];
      }
    }
}

// What one slab adds to filters f0 .. f1 of one group; x, d and out begin at the group's channels and
// filters.
static void direct_slab(const Convolution& s, const Slab& t, const float* x, const float* d, float* out,
                        int64_t f0, int64_t f1, bool add, bool past_cache, float* scratch, Ahead& ahead) {
  const Range ys = {t.y0, t.y1}, xs = {t.x0, t.x1};
  float *sums = scratch, *packed_d = sums + MOST_SUMS * L, *packed_x = packed_d + packed_outputs(s);
  Plane X = {x, 0, s.W * s.C, s.C};
  if (joint(s)) {
    const int64_t C = s.C / s.groups, first = t.x0 * s.sw - s.pw;
    X = pack(X, s.W, input_rows(s, t), {first, first + input_columns(s, xs.size())}, C, C, packed_x);
  }
  auto offset = [&](int64_t h) { return h * s.dh - s.ph; };
  for (int64_t f = f0; f < f1; f += 2 * L) {
    const int64_t width = min(2 * L, f1 - f);
    const bool by_rows = width <= L && s.kh > 1 && s.sh == 1;
    // Each row of X, by_rows, belongs to one slab that meets it: with wide padding, rows y0 .. y1 come too late.
    const int64_t late = max(0, s.ph - (s.kh - 1) * s.dh);
    const Range own = {t.y0 == 0 ? 0 : min(max(0, t.y0 - late), s.H),
                       t.y1 == s.Ho ? s.H : min(max(0, t.y1 - late), s.H)};
    Plane D = {d + f, 0, s.Wo * s.F, s.F};
    if (width % L || (by_rows && !joint(s))) {
      const Range met = {max(0, own.from - offset(s.kh - 1)), min(s.Ho, own.to - offset(0))};
      D = pack(D, s.Wo, by_rows ? met : ys, xs, width, whole(width), packed_d);
    }
    const Panel panel = {s, X, D, xs, width, out + f, sums, past_cache, ahead};
    if (!by_rows) {
      for (int64_t h = 0; h < s.kh; ++h)
        panel.product(h, width > L ? 2 : 1, false, inside(ys, s.sh, offset(h), s.H), add, true);
      continue;
    }
    for (int64_t h = 0, n; h < s.kh; h += n) {
      n = ceil_div(s.kh - h, ceil_div(s.kh - h, MOST_VECTORS));
      // Rows of X that meet all n kernel rows; then those before and behind, kernel row by kernel row.
      Range all = {max(own.from, offset(h + n - 1)), min(own.to, s.Ho + offset(h))};
      if (all.size() == 0) all = {own.to, own.to};
      panel.product(h, n, true, {all.from - offset(h), all.to - offset(h)}, add, false);
      for (int64_t i = h; i < h + n; ++i) {
        const Range before = {max(own.from, offset(i)), min(all.from, s.Ho + offset(i))};
        const Range behind = {max(all.to, offset(i)), min(own.to, s.Ho + offset(i))};
        if (before.size())
          panel.product(i, 1, false, {before.from - offset(i), before.to - offset(i)}, true, false);
        if (behind.size())
          panel.product(i, 1, false, {behind.from - offset(i), behind.to - offset(i)}, true, false);
      }
    }
  }
}

// X and D of the next slab or, at the end, of the next sample; requested by calls of this number of sums.
INLINE Ahead next_slab(const Convolution& s, const Slab& t, const float* x, const float* d, int64_t sums) {
  const int64_t rows = t.y1 - t.y0, places = rows * (t.x1 - t.x0);
  const int64_t x_bytes = places * s.sh * s.sw * s.C * 4, d_bytes = places * s.F * 4;
  const char* next_x = (const char*)(x + ((t.y1 - 1) * s.sh * s.W + t.x1 * s.sw) * s.C);
  const char* next_d = (const char*)(d + ((t.y1 - 1) * s.Wo + t.x1) * s.F);
  return {{next_x, next_d}, {next_x + x_bytes, next_d + d_bytes}, 0, (x_bytes + d_bytes) / 64 / rows, sums};
}

// One sample, filters f0 .. f1 of every group.
static void direct(const Convolution& s, const float* x, const float* d, float* out, int64_t f0, int64_t f1,
                   float* scratch, bool past_cache) {
  const int64_t C = s.C / s.groups, F = s.F / s.groups;
  const int64_t rows = slab_rows(s), columns = slab_columns(s);
  const int64_t sums = s.kh * s.kw * s.C * ceil_div(f1 - f0, L);
  for (int64_t y = 0; y < s.Ho; y += rows)
    for (int64_t i = 0; i < s.Wo; i += columns) {
      const Slab t = {y, min(s.Ho, y + rows), i, min(s.Wo, i + columns)};
      Ahead ahead = next_slab(s, t, x, d, sums);
      const bool add = y > 0 || i > 0;
      for (int64_t g = 0; g < s.groups; ++g)
        if (few_filters(s))
          few_filters_slab(s, t, x + g * C, d + g * F, out + g * F, add, scratch, ahead);
        else
          direct_slab(s, t, x + g * C, d + g * F, out + g * F, f0, f1, add,
                      past_cache && t.y1 == s.Ho && t.x1 == s.Wo, scratch, ahead);
    }
}
