// The compiled kernels: every form in one library, chosen by the caller.
#include "kernels.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "threads.h"

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

// IN_REGISTER: load a vector once, and not again for each use. STILL_NEEDED: keep it there up to this place.
#if defined(__x86_64__)
#define IN_REGISTER(vector) __asm__("" : "+v"(vector))
#define STILL_NEEDED(vector) __asm__ volatile("" : : "v"(vector))
#elif defined(__aarch64__)
#define IN_REGISTER(vector) __asm__("" : "+w"(vector))
#define STILL_NEEDED(vector) __asm__ volatile("" : : "w"(vector))
#else
#define IN_REGISTER(vector)
#define STILL_NEEDED(vector)
#endif

#define LANES 4
#define FORM portable
#ifdef __aarch64__
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
#include "form.h"

#ifdef __x86_64__

#define LANES 8
#define REGISTERS 16
#define FORM avx2
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#include "form.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#define LANES 16
#define REGISTERS 32
#define FORM avx512
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#endif
#include "form.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#define CALL(function, ...)                                    \
  (form >= 2   ? gramgn::avx512::function(__VA_ARGS__)         \
   : form == 1 ? gramgn::avx2::function(__VA_ARGS__)           \
               : gramgn::portable::function(__VA_ARGS__))

int gramgn_best_form(void) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return avx2 ? 1 + avx512 : 0;
}

#else

#define CALL(function, ...) ((void)form, gramgn::portable::function(__VA_ARGS__))

int gramgn_best_form(void) { return 0; }

#endif

#ifndef GRAMGN_SOURCES  // built without setup.py
#define GRAMGN_SOURCES ""
#endif
const char* gramgn_sources(void) { return GRAMGN_SOURCES; }

int gramgn_conv_weight(int form, int threads, const float* x, const float* d, float* out, int64_t out_stride,
                       const struct Convolution* shape, int winograd) {
  return CALL(conv_weight, threads, x, d, out, out_stride, *shape, winograd);
}

int gramgn_gram(int form, int threads, const float* rows, int64_t stride, int64_t n, int64_t size, double* G) {
  return CALL(gram, threads, rows, stride, n, size, G);
}

int gramgn_vector_times_rows(int form, int threads, const float* u, const float* rows, int64_t stride, int64_t n,
                             int64_t size, float* out) {
  return CALL(vector_times_rows, threads, u, rows, stride, n, size, out);
}

int gramgn_row_sums(int form, int threads, const float* a, int64_t n, int64_t size, float* out) {
  return CALL(row_sums, threads, a, n, size, out);
}

int gramgn_row_dots(int form, int threads, const float* a, const float* c, int64_t n, int64_t size, float* out) {
  return CALL(row_dots, threads, a, c, n, size, out);
}

int gramgn_channel_sums(int form, int threads, const float* d, int64_t b, int64_t places, int64_t channels,
                        float* out) {
  return CALL(channel_sums, threads, d, b, places, channels, out);
}

int gramgn_channel_dots(int form, int threads, const float* d, const float* x, int64_t b, int64_t places,
                        int64_t channels, float* out) {
  return CALL(channel_dots, threads, d, x, b, places, channels, out);
}
