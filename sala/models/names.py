"""Names by which people call a model besides its id: without the owner, in any case, or by the family alone."""

import re
from collections.abc import Sequence

# "minicpm-sala-9b", as servers of other projects call it, says nothing about bits
_FAMILY = re.compile(r"minicpm4?-sala(-9b)?")
_MEMBER = re.compile(rf"{_FAMILY.pattern}(?![a-z0-9])")
_OWNER = re.compile(r"--|/")


def match_name(name: str, ids: Sequence[str], default: str | None = None) -> str | None:
    """Return the id that `name` means, with or without the owner and in any case.

    Of several, `default` is meant; None if it is not among them, or if there is none.
    """
    at = int(_OWNER.search(name) is None)  # a name with an owner is compared with whole ids
    return _choose([each for each in ids if _forms(each)[at] == _forms(name)[at]], default)


def match_family(name: str, ids: Sequence[str], default: str | None = None) -> str | None:
    """Return the id of a MiniCPM-SALA among `ids` if `name` asks for one without saying which.

    That is `default`, whatever it is called, or the only one whose name says that it is such a model.
    """
    if not _FAMILY.fullmatch(name.casefold()):
        return None
    return default if default in ids else _choose([each for each in ids if _MEMBER.match(_forms(each)[1])], None)


def _choose(found: Sequence[str], default: str | None) -> str | None:
    return default if default in found else found[0] if len(found) == 1 else None


def _forms(name: str) -> tuple[str, str]:
    """Return a name with and without its owner, in lower case."""
    whole = name.casefold().replace("/", "--", 1)
    return whole, whole.partition("--")[2] or whole
