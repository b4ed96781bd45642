"""Places in Python sources that break the project's rules for plain English.

`RULES` names what is counted: docstring summaries and comments that do not begin with their
subject, phrases that have a plain word instead, names of public classes and aliases that exist more
than once, and sentences of help texts with more than `MOST_WORDS` words. Old words of the project
count in identifiers and in strings of fewer than `_FEWEST_WORDS` words, such as keys, labels and
titles. A comment ``# plain words: REASON`` makes an exception: on a line of the string, of the name
or of the class, or alone on the line before it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

OPENINGS, COMMENTS, PHRASES, LONG_HELP, CLASS_NAMES, OLD_NAMES, OLD_LABELS = RULES = (
    "openings",
    "comments",
    "phrases",
    "long_help",
    "class_names",
    "old_names",
    "old_labels",
)
MOST_WORDS = 35  # largest number of words in a sentence of a help text
MOST_LINES = 8  # largest number of lines in the docstring of a module
SHORT_MODULE = 40  # number of lines up to which a module's docstring may be one sentence
# least number of words that a module's docstring has besides those of its path
_FEWEST_NEW_WORDS = 3

_OPENING = re.compile(r"(Of|What|Which|Where|Those|These|That|As of)\b")
_COMMENT = re.compile(r"#+ *(of|which|that|whose|its?|they|their|them)\b", re.IGNORECASE)
_PLAIN = {  # patterns of phrases, each with the words to write instead
    r"asked|asks? for": "requested, required",
    r"beside": "compared with, next to, parallel to, in addition to",
    r"(make|makes|made|making)( \w+)? again": "recompute, repeat",
    r"(run|runs|ran|running) again": "recompute, repeat",
    r"(give|gives|gave|given|giving)( \w+)? up": "free, recompute, end",
    r"divided? over": "split over, partitioned over",
    r"(leave|leaves|left|leaving)( \w+)? out": "ignore, omit",
    r"(put|puts|putting)( \w+)? off": "deferred",
    r"wants?|wanted": "requires, requested",
    r"nobody": "the one who does",
}
# Words in names that have several meanings, or none to a newcomer. The words of a name are compared
# in lower case. "Pairs" is not in the list, as --pipeline-pairs is the public name of the feature.
_OLD = {  # patterns of words in names, each with the words to write instead
    r"again": "recompute, repeat",
    r"dice|hangs": "rng, deadlock",
    r"extras|clash(es)?": "schedule options, conflict",
    r"handovers?": "stage_io",
    r"holds_up|held_up": "is_blocking",
    r"hops?": "p2p_seconds",
    r"noted_call|call_to_repeat": "checkpointed_call",
    r"once_for_all|last_words|whereabouts": "leader, failure_report, rank_identity",
    r"pair": "overlapped passes, or a word for what the two are",
    r"rooms?": "free memory, package",
    r"spared|saved_by": "fused_backward_saving",
    r"taken_over": "handled_settings",
    r"untrained|first_trained(?!_stage)": "first_trained_stage",
    r"ways?": "alternative, fallback",
}
_OLD_WHOLE = {  # patterns of a whole name or label, each with the words to write instead
    r"choice": "resolved_spec",
    r"head": "output_layer, earliest_start",
    r"hidden": "overlap_saving",
    r"marks?": "maturity, event",
    r"(\w+_)?(apart|asked|beside|instead|left_out|own|seen|whole)": "a noun for what is meant",
}
_OLD_NAME = re.compile(
    rf"_(?:{'|'.join(f'(?:{words})' for words in _OLD)})_"
    rf"|^_(?:{'|'.join(f'(?:{words})' for words in _OLD_WHOLE)})_$"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_NO_WORD = re.compile(r"\W+|_+")
# Pattern of the name of a type alias. Names of constants and type variables do not match it.
_ALIAS = re.compile(r"[A-Z]\w*[a-z]\w*")
# The words "held" and "kept" are not in the lists, as the memory account needs both.
_PHRASE = re.compile(rf"\b({'|'.join(_PLAIN)})\b", re.IGNORECASE)
_CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_FEWEST_WORDS = 4  # least number of words in a string that is taken for a text to people
# Pattern that occurs in every file with a help text.
_HELP = re.compile(r"\b(help|metadata)\s*=|\btyper\b")
# attributes of a syntax node that are lists of statements
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
_EXCEPTION = re.compile(r"#.*\bplain words:(.*)")


@dataclass(frozen=True)
class Place:
    """A place that breaks a rule. ``lines`` are the lines on which a comment may make an exception
    for it."""

    rule: str
    line: int
    text: str
    lines: range


@dataclass(frozen=True)
class SourceWords:
    """Places in a file that break a rule and have no exception, and the errors in the file's
    exceptions."""

    places: tuple[Place, ...]
    errors: tuple[str, ...] = ()


def read_source(text: str, *, strings: bool = True) -> SourceWords:
    """Return the places in the source ``text`` that break a rule, and each public class as a place
    of the rule `CLASS_NAMES`.

    Args:
        strings: whether to check comments, and phrases in strings such as errors and help texts;
            otherwise only docstrings are checked.
    """
    exceptions = dict(_exceptions(text))
    places = list(_places(ast.parse(text), strings, may_help=bool(_HELP.search(text))))
    if strings and _COMMENT.search(text):
        places += _comments(text)
    excepted = {line for place in places for line in place.lines if line in exceptions}
    errors = [
        f"line {line}: write a reason behind 'plain words:'"
        for line, reason in exceptions.items()
        if not reason
    ]
    errors += [
        f"line {line}: nothing here needs an exception: drop it"
        for line in exceptions.keys() - excepted
    ]
    counted = (place for place in places if not exceptions.keys() & set(place.lines))
    return SourceWords(tuple(counted), tuple(errors))


def old_words(name: str) -> str | None:
    """Return the plain words to write for an old word in ``name``, an identifier or a label; None
    if ``name`` has no old word."""
    words = f"_{_NO_WORD.sub('_', _CAMEL.sub('_', name)).strip('_').lower()}_"
    found = _OLD_NAME.search(words)
    if found is None:
        return None
    both = _OLD | _OLD_WHOLE
    return next(plain for old, plain in both.items() if re.fullmatch(old, found[0].strip("_")))


def repeated_classes(sources: Mapping[Path, SourceWords]) -> dict[str, list[Path]]:
    """Return, by name, the files of the public classes that exist more than once."""
    files = defaultdict(list)
    for path, source in sources.items():
        for place in source.places:
            if place.rule == CLASS_NAMES:
                files[place.text].append(path)
    return {name: paths for name, paths in files.items() if len(paths) > 1}


def _exceptions(text: str) -> Iterator[tuple[int, str]]:
    if "plain words:" not in text:
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (found := _EXCEPTION.match(token.string)):
            is_alone = token.line.lstrip().startswith("#")
            yield token.start[0] + is_alone, found[1].strip()


def _comments(text: str) -> Iterator[Place]:
    """Yield the comments that begin with a word such as "It", whose noun the reader has not
    seen."""
    last = -1  # number of the line with the latest comment that has a line of its own
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        is_alone = token.line.lstrip().startswith("#")
        if _COMMENT.match(token.string) and not (is_alone and last == line - 1):
            yield Place(COMMENTS, line, token.string, range(line, line + 1))
        last = line if is_alone else -1


def _places(tree: ast.Module, strings: bool, may_help: bool) -> Iterator[Place]:
    docstrings = dict(_docstrings(tree))
    for docstring, text in docstrings.items():
        lines = _lines_of(docstring)
        if _OPENING.match(text):
            yield Place(OPENINGS, docstring.lineno, text.splitlines()[0], lines)
        yield from _phrases(docstring, text, lines)
    for top in tree.body:
        if (name := _type_named_by(top)) and not name.startswith("_"):
            yield Place(CLASS_NAMES, top.lineno, name, range(top.lineno, top.lineno + 1))
    if strings:
        for node, text in _strings(tree, set(docstrings)):
            if len(text.split()) >= _FEWEST_WORDS:
                yield from _phrases(node, text, _lines_of(node))
            elif plain := old_words(text):
                yield Place(OLD_LABELS, node.lineno, f"{text!r}: write {plain}", _lines_of(node))
        yield from _old_names(tree)
    for node, text in _help_texts(tree) if may_help else ():
        for sentence in _SENTENCE_END.split(text):
            if len(sentence.split()) > MOST_WORDS:
                yield Place(LONG_HELP, node.lineno, sentence, _lines_of(node))


def _type_named_by(node: ast.stmt) -> str | None:
    match node:
        case ast.ClassDef(name=name) | ast.TypeAlias(name=ast.Name(id=name)):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]) if _ALIAS.fullmatch(name):
            return name
    return None


def _old_names(tree: ast.Module) -> Iterator[Place]:
    """Yield the first place of each name that the file binds and that has an old word."""
    known = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                pass
            case ast.ClassDef(name=name) | ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                pass
            case ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        if name not in known and (plain := old_words(name)):
            known.add(name)
            lines = range(node.lineno, node.lineno + 1)
            yield Place(OLD_NAMES, node.lineno, f"{name}: write {plain}", lines)


def _lines_of(node: ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _phrases(node: ast.expr, text: str, lines: range) -> Iterator[Place]:
    one_line = " ".join(_CODE.sub("``", text).split())
    for found in _PHRASE.finditer(one_line):
        plain = next(
            words
            for phrase, words in _PLAIN.items()
            if re.fullmatch(phrase, found[0], re.IGNORECASE)
        )
        yield Place(PHRASES, node.lineno, f"{found[0]!r}: write {plain}", lines)


def _docstrings(tree: ast.Module) -> Iterator[tuple[ast.Constant, str]]:
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # the loop adds the statements of each node to the list
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str()) as constant), *_]:
                    yield constant, ast.get_docstring(node) or ""
        for name in _BLOCKS:
            nodes += getattr(node, name, ())


def _strings(node: ast.AST, without: set[ast.Constant]) -> Iterator[tuple[ast.expr, str]]:
    """Yield the strings below ``node``; a value in an f-string counts as one word."""
    nodes = [*ast.iter_child_nodes(node)]
    while nodes:
        match nodes.pop():
            case ast.Name() | ast.expr_context() | ast.operator():  # most nodes are of these types
                continue
            case ast.Constant() | ast.JoinedStr() as found if (
                text := _words_of(found)
            ) is not None:
                if found not in without:
                    yield found, text
                if isinstance(found, ast.JoinedStr):
                    values = (v for v in found.values if isinstance(v, ast.FormattedValue))
                    nodes += [child for value in values for child in ast.iter_child_nodes(value)]
            case other:
                nodes += ast.iter_child_nodes(other)


def _words_of(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_words_of(part) or "VALUE" for part in parts)
    return None


def _help_texts(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield the texts given as ``help=`` or in the ``metadata=`` of a setting, and the docstrings
    of typer's commands."""
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="help" | "metadata", value=value):
                yield from _strings(ast.Expr(value), set())
            case ast.FunctionDef(body=[ast.Expr(value=ast.Constant(value=str()) as text), *_]):
                if any(isinstance(n, ast.Name) and n.id == "typer" for n in ast.walk(node.args)):
                    yield text, ast.get_docstring(node) or ""


def package_of(path: Path) -> str:
    """Return the package of ``path``, a file relative to the root: at most two folders."""
    return "/".join(path.parent.parts[:2])


def count(sources: Iterable[tuple[Path, SourceWords]]) -> dict[str, dict[str, int]]:
    """Return the number of places by package and rule, without packages and rules that have
    none."""
    counts: dict[str, dict[str, int]] = {}
    for path, source in sources:
        for place in source.places:
            if place.rule != CLASS_NAMES:
                of_package = counts.setdefault(package_of(path), {})
                of_package[place.rule] = of_package.get(place.rule, 0) + 1
    return counts


def docstring_errors(path: Path, text: str) -> list[str]:
    """Return the errors of the docstring of the module ``text`` at ``path``.

    It should say the problem, why it is one, and what is done about it, in whole sentences and at
    most `MOST_LINES` lines. Blank and indented lines (commands, pictures) do not count, nor does
    the part of a patch after "Not patched".
    """
    if not text.strip():
        return []
    docstring = ast.get_docstring(ast.parse(text), clean=False)
    if docstring is None:
        return ["has no docstring"]
    said = re.split(r"^Not patched", docstring, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in said.splitlines() if line and not line.startswith("    ")]
    errors = []
    if len(lines) > MOST_LINES:
        errors.append(f"has {len(lines)} lines: leave details to functions, at most {MOST_LINES}")
    new_words = _words_in(docstring) - _words_in(str(path.with_suffix("")))
    if len(new_words) < _FEWEST_NEW_WORDS:
        errors.append("says only what its path says: say which problem it solves")
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(])", " ".join(lines))
    if len(sentences) < 2 and len(text.splitlines()) > SHORT_MODULE:
        errors.append("is one phrase: say in whole sentences which problem it solves, and why")
    return errors


def _words_in(text: str) -> set[str]:
    """Return the words of ``text`` in the singular, without articles and prepositions."""
    words = {word.rstrip("s") for word in re.findall(r"[a-z]+", text.lower())}
    return words - {"", "a", "an", "and", "by", "for", "in", "it", "of", "on", "the", "to"}
