"""Declared changes to other people's modules: check all, apply all or none, undo.

Code that replaces functions of other packages breaks silently when they change. So a patch declares
its target (``package.module:Name`` or ``package.module:Class.attribute``), its reason, and what it
expects there: the signature, and digests of the sources it was read against. If a target differs
between versions of its package, the patch lists the signature or digest of each supported version.
`apply` resolves and checks every target before it changes one, rebinds every name under which
modules imported it, and returns a handle that undoes all.
"""

from __future__ import annotations

import enum
import functools
import gc
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from megatron_ext.config import ALLOW_UNKNOWN
from megatron_ext.patches.sources import (
    UnknownSource,
    allowance,
    is_allowed,
    source_digest,
    unknown_source,
)

Alias = tuple[types.ModuleType, str]
Signature = str | Iterable[str] | None
SourceDigests = Mapping[str, str]
_ANY_SOURCE: SourceDigests = types.MappingProxyType({})


class PatchError(RuntimeError):
    """Raised if a patch does not fit the installed code; nothing has been changed."""


class How(enum.StrEnum):
    """Relation of a patch to the original attribute: replace it, wrap it or only check it."""

    REPLACE = "replace"
    WRAP = "wrap"
    EXPECT = "expect"


@dataclass(frozen=True)
class Patch:
    """Change or expectation of one attribute, declared by `replace`, `wrap` or `expect`."""

    target: str
    how: How
    reason: str
    change: Any  # the substitute, or the wrapper
    signatures: tuple[str, ...]
    digests: Mapping[str, str]
    needless: Mapping[str, str] = _ANY_SOURCE

    def is_needless(self, original: Any) -> bool:
        """Return whether the installed ``original`` already does what this patch is for."""
        return bool(self.needless) and source_digest(original) in self.needless.values()

    def build(self, original: Any) -> Any:
        """Return the object that replaces ``original``."""
        if self.how is How.REPLACE:
            return self.change
        wrapper = self.change

        @functools.wraps(original)
        def substitute(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        return substitute


def replace(
    target: str,
    substitute: Any,
    *,
    reason: str,
    signature: Signature = None,
    digests: SourceDigests = _ANY_SOURCE,
) -> Patch:
    """Declare that ``substitute`` replaces ``target``.

    Pass a different ``substitute`` object for each target: `Handle.undo` restores modules that
    imported the target while it was patched, and distinguishes them from other users of the
    substitute only by the imported name. A substitute that calls the original must be a `wrap`,
    because its own imported name of the original would be rebound too.

    Args:
        target: ``package.module:Name`` or ``package.module:Class.attribute``.
        substitute: the new object; for a static or class method, the plain function.
        reason: one line for `megatron-ext doctor`.
        signature: text of ``inspect.signature`` of the original without annotations, or one such
            text for each version that differs; None skips the check (the original is no function,
            or its signature does not matter).
        digests: `source_digest` of each original that this patch was read against, by version
            (``{"0.18": ..., "0.19": ...}``); empty skips the check (the patch does not depend on
            the original's body).
    """
    return Patch(target, How.REPLACE, reason, substitute, _as_tuple(signature), digests)


def wrap(
    target: str,
    wrapper: Callable[..., Any],
    *,
    reason: str,
    signature: Signature = None,
    digests: SourceDigests = _ANY_SOURCE,
    needless: SourceDigests = _ANY_SOURCE,
) -> Patch:
    """Declare that calls of ``target`` become ``wrapper(original, *args, **kwargs)``.

    The arguments are those of `replace`. ``args`` begins with ``self`` for a method and with
    ``cls`` for a class method. ``needless`` has the `source_digest`s, by version like ``digests``,
    of originals that do by themselves what the patch is for: these stay unchanged.
    """
    return Patch(target, How.WRAP, reason, wrapper, _as_tuple(signature), digests, needless)


def expect(
    target: str, *, reason: str, signature: Signature = None, digests: SourceDigests = _ANY_SOURCE
) -> Patch:
    """Declare that other patches rely on ``target`` having this signature or source.

    The arguments are those of `replace`.
    """
    return Patch(target, How.EXPECT, reason, None, _as_tuple(signature), digests)


def _as_tuple(signature: Signature) -> tuple[str, ...]:
    if signature is None:
        return ()
    return (signature,) if isinstance(signature, str) else (*signature,)


@dataclass(frozen=True)
class Target:
    """Resolved target: the object with the attribute, and the attribute's current value."""

    owner: Any
    name: str
    # The object that a patch builds on: of a static or class method its plain function.
    original: Any
    raw: Any  # the attribute as stored in a __dict__, so a staticmethod is restored as one

    @property
    def in_module(self) -> bool:
        return isinstance(self.owner, types.ModuleType)

    @property
    def rebinds(self) -> bool:
        """Whether the target is a module's function or class, whose importers are rebound too."""
        return self.in_module and callable(self.original)

    @property
    def identity(self) -> tuple[object, ...]:
        """Key of the target, equal for two targets that are one object under two names."""
        if self.rebinds:
            return (id(self.original),)
        return id(self.owner), self.name


def resolve(target: str) -> Target:
    """Import and look up ``target``. Raises PatchError if it does not exist."""
    module_name, _, path = target.partition(":")
    *outer, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for part in outer:
            owner = getattr(owner, part)
        original = getattr(owner, name)
    except Exception as error:  # a module may raise anything while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise PatchError(f"{target} cannot be found here: {reason}") from error
    if isinstance(owner, type):
        raw = inspect.getattr_static(owner, name, original)
    elif isinstance(owner, types.ModuleType):
        raw = vars(owner).get(name, original)
    else:
        raise PatchError(
            f"{target} is an attribute of a {type(owner).__name__}; only attributes of modules "
            "and classes can be patched"
        )
    if isinstance(raw, classmethod):
        original = raw.__func__
    return Target(owner, name, original, raw)


def plain_signature(function: Any) -> str:
    """Return the signature of ``function`` without annotations, for comparison across versions."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


@dataclass(frozen=True)
class Misfit:
    """Reason why a patch does not fit the installed code.

    ``unknown`` describes the installed source if the only reason is that the patch was not read
    against that source.
    """

    text: str
    unknown: UnknownSource | None = None


def mismatch(patch: Patch, original: Any) -> Misfit | None:
    """Return why ``patch`` does not fit ``original``, or None if it fits.

    Raises:
        ValueError: the user's allowance of unknown sources cannot be parsed.
    """
    if patch.signatures:
        known = " or ".join(patch.signatures)
        try:
            signature = plain_signature(original)
        except (TypeError, ValueError):
            text = f"{patch.target} has no signature, the patch was written for {known}"
            return Misfit(text)
        if signature not in patch.signatures:
            text = f"{patch.target} takes {signature}, the patch was written for {known}"
            return Misfit(text)
    if not patch.digests:
        return None
    try:
        digest = source_digest(original)
    except (OSError, TypeError, SyntaxError):
        digest = "unreadable"
    read = {**patch.digests, **patch.needless}
    if digest in read.values() or is_allowed(patch.target, digest):
        return None
    verb = "rely on" if patch.how is How.EXPECT else patch.how
    we = f"we {verb} it: {patch.reason}"
    unknown = unknown_source(patch.target, original, digest, read, we)
    return Misfit(str(unknown), unknown)


# Return a number that identifies any object. `id` would raise an audit event, and every hook in
# Python slows each event down: with filelock's hook, which torch imports, a scan would take four
# times as long.
identity_of: Callable[[object], int] = object.__hash__


def modules_with(ids: Set[int], modules: Iterable[Any] = ()) -> list[types.ModuleType]:
    """Return the ``modules`` (default: all imported ones) that have a given object as attribute.

    ``ids`` are the objects' `identity_of`. Few modules have such an attribute, so each module is
    tested by a single call in C.
    """
    return [
        module
        for module in modules or list(sys.modules.values())
        if isinstance(module, types.ModuleType)
        and not ids.isdisjoint(map(identity_of, vars(module).copy().values()))
    ]


class Aliases:
    """Index of the aliases of functions or classes: all module attributes that refer to them.

    Modules that imported a function or class by name have an alias; aliases are rebound by identity
    over ``sys.modules``, and back again by the handle. A constant has no identity of its own
    (``False`` is one object everywhere), so only the named attribute changes.

    All of ``sys.modules`` is scanned once for ``objects``, and again for any object requested
    later. Indexing every attribute would take half a second in each rank with torch and Megatron
    loaded, for the few dozen objects that matter.
    """

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self._holders: dict[int, set[Alias]] = {}
        self._scan(objects)

    def _scan(self, objects: Iterable[Any]) -> None:
        holders: dict[int, set[Alias]] = {identity_of(value): set() for value in objects}
        for module in modules_with(holders.keys()) if holders else ():
            for name, value in vars(module).copy().items():
                if (holds := identity_of(value)) in holders:
                    holders[holds].add((module, name))
        self._holders |= holders

    def of(self, value: Any) -> frozenset[Alias]:
        """Return the module attributes that refer to ``value`` itself."""
        if identity_of(value) not in self._holders:
            self._scan([value])
        return frozenset(self._holders[identity_of(value)])

    def rebind(self, alias: Alias, value: Any) -> None:
        """Set the module attribute ``alias`` to ``value``, and update the index."""
        module, name = alias
        before = vars(module).get(name)
        setattr(module, name, value)
        if identity_of(before) in self._holders:
            self._holders[identity_of(before)].discard(alias)
        if identity_of(value) in self._holders:
            self._holders[identity_of(value)].add(alias)


def stale_references(patches: Sequence[Patch]) -> list[str]:
    """Return a line for each reference to a patched target that rebinding does not reach.

    References that are no module attribute (a default argument, a `functools.partial`, a closure,
    an entry in a table) are not rebound. Partials and closures are found, so that a late caller can
    refuse instead of patching incompletely.
    """
    names = {}
    for patch in patches:
        target = resolve(patch.target)
        if patch.how is not How.EXPECT and target.rebinds:
            names[id(target.original)] = patch.target, target.original
    holders = gc.get_referrers(*(original for _, original in names.values()))
    return [
        f"{names[id(held)][0]} is held by a {type(holder).__name__}"
        for holder in holders
        for held in _held_by(holder)
        if id(held) in names
    ]


def _held_by(holder: Any) -> tuple[Any, ...]:
    """Return the objects to which ``holder``, a `functools.partial` or a closure's cell, refers."""
    if isinstance(holder, functools.partial):
        return holder.func, *holder.args, *holder.keywords.values()
    if isinstance(holder, types.CellType):
        return (holder.cell_contents,)
    return ()


@dataclass(frozen=True)
class _Swap:
    """Replaced target, with everything needed to undo the replacement."""

    target: Target
    was_defined: bool  # whether the owner itself had the attribute, and did not inherit it
    substitute: Any
    importers: frozenset[Alias]  # names that referred to the original
    # Names that referred to the substitute before it replaced the original.
    holders: frozenset[Alias]

    def undo(self, aliases: Aliases) -> None:
        owner, name = self.target.owner, self.target.name
        for alias in self.importers | self._imported_late(aliases):
            if vars(alias[0]).get(alias[1]) is self.substitute:
                aliases.rebind(alias, self.target.original)
        if self.was_defined or name not in vars(owner):
            setattr(owner, name, self.target.raw)
        else:
            delattr(owner, name)

    def _imported_late(self, aliases: Aliases) -> set[Alias]:
        """Return the module attributes that imported the target's substitute while it was patched.

        Other modules may import the substitute itself under a name of its own. Attributes with such
        a name are not returned.
        """
        if not (self.target.rebinds and callable(self.substitute)):
            return set()
        held_as = {alias for _, alias in self.holders} - {self.target.name}
        late = aliases.of(self.substitute) - self.holders
        return {(module, alias) for module, alias in late if alias not in held_as}


_handles: list[Handle] = []  # handles whose patches are in force


def applied() -> list[Patch]:
    """Return the patches in force in this process."""
    return [patch for handle in _handles for patch in handle.patches]


class Handle(AbstractContextManager["Handle"]):
    """Handle of applied patches. `undo` (or leaving the ``with`` block) restores the originals.

    Handles on the same targets must be undone in reverse order of creation.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self.patches = tuple(patches)
        self._swaps: list[_Swap] = []

    @property
    def is_in_force(self) -> bool:
        """Whether the patches of this handle are applied and not undone."""
        return self in _handles

    def undo(self) -> None:
        """Restore every target and its aliases, last applied first. A second call does nothing."""
        aliases = Aliases(swap.substitute for swap in self._swaps if swap.target.rebinds)
        while self._swaps:
            self._swaps.pop().undo(aliases)
        if self in _handles:
            _handles.remove(self)

    def __exit__(self, *exception: object) -> None:
        self.undo()


def _checked(patches: Sequence[Patch]) -> tuple[list[Patch], list[Any]]:
    """Return the ``patches`` that the installed versions need, and objects with aliases to rebind.

    Raises PatchError as `apply` does.
    """
    problems = []
    causes: set[str] = set()
    unknown = []
    in_force = []
    wanted: list[Any] = []
    taken: dict[tuple[object, ...], Patch] = {}
    for patch in patches:
        try:
            target = resolve(patch.target)
        except PatchError as error:
            # A missing package is reported once, though several patches need it.
            if str(error.__cause__) not in causes:
                problems.append(str(error))
            causes.add(str(error.__cause__))
            continue
        if (misfit := mismatch(patch, target.original)) is not None:
            problems.append(misfit.text)
            unknown += [misfit.unknown] if misfit.unknown else []
        elif patch.is_needless(target.original):
            continue
        in_force.append(patch)
        if patch.how is How.EXPECT:
            continue
        if target.rebinds:
            wanted += target.original, patch.change
        earlier = taken.get(target.identity)
        if patch.how is How.REPLACE and earlier is not None:
            problems.append(
                f"{patch.target} is replaced, which would drop the patch that came before: "
                f"{earlier.how} {earlier.target} ({earlier.reason})"
            )
        taken.setdefault(target.identity, patch)
    if problems:
        text = "no patch was applied:\n  " + "\n  ".join(problems)
        if unknown:
            text += (
                f"\nwhere what we do still holds, allow these sources, until they change again:\n"
                f"  export {ALLOW_UNKNOWN}={allowance(unknown)}"
            )
        raise PatchError(text)
    return in_force, wanted


def apply(patches: Sequence[Patch]) -> Handle:
    """Apply all ``patches`` or none.

    Raises:
        PatchError: a target is missing, has another signature or an unknown source, or two patches
            exclude each other. The message lists all misfits. Nothing has been changed.
        ValueError: the user's allowance of unknown sources cannot be parsed.
    """
    in_force, wanted = _checked(patches)
    handle = Handle(in_force)
    aliases = Aliases(wanted)
    try:
        for patch in in_force:
            if patch.how is not How.EXPECT:
                _swap(patch, resolve(patch.target), handle, aliases)
    except BaseException:
        handle.undo()
        raise
    _handles.append(handle)
    return handle


def _swap(patch: Patch, target: Target, handle: Handle, aliases: Aliases) -> None:
    substitute = stored = patch.build(target.original)
    for kind in (staticmethod, classmethod):
        if isinstance(target.raw, kind) and not isinstance(substitute, kind):
            stored = kind(substitute)
    rebinds = target.rebinds
    # Other modules can refer only to a substitute, since a wrapper is a new object.
    in_use = rebinds and patch.how is How.REPLACE and callable(substitute)
    swap = _Swap(
        target,
        was_defined=target.name in vars(target.owner),
        substitute=substitute,
        importers=aliases.of(target.original) if rebinds else frozenset(),
        holders=aliases.of(substitute) if in_use else frozenset(),
    )
    # If this assignment fails, nothing has been changed yet that would have to be undone.
    setattr(target.owner, target.name, stored)
    handle._swaps.append(swap)
    for alias in swap.importers:
        aliases.rebind(alias, substitute)
