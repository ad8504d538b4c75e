// Per-sample weight gradients of convolutions as matrix products straight from memory:
//
//   dW[kh, kw, c, f] = sum over y, x of  X[y sh - ph + kh dh, x sw - pw + kw dw, c] * D[y, x, f]
//
// For every tap (kh, kw) this is X^T D over the places (y, x) whose input lies in the plane. Nothing is copied, except
// - where a group has few channels: its rows of X, with zeros on both sides, so that one product covers the
//   kw C neighbouring numbers that a whole row of the kernel meets;
// - where the filters do not fill the vectors: its rows of D, filled up with zeros.

// Places of the output plane that are worked on at a time, so that X and D stay in the cache while channels,
// filters and taps pass.
struct Slab {
  int64_t y0, y1, x0, x1;
};
#ifndef SLAB
#define SLAB 256
#endif
constexpr int64_t SLAB_PLACES = SLAB;
INLINE int64_t slab_rows(const Convolution& s) { return max(1, min(s.Ho, SLAB_PLACES / s.Wo)); }
INLINE int64_t slab_columns(const Convolution& s) { return min(s.Wo, SLAB_PLACES); }

// Outputs from <= i < to, of those in [i0, i1), whose input i stride + offset lies in the plane.
struct Range {
  int64_t from, to;
};
INLINE Range inside(int64_t i0, int64_t i1, int64_t stride, int64_t offset, int64_t inputs) {
  const int64_t from = offset < 0 ? ceil_div(-offset, stride) : 0, last = inputs - 1 - offset;
  return {max(i0, from), last < 0 ? 0 : min(i1, last / stride + 1)};
}

// Rows of X that the slab meets.
INLINE Range input_rows(const Convolution& s, const Slab& t) {
  return {max(0, t.y0 * s.sh - s.ph), min(s.H, (t.y1 - 1) * s.sh - s.ph + (s.kh - 1) * s.dh + 1)};
}
INLINE int64_t input_columns(const Convolution& s, int64_t columns) {
  return (columns - 1) * s.sw + (s.kw - 1) * s.dw + 1;
}

// One row of a group is treated at once where it has fewer channels than a block of the micro-kernel.
INLINE bool joint(const Convolution& s) { return s.kw > 1 && s.dw == 1 && s.C / s.groups < MOST_2; }

// Copy the inputs of the slab, C channels from each place: rows of `input_columns` places, zero outside the plane.
NOINLINE void pack_inputs(const Convolution& s, const Slab& t, const float* x, int64_t C, float* to) {
  const Range rows = input_rows(s, t);
  const int64_t columns = input_columns(s, t.x1 - t.x0), first = t.x0 * s.sw - s.pw;
  const int64_t before = min(columns, max(0, -first)), after = max(before, min(columns, s.W - first));
  for (int64_t r = rows.from; r < rows.to; ++r, to += columns * C) {
    memset(to, 0, before * C * sizeof(float));
    if (after > before) {
      const float* from = x + (r * s.W + first + before) * s.C;
      if (C == s.C)
        memcpy(to + before * C, from, (after - before) * C * sizeof(float));
      else
        for (int64_t i = before; i < after; ++i, from += s.C)
          for (int64_t c = 0; c < C; ++c) to[i * C + c] = from[c];
    }
    memset(to + after * C, 0, (columns - after) * C * sizeof(float));
  }
}

// Copy the slab of D, F filters from each place, filled up with zeros to whole vectors.
NOINLINE void pack_outputs(const Convolution& s, const Slab& t, const float* d, int64_t F, float* to) {
  for (int64_t y = t.y0; y < t.y1; ++y)
    for (int64_t i = t.x0; i < t.x1; ++i, to += whole(F)) {
      const float* from = d + (y * s.Wo + i) * s.F;
      for (int64_t f = 0; f < F; ++f) to[f] = from[f];
      for (int64_t f = F; f < whole(F); ++f) to[f] = 0;
    }
}

INLINE int64_t direct_scratch(const Convolution& s) {
  const int64_t C = s.C / s.groups, F = s.F / s.groups, rows = slab_rows(s), columns = slab_columns(s);
  const int64_t x = joint(s) ? ((rows - 1) * s.sh + (s.kh - 1) * s.dh + 1) * input_columns(s, columns) * C : 0;
  return whole(x) + rows * columns * whole(F) + max(C, joint(s) ? s.kw * C : 0) * 2 * L;
}

// What one slab adds to filters f0 .. f1 of one group; x, d and out begin at the group's channels and filters.
static void direct_slab(const Convolution& s, const Slab& t, const float* x, const float* d, float* out, int64_t f0,
                        int64_t f1, bool add, float* scratch, Ahead& ahead) {
  const int64_t C = s.C / s.groups, F = s.F / s.groups;
  const Range rows_in = input_rows(s, t);
  const bool packed = joint(s);
  const int64_t size = packed ? s.kw * C : C, taps = packed ? 1 : s.kw;
  float *xs = scratch, *ds = xs + whole(packed ? (rows_in.to - rows_in.from) * input_columns(s, t.x1 - t.x0) * C : 0);
  int64_t x_place = s.C, x_row = s.W * s.C, d_place = s.F, d_row = s.Wo * s.F;
  if (packed) {
    pack_inputs(s, t, x, C, xs);
    x_place = C, x_row = input_columns(s, t.x1 - t.x0) * C;
  }
  d += t.y0 * d_row + t.x0 * d_place;
  if (F % L) {
    pack_outputs(s, t, d - t.y0 * d_row - t.x0 * d_place, F, ds);
    d = ds, d_place = whole(F), d_row = (t.x1 - t.x0) * d_place;
  }
  float* tail = ds + (t.y1 - t.y0) * (t.x1 - t.x0) * whole(F);

  for (int64_t f = f0; f < f1; f += 2 * L) {
    const int V = f1 - f > L ? 2 : 1;
    const Micro* micros = V == 2 ? MICRO_2.of : MICRO_1.of;
    const int64_t width = min(V * L, f1 - f);
    for (int64_t k = 0, m, left = ceil_div(size, V == 2 ? MOST_2 : MOST_1); left > 0; --left, k += m) {
      m = ceil_div(size - k, left);
      for (int64_t h = 0; h < s.kh; ++h) {
        const Range rows = inside(t.y0, t.y1, s.sh, h * s.dh - s.ph, s.H);
        for (int64_t w = 0; w < taps; ++w) {
          const Range places = packed ? Range{t.x0, t.x1} : inside(t.x0, t.x1, s.sw, w * s.dw - s.pw, s.W);
          float* o = out + ((h * s.kw + w) * C + k) * s.F + f;
          Places p = {0, 0, s.sh * x_row, s.sw * x_place, d_row, d_place};
          const float *a = x, *b = d;
          if (rows.from < rows.to && places.from < places.to) {
            const int64_t r = rows.from * s.sh + h * s.dh - s.ph;
            p.rows = rows.to - rows.from, p.places = places.to - places.from;
            a = packed ? xs + (r - rows_in.from) * x_row : x + r * x_row + (places.from * s.sw - s.pw + w * s.dw) * x_place;
            a += k;
            b = d + (rows.from - t.y0) * d_row + (places.from - t.x0) * d_place + f;
            if (p.a_row == p.places * p.a_place && p.b_row == p.places * p.b_place)
              p.places *= p.rows, p.rows = 1;
          } else if (add) {
            continue;
          }
          if (width == V * L) {
            micros[m](p, a, b, o, s.F, add, ahead);
            continue;
          }
          micros[m](p, a, b, tail, V * L, false, ahead);
          for (int64_t i = 0; i < m; ++i)
            for (int64_t j = 0; j < width; ++j)
              o[i * s.F + j] = add ? o[i * s.F + j] + tail[i * V * L + j] : tail[i * V * L + j];
        }
      }
    }
  }
}

// One sample, filters f0 .. f1 of every group.
static void direct(const Convolution& s, const float* x, const float* d, float* out, int64_t f0, int64_t f1,
                   float* scratch) {
  const int64_t C = s.C / s.groups, F = s.F / s.groups;
  const int64_t rows = slab_rows(s), columns = slab_columns(s);
  const int64_t calls = s.groups * ceil_div(f1 - f0, 2 * L) * ceil_div(joint(s) ? s.kw * C : C, MOST_2) * s.kh *
                        (joint(s) ? 1 : s.kw);
  for (int64_t y = 0; y < s.Ho; y += rows)
    for (int64_t i = 0; i < s.Wo; i += columns) {
      const Slab t = {y, min(s.Ho, y + rows), i, min(s.Wo, i + columns)};
      const int64_t x_bytes = (t.y1 - t.y0) * (t.x1 - t.x0) * s.sh * s.sw * s.C * 4;
      const int64_t d_bytes = (t.y1 - t.y0) * (t.x1 - t.x0) * s.F * 4;
      const char* next_x = (const char*)(x + ((t.y1 - 1) * s.sh * s.W + t.x1 * s.sw) * s.C);
      const char* next_d = (const char*)(d + ((t.y1 - 1) * s.Wo + t.x1) * s.F);
      Ahead ahead = {{next_x, next_d}, {next_x + x_bytes, next_d + d_bytes}, 0};
      ahead.lines = ceil_div((x_bytes + d_bytes) / 64, calls * (t.y1 - t.y0));
      for (int64_t g = 0; g < s.groups; ++g)
        direct_slab(s, t, x + g * C, d + g * F, out + g * F, f0, f1, y > 0 || i > 0, scratch, ahead);
    }
}
