"""Each flag of each command has a test of its effect, named here. A flag without a row fails, and a row without a test.

A row's test must fail if the flag does nothing; `make mutants` breaks flags one at a time and looks.
"""

import importlib
import re
from argparse import Action
from pathlib import Path

import pytest

from hvdtrain import cli

ROOT = Path(__file__).resolve().parents[3]
MNIST = "single/commands/test_flags_of_mnist.py::test_"
IMAGENET = "single/commands/test_flags_of_imagenet.py::test_"
LM = "single/commands/test_flags_of_lm.py::test_"
BENCHMARK = "single/commands/test_flags_of_benchmark.py::test_"
OTHERS = "single/commands/test_flags_of_others.py::test_"
PARALLEL = "parallel/test_flags.py::test_"
TRACKING = "e2e/training/test_tracking.py::test_"
FORKING = "single/launching/test_local_ranks.py::test_"
ENGINE = {
    "--engine": "e2e/engines/test_engines.py::test_engines_draw_one_loss_curve",
    "--device": MNIST + "a_device_that_is_chosen",
    "--threads": MNIST + "threads",
    "--tuning": "e2e/commands/test_mnist.py::test_tuning_is_said_and_can_be_left_off",
}
COMPRESSION = dict.fromkeys(
    ("--compression", "--fp16-allreduce"), PARALLEL + "compression_halves_the_bytes_on_the_wire"
)
TRAINING = {
    **ENGINE,
    **COMPRESSION,
    "--epochs": MNIST + "epochs_samples_batches_and_micro_batches",
    "--batch-size": MNIST + "epochs_samples_batches_and_micro_batches",
    "--accumulate": MNIST + "epochs_samples_batches_and_micro_batches",
    "--amp": MNIST + "amp_computes_in_its_type_in_training_and_in_evaluation",
    "--gradient-predivide-factor": PARALLEL + "predivision_makes_smaller_what_is_sent_and_not_the_mean",
    "--reduction": PARALLEL + "reduction_sum_is_the_sum",
    "--weights": MNIST + "weights_are_those_of_the_file",
    "--seed": MNIST + "the_seed_is_that_of_the_weights_and_of_the_order",
    "--output-dir": MNIST + "the_output_directory_has_every_file",
    "--log-steps": MNIST + "records_are_written_at_log_steps_and_epochs_ends",
    "--no-progress": MNIST + "progress_is_shown_unless_it_is_not_wanted",
    "--verbose": MNIST + "verbose_names_each_automatic_setting",
    "--tensorboard": "e2e/training/test_watching.py::test_tensorboard_has_what_metrics_has",
    "--track": TRACKING + "without_a_server_the_record_is_in_the_output_folder_or_the_run_goes_on_without",
    "--profile": "e2e/training/test_watching.py::test_profile_has_both_ranks_and_the_steps_in_order",
    "--checkpoint-steps": MNIST + "checkpoints_at_checkpoint_steps_and_as_many_as_are_kept",
    "--keep": MNIST + "checkpoints_at_checkpoint_steps_and_as_many_as_are_kept",
    "--resume": MNIST + "resume_never_begins_anew_and_a_path_starts_from_it",
    "--check-steps": PARALLEL + "replicas_are_compared_at_check_steps",
    "--max-skipped": "single/training/test_run.py::test_a_step_left_out_changes_nothing_and_training_goes_on",
    "--step-timeout": "e2e/training/test_guard.py::test_a_hung_rank_is_named_and_ends_the_job",
}
CLASSIFIERS = {
    "--lr": MNIST + "rates_follow_rate_scaling_and_schedule",
    "--lr-scaling": MNIST + "rates_follow_rate_scaling_and_schedule",
    "--lr-schedule": MNIST + "rates_follow_rate_scaling_and_schedule",
    "--warmup-epochs": MNIST + "rates_follow_rate_scaling_and_schedule",
    "--optimizer": MNIST + "the_optimizer_and_its_settings",
    "--momentum": MNIST + "the_optimizer_and_its_settings",
    "--weight-decay": MNIST + "the_optimizer_and_its_settings",
    "--label-smoothing": MNIST + "label_smoothing_is_in_the_loss_that_is_trained_and_not_in_the_recorded_one",
    "--target-accuracy": MNIST + "target_accuracy_ends_training_or_is_missed",
}
EFFECTS = {
    "mnist": {
        **TRAINING,
        **CLASSIFIERS,
        "--dataset": MNIST + "data_set_and_directory",
        "--data-dir": MNIST + "data_set_and_directory",
        "--train-samples": MNIST + "epochs_samples_batches_and_micro_batches",
        "--recipe": MNIST + "a_recipe_sets_what_is_not_given",
        "--model": MNIST + "the_seed_is_that_of_the_weights_and_of_the_order",
    },
    "imagenet": {
        **TRAINING,
        **CLASSIFIERS,
        "--lr": IMAGENET + "rates_and_optimizer_are_those_of_the_flags",
        "--lr-schedule": IMAGENET + "rates_and_optimizer_are_those_of_the_flags",
        "--warmup-epochs": IMAGENET + "rates_and_optimizer_are_those_of_the_flags",
        "--optimizer": IMAGENET + "rates_and_optimizer_are_those_of_the_flags",
        "--momentum": IMAGENET + "rates_and_optimizer_are_those_of_the_flags",
        "--weight-decay": IMAGENET + "rates_and_optimizer_are_those_of_the_flags",
        "--label-smoothing": IMAGENET + "label_smoothing_is_in_the_loss_that_is_trained",
        "--dataset": IMAGENET + "synthetic_images_have_the_size_the_number_and_the_classes",
        "--data-dir": IMAGENET + "a_folder_is_read_whole",
        "--train-shards": IMAGENET + "shards_are_those_named",
        "--test-shards": IMAGENET + "shards_are_those_named",
        "--train-samples": IMAGENET + "synthetic_images_have_the_size_the_number_and_the_classes",
        "--classes": IMAGENET + "synthetic_images_have_the_size_the_number_and_the_classes",
        "--image-size": IMAGENET + "a_folder_is_read_whole",
        "--reduced-decode": IMAGENET + "reduced_decode_reads_fewer_pixels",
        "--workers": IMAGENET + "workers_load_the_images",
        "--max-corrupt": IMAGENET + "more_corrupt_images_than_allowed_end_the_run",
        "--recipe": IMAGENET + "the_recipe_decides_what_is_not_given",
        "--model": IMAGENET + "the_model_is_the_one_named",
        "--memory-format": IMAGENET + "memory_format_is_that_of_the_images",
        "--compile": IMAGENET + "compile_compiles",
    },
    "lm": {
        **TRAINING,
        "--epochs": LM + "epochs_are_passes_through_the_text",
        "--text": LM + "epochs_are_passes_through_the_text",
        "--recipe": LM + "a_recipe_sets_what_is_not_given",
        "--tokens": LM + "windows_steps_and_tokens",
        "--vocabulary-size": LM + "byte_pairs_have_the_size_that_was_asked_for_or_are_read",
        "--tokenizer": LM + "byte_pairs_have_the_size_that_was_asked_for_or_are_read",
        "--layers": LM + "the_model_has_the_sizes_that_were_asked_for",
        "--heads": LM + "the_model_has_the_sizes_that_were_asked_for",
        "--width": LM + "the_model_has_the_sizes_that_were_asked_for",
        "--context": LM + "windows_steps_and_tokens",
        "--tied": LM + "the_model_has_the_sizes_that_were_asked_for",
        "--bias": LM + "the_model_has_the_sizes_that_were_asked_for",
        "--dropout": LM + "dropout_zeroes_in_training_alone",
        "--steps": LM + "windows_steps_and_tokens",
        "--lr": LM + "rates_rise_and_fall_between_the_two_that_were_given",
        "--min-lr": LM + "rates_rise_and_fall_between_the_two_that_were_given",
        "--warmup-steps": LM + "rates_rise_and_fall_between_the_two_that_were_given",
        "--beta2": LM + "the_optimizers_settings",
        "--weight-decay": LM + "the_optimizers_settings",
        "--clip-norm": LM + "gradients_are_clipped",
        "--compile": LM + "compile_compiles",
        "--sample": LM + "temperature_decides_how_likely_the_unlikely_is",
        "--sample-tokens": LM + "samples_have_the_length_that_was_asked_for",
        "--temperature": LM + "temperature_decides_how_likely_the_unlikely_is",
    },
    "reduce": {
        **ENGINE,
        "--reduction": BENCHMARK + "reduce_reduces_in_the_type_and_by_the_operation_that_were_asked_for",
        "--dtype": BENCHMARK + "reduce_reduces_in_the_type_and_by_the_operation_that_were_asked_for",
        "--sweep": BENCHMARK + "a_sweep_has_the_sizes_and_types_that_were_asked_for_and_is_written",
        "--min-bytes": BENCHMARK + "a_sweep_has_the_sizes_and_types_that_were_asked_for_and_is_written",
        "--max-bytes": BENCHMARK + "a_sweep_has_the_sizes_and_types_that_were_asked_for_and_is_written",
        "--seconds-per-size": BENCHMARK + "seconds_per_size_are_what_a_size_takes",
        "--output-dir": BENCHMARK + "a_sweep_has_the_sizes_and_types_that_were_asked_for_and_is_written",
    },
    "benchmark": {
        **ENGINE,
        **COMPRESSION,
        "--threads": BENCHMARK + "amp_and_memory_format",
        "--model": BENCHMARK + "channels_last_images",
        "--batch-size": BENCHMARK + "steps_and_batches",
        "--image-size": BENCHMARK + "channels_last_images",
        "--amp": BENCHMARK + "amp_and_memory_format",
        "--channels-last": BENCHMARK + "channels_last_images",
        "--compile": BENCHMARK + "compile_compiles",
        "--input": BENCHMARK + "mock_is_one_batch_and_synthetic_many",
        "--dataset": "single/commands/test_benchmark.py::test_real_digits_are_scaled_pixels",
        "--data-dir": "single/commands/test_benchmark.py::test_image_folders_are_decoded_for_ever",
        "--workers": "single/commands/test_benchmark.py::test_image_folders_are_decoded_for_ever",
        "--no-communication": BENCHMARK + "without_communication_a_serial_engine_reduces",
        "--warmup-steps": BENCHMARK + "steps_and_batches",
        "--repeats": BENCHMARK + "steps_and_batches",
        "--steps": BENCHMARK + "steps_and_batches",
        "--seed": BENCHMARK + "the_seed_is_that_of_the_weights",
        "--output-dir": BENCHMARK + "steps_and_batches",
    },
    "scaling": {
        "--engines": OTHERS + "scaling_runs_what_was_asked_for_within_its_time",
        "--ranks": OTHERS + "scaling_runs_what_was_asked_for_within_its_time",
        "--rounds": OTHERS + "rounds_and_seed_decide_how_often_and_in_which_order",
        "--hosts": OTHERS + "scaling_starts_on_the_hosts_over_the_interface",
        "--interface": OTHERS + "scaling_starts_on_the_hosts_over_the_interface",
        "--threads": OTHERS + "scaling_runs_what_was_asked_for_within_its_time",
        "--timeout": OTHERS + "scaling_runs_what_was_asked_for_within_its_time",
        "--seed": OTHERS + "rounds_and_seed_decide_how_often_and_in_which_order",
        "--output-dir": OTHERS + "scaling_runs_what_was_asked_for_within_its_time",
    },
    "doctor": {
        "--engine": OTHERS + "the_doctor_checks_what_was_named",
        "--device": OTHERS + "the_doctor_checks_what_was_named",
        "--data-dir": OTHERS + "the_doctor_checks_what_was_named",
        "--output-dir": OTHERS + "the_doctor_checks_what_was_named",
        "--json": OTHERS + "the_doctor_checks_what_was_named",
    },
    "report": {
        "--csv": OTHERS + "a_table_has_the_numbers_and_no_page_is_written",
        "--output-dir": OTHERS
        + "a_report_lies_where_it_was_asked_for_in_the_formats_that_were_with_seeds_folded_or_not",
        "--figures": OTHERS + "a_report_lies_where_it_was_asked_for_in_the_formats_that_were_with_seeds_folded_or_not",
        "--each-run": OTHERS + "a_report_lies_where_it_was_asked_for_in_the_formats_that_were_with_seeds_folded_or_not",
    },
    "tuned": {
        "--watch": "e2e/commands/test_tuned.py::test_the_rank_that_does_not_come_is_named_with_its_place",
        "--output-dir": "e2e/commands/test_tuned.py::test_a_plain_script_ends_as_without_us_and_is_recorded",
        "--repeatable": "e2e/commands/test_tuned.py::test_repeatable_gives_the_same_bits_on_three_ranks",
    },
    "starter": {
        "--local-ranks": FORKING + "each_rank_is_the_program_with_a_place_of_its_own",
        "--oversubscribe": FORKING + "more_ranks_than_cores_are_refused_by_the_command",
        "--import": FORKING + "a_module_that_starts_a_thread_or_cannot_be_imported_is_refused",
        "--interface": "single/commands/test_starter.py::test_interface_and_port_are_those_that_were_named",
        "--port": "single/commands/test_starter.py::test_interface_and_port_are_those_that_were_named",
        "--wait": FORKING + "a_host_that_does_not_come_is_named",
        "--start-timeout": FORKING + "an_import_that_hangs_is_ended",
    },
    "unpack": {"--overwrite": "single/commands/test_unpack.py::test_what_differs_is_not_replaced_unasked"},
    "data.make_shards": {
        "--samples-per-shard": OTHERS + "shards_have_at_most_so_many_samples_in_the_order_of_the_seed",
        "--seed": OTHERS + "shards_have_at_most_so_many_samples_in_the_order_of_the_seed",
    },
    "training.verify": {"--export": "single/training/test_checkpoint.py::test_export_gives_the_models_own_weights"},
}


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
    assert names == set(EFFECTS[command])
    assert [flag.option_strings for flag in flags if not flag.help] == []


@pytest.mark.parametrize("row", sorted({row for rows in EFFECTS.values() for row in rows.values()}))
def test_every_test_of_an_effect_exists(row):
    path, _, name = row.partition("::")
    there = re.findall(r"^def (\w+)\(", (ROOT / "tests" / path).read_text(), re.M)
    assert name in there
