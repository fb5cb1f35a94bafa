"""Reading and writing JSON files that may come from anywhere.

Sizes and depths are limited before anything is parsed; NaN, infinities, duplicate keys, unknown
fields and wrong types are refused with their place; writing is all or nothing.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import tempfile
import zlib
from pathlib import Path
from typing import Any, TypeVar

from pardnn.errors import FileError, MismatchError

MAX_BYTES = 4 << 30
MAX_DEPTH = 64
MAX_DIGITS = 40

T = TypeVar("T")


def read_bytes(path: str | Path) -> bytes:
    """Return a file's content, unpacked if the name ends in `.gz`, of at most `MAX_BYTES`."""
    path = Path(path)
    try:
        with path.open("rb") as raw:
            stream = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            content = stream.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(f"cannot read {str(path)!r}: {reason}", code="E403") from error
    if len(content) > MAX_BYTES:
        raise FileError(f"{str(path)!r} holds more than {MAX_BYTES} bytes", code="E404")
    return content


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file by renaming a complete temporary one: the old file stays until then."""
    path = Path(path)
    if path.suffix == ".gz":
        packed = io.BytesIO()
        # mtime=0: the same content gives the same bytes.
        with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream:
            stream.write(content)
        content = packed.getvalue()
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".pardnn-")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileError(
            f"cannot write {str(path)!r}: {reason} (errno {getattr(error, 'errno', None)})",
            code="E405",
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} appears twice in one object")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number of JSON")


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _depth(text: str) -> int:
    deepest = depth = 0
    # Strings first, so that their brackets do not count.
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', text):
        mark = match.group()
        if mark in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in "]}":
            depth -= 1
    return deepest


def parse_json(content: bytes, what: str) -> Any:
    """Parse strict JSON.

    Raises:
        FileError: E406, naming `what` and the reason.
    """
    try:
        text = content.decode("utf-8")
        if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        return json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise FileError(f"{what} is not valid JSON: {error}", code="E406") from error


def parse_as(kind: type[T], content: bytes, what: str) -> T:
    """Parse strict JSON into the dataclass `kind`, whose field `format` is its name and version.

    Raises:
        FileError: E406 (not JSON) or E407 (wrong field, with its path such as `$.ops[3].memory`).
        MismatchError: E502, if the file has another version of the format.
    """
    from pydantic import TypeAdapter, ValidationError  # 0.15 s to import

    data = parse_json(content, what)
    _check_format(kind, data, what)
    try:
        return TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = "$" + "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
        )
        raise FileError(
            f"{what}: {place}: {first['msg']}", code="E407", details={"path": place}
        ) from error


def _check_format(kind: type, data: Any, what: str) -> None:
    expected: str = kind.format  # pyright: ignore[reportAttributeAccessIssue]
    found = data.get("format") if isinstance(data, dict) else None
    if found == expected:
        return
    if isinstance(found, str) and found.split("/")[0] == expected.split("/")[0]:
        raise MismatchError(
            f"{what} has format {found!r}; this version of pardnn reads {expected!r}.\n"
            "Write it again with this version.",
            code="E502",
        )
    raise FileError(
        f"{what}: $.format: is {found!r:.80}, expected {expected!r}",
        code="E407",
        details={"path": "$.format"},
    )


def dump_json(data: Any) -> bytes:
    """Serialise with one line per element of each top-level list; no NaN, no infinities."""
    if not isinstance(data, dict):
        return json.dumps(data, allow_nan=False).encode()
    lines: list[str] = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            body = ",\n  ".join(json.dumps(item, allow_nan=False) for item in value)
            lines.append(f"{json.dumps(key)}: [\n  {body}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    return ("{" + ",\n ".join(lines) + "}\n").encode()
