// The C interface of the compiled kernels: pointers and sizes only, float32 on the CPU.
//
// Every function takes the form of its instructions (0 portable, 1 AVX2 and FMA, 2 AVX-512; at most
// gramgn_best_form()) and the largest number of threads, and returns a status:
// 0 done, 1 out of memory (the results are then undefined).
// Results repeat bitwise for the same form; those of one sample do not depend on the other samples.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Return the hash of the sources that setup.py computed, by which a library of older sources is recognised.
const char* gramgn_sources(void);

// Return the widest form that this processor runs.
int gramgn_best_form(void);

// Sizes of a batch of two-dimensional convolutions; one-dimensional ones have H = Ho = kh = 1.
// b samples, C channels, H x W inputs, F filters, Ho x Wo outputs, kernel kh x kw, strides, padding, dilation.
struct Convolution {
  int64_t b, C, H, W, F, Ho, Wo, kh, kw, sh, sw, ph, pw, dh, dw, groups;
};

// Compute per-sample weight gradients.
//
// x [b, H, W, C] and d [b, Ho, Wo, F] are dense. Row n, at out + n out_stride, is written whole in the order
// (kh, kw, C / groups, F). With winograd = 1, 3x3 kernels of stride 1 are computed from transformed tiles where
// that is faster; 0 keeps to sums of plain products.
int gramgn_conv_weight(int form, int threads, const float* x, const float* d, float* out, int64_t out_stride,
                       const struct Convolution* shape, int winograd);

// Add rows rows^T to G [n, n], exactly symmetric, for rows i < n of `size` floats at rows + i stride. Pieces of at most
// 512 columns are summed in float32, and these sums in float64.
int gramgn_gram(int form, int threads, const float* rows, int64_t stride, int64_t n, int64_t size, double* G);

// Write u^T rows [size] to `out`; each entry is summed in float32 in the order of the rows.
int gramgn_vector_times_rows(int form, int threads, const float* u, const float* rows, int64_t stride, int64_t n,
                             int64_t size, float* out);

// Write the sum of each row of a [n, size], or its inner product with the row of c, to out [n].
int gramgn_row_sums(int form, int threads, const float* a, int64_t n, int64_t size, float* out);
int gramgn_row_dots(int form, int threads, const float* a, const float* c, int64_t n, int64_t size, float* out);

// Write the sum over places of d [b, places, channels], or of its products with x, to out [b, channels].
int gramgn_channel_sums(int form, int threads, const float* d, int64_t b, int64_t places, int64_t channels,
                        float* out);
int gramgn_channel_dots(int form, int threads, const float* d, const float* x, int64_t b, int64_t places,
                        int64_t channels, float* out);

#ifdef __cplusplus
}
#endif
