"""The model for small images of digits and clothes, in mnist.py and in the benchmarks."""

from torch import nn


class ConvNet(nn.Sequential):
    """Two blocks of convolution, batch norm, pooling and ReLU, then one linear layer: 29,034 parameters.

    Input float32 [b, 1, 28, 28] in [0, 1], output logits [b, 10]. Without `norm`, training on N ranks is exactly training on
    one with the whole batch; with it, each rank normalizes by its own samples.
    """

    def __init__(self, norm: bool = True) -> None:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            normalize = [nn.BatchNorm2d(outputs)] if norm else []
            # The other way round gives the same bits, with four times as many values through ReLU: 8 % of a step.
            return [nn.Conv2d(inputs, outputs, 5, padding=2), *normalize, nn.MaxPool2d(2), nn.ReLU()]

        super().__init__(*block(1, 16), *block(16, 32), nn.Flatten(), nn.Linear(7 * 7 * 32, 10))


MODELS = {"convnet": ConvNet, "convnet-nonorm": lambda: ConvNet(norm=False)}
