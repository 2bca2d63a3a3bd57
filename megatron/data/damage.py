"""Files whose content is damaged: cut off, or with bytes that a disk or a download has changed."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DamagedFileError(ValueError):
    """A packed file or a file of columns that cannot be read to its end; `reason` of its library.

    `hint` is what a command offers beside a whole file.
    """

    def __init__(self, path: Path, reason: str, hint: str = "") -> None:
        super().__init__(path, reason, hint)
        self.path, self.reason, self.hint = path, reason, hint

    def __str__(self) -> str:
        return (
            f"{self.path}: got damaged content ({self.reason}), expected a whole file. Write or download "
            f"it again{self.hint}."
        )


@contextmanager
def name_damage(path: Path) -> Iterator[None]:
    """Raise DamagedFileError for what the libraries raise of damaged content.

    An error of the operating system (no permission, a failing disk) is no damage: it names the file and stays
    an OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and not isinstance(error, gzip.BadGzipFile):
            if error.filename is None:
                error.filename = str(path)
            raise
        raise _damage(path, error) from error
    except MemoryError as error:  # that a file is not whole cannot be known from it
        raise ValueError(f"{path}: got no memory for its content. Write it with smaller rows.") from error
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise _damage(path, error) from error
    except Exception as error:
        if not type(error).__module__.startswith("pyarrow"):  # not imported for plain files
            raise
        raise _damage(path, error) from error


def _damage(path: Path, error: BaseException) -> DamagedFileError:
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return DamagedFileError(path, lines[0][:200])
