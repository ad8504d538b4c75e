static int gram(int, const float* rows, int64_t stride, int64_t n, int64_t size, double* G) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < size; ++k) sum += double(rows[i * stride + k]) * rows[j * stride + k];
      G[i * n + j] += sum;
      if (i != j) G[j * n + i] += sum;
    }
  return 0;
}

static int vector_times_rows(int, const float* u, const float* rows, int64_t stride, int64_t n, int64_t size, float* out) {
  for (int64_t k = 0; k < size; ++k) out[k] = 0;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < size; ++k) out[k] += u[i] * rows[i * stride + k];
  return 0;
}

static int row_sums(int, const float* a, int64_t n, int64_t size, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    double sum = 0;
    for (int64_t k = 0; k < size; ++k) sum += a[i * size + k];
    out[i] = float(sum);
  }
  return 0;
}

static int row_dots(int, const float* a, const float* c, int64_t n, int64_t size, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    double sum = 0;
    for (int64_t k = 0; k < size; ++k) sum += double(a[i * size + k]) * c[i * size + k];
    out[i] = float(sum);
  }
  return 0;
}

static int channel_sums(int, const float* d, int64_t b, int64_t places, int64_t channels, float* out) {
  for (int64_t n = 0; n < b; ++n)
    for (int64_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (int64_t p = 0; p < places; ++p) sum += d[(n * places + p) * channels + c];
      out[n * channels + c] = float(sum);
    }
  return 0;
}

static int channel_dots(int, const float* d, const float* x, int64_t b, int64_t places, int64_t channels, float* out) {
  for (int64_t n = 0; n < b; ++n)
    for (int64_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (int64_t p = 0; p < places; ++p) {
        int64_t at = (n * places + p) * channels + c;
        sum += double(d[at]) * x[at];
      }
      out[n * channels + c] = float(sum);
    }
  return 0;
}
