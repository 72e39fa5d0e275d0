r"""`Journal`: the results of the costly functions of one fit, in a file that survives the process.

The file is a sequence of entries: eight bytes with the length of a text, the text, numbers, and a SHA-256 of all. The
text is JSON: what a result is made of, and how each of its tensors lies in the numbers. The first entry says of which
fit they are, and is there as a whole or not at all; each later one is written at the end, once. A process that is
killed leaves the last of them unfinished, at most, and the next one that opens the file cuts that off.
"""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import torch
from torch import Tensor

from laplace_sampling.data.digest import digest
from laplace_sampling.files import explained, replace_file

__all__ = ["Journal", "Known", "rebuilt"]

Result = TypeVar("Result")

# The text of an entry, and its tensors.
Known = tuple[dict[str, Any], list[Tensor]]

_FORMAT = 2
_LENGTH, _CHECKSUM = 8, 32
# More than any text has: a length that is no length is not read.
_LONGEST = 2**26
# Seconds between two flushes to the disk. What a killed process has written stays in any case; of a computer that
# loses its power so much work is lost at most.
_FLUSHED = 5.0


class Journal:
    """Keeps results in a file, and gives those that were there when it was opened.

    Args:
        path: of the file.
        head: of which fit the results are, as JSON.
        products: counts of Jacobian products of the network, which are a part of each result.

    Attributes:
        head: as it was when the file was made.
        written: bytes that were written.

    Raises:
        OSError: if the file cannot be opened or written.
        ValueError: if it is damaged, or of something else.
    """

    def __init__(self, path: Path, head: dict[str, Any], products: dict[str, int]) -> None:
        self.path, self.products, self.written = path, products, 0
        if not path.exists():
            entry = _entry({"format": _FORMAT, "head": head}, [])
            replace_file(path, lambda opened: [opened.write(part) for part in entry], "checkpoint=")
            self.written = sum(map(len, entry))
        try:
            self._file: IO[bytes] = open(path, "r+b")  # noqa: SIM115
        except OSError as error:
            raise explained(error, f"`checkpoint=`: {path} cannot be opened: {error.strerror}.") from error
        try:
            self.head: dict[str, Any] = self._read_head()
            self._known = self._read_texts()
        except BaseException:
            self._file.close()
            raise
        self._calls: Counter[str] = Counter()
        self._flushed = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def delete(self) -> None:
        """Removes the file."""
        self.path.unlink(missing_ok=True)

    def result(self, name: str, arguments: Sequence[Any], compute: Callable[[], Result]) -> Result:
        """As of a `Recorder`: the next result of such a call that was in the file, or what is computed now."""
        key = self.key(name, arguments)
        found = self.known(key)
        if found is not None:
            return rebuilt(found, self.products)
        before = dict(self.products)
        value = compute()
        self.keep(key, value, before)
        return value

    def key(self, name: str, arguments: Sequence[Any]) -> str:
        """The key of the next such call."""
        key = _key(name, arguments)
        self._calls[key] += 1
        # Which of the same calls it is belongs to the key: a damaged entry must not move the others.
        return f"{key} {self._calls[key]}"

    def known(self, key: str) -> Known | None:
        """What is in the file of a call."""
        return self._read(self._known[key]) if key in self._known else None

    def keep(self, key: str, value: Any, before: Mapping[str, int]) -> None:
        """Writes the result of a call, before which the counts were these."""
        spent = {product: number - before.get(product, 0) for product, number in self.products.items()}
        tensors: list[Tensor] = []
        text = {"key": key, "products": spent, "result": _taken_apart(value, tensors)}
        self._append(_entry(text, tensors))

    def _append(self, entry: list[Any]) -> None:
        end = self._file.seek(0, os.SEEK_END)
        try:
            for part in entry:
                self.written += self._file.write(part)
            self._file.flush()
            if time.monotonic() - self._flushed > _FLUSHED:
                os.fsync(self._file.fileno())
                self._flushed = time.monotonic()
        except BaseException as error:
            # Half an entry would hide all that follow.
            os.ftruncate(self._file.fileno(), end)
            if isinstance(error, OSError):
                sentence = f"`checkpoint=`: {self.path} cannot be written: {error.strerror}. What is in it stays."
                raise explained(error, sentence) from error
            raise

    def _read_head(self) -> dict[str, Any]:
        found = self._read(0)
        if found is None or "head" not in found[0]:
            raise ValueError(
                f"`checkpoint=`: {self.path} is damaged, or no file of a fit. Give another path, or delete it if it is."
            )
        if found[0]["format"] != _FORMAT:
            raise ValueError(
                f"`checkpoint=`: {self.path} has format {found[0]['format']}, but this version has {_FORMAT}: fit with "
                "the version that wrote it, or delete it."
            )
        return found[0]["head"]

    def _read_texts(self) -> dict[str, int]:
        """Where the last entry of each key is; what follows the last whole one is cut off."""
        known: dict[str, int] = {}
        size, position = self._file.seek(0, os.SEEK_END), 0
        while (text := self._read_text(position)) is not None:
            end = self._file.tell() + text["bytes"] + _CHECKSUM
            if end > size:
                break
            if "key" in text:
                known[text["key"]] = position
            position = end
        self._file.truncate(position)
        return known

    def _read_text(self, position: int) -> dict[str, Any] | None:
        """The text of an entry; the file is then at its numbers. `None` where there is no text."""
        self._file.seek(position)
        length = int.from_bytes(self._file.read(_LENGTH), "little")
        try:
            text = json.loads(self._file.read(length)) if 0 < length < _LONGEST else None
        except ValueError:
            return None
        return text if isinstance(text, dict) and isinstance(text.get("bytes"), int) else None

    def _read(self, position: int) -> Known | None:
        """An entry, `None` if it is not as it was written."""
        text = self._read_text(position)
        if text is None:
            return None
        start = self._file.tell()
        self._file.seek(position)
        sha = hashlib.sha256(self._file.read(start - position))
        buffers = []
        for tensor in text.get("tensors", []):
            buffer = torch.empty(tensor["bytes"], dtype=torch.uint8)
            self._file.readinto(buffer.numpy().data)  # pyright: ignore[reportAttributeAccessIssue]
            sha.update(buffer.numpy().data)
            buffers.append(buffer)
        if sha.digest() != self._file.read(_CHECKSUM):
            return None
        return text, [_tensor_of(how, buffer) for how, buffer in zip(text.get("tensors", []), buffers, strict=True)]


def _entry(text: dict[str, Any], tensors: Sequence[Tensor]) -> list[Any]:
    """The parts of an entry: length, text, numbers and checksum."""
    parts = [_numbers(tensor) for tensor in tensors]
    how = [how for how, _ in parts]
    written = json.dumps({**text, "tensors": how, "bytes": sum(one["bytes"] for one in how)}).encode()
    entry = [len(written).to_bytes(_LENGTH, "little"), written, *(numbers for _, numbers in parts)]
    sha = hashlib.sha256()
    for part in entry:
        sha.update(part)
    return [*entry, sha.digest()]


def _numbers(tensor: Tensor) -> tuple[dict[str, Any], memoryview]:
    """How a tensor is made, and its numbers in the order in which they lie in memory.

    Products with a matrix and with its transpose are rounded differently: the order is a part of the result.
    """
    here = tensor.detach().cpu()
    order = sorted(range(here.dim()), key=lambda axis: here.stride(axis), reverse=True)
    flat = here.permute(order).contiguous().as_strided((here.numel(),), (1,)).view(torch.uint8)
    how = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": [here.shape[axis] for axis in order],
        "order": order,
        "device": str(tensor.device),
        "bytes": flat.numel(),
    }
    return how, flat.numpy().data


def _tensor_of(how: Mapping[str, Any], numbers: Tensor) -> Tensor:
    """The inverse of `_numbers`."""
    flat = numbers.view(getattr(torch, how["dtype"])) if how["bytes"] else torch.empty(0)
    inverse = sorted(range(len(how["order"])), key=how["order"].__getitem__)
    return flat.to(getattr(torch, how["dtype"])).view(how["shape"]).permute(inverse).to(how["device"])


def _taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    """A result as JSON, with the numbers of its tensors, which are added to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_taken_apart(part, tensors) for part in value]}
    return value


def rebuilt(known: Known, products: dict[str, int]) -> Any:
    """The result of a call, whose products are counted."""
    text, tensors = known
    for product, number in text["products"].items():
        products[product] += number
    return _rebuilt(text["result"], tensors)


def _rebuilt(how: Any, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `_taken_apart`."""
    if not isinstance(how, dict):
        return how
    [(kind, value)] = how.items()
    if kind == "tensor":
        return tensors[value]
    parts = [_rebuilt(part, tensors) for part in value]
    return tuple(parts) if kind == "tuple" else parts


def _key(name: str, arguments: Sequence[Any]) -> str:
    """A digest of a call. Objects that are no numbers count by their class: calls with the same key are in order."""
    sha = hashlib.sha256(name.encode())
    for part in _parts(arguments):
        sha.update(part)
    return sha.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield digest([("", value)])
    elif value is None or isinstance(value, bool | int | float | str):
        yield repr(value).encode() + b";"
    elif isinstance(value, tuple | list):
        yield f"{len(value)}:".encode()
        for part in value:
            yield from _parts(part)
    else:
        yield type(value).__name__.encode()
        # What is not frozen may change between two calls that are the same, as caches do.
        if isinstance(apart := getattr(value, "told_apart_by", None), Tensor):
            yield from _parts(apart)
        if is_dataclass(value) and type(value).__dataclass_params__.frozen:  # pyright: ignore[reportAttributeAccessIssue]
            for field in fields(value):
                if field.compare:
                    yield from _parts(getattr(value, field.name))
