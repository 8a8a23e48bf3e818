// Included before everything else (nvcc -include). The launch templates of the fork choose by
// BOOL_SWITCH among kernels for: even M/N (never with cu_seqlens), return_softmax (never without
// dropout), Split (num_splits > 1) and Append_KV (knew_ptr). With the calls that launcher.cu makes all of
// these are false, so only that one kernel is instantiated. A true condition is reported and aborts.
#pragma once
#include <cstdio>
#include <cstdlib>
#include "static_switch.h"
#undef BOOL_SWITCH
#define BOOL_SWITCH(COND, CONST_NAME, ...)                                                  \
  [&] {                                                                                     \
    if (COND) { fprintf(stderr, "ranged: not compiled in: %s\n", #COND); abort(); }         \
    constexpr static bool CONST_NAME = false;                                               \
    return __VA_ARGS__();                                                                   \
  }()
