"""Answers NVRTC's interface for programs that do not know kcache; the C code is in `native/`."""
