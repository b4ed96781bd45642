"""All subjects of which there are records."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.behaviour.commands import helps, outputs
from tests.behaviour.files import files
from tests.behaviour.names import names
from tests.behaviour.programs import programs
from tests.behaviour.record import Subject
from tests.behaviour.refusals import refusals

SUBJECTS: Mapping[str, Callable[[], Subject]] = {
    "programs": programs,
    "help": helps,
    "outputs": outputs,
    "refusals": refusals,
    "files": files,
    "names": names,
}
