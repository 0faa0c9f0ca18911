"""Scenes: each does something unusual between two compiles, in a process of its own.

    python odd.py LIBRARY SCENE [ARGUMENT...] [/ SCENE [ARGUMENT...]]...

Each scene prints what NVRTC returns, which has to be the same under `kcache run`.
"""

import contextlib
import ctypes as c
import os
import resource
import socket
import stat
import subprocess
import sys
import tempfile

sys.path.append(os.path.dirname(__file__))  # needed if PYTHONSAFEPATH is set
import raw

PATH, *scenes = sys.argv[1:]
for words in " ".join(scenes).split(" / "):
    SCENE, *REST = words.split()
    print(SCENE, flush=True)
    child = os.fork()
    if child == 0:
        break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
else:
    sys.exit()
nvrtc = c.CDLL(PATH)


def outcome(source, *options, headers=()):
    return raw.outcome(nvrtc, source, (b"-arch=sm_90", *options), headers=headers)


def kernel(number):
    return b'extern "C" __global__ void k(float* a) { a[%d] = 1; }\n' % number


def say(*words):
    print(*words, flush=True)


# -- descriptors -----------------------------------------------------------------------------------


def sockets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.append(int(name))
        except OSError:
            pass
    return found


def connections():
    """Return the inodes of the sockets that are connected to kcache; NVRTC may have others."""
    found = set()
    for number in sockets():
        with socket.socket(fileno=os.dup(number)) as one, contextlib.suppress(OSError):
            if "kcache" in str(one.getpeername()):
                found.add(os.fstat(number).st_ino)
    return found


def closes_all():
    say(outcome(kernel(1)))
    os.closerange(3, 1 << 16)
    say(outcome(kernel(2)))
    say(outcome(kernel(2)))


def takes_the_number():
    """Open a file under the number of every socket. Nothing may be written to the file."""
    say(outcome(kernel(1)))
    with tempfile.TemporaryFile() as file:
        for number in sockets():
            os.dup2(file.fileno(), number)
        say(outcome(kernel(2)))
        say(os.fstat(file.fileno()).st_size)


def has_no_descriptor():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    say(outcome(kernel(1)))  # in this compile, NVRTC loads its other libraries
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    say(outcome(kernel(1)))
    say(outcome(kernel(2)))


def has_none_at_first():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    say(outcome(kernel(1)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    say(outcome(kernel(1)))


# -- processes -------------------------------------------------------------------------------------


def forks():
    say(outcome(kernel(1)))
    child = os.fork()
    lines = [outcome(kernel(number)) for number in (1, 2, 3, 1)]
    if child == 0:
        say(*lines)
        os._exit(0)
    os.waitpid(child, 0)
    say(*lines)


def starts_another():
    """Start another process by vfork and exec, which run no fork handlers."""
    say(outcome(kernel(1)))
    for number in (2, 1):
        subprocess.run([sys.executable, __file__, PATH, "compiles", str(number)], check=True)
        say(outcome(kernel(number)))


def compiles():
    say(outcome(kernel(int(REST[0]))))


def forks_without_handlers():
    """Fork as with clone(2), without fork handlers: the child inherits the parent's connections."""
    say(outcome(kernel(1)))
    theirs = connections()
    child = c.CDLL(None)._Fork()
    if child == 0:
        say(outcome(kernel(2)))
        ours = connections()
        say(sorted(ours & theirs))
        os._exit(0)
    os.waitpid(child, 0)
    say(outcome(kernel(2)))


# -- the root directory, and the user --------------------------------------------------------------

INCLUDES = b'#include "scale.h"\nextern "C" __global__ void k(float* a) { *a *= SCALE; }\n'


def changes_its_root():
    """Change the root to a directory in which another header has the same path."""
    folder, tree = REST
    say(outcome(INCLUDES, b"-I" + folder.encode()))
    os.chroot(tree)
    say(outcome(INCLUDES, b"-I" + folder.encode()))
    os.chdir("/")
    say(outcome(INCLUDES, b"-I" + folder.encode()))


def includes_its_own_files():
    """Include paths below /proc/self and /dev/fd, which are other files in each process."""
    with tempfile.TemporaryFile() as file:
        for text in (b"a[1] = 1;", b"a[2] = 2;"):
            file.seek(0)
            file.write(text)
            file.flush()
            path = b"/proc/self/fd/%d" % file.fileno()
            say(outcome(b'__global__ void k(float* a) {\n#include "%s"\n}\n' % path))
            rest = path.removeprefix(b"/proc/")
            source = b'__global__ void k(float* a) {\n#include "%s"\n}\n' % rest
            say(outcome(source, b"-I/proc"))
            path = b"/dev/fd/%d" % file.fileno()
            say(outcome(b'__global__ void k(float* a) {\n#include "%s"\n}\n' % path))


def becomes_another_user():
    """Become a user who may not read the header."""
    say(outcome(INCLUDES, b"-I" + REST[0].encode()))
    os.seteuid(65534)
    say(outcome(INCLUDES, b"-I" + REST[0].encode()))


# -- sources and options ---------------------------------------------------------------------------


def says_odd_things():
    for option in (b"-DX=a\nb", b"-DX=\xff", b"-DX=\xc3\xa9", b"", b"\n", b"-I/\xff", b"-D\n"):
        say(outcome(kernel(1), option))
    for source in (
        b"// \xff\n" + kernel(1),
        b"// \r\n\v\f\x01\n" + kernel(1),
        b'#line 7 "\xff"\n#error\n',
    ):
        say(outcome(source))
    say(outcome(b'#include "\xff.h"\n' + kernel(1), headers=[(b"\xff.h", b"#define A 1")]))


def fails_late():
    """Fail in ptxas. Then NVRTC has PTX, unlike after an error in the source."""
    say(outcome(kernel(1), b"--ptxas-options=--no-such-option"))
    body = b"__shared__ float s[1 << 20]; s[threadIdx.x] = *a; __syncthreads(); *a = s[5];"
    say(outcome(b"__global__ void k(float* a) { %s }" % body))
    say(outcome(kernel(1) + b"error"))


def asks_for_optix():
    """Request OptiX IR, also by options that begin with whitespace, which NVRTC skips."""
    for space in (b"", b" ", b"\t", b"\n", b"\v", b"\f", b"\r", b" \t-"):
        for option in (b"--optix-ir", b"-D"):
            _, program = raw.create(nvrtc, kernel(1))
            flags = (c.c_char_p * 2)(b"-arch=compute_90", space + option)
            code = nvrtc.nvrtcCompileProgram(program, 2, flags)
            size = c.c_size_t()
            nvrtc.nvrtcGetOptiXIRSize(program, c.byref(size))
            say(space, option, code, size.value)
            nvrtc.nvrtcDestroyProgram(c.byref(program))


def is_large():
    say(outcome(b"//" + b" " * (int(REST[0]) << 20) + b"\n" + kernel(1)))


def has_many_headers():
    headers = [(b"h%d.h" % n, b"#define H%d %d\n" % (n, n)) for n in range(int(REST[0]))]
    source = b'#include "h%d.h"\n' % (len(headers) - 1) + kernel(1)
    say(outcome(source, headers=headers))
    say(outcome(source, headers=headers[::-1]))


def has_two_headers_of_one_name():
    for names in ((b"a", b"b"), (b"a", b"a"), (b"a", b"./a"), (b"b", b"a", b"b"), (b"", b"")):
        code, program = raw.create(nvrtc, b"", None, [(name, b"") for name in names])
        say(code, program.value is None)


def compiles_again():
    """Compile a program several times. NVRTC keeps the old cubin if a later compile makes none."""
    _, program = raw.create(nvrtc, b"template <class T> __global__ void t(T* a) { *a = X; }")
    nvrtc.nvrtcAddNameExpression(program, b"t<int>")
    size, lowered = c.c_size_t(), c.c_char_p()
    for options in ((b"-arch=sm_90", b"-DX=1"), (b"-arch=compute_80", b"-DX=2"), (b"-arch=sm_90",)):
        result = nvrtc.nvrtcCompileProgram(program, len(options), (c.c_char_p * 2)(*options))
        nvrtc.nvrtcGetCUBINSize(program, c.byref(size))
        found = nvrtc.nvrtcGetLoweredName(program, b"t<int>", c.byref(lowered))
        say(result, size.value, found, lowered.value)


def has_a_namespace_of_its_own():
    """Load NVRTC by dlmopen, in a second namespace of libraries."""
    libc = c.CDLL(None)
    libc.dlmopen.restype = libc.dlsym.restype = c.c_void_p
    libc.dlmopen.argtypes = (c.c_long, c.c_char_p, c.c_int)
    libc.dlsym.argtypes = (c.c_void_p, c.c_char_p)
    handle = libc.dlmopen(-1, PATH.encode(), os.RTLD_NOW)
    say(handle is not None)
    major, minor = c.c_int(), c.c_int()
    version = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p)(libc.dlsym(handle, b"nvrtcVersion"))
    say(version(c.byref(major), c.byref(minor)), major.value, minor.value)
    say(outcome(kernel(1)))
    os._exit(0)  # NVRTC 13.0 crashes at the end of such a program


globals()[SCENE]()
