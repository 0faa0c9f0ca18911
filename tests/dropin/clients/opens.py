"""Opens NVRTC several times, by name and by path, and prints its versions.

Arguments: the path of NVRTC, and `clears` to empty the environment first.
"""

import ctypes as c
import os
import sys

path, *rest = sys.argv[1:]
name = os.path.basename(path)
if rest == ["clears"]:
    os.environ.clear()


def opened(what, mode=os.RTLD_LAZY):
    """Return NVRTC's version, or why it can't be opened."""
    try:
        library = c.CDLL(what, mode)
    except OSError as error:
        return "not found" if "cannot open" in str(error) else "not loaded"
    major, minor = c.c_int(), c.c_int()
    return library.nvrtcVersion(c.byref(major), c.byref(minor)), major.value, minor.value


print(opened(name, os.RTLD_LAZY | os.RTLD_NOLOAD))
print(opened(name), opened(name), opened(name, os.RTLD_LAZY | os.RTLD_NOLOAD))
print(opened(path), opened(name), opened(name, os.RTLD_LAZY | os.RTLD_NOLOAD))
