"""The mutations: one for each flag that changes what is computed, and one for each guarantee. See __main__.py.

The old text must stand exactly once in its file: tests/single/test_mutants.py looks. Where the source moves, move the row.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A place to break. name: of the flag or the guarantee. tests: that must notice it, each as pytest takes it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


SCRIPTS = "tests/single/commands/test_flags_of_scripts.py"
EFFECT = f"{SCRIPTS}::test_effect"
OTHERS = "tests/single/commands/test_flags_of_others.py"
FLAGS = "tests/parallel/test_flags.py"
GPU_DEVICES = "tests/single/engines/test_gpu_devices.py"
GPU_NUMBERS = "tests/single/engines/test_gpu_numbers.py"
LOOP = "tests/parallel/test_loop.py"
TRAINING = "tests/parallel/test_training.py"
LOCAL_STEPS = "tests/parallel/test_local_steps.py"
HOSTS = "tests/parallel/test_hosts_as_workers.py"
RENDEZVOUS = "tests/single/launching/test_rendezvous.py"
RESUME = "tests/single/training/test_resume.py"
CHECKPOINT = "tests/single/training/test_checkpoint.py"
RUN = "tests/single/training/test_run.py"
VERDICT = "tests/single/hangs/test_diagnosis.py"
SAMPLERS = "tests/single/training/test_samplers.py"
BATCHES = "tests/single/training/test_batches.py"
MISTAKES = "tests/single/training/test_mistakes.py::test_a_mistake_ends_in_one_line_with_the_remedy"
PEOPLE = "tests/single/training/test_programs_people_have.py"
STEP = "hvdtrain/training/step.py"
LOOP_SOURCE = "hvdtrain/training/run.py"
HOROVOD = "hvdtrain/engines/horovod.py"
CLI = "hvdtrain/cli.py"
GUARD = "hvdtrain/training/guard.py"
LOCAL = "hvdtrain/training/local_steps.py"


def mutant(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name, file, old, new, tests)


MUTANTS = [
    # ---- flags of every training script
    mutant("--amp: no autocast in steps", STEP, "with local, shared.autocast():", "with local:",
           EFFECT),
    mutant("--amp: no autocast in evaluations", LOOP_SOURCE, "torch.no_grad(), self.autocast():",
           "torch.no_grad():", EFFECT),
    mutant("--amp: no loss scaler", "hvdtrain/training/prepared.py", 'enabled=flags.amp == "fp16"', "enabled=False",
           f"{SCRIPTS}::test_the_loss_scaler_is_that_of_fp16"),
    mutant("--compression: float32 on the wire", HOROVOD, "WIRE_DTYPES[how.compression], 1.0", "None, 1.0",
           f"{FLAGS}::test_compression_halves_the_bytes_on_the_wire"),
    mutant("--fp16-allreduce: not compressed", CLI, 'const="fp16"', 'const="none"',
           f"{FLAGS}::test_compression_halves_the_bytes_on_the_wire"),
    mutant("--compression auto: always fp16", "hvdtrain/engines/precision.py", "if hosts > 1:", "if hosts > 0:",
           f"{FLAGS}::test_nothing_is_compressed_within_a_host"),
    mutant("--gradient-predivide-factor: not divided", HOROVOD, "else sent / self.predivide",
           "else sent / 1", f"{FLAGS}::test_predivision_makes_smaller_what_is_sent_and_not_the_mean"),
    mutant("--gradient-predivide-factor: not given on", "hvdtrain/training/prepared.py", "flags.gradient_predivide_factor,",
           "1.0,", f"{FLAGS}::test_predivision_makes_smaller_what_is_sent_and_not_the_mean"),
    mutant("--reduction: always the mean", HOROVOD, '"sum": hvd.Sum}[',
           '"sum": hvd.Average}[', f"{FLAGS}::test_reduction_sum_is_the_sum"),
    mutant("--epochs: one too few", LOOP_SOURCE, "return self.state.epoch < self._epochs",
           "return self.state.epoch < self._epochs - 1", EFFECT),
    mutant("--accumulate: not weighted", "hvdtrain/data/sharding.py",
           "local_count * size / count, local_count, len(together)", "1.0, local_count, len(together)",
           f"{RUN}::test_accumulation_is_the_large_batch"),
    mutant("--weights: not loaded", "hvdtrain/training/prepared.py", "load_weights(models[0], flags.weights)", "pass",
           EFFECT),
    mutant("--seed: of the weights", "hvdtrain/mnist.py", "torch.manual_seed(flags.seed)", "torch.manual_seed(1)",
           f"{SCRIPTS}::test_the_seed_is_that_of_the_weights_and_of_the_order"),
    mutant("--threads: ignored", "hvdtrain/engines/start.py", "torch.set_num_threads(threads or", "torch.set_num_threads(",
           EFFECT),
    mutant("--log-steps: ignored", LOOP_SOURCE, "number % self.flags.log_steps == 0", "number % 50 == 0",
           EFFECT),
    mutant("--no-progress: ignored", "hvdtrain/training/start.py", "progress=not flags.no_progress", "progress=True",
           f"{SCRIPTS}::test_progress_is_shown_unless_it_is_not_wanted"),
    mutant("--checkpoint-steps: ignored", LOOP_SOURCE, "state.step % every == 0", "state.step % every == every",
           EFFECT),
    mutant("--keep: all", "hvdtrain/training/checkpoint.py", "prune(self.directory, self.keep)", "pass",
           EFFECT,
           f"{RESUME}::test_keep_keeps_so_many_and_the_best"),
    mutant("--check-steps: never", GUARD, "self.check_steps = flags.check_steps", "self.check_steps = 0",
           f"{FLAGS}::test_replicas_are_compared_at_check_steps"),
    mutant("--max-skipped: none may be", GUARD, "flags.max_skipped if flags.max_skipped is not None else",
           "0 if flags.max_skipped is not None else",
           f"{RUN}::test_a_step_left_out_changes_nothing_and_training_goes_on"),
    mutant("--sync-every: gradients in every step", LOCAL, "if flags.sync_every == 1 or",
           "if True or", f"{LOCAL_STEPS}::test_weights_are_equal_at_exchanges_and_optimizers_are_not"),
    mutant("--sync-every: half as often", LOCAL, "step % self._every == 0", "step % (2 * self._every) == 0",
           f"{LOCAL_STEPS}::test_outer_rate_and_momentum_are_those_of_the_shared_weights"),
    mutant("--outer-lr: 1", LOCAL, "alpha=self._rate", "alpha=1.0",
           f"{LOCAL_STEPS}::test_outer_rate_and_momentum_are_those_of_the_shared_weights"),
    mutant("--outer-momentum: not Nesterov's", LOCAL, "torch._foreach_add_(means, self._momenta, alpha=self._decay)", "pass",
           f"{LOCAL_STEPS}::test_outer_rate_and_momentum_are_those_of_the_shared_weights"),
    mutant("--outer-momentum: begins again after a resume", LOCAL,
           'flat.copy_(tensors["outer.momentum"])', "pass",
           f"{LOCAL_STEPS}::test_a_run_that_was_stopped_anywhere_ends_with_the_same_bits"),
    mutant("--sync-every: rank 0's optimizer after a resume", "hvdtrain/training/own_states.py", "    if me:",
           "    if False:", f"{LOCAL_STEPS}::test_what_an_optimizer_keeps_is_restored_on_each_rank"),
    mutant("--sync-within: each rank alone", LOCAL, 'if flags.sync_within == "rank":', "if True:",
           f"{HOSTS}::test_each_host_trains_as_one_process_with_the_samples_of_its_ranks"),
    mutant("--sync-within: tokens of all ranks", STEP, "total * size / worker.size", "total",
           f"{HOSTS}::test_a_mean_over_tokens_weighs_every_token_of_a_host_alike"),
    mutant("--sync-within: another host's optimizer", "hvdtrain/training/resume.py",
           'if self._holds_own_states() and self.facts["workers"] == self.workers:', "if self._holds_own_states():",
           f"{HOSTS}::test_on_other_hosts_each_rank_begins_with_the_optimizer_of_rank_0"),
    mutant("--sync-within: replicas of a host not compared", GUARD, "self.compare_replicas(state, models, self.worker)",
           "pass", f"{HOSTS}::test_replicas_of_a_host_are_compared_between_exchanges"),
    # ---- flags of classifiers
    mutant("--lr-scaling: none", "hvdtrain/training/optim.py", "return rate * accumulate *", "return rate *",
           EFFECT),
    mutant("--lr-scaling: not by ranks", "hvdtrain/training/optim.py", '(size if reduction == "average" else 1)', "1",
           f"{FLAGS}::test_linear_scaling_and_its_warm_up_begin_at_the_rate_of_one_rank"),
    mutant("--lr-schedule: constant", "hvdtrain/mnist.py", "optim.schedule_factor(flags.lr_schedule, run.progress)", "1.0",
           EFFECT),
    mutant("--warmup-epochs: none, mnist", "hvdtrain/mnist.py", "run.epochs_done, flags.warmup_epochs", "1.0, 0.0",
           EFFECT),
    mutant("--warmup-epochs: none, imagenet", "hvdtrain/imagenet.py", "run.epochs_done, flags.warmup_epochs", "1.0, 0.0",
           EFFECT),
    mutant("--momentum: ignored", "hvdtrain/training/optim.py", "lr=rate, momentum=momentum", "lr=rate, momentum=0.9",
           EFFECT),
    mutant("--weight-decay: ignored, mnist", "hvdtrain/mnist.py", "flags.momentum, flags.weight_decay, fused",
           "flags.momentum, 0.0, fused", EFFECT),
    mutant("--weight-decay: ignored, imagenet", "hvdtrain/imagenet.py", "flags.momentum, flags.weight_decay)",
           "flags.momentum, 0.0)", EFFECT),
    mutant("--label-smoothing: none, mnist", "hvdtrain/mnist.py", "label_smoothing=flags.label_smoothing",
           "label_smoothing=0.0",
           f"{SCRIPTS}::test_label_smoothing_is_in_the_loss_that_is_trained_and_not_in_the_recorded_one"),
    mutant("--label-smoothing: none, imagenet", "hvdtrain/imagenet.py", "label_smoothing=flags.label_smoothing",
           "label_smoothing=0.0", EFFECT),
    mutant("--target-accuracy: never reached", LOOP_SOURCE, "self.exit_code = TARGET_MISSED", "pass",
           f"{SCRIPTS}::test_target_accuracy_ends_training_or_is_missed"),
    mutant("--train-samples: all, mnist", "hvdtrain/mnist.py", "train_images[: flags.train_samples]", "train_images[:]",
           EFFECT),
    mutant("--deterministic: not given on", "hvdtrain/training/start.py", "deterministic=flags.deterministic",
           "deterministic=False",
           f"{SCRIPTS}::test_deterministic_reaches_the_engine_and_is_said_to_do_nothing_on_a_cpu"),
    mutant("--deterministic: any algorithm", "hvdtrain/engines/arithmetic.py", "torch.use_deterministic_algorithms(True)",
           "pass", f"{GPU_NUMBERS}::test_deterministic_and_fast_arithmetic_are_set_before_the_engine_starts_and_said"),
    mutant("--deterministic: set too late for NCCL", "hvdtrain/engines/start.py",
           'if deterministic and device != "cpu":', "if False:",
           f"{GPU_NUMBERS}::test_deterministic_and_fast_arithmetic_are_set_before_the_engine_starts_and_said"),
    # ---- flags of imagenet, lm, benchmark
    mutant("--memory-format: ignored", "hvdtrain/imagenet.py", "getattr(torch, MEMORY_FORMATS[flags.memory_format])",
           "torch.channels_last", EFFECT),
    mutant("--reduced-decode: ignored", "hvdtrain/imagenet.py", "reduced=flags.reduced_decode", "reduced=False",
           f"{SCRIPTS}::test_reduced_decode_reads_fewer_pixels"),
    mutant("--max-corrupt: ignored", "hvdtrain/imagenet.py", "CorruptSamples(flags.max_corrupt", "CorruptSamples(1000",
           f"{SCRIPTS}::test_more_corrupt_images_than_allowed_end_the_run"),
    mutant("--compile: ignored, imagenet", "hvdtrain/imagenet.py", "model = compiled(model, run.device)", "pass",
           f"{SCRIPTS}::test_compile_compiles"),
    mutant("--compile: ignored, lm", "hvdtrain/lm.py", "model = compiled(model, run.device)", "pass",
           f"{SCRIPTS}::test_compile_compiles"),
    mutant("--clip-norm: ignored", "hvdtrain/lm.py", "step.update(clip_norm=flags.clip_norm)", "step.update()",
           EFFECT),
    mutant("--min-lr: zero", "hvdtrain/lm.py", "lowest: float = flags.min_lr", "lowest: float = 0.0",
           EFFECT),
    mutant("--warmup-steps: none", "hvdtrain/lm.py", "warmup: int = flags.warmup_steps", "warmup: int = 0",
           EFFECT),
    mutant("--beta2: ignored", "hvdtrain/lm.py", "betas=(0.9, flags.beta2)", "betas=(0.9, 0.99)",
           EFFECT),
    mutant("--dropout: none", "hvdtrain/lm.py", "data.vocabulary.size, flags.dropout, rows)",
           "data.vocabulary.size, 0.0, rows)", f"{SCRIPTS}::test_dropout_zeroes_in_training_alone"),
    mutant("--temperature: ignored", "hvdtrain/lm.py", "temperature=flags.temperature", "temperature=1.0",
           f"{SCRIPTS}::test_temperature_decides_how_likely_the_unlikely_is"),
    # ---- guarantees: samples and sums
    mutant("the order of an epoch depends on it", "hvdtrain/data/sharding.py", "seed + epoch", "seed",
           "tests/single/data/test_sharding.py"),
    mutant("each sample once over all ranks", "hvdtrain/data/sharding.py", "return slice(rank, n, size)",
           "return slice(0, n, size)", "tests/single/data/test_sharding.py"),
    mutant("a mean over tokens weighs each alike", STEP, "return self.count / total", "return 1.0",
           f"{RUN}::test_a_mean_over_tokens_is_that_of_all_micro_batches"),
    mutant("exact evaluation: over all samples", "hvdtrain/training/evaluation.py", "float(self._data)",
           "float(self._data) + 1", f"{TRAINING}::test_many_ranks_are_one_process_with_the_global_batch"),
    mutant("GPUs: left idle without NCCL", HOROVOD, "if not self.hvd.nccl_built():", "if False:",
           f"{GPU_DEVICES}::test_a_gpu_is_used_or_the_line_says_what_to_type"),
    mutant("GPUs: two ranks on one", "hvdtrain/engines/start.py", "gpu.require_own(engine)", "pass",
           f"{GPU_NUMBERS}::test_deterministic_and_fast_arithmetic_are_set_before_the_engine_starts_and_said"),
    mutant("GPUs: who waits for one is blamed", "hvdtrain/hangs/diagnosis.py",
           "report.asynchronous and report.step > behind", "False",
           f"{VERDICT}::test_what_is_said_of_a_standstill"),
    mutant("buckets: gradients are averaged", HOROVOD, "predivide / self.size if", "predivide if",
           f"{FLAGS}::test_predivision_makes_smaller_what_is_sent_and_not_the_mean"),
    # ---- guarantees: exact resume
    mutant("resume: the optimizer's state", "hvdtrain/training/contents.py",
           'optimizer.load_state_dict({"state": state, "param_groups": groups})', "pass",
           f"{RESUME}::test_stop_signal_saves_and_leaves_with_75"),
    mutant("resume: random numbers follow from the position", STEP,
           "(self._shared.seed, self._samples, self._shared.engine.rank)",
           "(self._shared.seed, id(self), self._shared.engine.rank)", f"{RESUME}::test_imagenet_goes_on_to_the_same_bits"),
    mutant("resume: registered objects", "hvdtrain/training/contents.py", "what.load_state_dict(", "bool(",
           f"{RUN}::test_schedulers_and_averaged_weights_go_on_with_the_run"),
    mutant("resume: other flags are refused", "hvdtrain/training/comparison.py", "theirs.get(name, mine) == mine:", "True:",
           f"{RESUME}::test_another_configuration_is_refused_with_the_flags_named"),
    # ---- guarantees: checkpoints
    mutant("checkpoint: its checksum", "hvdtrain/training/checkpoint.py", 'if digest(text, tensors) != metadata["sha256"]:',
           "if False:", f"{CHECKPOINT}::test_parts_of_two_sound_files_do_not_make_one",
           f"{CHECKPOINT}::test_every_flipped_bit_of_every_byte_is_refused"),
    mutant("checkpoint: synced before it has its name", "hvdtrain/engines/files.py", "os.fsync(handle)", "pass",
           f"{CHECKPOINT}::test_a_failing_system_call_leaves_the_last_good_one_alone"),
    mutant("files: written whole or not at all", "hvdtrain/engines/files.py",
           'temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")', "temporary = path",
           "tests/single/engines/test_files.py"),
    mutant("a damaged checkpoint is passed over", "hvdtrain/training/checkpoint.py", 'path.name + ".damaged"', "path.name",
           f"{CHECKPOINT}::test_newest_falls_back_to_the_newest_sound_one_and_says_so"),
    mutant("lock: two runs in one directory", "hvdtrain/engines/files.py", "fcntl.LOCK_EX | fcntl.LOCK_NB",
           "fcntl.LOCK_SH | fcntl.LOCK_NB", f"{RESUME}::test_two_runs_cannot_write_in_one_place"),
    # ---- guarantees: other users of a host
    mutant("lock: everybody can take it", "hvdtrain/engines/files.py", "rights = 0o600", "rights = 0o644",
           "tests/single/engines/test_files.py::test_only_who_may_write_in_a_directory_can_lock_it"),
    mutant("rendezvous: no secret is asked for", "hvdtrain/launching/rendezvous_server.py",
           "if not hmac.compare_digest(path[: len(self._expected)], self._expected):", "if False:",
           f"{RENDEZVOUS}::test_a_request_without_the_secret_is_refused_before_its_value_is_read"),
    mutant("rendezvous: strangers are as many as they like", "hvdtrain/launching/rendezvous_server.py",
           "await self._turn_away(MOST_STRANGERS)", "pass",
           f"{RENDEZVOUS}::test_strangers_take_few_of_the_open_files_and_keep_nobody_away"),
    mutant("images: any format", "hvdtrain/data/decoding.py", ", formats=FORMATS", "",
           "tests/single/data/test_images.py"
           "::test_an_image_is_of_a_format_that_folders_have_and_no_program_is_run_for_it"),
    mutant("--compile: in torch's own place", "hvdtrain/data/compile_cache.py",
           "_hooks.extend(ImportHook(name, redirect) for name in PLACES)", "pass",
           "tests/single/models/test_compiling.py::test_what_is_compiled_is_kept_where_nobody_else_can_write"),
    # ---- guarantees: what ends a run
    mutant("NaN: the step is skipped", STEP, "if sound is False and not prepared.scaler.is_enabled():", "if False:",
           f"{RUN}::test_a_step_left_out_changes_nothing_and_training_goes_on"),
    mutant("NaN: it is noticed", STEP, "return all(map(math.isfinite, sums))", "return True",
           f"{RUN}::test_a_gradient_that_is_not_finite_is_found_in_its_micro_batch"),
    mutant("a hung rank is named, not one that waits", "hvdtrain/hangs/diagnosis.py",
           "if report.collective is None and", "if report.collective is not None and",
           f"{VERDICT}::test_what_is_said_of_a_standstill"),
    mutant("a silent rank is named", "hvdtrain/hangs/diagnosis.py", "if rank not in reports]",
           "if rank in reports]", VERDICT),
    mutant("replicas are compared", "hvdtrain/training/features/replicas.py", "if len(kinds) == 1:", "if True:",
           f"{FLAGS}::test_replicas_that_differ_end_the_run_on_every_rank"),
    mutant("exit code 75", "hvdtrain/launching/exit_codes.py", "STOPPED = 75", "STOPPED = 1",
           f"{RESUME}::test_stop_signal_saves_and_leaves_with_75"),
    mutant("exit code 2 for bad input", "hvdtrain/engines/errors.py", "exit_code = 2", "exit_code = 1",
           "tests/single/engines/test_start.py::test_a_command_ends_with_its_code_and_one_line_for_users"),
    mutant("only who knows the secret joins", "hvdtrain/hangs/channel.py",
           "if not hmac.compare_digest(proof, hmac.digest(key, b\"rank\"", "if False and (proof, hmac.digest(key, b\"rank\"",
           "tests/single/hangs/test_channel.py"),
    mutant("secrets stay off command lines", "launch/mpirun.sh", '=~ $own_host ]] || command+=(-x "$name")',
           '=~ $own_host ]] || command+=(-x "$name=${!name}")',
           "tests/e2e/launch/test_wrappers.py::test_what_sites_need_is_passed_and_no_secret"),
    mutant("a proxy's password is not passed on", "launch/options.sh", "&& ${!1-} =~ $secret_proxy ]]", "&& $1 == none ]]",
           "tests/e2e/launch/test_wrappers.py::test_what_sites_need_is_passed_and_no_secret"),
    mutant("NCCL is built on login nodes", "launch/target.py", "    return bool(hint)\n", "    return False\n",
           "tests/single/launch/test_builds_for_gpus.py::test_nccl_is_built_where_it_is_asked_for_or_gpus_are_in_sight"),
    mutant("a site's settings reach the build", "launch/build_horovod.py",
           'env |= site_settings.build_settings(bool(target.cuda), "(wheel)" not in target.mpi)', "pass",
           "tests/single/launch/test_builds_for_gpus.py::test_what_a_site_sets_reaches_the_build_its_key_and_the_user"),
    mutant("a collective is named while it runs", "hvdtrain/engines/activity.py",
           "activity.call(name if isinstance(name, str) else method.__name__, self.of_all_ranks)", "pass",
           "tests/single/hangs/test_collectives.py"),
    mutant("a rank that is ahead is not in another collective", "hvdtrain/hangs/diagnosis.py",
           "report.called[-1 - ahead]", "report.called[-1]",
           "tests/single/hangs/test_diagnosis.py::test_ranks_that_call_the_same_in_the_same_order_never_differ"),
    mutant("other collectives are told before any limit", "hvdtrain/hangs/detector.py",
           "if self._stalled >= self._compare_at:", "if self._stalled >= 1e9:",
           "tests/single/hangs/test_detector.py::test_ranks_in_different_collectives_are_told_before_any_limit"),
    # ---- guarantees: programs as people write them
    mutant("a sampler's own generator is seeded", "hvdtrain/training/features/samplers.py",
           "reseed(value, mixed_seed(seed, number))",
           "pass", f"{SAMPLERS}::test_an_epoch_is_drawn_alike_in_another_process_and_unlike_the_one_before"),
    mutant("a sampler is drawn under the epoch", "hvdtrain/training/features/samplers.py", '"sampler", epoch)', '"sampler")',
           f"{SAMPLERS}::test_an_epoch_is_drawn_alike_in_another_process_and_unlike_the_one_before"),
    mutant("batches that stay whole go on where they stopped", "hvdtrain/data/sharding.py",
           "taken -= len(batch)", "taken -= 1", f"{SAMPLERS}::test_a_run_uses_what_was_drawn_also_after_it_was_killed"),
    mutant("a schedule in steps is stepped in each", "hvdtrain/training/schedules.py", "if times != 1:", "if times > 9:",
           MISTAKES),
    mutant("a model of an earlier run is refused", "hvdtrain/training/prepared.py", "elif layer in _of_earlier_runs:",
           "elif False:", MISTAKES),
    mutant("a second data set goes on where it stopped", "hvdtrain/training/features/several.py",
           "self._state.samples, mixed_seed", "0, mixed_seed", f"{BATCHES}::test_two_data_sets_each_keep_their_position"),
    mutant("gathered rows: every rank's gradient", "hvdtrain/training/gather.py",
           'ctx.engine.all_reduce_(total, "sum", "gather.gradient")', "pass",
           f"{LOOP}::test_gathered_rows_have_the_gradient_of_the_whole_batch"),
    mutant("statistics in float64 keep their bits", "hvdtrain/engines/buffers.py",
           "torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32", "torch.float32",
           f"{RUN}::test_all_of_a_state_goes_on_with_the_run"),
    mutant("a value of an evaluation has its own count", "hvdtrain/training/evaluation.py",
           "dict(zip(counted, sums[len(names) : -len(names)], strict=True))",
           "dict.fromkeys(counted, sum(sums[len(names) : -len(names)]))",
           f"{RUN}::test_each_value_of_an_evaluation_is_divided_by_its_own_count"),
    mutant("Horovod: an optimizer has what its constructor was given", HOROVOD, 'if name != "param_groups"', "if False",
           f"{LOOP}::test_an_optimizer_has_what_its_constructor_was_given"),
    mutant("one cycle of another length is refused", "hvdtrain/training/schedules.py",
           "if length is None or length in (steps, epochs):", "if True:",
           f"{PEOPLE}::test_one_cycle_of_another_length_than_the_run_is_refused"),
    mutant("a schedule follows the new end", "hvdtrain/training/resume.py", "self.lengthened and redone(what, state)",
           "False", f"{PEOPLE}::test_a_schedule_with_an_end_follows_the_new_end"),
    mutant("a run by steps goes on within its epoch", LOOP_SOURCE,
           "if self._input is None or self._input.at_end(self.state.samples_of_epoch):", "if True:",
           f"{PEOPLE}::test_a_run_made_longer_ends_as_one_that_was_so_long_from_the_beginning"),
    mutant("a compiled model has its own names", "hvdtrain/training/names.py",
           'return name.replace("_orig_mod.", "")', "return name",
           f"{PEOPLE}::test_a_compiled_model_is_saved_under_its_own_names"),
    mutant("a kept output is noticed", "hvdtrain/training/reuse.py", "!= self._loop:", "!= self._loop and False:",
           MISTAKES),
]  # fmt: skip
