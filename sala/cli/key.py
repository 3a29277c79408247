"""`sala key`: the keys of a server's users, in a file that holds digests only."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sala.cli import flags as s
from sala.cli.outputs import print_json, print_table
from sala.errors import InputError, writing
from sala.server.settings import Settings

if TYPE_CHECKING:
    from sala.server.http.keys import KeyFile

key = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
Name = Annotated[str, s.argument("Name of the user or program.")]
Where = Annotated[Settings, s.Use(only=("keys_file",))]


def _file(where: Settings) -> "KeyFile":
    from platformdirs import user_config_path

    from sala.server.http.keys import KeyFile

    return KeyFile(where.keys_file or Path(user_config_path("sala")) / "keys.json")


@key.command()
@s.derived
def add(
    *,
    name: Name,
    admin: Annotated[bool, s.flag("Also let it download, load and delete models.", "--admin")] = False,
    salt: Annotated[str, s.flag("Keys with the same salt share cached prefixes.", "--salt")] = "",
    max_sequences: Annotated[
        int, s.flag("Answers it may wait for at a time; 0: as many as the server allows.", "--max-sequences", min=0)
    ] = 0,
    max_tokens_per_minute: Annotated[
        int, s.flag("Tokens of prompts and answers; 0: as many as the server allows.", "--max-tokens-per-minute", min=0)
    ] = 0,
    max_requests_per_minute: Annotated[
        int, s.flag("Requests for answers; 0: as many as the server allows.", "--max-requests-per-minute", min=0)
    ] = 0,
    where: Where,
) -> None:
    """Make a key and print it, once: the file keeps only a digest."""
    file = _file(where)
    with writing(file.path):
        text = file.add(
            name,
            "admin" if admin else "user",
            salt,
            max_sequences=max_sequences,
            max_tokens_per_minute=max_tokens_per_minute,
            max_requests_per_minute=max_requests_per_minute,
        )
    print(text)
    s.note(f"added {name}; it is valid for servers that run with: sala serve --keys-file {file.path}")


@key.command(name="list")
@s.derived
def list_keys(*, where: Where, as_json: s.AsJson = False) -> None:
    """List who has a key."""
    file = _file(where)
    keys = sorted(file.read().values(), key=lambda one: one.name) if file.path.exists() else []
    if as_json:
        print_json([one.model_dump(exclude={"digest"}) for one in keys])
    elif keys:
        rows = [
            [
                one.name,
                one.role,
                *(str(limit or "–") for limit in (one.max_sequences, one.max_tokens_per_minute)),
                str(one.max_requests_per_minute or "–"),
                f"{datetime.fromtimestamp(one.created):%Y-%m-%d}",
            ]
            for one in keys
        ]
        titles = ("name", "role", "answers at a time", "tokens a minute", "requests a minute", "since")
        print_table("", titles, rows, [True, True])
    else:
        s.note(f"there are no keys in {file.path}; make one: sala key add NAME")


@key.command()
@s.derived
def revoke(*, name: Name, where: Where) -> None:
    """Revoke a key; a running server refuses it from now on."""
    file = _file(where)
    if not file.path.exists():
        raise InputError("NAME", f"{name!r} has no key", f"there is no file {file.path}")
    with writing(file.path):
        file.revoke(name)
    s.note(f"revoked {name}")
