"""Tests of reading launch commands as people write them: launcher, script, flags, and ignored
words."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

import pytest

from megatron_ext.launch.command.launch_words import Launch, read_launch
from megatron_ext.launch.planner.command_line import command_with
from megatron_ext.planner.verdict import Written


@pytest.mark.parametrize(
    ("command", "launch"),
    [
        ("x.py --a 1", Launch("x.py", False, ("--a", "1"))),
        ("-m mine --a", Launch("mine", True, ("--a",))),
        ("-m megatron_ext x.py --a", Launch("x.py", False, ("--a",), installs=True)),
        ("torchrun --nproc-per-node 8 x.py -m", Launch("x.py", False, ("-m",), 8, installs=False)),
        (
            "bin/torchrun --nnodes 1:2 --nproc_per_node=4 -m megatron_ext -m mine",
            Launch("mine", True, (), 8, installs=True),
        ),
        ("torchrun --nproc-per-node gpu x.py", Launch("x.py", False, (), installs=False)),
        ("torchrun --nnodes '$N' x.py", Launch("x.py", False, (), installs=False)),
        (
            "torchrun --no-python python -u -m megatron_ext x.py",
            Launch("x.py", False, (), 1, installs=True),
        ),
        ("python3.12 -u -X dev x.py --a", Launch("x.py", False, ("--a",), installs=False)),
        (
            "/usr/bin/python -m torch.distributed.run --nproc-per-node 2 -m megatron_ext x.py",
            Launch("x.py", False, (), 2, installs=True),
        ),
        (
            "ft_launcher --nproc-per-node 4 --max-restarts=3 --ft-rank-heartbeat-timeout 600 "
            "--ft_log_level=INFO --term-timeout 5 -m megatron_ext x.py --ft-a 1",
            Launch("x.py", False, ("--ft-a", "1"), 4, installs=True, max_restarts=3),
        ),
        (
            "A=1 MEGATRON_EXT_SCHEDULE=zb-v torchrun x.py",
            Launch(
                "x.py",
                False,
                (),
                1,
                installs=False,
                environment={"A": "1", "MEGATRON_EXT_SCHEDULE": "zb-v"},
            ),
        ),
        (
            "B=2 srun -N 2 --container-image=a.sqsh -m block env A=x=1 torchrun x.py",
            Launch(
                "x.py",
                False,
                (),
                1,
                installs=False,
                environment={"B": "2", "A": "x=1"},
                ignored=("srun", "--container-image=a.sqsh", "-m", "block"),
            ),
        ),
        (
            "srun -n 4 bash -c 'cd /there && A=1 torchrun --nproc-per-node 2 x.py --a'",
            Launch(
                "x.py",
                False,
                ("--a",),
                2,
                installs=False,
                environment={"A": "1"},
                ignored=("cd", "/there"),
            ),
        ),
        (
            "srun -n 4 ./x.py --a",
            Launch("./x.py", False, ("--a",), 4, rank_variable="SLURM_PROCID"),
        ),
    ],
)
def test_where_a_launch_command_begins(command: str, launch: Launch) -> None:
    words = shlex.split(command)
    assert read_launch(words) == replace(launch, words=tuple(words))


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("srun -N 2 --ntasks-per-node 8 python x.py", 16),
        ("srun --nodes=2 --ntasks=16 python -m megatron_ext x.py", 16),
        ("srun -N2 -n16 --gpus-per-task=1 ./x.py", 16),
        ("srun -n 16 --ntasks-per-node=8 bash -c 'cd a && python x.py'", 16),
        ("srun -n '$N' python x.py", None),
        ("srun -N 2 python x.py", None),  # #SBATCH lines of a script may set the number of ranks
        ("srun -N 2-4 --ntasks-per-node 8 python x.py", None),
        ("salloc -N 2 --ntasks-per-node 8 srun python x.py", 16),
        ("srun -n 16 apptainer exec --nv image.sif python x.py", 16),
        ("srun -N 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 8 x.py", 16),
        ("srun -N 2 torchrun --nnodes '$SLURM_NNODES' --nproc-per-node 8 x.py", 16),
        ("srun -n 2 torchrun --nnodes '$N' --nproc-per-node gpu x.py", None),
        ("srun -n 4 torchrun --nproc-per-node 2 x.py", 2),
        ("torchrun --nnodes 2 --nproc-per-node 8 --node_rank='$R' --master_port '$P' x.py", 16),
        ("mpirun -np 512 --npernode 8 python x.py", 512),
        ("mpiexec.hydra -n 16 -ppn 8 python x.py", 16),
        ("mpirun --bind-to none -n 16 -x A python -m mine", 16),
        ("mpirun --npernode 8 python x.py", None),  # the number of nodes is unknown
        ("accelerate launch --num_processes 16 --num_machines 2 x.py --a", 16),
        ("accelerate launch --config_file a.yaml x.py", None),
        ("accelerate launch --num-processes=16 -m megatron_ext x.py", 16),
        ("python -m accelerate.commands.launch --num_processes 16 -m mine", 16),
        ("deepspeed --num_nodes 2 --num_gpus 8 x.py", 16),
        ("deepspeed --num_gpus=8 --module mine", 8),
        ("deepspeed --hostfile hosts --num_gpus 8 x.py", None),
        ("deepspeed x.py", None),
    ],
)
def test_ranks_that_a_launcher_starts(command: str, ranks: int | None) -> None:
    """The number of ranks is read from the launcher's options. srun's number of tasks used to be
    ignored, and one replica was assumed; mpirun, accelerate and deepspeed were unknown."""
    launch = read_launch(shlex.split(command))
    assert launch.world_size == ranks
    assert launch.script in ("x.py", "./x.py", "mine")
    assert launch.is_module == (launch.script == "mine")
    assert launch.installs is (None if "./x.py" in command else "megatron_ext" in command)


@pytest.mark.parametrize(
    ("command", "environment", "ignored"),
    [
        ("mpirun -np 2 -x A=1 -x HOME -x B=x=1 python x.py", {"A": "1", "B": "x=1"}, ""),
        ("mpiexec -genv A 1 -env B=2 -n 2 python x.py", {"A": "1", "B": "2"}, ""),
        ("srun --export=ALL,A=1,B=2,3 -n 2 python x.py", {"A": "1", "B": "2,3"}, ""),
        ("docker run --rm -e A=1 --env=B=2 im python x.py", {"A": "1", "B": "2"}, "--rm im"),
        ("apptainer exec --nv --env A=1,B=2 im python x.py", {"A": "1", "B": "2"}, "--nv im"),
        ("mpirun -np 2 -x A=1 --bind-to none env A=3 python x.py", {"A": "3"}, "--bind-to none"),
        ("A=3 mpirun -np 2 -x A=1 python x.py", {"A": "1"}, ""),
    ],
)
def test_variables_that_a_launcher_sets(
    command: str, environment: dict[str, str], ignored: str
) -> None:
    """Variables that a launcher sets are read. mpirun's -x CUDA_DEVICE_MAX_CONNECTIONS=1 used to be
    ignored, and doctor said that the variable is not set."""
    launch = read_launch(shlex.split(command))
    assert launch.environment == environment
    programs = {"mpirun", "docker", "run", "apptainer", "exec"}
    assert " ".join(word for word in launch.ignored if word not in programs) == ignored
    assert bool(launch.ignored) == bool(ignored)


@pytest.mark.parametrize("launcher", ["python", "torchrun --nproc-per-node 2"])
def test_a_flag_before_the_script(launcher: str) -> None:
    """A flag of megatron_ext before the script is an error that says where to write it. It used to
    be ignored, and the rest of the command was judged as a launch of Megatron's own pipeline,
    although the launch ends with "no such option"."""
    words = shlex.split(f"{launcher} -m megatron_ext --pipeline-schedule zb-h1 x.py --a 1")
    with pytest.raises(ValueError) as error:
        read_launch(words)
    assert str(error.value) == (
        "--pipeline-schedule stands before the script, where flags are not read: write it behind "
        "the script, -m megatron_ext x.py --pipeline-schedule zb-h1 ..."
    )


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("pretrain --num-layers 3", "'pretrain --num-layers 3' begins no launch command"),
        ("srun -N 2 prog", "'srun -N 2' begins no launch command: begin with SCRIPT.py"),
        ("", "there is no launch command"),
        ("torchrun --nproc-per 2 --no-such x.py", "torchrun does not accept its flags: "),
    ],
)
def test_what_is_no_launch_command(command: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_launch(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS",
        "torchrun --nproc-per-node 8 x.py ${MODEL_ARGS[@]} --bf16",
        "python -m megatron_ext x.py $ARGS",
    ],
)
def test_words_that_only_the_shell_knows(command: str) -> None:
    """A launch command is refused if a word starts with a shell variable, which only the shell can
    expand. The variable used to be taken for the script, and the sizes in its value were
    missing."""
    with pytest.raises(ValueError, match=r"^\$.* is a variable that only the shell can expand: g"):
        read_launch(command.split())


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("bash train.sh --nodes 4", "train.sh"),
        ("sh -x ./train", "./train"),
        ("./train.sh", "./train.sh"),
        ("sbatch --nodes 4 job.sbatch", "job.sbatch"),
        ("A=1 srun -n 4 bash train.sh", "train.sh"),
    ],
)
def test_a_shell_script_is_not_run(command: str, script: str) -> None:
    with pytest.raises(ValueError) as error:
        read_launch(command.split())
    assert "starts a shell script, which is not executed" in str(error.value)
    assert "the log of an earlier start in place of the command, as in megatron-ext plan" in str(
        error.value
    )
    assert f"write echo before the launcher (torchrun, python) in {script}," in str(error.value)


def test_a_shell_script_before_the_launcher_is_ignored() -> None:
    words = ("./bind.sh", "python", "x.py", "--a")
    found = Launch("x.py", False, ("--a",), installs=False, ignored=("./bind.sh",), words=words)
    assert read_launch(words) == found


LAUNCH = Launch("x.py", False, ("--a", "1"), installs=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python x.py --a 1", LAUNCH),
        ("python x.py --a 1 2>&1 | tee log", replace(LAUNCH, ignored=("tee", "log"))),
        ("python x.py --a 1 > out 2> err &", LAUNCH),
        ("python x.py --a 1 &>> out", LAUNCH),
        ("python x.py --a 1 > >(tee out) # a note: python y.py --a 2", LAUNCH),
        ("python \\\n  x.py \\\n  --a 1 \\\n", LAUNCH),
        ("set -e\nexport A=1 B=$C\npython x.py --a 1\n", ("A", "B")),
        ("(A='x y' exec python x.py --a 1); rm x.py", ("A",)),
        # Of the commands that run Python, the one with the most words is the training; `echo` runs
        # nothing.
        ("pip install . && python z.py && python x.py --a 1 && python y.py", LAUNCH),
        ("echo python x.py --a 1 --b 2; python x.py --a 1", LAUNCH),
    ],
)
def test_a_launch_in_a_shells_text(text: str, expected: Launch | tuple[str, ...]) -> None:
    """A launch is read from the text that a command gives to a shell, as in `bash -c '...'`.
    `doctor -- bash -c '...'` used to end with "zip() argument 2 is longer than argument 1", and
    words of a pipe after srun were taken for arguments of the script."""
    for before in (["bash", "-c"], ["srun", "sh", "-lc"], ["B=1", "bash", "-exc"]):
        launch = read_launch([*before, text])
        assert (launch.script, launch.arguments) == ("x.py", ("--a", "1")), before
        if isinstance(expected, Launch):
            assert (
                launch.ignored[-len(expected.ignored) or len(launch.ignored) :] == expected.ignored
            )
        else:
            assert set(launch.environment) - {"B"} == set(expected) - {"B"}
            assert expected != ("A",) or launch.environment["A"] == "x y"


def test_variables_of_a_shells_text_are_not_expanded() -> None:
    text = (
        'python x.py --a "$(cat "a b")" --b ${B:-"c d"} --c `date +%s` '
        "--d '[0, 1]' --e $((1 + 2))"
    )
    assert read_launch(["bash", "-c", text]).arguments == (
        *("--a", '$(cat "a b")'),
        *("--b", '${B:-"c d"}'),
        *("--c", "`date +%s`"),
        *("--d", "[0, 1]"),
        *("--e", "$((1 + 2))"),
    )


@pytest.mark.parametrize("word", ["torchrun --nproc-per-node 4 x.py", "A=1 python x.py --a 1"])
def test_a_command_in_quotes_is_refused_with_the_advice_to_drop_them(word: str) -> None:
    """A launch command that is quoted as a whole is refused with "drop the quotes around it". If it
    begins with an assignment of a variable, the error used to be "'' begins no launch command"."""
    with pytest.raises(ValueError, match="drop the quotes around it"):
        read_launch([word])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("python x.py --a 'b", "a quote ' is not closed"),
        ('python x.py --a "b', 'a quote " is not closed'),
        ("python x.py --a $(b", "a bracket ( is not closed"),
    ],
)
def test_a_shells_text_that_is_not_closed_is_refused(text: str, why: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"the text behind bash -c is not understood: {why}")
    ):
        read_launch(["bash", "-c", text])


ADDED = Written(("--pipeline-schedule", "zb-v"), ("--num-virtual-stages-per-pipeline-rank",))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            'cd /x && A=$B python x.py --lr 1 --z "$Z" 2>&1 | tee out.$N',
            'cd /x && A=$B python -m megatron_ext x.py --lr 1 --z "$Z" --pipeline-schedule zb-v '
            "2>&1 | tee out.$N",
        ),
        (
            "torchrun x.py \\\n  --num-virtual-stages-per-pipeline-rank \\\n 2 \\\n  --lr 1 \\\n",
            "torchrun -m megatron_ext x.py \\\n  --lr 1 --pipeline-schedule zb-v \\\n",
        ),
        (
            "a -v 1 -v 2 -v 3 -v 4 && srun i bash -c 'cd /x && python x.py --lr 1 | tee o' && rm x",
            "a -v 1 -v 2 -v 3 -v 4 && srun i bash -c 'cd /x && python -m megatron_ext x.py --lr 1 "
            "--pipeline-schedule zb-v | tee o' && rm x",
        ),
        (
            "python -m x; echo done",
            "python -m megatron_ext -m x --pipeline-schedule zb-v; echo done",
        ),
        ("python -m megatron_ext x.py", "python -m megatron_ext x.py --pipeline-schedule zb-v"),
    ],
)
def test_a_shells_text_stays_as_it_is_around_the_launch(before: str, after: str) -> None:
    """A written command keeps the shell's text around the launch: `&&`, `|` and `$B` stay unquoted.
    They used to be quoted, so no shell could run the command."""
    for shell in (["bash", "-c"], ["srun", "-n", "4", "bash", "-lc"]):
        written = command_with(read_launch([*shell, before]), ADDED)
        assert shlex.split(written) == [*shell, after]
