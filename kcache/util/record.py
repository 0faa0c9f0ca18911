"""Record: a frozen value with named fields, which the functions of `dataclasses` accept.

Importing `dataclasses` takes 15 ms, because it needs `inspect`. That is as long as everything else
in a cache hit of a fresh process (docs/explanation/decisions.md, 8). So the values on that path are
Records. `dataclasses` is imported only when somebody calls `fields`, `asdict` or `replace` on one.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, dataclass_transform

if TYPE_CHECKING:
    from dataclasses import Field
    from inspect import Signature
    from typing import Self

__all__ = ["Record"]


class _DataclassFields:
    """`__dataclass_fields__` of a Record, made when it is first asked for."""

    def __get__(self, instance: object, owner: type[Record]) -> dict[str, Field[Any]]:
        import dataclasses
        from functools import partial

        specs = [
            # A factory: `dataclass` refuses unhashable defaults, even immutable ones.
            (name, Any, dataclasses.field(default_factory=partial(getattr, owner, name)))
            if name in owner._defaults
            else (name, Any, dataclasses.field())
            for name in owner._names
        ]
        made = dataclasses.make_dataclass(owner.__name__, specs)
        return {field.name: field for field in dataclasses.fields(made)}


class _FieldSignature:
    """`__signature__` of a Record: its fields, for `inspect.signature`, `help` and tooltips.

    It is made at each request, so it costs an import nothing.
    """

    def __get__(self, instance: object, owner: type[Record]) -> Signature:
        from inspect import Parameter, Signature

        annotations = _annotations(owner)
        return Signature(
            [
                Parameter(
                    name,
                    Parameter.POSITIONAL_OR_KEYWORD,
                    default=owner._defaults.get(name, Parameter.empty),
                    annotation=annotations[name],
                )
                for name in owner._names
            ],
            return_annotation=None,
        )


def _annotations(owner: type[Record]) -> dict[str, Any]:
    """Return the type of each field; its source text if only a type checker can read it."""
    import sys

    module = vars(sys.modules[owner.__module__])
    found: dict[str, Any] = {}
    texts = owner.__dict__["__annotations__"]  # noqa: RUF063  what `__init_subclass__` read
    for name in owner._names:
        text = texts[name]
        try:
            found[name] = eval(text, module)  # as `typing.get_type_hints` does, but one at a time
        except NameError:
            found[name] = text
    return found


@dataclass_transform(frozen_default=True)
class Record:
    """Base of frozen values: annotate the fields in a subclass, as for a frozen dataclass.

    Two records are equal if they are of one class and their fields are equal. A subclass may define
    `__post_init__`, which brings fields into canonical form through `_put`.
    """

    _names: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}
    if not TYPE_CHECKING:
        __dataclass_fields__ = _DataclassFields()
        __signature__ = _FieldSignature()

    def __init_subclass__(cls) -> None:
        own = cls.__dict__.get("__annotations__", {})  # noqa: RUF063  inspect is what this avoids
        cls._names = tuple(name for name in own if not name.startswith("_"))
        cls._defaults = {name: getattr(cls, name) for name in cls._names if hasattr(cls, name)}

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  typed by the fields
        names = self._names
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes at most {len(names)} arguments")
        values = {**self._defaults, **dict(zip(names, args, strict=False))}
        for name, value in kwargs.items():
            if name not in names or names.index(name) < len(args):
                from kcache.util.nearest import did_you_mean

                more = did_you_mean(name, names) if name not in names else ""
                raise TypeError(f"{type(self).__name__}: unexpected argument {name!r}{more}")
            values[name] = value
        if len(values) < len(names):
            missing = ", ".join(name for name in names if name not in values)
            raise TypeError(f"{type(self).__name__}: missing {missing}")
        self.__dict__.update(values)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the fields; nothing to do unless a subclass says so."""

    def _put(self, name: str, value: object) -> None:
        """Set a field, from `__post_init__` only."""
        self.__dict__[name] = value

    def _values(self) -> tuple[Any, ...]:
        own = self.__dict__
        return tuple(own[name] for name in self._names)

    def replace(self, **changes: Any) -> Self:  # noqa: ANN401  any field's type
        """Return a copy with the given fields changed.

        Raises:
            TypeError: there is no such field.
        """
        return type(self)(**{**dict(zip(self._names, self._values(), strict=True)), **changes})

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self is other or self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __reduce__(self) -> tuple[Any, ...]:
        """Make it again from its fields, also in another process, since all else is derived."""
        values = self._values()
        proxies = tuple(isinstance(value, MappingProxyType) for value in values)
        plain = tuple(
            dict(value) if proxy else value for value, proxy in zip(values, proxies, strict=True)
        )
        return _restored, (type(self), plain, proxies)

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self._names)
        return f"{type(self).__name__}({', '.join(shown)})"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        self._frozen(name)

    def __delattr__(self, name: str) -> NoReturn:
        self._frozen(name)

    def _frozen(self, name: str) -> NoReturn:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot change field {name!r} of {type(self).__name__}")


def _restored(kind: type[Record], values: tuple[Any, ...], proxies: tuple[bool, ...]) -> Record:
    """Return the record for what `Record.__reduce__` returned; a mapping proxy can't be pickled."""
    pairs = zip(values, proxies, strict=True)
    return kind(*(MappingProxyType(value) if proxy else value for value, proxy in pairs))
