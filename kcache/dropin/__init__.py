"""Answers NVRTC's interface for programs not written for kcache; the C code is in `native/`."""
