"""Arguments become bytes of the sizes that a kernel takes; errors name an argument's position."""

import ctypes
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcache.errors import ConfigError
from kcache.launch.arguments import address_of, pack


def one(size: int, value: object) -> bytes:
    """Return the bytes for a parameter of `size` bytes and an argument `value`."""

    def address(value: object, where: int) -> int:
        return address_of(value, where, device=0, stream=1)

    return bytes(pack([size], [value], address)[0])  # type: ignore[call-overload]


def refused(size: int, value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^argument 1.*{reason}"):
        one(size, value)


@given(st.sampled_from([1, 2, 4, 8]), st.data())
def test_an_int_arrives_in_every_size_that_holds_it(size: int, data: st.DataObject) -> None:
    value = data.draw(st.integers(-(2 ** (8 * size - 1)), 2 ** (8 * size) - 1))
    assert one(size, value) == value.to_bytes(size, "little", signed=value < 0)


@given(st.floats(width=32), st.floats())
def test_a_float_arrives_in_both_sizes(single: float, double: float) -> None:
    assert one(4, single) == struct.pack("<f", single)
    assert one(8, double) == struct.pack("<d", double)


@pytest.mark.parametrize(
    ("size", "value", "reason"),
    [
        (1, 256, "does not fit into 1 byte$"),
        (8, 10**30, "does not fit into 8 bytes"),
        (4, 1e300, "does not fit into 4 bytes"),
        (2, 1.5, "takes 2 bytes there; pass a numpy or ctypes scalar"),
        (4, None, "it has 8 bytes, but the kernel takes 4"),
        (4, ctypes.c_int64(1), "it has 8 bytes, but the kernel takes 4"),
        (8, [1.0], "expected numbers.*, got list"),
        (8, "text", "expected numbers.*, got str"),
    ],
)
def test_values_of_the_wrong_size_are_refused(size: int, value: object, reason: str) -> None:
    refused(size, value, reason)


def test_a_wrong_number_of_arguments_is_refused() -> None:
    for count in (0, 2, 4):
        with pytest.raises(ConfigError, match=f"^expected 3 arguments, got {count}$"):
            pack([4, 4, 4], [0] * count, lambda *_: 0)


class Pair(ctypes.Structure):
    _fields_ = (("x", ctypes.c_float), ("y", ctypes.c_float))


def test_values_with_a_size_of_their_own_arrive_as_they_are() -> None:
    assert one(8, None) == bytes(8)
    for kind in (ctypes.c_bool, ctypes.c_int16, ctypes.c_uint32, ctypes.c_float, ctypes.c_double):
        assert one(ctypes.sizeof(kind), kind(1)) == bytes(kind(1))
    assert one(8, Pair(1, 2)) == struct.pack("<ff", 1, 2)
    assert one(8, ctypes.c_void_p(5)) == struct.pack("<Q", 5)


def test_numpy_scalars_arrive_as_they_are() -> None:
    np = pytest.importorskip("numpy")
    for name in ("bool_", "int8", "uint16", "int32", "float16", "float32", "float64", "complex64"):
        value = getattr(np, name)(1)
        assert one(value.itemsize, value) == value.tobytes()
    # The value is longer than any integer. cuda.core passes it by itself.
    whole = np.complex128(1 + 2j)
    assert pack([16], [whole], lambda *_: 0) == [whole]
    refused(4, np.float64(2), "it has 8 bytes, but the kernel takes 4")


class Array:
    """An array that DLPack describes by the kind and the number of its device."""

    def __init__(self, kind: int, number: int) -> None:
        self.device = kind, number

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **how: Any) -> Any:
        raise BufferError("it needs a gradient")


def test_arrays_that_a_kernel_can_not_reach_are_refused() -> None:
    np = pytest.importorskip("numpy")
    refused(8, np.zeros(3), "the ndarray is in host memory, .* copy it to the device first")
    refused(8, Array(2, 1), "the Array is on device 1, but the kernel on 0")


def test_a_producer_that_refuses_is_quoted() -> None:
    pytest.importorskip("cuda.core")
    for kind, number in ((2, 0), (3, 7), (13, 7)):  # device memory, pinned, managed
        what = "the Array does not return the address of its memory: it needs a gradient"
        refused(8, Array(kind, number), what)
