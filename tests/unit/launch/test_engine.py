"""Tests of the patch engine: all patches or none, references replaced by identity, and everything
restored by undo."""

import functools
import linecache
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_ext.config import ALLOW_UNKNOWN
from megatron_ext.patches.engine import (
    Patch,
    PatchError,
    apply,
    plain_signature,
    replace,
    resolve,
    source_digest,
    stale_references,
    wrap,
)
from megatron_ext.patches.sources import versions_of

MakeModule = Callable[[str, str], types.ModuleType]

THEIRS = '''
FLAG = False

def train(steps, *, rate=0.1):
    """Train."""
    return ("stock", steps, rate)

def other():
    return "other"

class Base:
    def inherited(self):
        return "stock"

class Layer(Base):
    def forward(self, x):
        return ("stock", x)

    @staticmethod
    def shape(x):
        return ("stock", x)

    @classmethod
    def make(cls, x):
        return ("stock", cls.__name__, x)

    @property
    def width(self):
        return 1

class Narrow(Layer):
    pass
'''


@pytest.fixture
def make_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeModule]:
    """Yield a function that makes importable modules whose source `inspect` finds."""

    def make(name: str, source: str) -> types.ModuleType:
        module = types.ModuleType(name)
        file = f"<{name}>"
        # Without a modification time linecache.checkcache keeps the entry.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, file, "exec"), vars(module))
        return module

    yield make
    for file in [file for file in linecache.cache if file.startswith("<fake_")]:
        del linecache.cache[file]


@pytest.fixture
def theirs(make_module: MakeModule) -> Any:
    return make_module("fake_theirs", THEIRS)


def state(module: types.ModuleType) -> dict[str, object]:
    """Return the contents of a module and of its classes, for comparison by identity."""
    held = {name: value for name, value in vars(module).items() if name != "__builtins__"}
    for name, value in vars(module).items():
        if isinstance(value, type):
            inner = {f"{name}.{key}": item for key, item in vars(value).items()}
            held |= {key: item for key, item in inner.items() if not key.endswith("__")}
    return held


def assert_same(before: dict[str, object], after: dict[str, object]) -> None:
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []


def ours(original: Any, *args: Any, **kwargs: Any) -> Any:
    return ("ours", original(*args, **kwargs))


def test_replacement_stands_in_for_every_alias(theirs: Any, make_module: MakeModule) -> None:
    user: Any = make_module("fake_user", "from fake_theirs import train, train as fit")
    stock, substitute = theirs.train, lambda steps: "ours"
    handle = apply([replace("fake_theirs:train", substitute, reason="test")])
    assert theirs.train is user.train is user.fit is substitute
    handle.undo()
    assert theirs.train is user.train is user.fit is stock


def test_target_may_be_named_where_it_is_only_imported(
    theirs: Any, make_module: MakeModule
) -> None:
    user: Any = make_module("fake_user", "from fake_theirs import train")
    with apply([wrap("fake_user:train", ours, reason="test")]):
        assert theirs.train(1) == user.train(1) == ("ours", ("stock", 1, 0.1))
    assert theirs.train(1) == ("stock", 1, 0.1)


def test_second_undo_does_nothing(theirs: Any) -> None:
    handle = apply([wrap("fake_theirs:train", ours, reason="test")])
    handle.undo()
    later = theirs.train = lambda: "set later by somebody else"
    handle.undo()
    assert theirs.train is later


def test_alias_bound_after_apply_is_restored(theirs: Any, make_module: MakeModule) -> None:
    stock = theirs.train
    for patch in (
        wrap("fake_theirs:train", ours, reason="test"),
        replace("fake_theirs:train", lambda steps: "ours", reason="test"),
    ):
        with apply([patch]):
            late: Any = make_module("fake_late", "from fake_theirs import train, train as fit")
            assert late.train is late.fit is theirs.train is not stock
        assert late.train is late.fit is stock


def test_undo_leaves_alone_who_held_the_substitute_in_its_own_right(
    theirs: Any, make_module: MakeModule
) -> None:
    """Undoing a patch restores only references that the patch replaced. If one no-op had replaced
    two functions, undoing the second patch used to turn every alias of the no-op, and its own name,
    into the second function."""
    helpers: Any = make_module("fake_helpers", "def nothing(*args, **kwargs): return None")
    user: Any = make_module("fake_user", "from fake_theirs import train, other")
    stock, nothing = state(theirs), helpers.nothing
    patches = [
        replace("fake_theirs:train", nothing, reason="test"),
        replace("fake_theirs:other", nothing, reason="test"),
    ]
    with apply(patches):
        late: Any = make_module(
            "fake_late", "from fake_theirs import train, other\nfrom fake_helpers import nothing"
        )
        assert user.train is user.other is late.train is late.other is nothing
    assert helpers.nothing is late.nothing is nothing
    assert user.train is late.train is stock["train"]
    assert user.other is late.other is stock["other"]
    assert_same(stock, state(theirs))


def test_constant_changes_at_its_target_only(theirs: Any, make_module: MakeModule) -> None:
    """Patching a constant changes only its target. ``False`` is one object in the whole process:
    rebinding its aliases used to change every flag of every module."""
    bystander: Any = make_module("fake_bystander", "OFF = False\nON = True\nNOTHING = None")
    before = state(bystander)
    with apply(
        [
            replace("fake_theirs:FLAG", True, reason="test"),
            replace("fake_theirs:train", None, reason="test"),
        ]
    ):
        assert theirs.FLAG is True
        assert theirs.train is None
        assert_same(before, state(bystander))
        late: Any = make_module("fake_late", "ON = True\nNOTHING = None")
    assert theirs.FLAG is False
    assert theirs.train(1) == ("stock", 1, 0.1)
    assert_same(before, state(bystander))
    assert late.ON is True
    assert late.NOTHING is None


def test_wraps_stack_in_order(theirs: Any) -> None:
    def outer(original: Any, *args: Any) -> Any:
        return ("outer", original(*args))

    stock = theirs.train
    patches = [
        replace("fake_theirs:train", lambda steps: steps, reason="test"),
        wrap("fake_theirs:train", ours, reason="test"),
    ]
    with apply(patches), apply([wrap("fake_theirs:train", outer, reason="test")]):
        assert theirs.train(1) == ("outer", ("ours", 1))
    assert theirs.train is stock


def test_wrapped_function_passes_the_checks_of_the_next_wrap(theirs: Any) -> None:
    patch = wrap(
        "fake_theirs:train",
        ours,
        reason="test",
        signature=plain_signature(theirs.train),
        digests={"1": source_digest(theirs.train)},
    )
    with apply([patch]), apply([patch]):
        assert theirs.train(1) == ("ours", ("ours", ("stock", 1, 0.1)))


def test_replacement_of_a_patched_target_is_refused(theirs: Any, make_module: MakeModule) -> None:
    make_module("fake_user", "from fake_theirs import train")
    replacement = replace("fake_theirs:train", lambda: None, reason="mine")
    again = replace("fake_user:train", lambda: None, reason="yours")
    wrapper = wrap("fake_theirs:train", ours, reason="around")
    for patches in ([replacement, replacement], [replacement, again], [wrapper, again]):
        before = state(theirs)
        with pytest.raises(PatchError, match="would drop the patch that came before"):
            apply(patches)
        assert_same(before, state(theirs))


def test_every_problem_is_listed_and_nothing_changed(theirs: Any, make_module: MakeModule) -> None:
    make_module("fake_broken", "")
    sys.modules.pop("fake_broken")
    before = state(theirs)
    with pytest.raises(PatchError) as error:
        apply(
            [
                wrap("fake_theirs:other", ours, reason="fits"),
                wrap("fake_broken:train", ours, reason="there is no such module"),
                wrap("fake_theirs:gone", ours, reason="there is no such function"),
                wrap("fake_theirs:Layer.gone", ours, reason="the class has no such method"),
                wrap("fake_theirs:train", ours, reason="changed", signature="(steps)"),
                wrap("fake_theirs:Layer.forward", ours, reason="changed", digests={"1": "0" * 12}),
                replace("fake_theirs:FLAG", 1, reason="the target is no function", signature="()"),
                replace(
                    "builtins:len", len, reason="the target has no source", digests={"1": "0" * 12}
                ),
            ]
        )
    assert_same(before, state(theirs))
    told = str(error.value).partition("\nwhere what we do still holds")[0]
    first, *problems = (line for line in told.splitlines() if not line.startswith("    "))
    assert first == "no patch was applied:"
    for problem, expected in zip(
        problems,
        [
            "fake_broken:train cannot be found here: ModuleNotFoundError",
            "fake_theirs:gone cannot be found here: AttributeError",
            "fake_theirs:Layer.gone cannot be found here: AttributeError",
            "fake_theirs:train takes (steps, *, rate=0.1), the patch was written for (steps)",
            "fake_theirs:Layer.forward is not as in fake_theirs 1",
            "fake_theirs:FLAG has no signature",
            "builtins:len is not as in builtins 1",
        ],
        strict=True,
    ):
        assert problem.strip().startswith(expected)


def test_module_that_fails_to_import_is_a_missing_target(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target whose module fails to import counts as missing. A compiled extension whose library
    is missing raises OSError, not ImportError."""
    (tmp_path / "fake_extension.py").write_text("raise OSError('libfake.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PatchError, match=r"OSError: libfake.so"):
        apply([wrap("fake_extension:f", ours, reason="test")])


def test_target_must_belong_to_a_module_or_class(theirs: Any) -> None:
    theirs.layer = theirs.Layer()
    with pytest.raises(PatchError, match="attribute of a Layer"):
        apply([wrap("fake_theirs:layer.forward", ours, reason="test")])


def test_an_unknown_source_is_allowed_until_it_changes(
    theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable that allows an unknown source names that source's digest, so the source is
    refused again once it changes. The variable used to allow every source, later ones too."""
    unknown = wrap("fake_theirs:train", ours, reason="test", digests={"1": "0" * 12})
    digest = source_digest(theirs.train)
    with pytest.raises(PatchError, match="is not as in fake_theirs 1") as caught:
        apply([unknown])
    allowing = f"{ALLOW_UNKNOWN}=fake_theirs:train@{digest}"
    assert f"export {allowing}" in str(caught.value) and "we wrap it: test" in str(caught.value)
    monkeypatch.setenv(ALLOW_UNKNOWN, f" fake_other:f@{digest}, fake_theirs:train@{digest},")
    with apply([unknown]):
        assert theirs.train(1)[0] == "ours"
    with pytest.raises(PatchError, match="takes"):
        apply([wrap("fake_theirs:train", ours, reason="test", signature="()")])
    monkeypatch.setenv(ALLOW_UNKNOWN, f"fake_other:f@{digest},fake_theirs:train@{'1' * 12}")
    with pytest.raises(PatchError) as caught:
        apply([unknown])
    assert f"=fake_other:f@{digest},fake_theirs:train@{digest}" in str(caught.value)
    monkeypatch.setenv(ALLOW_UNKNOWN, "1")
    with pytest.raises(ValueError, match="'1' is not TARGET@DIGEST; 'megatron-ext doctor' prints"):
        apply([unknown])


def test_a_patch_for_several_versions_fits_each_and_no_other(theirs: Any) -> None:
    """A patch with the signatures of several versions fits each of them and no other. In Megatron
    0.19 some functions have an argument that they lack in 0.18."""
    older, newer = "(steps)", plain_signature(theirs.train)
    known = wrap("fake_theirs:train", ours, reason="test", signature=(older, newer))
    with apply([known]):
        assert theirs.train(1)[0] == "ours"
    with pytest.raises(PatchError, match=r"was written for \(steps\) or \(\)"):
        apply([wrap("fake_theirs:train", ours, reason="test", signature=(older, "()"))])


def test_an_original_that_does_it_by_itself_is_left_as_it_is(theirs: Any) -> None:
    """A patch leaves a function as it is if the function's source is listed as needing no patch.
    Megatron 0.20 cuts padded buckets correctly and 0.19 does not; patched twice, the buckets would
    be wrong."""
    digest, original = source_digest(theirs.train), theirs.train
    mended = {"digests": {"1": "0" * 12}, "needless": {"2": digest}}
    with apply([wrap("fake_theirs:train", ours, reason="test", **mended)]) as handle:
        assert theirs.train is original and not handle.patches
    other = {"digests": {"1": digest}, "needless": {"2": "0" * 12}}
    with apply([wrap("fake_theirs:train", ours, reason="test", **other)]):
        assert theirs.train(1)[0] == "ours"
    unknown = {"digests": {"1": "0" * 12}, "needless": {"2": "1" * 12}}
    with pytest.raises(PatchError, match="is not as in fake_theirs 1 and 2"):
        apply([wrap("fake_theirs:train", ours, reason="test", **unknown)])


@pytest.mark.parametrize("how", [replace, wrap])
@pytest.mark.parametrize(
    "target", ["Layer.forward", "Layer.shape", "Layer.make", "Layer.width", "Layer.inherited"]
)
@pytest.mark.parametrize("owner", ["Layer", "Narrow"])
def test_class_attributes_are_put_back_exactly(
    theirs: Any, how: Callable[..., Patch], target: str, owner: str
) -> None:
    before = state(theirs)
    target = target.replace("Layer", owner)
    with apply([how(f"fake_theirs:{target}", lambda *args: None, reason="test")]):
        changed = {name for name, value in state(theirs).items() if value is not before.get(name)}
        assert changed == {target}
    assert_same(before, state(theirs))


def test_methods_are_bound_as_the_originals_were(theirs: Any) -> None:
    """A wrapped method is bound like the original one. The wrapper of a static method used to be
    called with the instance as its first argument, and the wrapper of a class method lost the
    subclass on which it was called."""
    with apply(
        [
            wrap("fake_theirs:Layer.forward", ours, reason="test"),
            wrap("fake_theirs:Layer.shape", ours, reason="test"),
            wrap("fake_theirs:Layer.make", ours, reason="test", signature="(cls, x)"),
            wrap("fake_theirs:Layer.inherited", ours, reason="test"),
        ]
    ):
        layer = theirs.Narrow()
        assert layer.forward(1) == ("ours", ("stock", 1))
        assert layer.shape(1) == theirs.Layer.shape(1) == ("ours", ("stock", 1))
        assert layer.make(1) == theirs.Narrow.make(1) == ("ours", ("stock", "Narrow", 1))
        assert theirs.Layer.make(1) == ("ours", ("stock", "Layer", 1))
        assert layer.inherited() == ("ours", "stock")
        assert theirs.Base().inherited() == "stock"
    with apply(
        [
            replace("fake_theirs:Layer.shape", lambda x: ("new", x), reason="test"),
            replace("fake_theirs:Layer.make", lambda cls, x: (cls.__name__, x), reason="test"),
        ]
    ):
        assert layer.shape(1) == ("new", 1)
        assert layer.make(1) == ("Narrow", 1)


def test_lazy_module_attribute_is_lazy_again_after_undo(make_module: MakeModule) -> None:
    lazy: Any = make_module(
        "fake_lazy",
        "def __getattr__(name):\n    if name == 'f': return print\n    raise AttributeError",
    )
    with apply([replace("fake_lazy:f", lambda: "ours", reason="test")]):
        assert lazy.f() == "ours"
    assert lazy.f is print
    assert "f" not in vars(lazy)


@pytest.mark.parametrize(
    "failing",
    [
        replace("builtins:int.bit_length", lambda self: 0, reason="int is an immutable type"),
        replace(
            "builtins:bool.bit_length",
            lambda self: 0,
            reason="bool inherits the method, and is immutable",
        ),
    ],
)
def test_failure_during_the_swap_undoes_all(
    theirs: Any, make_module: MakeModule, failing: Patch
) -> None:
    """If a patch fails while patches are applied, all are undone. Undoing the failed patch used to
    raise an error itself, so all earlier patches stayed in place."""
    user: Any = make_module("fake_user", "from fake_theirs import train")
    before, stock = state(theirs), theirs.train
    patches = [
        wrap("fake_theirs:train", ours, reason="test"),
        wrap("fake_theirs:Layer.inherited", ours, reason="test"),
        failing,
    ]
    with pytest.raises(TypeError, match="immutable type"):
        apply(patches)
    assert_same(before, state(theirs))
    assert user.train is stock


def test_failure_in_an_importing_module_undoes_all(theirs: Any, make_module: MakeModule) -> None:
    class Guarded(types.ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            raise RuntimeError("read only")

    guarded = make_module("fake_guarded", "from fake_theirs import train")
    guarded.__class__ = Guarded
    before = state(theirs)
    with pytest.raises(RuntimeError, match="read only"):
        apply([wrap("fake_theirs:train", ours, reason="test")])
    assert_same(before, state(theirs))


def test_stale_references_names_partials_and_closures(theirs: Any) -> None:
    def close_over(function: Any) -> Any:
        return lambda: function()

    patches = [
        wrap("fake_theirs:train", ours, reason="test"),
        replace("fake_theirs:other", lambda: None, reason="test"),
    ]
    assert stale_references(patches) == []
    kept = [functools.partial(theirs.train, 1), close_over(theirs.other)]
    assert stale_references(patches) == [
        "fake_theirs:train is held by a partial",
        "fake_theirs:other is held by a cell",
    ]
    del kept
    assert stale_references(patches) == []


def test_engine_itself_is_no_stale_reference(theirs: Any) -> None:
    """The engine's own records do not count as stale references to an original. A second set of
    patches on the same target used to take these records for such references."""
    patches = [
        replace("fake_theirs:other", lambda: None, reason="test"),
        wrap("fake_theirs:train", ours, reason="test"),
    ]
    with apply(patches):
        assert stale_references(patches) == []
        with apply([wrap("fake_theirs:train", ours, reason="test")]):
            assert stale_references(patches) == []
    assert stale_references(patches) == []


def test_digest_is_of_the_code(make_module: MakeModule) -> None:
    source = """
    class A:
        def f(self, x: int) -> int:
            return (x +
                1)
    """
    same = """
    class A:
        # a comment
        def f(self, x: int) -> int:
            return x + 1  # and another
    """
    digests = [
        source_digest(make_module(name, textwrap.dedent(text)).A.f)
        for name, text in [
            ("fake_a", source),
            ("fake_b", same),
            ("fake_c", source.replace("1", "2")),
        ]
    ]
    assert digests[0] == digests[1] != digests[2]


def test_digest_of_a_method_with_text_at_the_margin(make_module: MakeModule) -> None:
    """A method has a digest if its text contains a line at the margin. `textwrap.dedent` finds no
    common margin there, so the source used to be unparsable."""
    module: Any = make_module("fake_margin", 'class A:\n    def f(self):\n        """A\nB"""\n')
    assert len(source_digest(module.A.f)) == 12


def test_resolve_says_what_is_stored(theirs: Any) -> None:
    target = resolve("fake_theirs:Layer.make")
    assert target.owner is theirs.Layer
    assert target.original is vars(theirs.Layer)["make"].__func__
    assert target.raw is vars(theirs.Layer)["make"]
    assert not target.in_module
    assert resolve("fake_theirs:train").in_module


def test_versions_of_digests_are_listed_once_and_in_order() -> None:
    """Versions of Megatron are listed once and in order. A commit of Megatron's main, which some
    callers pin, is listed after the release before it."""
    known = {"0.20@2a75ac1": "b", "0.9, 0.18": "a", "0.20": "c"}
    assert versions_of(known) == ["0.9", "0.18", "0.20"]
