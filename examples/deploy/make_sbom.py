"""Write a software bill of materials (CycloneDX 1.6): the package, what it installs, brings along and converts.

    make sbom                                                      writes dist/sala.cdx.json
    python examples/deploy/make_sbom.py [--extras server,documents] [--output FILE]

It describes the installation that runs it: all packages that these extras need on this machine, with versions and
licences; the libraries of the web page, with the hashes of their files; and the base of the embedded model.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement

import sala
from sala.models.embedded import overlay_dir

NAME = "minicpm-sala"
VENDORED = Path(sala.__file__).parent / "server" / "web" / "vendor" / "vendored.json"


def purl(kind: str, name: str, version: str) -> str:
    return f"pkg:{kind}/{quote(name, safe='/')}@{version}"


def needs(found: Distribution, extras: Iterable[str]) -> Iterator[Requirement]:
    """Yield what a distribution requires on this machine with these extras."""
    for line in found.requires or ():
        requirement = Requirement(line)
        environments: list[dict[str, str]] = [{"extra": extra} for extra in (*extras, "")]
        if requirement.marker is None or any(requirement.marker.evaluate(each) for each in environments):
            yield requirement


def close(extras: Iterable[str]) -> tuple[dict[str, Distribution], dict[str, set[str]]]:
    """Return every distribution that is needed, by its normal name, and the names of what each one needs."""
    found: dict[str, Distribution] = {}
    edges: dict[str, set[str]] = {}
    waiting = [(NAME, frozenset(extras))]
    seen = set()
    while waiting:
        name, wanted = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if (key, wanted) in seen:
            continue
        seen.add((key, wanted))
        try:
            found[key] = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"{name} is not installed; run: make demo") from None
        for requirement in needs(found[key], wanted):
            edges.setdefault(key, set()).add(re.sub(r"[-_.]+", "-", requirement.name).lower())
            waiting.append((requirement.name, frozenset(requirement.extras)))
    return found, edges


def licences(found: Distribution) -> list[dict[str, Any]]:
    about = found.metadata
    if about.get("License-Expression"):
        return [{"expression": about["License-Expression"]}]
    kinds = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier", []) if line.startswith("License ::")]
    text = (about.get("License") or "").strip()
    names = kinds or ([text] if text and "\n" not in text and len(text) < 100 else [])
    return [{"license": {"name": name}} for name in names]


def library(kind: str, name: str, version: str, **more: Any) -> dict[str, Any]:
    ref = purl(kind, name, version)
    return {"type": "library", "bom-ref": ref, "name": name, "version": version, "purl": ref, **more}


def vendored() -> Iterator[dict[str, Any]]:
    """Yield the libraries of the web page, with their files."""
    packages: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for file, about in json.loads(VENDORED.read_text()).items():
        part = {"type": "file", "name": file, "hashes": [{"alg": "SHA-256", "content": about["sha256"]}]}
        packages.setdefault((about["package"], about["version"]), []).append(part)
    for (name, version), files in sorted(packages.items()):
        yield library("npm", name.replace("@", "%40"), version, components=files) | {"name": name}


def base_model() -> dict[str, Any]:
    """Return the wheel from which the embedded model is converted, at `sala setup`."""
    base = json.loads((overlay_dir() / "base.json").read_text())
    hashes = [{"alg": "SHA-256", "content": base["wheel_sha256"]}]
    return library("pypi", base["package"], base["package_version"], hashes=hashes)


def make(extras: Iterable[str]) -> dict[str, Any]:
    found, edges = close(extras)
    refs = {key: purl("pypi", key, one.version) for key, one in found.items()}
    own = found.pop(NAME)
    parts = [
        library("pypi", key, one.version, **({"licenses": facts} if (facts := licences(one)) else {}))
        for key, one in sorted(found.items())
    ]
    web = list(vendored())
    brought = [*web, base_model()]
    graph = [{"ref": refs[key], "dependsOn": sorted(refs[one] for one in edges.get(key, ()))} for key in sorted(refs)]
    next(node for node in graph if node["ref"] == refs[NAME])["dependsOn"] += [each["bom-ref"] for each in brought]
    top = {"type": "application", "bom-ref": refs[NAME], "name": NAME, "version": own.version, "purl": refs[NAME]}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**top, "licenses": licences(own)}},
        "components": [*parts, *brought],
        "dependencies": graph,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", default="server,documents")
    parser.add_argument("--output", type=Path, default=Path("dist/sala.cdx.json"))
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    bom = make(options.extras.split(","))
    options.output.write_text(json.dumps(bom, indent=2) + "\n")
    print(f"{options.output}: {len(bom['components'])} components")


if __name__ == "__main__":
    main()
