// The micro-kernel, which does all multiplications of matrix products:
//
//   out[m, v] (+)= sum over rows r and places i of  A[r, i, m] * B[r, i, v],   m < M, v < V vectors.
//
// The sums stay in registers. M numbers of A, adjacent in memory, are broadcast one after the other; V vectors of B
// are loaded once per place.

// Where the numbers of A and B lie, in floats from one row and from one place to the next.
struct Places {
  int64_t rows, places, a_row, a_place, b_row, b_place;
};

// Memory that the next slab will need, requested a few lines per row while the present slab is computed: the
// hardware's prefetchers lose their track at every page.
struct Ahead {
  const char *at[2], *end[2];
  int64_t lines;  // per row of a micro-kernel

  const char* take() {
    const int i = at[0] < end[0] ? 0 : 1;
    const char* from = at[i];
    at[i] += 64 * lines;
    return from;
  }
};

template <int M, int V>
NOINLINE void micro(const Places& p, const float* a, const float* b, float* out, int64_t out_row, bool add,
                    Ahead& ahead) {
  Vector sum[M][V] = {};
  for (int64_t r = 0; r < p.rows; ++r) {
    const float *ai = a + r * p.a_row, *bi = b + r * p.b_row;
    const char* line = ahead.take();
    for (int64_t i = 0; i < p.places; ++i) {
      if (i < ahead.lines) __builtin_prefetch(line + 64 * i, 0, 2);
      Vector bv[V];
      UNROLL for (int v = 0; v < V; ++v) bv[v] = load(bi + v * L);
      UNROLL for (int m = 0; m < M; ++m) {
        const float am = ai[m];
        UNROLL for (int v = 0; v < V; ++v) sum[m][v] += bv[v] * am;
      }
      ai += p.a_place;
      bi += p.b_place;
    }
  }
  UNROLL for (int m = 0; m < M; ++m) UNROLL for (int v = 0; v < V; ++v) {
    float* o = out + m * out_row + v * L;
    store(o, add ? load(o) + sum[m][v] : sum[m][v]);
  }
}

typedef void (*Micro)(const Places&, const float*, const float*, float*, int64_t, bool, Ahead&);

// Most M for V = 1 and 2, such that the sums, V vectors of B and one of A fit into the registers.
constexpr int MOST_1 = REGISTERS == 32 ? 24 : 12, MOST_2 = MOST_1 / 2;

template <int M, int V>
constexpr Micro micro_of(int m) {
  if constexpr (M == 0)
    return nullptr;
  else
    return m == M ? micro<M, V> : micro_of<M - 1, V>(m);
}

template <int M, int V>
struct MicroTable {
  Micro of[M + 1];
  constexpr MicroTable() : of() {
    for (int m = 1; m <= M; ++m) of[m] = micro_of<M, V>(m);
  }
};
constexpr MicroTable<MOST_1, 1> MICRO_1;
constexpr MicroTable<MOST_2, 2> MICRO_2;

// out [size of A, V vectors] (+)= A^T B, for any number of rows of `out`: blocks of nearly equal size.
INLINE void product(const Places& p, const float* a, int64_t size, const float* b, int vectors, float* out,
                    int64_t out_row, bool add, Ahead& ahead) {
  const int64_t most = vectors == 2 ? MOST_2 : MOST_1;
  const Micro* of = vectors == 2 ? MICRO_2.of : MICRO_1.of;
  int64_t left = ceil_div(size, most);
  for (int64_t at = 0; at < size; --left) {
    const int64_t m = ceil_div(size - at, left);
    of[m](p, a + at, b, out + at * out_row, out_row, add, ahead);
    at += m;
  }
}
