"""Errors for files with damaged content: truncated, or with bytes changed by a disk or a download."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DamagedFileError(ValueError):
    """A compressed or columnar file that cannot be read to its end. `reason`: message of the library.

    `hint`: an alternative to a new file that the command offers, appended to the message.
    """

    def __init__(self, path: Path, reason: str, hint: str = "") -> None:
        super().__init__(path, reason, hint)
        self.path, self.reason, self.hint = path, reason, hint

    def __str__(self) -> str:
        return (
            f"{self.path}: got damaged content ({self.reason}), expected an intact file. Write or download "
            f"it again{self.hint}."
        )


@contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Convert exceptions that libraries raise for damaged content to DamagedFileError.

    An error of the operating system (no permission, a failing disk) is not damage: it stays an OSError, with
    the file name added.
    """
    try:
        yield
    except OSError as error:
        # pyarrow and gzip raise OSError without an errno for bad content. An errno comes from the system:
        # reporting a failing disk as damage would let --on-error skip drop intact files.
        if error.errno is not None and not isinstance(error, gzip.BadGzipFile):
            if error.filename is None:
                error.filename = str(path)
            raise
        raise _make_damage_error(path, error) from error
    except MemoryError as error:  # may be a damaged size field or a large row; it does not prove damage
        raise ValueError(f"{path}: out of memory for its content. Write it with smaller rows.") from error
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise _make_damage_error(path, error) from error
    except Exception as error:
        if not type(error).__module__.startswith(
            "pyarrow"
        ):  # compared by name: pyarrow is not imported for plain files
            raise
        raise _make_damage_error(path, error) from error


def _make_damage_error(path: Path, error: BaseException) -> DamagedFileError:
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return DamagedFileError(path, lines[0][:200])
