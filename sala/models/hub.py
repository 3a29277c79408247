"""Hubs of models: repository names, the files of a repository, and models in the Hugging Face cache.

The Hugging Face Hub and its mirrors are the default source, ModelScope is another (`--hub-url modelscope`). Only
weights, configuration and tokenizer files are listed, never code.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sala.checkpoint.reader import INDEX_FILE, SINGLE_FILE, Checkpoint
from sala.checkpoint.writer import COMPANION_FILES
from sala.config import read_json_object
from sala.errors import InputError, SalaError
from sala.models.transfer import DownloadError, HubClient, RemoteFile, Stop, read_answer

DEFAULT_URL = "https://huggingface.co"
MODELSCOPE_URL = "https://modelscope.cn"
MAX_LISTING_BYTES = 32 << 20
MAX_TEXT_BYTES = 1 << 30  # of a file that holds no weights
WANTED = ("config.json", *COMPANION_FILES, "*.safetensors", "*.safetensors.index.json", "README.md")
CODE = (".py", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".so", ".dll", ".sh", ".exe")
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO_ID = re.compile(f"{_PART}/{_PART}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}", re.ASCII)


class AlreadyThere(DownloadError):
    """The model is already on this machine."""


class Busy(DownloadError):
    """Another download or removal of the same model is running."""


def check_repo_id(text: str) -> str:
    """Return the text if it is `organisation/name` and nothing else; raise InputError otherwise."""
    if not isinstance(text, str) or not _REPO_ID.fullmatch(text) or ".." in text or "--" in text:
        shown = text if isinstance(text, str) and len(text) < 100 else "it"
        raise InputError("repo_id", f"must be organisation/name, {shown!r} is not", "for example openbmb/MiniCPM-SALA")
    return text


def check_revision(text: str) -> str:
    if not isinstance(text, str) or not _REVISION.fullmatch(text) or ".." in text or "//" in text:
        raise InputError("revision", "must be a branch, a tag or a commit")
    return text


def parse_repo(text: str) -> tuple[str, str | None]:
    """Split `organisation/name` or `organisation/name@revision`."""
    repo_id, at, revision = text.partition("@")
    return check_repo_id(repo_id), check_revision(revision) if at else None


def folder_name(repo_id: str) -> str:
    """Return a directory name that no other repository has: no part holds `--` or begins or ends with `-`."""
    return check_repo_id(repo_id).replace("/", "--")


def find_cached(repo_id: str, revision: str | None = None) -> Path | None:
    """Return the model's directory in the Hugging Face cache if it is there, complete and readable."""
    from huggingface_hub import constants, try_to_load_from_cache

    with contextlib.suppress(OSError, ValueError, SalaError):
        known = check_repo_id(repo_id), "config.json", constants.HF_HUB_CACHE, check_revision(revision or "main")
        config = try_to_load_from_cache(*known)
        if isinstance(config, str):
            Checkpoint(Path(config).parent).close()
            return Path(config).parent
    return None


def cached_models() -> list[tuple[str, Path]]:
    """Return the repositories and directories of SALA models in the Hugging Face cache."""
    from huggingface_hub import constants

    found = []
    for place in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        repo_id = place.name.removeprefix("models--").replace("--", "/", 1)
        with contextlib.suppress(OSError, SalaError):
            snapshot = find_cached(repo_id)
            if snapshot is not None and read_json_object(snapshot / "config.json").get("model_type") == "minicpm_sala":
                found.append((repo_id, snapshot))
    return found


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit that belong to a model."""

    repo_id: str
    commit: str
    files: tuple[RemoteFile, ...]  # small ones first
    skipped: tuple[str, ...]  # code and pickles


class Hub:
    """The Hugging Face Hub, a mirror that speaks its protocol, or ModelScope; it may redirect to `hosts` too."""

    def __init__(self, url: str | None = None, hosts: Sequence[str] = (), **options: Any) -> None:
        from huggingface_hub import constants

        url = MODELSCOPE_URL if url == "modelscope" else url
        found = url if url and url.rstrip("/") != DEFAULT_URL else os.environ.get("HF_ENDPOINT") or DEFAULT_URL
        if not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~/-]*)?", found):
            raise InputError("hub_url", "must be an address such as https://huggingface.co, or modelscope")
        host = found.partition("://")[2].partition("/")[0].partition(":")[0]
        self.is_modelscope = options.pop("is_modelscope", host.removeprefix("www.") == "modelscope.cn")
        self.token = None if self.is_modelscope else read_token()
        self.client = HubClient(found, self.token, trusted_hosts=hosts, **options)
        is_on = not constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet") is not None
        self.has_xet = is_on and self.client.url == DEFAULT_URL

    def look_up(self, repo_id: str, revision: str | None = None, stop: Stop | None = None) -> Listing:
        """Return the files with sizes and hashes; raise InputError or DownloadError if there is no such model."""
        check_repo_id(repo_id)
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise DownloadError("HF_HUB_OFFLINE forbids downloads", "unset it, or copy the model's directory here")
        name = quote(check_revision(revision or ("master" if self.is_modelscope else "main")), safe="")
        url = f"{self.client.url}/api/models/{repo_id}/revision/{name}?blobs=true"
        if self.is_modelscope:
            url = f"{self.client.url}/api/v1/models/{repo_id}/repo/files?Revision={name}&Recursive=true"
        status, headers, body = read_answer(self.client, url, MAX_LISTING_BYTES, stop or Stop())
        if status != 200:
            raise _refusal(status, headers.get("X-Error-Code", ""), repo_id, revision)
        try:
            data = json.loads(body)
            if self.is_modelscope:
                files = f"{self.client.url}/models/{repo_id}/resolve/{revision or 'master'}"
                return _read_listing(repo_id, _from_modelscope(data), files)
            return _read_listing(repo_id, data, f"{self.client.url}/{repo_id}/resolve/{data['sha']}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DownloadError(f"the hub's description of {repo_id} is not valid") from None


def read_token() -> str | None:
    """Return the user's token: HF_TOKEN, or the file that `hf auth login` writes."""
    from huggingface_hub import get_token

    token = get_token() or ""
    return token if re.fullmatch(r"[\x21-\x7e]{1,1000}", token) else None


def _refusal(status: int, code: str, repo_id: str, revision: str | None) -> DownloadError:
    if code == "GatedRepo" or status == 403:
        remedy = "accept them on the hub's page of the model, then set HF_TOKEN"
        return DownloadError(f"{repo_id} is restricted to users who accepted its terms", remedy)
    if code == "RevisionNotFound":
        return DownloadError(f"{repo_id} has no revision {revision or 'main'}")
    if status in (401, 404):
        remedy = "check the spelling; for a private model set HF_TOKEN"
        return DownloadError(f"{repo_id} does not exist or is private", remedy)
    return DownloadError(f"the hub answers {status} about {repo_id}", "try again later")


def _from_modelscope(data: Any) -> dict[str, Any]:
    """Return ModelScope's list of files in the form of the Hugging Face Hub."""
    files = [file for file in data["Data"]["Files"] if file.get("Type") != "tree"]
    siblings = [
        {"rfilename": file["Path"], "lfs": {"sha256": file.get("Sha256"), "size": file["Size"]}} for file in files
    ]
    contents = sorted(f"{file['Path']} {file.get('Sha256')}" for file in files)
    return {"sha": hashlib.sha256("\n".join(contents).encode()).hexdigest(), "siblings": siblings}


def _read_listing(repo_id: str, data: Any, url: str) -> Listing:
    """Return the listing of a repository whose files are below `url`."""
    commit = data["sha"]
    if not _COMMIT.fullmatch(commit):
        raise ValueError(commit)
    names = [entry["rfilename"] for entry in data["siblings"]]
    files = [_read_file(repo_id, entry, url) for entry in data["siblings"] if _is_wanted(entry["rfilename"])]
    found = {file.name for file in files}
    if len({name.casefold() for name in found}) != len(files):
        raise DownloadError(f"{repo_id} has two files with the same name")
    if "config.json" not in found or not found & {SINGLE_FILE, INDEX_FILE}:
        raise DownloadError(f"{repo_id} has no config.json with safetensors weights", "choose a model in that format")
    skipped = tuple(name for name in names if name.casefold().endswith(CODE))
    files.sort(key=lambda file: (file.name.endswith(".safetensors"), file.name))
    return Listing(repo_id, commit, tuple(files), skipped)


def _is_wanted(name: str) -> bool:
    if not _FILE_NAME.fullmatch(name) or ".." in name or name.casefold().endswith(CODE):
        return False
    return any(fnmatchcase(name, pattern) for pattern in WANTED)


def _read_file(repo_id: str, entry: Mapping[str, Any], url: str) -> RemoteFile:
    name, large = entry["rfilename"], entry.get("lfs") or {}
    size, digest = large.get("size", entry.get("size")), large.get("sha256") if large else entry.get("blobId")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 50:
        raise DownloadError(f"the hub does not say how large {name} of {repo_id} is")
    if size > MAX_TEXT_BYTES and not name.endswith(".safetensors"):
        raise DownloadError(f"{name} of {repo_id} would be {size:,} bytes, which is not plausible")
    if not re.fullmatch(r"[0-9a-f]{64}" if large else r"[0-9a-f]{40}", str(digest)):
        raise DownloadError(f"the hub gives no hash of {name} of {repo_id}")
    return RemoteFile(name, f"{url}/{quote(name)}", size, digest if large else None, None if large else digest)
