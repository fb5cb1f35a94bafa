"""Reading and writing JSON files that may come from anywhere.

Sizes and depths are limited before anything is parsed; NaN, infinities, duplicate keys, unknown
fields and wrong types are refused with their place; writing is all or nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gzip
import hashlib
import io
import json
import os
import re
import stat
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from pardnn.errors import FileError, MismatchError, shown
from pardnn.json_keys import has_plain_keys, may_be_large, nested_depth
from pardnn.pipes import content_of, opened, write_through

MAX_BYTES = 1 << 30  #: A graph of a million ops takes about a quarter of this.
#: What a packed file may unpack to: graphs take 17 to 21 times their packed size. A small file is
#: small in memory too, where an element takes up to 40 times its bytes in the file.
MAX_RATIO, SMALL_BYTES = 100, 4 << 20
#: Of one file: a graph of the largest size has 25 bytes to an element.
MAX_ELEMENTS = 50_000_000
MAX_DEPTH = 64
MAX_ERRORS = 1000
MAX_DIGITS = 40
LARGE_BYTES = 1 << 20  #: From here on numpy looks for what is no strict JSON.
#: How the names of files begin that are being written.
TEMPORARY = ".pardnn-"
#: No file this young is taken for abandoned: its process may not have locked it so far, seconds.
ABANDONED_S = 60.0
#: File systems that cannot sync a folder, and folders that can be written but not read.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)

T = TypeVar("T")


def read_bytes(path: str | Path) -> bytes:
    """Return a file's content, unpacked if the name ends in `.gz`, of at most `MAX_BYTES`.

    Raises:
        FileError: E403 (it cannot be read), E404 (it is too large).
    """
    path = Path(path)
    try:
        with opened(path) as raw:
            found, stream = os.fstat(raw.fileno()), raw
            # A device may have no end: /dev/zero would take two gigabytes.
            size, limit = found.st_size, SMALL_BYTES if stat.S_ISCHR(found.st_mode) else MAX_BYTES
            if path.suffix == ".gz":
                limit = min(limit, SMALL_BYTES + MAX_RATIO * size)
                stream = gzip.GzipFile(fileobj=raw)
            content = b"" if size > limit else content_of(stream, limit)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise FileError(f"cannot read {_reason(path, error)}", code="E403") from error
    if size > limit or len(content) > limit:
        more = ".\nUnpack it first: gunzip." if SMALL_BYTES < limit < MAX_BYTES else ""
        raise FileError(f"{shown(str(path))} holds more than {limit} bytes{more}", code="E404")
    return content


def _reason(path: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{shown(str(path))}: {error.strerror} (errno {error.errno})"
    return f"{shown(str(path))}: {error}"


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file by renaming a complete temporary one: the old file stays until then.

    Raises:
        FileError: E405, with path and reason; the old file is as it was.
    """
    path = Path(path)
    if path.suffix == ".gz":
        content = _packed(content)
    try:
        if path.exists() and not path.is_file():
            write_through(path, content)  # a pipe or /dev/null must not become a plain file
        else:
            _replace(path, content)
    except (OSError, ValueError) as error:
        raise FileError(f"cannot write {_reason(path, error)}", code="E405") from error


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, if they are not there.

    Raises:
        FileError: E405, with the path and the system's reason.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise FileError(f"cannot make the folder {_reason(path, error)}", code="E405") from error


def check_writable(path: str | Path) -> None:
    """Check that `write_bytes` could write a file, before the work for it is done.

    A temporary file is made beside it and removed; the file itself is not touched.

    Raises:
        FileError: E405, with the path and the system's reason.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not path.exists() or path.is_file():
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY)
            os.close(handle)
            Path(name).unlink()
    except (OSError, ValueError) as error:
        raise FileError(f"cannot write {_reason(path, error)}", code="E405") from error


def _packed(content: bytes) -> bytes:
    packed = io.BytesIO()
    # No time and no name: the same content gives the same bytes.
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as stream:
        stream.write(content)
    return packed.getvalue()


def _replace(path: Path, content: bytes) -> None:
    _remove_abandoned(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=TEMPORARY)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            with contextlib.suppress(OSError):  # no locks on this file system
                fcntl.flock(stream, fcntl.LOCK_EX)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)
            rename(temporary, path)
    except BaseException:  # Ctrl-C too: no partial file stays
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def rename(temporary: Path, path: Path) -> None:
    """Give a complete file or folder its name, and wait until that is durable.

    Args:
        temporary: In the same folder, its content synced.
        path: Its name. A file that has it is replaced, and its mode is kept.

    Raises:
        OSError: With the system's reason; EINVAL, where a device or a pipe has the name, which
            the file would replace.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            temporary.chmod(stat.S_IMODE(mode))
        elif not stat.S_ISDIR(mode):
            raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, not a regular file")
    temporary.replace(path)
    try:
        sync_directory(path.parent)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def sync_directory(path: Path) -> None:
    """Wait until the entries of a directory are durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    """Remove what this user's processes left in a folder that were killed while they wrote."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            is_old = time.time() - found.st_mtime > ABANDONED_S
            if found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode) and is_old:
                with path.open("rb") as stream:
                    # Its process holds the lock as long as it lives.
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        # `add` returns None, so the first key that was there already is found.
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {shown(twice)} appears twice in one object")
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


def parse_json(content: bytes, what: str) -> Any:
    """Parse strict JSON.

    Raises:
        FileError: E406, naming `what` and the reason.
    """
    try:
        if content.count(b"[") + content.count(b"{") > MAX_DEPTH < nested_depth(content):
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        if content.count(b",") > MAX_ELEMENTS:
            raise ValueError(f"it has more than {MAX_ELEMENTS} elements")
        is_large = may_be_large(content, MAX_DIGITS)
        return json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_int=_integer if is_large else None,
            parse_float=_finite if is_large else None,
        )
    except (ValueError, RecursionError) as error:
        raise FileError(f"{what} is not valid JSON: {error}", code="E406") from error


def parse_as(kind: type[T], content: bytes, what: str, *, is_ours: bool = False) -> T:
    """Parse strict JSON into the dataclass `kind`, whose field `format` is its name and version.

    Args:
        kind: The dataclass.
        content: Of the file.
        what: Names it in errors.
        is_ours: Whether `dump_json` wrote it, as a checksum proves, which writes no key twice.

    Raises:
        FileError: E406 (not JSON) or E407 (wrong field, with its path such as `$.ops[3].memory`).
        MismatchError: E502, if the file has another version of the format.
    """
    is_plain = _is_plain(kind, content, is_ours=is_ours)
    if not is_plain:
        _check_format(kind, parse_json(content, what), what)
    try:  # pydantic reads JSON itself: only there, a list is a tuple and "1" is not 1
        return _adapter(kind).validate_json(content)
    except ValidationError as error:
        if is_plain:
            parse_json(content, what)  # which tells better what is no JSON
        if error.error_count() > MAX_ERRORS:  # each one told takes a kilobyte
            reason = f"{what}: {error.error_count()} values have the wrong type"
            raise FileError(reason, code="E407", details={"path": "$"}) from None
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = "$" + "".join(_step(part) for part in first["loc"])
        if place == "$.checksum":
            raise damaged(what) from None
        raise FileError(
            f"{what}: {place}: {first['msg']}", code="E407", details={"path": place}
        ) from error


def _is_plain(kind: type, content: bytes, *, is_ours: bool) -> bool:
    """Whether all that `parse_json` and `_check_format` refuse of valid JSON is surely not there.

    Of large files as `dump_json` writes them; to parse one twice takes twice the time.
    """
    return (
        len(content) >= LARGE_BYTES
        and content.startswith(f'{{"format": "{getattr(kind, "format", "")}",'.encode())
        and content.count(b",") <= MAX_ELEMENTS
        and not may_be_large(content, MAX_DIGITS)
        and (is_ours or has_plain_keys(content, MAX_DEPTH))
    )


@functools.cache
def _adapter(kind: type[T]) -> Any:
    return SchemaValidator(_fail_fast(TypeAdapter(kind).core_schema))


def _fail_fast(schema: Any) -> Any:
    """Return a schema whose lists stop at their first error; objects are as small as their keys."""
    if isinstance(schema, dict):
        found = {key: _fail_fast(value) for key, value in schema.items()}
        return found | {"fail_fast": True} if found.get("type") in ("list", "tuple") else found
    return [_fail_fast(item) for item in schema] if isinstance(schema, list) else schema


_CHECKSUM = re.compile(rb',\n "checksum": "([0-9a-f]{64})"\}\n\Z')


def with_checksum(content: bytes) -> bytes:
    """Return the content of a file, from `dump_json`, with SHA-256 of itself as its last field."""
    digest = hashlib.sha256(content).hexdigest()
    return content.removesuffix(b"}\n") + f',\n "checksum": "{digest}"}}\n'.encode()


def parse_summed(kind: type[T], content: bytes, what: str) -> T:
    """Parse as `parse_as` what `without_checksum` leaves, with the errors of both."""
    bare = without_checksum(content, what, kind)
    return parse_as(kind, bare, what, is_ours=bare is not content)


def without_checksum(content: bytes, what: str, kind: type | None = None) -> bytes:
    """Return the content of a file without the field that `with_checksum` adds, if it is there.

    A file written by hand has none. One that was edited, or laid out again, must lose it.

    Raises:
        FileError: E408, if the content is another than what was written; of a file of another
            `kind` what `parse_as` says.
    """
    found = _CHECKSUM.search(content, max(0, len(content) - 100))
    if found is None:
        return content
    content = content[: found.start()] + b"}\n"
    if hashlib.sha256(content).hexdigest().encode() != found[1]:
        head = re.match(rb'\{"format": "([ -~]{1,40}?)"', content)
        if kind is not None and head is not None:
            _check_format(kind, {"format": head[1].decode()}, what)
        raise damaged(what)
    return content


def damaged(what: str) -> FileError:
    """Return the error for a file whose checksum is not that of its content."""
    return FileError(
        f"{what} is damaged: its content does not match its checksum.\nIf it was edited or "
        "reformatted on purpose, delete the field `checksum`.",
        code="E408",
    )


def _step(part: int | str) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if part.isidentifier() else f"[{shown(part)}]"


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
    encode = json.JSONEncoder(allow_nan=False).encode
    if not isinstance(data, dict):
        return encode(data).encode()
    lines: list[str] = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            body = ",\n  ".join(encode(item) for item in value)
            lines.append(f"{encode(key)}: [\n  {body}\n]")
        else:
            lines.append(f"{encode(key)}: {encode(value)}")
    return ("{" + ",\n ".join(lines) + "}\n").encode()
