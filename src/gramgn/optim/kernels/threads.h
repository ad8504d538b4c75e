// Parallel loops on the OpenMP library that the process has loaded already (torch's), if any.
//
// The symbols are looked up when this library is loaded, so no second OpenMP library can come in, and the
// compiler needs no -fopenmp. Where they are missing, everything runs on the calling thread.
#pragma once

#if defined(__ELF__)
extern "C" {
void GOMP_parallel(void (*)(void*), void*, unsigned threads, unsigned flags) __attribute__((weak));
int omp_get_thread_num(void) __attribute__((weak));
int omp_get_num_threads(void) __attribute__((weak));
}
#endif

namespace gramgn {

// Run body(thread, number of threads) on at most `threads` threads, and wait for all of them.
template <class Body>
static void parallel(int threads, Body& body) {
#if defined(__ELF__)
  if (threads > 1 && GOMP_parallel && omp_get_thread_num && omp_get_num_threads) {
    struct Call {
      static void run(void* b) { (*static_cast<Body*>(b))(omp_get_thread_num(), omp_get_num_threads()); }
    };
    GOMP_parallel(Call::run, &body, threads, 0);
    return;
  }
#endif
  body(0, 1);
}

}  // namespace gramgn
