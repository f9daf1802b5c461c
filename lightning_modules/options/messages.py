"""Messages of the option parser in one line, with the option's full name and the nearest name that exists."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib import import_module
from typing import Any

_LONGEST = 200  # characters of a value in a message
_KEY = re.compile(r'\AParser key "([^"]+)":\s*')
_WHY = re.compile(r"\bImport(?:ing|\spath)\b.*?(?=\. Add the import path|$)", re.MULTILINE)
_KINDS = re.compile(r"^  Subtypes: \[(.*)\]$", re.MULTILINE)
_EXPECTED = re.compile(r"Expected an? (.*)\. Got value: (.*)")
_GIVEN = re.compile(r"^  Given value: (.*)\Z", re.MULTILINE | re.DOTALL)
_CLASS = re.compile(r"\b(?:lightning|torch)(?:\.\w+)+")
_TRIED = re.compile(r"^    - (.+)$", re.MULTILINE)
_GENERAL = (
    "Expected a",
    "Not a valid subclass",
    "Does not validate",
    "Not of type",
    "Type ",
    "Import",
    "No module",
    "Problem with",
)
_UNKNOWN = re.compile(
    r"(?:(?:Group '(?P<group>[^']*)'|Subcommand '[^']*') does not accept option|Option) '(?P<option>[^']+)'"
)
_NO_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)


def nearest(name: str, known: Iterable[str]) -> str:
    """The name of `known` that `name` may stand for, as ``; did you mean NAME?``, or an empty text.

    A name also stands for the only known one that ends with it: ``hidden_size`` for ``model.config.hidden_size``.
    """
    names = list(dict.fromkeys(known))
    near = get_close_matches(name, names, n=1, cutoff=0.75)
    if not near:
        ends = [other for other in names if other.endswith(f".{name.rpartition('.')[2]}")]
        near = ends if len(ends) == 1 else get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def option_names(parser: Any) -> list[str]:
    """Dotted names of a parser's options, of all its subcommands."""
    names = []
    for action in parser._actions:
        if isinstance(action.dest, str) and not action.dest.endswith(".help"):
            names.append(action.dest)
        for inner in (getattr(action, "_name_parser_map", None) or {}).values():
            names += option_names(inner)
    return names


def _class_names(kinds: str) -> Iterator[str]:
    """Names of Lightning's and torch's classes in a list of types, and of what has been derived from them."""
    for path in dict.fromkeys(_CLASS.findall(kinds)):
        module, _, name = path.rpartition(".")
        found = getattr(import_module(module), name, None)
        waiting = [found] if isinstance(found, type) else []
        while waiting:
            kind = waiting.pop()
            yield kind.__name__
            waiting += kind.__subclasses__()


def in_one_line(message: str, parser: Any) -> str:
    """A parser's message without its list of everything that was tried.

    Args:
        message: Of jsonargparse.
        parser: Whose options it is about.

    Returns:
        ``OPTION: what is wrong``, with the nearest name where one is misspelt.
    """
    key = _KEY.match(message)
    where, rest = (key[1], message[key.end() :]) if key else ("", message)
    kinds, given, unknown = _KINDS.search(message), _GIVEN.search(message), _UNKNOWN.search(rest)
    value = "" if given is None else given[1].strip()
    if where and kinds is not None:
        rest = _union_message(rest, kinds[1], value)
    elif unknown is not None:
        option = ".".join(part for part in (unknown["group"], unknown["option"]) if part)
        rest = f"{option}: there is no such option{nearest(option, option_names(parser))}"
    elif (typed := _UNRECOGNIZED.search(rest)) is not None:
        first = next((word for word in typed[1].split() if word.startswith("--")), "")
        name = first.partition("=")[0].lstrip("-")
        near = nearest(name, option_names(parser)) if name else ""
        rest = f"unrecognized arguments: {_cut(typed[1])}{near.replace('mean ', 'mean --')}"
    else:
        rest = _EXPECTED.sub(lambda found: f"must be of type {_readable(found[1])}, got {found[2]}", rest)
        rest = _cut(rest, 4 * _LONGEST)
    return " ".join(f"{where}{': ' if where else ''}{rest}".split())


def _cut(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."


def _union_message(tried: str, kinds: str, value: str) -> str:
    """About a value that is of none of several types: what is wrong inside it, if that can be said."""
    told = [line.strip(" \"'") for line in _TRIED.findall(tried)]
    inside = next((line for line in told if not line.startswith(_GENERAL)), None)
    if inside is not None:
        return _cut(inside, 4 * _LONGEST)
    why, no_class = _WHY.findall(tried), _NO_CLASS.search(tried)
    name = re.search(r"'class_path': '([\w.]+)'", value)
    missing = no_class[1] if no_class is not None and no_class[1] == value else name[1] if name is not None else ""
    near = nearest(missing.rpartition(".")[2], _class_names(kinds)) if missing and not why else ""
    return f"must be one of {_readable(kinds)}, got {_cut(value)}{f' ({why[0]})' if why else ''}{near}"


def _readable(kinds: str) -> str:
    """Types without the modules that they are from."""
    kinds = re.sub(r"<class '([^']*)'>", r"\1", kinds).replace("NoneType", "null")
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=\w)", "", kinds)
