"""Raw: functions with which several clients call NVRTC by ctypes."""

import ctypes as c
import hashlib

ALL = ("PTX", "CUBIN", "ProgramLog")


def create(nvrtc, source, name=b"k.cu", headers=()):
    program = c.c_void_p()
    texts = (c.c_char_p * len(headers))(*(text for _, text in headers))
    names = (c.c_char_p * len(headers))(*(name for name, _ in headers))
    given = (c.byref(program), source, name, len(headers), texts, names)
    return nvrtc.nvrtcCreateProgram(*given), program


def outcome(nvrtc, source, options, *, name=b"k.cu", headers=(), outputs=ALL):
    """Compile, and return a line with the results and digests of everything that NVRTC returned."""
    code, program = create(nvrtc, source, name, headers)
    given = (c.c_char_p * len(options))(*options)
    told = [code, nvrtc.nvrtcCompileProgram(program, len(options), given)]
    for what in outputs:
        size = c.c_size_t()
        told.append(getattr(nvrtc, f"nvrtcGet{what}Size")(program, c.byref(size)))
        buffer = c.create_string_buffer(size.value or 1)
        told.append(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
        told.append(hashlib.sha256(buffer.raw).hexdigest()[:16])
    if hasattr(nvrtc, "nvrtcGetPCHCreateStatus"):
        told.append(nvrtc.nvrtcGetPCHCreateStatus(program))
    told.append(nvrtc.nvrtcDestroyProgram(c.byref(program)))
    return " ".join(map(str, told))
