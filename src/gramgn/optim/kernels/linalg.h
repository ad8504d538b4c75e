// Products of whole rows of J: the Gram matrix and u^T J; and sums of rows and of channels.

constexpr int64_t SMALL = 1 << 15;  // numbers that are read faster than other threads wake up

// ---------------------------------------------------------------- Gram matrix
//
// Rows are copied in panels of a few hundred columns, because rows that lie a multiple of 4 KiB apart evict one another
// from the caches. Tiles of TILE_ROWS x TILE_COLUMNS entries of the lower triangle are summed over a panel in
// registers, in float32, and added to sums in float64.

constexpr int TILE_ROWS = REGISTERS == 32 ? 8 : 4, TILE_COLUMNS = 3, TILE = TILE_ROWS * TILE_COLUMNS;
constexpr int64_t PANEL = 512;             // most columns of a panel
constexpr int64_t PANEL_ROW = PANEL + 16;  // floats from one row of a panel to the next: an odd number of lines
constexpr int64_t STRIP = 96;              // rows of a panel that stay in the cache together; whole tiles both ways
constexpr int64_t LINE = 16;               // floats of a cache line

#if LANES == 16
// Add the sums of the lanes of tile[8][3] to sums[8][3], or store them.
INLINE void add_lanes(const Vector (&tile)[TILE_ROWS][TILE_COLUMNS], double* sums, bool add) {
  // Four vectors become one, of which each group of four lanes holds partial sums of all four.
  __m512 quads[6];
  UNROLL for (int q = 0; q < 6; ++q) {
    __m512 v[4];
    UNROLL for (int r = 0; r < 4; ++r) v[r] = (__m512)tile[(4 * q + r) / TILE_COLUMNS][(4 * q + r) % TILE_COLUMNS];
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    quads[q] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  }
  UNROLL for (int q = 0; q < 6; ++q) {
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(quads[q]),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(quads[q]), 1)));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    __m256d wide = _mm256_cvtps_pd(four);
    _mm256_storeu_pd(sums + 4 * q, add ? _mm256_add_pd(_mm256_loadu_pd(sums + 4 * q), wide) : wide);
  }
}
#elif LANES == 8
// Add the sums of the lanes of tile[4][3] to sums[4][3], or store them.
INLINE void add_lanes(const Vector (&tile)[TILE_ROWS][TILE_COLUMNS], double* sums, bool add) {
  UNROLL for (int q = 0; q < 3; ++q) {
    __m256 v[4];
    UNROLL for (int r = 0; r < 4; ++r) v[r] = (__m256)tile[(4 * q + r) / TILE_COLUMNS][(4 * q + r) % TILE_COLUMNS];
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    __m256d wide = _mm256_cvtps_pd(_mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
    _mm256_storeu_pd(sums + 4 * q, add ? _mm256_add_pd(_mm256_loadu_pd(sums + 4 * q), wide) : wide);
  }
}
#else
INLINE void add_lanes(const Vector (&tile)[TILE_ROWS][TILE_COLUMNS], double* sums, bool add) {
  for (int i = 0; i < TILE_ROWS; ++i)
    for (int j = 0; j < TILE_COLUMNS; ++j) {
      const double sum = sum_of_lanes(tile[i][j]);
      sums[i * TILE_COLUMNS + j] = add ? sums[i * TILE_COLUMNS + j] + sum : sum;
    }
}
#endif

// Sums of one tile over a panel of `columns` columns; `lines` cache lines from `ahead` on are requested meanwhile.
NOINLINE void tile_sums(const float* a, const float* b, int64_t columns, double* sums, bool add, const float* ahead,
                        int64_t lines) {
  Vector tile[TILE_ROWS][TILE_COLUMNS] = {};
  for (int64_t k = 0; k < columns; k += L) {
    if (k < lines * L) __builtin_prefetch(ahead + k / L * LINE, 0, 2);
    Vector bk[TILE_COLUMNS];
    UNROLL for (int j = 0; j < TILE_COLUMNS; ++j) {
      bk[j] = load(b + j * PANEL_ROW + k);
      __builtin_prefetch(b + (TILE_COLUMNS + j) * PANEL_ROW + k, 0, 3);  // of the next tile
    }
    UNROLL for (int i = 0; i < TILE_ROWS; ++i) {
      Vector ai = load(a + i * PANEL_ROW + k);
      IN_REGISTER(ai);
      UNROLL for (int j = 0; j < TILE_COLUMNS; ++j) tile[i][j] += ai * bk[j];
      if (L > 4) STILL_NEEDED(ai);  // with fused multiply-adds no sum may take its register
    }
  }
  add_lanes(tile, sums, add);
}

// The tiles that cover the lower triangle, strip by strip: body(first row, first column).
template <class Body>
INLINE void for_each_tile(int64_t n, const Body& body) {
  for (int64_t rows = 0; rows < n; rows += STRIP)
    for (int64_t columns = 0; columns <= rows; columns += STRIP)
      for (int64_t i = rows; i < min(rows + STRIP, n); i += TILE_ROWS)
        for (int64_t j = columns; j < min(columns + STRIP, min(i + TILE_ROWS, n)); j += TILE_COLUMNS) body(i, j);
}

// Rows first to last - 1 of columns k to k + width - 1 into a panel; rows from n on, and the columns of the last
// vector from `width` on, are zero.
NOINLINE void pack_rows(const float* rows, int64_t stride, int64_t n, int64_t k, int64_t width, float* panel,
                        int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    float* to = panel + i * PANEL_ROW;
    int64_t t = 0;
    if (i < n) {
      const float* from = rows + i * stride + k;
      for (; t + L <= width; t += L) store(to + t, load(from + t));
      for (; t < width; ++t) to[t] = from[t];
    }
    for (; t < whole(width); ++t) to[t] = 0;
  }
}

struct GramPlan {
  int64_t padded, tiles, panels, width;  // rows of a panel, tiles, panels, columns of all panels but the last

  GramPlan(int64_t n, int64_t size)
      : padded(ceil_div(n, TILE_ROWS) * TILE_ROWS + TILE_COLUMNS),
        tiles(0),
        panels(ceil_div(size, PANEL)),
        width(whole(ceil_div(size, panels))) {
    panels = ceil_div(size, width);
    for_each_tile(n, [&](int64_t, int64_t) { ++tiles; });
  }
  int64_t sums() const { return ceil_div(2 * tiles * TILE, LINE) * LINE; }  // in floats
  int64_t scratch() const { return sums() + 2 * padded * PANEL_ROW; }
};

// The tiles summed over the panels `first` to `last` - 1, which are not none; `scratch` begins with the sums. The next
// panel is requested tile by tile, and copied soon after, before other rows evict it.
static void gram_panels(const float* rows, int64_t stride, int64_t n, int64_t size, const GramPlan& plan, int64_t first,
                        int64_t last, float* scratch) {
  double* sums = (double*)scratch;
  float *panel = scratch + plan.sums(), *next = panel + plan.padded * PANEL_ROW;
  auto width = [&](int64_t p) { return min(plan.width, size - p * plan.width); };
  const int64_t lines = ceil_div(n * ceil_div(plan.width, LINE), plan.tiles);
  pack_rows(rows, stride, n, first * plan.width, width(first), panel, 0, plan.padded);
  for (int64_t p = first; p < last; ++p) {
    const int64_t columns = whole(width(p)), k = (p + 1) * plan.width, w = p + 1 < last ? width(p + 1) : 0;
    const int64_t of_row = w / LINE;
    int64_t row = 0, line = 0, done = 0, packed = 0, until = 0;  // requested next; number of tiles; rows copied, to copy
    double* tile = sums;
    for_each_tile(n, [&](int64_t i, int64_t j) {
      const bool more = of_row && row < n;
      tile_sums(panel + i * PANEL_ROW, panel + j * PANEL_ROW, columns, tile, p > first,
                more ? rows + row * stride + k + line * LINE : rows, more ? min(lines, of_row - line) : 0);
      tile += TILE;
      if (more && (line += lines) >= of_row) line = 0, ++row;
      if (w && ++done % 8 == 0) {
        pack_rows(rows, stride, n, k, w, next, packed, until);
        packed = until;
        until = row;
      }
    });
    if (w) pack_rows(rows, stride, n, k, w, next, packed, plan.padded);
    float* other = panel;
    panel = next;
    next = other;
  }
}

// Add a tile of the lower triangle to G, on both sides of the diagonal.
INLINE void add_tile(const double* sums, int64_t n, int64_t i, int64_t j, double* G) {
  double* lower = G + i * n + j;
  double* upper = G + j * n + i;
  if (j + TILE_COLUMNS <= i && i + TILE_ROWS <= n) {
    UNROLL for (int a = 0; a < TILE_ROWS; ++a) UNROLL for (int b = 0; b < TILE_COLUMNS; ++b) {
      lower[a * n + b] += sums[a * TILE_COLUMNS + b];
    }
    UNROLL for (int b = 0; b < TILE_COLUMNS; ++b) UNROLL for (int a = 0; a < TILE_ROWS; ++a) {
      upper[b * n + a] += sums[a * TILE_COLUMNS + b];
    }
    return;
  }
  for (int a = 0; a < TILE_ROWS && i + a < n; ++a)
    for (int b = 0; b < TILE_COLUMNS && j + b <= i + a; ++b) {
      lower[a * n + b] += sums[a * TILE_COLUMNS + b];
      if (j + b < i + a) upper[b * n + a] += sums[a * TILE_COLUMNS + b];
    }
}

static int gram(int threads, const float* rows, int64_t stride, int64_t n, int64_t size, double* G) {
  if (n == 0 || size == 0) return 0;
  const GramPlan plan(n, size);
  if (double(n) * n * size < 4e6) threads = 1;
  // Each thread sums all tiles over its own panels, in memory that is held to the size of G and of the rows.
  threads = (int)min(threads, min(plan.panels, 2 + 2 * size / n));
  Scratch scratch(threads * plan.scratch());
  if (!scratch.data) return 1;
  int used = 1;
  auto body = [&](int t, int T) {
    if (t == 0) used = T;
    const int64_t first = plan.panels * t / T, last = plan.panels * (t + 1) / T;
    gram_panels(rows, stride, n, size, plan, first, last, scratch.data + t * plan.scratch());
  };
  parallel(threads, body);
  double* sums = (double*)scratch.data;
  for (int t = 1; t < used; ++t) {
    const double* others = (const double*)(scratch.data + t * plan.scratch());
    for (int64_t i = 0; i < plan.tiles * TILE; ++i) sums[i] += others[i];
  }
  for_each_tile(n, [&](int64_t i, int64_t j) {
    add_tile(sums, n, i, j, G);
    sums += TILE;
  });
  return 0;
}

// ---------------------------------------------------------------- u^T J
//
// Four rows at a time, over as many columns as stay in the first cache.

constexpr int64_t COLUMNS = 1024;

static void add_rows(const float* u, const float* rows, int64_t stride, int64_t n, float* out, int64_t columns) {
  memset(out, 0, columns * sizeof(float));
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const float* row[4];
    UNROLL for (int q = 0; q < 4; ++q) row[q] = rows + (i + q) * stride;
    int64_t k = 0;
    for (; k + L <= columns; k += L) {
      Vector sum = load(out + k);
      UNROLL for (int q = 0; q < 4; ++q) sum += load(row[q] + k) * u[i + q];
      store(out + k, sum);
    }
    for (; k < columns; ++k) {
      UNROLL for (int q = 0; q < 4; ++q) out[k] += row[q][k] * u[i + q];
    }
  }
  for (; i < n; ++i)
    for (int64_t k = 0; k < columns; ++k) out[k] += rows[i * stride + k] * u[i];
}

static int vector_times_rows(int threads, const float* u, const float* rows, int64_t stride, int64_t n, int64_t size,
                             float* out) {
  const int64_t pieces = ceil_div(size, COLUMNS);
  auto body = [&](int t, int T) {
    for (int64_t p = pieces * t / T; p < pieces * (t + 1) / T; ++p)
      add_rows(u, rows + p * COLUMNS, stride, n, out + p * COLUMNS, min(COLUMNS, size - p * COLUMNS));
  };
  parallel(n * size < SMALL ? 1 : threads, body);
  return 0;
}

// ---------------------------------------------------------------- sums
//
// Sums in float32 are of at most CHAIN terms, and of such sums.

constexpr int64_t CHAIN = 64;

template <bool DOTS>
INLINE Vector term(const float* a, const float* c) {
  if constexpr (DOTS) return load(a) * load(c);
  return load(a);
}

template <bool DOTS>
NOINLINE float row_total(const float* a, const float* c, int64_t size) {
  Vector total[8] = {};
  int64_t k = 0;
  while (k + 8 * L <= size) {
    Vector sum[8] = {};
    for (const int64_t end = min(size, k + CHAIN * 8 * L); k + 8 * L <= end; k += 8 * L)
      UNROLL for (int i = 0; i < 8; ++i) sum[i] += term<DOTS>(a + k + i * L, c + k + i * L);
    UNROLL for (int i = 0; i < 8; ++i) total[i] += sum[i];
  }
  for (; k + L <= size; k += L) total[0] += term<DOTS>(a + k, c + k);
  float rest = 0;
  for (; k < size; ++k) rest += DOTS ? a[k] * c[k] : a[k];
  return rest + sum_of_lanes(((total[0] + total[1]) + (total[2] + total[3])) +
                             ((total[4] + total[5]) + (total[6] + total[7])));
}

// V vectors of channels, at offsets at[v] < channels, summed over all places; P places at a time.
template <bool DOTS, int V, int P>
INLINE void vectors_total(const float* d, const float* x, int64_t places, int64_t channels, const int64_t* at,
                          float* out) {
  Vector total[V] = {};
  int64_t p = 0;
  while (p < places) {
    Vector sum[P][V] = {};
    const int64_t end = min(places, p + CHAIN * P);
    for (; p + P <= end; p += P)
      UNROLL for (int q = 0; q < P; ++q) UNROLL for (int v = 0; v < V; ++v) {
        sum[q][v] += term<DOTS>(d + (p + q) * channels + at[v], x + (p + q) * channels + at[v]);
      }
    for (; p < end; ++p)
      UNROLL for (int v = 0; v < V; ++v) sum[0][v] += term<DOTS>(d + p * channels + at[v], x + p * channels + at[v]);
    UNROLL for (int q = 1; q < P; ++q) UNROLL for (int v = 0; v < V; ++v) sum[0][v] += sum[q][v];
    UNROLL for (int v = 0; v < V; ++v) total[v] += sum[0][v];
  }
  UNROLL for (int v = 0; v < V; ++v) store(out + at[v], total[v]);
}

// At least as many channels as lanes; the last vector may overlap the one before it, which then holds the same sums.
template <bool DOTS>
NOINLINE void many_channels(const float* d, const float* x, int64_t places, int64_t channels, float* out) {
  int64_t vectors = ceil_div(channels, L), first = 0, at[8];
  while (vectors > 0) {
    const int64_t now = vectors >= 8 ? 8 : vectors >= 4 ? 4 : vectors >= 2 ? 2 : 1;
    for (int64_t v = 0; v < now; ++v) at[v] = min(first + v * L, channels - L);
    if (now == 8) vectors_total<DOTS, 8, 1>(d, x, places, channels, at, out);
    if (now == 4) vectors_total<DOTS, 4, 2>(d, x, places, channels, at, out);
    if (now == 2) vectors_total<DOTS, 2, 4>(d, x, places, channels, at, out);
    if (now == 1) vectors_total<DOTS, 1, 8>(d, x, places, channels, at, out);
    vectors -= now;
    first += now * L;
  }
}

// Fewer channels than lanes: L places are `channels` whole vectors, in which lane i of vector v is of channel
// (v L + i) mod channels.
template <bool DOTS>
NOINLINE void few_channels(const float* d, const float* x, int64_t places, int64_t channels, float* out) {
  Vector total[L] = {};
  int64_t p = 0;
  while (p + L <= places) {
    Vector sum[L] = {};
    for (const int64_t end = min(places, p + CHAIN * L); p + L <= end; p += L)
      for (int64_t v = 0; v < channels; ++v)
        sum[v] += term<DOTS>(d + p * channels + v * L, x + p * channels + v * L);
    for (int64_t v = 0; v < channels; ++v) total[v] += sum[v];
  }
  float sums[L] = {};
  for (; p < places; ++p)
    for (int64_t c = 0, k = p * channels; c < channels; ++c, ++k) sums[c] += DOTS ? d[k] * x[k] : d[k];
  float lanes[L * L];
  for (int64_t v = 0; v < channels; ++v) store(lanes + v * L, total[v]);
  for (int64_t q = 0; q < L; ++q)
    for (int64_t c = 0; c < channels; ++c) sums[c] += lanes[q * channels + c];
  for (int64_t c = 0; c < channels; ++c) out[c] = sums[c];
}

template <bool DOTS>
static int row_totals(int threads, const float* a, const float* c, int64_t n, int64_t size, float* out) {
  auto body = [&](int t, int T) {
    for (int64_t i = n * t / T; i < n * (t + 1) / T; ++i)
      out[i] = row_total<DOTS>(a + i * size, DOTS ? c + i * size : nullptr, size);
  };
  parallel(n * size < SMALL ? 1 : threads, body);
  return 0;
}

template <bool DOTS>
static int channel_totals(int threads, const float* d, const float* x, int64_t b, int64_t places, int64_t channels,
                          float* out) {
  if (channels == 1) return row_totals<DOTS>(threads, d, x, b, places, out);
  const auto total = channels < L ? few_channels<DOTS> : many_channels<DOTS>;
  const int64_t size = places * channels;
  auto body = [&](int t, int T) {
    for (int64_t n = b * t / T; n < b * (t + 1) / T; ++n)
      total(d + n * size, DOTS ? x + n * size : nullptr, places, channels, out + n * channels);
  };
  parallel(b * size < SMALL ? 1 : threads, body);
  return 0;
}

static int row_sums(int threads, const float* a, int64_t n, int64_t size, float* out) {
  return row_totals<false>(threads, a, nullptr, n, size, out);
}

static int row_dots(int threads, const float* a, const float* c, int64_t n, int64_t size, float* out) {
  return row_totals<true>(threads, a, c, n, size, out);
}

static int channel_sums(int threads, const float* d, int64_t b, int64_t places, int64_t channels, float* out) {
  return channel_totals<false>(threads, d, nullptr, b, places, channels, out);
}

static int channel_dots(int threads, const float* d, const float* x, int64_t b, int64_t places, int64_t channels,
                        float* out) {
  return channel_totals<true>(threads, d, x, b, places, channels, out);
}
