"""What users hand to the public ops, checked: errors name the op, the argument, what was expected and what came.

The tensors that an op takes are a line of text for each, such as "weight [N, K]": a letter is the same size wherever it
stands, and "..." the same sizes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbkern.kernels import spec


class Argument(NamedTuple):
    """A tensor that an op takes. places: of every letter in its shape, which dimension it is, counted from the end.

    leading: whether any dimensions may stand before these; shared: whether another argument has the same. numbers: what
    it holds, in words; allows: the same of a dtype, None for all real ones.
    """

    name: str
    shape: str
    optional: bool
    leading: bool
    shared: bool
    places: dict[str, int]
    numbers: str
    allows: Callable[[torch.dtype], bool] | None


_NUMBERS: dict[str, Callable[[torch.dtype], bool] | None] = {
    "": None,
    "a floating dtype": lambda dtype: dtype.is_floating_point,
    "integers": lambda dtype: not dtype.is_floating_point and dtype is not torch.bool,
    "integers, int64 or int32": lambda dtype: dtype in (torch.int64, torch.int32),
}


def arguments(text: str) -> tuple[Argument, ...]:
    """Parses a text such as "x [..., K] of a floating dtype; bias? [K]". A question mark allows None."""
    parsed = []
    for line in text.split("; "):
        match = re.fullmatch(r"(\w+)(\??) \[(.*)\](?: of (.*))?", line)
        assert match is not None, line
        name, optional, inside, numbers = match.groups(default="")
        letters = inside.split(", ")
        leading = letters[0] == "..."
        places = {letter: place - len(letters) for place, letter in enumerate(letters) if letter != "..."}
        shared = leading and text.count("[...") > 1
        parsed.append(
            Argument(name, f"[{inside}]", bool(optional), leading, shared, places, numbers, _NUMBERS[numbers])
        )
    return tuple(parsed)


LINEAR = arguments("x [..., K]; weight [N, K]; bias? [N]")
LINEAR_TRANSPOSED = arguments("x [..., K]; weight [K, N]; bias? [N]")
GATED_MLP = arguments("x [..., K]; gate [H, K]; up [H, K]; down [N, H]; gate_bias? [H]; up_bias? [H]; down_bias? [N]")
GROUPED_LINEAR = arguments("x [M, K]; weight [E, N, K]; bias? [E, N]")
GROUPED_LINEAR_TRANSPOSED = arguments("x [M, K]; weight [E, K, N]; bias? [E, N]")
_BIASES = "gate_up_bias? [E, 2H]; down_bias? [E, N]"
GROUPED_MLP = arguments(f"x [M, K]; gate_up [E, 2H, K]; down [E, N, H]; {_BIASES}")
GROUPED_MLP_TRANSPOSED = arguments(f"x [M, K]; gate_up [E, K, 2H]; down [E, H, N]; {_BIASES}")
EMBEDDING = arguments("indices [...] of integers, int64 or int32; weight [V, K]")
NORM = arguments("x [..., K] of a floating dtype; weight? [K]; bias? [K]; residual? [..., K] of a floating dtype")
_SINKS = "sinks? [heads] of a floating dtype"
ATTENTION = arguments(
    f"q [batch, tokens, heads, D]; k [batch, keys, kv_heads, D]; v [batch, keys, kv_heads, Dv]; {_SINKS}"
)
PACKED_ATTENTION = arguments(f"q [tokens, heads, D]; k [keys, kv_heads, D]; v [keys, kv_heads, Dv]; {_SINKS}")
ROTARY = arguments(
    "x [..., T, H, D] of a floating dtype; cos [T, R/2] of a floating dtype; sin [T, R/2] of a floating dtype"
)
LINEAR_CROSS_ENTROPY = arguments("x [..., K]; weight [V, K]; target [...] of integers; bias? [V]")


def check(op: str, wanted: Sequence[Argument], *values: Any) -> None:
    """All are tensors of real numbers on the device of the first, of the shapes and dtypes that the op takes."""
    sizes: dict[str, Any] = {}
    device = getattr(values[0], "device", None)
    for argument, value in zip(wanted, values):  # noqa: B905 (strict takes time)
        if value is None and argument.optional:
            continue
        if not isinstance(value, Tensor) or value.device != device or not _fits(argument, value, sizes):
            raise _error(op, wanted, values, argument, value)
    if "2H" in sizes and sizes["2H"] != 2 * sizes["H"]:
        raise ValueError(
            f"{op}: gate_up must have twice as many outputs as down has inputs; got {sizes['2H']} and {sizes['H']}"
        )


def _fits(argument: Argument, value: Tensor, sizes: dict[str, Any]) -> bool:
    """Whether a tensor has the sizes that the letters have by now; those that had none get them."""
    _, _, _, leading, shared, places, _, allows = argument
    shape = value.shape
    further = len(shape) - len(places)
    if further and (not leading or further < 0):
        return False
    for letter, place in places.items():
        size = shape[place]
        if sizes.setdefault(letter, size) != size:
            return False
    if shared and sizes.setdefault("...", shape[:further]) != shape[:further]:
        return False
    return not value.is_complex() if allows is None else allows(value.dtype)


def _error(op: str, wanted: Sequence[Argument], values: Sequence[Any], argument: Argument, value: Any) -> Exception:
    name, leader = argument.name, values[0]
    if not isinstance(value, Tensor):
        return TypeError(f"{op}: {name} must be a torch.Tensor; got {type(value).__name__}")
    if value.device != leader.device:
        return ValueError(
            f"{op}: {name} is on {value.device} and {wanted[0].name} on {leader.device}; move one with .to(device)"
        )
    if value.is_complex():
        return TypeError(
            f"{op}: {name} must be real numbers; got {value.dtype}; use torch's own operation for complex ones"
        )
    if argument.allows is not None and not argument.allows(value.dtype):
        return TypeError(f"{op}: {name} must be {argument.shape} of {argument.numbers}; got {value.dtype}")
    known = _known_sizes(argument, wanted, values)
    return ValueError(f"{op}: {name} must be {argument.shape}{known}; got {list(value.shape)}")


def _known_sizes(argument: Argument, wanted: Sequence[Argument], values: Sequence[Any]) -> str:
    """The sizes that earlier arguments give to an argument's letters, such as " with K=5 like x [2, 5]"."""
    texts: dict[str, str] = {}
    for other, value in zip(wanted[: wanted.index(argument)], values, strict=False):
        if value is not None:
            sizes: dict[str, Any] = {letter: value.shape[place] for letter, place in other.places.items()}
            if other.shared:
                sizes["..."] = list(value.shape[: value.dim() - len(other.places)])
            for letter, size in sizes.items():
                texts.setdefault(letter, f"{letter}={size} like {other.name} {list(value.shape)}")
    known = [texts[letter] for letter in (*argument.places, *["..."] * argument.shared) if letter in texts]
    return f" with {', '.join(known)}" if known else ""


def fits_linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> bool:
    """True where `check` would find nothing, in two thirds of the time: the op that most models call most."""
    return (
        isinstance(x, Tensor)
        and isinstance(weight, Tensor)
        and weight.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[not transposed]
        and x.device == weight.device
        and not (x.is_complex() or weight.is_complex())
        and (bias is None or (isinstance(bias, Tensor) and bias.dim() == 1 and not bias.is_complex()))
        and (bias is None or bias.numel() == weight.shape[transposed])
    )


IMPLEMENTATIONS = ("auto", *spec.IMPLEMENTATIONS)


def check_choice(op: str, argument: str, value: Any, choices: Sequence[Any]) -> Any:
    """The value. Raises ValueError where it is none of the choices."""
    if value not in choices:
        raise ValueError(f"{op}: {argument} must be one of {tuple(choices)}; got {value!r}")
    return value


def group_ends(
    op: str, x: Tensor, groups: int, counts: Sequence[int] | Tensor | None, offsets: Tensor | None
) -> Tensor:
    """Where the rows of every group end, int32 on x's device. Numbers that are on a GPU already are not read, nor those
    that a compiler traces."""
    if (counts is None) == (offsets is None):
        raise ValueError(f"{op}: counts and offsets both say where groups end; pass one of them")
    argument, values = ("counts", counts) if offsets is None else ("offsets", offsets)
    numbers, rows = _integers(op, argument, values), x.shape[0]
    known = numbers.is_cpu and not torch.compiler.is_compiling()
    fits = list(numbers.shape) == [groups]
    ends = numbers.cumsum(0) if fits and offsets is None else numbers
    if fits and known:
        places = [0, *ends.tolist(), rows]
        fits = places == sorted(places) and (offsets is not None or places[-2] == rows)
    if not fits:
        wanted = f"that rise from 0 or more to {rows} rows or less"
        if offsets is None:
            wanted = f">= 0 that add up to {rows} rows"
        found = numbers.tolist() if known else f"{list(numbers.shape)} of them"
        raise ValueError(f"{op}: {argument} must be {groups} numbers {wanted}; got {found}")
    return ends.to(device=x.device, dtype=torch.int32, non_blocking=True)


def _integers(op: str, argument: str, values: Sequence[int] | Tensor | None) -> Tensor:
    # A copy of what counts no versions, where its numbers can be read, whatever torch.set_default_device says
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, device="cpu")
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        numbers = tensor.tolist() if tensor.is_cpu else tensor.dtype
        raise TypeError(f"{op}: {argument} must be integers; got {numbers}")
    return tensor.detach()


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    packed: bool,
    causal: bool,
    options: Any,
) -> None:
    """All but the dtypes, which autocast may change, and where sequences end: see `sequence_ends`."""
    check("attention", PACKED_ATTENTION if packed else ATTENTION, q, k, v, sinks)
    heads, key_heads = q.shape[-2], k.shape[-2]
    if heads % key_heads if key_heads else heads:
        raise ValueError(
            f"attention: k and v must have a number of heads that divides q's; got {key_heads} and {heads}"
        )
    if not q.shape[-1] and options.scale is None:
        raise ValueError("attention: q and k must have a head size D above 0, or options a scale; got D=0 and no scale")
    window, softcap = options.window, options.softcap
    if window is not None and (not causal or window < 1):
        raise ValueError(f"attention: window must be at least 1 and needs causal=True; got {window}, causal={causal}")
    if softcap is not None and not 0 < float(softcap) < float("inf"):
        raise ValueError(f"attention: softcap must be a number above 0, or None for no cap; got {softcap}")


Ends = tuple[int, ...] | Tensor


def sequence_ends(
    q: Tensor, k: Tensor, cu_seqlens: Sequence[int] | Tensor | None, cu_seqlens_k: Sequence[int] | Tensor | None
) -> tuple[Ends, Ends]:
    """Where the sequences of q [T, ...] and k [T', ...] end, each beginning with 0: tensors where they are on q's
    device, and what is on a GPU is not looked at. Without cu_seqlens, those of q [B, T, ...] and k [B, T', ...]."""
    if cu_seqlens is None:
        if cu_seqlens_k is not None:
            raise ValueError("attention: cu_seqlens_k needs cu_seqlens, the ends of the queries' sequences; got None")
        return _even_ends(*q.shape[:2]), _even_ends(*k.shape[:2])
    on_device = isinstance(cu_seqlens, Tensor) and cu_seqlens.device == q.device
    checked: Callable[..., Ends] = _check_tensor_of_ends if on_device else _check_ends
    name, of_keys = ("cu_seqlens", cu_seqlens) if cu_seqlens_k is None else ("cu_seqlens_k", cu_seqlens_k)
    ends, key_ends = checked("cu_seqlens", cu_seqlens, q), checked(name, of_keys, k)
    if len(ends) != len(key_ends):
        raise ValueError(
            f"attention: cu_seqlens_k must have as many ends as cu_seqlens; got {len(key_ends)} and {len(ends)}"
        )
    return ends, key_ends


def _even_ends(sequences: int, tokens: int) -> tuple[int, ...]:
    """The ends of so many sequences of so many tokens each, beginning with 0."""
    return tuple(range(0, (sequences + 1) * tokens, tokens)) if tokens else (0,) * (sequences + 1)


def _check_tensor_of_ends(argument: str, ends: Sequence[int] | Tensor | None, tokens: Tensor) -> Tensor:
    if not isinstance(ends, Tensor) or ends.device != tokens.device:
        raise TypeError(f"attention: {argument} must be a tensor on {tokens.device}, as cu_seqlens is; got {ends!r}")
    if ends.dim() != 1 or not len(ends) or ends.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"attention: {argument} must be [sequences + 1] int32 or int64; got {ends.dtype} {list(ends.shape)}"
        )
    if ends.device.type == "cpu":
        cuts = ends.tolist()
        if cuts[0] != 0 or cuts != sorted(cuts) or cuts[-1] > tokens.shape[0]:
            raise ValueError(f"attention: {argument} must rise from 0 to at most {tokens.shape[0]} tokens; got {cuts}")
    return ends.contiguous()


def _check_ends(argument: str, ends: Sequence[int] | Tensor, tokens: Tensor) -> tuple[int, ...]:
    places = [operator.index(end) for end in ends]
    if not places or places[0] != 0 or places != sorted(places) or places[-1] != tokens.shape[0]:
        raise ValueError(f"attention: {argument} must rise from 0 to the {tokens.shape[0]} tokens; got {places}")
    return tuple(places)


def check_cross_entropy(options: spec.CrossEntropyOptions, reduction: str, op: str = "linear_cross_entropy") -> None:
    check_choice(op, "reduction", reduction, ("mean", "sum", "none"))
    softcap = 1.0 if options.softcap is None else options.softcap
    if not 0 <= options.label_smoothing <= 1 or options.chunk < 1 or not softcap > 0:
        raise ValueError(
            f"{op}: label_smoothing must be within 0..1, chunk at least 1, and softcap more than 0 or None; "
            f"got {options.label_smoothing}, {options.chunk} and {options.softcap}"
        )
