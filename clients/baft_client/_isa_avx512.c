#include "_engine.h"
#ifdef BAFT_X86_DISPATCH
#pragma GCC target("avx2,avx512f")
#define BAFT_VECTOR 64
#define BAFT_ISA_NAME "avx512"
#define BAFT_ISA baft_isa_avx512
#include "_isa.h"
#endif
