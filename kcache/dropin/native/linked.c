/* NVRTC's functions for programs that are linked with it; they jump to the interface library.
 *
 * They have versioned names only (`nvrtcVersion@libnvrtc.so.13`), because a program that searches
 * all libraries for a bare name, as cuda.bindings does first, must not find the functions of the
 * wrong major version. */
#define _GNU_SOURCE
#include "dropin.h"
#include "stubs.h"
#include "table.h"

#define STUB(name)                                                                                 \
    KD_STUB("kd_linked_" #name) ".symver kd_linked_" #name ", " #name "@" KD_SONAME "\n"
__asm__(KD_STUBS_BEGIN KD_ANSWERED(STUB) KD_FORWARDED(STUB));

#define NAME(name) #name,
static const char *const names[] = {KD_ANSWERED(NAME) KD_FORWARDED(NAME)};

void *kd_resolve(unsigned index) {
    void *function = kd_of_interface(names[index]);
    return function == NULL ? kd_missing(names[index]) : function;
}
