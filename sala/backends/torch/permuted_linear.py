"""A quantized linear that permutes its inputs, so that columns of a group are adjacent (GPTQ act-order)."""

from torch import Tensor, nn

from sala.backends.torch.quantized_linear import AffineLinear


class PermutedLinear(nn.Module):
    """Replaces a linear: x [..., in] → [..., out]; column i of `linear` takes the input order[i]."""

    order: Tensor

    def __init__(self, linear: AffineLinear, order: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("order", order, persistent=False)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.index_select(-1, self.order))
