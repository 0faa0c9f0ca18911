"""Names: who is measured, and on whose side: ours, a peer's, or a floor's."""

#: The names of peers in figures.
PEERS = {
    "cuda.core FileStream": "cuda.core FileStream",
    "cuda.core InMemory": "cuda.core InMemory",
    "cuda.core": "cuda.core",
    "CuPy": "CuPy",
    "cupy": "CuPy",
    "diskcache": "diskcache",
    "JAX LRUCache": "JAX LRUCache",
    "SQLite": "SQLite",
}
#: The fastest possible way to do the same work.
FLOORS = {
    "raw file read": "raw file read",
    "open, fstat, read, close": "raw file read",
    "raw file write": "raw file write",
    "raw LMDB get": "raw LMDB get",
    "raw LMDB put": "raw LMDB put",
    "bare NVRTC": "bare NVRTC",
    "bare interpreter": "bare interpreter",
    "os.stat": "os.stat",
}
OURS = "kcache"


def peer_of(text: str) -> str | None:
    """Returns the peer that a text names, or None."""
    return next((peer for name, peer in PEERS.items() if name in text), None)


def floor_of(text: str) -> str | None:
    """Returns the floor that a text names, or None."""
    return next((floor for name, floor in FLOORS.items() if name in text), None)


def role_of(text: str) -> str:
    """Returns "floor", "peer" or "ours", as for `findings.Point`."""
    if OURS in text:
        return "ours"
    return "peer" if peer_of(text) else "floor" if floor_of(text) else "ours"
