# SPDX-License-Identifier: Apache-2.0
"""The files of a configuration: tierd.toml, and the drop-ins in tierd.toml.d/*.toml beside it.

Drop-ins come on top in the order of their names, as systemd's do.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tierd.config.check import Document, Loaded, check, parse_document
from tierd.config.values import Config
from tierd.errors import ConfigError, Problem

DEFAULT_PATH = Path("/etc/tierd/tierd.toml")
LARGEST_BYTES = 64 << 10
MOST_DROP_INS = 100


def load(path: Path | None = None, on_top: Sequence[Document] = ()) -> Config:
    """Reads and checks a configuration file and its drop-ins.

    Without a path it is the default one, or the drop-ins alone where that isn't there.

    Raises:
        ConfigError: everything that is wrong in them, or why they cannot be read.
    """
    return load_with_places(files(path), on_top).config


def files(path: Path | None) -> list[Path]:
    """Returns the files to read: the one given, or the default one if it is there, and drop-ins.

    Raises:
        ConfigError: the drop-ins cannot be listed, or are too many.
    """
    if path is None and not DEFAULT_PATH.exists():
        return drop_ins(DEFAULT_PATH)
    path = path or DEFAULT_PATH
    return [path, *drop_ins(path)]


def drop_ins(path: Path) -> list[Path]:
    """Returns the drop-ins of a configuration file, in their order."""
    folder = path.with_name(f"{path.name}.d")
    try:
        found = sorted(file for file in folder.iterdir() if _is_drop_in(file))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError([_problem(folder, f"cannot be read: {error.strerror}")]) from None
    if len(found) > MOST_DROP_INS:
        raise ConfigError([_problem(folder, f"holds more than {MOST_DROP_INS} drop-ins")])
    return found


def load_with_places(paths: Iterable[Path], on_top: Sequence[Document] = ()) -> Loaded:
    """As load(), of these files; tells also where each key stands.

    Raises:
        ConfigError: everything that is wrong in all of them.
    """
    documents: list[Document] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            documents.append(read_document(path))
        except ConfigError as error:
            problems += error.problems
    try:
        loaded = check([*documents, *on_top])
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return loaded


def read_document(path: Path) -> Document:
    """Reads one file, without its drop-ins and unchecked.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    return parse_document(_read(path), str(path))


def parse(content: str, file: str) -> Config:
    """As load(), of a text; `file` is what the problems name."""
    return check([parse_document(content, file)]).config


def _is_drop_in(path: Path) -> bool:
    return path.suffix == ".toml" and not path.name.startswith(".")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise ConfigError([_problem(path, f"cannot be read: {error.strerror}")]) from None
    if len(content) > LARGEST_BYTES:
        raise ConfigError([_problem(path, f"is larger than {LARGEST_BYTES >> 10} KiB")])
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError([_problem(path, "is not UTF-8 text", line)]) from None


def _problem(path: Path, message: str, line: int | None = None) -> Problem:
    return Problem(file=str(path), line=line, key="", message=message)
