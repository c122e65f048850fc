"""Each flag of each command has a test of its effect, named here. A flag without a row fails, and a row without a test.

A row's test must fail if the flag does nothing; `make mutants` breaks flags one at a time and looks.
"""

import importlib
from argparse import Action
from pathlib import Path

import pytest

from hvdtrain import cli
from tests.single.commands import test_flags_of_scripts

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = "single/commands/test_flags_of_scripts.py::test_"
BENCHMARK = "single/commands/test_flags_of_benchmark.py::test_"
GPU_DAY = "single/analysis/test_gpu_day.py::test_"
EVALUATE = "single/commands/test_evaluate.py::test_"
OTHERS = "single/commands/test_flags_of_others.py::test_"
PARALLEL = "parallel/test_flags.py::test_"
LOCAL_STEPS = "parallel/test_local_steps.py::test_"
WATCHING = "e2e/training/test_watching.py::test_"
TRACKING = "e2e/training/test_tracking.py::test_"
TUNED = "e2e/commands/test_tuned.py::test_"
RANKS = "single/launching/test_local_ranks.py::test_"
Tests = dict[str, str]  # test -> flags, separated by blanks


def seen_in_runs(script: str) -> Tests:
    flags = " ".join(row[0] for row in test_flags_of_scripts.EFFECTS[script])
    return {SCRIPTS + "effect": flags}


ENGINE: Tests = {
    "e2e/engines/test_engines.py::test_engines_draw_one_loss_curve": "--engine",
    SCRIPTS + "a_device_that_is_chosen": "--device",
    "e2e/commands/test_mnist.py::test_tuning_is_said_and_can_be_left_off": "--tuning",
}
THREADS: Tests = {SCRIPTS + "effect": "--threads"}
COMPRESSION: Tests = {PARALLEL + "compression_halves_the_bytes_on_the_wire": "--compression --fp16-allreduce"}
TRAINING: Tests = {
    **ENGINE,
    **COMPRESSION,
    **seen_in_runs("every script"),
    SCRIPTS + "the_seed_is_that_of_the_weights_and_of_the_order": "--seed",
    SCRIPTS + "deterministic_reaches_the_engine_and_is_said_to_do_nothing_on_a_cpu": "--deterministic",
    SCRIPTS + "progress_is_shown_unless_it_is_not_wanted": "--no-progress",
    SCRIPTS + "verbose_names_each_automatic_setting": "--verbose",
    SCRIPTS + "resume_never_begins_anew_and_a_path_starts_from_it": "--resume",
    PARALLEL + "predivision_makes_smaller_what_is_sent_and_not_the_mean": "--gradient-predivide-factor",
    PARALLEL + "reduction_sum_is_the_sum": "--reduction",
    PARALLEL + "replicas_are_compared_at_check_steps": "--check-steps",
    LOCAL_STEPS + "outer_rate_and_momentum_are_those_of_the_shared_weights": "--sync-every --outer-lr --outer-momentum",
    "parallel/test_hosts_as_workers.py::test_each_host_trains_as_one_process_with_the_samples_of_its_ranks": "--sync-within",
    WATCHING + "tensorboard_has_what_metrics_has": "--tensorboard",
    WATCHING + "each_rank_has_a_profile_of_the_steps_that_were_asked_for": "--profile",
    EVALUATE + "evaluate_gives_the_metrics_of_the_end_of_training_without_any_other_flag": "--evaluate",
    EVALUATE + "predictions_are_in_the_order_of_the_data_set": "--predict",
    TRACKING + "without_a_server_the_record_is_in_the_output_folder_or_the_run_goes_on_without": "--track",
    "single/training/test_run.py::test_a_step_left_out_changes_nothing_and_training_goes_on": "--max-skipped",
    "e2e/training/test_guard.py::test_a_hung_rank_is_named_and_ends_the_job": "--step-timeout",
}
TARGET: Tests = {SCRIPTS + "target_accuracy_ends_training_or_is_missed": "--target-accuracy"}
EFFECTS: dict[str, list[Tests]] = {
    "mnist": [TRAINING, TARGET, seen_in_runs("mnist"), {
        SCRIPTS + "label_smoothing_is_in_the_loss_that_is_trained_and_not_in_the_recorded_one": "--label-smoothing",
        SCRIPTS + "data_set_and_directory": "--dataset --data-dir",
        SCRIPTS + "the_seed_is_that_of_the_weights_and_of_the_order": "--model",
    }],
    "imagenet": [TRAINING, TARGET, seen_in_runs("imagenet"), {
        SCRIPTS + "reduced_decode_reads_fewer_pixels": "--reduced-decode",
        SCRIPTS + "workers_load_the_images": "--workers",
        SCRIPTS + "more_corrupt_images_than_allowed_end_the_run": "--max-corrupt",
        SCRIPTS + "compile_compiles": "--compile",
    }],
    "lm": [TRAINING, seen_in_runs("lm"), {
        SCRIPTS + "other_recipes_set_what_is_not_given": "--recipe",
        SCRIPTS + "byte_pairs_have_the_size_that_was_asked_for_or_are_read": "--vocabulary-size --tokenizer",
        SCRIPTS + "dropout_zeroes_in_training_alone": "--dropout",
        SCRIPTS + "compile_compiles": "--compile",
        SCRIPTS + "temperature_decides_how_likely_the_unlikely_is": "--sample --temperature",
    }],
    "reduce": [ENGINE, THREADS, {
        BENCHMARK + "reduce_reduces_in_the_type_and_by_the_operation_that_were_asked_for": "--reduction --dtype",
        BENCHMARK + "a_sweep_has_the_sizes_and_types_that_were_asked_for_and_is_written":
            "--sweep --min-bytes --max-bytes --output-dir",
        BENCHMARK + "seconds_per_size_are_what_a_size_takes": "--seconds-per-size",
    }],
    "benchmark": [ENGINE, COMPRESSION, {
        BENCHMARK + "amp_and_memory_format": "--threads --amp",
        BENCHMARK + "channels_last_images": "--model --image-size --channels-last",
        BENCHMARK + "steps_and_batches": "--batch-size --warmup-steps --repeats --steps --output-dir",
        BENCHMARK + "compile_compiles": "--compile",
        BENCHMARK + "without_communication_a_serial_engine_reduces": "--no-communication",
        BENCHMARK + "the_seed_is_that_of_the_weights": "--seed",
    }],
    "scaling": [{
        OTHERS + "scaling_runs_what_was_asked_for_within_its_time": "--engines --ranks --threads --timeout --output-dir",
        OTHERS + "rounds_and_seed_decide_how_often_and_in_which_order": "--rounds --seed",
        OTHERS + "scaling_starts_on_the_hosts_over_the_interface": "--hosts --interface",
    }],
    "doctor": [{OTHERS + "the_doctor_checks_what_was_named": "--engine --device --data-dir --output-dir --json"}],
    "gpu_day": [{
        GPU_DAY + "started_again_it_goes_on_and_only_runs_what_was_named": "--only",
        GPU_DAY + "the_list_needs_nothing": "--list",
        GPU_DAY + "minutes_and_quick_are_those_of_the_day": "--minutes --quick",
        GPU_DAY + "several_ranks_share_one_gpu_and_only_then": "--device",
        GPU_DAY + "a_row_that_fails_does_not_hide_the_others": "--output-dir",
    }],
    "report": [{OTHERS + "a_report_lies_where_it_was_asked_for": "--output-dir"}],
    "tuned": [{
        TUNED + "the_rank_that_does_not_come_is_named_with_its_place": "--watch",
        TUNED + "a_plain_script_ends_as_without_us_and_is_recorded": "--output-dir",
        TUNED + "repeatable_gives_the_same_bits_on_three_ranks": "--repeatable",
    }],
    "starter": [{
        RANKS + "each_rank_is_the_program_with_a_place_and_numbers_of_its_own": "--local-ranks",
        RANKS + "ranks_that_do_not_fit_are_refused_with_what_to_type": "--oversubscribe",
        RANKS + "a_module_that_starts_a_thread_or_cannot_be_imported_is_refused": "--import",
        RANKS + "a_host_that_does_not_come_is_named": "--wait",
        RANKS + "an_import_that_hangs_is_ended": "--start-timeout",
        "single/commands/test_starter.py::test_interface_and_port_are_those_that_were_named": "--interface --port",
    }],
    "unpack": [],
    "data.make_shards": [{
        OTHERS + "shards_have_at_most_so_many_samples_in_the_order_of_the_seed": "--samples-per-shard --seed"
    }],
    "export": [{
        "single/commands/test_export.py::test_weights_have_the_models_own_names": "--to",
        "single/training/test_best.py::test_the_best_epoch_is_kept_recorded_and_exported": "--best",
    }],
    "training.verify": [],
}  # fmt: skip


class Listed(Exception):
    """Raised in place of parsing: the parser's flags."""


def flags_of(command: str) -> list[Action]:
    """Return every flag of the command."""

    def listed(parser: cli.Parser, *_: object, **__: object) -> None:
        raise Listed([action for action in parser._actions if action.option_strings and action.dest != "help"])

    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse", "parse_args"):
            patch.setattr(cli.Parser, name, listed)
        with pytest.raises(Listed) as caught:
            importlib.import_module(f"hvdtrain.{command}").parse([])
    return caught.value.args[0]


def test_every_command_is_here():
    commands = {path.stem for path in (ROOT / "hvdtrain").glob("*.py") if "\ndef parse(" in path.read_text()}
    assert commands <= set(EFFECTS)


@pytest.mark.parametrize("command", EFFECTS)
def test_every_flag_has_a_test_of_its_effect_and_a_help_text(command):
    flags = flags_of(command)
    names = {next(name for name in flag.option_strings if name.startswith("--")) for flag in flags}
    assert names == {flag for tests in EFFECTS[command] for row in tests.values() for flag in row.split()}
    assert [flag.option_strings for flag in flags if not flag.help] == []


def test_every_test_of_an_effect_exists():
    for row in {row for parts in EFFECTS.values() for tests in parts for row in tests}:
        path, _, name = row.partition("::")
        assert f"\ndef {name}(" in (ROOT / "tests" / path).read_text(), row
