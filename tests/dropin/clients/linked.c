/* A C program that is linked with NVRTC. It prints the PTX and a checksum of the CUBIN. */
#include <nvrtc.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        nvrtcResult result = (call);                                                               \
        if (result != NVRTC_SUCCESS) {                                                             \
            printf("%s: %s\n", #call, nvrtcGetErrorString(result));                                \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

int main(int argc, char **argv) {
    char include[4096];
    snprintf(include, sizeof include, "-I%s", argc > 1 ? argv[1] : ".");
    const char *options[] = {"-arch=sm_90", include};
    nvrtcProgram program;
    size_t size;
    CHECK(nvrtcCreateProgram(
        &program, "#include \"scale.h\"\nextern \"C\" __global__ void s(float* a) { *a *= SCALE; }",
        "scale.cu", 0, NULL, NULL));
    CHECK(nvrtcCompileProgram(program, 2, options));
    CHECK(nvrtcGetPTXSize(program, &size));
    char *ptx = malloc(size);
    CHECK(nvrtcGetPTX(program, ptx));
    printf("%zu\n%s", size, ptx);
    CHECK(nvrtcGetCUBINSize(program, &size));
    unsigned char *cubin = malloc(size);
    CHECK(nvrtcGetCUBIN(program, (char *)cubin));
    unsigned long sum = 0;
    for (size_t i = 0; i < size; i++)
        sum = sum * 31 + cubin[i];
    printf("%zu %lu\n", size, sum);
    CHECK(nvrtcDestroyProgram(&program));
    return 0;
}
