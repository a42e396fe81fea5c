#include "_engine.h"
#ifdef BAFT_X86_DISPATCH
#if defined(__clang__) /* its pragma sets no __AVX2__, so xxhash is told its vector (2: AVX2) */
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#define XXH_VECTOR 2
#else
#pragma GCC target("avx2")
#endif
#define BAFT_VECTOR 32
#define BAFT_ISA_NAME "avx2"
#define BAFT_ISA baft_isa_avx2
#include "_isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
