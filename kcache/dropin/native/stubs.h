/* Stubs: functions that jump to a function of the same name in another library, with all arguments
 * unchanged.
 *
 * A C function can't forward arguments whose number is unknown, and `__nvrtcCPEx` takes some of its
 * arguments on the stack. Each stub puts its number into a scratch register and jumps to
 * `kd_enter`. `kd_enter` saves the argument registers, calls `kd_resolve` to find the function, and
 * jumps to the function. */
#ifndef KCACHE_STUBS_H
#define KCACHE_STUBS_H

__attribute__((visibility("hidden"), used)) void *kd_resolve(unsigned index);

/* The texts of all stubs must be in one `__asm__`, after KD_STUBS_BEGIN, because they share a
 * counter. */
#define KD_STUBS_BEGIN ".text\n.set kd_next, 0\n"

#if defined(__x86_64__)

#define KD_STUB(label)                                                                             \
    ".p2align 4\n.globl " label "\n.type " label ", @function\n" label ":\n"                       \
    "endbr64\nmovl $kd_next, %r11d\njmp kd_enter\n.size " label ", .-" label                      \
    "\n.set kd_next, kd_next + 1\n"

__asm__(".text\n.p2align 4\n.local kd_enter\n.type kd_enter, @function\nkd_enter:\n"
        "push %rdi\npush %rsi\npush %rdx\npush %rcx\npush %r8\npush %r9\npush %rax\n"
        "sub $128, %rsp\n"
        "movups %xmm0, (%rsp)\nmovups %xmm1, 16(%rsp)\nmovups %xmm2, 32(%rsp)\n"
        "movups %xmm3, 48(%rsp)\nmovups %xmm4, 64(%rsp)\nmovups %xmm5, 80(%rsp)\n"
        "movups %xmm6, 96(%rsp)\nmovups %xmm7, 112(%rsp)\n"
        "movl %r11d, %edi\ncall kd_resolve\nmovq %rax, %r11\n"
        "movups (%rsp), %xmm0\nmovups 16(%rsp), %xmm1\nmovups 32(%rsp), %xmm2\n"
        "movups 48(%rsp), %xmm3\nmovups 64(%rsp), %xmm4\nmovups 80(%rsp), %xmm5\n"
        "movups 96(%rsp), %xmm6\nmovups 112(%rsp), %xmm7\n"
        "add $128, %rsp\n"
        "pop %rax\npop %r9\npop %r8\npop %rcx\npop %rdx\npop %rsi\npop %rdi\n"
        "jmp *%r11\n.size kd_enter, .-kd_enter");

#elif defined(__aarch64__)

#define KD_STUB(label)                                                                             \
    ".p2align 4\n.globl " label "\n.type " label ", %function\n" label ":\n"                       \
    "hint #34\nmov w17, #kd_next\nb kd_enter\n.size " label ", .-" label                          \
    "\n.set kd_next, kd_next + 1\n"

__asm__(".text\n.p2align 4\n.local kd_enter\n.type kd_enter, %function\nkd_enter:\n"
        "stp x29, x30, [sp, #-16]!\nstp x0, x1, [sp, #-16]!\nstp x2, x3, [sp, #-16]!\n"
        "stp x4, x5, [sp, #-16]!\nstp x6, x7, [sp, #-16]!\nstp x8, x9, [sp, #-16]!\n"
        "stp q0, q1, [sp, #-32]!\nstp q2, q3, [sp, #-32]!\nstp q4, q5, [sp, #-32]!\n"
        "stp q6, q7, [sp, #-32]!\n"
        "mov w0, w17\nbl kd_resolve\nmov x16, x0\n"
        "ldp q6, q7, [sp], #32\nldp q4, q5, [sp], #32\nldp q2, q3, [sp], #32\n"
        "ldp q0, q1, [sp], #32\n"
        "ldp x8, x9, [sp], #16\nldp x6, x7, [sp], #16\nldp x4, x5, [sp], #16\n"
        "ldp x2, x3, [sp], #16\nldp x0, x1, [sp], #16\nldp x29, x30, [sp], #16\n"
        "br x16\n.size kd_enter, .-kd_enter");

#else
#error "the stubs are written for x86-64 and aarch64, the machines that NVRTC exists for"
#endif

#endif
