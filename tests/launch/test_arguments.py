"""Arguments become bytes of the sizes that a kernel takes, or are refused by their position."""

from __future__ import annotations

import ctypes
import enum
import math
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.launch.addresses import address_of
from kcache.launch.arguments import dimensions, pack, shared_bytes
from kcache.launch.code import Kind, Parameter


def nowhere(value: object, where: int) -> int | None:
    """No value is device memory."""
    return None


def packed(parameters: Sequence[Parameter] | None, *values: object) -> list[bytes]:
    return [bytes(made) for made in pack(parameters, values, nowhere)]  # type: ignore[call-overload]


def one(size: int, kind: Kind, value: object) -> bytes:
    return packed([Parameter(size, kind)], value)[0]


def refused(size: int, kind: Kind, value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^argument 1.*{reason}"):
        one(size, kind, value)


# -- Python's numbers ----------------------------------------------------------------------------


@given(st.sampled_from([1, 2, 4, 8]), st.data())
def test_an_int_arrives_in_every_size_that_holds_it(size: int, data: st.DataObject) -> None:
    value = data.draw(st.integers(-(2 ** (8 * size - 1)), 2 ** (8 * size) - 1))
    expected = value.to_bytes(size, "little", signed=value < 0)
    for kind in ("integer", "unknown"):
        assert one(size, kind, value) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_an_int_that_does_not_fit_is_refused(size: int) -> None:
    for value in (2 ** (8 * size), -(2 ** (8 * size - 1)) - 1, 10**30):
        refused(size, "integer", value, f"does not fit into the integer of {size} bytes")


@given(st.floats(width=32), st.floats())
def test_a_float_arrives_in_both_sizes(single: float, double: float) -> None:
    for kind in ("float", "unknown"):
        assert one(4, kind, single) == struct.pack("<f", single)  # type: ignore[arg-type]
        assert one(8, kind, double) == struct.pack("<d", double)  # type: ignore[arg-type]


def test_an_int_for_a_float_arrives_as_that_float() -> None:
    assert one(4, "float", 2) == struct.pack("<f", 2.0)
    assert one(8, "float", -3) == struct.pack("<d", -3.0)
    assert one(4, "float", True) == struct.pack("<f", 1.0)
    refused(4, "float", 10**40, "does not fit into the float of 4 bytes")
    refused(8, "float", 10**400, "does not fit into the float of 8 bytes")


def test_a_float_that_would_be_cut_is_refused() -> None:
    refused(4, "float", 1e300, "does not fit into the float of 4 bytes")
    assert struct.unpack("<f", one(4, "float", math.inf)) == (math.inf,)
    refused(4, "integer", 2.0, "takes an integer of 4 bytes")
    refused(8, "integer", 2.5, "takes an integer of 8 bytes")
    refused(2, "unknown", 2.5, "several formats")


def test_bools_and_members_of_enums_are_ints() -> None:
    class Mode(enum.IntEnum):
        FAST = 3

    assert one(1, "integer", True) == b"\1"
    assert one(4, "integer", False) == bytes(4)
    assert one(4, "integer", Mode.FAST) == b"\3\0\0\0"


def test_plain_numbers_for_structs_are_refused() -> None:
    for value in (1, 1.5, True):
        refused(2, "struct", value, "takes a struct of 2 bytes")
        refused(12, "struct", value, "takes a struct of 12 bytes")


def test_what_is_no_number_is_refused() -> None:
    for value in ("1", b"1", [1], (1,), object(), 1j):
        with pytest.raises(ArgumentTypeError, match=r"^argument 1 is a .*allowed: numbers, numpy"):
            one(4, "integer", value)


# -- scalars with a type of their own ------------------------------------------------------------


def test_ctypes_scalars_are_passed_as_they_are() -> None:
    assert one(2, "integer", ctypes.c_short(-2)) == b"\xfe\xff"
    assert one(1, "integer", ctypes.c_bool(True)) == b"\1"
    assert one(4, "float", ctypes.c_float(1.5)) == struct.pack("<f", 1.5)
    assert one(8, "integer", ctypes.c_void_p(4096)) == struct.pack("<Q", 4096)
    refused(4, "float", ctypes.c_double(1), "has 8 bytes, the kernel takes 4")
    refused(4, "float", ctypes.c_int(1), "takes a float of 4 bytes")
    refused(4, "integer", ctypes.c_float(1), "takes an integer or a pointer of 4 bytes")
    refused(8, "integer", ctypes.c_char_p(b"text"), "no number")


def test_structs_of_a_numbers_size_are_passed_and_others_are_not() -> None:
    class Pair(ctypes.Structure):
        _fields_ = [("a", ctypes.c_short), ("b", ctypes.c_short)]

    assert one(4, "struct", Pair(1, 2)) == b"\1\0\2\0"
    refused(4, "integer", Pair(1, 2), "takes an integer")
    refused(12, "struct", (ctypes.c_float * 3)(), "structs of 1, 2, 4 and 8 bytes")


def test_numpy_scalars_keep_their_type() -> None:
    np = pytest.importorskip("numpy")
    for name in ("int8", "uint16", "int32", "uint64"):
        value = np.dtype(name).type(7)
        assert one(value.itemsize, "integer", value) == value.tobytes()
    assert one(4, "float", np.float32(1.5)) == struct.pack("<f", 1.5)
    assert one(8, "float", np.float64(1.5)) == struct.pack("<d", 1.5)
    assert one(2, "struct", np.float16(1.5)) == struct.pack("<e", 1.5)
    assert one(8, "struct", np.complex64(1 + 2j)) == struct.pack("<ff", 1, 2)
    refused(4, "float", np.float64(1.5), "has 8 bytes, the kernel takes 4")
    refused(4, "integer", np.int64(1), "has 8 bytes, the kernel takes 4")
    refused(4, "float", np.int32(1), "takes a float of 4 bytes")
    refused(4, "integer", np.float32(1), "takes an integer")
    refused(8, "struct", np.str_("ab"), "no number")


# -- counts, addresses ---------------------------------------------------------------------------


def test_too_many_or_too_few_are_refused() -> None:
    parameters = [Parameter(4, "integer")] * 2
    for values in ((), (1,), (1, 2, 3)):
        with pytest.raises(ConfigError, match=f"{len(values)} arguments for a kernel that takes 2"):
            packed(parameters, *values)
    assert packed([]) == []


def test_the_position_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^argument 3 is a str;"):
        packed([Parameter(4, "integer")] * 3, 1, 2, "x")


def test_without_parameters_only_values_with_a_size_are_passed() -> None:
    assert packed(None, ctypes.c_short(1), None) == [b"\1\0", bytes(8)]
    for value in (1, 1.5):
        with pytest.raises(ConfigError, match="its size is not known"):
            packed(None, value)


def test_addresses_go_where_a_pointer_is_taken() -> None:
    class Memory:
        pass

    def known(value: object, where: int) -> int | None:
        return 2**40 if isinstance(value, Memory) else None

    def packed_address(size: int, kind: Kind, value: object) -> bytes:
        return bytes(pack([Parameter(size, kind)], [value], known)[0])  # type: ignore[call-overload, no-any-return]

    assert packed_address(8, "integer", Memory()) == struct.pack("<Q", 2**40)
    assert packed_address(8, "unknown", Memory()) == struct.pack("<Q", 2**40)
    assert packed_address(8, "integer", None) == bytes(8)
    for size, kind, what in (
        (8, "float", "a float"),
        (4, "integer", "4 bytes"),
        (8, "struct", "a struct"),
    ):
        for value in (Memory(), None):
            with pytest.raises(
                ConfigError, match=f"argument 1 is an address .* takes {what} there"
            ):
                packed_address(size, kind, value)  # type: ignore[arg-type]


class Interface:
    """An array of another library, as far as it is looked at."""

    def __init__(self, address: int, **more: object) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4,),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
            **more,
        }


def test_cuda_array_interface_gives_its_address() -> None:
    assert address_of(Interface(4096), 1, 0, None) == 4096
    assert address_of(Interface(4096, stream=None), 1, 0, None) == 4096
    assert address_of(Interface(0), 1, 0, None) == 0
    assert address_of(3, 1, 0, None) is None


def test_a_producer_that_refuses_is_named() -> None:
    class Tensor:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise RuntimeError("it needs a gradient")

    with pytest.raises(ConfigError, match="argument 2: the Tensor hides its memory: it needs a"):
        address_of(Tensor(), 2, 0, None)


def test_arrays_of_the_host_and_of_other_devices_are_refused() -> None:
    class Elsewhere:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 1

    with pytest.raises(ConfigError, match="argument 1: it is on device 1, the kernel on 0"):
        address_of(Elsewhere(), 1, 0, None)
    np = pytest.importorskip("numpy")
    with pytest.raises(ConfigError, match="argument 3: the ndarray is in host memory"):
        address_of(np.zeros(3), 3, 0, None)


# -- the configuration ---------------------------------------------------------------------------


def test_dimensions_are_filled_up() -> None:
    assert dimensions("grid", 7) == (7, 1, 1)
    assert dimensions("grid", (7, 2)) == (7, 2, 1)
    assert dimensions("block", [1, 2, 3]) == (1, 2, 3)
    assert dimensions("grid", 2**31 - 1) == (2**31 - 1, 1, 1)
    np = pytest.importorskip("numpy")
    assert dimensions("grid", (np.int64(7), 2)) == (7, 2, 1)


@pytest.mark.parametrize(
    "value",
    [0, -1, (), (1, 0), (1, 1, 1, 1), 1.0, "1", None, True, (1, True), 2**31, (1, 65536), (1, 1, 65536)],
)  # fmt: skip
def test_other_dimensions_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"grid=.* is not allowed; allowed: 1 to 3 integers"):
        dimensions("grid", value)


def test_a_block_has_limits_of_its_own() -> None:
    for value in (1025, (1, 1025), (1, 1, 65)):
        with pytest.raises(ConfigError, match="block=.*1024 x 1024 x 64"):
            dimensions("block", value)


def test_shared_memory_is_bounded() -> None:
    assert shared_bytes(0, 100) == 0
    assert shared_bytes(100, 100) == 100
    for value in (-1, 101, 1.0, "1", None, True):
        with pytest.raises(ConfigError, match=r"shared_memory=.*allowed.*: 0 to 100 bytes"):
            shared_bytes(value, 100)
