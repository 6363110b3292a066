"""Where the encoder's input comes from: files, folders, standard input, HTTP and fsspec URLs.

The input is the whole memory of the users it names, so what is absent from it gets deleted. Nothing
that may have been cut short is therefore handed on: a download must be as long as announced, or
end as gzip ends. Messages name a URL without its credentials and query.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

import httpx

from inferscale_runtime.errors import ConfigError, InputError, SourceError

STDIN = "-"
_HTTP = ("http://", "https://")
_GZIP = b"\x1f\x8b"
_CHUNK = 1 << 20
_SPOOL_BYTES = 64 << 20  # arbitrary: what is larger goes to a temporary file
_ATTEMPTS = 4
_SUFFIXES = (".jsonl", ".jsonl.gz")


def is_http(name: str) -> bool:
    """Whether an input is fetched by HTTP."""
    return name.lower().startswith(_HTTP)


def shown(name: str) -> str:
    """Name of an input for messages: without credentials, query and fragment."""
    if name == STDIN:
        return "<stdin>"
    if "://" not in name:
        return name
    parts = urlsplit(name)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def read_authorization(path: str) -> str:
    """Value of the HTTP ``Authorization`` header.

    Raises:
        ConfigError: Naming the file, never what is in it.
    """
    try:
        value = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"--input-authorization-file '{path}': {reason}") from None
    if not value or not value.isascii() or not value.isprintable():
        raise ConfigError(
            f"--input-authorization-file '{path}': it must hold one line of printable ASCII, for "
            "example Bearer TOKEN"
        )
    return value


def expand(names: Sequence[str]) -> list[str]:
    """Replaces folders by their files, in name order.

    A mounted ConfigMap is such a folder: its keys are links into a hidden folder, which is passed
    over as everything is whose name begins with a dot.

    Raises:
        InputError: When a folder holds no input file.
    """
    result: list[str] = []
    for name in names:
        folder = Path(name)
        if name == STDIN or "://" in name or not folder.is_dir():
            result.append(name)
            continue
        try:
            files = sorted(
                path
                for path in folder.iterdir()
                if path.name.endswith(_SUFFIXES) and path.name[0] != "." and path.is_file()
            )
        except OSError as error:
            problem = f"cannot be listed: {error.strerror}"
            raise InputError(name, 0, "", problem, "Check its permissions") from None
        if not files:
            fix = "Put them there or name another folder"
            raise InputError(name, 0, "", "holds no *.jsonl or *.jsonl.gz files", fix)
        result += [str(path) for path in files]
    if result.count(STDIN) > 1:
        raise InputError("<stdin>", 0, "", "is named twice", "Name it once")
    return result


class ByteLimit:
    """Counts the bytes of all inputs together.

    Args:
        limit: ``encoding.max_input_bytes``.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    @property
    def left(self) -> int:
        """Bytes that may still come."""
        return self._left

    def spend(self, num_bytes: int, source: str) -> None:
        """Counts bytes.

        Raises:
            InputError: When there are too many.
        """
        self._left -= num_bytes
        if self._left < 0:
            raise too_large(source, self._limit)

    def check_download(self, num_bytes: int, source: str) -> None:
        """Refuses a download that is too large even packed."""
        if num_bytes > self._limit:
            raise too_large(source, self._limit)


def too_large(source: str, limit: int) -> InputError:
    """The error of an input that is over the limit."""
    return InputError(
        source,
        0,
        "",
        f"makes the input larger than {limit} bytes",
        "Raise encoding.max_input_bytes or split the users over several jobs",
    )


def read_lines(stream: IO[bytes], source: str, limit: ByteLimit) -> Iterator[bytes]:
    """Yields the lines of a stream, unpacked if it is gzip.

    Raises:
        InputError: When there is too much of it.
        SourceError: When it is damaged or cut short.
    """
    head = stream.read(2)
    rest: IO[bytes] = cast(IO[bytes], _Joined(head, stream))
    lines = gzip.GzipFile(fileobj=rest) if head == _GZIP else rest
    try:
        # Bounded: a packed file may hold one line of any length.
        while line := lines.readline(limit.left + 1):
            limit.spend(len(line), source)
            yield line
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise SourceError(
            f"{source}: it is cut short or damaged (gzip). Nothing was changed; write it again"
        ) from None


class _Joined:
    """A stream with its first bytes put back."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self._head, self._stream = head, stream

    def read(self, size: int = -1) -> bytes:
        head, self._head = self._head, b""
        if not head:
            return self._stream.read(size)
        if 0 <= size < len(head):
            head, self._head = head[:size], head[size:]
            return head
        return head + self._stream.read(size - len(head) if size >= 0 else -1)

    def readline(self, size: int = -1) -> bytes:
        head, self._head = self._head, b""
        if not head:
            return self._stream.readline(size)
        line, end, rest = head.partition(b"\n")
        if end:
            self._head = rest
            return line + end
        return head + self._stream.readline(size - len(head) if size >= 0 else -1)


@contextmanager
def open_source(
    name: str,
    authorization: str | None,
    limit: ByteLimit,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[IO[bytes]]:
    """Opens one input, complete.

    Args:
        name: File, ``-`` or URL.
        authorization: ``Authorization`` header of HTTP requests.
        limit: What all inputs may hold.
        sleep: Waits between attempts; tests replace it.

    Raises:
        InputError: It does not exist, or is refused.
        SourceError: It could not be fetched whole.
    """
    if name == STDIN:
        yield sys.stdin.buffer
    elif "://" not in name:
        try:
            stream = open(name, "rb")
        except OSError as error:
            problem = f"cannot be read: {error.strerror or type(error).__name__}"
            raise InputError(name, 0, "", problem, "Check the path and its permissions") from None
        with stream:
            yield stream
    else:
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
            target = cast(IO[bytes], spool)
            if is_http(name):
                _fetch_http(name, authorization, limit, target, sleep)
            else:
                _fetch_fsspec(name, limit, target)
            target.seek(0)
            yield target


def _fetch_http(
    url: str,
    authorization: str | None,
    limit: ByteLimit,
    target: IO[bytes],
    sleep: Callable[[float], None],
) -> None:
    # Not packed on the way: what arrives can be counted against what was announced.
    headers = {"Accept-Encoding": "identity"}
    if authorization:
        headers["Authorization"] = authorization
    timeout = httpx.Timeout(60.0, connect=10.0)
    problem = ""
    with httpx.Client(headers=headers, timeout=timeout, follow_redirects=True) as client:
        for attempt in range(_ATTEMPTS):
            if attempt:
                sleep(2.0 ** (attempt - 1))
            target.seek(0)
            target.truncate()
            try:
                with client.stream("GET", url) as response:
                    problem = _take_answer(response, shown(url), limit, target)
            except httpx.TransportError as error:
                problem = f"the connection failed ({type(error).__name__})"
            except (httpx.InvalidURL, httpx.TooManyRedirects) as error:
                problem = f"is not usable ({type(error).__name__})"
                raise InputError(shown(url), 0, "", problem, "Check the URL") from None
            if not problem:
                return
    raise SourceError(
        f"{shown(url)}: {problem}, after {_ATTEMPTS} attempts. Nothing was changed; check that the "
        "server is up and try again"
    )


def _take_answer(response: httpx.Response, source: str, limit: ByteLimit, target: IO[bytes]) -> str:
    """Stores the body; returns what is wrong if another attempt may help, else ``""``."""
    status = response.status_code
    if status == 429 or status >= 500:
        return f"HTTP {status}"
    if status != 200:
        fix = "Check the URL"
        if status in (401, 403):
            fix = "Check --input-authorization-file"
        raise InputError(source, 0, "", f"was refused with HTTP {status}", fix)
    announced = response.headers.get("content-length", "")
    total, head = 0, b""
    for chunk in response.iter_raw(_CHUNK):
        head = head or chunk[:2]
        total += len(chunk)
        limit.check_download(total, source)
        target.write(chunk)
    if announced.isascii() and announced.isdecimal() and int(announced) != total:
        return f"{total} of {announced} bytes arrived"
    if response.headers.get("content-encoding", "identity") not in ("identity", "gzip", "x-gzip"):
        raise InputError(source, 0, "", "has an unknown Content-Encoding", "Serve it plain or gzip")
    # The transport itself notices a missing end of a chunked body.
    ends = announced or "chunked" in response.headers.get("transfer-encoding", "").lower()
    if not ends and head != _GZIP:
        raise _unknown_length(source)
    return ""


def _unknown_length(source: str) -> InputError:
    return InputError(
        source,
        0,
        "",
        "does not say how long it is, so a part could be taken for the whole memory",
        "Serve it with Content-Length, or as gzip",
    )


def _fetch_fsspec(url: str, limit: ByteLimit, target: IO[bytes]) -> None:
    import fsspec

    source = shown(url)
    try:
        fs, path = fsspec.core.url_to_fs(url)
        size: Any = fs.info(path).get("size")
        if size is not None:
            limit.check_download(int(size), source)
        total, head = 0, b""
        with fs.open(path, "rb") as stream:
            while chunk := stream.read(_CHUNK):
                head = head or bytes(chunk[:2])
                total += len(chunk)
                limit.check_download(total, source)
                target.write(chunk)
    except InputError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"{source}: the package for this kind of URL is not installed ({error.name}); for "
            "s3:// pip install 'inferscale[s3]'"
        ) from None
    except (FileNotFoundError, IsADirectoryError, PermissionError, ValueError) as error:
        # Not the message: it may quote credentials of the URL.
        problem = f"cannot be read ({type(error).__name__})"
        raise InputError(source, 0, "", problem, "Check the URL and its permissions") from None
    except Exception as error:  # each storage has errors of its own
        raise SourceError(
            f"{source}: it cannot be fetched ({type(error).__name__}). Nothing was changed; check "
            "that the storage is up and try again"
        ) from None
    if size is None and head != _GZIP:
        raise _unknown_length(source)
    if size is not None and total != int(size):
        raise SourceError(
            f"{source}: {total} of {size} bytes arrived. Nothing was changed; try again"
        )
