#include "_engine.h"
#ifdef BAFT_X86_DISPATCH
#if defined(__clang__) /* its pragma sets no __AVX512F__, so xxhash is told its vector (3: AVX512) */
#include <immintrin.h>
#pragma clang attribute push(__attribute__((target("avx2,avx512f"))), apply_to = function)
#define XXH_VECTOR 3
#else
#pragma GCC target("avx2,avx512f")
#endif
#define BAFT_VECTOR 64
#define BAFT_ISA_NAME "avx512"
#define BAFT_ISA baft_isa_avx512
#include "_isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
