"""What `torch.save` writes: a zip file with a pickle, and beside it the bytes of each storage.

The pickle is read by the table below; a tensor stays in the file until it is needed.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, final

import torch

from zero_strategy.checkpoint.foreign.parts import Part
from zero_strategy.checkpoint.foreign.tensors import FileTensor
from zero_strategy.checkpoint.foreign.unpickle import Dict, Maker, Table, load, record, refuse

# Far more than what describes a model takes, and small enough to be read at once.
_MOST_PICKLE_BYTES = 1 << 30
_LOCAL_HEADER_BYTES = 30

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, *more: Any
) -> FileTensor:
    if any(more):
        refuse("has a tensor with a conjugate or negative bit")
    return _view(storage, offset, shape, stride)


def _untyped_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> FileTensor:
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        refuse("has a tensor without storage or dtype")
    return _view(_Storage(storage.part, dtype), offset, shape, stride)


def _view(storage: Any, offset: Any, shape: Any, stride: Any) -> FileTensor:
    if not isinstance(storage, _Storage):
        refuse("has a tensor without storage")
    return FileTensor(storage.part, storage.dtype, _size(shape), offset, _size(stride))


def _size(numbers: Any = ()) -> tuple[int, ...]:
    if not isinstance(numbers, tuple | list):
        refuse("has a size that is no list of numbers")
    return tuple(numbers)


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


def _subclassed(make: Any, _kind: Any, args: Any, _state: Any) -> Any:
    """A tensor with attributes, such as DeepSpeed leaves on its own; they are left out."""
    if not isinstance(make, Maker) or not isinstance(args, tuple):
        refuse("has a tensor that is not made as torch makes them")
    return make(*args)


def _path(*steps: Any) -> str:
    return str(PurePosixPath(*map(str, steps)))


def _latin1(text: Any, encoding: Any = "latin1") -> bytes:
    """How pickles of protocol 2 hold bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        refuse(f"encodes bytes as {encoding!r}")
    return text.encode("latin1")


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


_OMEGACONF = {
    ("omegaconf.dictconfig", "DictConfig"),
    ("omegaconf.listconfig", "ListConfig"),
    ("omegaconf.base", "ContainerMetadata"),
    ("omegaconf.base", "Metadata"),
    *(
        ("omegaconf.nodes", f"{kind}Node")
        for kind in ("Any", "Integer", "Float", "Boolean", "String", "Bytes", "Path")
    ),
}
_PLAIN_TYPES = {
    **{kind: Maker(kind) for kind in (set, frozenset, complex)},
    **{kind: record(kind.__name__) for kind in (dict, list, tuple, int, float, str, bool, bytes)},
}

TABLE: Table = {
    ("torch._utils", "_rebuild_tensor_v2"): Maker(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Maker(_untyped_tensor),
    ("torch._utils", "_rebuild_parameter"): Maker(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Maker(_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): Maker(_subclassed),
    ("torch", "Tensor"): record("Tensor"),
    ("torch.nn.parameter", "Parameter"): record("Parameter"),
    ("torch", "Size"): Maker(_size),
    ("torch", "device"): Maker(lambda *words: ":".join(map(str, words))),
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    **{("torch", name): dtype for name, dtype in vars(torch).items() if _is_dtype(dtype)},
    ("collections", "OrderedDict"): Dict,
    ("collections", "defaultdict"): Maker(lambda *_: Dict()),
    ("_codecs", "encode"): Maker(_latin1),
    **{
        (module, kind): Maker(_path)
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
    **{(module, name): record(name) for module, name in _OMEGACONF},
    ("typing", "Any"): record("Any"),
    **{
        (module, kind.__name__): made
        for module in ("builtins", "__builtin__")
        for kind, made in _PLAIN_TYPES.items()
    },
    # Of Python 2, as pickles of its protocol name them.
    ("__builtin__", "long"): record("long"),
    ("__builtin__", "unicode"): record("unicode"),
}


@final
class _Storage:
    """Bytes that tensors are views of, and the dtype that they are of."""

    __slots__ = ("dtype", "part")

    def __init__(self, part: Part, dtype: torch.dtype) -> None:
        self.part, self.dtype = part, dtype


def read(part: Part, *, more: Table | None = None, unsafe: bool = False) -> Any:
    """Read what was saved.

    Args:
        part: the file, or where in a file it lies.
        more: what the pickle may refer to beside `TABLE`.
        unsafe: whatever the pickle refers to is imported and called.

    Returns: containers, scalars, records, and tensors as `FileTensor`.

    Raises:
        RefusedError: it is no such file, refers to something else, or points outside itself.
    """
    with part.open() as file:
        records = _records(part, file)
        name = next((name for name in records if name.endswith("/data.pkl")), None)
        if name is None:
            refuse("is a zip file without data.pkl, must be written by torch.save")
        prefix = name.removesuffix("data.pkl")
        data = records[name]
        if data.length > _MOST_PICKLE_BYTES:
            refuse(f"has a pickle of {data.length} bytes")
        order = records.get(f"{prefix}byteorder")
        if order is not None and order.length < 16 and order.read() != b"little":
            refuse("has numbers of the other byte order")

    def storage(pid: Any) -> _Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            refuse(f"refers to {pid!r:.60}, which is no storage")
        _, dtype, key, _, numel = pid
        there = records.get(f"{prefix}data/{key}")
        if not isinstance(dtype, torch.dtype) or type(numel) is not int or there is None:
            refuse(f"refers to storage {key!r:.60}, which is missing")
        return _Storage(there.slice(0, numel * dtype.itemsize), dtype)

    return load(data.read(), {**TABLE, **(more or {})}, persistent=storage, unsafe=unsafe)


def _records(part: Part, file: io.BufferedReader) -> Mapping[str, Part]:
    """Return where each file in the zip file lies; as torch writes them, none is compressed."""
    try:
        entries = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        refuse(f"is no whole zip file as torch.save writes it ({error})")
    found = {}
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            refuse(f"has {entry.filename!r:.60} compressed or encrypted")
        header = part.slice(entry.header_offset, _LOCAL_HEADER_BYTES).read()
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        begin = entry.header_offset + _LOCAL_HEADER_BYTES + names
        found[entry.filename] = part.slice(begin, entry.file_size)
    return found
