// Per-sample weight gradients of convolutions: which algorithm, and which thread computes what.

static int conv_weight(int threads, const float* x, const float* d, float* out, int64_t out_stride,
                       const Convolution& s, int winograd) {
  (void)winograd;
  // A unit is a sample or, where there are fewer samples than threads, a range of its filters.
  const int64_t F = s.F / s.groups, panels = ceil_div(F, 2 * L);
  const int64_t parts = s.b < threads ? min(panels, ceil_div(threads, s.b)) : 1, units = s.b * parts;
  int failed = 0;
  struct Body {
    const Convolution& s;
    const float *x, *d;
    float* out;
    int64_t out_stride, panels, parts, units;
    int* failed;

    void operator()(int64_t thread, int64_t threads) {
      const int64_t from = units * thread / threads, to = units * (thread + 1) / threads;
      if (from == to) return;
      Scratch scratch(direct_scratch(s));
      if (!scratch.data) {
        __atomic_store_n(failed, 1, __ATOMIC_RELAXED);
        return;
      }
      for (int64_t u = from; u < to; ++u) {
        const int64_t n = u / parts, part = u % parts;
        const int64_t f0 = panels * part / parts * 2 * L, f1 = min(s.F / s.groups, panels * (part + 1) / parts * 2 * L);
        direct(s, x + n * s.H * s.W * s.C, d + n * s.Ho * s.Wo * s.F, out + n * out_stride, f0, f1, scratch.data);
      }
    }
  } body{s, x, d, out, out_stride, panels, parts, units, &failed};
  parallel(s.b * parts < threads ? (int)units : threads, body);
  return failed;
}
