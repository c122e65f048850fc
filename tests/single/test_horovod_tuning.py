"""Tuning sets what is not set, and touches nothing that the user asked for."""

import torch

from hvdtrain.engines.horovod import PredividedCompressor, tuned_environment


def test_everything_is_set_where_nothing_was():
    assert tuned_environment({}) == {"OMPI_MCA_mpi_yield_when_idle": "1", "HOROVOD_CYCLE_TIME": "0.1"}


def test_what_the_user_set_stays():
    assert tuned_environment({"HOROVOD_CYCLE_TIME": "5"}) == {"OMPI_MCA_mpi_yield_when_idle": "1"}
    assert tuned_environment({"HOROVOD_CYCLE_TIME": "", "OMPI_MCA_mpi_yield_when_idle": "0"}) == {}


def test_predivided_fp16_sum_does_not_overflow_where_the_mean_does_not():
    gradients = [torch.tensor([40_000.0, 60_000.0, -3.0]) for _ in range(3)]
    compressor = PredividedCompressor(torch.float16, predivide=3.0, factor_after=1.0)
    wire = [compressor.compress(gradient) for gradient in gradients]
    assert all(tensor.dtype == torch.float16 for tensor, _ in wire)
    mean = compressor.decompress(sum(tensor for tensor, _ in wire), wire[0][1])
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, gradients[0], rtol=1e-3, atol=0)
