"""Tests of the script that reads public recipes and counts how many are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.evaluation.recipes.counting import Row, count, rows
from scripts.evaluation.recipes.page import on_recipe_stages, refusals, summary, totals
from scripts.evaluation.recipes.public_form import flat, layout_text, plain, read_recipes
from scripts.evaluation.recipes.readme import RECIPES_PAGE
from scripts.evaluation.recipes.recipe import RECIPES, Recipe, expanded, read_models, resolve
from scripts.evaluation.recipes.settings import NAMES, OTHER_NAMES, WHOLE_LAYERS
from scripts.evaluation.recipes.verdict import Verdict
from scripts.tables import part
from tests.helpers.covers import vocabulary
from tests.helpers.covers.vocabulary import SETTINGS

ALL = read_recipes(RECIPES)
MODELS = read_models()
LLAMA = "recipes.llama.h100.llama3:llama3_70b_pretrain_32gpu_h100_bf16_16k_config"
DEEPSEEK = "perf_recipes.deepseek.b200.deepseek_v3:deepseek_v3_pretrain_256gpu_b200_bf16_config"


def accepted(recipe: Recipe) -> Verdict:
    return Verdict(recipe.schedule)


def made(recipes: Any = ALL, verdict: Any = accepted) -> list[Row]:
    return rows(recipes, verdict, verdict)


def test_all_recipes_are_understood() -> None:
    assert not [row.unknown for row in made() if row.unknown]
    assert len(ALL) == 243


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("model.fancy_schedule", True, "model.fancy_schedule is unknown"),
        ("rerun.mode", True, "rerun.mode is unknown"),
        ("dataset.pack_otherwise", True, "dataset.pack_otherwise is unknown"),
        (
            "model.pipeline_model_parallel_layout",
            "[['decoder', 'expert']]",
            "'expert' is not a layer",
        ),
        ("train.micro_batch_size", None, "micro_batch_size is missing"),
        ("model.pipeline_model_parallel_size", 1, "the recipe has no pipeline"),
        ("model.pipeline_model_parallel_size", "eight", "pipeline_model_parallel_size='eight'"),
        ("model.HF", "meta-llama/Llama-9", "the recipe's model meta-llama/Llama-9 is unknown"),
        ("mixed_precision", "fp2_mixed", "mixed_precision='fp2_mixed' is unknown"),
    ],
)
def test_what_is_unknown_fails(key: str, value: Any, told: str) -> None:
    raw = {**ALL[DEEPSEEK], key: value}
    (row,) = made({DEEPSEEK: raw})
    assert row.unknown and told in row.unknown
    total = count([row], on_recipe_stages)
    assert (total.recipes, total.unknown, total.accepted) == (1, 1, 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[512, 0]", [512, 0]),
        ("(127, 0)", [127, 0]),
        ("8", 8),
        ("-1.5", -1.5),
        ("True", True),
        ("false", False),
        ("None", None),
        ("none", "none"),
        ("full", "full"),
        ("torch.bfloat16", "torch.bfloat16"),
        ("([0]*3 + [1]*2)", [0, 0, 0, 1, 1]),
        ("[<CudaGraphScope.attn: 2>, 'mlp']", ["attn", "mlp"]),
        ("AttnBackend.flash", "flash"),
        ("Et*2|(t|)*2L", "Et*2|(t|)*2L"),
        ("[0] * 100000000", "[0] * 100000000"),
        ("__import__('os').getcwd()", "__import__('os').getcwd()"),
        ("M-M-*", "M-M-*"),
    ],
)
def test_values_that_are_text(text: str, value: Any) -> None:
    """Values of a recipe may be text. A recipe's ``window_size="[512, 0]"`` used to end the
    script."""
    assert plain(text) == value


@pytest.mark.parametrize(
    "layout",
    [
        [["embedding", "decoder", "decoder"], ["decoder"], [], ["mtp", "loss"]],
        [["E", "t", "t"], ["t"], [], ["m", "L"]],
        ["Ett", "t", "", "mL"],
    ],
)
def test_layouts_that_are_lists(layout: Any) -> None:
    """Layouts of a recipe may be lists, as in 36 of 243 public recipes. The script used to say that
    these do not run in Megatron."""
    assert layout_text(layout) == layout_text(plain(str(layout))) == "Ett|t||mL"


def test_public_forms_of_a_recipe_are_one() -> None:
    """A recipe whose settings are published as a nested config, as names of flags or with values as
    text reads the same as one with dotted names."""
    raw = ALL[DEEPSEEK]
    nested: dict[str, Any] = {}
    for key, value in raw.items():
        *configs, name = key.split(".")
        inner = nested
        for config in configs:
            inner = inner.setdefault(config, {})
        inner[name] = value
    expected = resolve(DEEPSEEK, raw, MODELS).settings
    for form in (
        nested,
        {"cfg": nested},
        {key: str(value) for key, value in raw.items()},
        {f"++{key}": value for key, value in raw.items()},
        {f"--{key.rpartition('.')[2].replace('_', '-')}": value for key, value in raw.items()},
        {**raw, "model.num_layers": None, "peft": None},
    ):
        assert resolve(DEEPSEEK, form, MODELS).settings == expected
    layout = expected["pipeline_model_parallel_layout"]
    assert layout.startswith("Etttt|tttt|") and layout.endswith("|tmL")
    assert flat({"model": {"a": {"b": 1}}}) == {"model.a.b": 1}


def test_models_that_recipes_do_not_name() -> None:
    """Recipes need not name their model. A variant has the dimensions of its model, a recipe
    without a model those of its siblings, and one with its own dimensions needs no other."""
    variant = {**ALL[LLAMA], "model.HF": "meta-llama/Meta-Llama-3-70B-Instruct"}
    assert resolve(LLAMA, variant, MODELS).model == "meta-llama/Meta-Llama-3-70B"
    without = {key: value for key, value in ALL[LLAMA].items() if key != "model.HF"}
    assert resolve(LLAMA, without, MODELS).model == "meta-llama/Meta-Llama-3-70B"
    with pytest.raises(ValueError, match="the recipe's model is unknown: the recipe names none"):
        resolve("other:mine_pretrain_8gpu_h100_bf16_config", without, MODELS)
    sizes = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4}
    given = {f"model.{name}": size for name, size in sizes.items()}
    own_sizes = resolve("other:mine_8gpu_h100_bf16_config", without | given, MODELS)
    assert own_sizes.model == "its own dimensions" and own_sizes.settings["num_layers"] == 8


def test_settings_that_only_megatron_knows_are_compared_with_its_defaults() -> None:
    raw = {**ALL[LLAMA], "model.qk_clip": True, "train.exit_interval": None, "optimizer.lr": 1e-4}
    recipe = resolve(LLAMA, raw, MODELS, {"qk_clip": False, "lr": 1e-4})
    assert recipe.settings["qk_clip"] is True and "lr" not in recipe.settings


def test_no_recipe_ends_the_others() -> None:
    """No single recipe ends the script. It names a recipe whose settings are no mapping, and one
    that raises an error while it is judged."""

    def ended(recipe: Recipe) -> Verdict:
        if recipe.name == DEEPSEEK:
            raise TypeError("no such thing")
        return accepted(recipe)

    recipes = {"list": [1], DEEPSEEK: ALL[DEEPSEEK], LLAMA: ALL[LLAMA]}
    first, second, third = rows(recipes, ended, ended)
    assert first.unknown and "must be a mapping" in first.unknown
    assert second.unknown == "TypeError: no such thing" and second.on_stages is None
    assert third.on_stages and third.on_stages.is_accepted
    text = "\n".join(summary([first, second, third]))
    assert "3 recipes: 1 accepted" in text and "2 not understood" in text
    assert f"not understood: {DEEPSEEK}: TypeError: no such thing" in text


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"a": {"x": 1}}', ["a"]),
        ('{"recipes": {"a": {}}}', ["a"]),
        ('[{"name": "a", "x": 1}, {"recipe": "b", "settings": {"x": 1}}]', ["a", "b"]),
    ],
)
def test_files_of_recipes(tmp_path: Path, text: str, names: list[str]) -> None:
    (path := tmp_path / "recipes.json").write_text(text)
    assert list(read_recipes(path)) == names


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read"),
        ("3", "neither a mapping"),
        ('[{"x": 1}]', "has no name"),
        ('{"a": {}, "a": {}}', "a occurs twice"),
        ('[{"name": "a"}, {"name": "a"}]', "a occurs twice"),
    ],
)
def test_files_that_are_no_recipes(tmp_path: Path, text: str, told: str) -> None:
    (path := tmp_path / "recipes.json").write_text(text)
    with pytest.raises(ValueError, match=told):
        read_recipes(path)


def test_what_is_refused_or_what_stock_cannot_run_is_not_accepted() -> None:
    for verdict in (
        Verdict("zb-h1", why="no"),
        Verdict("zb-h1", why="no", without=("tp_comm_overlap",)),
        Verdict("zb-h1", why_stock="its layers do not divide"),
    ):
        (row,) = made({LLAMA: ALL[LLAMA]}, lambda recipe, verdict=verdict: verdict)
        total = count([row], on_recipe_stages)
        assert (total.recipes, total.accepted) == (1, 0)
        assert total.after_dropping == bool(verdict.without)
        assert ("| no | 1 |" in refusals([row])) == (verdict.why is not None)


def understood(name: str, **more: Any) -> Recipe:
    raw = {key: value for key, value in {**ALL[name], **more}.items() if value is not None}
    return resolve(name, raw, MODELS)


def test_what_name_model_and_bridge_say_besides() -> None:
    recipe = understood(DEEPSEEK)
    assert recipe.settings["precision"] == "bf16" and recipe.gpus == 256
    assert recipe.settings["multi_latent_attention"] is True
    assert (recipe.schedule, recipe.ranks) == ("zb-h1", 16)
    assert recipe.bubble == pytest.approx(15 / (256 + 15))
    # The recipe's layout contains an m, a layer of multi-token prediction. If neither the layout
    # nor the setting gives the depths, they are the model's one depth, unless the recipe's name
    # says that there is none.
    no_depths = {"model.mtp_num_layers": None}
    assert understood(DEEPSEEK, **no_depths).settings["mtp_num_layers"] == 1
    layout = {"model.pipeline_model_parallel_layout": None}
    assert understood(DEEPSEEK, **no_depths, **layout).settings["mtp_num_layers"] == 1
    name = DEEPSEEK.replace("pretrain", "no_mtp_pretrain")
    raw = {key: value for key, value in ALL[DEEPSEEK].items() if "mtp_num" not in key}
    assert resolve(name, raw, MODELS).settings["mtp_num_layers"] is None


@pytest.mark.parametrize(
    ("settings", "is_on"),
    [
        ({"model.tensor_model_parallel_size": 2, "model.sequence_parallel": True}, True),
        ({"model.tensor_model_parallel_size": 1, "model.sequence_parallel": True}, False),
        ({"model.tensor_model_parallel_size": 2, "model.sequence_parallel": None}, False),
    ],
)
def test_some_switches_need_others(settings: dict[str, Any], is_on: bool) -> None:
    recipe = understood(LLAMA, **settings, **{"comm_overlap.tp_comm_overlap": True})
    assert bool(recipe.settings.get("tp_comm_overlap")) == is_on


@pytest.mark.parametrize(
    ("name", "fp8", "fp4"),
    [
        ("perf_recipes.llama.gb300.llama3:llama3_70b_sft_32gpu_gb300_fp8cs_config", True, None),
        ("perf_recipes.llama.gb300.llama3:llama3_70b_sft_32gpu_gb300_fp8mx_config", True, None),
        ("perf_recipes.kimi.gb200.kimi_k2:kimi_k2_pretrain_256gpu_gb200_fp8mx_config", False, None),
        ("perf_recipes.llama.h100.llama3:llama3_70b_sft_32gpu_h100_fp8sc_config", None, None),
        ("perf_recipes.llama.h100.llama3:llama3_70b_sft_32gpu_h100_fp8ds_config", True, None),
        (
            "perf_recipes.llama.gb300.llama3:llama3_70b_pretrain_64gpu_gb300_nvfp4_config",
            None,
            True,
        ),
        (DEEPSEEK, None, None),
    ],
)
def test_matrices_are_stored_as_the_mixed_precision_says(
    name: str, fp8: bool | None, fp4: bool | None
) -> None:
    """Megatron-Bridge's mixed precisions in FP8 and NVFP4 store layers' matrices only in quantised
    form, unless a recipe says otherwise. All recipes used to be planned with 16-bit matrices in
    addition."""
    raw = ALL.get(name, ALL[LLAMA])
    settings = resolve(name, raw, MODELS).settings
    assert (settings.get("fp8_param_gather"), settings.get("fp4_param_gather")) == (fp8, fp4)
    given = resolve(name, {**raw, "model.fp8": "e4m3", "model.fp8_recipe": "mxfp8"}, MODELS)
    assert given.settings.get("fp8_param_gather") in (None, False), "no mixed precision is named"


def test_layouts_are_written_out() -> None:
    assert expanded("Et*2|(t*2|)*2,tL") == "Ett|tt|tt|tL"
    assert expanded("Et|(tt|)*30mL") == "Et|" + "tt|" * 30 + "mL"


def test_of_a_loop_the_schedule_has_its_chunks_and_group() -> None:
    recipe = understood(
        LLAMA,
        **{
            "model.virtual_pipeline_model_parallel_size": 5,
            "model.microbatch_group_size_per_vp_stage": 8,
            "model.pipeline_model_parallel_size": 4,
        },
    )
    assert recipe.schedule == "interleaved-zb:vpp=5,group=8"


def test_the_page_counts_these_recipes() -> None:
    page = RECIPES_PAGE.read_text()
    head, _, first = totals(made()).splitlines()[:3]
    assert part(page, "accepted").splitlines()[0] == head
    assert first.startswith(f"| all, own stages | {len(ALL)} | {len(ALL)} (100%)")
    assert f"\n| all, own stages | {len(ALL)} |" in page
    assert part(page, "refused").splitlines()[0] == refusals([]).splitlines()[0]


def test_settings_are_those_of_the_marks_of_tests() -> None:
    """Settings of recipes are the ones that the marks of tests name, so that a test can show each
    of them."""
    assert set(NAMES) == {setting.name for setting in SETTINGS} and len(NAMES) == len(SETTINGS)
    assert OTHER_NAMES == vocabulary.OTHER_NAMES and WHOLE_LAYERS == vocabulary.WHOLE_LAYERS
