#include "_engine.h"
#ifdef BAFT_X86_DISPATCH
#pragma GCC target("avx2")
#define BAFT_VECTOR 32
#define BAFT_ISA_NAME "avx2"
#define BAFT_ISA baft_isa_avx2
#include "_isa.h"
#endif
