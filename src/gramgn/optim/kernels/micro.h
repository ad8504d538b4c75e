// The micro-kernel, which does all multiplications of matrix products:
//
//   out[m, v] (+)= sum over rows r and places i of  A[r, i, m] * B[r, i, v],   m < M, v < V vectors.
//
// The sums stay in registers. M numbers of A, adjacent in memory, are broadcast one after the other; V
// vectors of B are loaded once per place.

// Where the numbers of A and B lie: floats from one row, one place and one vector to the next.
struct Places {
  int64_t rows, places, a_row, a_place, b_row, b_place, b_vector;
};

// Where the sums go, whether they are added to what is there, and whether the result is written past the cache.
struct Block {
  float* data;
  int64_t row, vector;
  bool add, past_cache;

  void put(int64_t m, int64_t v, Vector sum) const {
    float* to = data + m * row + v * vector;
    if (add) sum += load(to);
    past_cache ? stream(to, sum) : store(to, sum);
  }
};

// Memory that the next slab will need, requested a few lines per row while the present slab is computed: the
// hardware's prefetchers lose their track at every page.
struct Ahead {
  const char *at[2], *end[2];
  int64_t lines;                // in each row of a call
  int64_t row_lines, row_sums;  // in all calls together: lines and sums

  const char* take() {
    const int i = at[0] < end[0] ? 0 : 1;
    const char* from = at[i];
    at[i] += 64 * lines;
    return from;
  }
};

template <int M, int V>
NOINLINE void micro(const Places& p, const float* a, const float* b, const Block& out, Ahead& ahead) {
  Vector sum[M][V] = {};
  for (int64_t r = 0; r < p.rows; ++r) {
    const float *ai = a + r * p.a_row, *bi = b + r * p.b_row;
    const char* line = ahead.take();
    for (int64_t i = 0; i < p.places; ++i) {
      if (i < ahead.lines) __builtin_prefetch(line + 64 * i, 0, 2);
      Vector bv[V];
      UNROLL
      for (int v = 0; v < V; ++v) bv[v] = load(bi + v * p.b_vector);
      UNROLL
      for (int m = 0; m < M; ++m) {
        const float am = ai[m];
        UNROLL
        for (int v = 0; v < V; ++v) sum[m][v] += bv[v] * am;
      }
      ai += p.a_place;
      bi += p.b_place;
    }
  }
  UNROLL
  for (int m = 0; m < M; ++m) {
    UNROLL
    for (int v = 0; v < V; ++v) out.put(m, v, sum[m][v]);
  }
}

typedef void (*Micro)(const Places&, const float*, const float*, const Block&, Ahead&);

// Largest M for V vectors, such that the sums, V vectors of B and one of A fit into the registers.
constexpr int MOST_VECTORS = 3, MOST_SUMS = REGISTERS - 2;
INLINE constexpr int most(int V) { return (REGISTERS - 1 - V) / V; }

struct MicroTable {
  Micro of[MOST_VECTORS + 1][MOST_SUMS + 1];

  template <int M, int V>
  constexpr void fill() {
    of[V][M] = micro<M, V>;
    if constexpr (M > 1)
      fill<M - 1, V>();
    else if constexpr (V > 1)
      fill<most(V - 1), V - 1>();
  }
  constexpr MicroTable() : of() { fill<most(MOST_VECTORS), MOST_VECTORS>(); }
};
constexpr MicroTable MICRO;
