"""Platform without a GPU, on which Megatron trains a GPT on CPU tensors and gloo.

No module imports this file; the launcher loads it by name if ``torch.cuda.is_available()`` is
False. It has three declared layers: names of ``torch.cuda`` get CPU meanings, ``device="cuda"``
becomes ``"cpu"``, and a few of Megatron's functions accept a machine without a GPU.

Not patched, and why:

- ``torch.cuda.is_available``: a GPU is never faked; torch's optimizers and data loaders would
  reach for the driver.
- ``torch.cuda.empty_cache`` and the memory counters: without a driver they are no-ops and zeros.
- ``Module.cuda`` and ``Tensor.to``: Megatron passes them ``torch.cuda.current_device()``, which
  is ``"cpu"`` here.
- CUDA graphs, fused and flash attention, Transformer Engine, grouped GEMM, context parallelism: no
  CPU implementation exists; `default_flags` refuses them.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from megatron_ext.patches.engine import Patch, replace, wrap

NOTICE = "no GPU found, training on the CPU with gloo (local layers)"

ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # Megatron's jit_fuser is torch.compile, which needs a compiler
    "OMP_NUM_THREADS": "1",  # ranks share the cores
}


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a rank needs before torch is imported.

    ``env`` is the rank's given environment.
    """
    ranks = env.get("WORLD_SIZE", "1")
    on_one_node = ranks == "1" or env.get("LOCAL_WORLD_SIZE") == ranks
    # Without GLOO_SOCKET_IFNAME gloo looks up the host's own name, which many machines cannot
    # resolve.
    return ENVIRONMENT | ({"GLOO_SOCKET_IFNAME": "lo"} if on_one_node else {})


# Flags that a training on the CPU requires, each with its value; None for a switch.
_NEEDED: dict[str, str | None] = {
    "--transformer-impl": "local",
    "--distributed-backend": "gloo",
    "--no-masked-softmax-fusion": None,
    "--no-gradient-accumulation-fusion": None,
    "--no-persist-layer-norm": None,
    "--no-rope-fusion": None,
}

# Flags that a training on the CPU refuses, each with the one harmless value, the reason, and what
# to write instead.
_REFUSED: dict[str, tuple[str | None, str, str]] = {
    "--transformer-impl": (
        "local",
        "Transformer Engine needs a GPU",
        "leave the flag out or write --transformer-impl local",
    ),
    "--distributed-backend": (
        "gloo",
        "NCCL needs a GPU",
        "leave the flag out or write --distributed-backend gloo",
    ),
    "--context-parallel-size": (
        "1",
        "context parallel attention exists in Transformer Engine only",
        "use --context-parallel-size 1",
    ),
    "--cuda-graph-impl": ("none", "there is no CUDA to capture", "leave the flag out"),
    "--moe-grouped-gemm": (None, "grouped GEMM needs a GPU", "leave the flag out"),
    "--moe-permute-fusion": (None, "the fused permutation needs a GPU", "leave the flag out"),
    "--moe-router-fusion": (None, "the fused router needs a GPU", "leave the flag out"),
    "--use-flash-attn": (None, "flash attention needs a GPU", "leave the flag out"),
    "--fp8-format": (None, "fp8 needs a GPU", "use --bf16 or fp32"),
}


def default_flags(argv: Sequence[str]) -> list[str]:
    """Return Megatron's flags for the CPU that ``argv`` lacks, to be appended to ``argv``.

    Raises:
        ValueError: ``argv`` requests something the CPU cannot do.
    """
    given: dict[str, str | None] = {}
    for position, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        following = argv[position + 1] if position + 1 < len(argv) else None
        given[flag] = value if equals else following
    for flag, (harmless, fact, fix) in _REFUSED.items():
        if flag in given and (harmless is None or given[flag] != harmless):
            value = f" {given[flag]}" if harmless is not None else ""
            raise ValueError(f"{flag}{value}: this machine has no GPU and {fact}; {fix}")
    return [
        word
        for flag, value in _NEEDED.items()
        if flag not in given
        for word in (flag, value)
        if word is not None
    ]


_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def _cuda_names() -> dict[str, Any]:
    """Return the CPU substitutes for functions of ``torch.cuda``, by name.

    Each call creates new objects: undoing a patch restores names by the identity of the substitute,
    so no other patch may use the same object.
    """
    import torch

    class Stream(torch.cpu.Stream):
        def __init__(self, device: object = None, priority: int = 0) -> None:
            super().__init__()

        def record_event(self, event: Any = None) -> Any:
            return torch.cpu.Event()  # on the CPU the work before an event has ended already

    class Event(torch.cpu.Event):
        def __init__(self, **unused: object) -> None:
            super().__init__()

    current = Stream()
    return {
        "current_device": lambda: "cpu",
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: torch.cpu.stream(stream),
        "current_stream": lambda device=None: current,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
        # torch.manual_seed calls torch.cuda.manual_seed, so the stand-in seeds the generator itself
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    }


def _called_from(package: str) -> bool:
    """Return whether the caller of a patched function is in ``package``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, Patch.__module__):
        frame = frame.f_back
    caller: str = frame.f_globals.get("__name__", "") if frame is not None else ""
    return caller == package or caller.startswith(package + ".")


def _on_cpu(original: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    if device is not None and str(device).startswith("cuda"):
        device = "cpu"
    return original(*args, device=device, **kwargs)


def _type_name(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    answer = original(tensor, *args, **kwargs)
    if isinstance(answer, str) and _called_from("megatron.core.optimizer"):
        return answer.replace("torch.", "torch.cuda.", 1)
    return answer


def _device_count(original: Any) -> int:
    return 1 if _called_from("megatron") else original()


def _data_loader(original: Any, *args: Any, **kwargs: Any) -> None:
    import torch

    original(*args, **{"generator": torch.Generator(), **kwargs})


def _initialize(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{**kwargs, "allow_no_cuda": True})


def _compile_helpers(original: Any) -> None:
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        original()


def _on_host(original: Any, tensor: Any, as_numpy: bool = False, **kwargs: Any) -> Any:
    tensor = original(tensor, as_numpy, **kwargs)
    return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor


def checkpoint_writer(*args: Any) -> None:
    """Run Megatron's loop that writes checkpoints asynchronously, with the CPU substitutes.

    The loop (`PersistentAsyncCaller.async_loop`) runs in a process of its own, which inherits no
    patches.
    """
    import torch
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.dist_checkpointing.strategies.filesystem_async import (
        FileSystemWriterAsync,
    )

    for name, meaning in {**_cuda_names(), "device_count": lambda: 1}.items():
        setattr(torch.cuda, name, meaning)
    preload = FileSystemWriterAsync.preload_tensors
    FileSystemWriterAsync.preload_tensors = staticmethod(
        lambda *buckets: _copied(preload(*buckets))
    )
    PersistentAsyncCaller.async_loop(*args)


def _copied(buckets: Sequence[Any]) -> list[Any]:
    """Return ``buckets`` of tensors to save, each cloned so that training cannot overwrite it.

    Megatron has copied tensors from a GPU already, but the writing process shares tensors of the
    host with the training.
    """
    return [
        (file, key, (plain, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (plain, tensors) in buckets
    ]


def _log_filter(original: Any, logger: Any, record: logging.LogRecord) -> Any:
    return record.msg != "CPU RNG state changed within GPU RNG context" and original(logger, record)


def _norm(original: Any, cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    if not config.sequence_parallel:
        return original(cls, config, *args, **kwargs)
    config = copy.copy(config)
    config.sequence_parallel = False
    norm = original(cls, config, *args, **kwargs)
    for parameter in norm.parameters():
        # This attribute tells Megatron to sum the gradient over the tensor-parallel ranks.
        parameter.sequence_parallel = True
    return norm


def _on_the_host(original: Any, hybrid: Any, offload_fraction: float) -> Any:
    """Wrap `HybridDeviceOptimizer._get_sub_optimizer_param_groups` for parameters on the host.

    Megatron copies device parameters to the host, and returns the copies as the updated versions.
    Here all parameters are on the host, so each is returned as its own updated version.
    """
    hybrid.pin_cpu_grads = False
    of_host, of_device, *_, in_fp32 = original(hybrid, offload_fraction)
    parameters = (parameter for group in hybrid.param_groups for parameter in group["params"])
    updated = {parameter: in_fp32.get(parameter, parameter) for parameter in parameters}
    originals = {inner: parameter for parameter, inner in updated.items()}
    return of_host, of_device, updated, originals, in_fp32


_STEPS = "steps without parameters"


def _has_parameters(adam: Any) -> bool:
    return any(group["params"] for group in adam.param_groups)


def _counted_steps(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `DistributedOptimizer.__init__` so that ranks without parameters count optimizer steps.

    AdamW counts steps in the states of its parameters. A rank's optimizer has no parameters if, for
    example, all experts are in later stages or its stage is frozen.
    """
    original(optimizer, *args, **kwargs)
    adam = optimizer.optimizer
    if adam is not None and not _has_parameters(adam):
        adam.register_step_post_hook(_count_step)


def _count_step(adam: Any, *unused: object) -> None:
    for group in adam.param_groups:
        group["step"] = group.get("step", 0) + 1


def _begun_states(original: Any, optimizer: Any) -> Any:
    """Wrap `DistributedOptimizer.state_dict` so that it works before the first optimizer step.

    Megatron asserts that AdamW has stepped, although a checkpoint is loaded before any step. The
    states that AdamW would create in its first step are created now. On a rank without parameters a
    temporary state provides the number of steps.
    """
    import torch

    adam = optimizer.optimizer
    if not _has_parameters(adam):
        steps = adam.param_groups[0].get("step", 0)
        adam.state[_STEPS] = {"step": torch.tensor(steps, dtype=torch.float32)}
        try:
            return original(optimizer)
        finally:
            del adam.state[_STEPS]
    # If the optimizer has a dummy step of its own, that step also puts the main parameters into its
    # states.
    if hasattr(adam, "dummy_step") and not adam.state:
        adam.dummy_step()
    if not isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        return original(optimizer)
    for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
        if not adam.state[parameter]:
            adam.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return original(optimizer)


@contextlib.contextmanager
def _single_gathers(
    original: Any, group: Any = None, device: Any = None, async_ops: bool = False
) -> Iterator[Any]:
    """Wrap torch's `_coalescing_manager` so that collected all-gathers start one by one."""
    from torch.distributed import distributed_c10d

    with original(group, device, async_ops) as handle:
        yield handle
        group = group or distributed_c10d._get_default_group()
        collected = distributed_c10d._world.pg_coalesce_state[group]
        if any(entry.dst_tensor is None or entry.redop is not None for entry in collected):
            return  # the collected collectives are reductions, which stay coalesced
        for entry in collected:
            handle.append(group._allgather_base(entry.dst_tensor, entry.tensor))
        collected.clear()
        if not async_ops:
            handle.wait()


def _experts_after_their_step(
    original: Any, chunk: Any, *unused: Any, force_sync: bool = False, force_dispatch: bool = False
) -> None:
    """Wrap `DistributedDataParallel.start_param_sync` so that it does not gather experts too early.

    The optimizer of the first chunk's other parameters forces the gather of all parameters before
    the experts' optimizer has stepped. The experts' gather starts at the first pass instead.
    """
    experts = chunk.expert_parallel_bucket_groups
    if force_dispatch:
        chunk.expert_parallel_bucket_groups = []
    try:
        original(chunk, *unused, force_sync=force_sync, force_dispatch=force_dispatch)
    finally:
        chunk.expert_parallel_bucket_groups = experts


def _own_steps(original: Any, optimizer: Any, state_dict: Any) -> None:
    """Wrap `DistributedOptimizer.load_state_dict` so that each parameter gets its own step tensor.

    Megatron gives the same step tensor to all parameters, and AdamW increments it in place once for
    each parameter.
    """
    original(optimizer, state_dict)
    for state in optimizer.optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()


def _all_but_step(original: Any, optimizer: Any, parameter: Any, tensors: Any) -> None:
    """Wrap `_set_main_param_and_optimizer_states` of an optimizer so that it sets no step count.

    The step count of AdamW is loaded already; depending on the checkpoint's format, ``tensors``
    lack it or have the count from before loading. Gradients are disabled, because the loader writes
    to fp32 parameters in place.
    """
    import torch

    with torch.no_grad():
        original(optimizer, parameter, {**tensors, "step": None})


def patches() -> tuple[Patch, ...]:
    """Return all patches of the CPU platform, for the engine's `apply`."""
    import torch

    return (
        *(
            replace(
                f"torch.cuda:{name}",
                meaning,
                reason="this function of torch.cuda has a counterpart on the CPU",
            )
            for name, meaning in _cuda_names().items()
        ),
        *(
            wrap(
                f"torch:{factory}",
                _on_cpu,
                reason="Megatron writes device='cuda', and there is no such device",
            )
            for factory in ("tensor", "zeros", "ones", "empty", "empty_like", "rand")
        ),
        replace(
            "torch:Tensor.cuda",
            lambda tensor, *args, **kwargs: tensor,
            reason="Megatron calls cuda() of tensors; without a GPU they stay where they are",
        ),
        replace(
            "torch:Tensor.record_stream",
            lambda tensor, stream: None,
            reason="overlapped passes record the streams that read a tensor; the CPU has none",
        ),
        wrap(
            "torch:Tensor.type",
            _type_name,
            reason="Megatron's optimizers accept parameters of torch.cuda types only",
        ),
        wrap(
            "torch.cuda:device_count",
            _device_count,
            reason="Megatron creates parallel groups and seeds only if it counts a device",
        ),
        wrap(
            "torch.utils.data:DataLoader.__init__",
            _data_loader,
            reason="a loader draws seeds from dropout's generator, so a resumed run would differ",
        ),
        replace(
            "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
            lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
            reason="Megatron sets the state of torch.cuda.default_generators, which the CPU lacks",
            signature="(new_state, device=-1, graph_safe=False)",
        ),
        wrap(
            "megatron.training.initialize:initialize_megatron",
            _initialize,
            reason="Megatron asserts that there is a GPU, unless given allow_no_cuda",
        ),
        replace(
            "megatron.training.utils.common_utils:get_device_arch_version",
            lambda: 10,
            reason="without a GPU, Megatron must not require CUDA_DEVICE_MAX_CONNECTIONS=1",
        ),
        wrap(
            "megatron.core.datasets.utils:compile_helpers",
            _compile_helpers,
            reason="Megatron's wheel has compiled dataset helpers but no Makefile",
            signature="()",
        ),
        replace(
            "megatron.core.dist_checkpointing.strategies.async_utils:"
            "PersistentAsyncCaller.async_loop",
            checkpoint_writer,
            reason="the process that writes checkpoints needs the CPU's stand-ins for CUDA, too",
        ),
        wrap(
            "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
            _on_host,
            reason="MoE's all-to-all needs numpy arrays, which Megatron makes only of GPU tensors",
            signature="(tensor, as_numpy=False, record_stream=False)",
        ),
        wrap(
            "logging:Logger.filter",
            _log_filter,
            reason="the CPU has one generator, so Megatron would warn at every random draw",
        ),
        wrap(
            "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            _norm,
            reason="Megatron refuses torch's norms for sequence parallelism; an attribute suffices",
        ),
        wrap(
            "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:"
            "HybridDeviceOptimizer._get_sub_optimizer_param_groups",
            _on_the_host,
            reason="Megatron assumes that parameters updated on the host are copies",
            signature="(self, offload_fraction)",
        ),
        wrap(
            "torch.distributed.distributed_c10d:_coalescing_manager",
            _single_gathers,
            reason="two concurrent coalesced gathers of a gloo group corrupt memory (torch 2.14)",
            signature="(group=None, device=None, async_ops=False)",
        ),
        wrap(
            "megatron.core.distributed.distributed_data_parallel:"
            "DistributedDataParallel.start_param_sync",
            _experts_after_their_step,
            reason="a parameter gather of gloo could restore old values of experts' parameters",
            signature="(self, *unused, force_sync=False, force_dispatch=False)",
        ),
        wrap(
            f"{_DISTRIBUTED_OPTIMIZER}.__init__",
            _counted_steps,
            reason="torch's AdamW counts no steps on a rank that has none of its parameters",
        ),
        wrap(
            f"{_DISTRIBUTED_OPTIMIZER}.state_dict",
            _begun_states,
            reason="Megatron asserts that torch's AdamW has taken a step before states are loaded",
            signature="(self)",
        ),
        wrap(
            f"{_DISTRIBUTED_OPTIMIZER}.load_state_dict",
            _own_steps,
            reason="a step tensor that parameters share is incremented once for each of them",
            signature="(self, state_dict)",
        ),
        wrap(
            f"{_DISTRIBUTED_OPTIMIZER}._set_main_param_and_optimizer_states",
            _all_but_step,
            reason="Megatron would shard AdamW's step count, which is whole on each rank",
            signature="(self, model_param, tensors)",
        ),
    )
