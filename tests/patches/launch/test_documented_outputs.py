"""Tests that the outputs in the documentation are those of their commands.

docs/planning.md used to show columns that `plan` no longer printed.
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
    """The output blocks of a documentation page equal what their commands print. Slow commands run
    at night (MEGATRON_EXT_NIGHTLY=1)."""
    text = page.read_text()
    assert write_outputs.with_outputs(text, quick=not IS_NIGHT) == text, (
        f"run scripts/write_outputs.py {page.relative_to(write_outputs.ROOT)}"
    )


@pytest.mark.parametrize("page", write_outputs.PAGES, ids=lambda page: page.stem)
def test_an_output_has_its_mark(page: Path) -> None:
    """Each output block on a page has the comment that marks it. A block with a misspelt mark would
    never be updated."""
    text = page.read_text()
    marks = re.findall(r"^<!-- .*output.*-->$", text, re.MULTILINE)
    assert len(marks) == text.count("```console") == len(list(write_outputs.blocks(text)))


def test_figures_of_the_worked_example_are_those_of_its_outputs() -> None:
    """Every number that docs/planning.md mentions in the text of its DeepSeek-V3 example occurs in
    the outputs of that example, so the text must change with them."""
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
    """scripts/write_outputs.py writes the outputs of a page. All commands of a page share a shell,
    and the files that the page shows. In a quick run slow commands do not run, and are only
    reported as out of date."""
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
