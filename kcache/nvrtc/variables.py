"""Variables: the environment variables that NVRTC 12.4 to 13.5 asks for, by their treatment."""

from __future__ import annotations

from kcache import config

#: They may change the output, and are part of the key. Any other variable that a compiler asks for
#: is in its trace.
IN_KEY = (
    "CAN_FINALIZE_DEBUG",
    "DUMP_KNOBS_TO_FILE",
    "EDG_BASE",
    "EDG_MODULES_PATH",
    "FINALIZER_CUBIE",
    "FINALIZER_USE_LEGACY_ELF_BUILDER",
    "NVRTCWIZ",
    "NVRTC_APPEND_FLAGS",
    "NVRTC_DISABLE_CONCURRENT_NVVM",
    "NVVM_IR_VER_CHK",
)
#: LLVM asks for it to find out how the user spells the working directory.
WORKING_DIRECTORY = "PWD"
#: The compiler gets these values, whatever the environment has: a worker is not a job of the
#: program's `make`, and NVRTC's own cache would answer instead of the compiler.
FIXED: dict[str, str | None] = {"MAKEFLAGS": None, "CUDA_CACHE_DISABLE": "1"}
#: They name directories for temporary files. A result does not depend on them.
IGNORED = ("TMPDIR", "TMP", "TEMP")

#: Returns those of `IN_KEY` that are set, as `NAME=VALUE`; nearly always none.
in_environment = config.finder_of(IN_KEY)
