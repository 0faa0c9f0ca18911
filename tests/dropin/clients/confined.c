/* A C program that is linked with NVRTC, and can't open any file when it first calls NVRTC.
   The arguments say what it does before: `chroot FOLDER`, `files N` (limits itself to N
   descriptors), `full` (opens as many descriptors as it can), `nothing`. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <nvrtc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc > 2 && strcmp(argv[1], "chroot") == 0 && chroot(argv[2]) != 0)
        return 1;
    if (argc > 2 && strcmp(argv[1], "files") == 0) {
        struct rlimit limit = {(rlim_t)atoi(argv[2]), (rlim_t)atoi(argv[2])};
        if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
            return 1;
    }
    for (int full = strcmp(argv[1], "full"); full == 0;)
        full = open("/dev/null", O_RDONLY) < 0;
    int major = 0, minor = 0, count = 0;
    int result = nvrtcVersion(&major, &minor);
    printf("%d %d %d\n", result, major, minor);
    printf("%d %s %s\n", nvrtcGetNumSupportedArchs(&count), nvrtcGetErrorString(NVRTC_ERROR_COMPILATION),
           nvrtcGetErrorString((nvrtcResult)99));
    nvrtcProgram program;
    const char *options[] = {"-arch=compute_90"};
    printf("%d\n", nvrtcCreateProgram(&program, "__global__ void k() {}", NULL, 0, NULL, NULL));
    printf("%d\n", nvrtcCompileProgram(program, 1, options));
    printf("%d\n", nvrtcDestroyProgram(&program));
    size_t heap = 0; /* only the real library has a value */
    result = strcmp(argv[1], "files") == 0 ? 0 : nvrtcGetPCHHeapSize(&heap);
    printf("%d %zu\n", result, heap);
    return 3;
}
