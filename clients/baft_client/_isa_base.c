/* What every CPU of the architecture can run, and the choice among the better ones. */
#if defined(__AVX2__)
#define BAFT_VECTOR 32
#define BAFT_ISA_NAME "avx2 (compiled in)"
#elif defined(__x86_64__)
#define BAFT_VECTOR 16
#define BAFT_ISA_NAME "sse2"
#else
#define BAFT_VECTOR 0
#define BAFT_ISA_NAME "memcpy"
#endif
#define BAFT_ISA baft_isa_base
#include "_isa.h"

const baft_isa *baft_cpu = &baft_isa_base;

size_t baft_isa_list(const baft_isa **list, size_t room) {
    size_t n = 0;
#ifdef BAFT_X86_DISPATCH
    __builtin_cpu_init();
    if (n < room && __builtin_cpu_supports("avx512f")) list[n++] = &baft_isa_avx512;
    if (n < room && __builtin_cpu_supports("avx2")) list[n++] = &baft_isa_avx2;
#endif
    if (n < room) list[n++] = &baft_isa_base;
    return n;
}
