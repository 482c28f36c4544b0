"""The queue: order, merging, limits, accounting, failures. Gradients are held against torch's own in float64."""

from __future__ import annotations

import gc
import random
import threading
import warnings

import pytest
import torch
from torch import Tensor

import zbkern
from zbkern import grouping, testing, wgrad


def make_pair(seed: int = 0) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same two-layer model twice: torch's, and converted."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3)).double()
    twin = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3)).double()
    twin.load_state_dict(model.state_dict())
    return model, zbkern.convert(twin)


def batches(count: int, rows: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(rows + index, 5, dtype=torch.float64) for index in range(count)]


def assert_same_gradients(model: torch.nn.Module, twin: torch.nn.Module) -> None:
    for (name, expected), got in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert got.grad is not None, name
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("merge", [True, False, "exact"])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_keys_gives_the_gradients_of_backward(merge: bool | str, seed: int) -> None:
    model, twin = make_pair()
    queue = zbkern.WGradQueue(merge=merge)
    keys = list(range(4))
    for key, x in zip(keys, batches(4), strict=True):
        model(x).square().sum().backward()
        with queue.defer(key):
            twin(x).square().sum().backward()
    assert queue.keys() == keys
    assert queue.pending() == len(queue) == 8
    assert all(parameter.grad is None for parameter in twin.parameters())
    random.Random(seed).shuffle(keys)
    for key in keys:
        assert queue.run(key) == 2
        assert queue.pending(key) == 0
    assert len(queue) == 0
    assert queue.bytes == 0
    assert_same_gradients(model, twin)


def test_w_before_and_after_other_microbatches_b() -> None:
    model, twin = make_pair()
    queue = zbkern.WGradQueue()
    first, second, third = batches(3)
    for x in (first, second, third):
        model(x).sum().backward()
    losses = [twin(x).sum() for x in (first, second, third)]
    with queue.defer("a"):
        losses[0].backward()
    queue.run_one()
    with queue.defer("b"):
        losses[1].backward()
    losses[2].backward()  # not deferred: in between
    queue.run()
    assert_same_gradients(model, twin)


def test_keys_of_a_list_merge_and_the_others_wait() -> None:
    model, twin = make_pair()
    queue = zbkern.WGradQueue()
    for key, x in enumerate(batches(3)):
        model(x).sum().backward()
        with queue.defer(key):
            twin(x).sum().backward()
    assert queue.pending([0, 2]) == 4
    assert queue.run([0, 2]) == 4
    assert queue.keys() == [1]
    assert queue.run_one([1]) is True
    assert queue.run_one([0]) is False
    assert queue.run_one() is True
    assert queue.run_one() is False
    assert_same_gradients(model, twin)


def recorder(launches: list[int]) -> wgrad.Launch:
    def launch(segments, outputs, accumulate):
        launches.append(len(segments))
        for index, (value,) in enumerate(segments):
            outputs[0].add_(value) if accumulate or index else outputs[0].copy_(value)

    return launch


def fill(queue: zbkern.WGradQueue, launch: wgrad.Launch, parameters: list[Tensor], keys: int = 3) -> None:
    for key in range(keys):
        for parameter in parameters:
            queue.add(wgrad.WGradTask(launch, (torch.full((2,), 10.0**key),), (parameter,)), key)


@pytest.mark.parametrize(("merge", "expected"), [(True, [3, 3]), (False, [1] * 6), ("exact", [1] * 6)])
def test_merging_is_one_launch_per_weight(merge: bool | str, expected: list[int]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    launches: list[int] = []
    queue = zbkern.WGradQueue(merge=merge)
    fill(queue, recorder(launches), parameters)
    assert queue.run() == 6
    assert launches == expected
    for parameter in parameters:
        assert parameter.grad.tolist() == [111.0, 111.0]


def test_run_one_takes_the_oldest_with_its_weight() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    queue = zbkern.WGradQueue()
    fill(queue, recorder([]), parameters)
    queue.run_one()
    assert parameters[0].grad.tolist() == [111.0, 111.0]
    assert parameters[1].grad is None
    queue.discard()
    queue = zbkern.WGradQueue(merge=False)
    fill(queue, recorder([]), [parameters[1]])
    queue.run_one()
    assert parameters[1].grad.tolist() == [1.0, 1.0]
    assert queue.discard() == 2


def test_exact_merge_is_bit_for_bit_what_separate_runs_give() -> None:
    torch.manual_seed(0)
    layers = [zbkern.nn.Linear(33, 17) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    xs = [torch.randn(9, 33) for _ in range(5)]
    together, separate = zbkern.WGradQueue(merge="exact"), zbkern.WGradQueue(merge=False)
    for key, x in enumerate(xs):
        for layer, queue in zip(layers, (together, separate), strict=True):
            with queue.defer(key):
                layer(x).square().sum().backward()
    together.run()
    for key in range(5):
        separate.run(key)
    assert torch.equal(layers[0].weight.grad, layers[1].weight.grad)
    assert torch.equal(layers[0].bias.grad, layers[1].bias.grad)


def test_byte_limit_runs_the_oldest_early() -> None:
    model, twin = make_pair()
    xs = batches(6)
    free = zbkern.WGradQueue()
    for x in xs:
        model(x).sum().backward()
        with free.defer():
            twin(x).sum().backward()
    limit = free.peak_bytes // 3
    free.discard()
    queue = zbkern.WGradQueue(max_bytes=limit)
    for x in xs:
        with queue.defer():
            twin(x).sum().backward()
        assert queue.bytes <= limit
    assert queue.peak_bytes <= limit
    assert 0 < queue.pending() < 12
    queue.run()
    assert_same_gradients(model, twin)


def test_byte_limit_of_zero_defers_nothing() -> None:
    model, twin = make_pair()
    queue = zbkern.WGradQueue(max_bytes=0)
    (x,) = batches(1)
    model(x).sum().backward()
    with queue.defer():
        twin(x).sum().backward()
    assert queue.pending() == 0
    assert_same_gradients(model, twin)


def test_byte_limit_keeps_hooks_waiting() -> None:
    """One weight used twice: its hook must see the whole gradient, once, although the limit forces W early."""
    weight = torch.nn.Parameter(torch.eye(4, dtype=torch.float64))
    seen: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x = torch.arange(8, dtype=torch.float64).view(2, 4)
    expected = torch.autograd.grad(
        torch.nn.functional.linear(torch.nn.functional.linear(x, weight).sin(), weight).sum(), weight
    )[0]
    queue = zbkern.WGradQueue(max_bytes=0)
    with queue.defer():
        y = zbkern.functional.linear(zbkern.functional.linear(x, weight).sin(), weight)
        y.sum().backward()
    assert seen == []
    queue.run()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected, rtol=1e-12, atol=1e-12)


def test_bytes_are_inputs_and_output_gradients_only() -> None:
    _, twin = make_pair()
    queue = zbkern.WGradQueue()
    x = torch.randn(16, 5, dtype=torch.float64)
    with queue.defer():
        twin(x).square().sum().backward()
    # x, gelu(first), and the two output gradients; 8 bytes each
    assert queue.bytes == 8 * 16 * (5 + 7 + 7 + 3)
    assert queue.bytes == testing.storage_bytes([tensor for task in queue.tasks() for tensor in task.tensors])
    assert all(tensor.grad_fn is None and not tensor.requires_grad for t in queue.tasks() for tensor in t.tensors)
    queue.run()
    assert queue.bytes == 0


def test_held_memory_is_what_the_queue_reports() -> None:
    """Every tensor that B leaves alive is found through the garbage collector, not through the queue."""
    torch.manual_seed(0)
    model = zbkern.convert(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]))
    queue = zbkern.WGradQueue()
    with queue.defer():
        model(torch.randn(8, 32)).sum().backward()  # warm up: what torch allocates once
    queue.run()

    def tensors() -> dict[int, int]:
        gc.collect()
        found = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}

    x = torch.randn(8, 32)
    before = tensors()
    with queue.defer():
        model(x).square().sum().backward()
    held = {storage: size for storage, size in tensors().items() if storage not in before}
    assert sum(held.values()) + x.nbytes == queue.bytes
    queue.discard()


def test_shared_input_counts_once() -> None:
    layers = [zbkern.nn.Linear(8, 4, bias=False) for _ in range(3)]
    x = torch.randn(5, 8)
    queue = zbkern.WGradQueue()
    with queue.defer():
        sum((layer(x) * (index + 1)).sum() for index, layer in enumerate(layers)).backward()
    gradients = [task.tensors[1] for task in queue.tasks()]
    assert queue.bytes == x.nbytes + testing.storage_bytes(gradients)
    queue.discard()
    assert queue.bytes == 0


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
    assert_same_gradients(model, twin)


def test_a_launch_that_fails_stays_and_names_the_layer() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    attempts = []

    def launch(segments, outputs, accumulate):
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("out of luck")
        outputs[0].fill_(3.0)

    queue = zbkern.WGradQueue()
    queue.add(wgrad.WGradTask(launch, (torch.ones(2),), (parameter,), name="decoder.7.down"))
    with pytest.raises(RuntimeError, match=r"decoder\.7\.down.*stays in the queue: out of luck"):
        queue.run()
    assert queue.pending() == 1
    assert parameter.grad is None
    assert queue.run() == 1
    assert parameter.grad.tolist() == [3.0, 3.0]


def test_a_failure_in_the_middle_keeps_what_ran_and_what_did_not() -> None:
    good = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    bad = torch.nn.Parameter(torch.zeros(2))
    armed = [True]

    def launch(segments, outputs, accumulate):
        if armed and outputs[0].shape == (2,) and segments[0][0][0] == 7:
            raise ValueError("no")
        outputs[0].copy_(segments[0][0])

    queue = zbkern.WGradQueue(merge="exact")
    for value, parameter in ((1.0, good[0]), (7.0, bad), (2.0, good[1])):
        queue.add(wgrad.WGradTask(launch, (torch.full((2,), value),), (parameter,)))
    with pytest.raises(RuntimeError):
        queue.run()
    assert queue.pending() == 2
    armed.clear()
    queue.run()
    assert [p.grad[0].item() for p in (*good, bad)] == [1.0, 2.0, 7.0]


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
    queue = zbkern.WGradQueue()
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(index: int) -> None:
        try:
            model, twin = pairs[index]
            start.wait()
            for x in batches(20):
                model(x).square().sum().backward()
                if index == 3:  # this one never defers, beside three that do
                    twin(x).square().sum().backward()
                    continue
                with queue.defer(index):
                    twin(x).square().sum().backward()
                if index == 0:
                    queue.run(0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(queue.keys()) == [1, 2]
    assert queue.run() == 80
    assert queue.bytes == 0
    for model, twin in pairs:
        assert_same_gradients(model, twin)


def test_what_is_left_over_is_not_lost_silently() -> None:
    queue = zbkern.WGradQueue()
    fill(queue, recorder([]), [torch.nn.Parameter(torch.zeros(2))], keys=2)
    with pytest.warns(RuntimeWarning, match="2 W still pending"):
        del queue
    queue = zbkern.WGradQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del queue


@pytest.mark.parametrize("argument", [{"max_bytes": -1}, {"max_bytes": 1.5}, {"merge": "always"}])
def test_constructor_names_what_is_wrong(argument: dict) -> None:
    with pytest.raises(ValueError, match=rf"WGradQueue: {next(iter(argument))} must be"):
        zbkern.WGradQueue(**argument)


def test_what_is_no_task_or_key_is_refused() -> None:
    queue = zbkern.WGradQueue()
    with pytest.raises(TypeError, match=r"WGradQueue\.add: task must be a WGradTask; got int"):
        queue.add(3)
    with pytest.raises(TypeError, match=r"key must not be a list, which `run` takes as several keys; got \[0, 1\]"):
        queue.defer([0, 1])
    assert queue.pending() == 0


def test_flops_are_counted() -> None:
    layer = zbkern.nn.Linear(8, 4)
    queue = zbkern.WGradQueue()
    with queue.defer():
        layer(torch.randn(2, 3, 8)).sum().backward()
    assert [task.flops for task in queue.tasks()] == [2 * 6 * 8 * 4]
    queue.discard()


def test_weights_whose_launch_takes_several_share_it() -> None:
    """Those that are written and those that are added to apart, and never two groups with one parameter."""
    calls: list[tuple[int, bool]] = []

    def one(segments, outputs, accumulate):
        several([(segments, outputs)], accumulate)

    def several(layers, accumulate):
        calls.append((len(layers), accumulate))
        for segments, outputs in layers:
            recorder([])(segments, outputs, accumulate)

    one.several = several
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    parameters[1].grad = torch.ones(2)
    queue = zbkern.WGradQueue()
    fill(queue, one, parameters)
    queue.run([0, 1])
    assert calls == [(3, False), (1, True)]
    queue.run()
    assert calls[2:] == [(4, True)]
    assert [parameter.grad[0].item() for parameter in parameters] == [111, 112, 111, 111]

    calls.clear()
    shared = (parameters[0],)
    queue.add(wgrad.WGradTask(one, (torch.ones(2),), shared))
    queue.add(wgrad.WGradTask(lambda *arguments: one(*arguments), (torch.ones(2),), (parameters[1],)))
    queue.add(wgrad.WGradTask(one, (torch.ones(2), torch.ones(2)), (parameters[0], parameters[2])))
    assert [len(batch) for batch, _ in grouping.batches(queue.tasks(), True)] == [1, 1, 1]
    tied = [task for task in queue.tasks() if task.launch is one]
    assert [len(batch) for batch, _ in grouping.batches(tied, True)] == [1, 1]
    queue.discard()


@pytest.mark.parametrize("merge", [False, "exact"])
def test_weights_share_a_launch_only_when_merging(merge: bool | str) -> None:
    def one(segments, outputs, accumulate):
        recorder([])(segments, outputs, accumulate)

    def never(layers, accumulate):
        raise AssertionError

    one.several = never
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    queue = zbkern.WGradQueue(merge=merge)
    fill(queue, one, parameters)
    queue.run()
    assert [parameter.grad[0].item() for parameter in parameters] == [111, 111]
