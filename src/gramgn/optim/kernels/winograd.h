// Weight gradients of 3x3 convolutions of stride 1 by Winograd's algorithm F(3x3, R x R).
//
// A tile of R x R outputs meets (R + 2) x (R + 2) inputs. In one dimension its share of the gradient,
// w[k] = sum over i < R of d[i] x[i + k], is W [(Td d) * (Tx x)] with R + 2 products instead of 3 R; in two
// dimensions Tx and Td are applied to rows and columns. The products are summed over all tiles (a matrix
// product for each of the (R + 2)^2 points), and only the sums are transformed back. The polynomials behind
// it are evaluated at 0, +-1 and infinity (R = 2) or 0, +-3/4, +-3/2 and infinity (R = 4; exact in binary,
// half the error of 0, +-1, +-2).
//
// For R = 4, the sums contain products of numbers of a tile that never meet in the gradient; they cancel when the
// sums are transformed back, and digits are lost where one of them is much larger than the gradient. All of them
// occur at the first point after 0 of a direction. The ratio of the magnitudes there to those of the gradient, each
// summed over the channels of a filter, is below 10 for activations and gradients of any size, mean and sparsity that
// are spread over the plane, and the relative error is at most about 8e-8 times this ratio. Filters for which it
// exceeds MOST_CANCELLED, or whose sums are not finite, are computed directly instead. For R = 2 every product in the
// sums occurs in the gradient.
template <int R>
struct Winograd;

template <>
struct Winograd<2> {
  static constexpr bool cancels = false;
  INLINE void inputs(Vector (&t)[4], const Vector (&x)[4]) {
    t[0] = x[2] - x[0];
    t[1] = x[2] + x[1];
    t[2] = x[2] - x[1];
    t[3] = x[3] - x[1];
  }
  INLINE void outputs(Vector (&t)[4], const Vector (&d)[2]) {
    t[0] = d[0];
    t[1] = d[0] + d[1];
    t[2] = d[0] - d[1];
    t[3] = d[1];
  }
  INLINE void weights(Vector (&w)[3], const Vector (&t)[4]) {
    const Vector half_sum = 0.5f * (t[1] + t[2]);
    w[0] = half_sum - t[0];
    w[1] = 0.5f * (t[1] - t[2]);
    w[2] = half_sum + t[3];
  }
};

template <>
struct Winograd<4> {
  static constexpr bool cancels = true;
  static constexpr float a = 0.75f, b = 1.5f, A = a * a, B = b * b;
  // One over the product of the differences to the other points.
  static constexpr float W0 = 1 / (A * B), Wa = 1 / (2 * A * (A - B)), Wb = 1 / (2 * B * (B - A));
  INLINE void inputs(Vector (&t)[6], const Vector (&x)[6]) {
    const Vector even_a = x[4] - B * x[2], odd_a = x[3] - B * x[1];
    const Vector even_b = x[4] - A * x[2], odd_b = x[3] - A * x[1];
    t[0] = x[4] - (A + B) * x[2] + A * B * x[0];
    t[1] = even_a + a * odd_a;
    t[2] = even_a - a * odd_a;
    t[3] = even_b + b * odd_b;
    t[4] = even_b - b * odd_b;
    t[5] = x[5] - (A + B) * x[3] + A * B * x[1];
  }
  INLINE void outputs(Vector (&t)[6], const Vector (&d)[4]) {
    const Vector even_a = d[0] + A * d[2], odd_a = d[1] + A * d[3];
    const Vector even_b = d[0] + B * d[2], odd_b = d[1] + B * d[3];
    t[0] = d[0];
    t[1] = even_a + a * odd_a;
    t[2] = even_a - a * odd_a;
    t[3] = even_b + b * odd_b;
    t[4] = even_b - b * odd_b;
    t[5] = d[3];
  }
  INLINE void weights(Vector (&w)[3], const Vector (&t)[6]) {
    const Vector even_a = t[1] + t[2], odd_a = t[1] - t[2], even_b = t[3] + t[4], odd_b = t[3] - t[4];
    w[0] = W0 * t[0] + (Wa * even_a + Wb * even_b);
    w[1] = a * Wa * odd_a + b * Wb * odd_b;
    w[2] = t[5] + (A * Wa * even_a + B * Wb * even_b);
  }
};

// Transformed inputs of one row of tiles and one vector of channels: point k of tile j at to + k point_step +
// j C.
template <int R>
NOINLINE void transform_inputs(const Convolution& s, const float* x, int64_t tile_row, int64_t tiles, float* to,
                               int64_t point_step, float* columns) {
  constexpr int N = R + 2;
  const Vector zeros = {};
  const float* row[N];
  int64_t step[N];
  for (int i = 0; i < N; ++i) {
    const int64_t y = tile_row * R - s.ph + i;
    const bool in = y >= 0 && y < s.H;
    row[i] = in ? x + y * s.W * s.C : (const float*)&zeros;
    step[i] = in ? s.C : 0;
  }
  // Down every column, then along the rows of every tile.
  const int64_t width = tiles * R + 2;
  for (int64_t i = 0; i < width; ++i) {
    const int64_t c = i - s.pw;
    Vector v[N], t[N] = {};
    if (c >= 0 && c < s.W) {
      UNROLL
      for (int n = 0; n < N; ++n) v[n] = load(row[n] + c * step[n]);
      Winograd<R>::inputs(t, v);
    }
    UNROLL
    for (int n = 0; n < N; ++n) store(columns + (i * N + n) * L, t[n]);
  }
  for (int64_t j = 0; j < tiles; ++j, to += s.C) {
    UNROLL
    for (int n = 0; n < N; ++n) {
      Vector v[N], t[N];
      UNROLL
      for (int i = 0; i < N; ++i) v[i] = load(columns + ((j * R + i) * N + n) * L);
      Winograd<R>::inputs(t, v);
      UNROLL
      for (int i = 0; i < N; ++i) store(to + (n * N + i) * point_step, t[i]);
    }
  }
}

// Likewise for one vector of filters of D.
template <int R>
NOINLINE void transform_outputs(const Convolution& s, const float* d, int64_t tile_row, int64_t tiles, float* to,
                                int64_t point_step) {
  constexpr int N = R + 2;
  for (int64_t j = 0; j < tiles; ++j, to += s.F) {
    Vector columns[R][N];
    const int64_t rows = s.Ho - tile_row * R, width = s.Wo - j * R;
    const float* tile = d + (tile_row * R * s.Wo + j * R) * s.F;
    UNROLL
    for (int i = 0; i < R; ++i) {
      Vector v[R] = {};
      UNROLL
      for (int n = 0; n < R; ++n)
        if (n < rows && i < width) v[n] = load(tile + (n * s.Wo + i) * s.F);
      Winograd<R>::outputs(columns[i], v);
    }
    UNROLL
    for (int n = 0; n < N; ++n) {
      Vector v[R], t[N];
      UNROLL
      for (int i = 0; i < R; ++i) v[i] = columns[i][n];
      Winograd<R>::outputs(t, v);
      UNROLL
      for (int i = 0; i < N; ++i) store(to + (n * N + i) * point_step, t[i]);
    }
  }
}

// Sums of products, [point][channels, filters], to the gradient of these channels. If sums may cancel, add the
// magnitudes of those that would to `before`, and the gradient's to `after`.
template <int R>
NOINLINE void transform_weights(const Convolution& s, const float* sums, int64_t point_step, int64_t channels,
                                int64_t filters, float* out, bool past_cache, float* before, float* after) {
  constexpr int N = R + 2;
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t f = 0; f < filters; f += L, sums += L) {
      Vector half[3][N];
      Vector total_before = {}, total_after = {};
      UNROLL
      for (int i = 0; i < N; ++i) {
        Vector t[N], w[3];
        UNROLL
        for (int n = 0; n < N; ++n) t[n] = load(sums + (n * N + i) * point_step);
        if (Winograd<R>::cancels) {
          total_before += magnitude(t[1]);
          if (i == 1) total_before += magnitude(t[0]) + magnitude(t[N - 1]);
        }
        Winograd<R>::weights(w, t);
        UNROLL
        for (int h = 0; h < 3; ++h) half[h][i] = w[h];
      }
      UNROLL
      for (int h = 0; h < 3; ++h) {
        Vector w[3];
        Winograd<R>::weights(w, half[h]);
        UNROLL
        for (int i = 0; i < 3; ++i) {
          float* to = out + ((h * 3 + i) * s.C + c) * s.F + f;
          past_cache ? stream(to, w[i]) : store(to, w[i]);
        }
        if (Winograd<R>::cancels) total_after += magnitude(w[0]) + magnitude(w[1]) + magnitude(w[2]);
      }
      if (Winograd<R>::cancels) {
        store(before + f, load(before + f) + total_before);
        store(after + f, load(after + f) + total_after);
      }
    }
}

constexpr float MOST_CANCELLED = 25;
constexpr int64_t TRANSFORMED_BYTES = 320 * 1024;

// Rows of tiles at a time, so that both transforms stay in the second cache, and channels at a time.
struct Plan {
  int64_t tile_rows, tiles, rows, channels, x_step, d_step, sum_step, magnitudes, floats;
  Plan(const Convolution& s, int R) {
    const int64_t points = (R + 2) * (R + 2);
    tile_rows = ceil_div(s.Ho, R), tiles = ceil_div(s.Wo, R);
    rows = max(1, min(tile_rows, TRANSFORMED_BYTES / (points * tiles * (s.C + s.F) * 4)));
    rows = max(rows, min(tile_rows, ceil_div(16, tiles)));
    rows = ceil_div(tile_rows, ceil_div(tile_rows, rows));
    channels = rows == tile_rows ? min(s.C, 32) : s.C;
    // An odd number of cache lines apart.
    x_step = rows * tiles * s.C + L, d_step = rows * tiles * s.F + L, sum_step = channels * s.F + L;
    magnitudes = max(points * (x_step + d_step + sum_step) + (tiles * R + 2) * (R + 2) * L, direct_scratch(s));
    floats = magnitudes + 2 * s.F;
  }
};

// One sample, filters f0 .. f1.
template <int R>
static void winograd(const Convolution& s, const float* x, const float* d, float* out, int64_t f0, int64_t f1,
                     float* scratch, bool past_cache) {
  constexpr int points = (R + 2) * (R + 2);
  const Plan p(s, R);
  float *xt = scratch, *dt = xt + points * p.x_step, *sums = dt + points * p.d_step,
        *columns = sums + points * p.sum_step, *before = scratch + p.magnitudes, *after = before + s.F;
  memset(before, 0, 2 * s.F * sizeof(float));
  for (int64_t row = 0; row < p.tile_rows; row += p.rows) {
    const int64_t rows = min(p.rows, p.tile_rows - row), tiles = rows * p.tiles;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t c = 0; c < s.C; c += L)
        transform_inputs<R>(s, x + c, row + i, p.tiles, xt + i * p.tiles * s.C + c, p.x_step, columns);
      for (int64_t f = f0; f < f1; f += L)
        transform_outputs<R>(s, d + f, row + i, p.tiles, dt + i * p.tiles * s.F + f, p.d_step);
    }
    const char *next_x = (const char*)(x + (row + rows) * R * s.W * s.C),
               *next_d = (const char*)(d + (row + rows) * R * s.Wo * s.F);
    const int64_t x_bytes = rows * R * s.W * s.C * 4, d_bytes = rows * R * s.Wo * s.F * 4;
    Ahead ahead = {{next_x, next_d},
                   {next_x + x_bytes, next_d + d_bytes},
                   0,
                   (x_bytes + d_bytes) / 64,
                   points * s.C * ceil_div(f1 - f0, L)};
    const Places places = {1, tiles, 0, s.C, 0, s.F, L};
    for (int64_t c = 0; c < s.C; c += p.channels) {
      const int64_t channels = min(p.channels, s.C - c), filters = f1 - f0;
      for (int point = 0; point < points; ++point)
        for (int64_t f = 0; f < filters; f += 2 * L) {
          const int V = filters - f > L ? 2 : 1;
          for (int64_t k = 0, m, left = ceil_div(channels, most(V)); left > 0; --left, k += m) {
            m = ceil_div(channels - k, left);
            ahead.lines = ceil_div(ahead.row_lines * m * V, ahead.row_sums);
            MICRO.of[V][m](places, xt + point * p.x_step + c + k, dt + point * p.d_step + f0 + f,
                           {sums + point * p.sum_step + k * filters + f, filters, L, row > 0, false}, ahead);
          }
        }
      if (row + rows == p.tile_rows)
        transform_weights<R>(s, sums, p.sum_step, channels, filters, out + c * s.F + f0, past_cache,
                             before, after);
    }
  }
  if (!Winograd<R>::cancels) return;
  // A panel of filters at a time, so that the decision does not depend on the number of threads.
  for (int64_t f = f0; f < f1; f += 2 * L) {
    const int64_t to = min(f + 2 * L, f1);
    bool exact = true;  // false for NaN and infinity, too
    for (int64_t i = f - f0; i < to - f0; ++i)
      exact &= before[i] <= MOST_CANCELLED * after[i] && before[i] <= FLT_MAX;
    if (!exact) direct(s, x, d, out, f, to, scratch, past_cache);
  }
}
