"""torchao: Float8Linear with its W apart from its B, each in the precision that its config says."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torchao.float8.config import CastConfig, ScalingType
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

from zbkern.conversion import convert as conversion
from zbkern.kernels import dispatch
from zbkern.kernels.spec import Outputs, Segments
from zbkern.ops.functions.separable import SeparableFunction

Model = TypeVar("Model", bound=torch.nn.Module)

_PARTS = 512
"""Of a tensor whose largest element is sought, each the work of one program: a few for each SM."""


def convert(model: Model) -> Model:
    """`zbkern.convert`, for a model with torchao's Float8Linear, whose W can wait then as well.

    The three products of such a layer are torchao's, in the same precision and scales. Where the config keeps W in high
    precision (`rowwise_with_gw_hp`) W is that of a plain linear: microbatches merge, and are summed in float32. Layers
    whose weights FSDP2 gathers in 8 bits, or that are DTensors, keep their W in B. `zbkern.restore` leaves these layers
    as they are.
    """
    for name, module in model.named_modules():
        if type(module) is Float8Linear:
            module.__class__ = DeferredFloat8Linear
            module.zbkern_name = name
    return conversion.convert(model, filter=lambda _, module: not isinstance(module, Float8Linear))


class DeferredFloat8Linear(Float8Linear):
    """Float8Linear in a product whose backward is two."""

    zbkern_name = ""

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K] to [..., N]."""
        if type(self.weight) is not torch.nn.Parameter or type(input) is not Tensor or torch.compiler.is_compiling():
            return super().forward(input)
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        formats = self.config, self.linear_mm_config
        output = _Product.apply(input, *formats, weights=[self.weight], name=self.zbkern_name)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _Product(SeparableFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, config: Any, products: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.formats = config, products
        rows = _cast(x.reshape(-1, x.shape[-1]), config.cast_config_input, GemmInputRole.INPUT, -1, ctx.formats)
        other = _cast(weight.t(), config.cast_config_weight, GemmInputRole.WEIGHT, 0, ctx.formats)
        y = torch.mm(rows, other)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def dgrad(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        config, rows = ctx.formats[0], dy.reshape(-1, dy.shape[-1])
        left = _cast(rows, config.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT, -1, ctx.formats)
        right = _cast(weight.t(), config.cast_config_weight_for_grad_input, GemmInputRole.WEIGHT, -1, ctx.formats)
        dx = torch.mm(left, right.t()).view(x.shape) if ctx.needs[0] else None
        return (dx, None, None), (x.reshape(-1, x.shape[-1]), rows, *ctx.formats)

    @staticmethod
    def wgrad(x: Tensor, dy: Tensor, *formats: Any) -> Tensor:
        config = formats[0]
        left = _cast(dy, config.cast_config_grad_output_for_grad_weight, GemmInputRole.GRAD_OUTPUT, 0, formats)
        right = _cast(x, config.cast_config_input_for_grad_weight, GemmInputRole.INPUT, 0, formats)
        return torch.mm(left.t(), right)

    @classmethod
    def launch(cls, segments: Segments, outputs: Outputs, accumulate: bool, options: tuple[Any, ...] = ()) -> None:
        config = options[0]
        casts = config.cast_config_grad_output_for_grad_weight, config.cast_config_input_for_grad_weight
        if any(cast.scaling_type is not ScalingType.DISABLED for cast in casts):
            super().launch(segments, outputs, accumulate, options)
        else:
            x = segments[0][0]
            backend = dispatch.resolve("linear", "auto", x.device, x.dtype)
            backend.linear_wgrad(segments, (outputs[0], None), accumulate)


def _cast(tensor: Tensor, cast: CastConfig, role: GemmInputRole, axis: int, formats: Any) -> Any:
    """An operand in 8 bits, with one scale or one for each row along the axis; or as it is, where config says so.

    axis: what the product sums over, along which it wants neighbours in memory. Where there is a kernel it scales,
    casts and transposes in one launch (two for one scale), where torchao's operations are 11 to 14.
    """
    if cast.scaling_type is ScalingType.DISABLED:
        return tensor
    axiswise = get_maybe_axiswise_dim(axis, cast.scaling_granularity)
    power_of_2 = formats[0].round_scales_to_power_of_2
    fused = cast.target_dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and tensor.numel() > 0
    if fused and dispatch.why_not("float8", "triton", tensor.device, tensor.dtype) is None:
        data, scale = _fused_cast(tensor if axis else tensor.t(), cast.target_dtype, axiswise is None, power_of_2)
        if not axis:
            data, scale = data.t(), scale.t() if scale.dim() else scale
        return Float8TrainingTensor(data, scale, tensor.dtype, formats[1], role, axiswise)
    return hp_tensor_to_float8_dynamic(
        tensor,
        cast.target_dtype,
        formats[1],
        gemm_input_role=role,
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=axiswise,
        round_scales_to_power_of_2=power_of_2,
    )


def _fused_cast(rows: Tensor, dtype: torch.dtype, whole: bool, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits, contiguous, and the scales: one of all, or [M, 1]."""
    backend = dispatch.resolve("float8", "triton", rows.device, rows.dtype)
    data = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    scale = torch.empty(() if whole else len(rows), dtype=torch.float32, device=rows.device)
    amax = torch.empty(_PARTS, dtype=torch.float32, device=rows.device) if whole else None
    if amax is not None:
        backend.float8_amax(rows, amax)
    backend.float8_cast(rows, amax, power_of_2, data, scale)
    return data, scale if whole else scale[:, None]
