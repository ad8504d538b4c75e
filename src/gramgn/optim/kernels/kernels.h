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

#ifdef __cplusplus
}
#endif
