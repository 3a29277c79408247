"""Flags that the commands of `sala eval` share."""

from pathlib import Path
from typing import Annotated

from sala.cli import flags as s
from sala.options import Options

MIN_LENGTH = 256

Lengths = Annotated[str, s.flag("Tokens of prompt and answer, e.g. 4K,32K,128K,1M.")]
Haystack = Annotated[Path | None, s.flag("Text to hide needles in; by default made-up prose.", metavar="FILE|DIR")]
OneAtATime = Annotated[Options, s.Use(defaults={"max_batch": 1})]
