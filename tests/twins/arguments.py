"""What cannot be guessed of the constructors of torch: by the name of a parameter, or for one class."""

from functools import partial
from typing import Any

import torch
from torch import nn

# Of layers. A parameter without default that is missing here makes the layer "not tried" in the table.
BY_PARAMETER: dict[str, Any] = {
    "in_features": 4, "out_features": 4, "in1_features": 4, "in2_features": 4, "in_channels": 4, "out_channels": 4,
    "num_features": 4, "num_channels": 4, "num_groups": 2, "normalized_shape": 4, "kernel_size": 2, "input_size": 4,
    "hidden_size": 4, "embed_dim": 4, "d_model": 4, "nhead": 2, "num_heads": 2, "num_embeddings": 12, "embedding_dim": 4,
    "output_size": 2, "padding": 1, "lower": 0.1, "upper": 0.3, "threshold": 0.1, "value": 0.0, "upscale_factor": 2,
    "downscale_factor": 2, "size": 6, "num_layers": 1, "groups": 2, "dropout": 0.0,
}  # fmt: skip

encoder_layer = partial(nn.TransformerEncoderLayer, 4, 2, 8, 0.0, batch_first=True)
decoder_layer = partial(nn.TransformerDecoderLayer, 4, 2, 8, 0.0, batch_first=True)

# Of a class: what its constructor gets.
BY_CLASS: dict[str, Any] = {
    "Transformer": lambda: nn.Transformer(4, 2, 1, 1, 8, 0.0, batch_first=True),
    "TransformerEncoder": lambda: nn.TransformerEncoder(encoder_layer(), 1),
    "TransformerDecoder": lambda: nn.TransformerDecoder(decoder_layer(), 1),
    "TransformerEncoderLayer": encoder_layer,
    "TransformerDecoderLayer": decoder_layer,
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2, batch_first=True),
    "RNN": lambda: nn.RNN(4, 4, batch_first=True),
    "LSTM": lambda: nn.LSTM(4, 4, batch_first=True),
    "GRU": lambda: nn.GRU(4, 4, batch_first=True),
    "FractionalMaxPool2d": lambda: nn.FractionalMaxPool2d(2, output_size=3),
    "FractionalMaxPool3d": lambda: nn.FractionalMaxPool3d(2, output_size=3),
    "LPPool1d": lambda: nn.LPPool1d(2, 2),
    "LPPool2d": lambda: nn.LPPool2d(2, 2),
    "LPPool3d": lambda: nn.LPPool3d(2, 2),
    "Unflatten": lambda: nn.Unflatten(1, (2, 2)),
    "Fold": lambda: nn.Fold((4, 4), (2, 2), stride=2),
    "Upsample": lambda: nn.Upsample(scale_factor=2),
    "UpsamplingNearest2d": lambda: nn.UpsamplingNearest2d(scale_factor=2),
    "UpsamplingBilinear2d": lambda: nn.UpsamplingBilinear2d(scale_factor=2),
    "Sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    "AdaptiveAvgPool3d": lambda: nn.AdaptiveAvgPool3d(2),
}  # fmt: skip
# No layer of one input: containers and what only others use, and bases without a forward.
NO_LAYERS = {
    "Module", "Container", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict", "RNNCellBase", "RNNBase",
    "DataParallel",
}  # fmt: skip
# Which need two calls; tried as a pair with their pooling.
UNPOOL = {"MaxUnpool1d": nn.MaxPool1d, "MaxUnpool2d": nn.MaxPool2d, "MaxUnpool3d": nn.MaxPool3d}

# Of schedulers, by parameter. Of `optimizer`, the optimizer is given.
OF_SCHEDULERS: dict[str, Any] = {
    "lr_lambda": lambda step: 1 / (1 + step), "step_size": 2, "milestones": [2, 4], "gamma": 0.7, "T_max": 4, "T_0": 2,
    "base_lr": 0.01, "max_lr": 0.1, "swa_lr": 0.02,
}  # fmt: skip
OF_OPTIMIZERS: dict[str, Any] = {"lr": 0.02}

# Of a DataLoader: values to try for each option. An option that is missing here is "not tried" in the table.
LOADER: dict[str, list[Any]] = {
    "batch_size": [None], "shuffle": [True, False], "sampler": [], "batch_sampler": [], "num_workers": [1, 2],
    "collate_fn": ["own"], "pin_memory": [True], "drop_last": [True], "timeout": [20], "worker_init_fn": ["own"],
    "multiprocessing_context": ["fork", "spawn", "forkserver"], "generator": ["own"], "prefetch_factor": [1],
    "persistent_workers": [True], "pin_memory_device": ["cpu"], "in_order": [False],
}  # fmt: skip
NEEDS_WORKERS = {
    "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order",
}  # fmt: skip


def dtypes() -> list[torch.dtype]:
    """Every dtype of torch, each once."""
    found = [getattr(torch, name) for name in dir(torch)]
    return sorted({what for what in found if isinstance(what, torch.dtype)}, key=str)
