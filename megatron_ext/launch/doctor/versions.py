"""Versions that are known to fit: of Megatron, of its dependencies and of its callers.

Patches are made for sources that were read, and other packages were tried to different degrees. A
user asks one question: does mine fit? The table says it for each version, and how far that was
tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_ext.patches.engine import Patch


class Tried(StrEnum):
    """Extent to which a version was tried.

    If only the sources of a version were read, nothing is known but that patches fit.
    """

    TRAINED = "trained on the CPU"
    READ = "read"
    NOT = "not tried"


@dataclass(frozen=True)
class KnownVersion:
    """Version of Megatron, or of a package used with it, that was tried or read.

    Attributes:
        version: text of the version.
        megatron: the versions of Megatron in it, as digests of patches name them; empty without a
            Megatron.
        tried: how far this version was tried.
        how: the tests that ran, or the observations.
    """

    name: str
    version: str
    megatron: tuple[str, ...]
    tried: Tried
    how: str = ""

    def patches(self, declared: frozenset[str]) -> str:
        """Return, in words, whether our patches fit this version.

        ``declared`` are the versions of Megatron that the patches were read against.
        """
        fits = self.tried is Tried.TRAINED
        if self.megatron:
            fits = declared.issuperset(self.megatron)
        elif not fits:
            return "not known"
        return "fit" if fits else "do not fit"


_MEGATRON, _ENGINE = "Megatron-LM", "Transformer Engine"
KNOWN = (
    KnownVersion(
        _MEGATRON,
        "0.20, main of August 2026 (d98e8a6)",
        ("0.20",),
        Tried.TRAINED,
        "1f1b, zb-h1, zb-v, interleaved-zb, multimodal models and a checkpoint, bitwise as its own "
        "schedules; vocabulary parallelism; post-validation; once. It builds multi-token "
        "prediction with Transformer Engine only: bitwise with a stand-in for its class",
    ),
    KnownVersion(_MEGATRON, "0.19.2", ("0.19",), Tried.TRAINED, "all tests"),
    KnownVersion(
        _MEGATRON, "0.19.0, 0.19.1", ("0.19",), Tried.READ, "what is patched is as in 0.19.2"
    ),
    KnownVersion(
        _MEGATRON,
        "0.18.2",
        ("0.18",),
        Tried.TRAINED,
        "1f1b, zb-h1, zb-v, interleaved, checkpoints (`tests/pipeline/training/test_versions.py`)",
    ),
    KnownVersion(
        _MEGATRON, "0.18.0, 0.18.1", ("0.18",), Tried.READ, "what is patched is as in 0.18.2"
    ),
    KnownVersion(_MEGATRON, "0.17 and older", ("0.17",), Tried.NOT, "refused"),
    KnownVersion(
        _ENGINE,
        "2.8.0, 2.12.0, 2.20.2",
        (),
        Tried.TRAINED,
        "its layers, with torch's operations in the place of its kernels",
    ),
    KnownVersion(_ENGINE, "others from 2.8 on", (), Tried.NOT),
    KnownVersion(
        "Megatron-Bridge",
        "main of August 2026 (067f987), with Megatron 2a75ac1",
        ("0.20@2a75ac1",),
        Tried.READ,
        "its way of calling is `examples/bridge_groups.py`",
    ),
    KnownVersion(
        "Megatron-Bridge",
        "0.6.2, with Megatron 0.19.2",
        ("0.19",),
        Tried.TRAINED,
        "its own `pretrain`: dense, experts, multi-token prediction, `comm_overlap`, low-rank "
        "adapters, packed fine-tuning, its Llama and Qwen recipes and checkpoints, bitwise as its "
        "own schedule (`tests/pipeline/callers/test_bridge.py`); read by `plan MODULE:FUNCTION`",
    ),
    KnownVersion("Megatron-Bridge", "0.5.0", ("0.18",), Tried.NOT),
    KnownVersion(
        "NeMo container", "26.06: Megatron 0.18.0, Transformer Engine 2.16", ("0.18",), Tried.NOT
    ),
    KnownVersion(
        "NeMo-RL",
        "main of August 2026 (7ea279a), with Megatron-Bridge 0.6.2 and Megatron 0.19.2",
        ("0.19",),
        Tried.TRAINED,
        "its own policy worker's log-probabilities and GRPO steps under zb-h1 and zb-auto, also "
        "with replicas, bitwise as under its own schedule "
        "(`tests/pipeline/callers/test_nemo_rl.py`); it pins Megatron's main, of which it names "
        "two classes that 0.19 lacks, and takes no virtual stages",
    ),
    KnownVersion(
        "verl",
        "0.9.1, with Megatron 0.19.2",
        ("0.19",),
        Tried.TRAINED,
        "its own trainer and Megatron engine, also with replicas, tensor parallelism, experts and "
        "checkpoints: losses, log-probabilities and weights bitwise as under its own schedule "
        "(`tests/pipeline/callers/test_verl.py`)",
    ),
    KnownVersion(
        "verl",
        "main of August 2026 (1dda039), with Megatron 0.18.0",
        ("0.18",),
        Tried.READ,
        "its way of calling is `examples/verl_loop.py`",
    ),
    KnownVersion(
        "SkyRL",
        "0.4.0, with Megatron-Bridge 0.6.2 and Megatron 0.19.2",
        ("0.19",),
        Tried.TRAINED,
        "its own policy worker's log-probabilities and steps under zb-h1 and zb-auto, also with "
        "replicas, bitwise as under its own schedule (`tests/pipeline/callers/test_skyrl.py`), "
        "with stand-ins for two functions of `megatron.bridge.peft.utils` that line 8 of its model "
        "wrapper imports: neither Megatron-Bridge 0.6.2 nor its main of August 2026 (067f987) has "
        "them",
    ),
    KnownVersion(
        "ms-swift",
        "4.6.0, with mcore-bridge 1.6.5 and Megatron 0.19.2",
        ("0.19",),
        Tried.TRAINED,
        "its own fine-tuning, on Transformer Engine's classes: zb-h1 and zb-auto, varying lengths, "
        "replicas, low-rank adapters, and zb-v with its own flag of virtual stages: norms, weights "
        "and log-probabilities bitwise as under its own schedule "
        "(`tests/pipeline/callers/test_swift.py`)",
    ),
    KnownVersion(
        "ms-swift",
        "main of August 2026 (3602360), with Megatron 0.18.0",
        ("0.18",),
        Tried.NOT,
    ),
    KnownVersion(
        "slime", "main of August 2026 (624b824), with a Megatron before 0.18", ("0.17",), Tried.NOT
    ),
)


def declared_versions(patches: list[Patch]) -> frozenset[str]:
    """Return the versions of Megatron whose sources ``patches`` were read against.

    Among them are commits before a version, such as ``0.20@2a75ac1``.
    """
    digests = (key for patch in patches for key in (*patch.digests, *patch.needless))
    return frozenset(version for key in digests for version in key.split(", "))


def version_rows(declared: frozenset[str]) -> list[dict[str, str]]:
    """Return the table of known versions (`KNOWN`): a row per version, by column."""
    return [
        {
            "": known.name,
            "version": known.version,
            "patches": known.patches(declared),
            "tried": f"{known.tried}: {known.how}" if known.how else known.tried.value,
        }
        for known in KNOWN
    ]
