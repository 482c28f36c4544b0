"""The queue: order, scopes, failures, threads, bytes. Gradients are held against torch's own in float64."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

import zbkern
from tests.support.chunks import results_on_threads
from tests.support.queued import batches, fill, make_pair, recorder
from zbkern import testing, wgrad
from zbkern.pipeline.transport.local import LocalTransport


def test_keys_of_a_list_merge_and_the_others_wait() -> None:
    """tests/test_gradients.py runs any keys in any order."""
    model, twin = make_pair()
    queue = zbkern.WGradQueue()
    for key, x in enumerate(batches(3)):
        model(x).sum().backward()
        with queue.defer(key):
            twin(x).sum().backward()
    assert queue.keys() == [0, 1, 2]
    assert queue.pending() == len(queue) == 6
    assert queue.pending([0, 2]) == 4
    assert queue.run([0, 2]) == 4
    assert queue.keys() == [1]
    assert queue.run_one([1]) is True
    assert queue.run_one([0]) is False
    assert queue.run_one() is True
    assert queue.run_one() is False
    testing.assert_same_gradients(twin, model)


def test_modification_in_place_between_b_and_w_is_an_error_and_loses_nothing() -> None:
    model, twin = make_pair()
    x, other = batches(2)
    model(other).sum().backward()
    twin[0].zbkern_name = "encoder.first"
    queue = zbkern.WGradQueue()
    with queue.defer("bad"):
        twin(x).sum().backward()
    with queue.defer("good"):
        twin(other).sum().backward()
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"encoder\.first.*modified in place"):
        queue.run("bad")
    assert queue.pending("good") == 2
    queue.discard("bad")
    twin.zero_grad()
    queue.run()
    testing.assert_same_gradients(twin, model)


def test_a_launch_that_fails_stays_and_names_the_layer_and_the_others_run() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    broken = [True]

    def launch(segments, outputs, accumulate):
        if broken and segments[0][0][0] == 7:
            raise ValueError("out of luck")
        outputs[0].copy_(segments[0][0])

    queue = zbkern.WGradQueue(merge=False)
    for value, parameter in zip((1.0, 7.0, 2.0), parameters, strict=True):
        queue.add(wgrad.WGradTask(launch, (torch.full((2,), value),), (parameter,), name=f"decoder.{value:.0f}.down"))
    with pytest.raises(RuntimeError, match=r"decoder\.7\.down.*stays in the queue: out of luck"):
        queue.run()
    assert queue.pending() == 2
    assert [p.grad is None for p in parameters] == [False, True, True]
    broken.clear()
    assert queue.run() == 2
    assert [p.grad[0].item() for p in parameters] == [1.0, 7.0, 2.0]


def test_a_hook_that_raises_does_not_make_w_run_twice() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))

    def hook(p: Tensor) -> None:
        raise ValueError("hook")

    handle = parameter.register_post_accumulate_grad_hook(hook)
    queue = zbkern.WGradQueue()
    fill(queue, recorder([]), [parameter], keys=1)
    with pytest.raises(ValueError, match="hook"):
        queue.run()
    handle.remove()
    assert queue.run() == 0
    assert parameter.grad.tolist() == [1.0, 1.0]


def test_defer_nests_and_survives_exceptions() -> None:
    _, twin = make_pair()
    outer, inner = zbkern.WGradQueue(), zbkern.WGradQueue()
    (x,) = batches(1)
    with outer.defer("outer"):
        with inner.defer("inner"):
            twin(x).sum().backward()
        with pytest.raises(RuntimeError, match="twice"), inner.defer("failed"):
            fails_in_backward().backward()
        assert wgrad.current() == (outer, "outer")
        twin(x).sum().backward()
    assert wgrad.current() is None
    assert (outer.keys(), inner.keys()) == (["outer"], ["inner"])
    outer.discard()
    inner.discard()


def fails_in_backward() -> Tensor:
    x = torch.ones(2, requires_grad=True)

    def hook(gradient: Tensor) -> None:
        raise RuntimeError("never twice")

    x.register_hook(hook)
    return x.sum()


def test_one_scope_object_can_be_entered_again_inside_itself() -> None:
    queue = zbkern.WGradQueue()
    scope = queue.defer()
    with scope:
        with scope:
            pass
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()


def test_threads_do_not_mix() -> None:
    pairs = [make_pair(seed) for seed in range(4)]
    queue, start = zbkern.WGradQueue(), threading.Barrier(4)

    def work(transport: LocalTransport) -> None:
        model, twin = pairs[transport.rank]
        start.wait()
        for x in batches(20):
            model(x).square().sum().backward()
            # the last one never defers, beside three that do
            with queue.defer(transport.rank) if transport.rank < 3 else contextlib.nullcontext():
                twin(x).square().sum().backward()
            if transport.rank == 0:
                queue.run(0)

    results_on_threads(4, work)
    assert sorted(queue.keys()) == [1, 2]
    assert queue.run() == 80
    assert queue.bytes == 0
    for model, twin in pairs:
        testing.assert_same_gradients(twin, model)


def test_a_step_that_lacks_the_w_of_its_parameters_warns_once() -> None:
    queue, other = zbkern.WGradQueue(), zbkern.WGradQueue()
    weight, another = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(other, recorder([]), [another], keys=2)  # waits past the step of other parameters
        optimizer.step()
    fill(queue, recorder([]), [weight], keys=2)
    with pytest.warns(
        RuntimeWarning, match=r"SGD.step: 2 W of its parameters still wait .* call the queue's run\(\)"
    ) as found:
        optimizer.step()
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    queue.discard()
    other.discard()


def test_an_optimizer_in_backward_steps_while_other_w_of_its_parameter_wait() -> None:
    queue, weight = zbkern.WGradQueue(), torch.nn.Parameter(torch.zeros(2))
    optimizer, steps = torch.optim.SGD([weight], 0.1), []
    weight.register_post_accumulate_grad_hook(lambda _: steps.append(optimizer.step()))
    fill(queue, recorder([]), [weight], keys=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        queue.run(queue.keys()[0])
        assert len(steps) == len(queue) == 1
    queue.discard()


def test_a_compiled_step_looks_at_no_queue() -> None:
    queue, weight = zbkern.WGradQueue(), torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    weight.grad = torch.ones(2)
    fill(queue, recorder([]), [weight], keys=1)
    torch.compile(optimizer.step, backend="eager")()
    assert weight.tolist() == pytest.approx([-0.1, -0.1])
    queue.discard()


def test_what_is_left_over_is_not_lost_silently() -> None:
    queue = zbkern.WGradQueue()
    fill(queue, recorder([]), [torch.nn.Parameter(torch.zeros(2))], keys=2)
    with pytest.warns(RuntimeWarning, match="2 W still pending"):
        del queue
    queue = zbkern.WGradQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del queue


@pytest.mark.parametrize("autocast", [False, True])
def test_w_on_meta(autocast: bool) -> None:
    layer, queue = zbkern.nn.Linear(4, 3, device="meta"), zbkern.WGradQueue()
    with torch.autocast("cpu", enabled=autocast):
        with queue.defer():
            layer(torch.ones(2, 3, 4, device="meta")).sum().backward()
        assert [task.flops for task in queue.tasks()] == [2 * 6 * 4 * 3]
        assert queue.run() == 1
    assert layer.weight.grad.is_meta
    assert layer.weight.grad.shape == (3, 4)


def test_gradients_of_inference_mode_are_gradients() -> None:
    layer, queue = zbkern.nn.Linear(3, 4), zbkern.WGradQueue()
    with queue.defer():
        layer(torch.randn(2, 3)).sum().backward()
    with torch.inference_mode():
        queue.run()
    assert not any(p.grad is None or p.grad.is_inference() for p in layer.parameters())
    layer.weight.grad.square_()


def test_a_queue_that_was_refused_leaves_the_others_as_they_are() -> None:
    """A layer with hooks asks whether some queue exists."""
    queue, layer, seen = zbkern.WGradQueue(), zbkern.nn.Linear(4, 3), []
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        zbkern.WGradQueue(streams="side")  # type: ignore[call-arg]
    layer.weight.register_post_accumulate_grad_hook(seen.append)
    with queue.defer():
        layer(torch.ones(2, 4)).sum().backward()
    assert not seen
    queue.run()
    assert len(seen) == 1


def test_a_task_that_gets_other_tensors_keeps_its_place_and_its_gradient() -> None:
    layer = zbkern.convert(torch.nn.Linear(4, 4, dtype=torch.float64))
    queue = wgrad.WGradQueue(merge=False)
    for key in range(2):
        with queue.defer(key):
            layer(torch.full((2, 4), key + 1.0, dtype=torch.float64)).backward(torch.ones(2, 4, dtype=torch.float64))
    first, second = queue.tasks()
    sources, held = first.tensors, queue.bytes
    queue._exchange(first, [tensor.clone() for tensor in sources])
    for tensor in sources:
        tensor.fill_(float("nan"))
    assert queue.tasks() == (first, second)
    assert queue.bytes == held
    queue.run()
    assert queue.bytes == 0
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 6.0, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"WGradQueue: task must be one that waits in this queue"):
        queue._exchange(first, sources)


def test_w_during_a_collective() -> None:
    model, twin = make_pair()
    queue = zbkern.WGradQueue(wgrads_per_collective=1)
    called: list[Tensor] = []
    next(twin.parameters()).register_post_accumulate_grad_hook(called.append)
    for key, x in enumerate(batches(2)):
        model(x).square().sum().backward()
        with queue.defer(key):
            twin(x).square().sum().backward()
    assert queue._run_during_collective() == 1  # of both microbatches, as one kernel
    assert queue.pending() == 2  # those with a hook
    assert queue._run_during_collective() == 0
    assert not called
    queue.run()
    testing.assert_same_gradients(twin, model)
    assert zbkern.WGradQueue()._run_during_collective() == 0


def test_eager_w_ends_with_the_collective() -> None:
    _, twin = make_pair()
    queue = zbkern.WGradQueue(wgrads_per_collective="eager", merge=False)
    for key, x in enumerate(batches(2)):
        with queue.defer(key):
            twin(x).square().sum().backward()
    whole = queue.pending()
    answers = iter([False, False, True])
    with queue.defer(2):
        assert zbkern.in_flight(lambda: "arrived", lambda: next(answers)) == "arrived"
        assert queue.pending() == whole - 2
        zbkern.in_flight()  # nobody knows when it ends
        assert queue.pending() == whole - 3
    assert queue._run_during_collective(lambda: False) == whole - 3
    queue.regather_inputs = True
    with pytest.raises(ValueError, match="wgrads_per_collective must be a number with regather_inputs=True"):
        queue._run_during_collective(lambda: False)


def test_inputs_and_output_gradients_are_held_and_nothing_else() -> None:
    """Every tensor that B leaves alive is found through the garbage collector, not through the queue."""
    _, twin = make_pair()
    queue = zbkern.WGradQueue()
    with queue.defer():
        twin(torch.randn(16, 5, dtype=torch.float64)).sum().backward()  # warm up: what torch allocates once
    queue.run()

    def tensors() -> dict[int, int]:
        gc.collect()
        found = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}

    x = torch.randn(16, 5, dtype=torch.float64)
    before = tensors()
    with queue.defer():
        twin(x).square().sum().backward()
    held = {storage: size for storage, size in tensors().items() if storage not in before}
    assert queue.bytes == 8 * 16 * (5 + 7 + 7 + 3)  # x, gelu(first), and the two output gradients
    assert sum(held.values()) + x.nbytes == queue.bytes
    assert all(tensor.grad_fn is None and not tensor.requires_grad for t in queue.tasks() for tensor in t.tensors)
    queue.run()
    assert queue.bytes == 0


def test_nothing_of_what_does_not_wait_is_held() -> None:
    """Gradients are in tests/test_gradients.py."""
    held = []
    for kinds in ((), zbkern.nn.MLP, (zbkern.nn.MLP, zbkern.nn.Linear), nn.Module):
        model = nn.Sequential(zbkern.nn.Attention(8, 2), zbkern.nn.MLP(8, 12), zbkern.nn.RMSNorm(8))
        zbkern.convert(model, defer=lambda name, module, kinds=kinds: not isinstance(module, kinds))
        queue = zbkern.WGradQueue()
        with queue.defer():
            model(torch.randn(2, 5, 8)).square().sum().backward()
        held.append((queue.bytes, queue.pending()))
        queue.discard()
    assert held == sorted(held, reverse=True)
    assert len({*held}) == 4
    assert held[-1] == (0, 0)


def test_an_error_in_a_forward_leaves_the_scope() -> None:
    linear = zbkern.convert(nn.Linear(3, 2), defer=lambda name, module: False)
    queue = zbkern.WGradQueue()
    with pytest.raises(ValueError, match="K"):
        linear(torch.randn(2, 5))
    other = zbkern.nn.Linear(3, 2)
    with queue.defer():
        other(torch.randn(2, 3)).sum().backward()
    assert queue.pending() == 1
    queue.discard()
