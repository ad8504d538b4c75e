// Every kernel in every form on small odd shapes, in memory without a byte to spare: built by `make sanitize`
// with AddressSanitizer and UndefinedBehaviorSanitizer, and compared with plain sums in double.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "../../src/gramgn/optim/kernels/kernels.cpp"

namespace {

std::mt19937 engine(0);

int64_t pick(int64_t from, int64_t to) { return std::uniform_int_distribution<int64_t>(from, to)(engine); }

template <size_t n>
int64_t choose(const int64_t (&values)[n]) {
  return values[pick(0, n - 1)];
}

// Numbers on the heap, exactly as many as needed; NaN where nothing has been written.
struct Numbers {
  int64_t size;
  std::unique_ptr<float[]> data;
  explicit Numbers(int64_t n, bool drawn = false) : size(n), data(new float[n]) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < n; ++i) data[i] = drawn ? normal(engine) : NAN;
  }
  operator float*() const { return data.get(); }
};

int failures = 0;

// Whether got[i] is close to expected[i] with respect to the largest of them.
void compare(const char* what, int form, const float* got, const double* expected, int64_t n) {
  double largest = 1, error = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::fmax(largest, std::fabs(expected[i]));
  for (int64_t i = 0; i < n; ++i) {
    const double e = std::fabs(got[i] - expected[i]);
    error = e <= error ? error : e;
  }
  if (error <= 1e-5 * largest) return;
  std::printf("%s, form %d: error %g of %g\n", what, form, error, largest);
  ++failures;
}

void reference(const Convolution& s, const float* x, const float* d, double* out) {
  const int64_t C = s.C / s.groups, F = s.F / s.groups;
  for (int64_t h = 0; h < s.kh; ++h)
    for (int64_t w = 0; w < s.kw; ++w)
      for (int64_t c = 0; c < C; ++c)
        for (int64_t f = 0; f < s.F; ++f) {
          double sum = 0;
          for (int64_t y = 0; y < s.Ho; ++y)
            for (int64_t i = 0; i < s.Wo; ++i) {
              const int64_t r = y * s.sh - s.ph + h * s.dh, q = i * s.sw - s.pw + w * s.dw;
              if (r < 0 || r >= s.H || q < 0 || q >= s.W) continue;
              sum += double(x[(r * s.W + q) * s.C + f / F * C + c]) * d[(y * s.Wo + i) * s.F + f];
            }
          *out++ = sum;
        }
}

// Every form on this convolution, whose Ho and Wo are still to be computed.
void check(Convolution s) {
  s.Ho = (s.H + 2 * s.ph - s.dh * (s.kh - 1) - 1) / s.sh + 1,
  s.Wo = (s.W + 2 * s.pw - s.dw * (s.kw - 1) - 1) / s.sw + 1;
  const int64_t size = s.kh * s.kw * s.C / s.groups * s.F, x_size = s.H * s.W * s.C,
                d_size = s.Ho * s.Wo * s.F;
  const Numbers x(s.b * x_size, true), d(s.b * d_size, true);
  const std::unique_ptr<double[]> expected(new double[s.b * size]);
  for (int64_t n = 0; n < s.b; ++n) reference(s, x + n * x_size, d + n * d_size, &expected[n * size]);
  for (int form = 0; form <= gramgn_best_form(); ++form)
    for (int winograd = 0; winograd < 2; ++winograd) {
      const Numbers out(s.b * size);
      failures += gramgn_conv_weight(form, 2, x, d, out, size, &s, winograd);
      compare("convolution", form, out, expected.get(), s.b * size);
    }
}

void convolution(bool tiled) {
  Convolution s;
  s.b = pick(1, 2), s.groups = tiled ? 1 : choose({1, 1, 2, 3, 7});
  s.kh = tiled ? 3 : pick(1, 5), s.kw = tiled ? 3 : pick(1, 5);
  s.sh = tiled ? 1 : pick(1, 3), s.sw = tiled ? 1 : pick(1, 3);
  s.dh = tiled ? 1 : pick(1, 2), s.dw = tiled ? 1 : pick(1, 2);
  s.ph = pick(0, s.kh), s.pw = pick(0, s.kw);
  const bool depthwise = s.groups > 2 && pick(0, 1);
  s.C = tiled ? choose({16, 32}) : depthwise ? s.groups : s.groups * choose({1, 2, 3, 9, 16});
  s.F = tiled ? choose({16, 32, 48}) : s.groups * choose({1, 2, 5, 16, 17, 33});
  s.H = choose({1, 2, 5, 8, 17}) + (s.kh - 1) * s.dh, s.W = choose({1, 2, 6, 9, 17}) + (s.kw - 1) * s.dw;
  if (!tiled && pick(0, 9) == 0) s.W += 600;  // longer than a slab
  check(s);
}

// Planes of several slabs with padding from none to wider than the kernel.
void padded() {
  Convolution s;
  s.b = 1, s.groups = choose({1, 1, 2}), s.kh = pick(1, 4), s.kw = pick(1, 4);
  s.sh = choose({1, 1, 2}), s.sw = choose({1, 1, 2}), s.dh = pick(1, 2), s.dw = choose({1, 1, 2});
  s.ph = pick(0, s.kh + 2), s.pw = pick(0, s.kw + 2);
  s.C = s.groups * choose({1, 2, 3, 9}), s.F = s.groups * choose({1, 3, 4, 8, 16, 20});
  s.H = pick(20, 70), s.W = pick(20, 70);
  check(s);
}

// Gram product and sums of n rows of `size` numbers that lie `stride` apart, or of `size` / C places of C
// channels.
void rows() {
  const int64_t n = pick(1, 20), C = choose({1, 3, 16, 35}), size = C * choose({1, 2, 7, 33, 530 / C + 1}),
                stride = size + pick(0, 2);
  const Numbers a((n - 1) * stride + size, true), u(n, true), p(n * size, true), q(n * size, true);
  double G[400] = {}, sums[20] = {}, dots[20] = {};
  const std::unique_ptr<double[]> product(new double[size]()), channel_sums(new double[n * C]()),
      channel_dots(new double[n * C]());
  for (int64_t i = 0; i < n; ++i)
    for (int64_t k = 0; k < size; ++k) {
      const double pk = p[i * size + k], pq = pk * q[i * size + k];
      for (int64_t j = 0; j < n; ++j) G[i * n + j] += double(a[i * stride + k]) * a[j * stride + k];
      product[k] += double(u[i]) * a[i * stride + k];
      sums[i] += pk, dots[i] += pq, channel_sums[i * C + k % C] += pk, channel_dots[i * C + k % C] += pq;
    }
  for (int form = 0; form <= gramgn_best_form(); ++form) {
    double got[400] = {};
    failures += gramgn_gram(form, 2, a, stride, n, size, got);
    const Numbers G_out(n * n), product_out(size), out(n), out_dots(n), channels(n * C), channels_dots(n * C);
    for (int64_t i = 0; i < n * n; ++i) G_out[i] = float(got[i]);
    compare("gram", form, G_out, G, n * n);
    failures += gramgn_vector_times_rows(form, 2, u, a, stride, n, size, product_out);
    compare("vector_times_rows", form, product_out, product.get(), size);
    failures += gramgn_row_sums(form, 2, p, n, size, out);
    compare("row_sums", form, out, sums, n);
    failures += gramgn_row_dots(form, 2, p, q, n, size, out_dots);
    compare("row_dots", form, out_dots, dots, n);
    failures += gramgn_channel_sums(form, 2, p, n, size / C, C, channels);
    compare("channel_sums", form, channels, channel_sums.get(), n * C);
    failures += gramgn_channel_dots(form, 2, p, q, n, size / C, C, channels_dots);
    compare("channel_dots", form, channels_dots, channel_dots.get(), n * C);
  }
}

}  // namespace

int main() {
  for (int i = 0; i < 400; ++i) convolution(i % 4 == 0);
  for (int i = 0; i < 100; ++i) padded();
  for (int i = 0; i < 200; ++i) rows();
  std::printf("%d failures\n", failures);
  return failures > 0;
}
