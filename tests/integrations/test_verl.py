"""verl's own TrainingWorker over gloo: with the pipeline's engine it trains what it does with verl's FSDP2 engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs import save_model
from tests.support.ranks import Ranks
from tests.support.verl_workers import COSTS, WHY, batch, step, use_cpu, weights, worker

pytest.importorskip("verl", reason=WHY)

pytestmark = [pytest.mark.slow, pytest.mark.dist]

TIMEOUT = 400


def train(
    folder: str, strategy: str, longest: int, stages: int, more: dict[str, Any], temperatures: bool = False
) -> dict[str, Any]:
    """What a rank has after log-probabilities and two steps."""
    options = {**more, "pipeline_parallel_size": stages} if stages else {**more}
    options["optimizer"] = "SGD"  # AdamW makes of a gradient's last bits, where it is almost 0, a step of lr
    made = worker(folder, strategy, max_token_len_per_gpu=30 if longest < 30 else 700, **options)
    replica, replicas = made.engine.get_data_parallel_rank(), made.engine.get_data_parallel_size()
    if not stages:
        replica, replicas = 0, 1
    found: dict[str, Any] = {"replica": replica}
    data = [batch(slice(replica, None, replicas), longest) for _ in range(3)]
    for each in data if temperatures else ():
        each["temperature"] = torch.arange(1, 9)[replica::replicas] / 4
    before = made.infer_batch(data[0])
    if before is not None:
        found["log_probs"], found["entropy"] = (
            [row[-answer.numel() - 1 : -1] for row, answer in zip(before[name].unbind(), answers, strict=True)]
            for name in ("log_probs", "entropy")
            for answers in [
                [
                    tokens[mask.bool()]
                    for tokens, mask in zip(data[0]["responses"], data[0]["response_mask"], strict=True)
                ]
            ]
        )
    metrics = [step(made, each) for each in data[1:]]
    found["steps"] = [{name: each[name] for name in ("loss", "grad_norm", "lr")} for each in metrics if each]
    found["weights"] = weights(made)
    if strategy == "zbkern":
        found["sliced"] = made.engine.pipe.schedule.is_sliced
        made.engine.pipe.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "tied")
    save_model(folder / "untied", tied=False)
    return folder


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


Case = tuple[str, int, int, int, dict[str, Any], bool]
CASES: dict[str, Case] = {
    "one stage": ("tied", 9, 1, 1, {}, False),
    "two stages": ("untied", 9, 2, 1, {}, False),
    "tied weights": ("tied", 9, 2, 1, {"schedule": "zb_h1"}, False),
    "a temperature of each row": ("untied", 9, 2, 1, {}, True),
    "micro-batches of a size": ("untied", 9, 2, 1, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}, False),
    "planned batches": ("untied", 600, 2, 1, {"costs": COSTS}, False),
    "offloaded": ("untied", 9, 2, 1, {"param_offload": True, "optimizer_offload": True}, False),
    "two replicas": ("untied", 9, 2, 2, {}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_workers_train_as_with_verls_own_engine(
    name: str, folder: Path, one_rank: Ranks, two_ranks: Any, four_ranks: Any
) -> None:
    model, longest, stages, replicas, more, temperatures = CASES[name]
    if "use_dynamic_bsz" in more:  # verl's own infer_batch reads another option for these
        more = {**more, "infer_micro_batch_size_per_gpu": 2}
    path = str(folder / model)
    infer = {"infer_max_token_len_per_gpu": 700} if longest > 30 else {}
    (want,) = one_rank.run(train, path, "fsdp2", longest, 0, infer, temperatures, timeout=TIMEOUT)
    ranks = {1: one_rank, 2: two_ranks, 4: four_ranks}[stages * replicas]
    found = ranks.run(train, path, "zbkern", longest, stages, more, temperatures, timeout=TIMEOUT)
    outputs = [each for each in found if "log_probs" in each]
    assert [each["replica"] for each in outputs] == [*range(replicas)]
    for each in outputs:
        for kind in ("log_probs", "entropy"):
            torch.testing.assert_close(each[kind], want[kind][each["replica"] :: replicas], rtol=1e-5, atol=1e-5)
        assert [*map(sorted, each["steps"])] == [*map(sorted, want["steps"])]
        for got, expected in zip(each["steps"], want["steps"], strict=True):
            assert got == pytest.approx(expected, rel=2e-5, abs=1e-6)
    want["weights"].pop("lm_head.weight" if model == "tied" else "", None)  # files have a tied weight once
    for each in found:
        torch.testing.assert_close(each["weights"], want["weights"], rtol=1e-4, atol=1e-5)
    assert all(each["sliced"] for each in found) is (name == "planned batches")


def resume(folder: str, out: str, stages: int) -> tuple[Any, ...]:
    """Steps go on from a checkpoint as without an end; what older ones there are is deleted."""
    made = worker(folder, "zbkern", pipeline_parallel_size=stages)
    for number in range(3):
        made.save_checkpoint(f"{out}/{number}", global_step=number, max_ckpt_to_keep=2)
        expected = step(made, batch())
    want = weights(made)
    made.engine.pipe.close()
    again = worker(folder, "zbkern", pipeline_parallel_size=stages)
    again.load_checkpoint(f"{out}/2")
    again.load_checkpoint(None)
    found = step(again, batch())
    got = weights(again)
    with pytest.raises(Exception, match="must have a checkpoint"):
        again.load_checkpoint(f"{out}/none")
    with pytest.raises(ValueError, match="hdfs_path must be None"):
        again.save_checkpoint(out, hdfs_path="hdfs://there")
    again.engine.pipe.close()
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name
    return [(each["loss"], each["grad_norm"], each["lr"]) for each in (expected, found) if each], len(want)


def test_checkpoints_go_on_to_the_bit(folder: Path, two_ranks: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    results = two_ranks.run(resume, str(folder / "untied"), str(tmp_path), 2, timeout=TIMEOUT)
    ((one, other),) = [steps for steps, _ in results if steps]
    assert one == other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "2" / "huggingface")


def ratios(folder: str, stages: int, determinism: bool) -> Any:
    """The log-probabilities of the policy before its step, and PPO's KL to them in this step."""
    options = {"full_determinism": determinism, "max_token_len_per_gpu": 400, "infer_max_token_len_per_gpu": 400}
    made = worker(folder, "zbkern", pipeline_parallel_size=stages, schedule="zb_h1", **options)
    data = batch()
    before = made.infer_batch(data.clone())
    from verl.workers.utils.padding import no_padding_2_padding

    if before is not None:
        data["old_log_probs"] = no_padding_2_padding(before["log_probs"], data) * data["response_mask"]
    metrics = step(made, data)
    norm = metrics.get("grad_norm")
    after = weights(made)
    made.engine.pipe.close()
    kl = [value for each in metrics.get("actor/ppo_kl", ()) for value in each.values]
    return None if before is None else (before["log_probs"].values(), kl, norm), after


def test_the_policy_of_a_step_has_the_bits_of_its_log_probabilities(folder: Path, two_ranks: Any) -> None:
    ((values, kl, _),) = [
        each for each, _ in two_ranks.run(ratios, str(folder / "untied"), 2, False, timeout=TIMEOUT) if each
    ]
    assert values.abs().max() > 0
    assert kl
    assert {*kl} == {0.0}


def values_of(folder: str, stages: int) -> Any:
    """A critic's values, and the loss and the norm of its step."""
    made = worker(folder, "zbkern", "value_model", pipeline_parallel_size=stages)
    made.set_loss_fn(critic_loss())
    data = critic_batch()
    values, metrics = made.infer_batch(data.clone()), step(made, data)
    made.engine.pipe.close()
    return None if values is None else (values["values"].unbind(), metrics["loss"], metrics["grad_norm"])


def critic_batch() -> Any:
    data = batch()
    data["values"], data["returns"] = data["old_log_probs"], data["ref_log_prob"]
    return data


def critic_loss() -> Any:
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import value_loss

    return partial(value_loss, config=CriticConfig(strategy="zbkern", rollout_n=1, ppo_micro_batch_size_per_gpu=1))


def test_a_critic_has_a_value_for_each_token(folder: Path, two_ranks: Any, tmp_path: Path) -> None:
    import transformers
    from verl.utils import tensordict_utils

    model = transformers.AutoModelForTokenClassification.from_pretrained(folder / "untied", num_labels=1).eval()
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(folder / "untied").save_pretrained(tmp_path)
    ((found, loss, norm),) = [
        each for each in two_ranks.run(values_of, str(tmp_path), 2, timeout=TIMEOUT) if each is not None
    ]
    use_cpu()
    data = critic_batch()
    want = [model(row[None]).logits[0, :, 0] for row in data["input_ids"].unbind()]
    torch.testing.assert_close([*found], [each.detach() for each in want], rtol=1e-5, atol=1e-6)
    tokens = data["loss_mask"].sum().item()
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens)
    expected, _ = critic_loss()(model_output={"values": torch.cat(want)}, data=data)
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert norm == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-5)
