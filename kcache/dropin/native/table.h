/* The functions that NVRTC 12.4 to 13.5 exports, by major version: those that this library answers,
 * and those that it only forwards. A real library with any other export is not replaced; see
 * `kcache_dropin_covers` in real.c. */
#ifndef KCACHE_TABLE_H
#define KCACHE_TABLE_H

#include "dropin.h"

#include <string.h>

#if KCACHE_MAJOR >= 13
#define KD_ANSWERED_BY_MAJOR(X) X(nvrtcGetTileIRSize) X(nvrtcGetTileIR)
#define KD_FORWARDED_BY_MAJOR(X)                                                                   \
    X(nvrtcInstallBundledHeaders)                                                                  \
    X(nvrtcGetBundledHeadersInfo) X(nvrtcRemoveBundledHeaders) X(__nvrtcNvvmHandle)
#else
#define KD_ANSWERED_BY_MAJOR(X) X(nvrtcGetNVVMSize) X(nvrtcGetNVVM)
#define KD_FORWARDED_BY_MAJOR(X)
#endif

#define KD_ANSWERED(X)                                                                             \
    X(nvrtcGetErrorString) X(nvrtcVersion)                                                         \
    X(nvrtcGetNumSupportedArchs) X(nvrtcGetSupportedArchs)                                         \
    X(nvrtcCreateProgram) X(nvrtcDestroyProgram) X(nvrtcCompileProgram)                            \
    X(nvrtcAddNameExpression) X(nvrtcGetLoweredName)                                               \
    X(nvrtcGetPTXSize) X(nvrtcGetPTX) X(nvrtcGetCUBINSize) X(nvrtcGetCUBIN)                        \
    X(nvrtcGetLTOIRSize) X(nvrtcGetLTOIR) X(nvrtcGetOptiXIRSize)                                   \
    X(nvrtcGetOptiXIR) X(nvrtcGetProgramLogSize) X(nvrtcGetProgramLog)                             \
    X(nvrtcGetPCHCreateStatus) X(nvrtcGetPCHHeapSizeRequired)                                      \
    X(nvrtcSetFlowCallback) KD_ANSWERED_BY_MAJOR(X)

#define KD_FORWARDED(X)                                                                            \
    X(nvrtcGetPCHHeapSize)                                                                         \
    X(nvrtcSetPCHHeapSize) X(__nvrtcCPEx) KD_FORWARDED_BY_MAJOR(X)

/* They are called in place of a function that the real library does not have. There is one for each
 * type of result. */
static inline int kd_no_function(void) { return KD_INTERNAL_ERROR; }
static inline void *kd_no_handle(void) { return NULL; }
static inline const char *kd_no_text(void) { return "NVRTC_ERROR unknown"; }

static inline void *kd_missing(const char *name) {
    if (strstr(name, "ErrorString") != NULL)
        return (void *)kd_no_text;
    return strstr(name, "Handle") != NULL ? (void *)kd_no_handle : (void *)kd_no_function;
}

#endif
