"""The NVRTC frontend."""
