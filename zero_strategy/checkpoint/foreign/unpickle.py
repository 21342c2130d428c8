"""Pickles of other programs, read by a table of what they may refer to.

A pickle is a program: it names functions and calls them. Here each name is looked up in a table
and nowhere else, and what stands there is inert: a record that keeps its arguments, or a function
of ours that checks them. No module is imported and no class of another program ever made.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, final

from typing_extensions import override

_OPCODES = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "POP", "POP_MARK"),
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING"),
        *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS", "FROZENSET"),
        *("BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "BINPERSID"),
        *("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"),
    )
)
"""What picklers of protocol 2 and later write, without what calls or imports in other ways."""


class RefusedError(ValueError):
    """A file of another program holds what is not read."""


def refuse(what: str) -> NoReturn:
    """Raise with the reason; whoever opened the file adds its path."""
    raise RefusedError(what)


class _Sealed(type):
    """A class whose attributes no pickle can set."""

    def __setattr__(cls, name: str, value: Any) -> None:
        refuse(f"sets {name!r} of a class")


class Record(metaclass=_Sealed):
    """Stands for an object of another program: what it was made from, and no behaviour.

    Attributes:
        args: of its constructor.
        state: what it was then given, as `__setstate__` or its attributes would have been.
    """

    __slots__ = ("args", "state")

    def __new__(cls, *args: Any) -> Record:
        """Take whatever the object was made from."""
        record = super().__new__(cls)
        object.__setattr__(record, "args", args)
        object.__setattr__(record, "state", None)
        return record

    def __setstate__(self, state: Any) -> None:
        object.__setattr__(self, "state", state)

    def __setattr__(self, name: str, value: Any) -> None:
        refuse(f"sets {name!r} of a record")

    def field(self, name: str) -> Any:
        """Return an attribute that the object had, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def record(name: str) -> type[Record]:
    """Return a class of records that stands for a class of that name."""
    return _Sealed(name, (Record,), {"__slots__": ()})


@final
class Dict(dict[Any, Any]):
    """Stands for the dictionaries of `collections`; attributes that one had are left out."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


@final
class Maker:
    """A function of the table, which a pickle may call and not change.

    Args:
        make: checks its arguments.
    """

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        """Return what the function makes."""
        return self._make(*args)

    def __setstate__(self, state: Any) -> None:
        refuse("changes a function")


Table = Mapping[tuple[str, str], Any]
"""(module, name) -> what stands for it."""


def load(
    data: bytes,
    table: Table,
    *,
    persistent: Callable[[Any], Any] | None = None,
    unsafe: bool = False,
) -> Any:
    """Read a pickle.

    Args:
        data: all of it.
        table: all that it may refer to.
        persistent: makes what a persistent id stands for; without it there must be none.
        unsafe: what the table does not hold is imported and called.

    Raises:
        RefusedError: it refers to something else, names it; or it is damaged.
    """
    if not unsafe:
        _scan(data, table)
    unpickler = _Unpickler(data, table, persistent, unsafe=unsafe)
    try:
        return unpickler.load()
    except RefusedError:
        raise
    except Exception as error:
        # Whatever a crafted stack makes the virtual machine trip over; of code, the user's.
        raise RefusedError(f"is no whole pickle ({type(error).__name__}: {error})") from error


@final
class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        table: Table,
        persistent: Callable[[Any], Any] | None,
        *,
        unsafe: bool,
    ) -> None:
        # The table has the names as they are written, also those of Python 2.
        super().__init__(io.BytesIO(data), fix_imports=unsafe, encoding="latin1")
        self._table, self._persistent, self._unsafe = table, persistent, unsafe

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        key = (module_name, global_name)
        if key in self._table:
            return self._table[key]
        if self._unsafe:
            return super().find_class(module_name, global_name)
        return _refuse_global(module_name, global_name)

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        if self._persistent is None:
            refuse("refers to an object outside the pickle")
        return self._persistent(pid)


def _refuse_global(module: str, name: str) -> NoReturn:
    refuse(
        f"refers to {module}.{name}, must hold plain data and tensors. If you trust the file as "
        "you trust a program, use --unsafe-pickle"
    )


def _scan(data: bytes, table: Table) -> None:
    """Refuse what is known to be wrong before anything of it is carried out.

    The virtual machine takes memory for the place it is told to remember an object at, and for
    bytes that are not there; both are in the opcodes.
    """
    count = 0
    try:
        for opcode, argument, _ in pickletools.genops(data):
            count += 1
            if opcode.name in ("GLOBAL", "INST"):
                module, _, name = str(argument).partition(" ")
                if (module, name) not in table:
                    _refuse_global(module, name)
            if opcode.name not in _OPCODES:
                named = "" if argument is None else f" {argument!r}"
                refuse(f"has the opcode {opcode.name}{named}, which plain data does not need")
            if opcode.name == "LONG_BINPUT" and int(argument or 0) > count:
                refuse(f"remembers an object at place {argument}, of {count}")
    except RefusedError:
        raise
    except Exception as error:
        # genops raises many kinds for what is cut or no pickle.
        raise RefusedError(f"is no whole pickle ({error})") from error
