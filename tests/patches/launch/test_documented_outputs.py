"""The outputs that stand in the documentation are those of their commands.

docs/planning.md showed columns that `plan` had not printed for weeks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import write_outputs
from tests.helpers.combinations import IS_NIGHT
from tests.helpers.own_cache import own_cache

MARKED = [page for page in write_outputs.PAGES if list(write_outputs.blocks(page.read_text()))]


@pytest.fixture(scope="module", autouse=True)
def module_cache(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[None]:
    with own_cache(tmp_path_factory.mktemp("cache"), pytestconfig):
        yield


@pytest.mark.search
@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.stem)
def test_outputs_are_those_of_their_commands(page: Path) -> None:
    """Outputs on pages are those of their commands. Slow commands run at night
    (MEGATRON_EXT_NIGHTLY=1)."""
    text = page.read_text()
    assert write_outputs.with_outputs(text, quick=not IS_NIGHT) == text, (
        f"run scripts/write_outputs.py {page.relative_to(write_outputs.ROOT)}"
    )


@pytest.mark.parametrize("page", write_outputs.PAGES, ids=lambda page: page.stem)
def test_an_output_has_its_mark(page: Path) -> None:
    """Each output on a page has its mark. If a mark were misspelt, its block would never be
    updated."""
    text = page.read_text()
    marks = re.findall(r"^<!-- .*output.*-->$", text, re.MULTILINE)
    assert len(marks) == text.count("```console") == len(list(write_outputs.blocks(text)))


def test_figures_of_the_worked_example_are_those_of_its_outputs() -> None:
    """A figure in the text about an output must change when the output does."""
    planning = (write_outputs.ROOT / "docs" / "planning.md").read_text()
    example = planning.split('<a id="deepseek-v3"></a>')[1].split("\n<a id=")[0]
    shown = "".join(block.text for block in write_outputs.blocks(example)).replace("\n", " ")
    said = re.sub(r"^```.*?^```$", "", example, flags=re.DOTALL | re.MULTILINE)
    figures = re.findall(r"\d+(?:\.\d+)? (?:%|GiB)|\b\d+ microbatches", said)
    assert len(figures) > 2
    for figure in figures:
        assert figure.replace(" %", "%") in shown, figure


PAGE = """
```bash
# sizes.sh
SIZES="--pp 2 -m 2"
```

<!-- output: written by scripts/write_outputs.py -->
```console
$ source sizes.sh
$ megatron-ext simulate 1f1b $SIZES \\
    --costs f=1,i=1,w=1 | grep makespan
out of date
$ ls
```

<!-- slow output | tail -1: written by scripts/write_outputs.py -->
```console
$ cat sizes.sh
out of date
```
"""


def test_outputs_are_written_anew() -> None:
    """Outputs on pages are written anew. The commands of a page share a shell and the files that
    the page shows."""
    quick = write_outputs.with_outputs(PAGE, quick=True)
    assert re.search(r"grep makespan\nmakespan +9\n", quick)
    assert "$ ls\npretrain_gpt.py\nsizes.sh\n```" in quick
    assert quick.count("out of date") == 1
    slow = write_outputs.with_outputs(PAGE, quick=False)
    assert '$ cat sizes.sh\nSIZES="--pp 2 -m 2"\n```' in slow
    assert "out of date" not in slow


def test_a_command_that_cannot_run_ends_it() -> None:
    page = PAGE.replace("1f1b", "no-such")
    with pytest.raises(ValueError, match=r"simulate no-such(.|\n)*ended with 2: .*no-such"):
        write_outputs.with_outputs(page, quick=True)
