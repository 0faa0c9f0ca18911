/* The recording of one run of nvcc: memory that the client allocates, and that the recorder in each
   tool writes to.

   A record is four texts, each with its NUL: kind, process, path, answer.
   `kcache/nvcc/recording.py` reads them. Space is reserved by one atomic addition. So a killed
   process leaves no lock, but a gap of zeros, which the reader rejects. */
#ifndef KCACHE_RECORDING_H
#define KCACHE_RECORDING_H

#include <stdint.h>

/* The variable with the path of the memory, /proc/PROCESS/fd/NUMBER. */
#define KR_VARIABLE "KCACHE_NVCC_RECORDING"
/* Bytes of address space. Only pages that are written take memory. */
#define KR_SIZE ((uint64_t)64 << 20)
#define KR_MAX_ROOTS (60 << 10)

struct kr_recording {
    uint64_t used;      /* bytes of all records; some are missing if this is more than there is */
    uint32_t terminals; /* bit N: the caller's descriptor N, 0 to 2, is a terminal */
    uint32_t roots_size;
    char roots[KR_MAX_ROOTS]; /* the directories of the call, each with its NUL */
    char records[];
};

#endif
