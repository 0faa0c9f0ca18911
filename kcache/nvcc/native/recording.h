/* The recording of one nvcc: memory that the client makes, and the recorder in each tool writes.

   A record is four texts, each with its NUL: kind, process, path, answer. `kcache/nvcc/recording.py`
   reads them. Space is taken by one atomic addition, so that a killed process leaves a gap of zeros,
   which the reader refuses, and no lock. */
#ifndef KCACHE_RECORDING_H
#define KCACHE_RECORDING_H

#include <stdint.h>

/* Names the memory as a file: /proc/PROCESS/fd/NUMBER. */
#define KR_VARIABLE "KCACHE_NVCC_RECORDING"
/* Address space and not memory: only what is written takes pages. */
#define KR_SIZE ((uint64_t)64 << 20)
#define KR_MAX_ROOTS (60 << 10)

struct kr_recording {
    uint64_t used;      /* bytes of `records`, or more: then some are missing */
    uint32_t terminals; /* bit N: the caller's descriptor N, 0 to 2, is a terminal */
    uint32_t roots_size;
    char roots[KR_MAX_ROOTS]; /* the directories of the call, each with its NUL */
    char records[];
};

#endif
