"""Counts of an evaluation, against a plain loop over single images."""

import warnings

import pytest
import torch
from helpers import single_rank
from sklearn.metrics import balanced_accuracy_score
from torch import nn

from imagenet_cls.engine.evaluate import EvalBatch, compute_results, model_outputs
from imagenet_cls.tasks.single_label import SingleLabel

CPU = torch.device("cpu")
ALONE = single_rank()


def network(num_classes: int, seed: int = 0) -> nn.Module:
    """Its outputs for multiples of 1/256 are exact, so that they don't depend on the batch."""
    torch.manual_seed(seed)
    linear = nn.Linear(12, num_classes)
    for parameter in linear.parameters():
        parameter.data.mul_(64).round_().div_(64)
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), linear, nn.BatchNorm1d(num_classes))


def batches_of(images: torch.Tensor, targets: torch.Tensor, size: int) -> list[EvalBatch]:
    indices = torch.arange(len(images))
    return list(zip(images.split(size), targets.split(size), indices.split(size), strict=True))


@pytest.mark.parametrize("num_classes", [2, 3, 5, 17])
@pytest.mark.parametrize("batch_size", [1, 4, 37])
def test_counts_equal_those_of_a_plain_loop(num_classes: int, batch_size: int) -> None:
    source = torch.Generator().manual_seed(num_classes)
    images = torch.randint(0, 256, (37, 3, 2, 2), generator=source).to(torch.uint8)
    targets = torch.randint(0, num_classes, (37,), generator=source)
    model, other = network(num_classes), network(num_classes, seed=1)
    models, batches = {"other": other, "one": model}, batches_of(images, targets, batch_size)
    outputs = model_outputs(models, batches, lambda x: x.float() / 256, CPU, None)
    results = compute_results(outputs, list(models), ALONE, num_classes, SingleLabel())
    result = results["one"]
    assert list(results) == ["other", "one"] and results["other"]["loss"] != result["loss"]

    model.eval().requires_grad_(False)
    top1 = top5 = loss = 0.0
    for image, target in zip(images, targets.tolist(), strict=True):
        scores = model(image[None].float() / 256)[0].log_softmax(0)
        better = int((scores > scores[target]).sum())
        top1, top5, loss = top1 + (better < 1), top5 + (better < 5), loss - float(scores[target])
    assert result["images"] == 37 and result["seconds"] >= 0
    assert (result["top1_pct"], result["top5_pct"]) == (
        pytest.approx(100 * top1 / 37),
        pytest.approx(100 * top5 / 37),
    )
    assert result["loss"] == pytest.approx(loss / 37, rel=1e-5)
    assert 0 < result["top1_pct"] < 100
    predicted = model(images.float() / 256).argmax(1)
    with warnings.catch_warnings(action="ignore"):  # classes without images are left out
        expected = 100 * balanced_accuracy_score(targets, predicted)
    assert (
        result["balanced_accuracy_pct"] == pytest.approx(expected, rel=1e-12)
        and expected != result["top1_pct"]
    )


def test_logits_under_autocast_are_float32_without_gradient() -> None:
    batches = batches_of(torch.zeros(4, 3, 2, 2), torch.arange(4), 2)
    outputs = list(model_outputs({"raw": network(3)}, batches, torch.relu, CPU, torch.bfloat16))
    assert [indices.tolist() for *_, indices in outputs] == [[0, 1], [2, 3]]
    for logits, *_ in outputs:
        assert logits["raw"].dtype is torch.float32 and not logits["raw"].requires_grad


def test_padded_batches_have_one_shape_and_the_outputs_of_a_plain_call() -> None:
    """With `eval.flip_tta`, the mean with those of the flipped images."""
    images = torch.randint(0, 256, (10, 3, 2, 2), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    batches, shapes = batches_of(images, torch.arange(10) % 3, 4), []

    def preprocess(batch: torch.Tensor) -> torch.Tensor:
        shapes.append(batch.shape)
        return batch.float() / 255

    model, pixels = network(3).eval(), images.float() / 255
    plain, flipped = model(pixels), model(pixels.flip(3))
    for flip, expected in ((False, plain), (True, (plain + flipped) / 2)):
        shapes.clear()
        padded = list(model_outputs({"raw": model}, batches, preprocess, CPU, None, flip, pad_to=4))
        assert shapes == [(4, 3, 2, 2)] * 3
        torch.testing.assert_close(torch.cat([logits["raw"] for logits, *_ in padded]), expected)
        for (_, targets, indices), batch in zip(padded, batches, strict=True):
            assert torch.equal(targets, batch[1]) and torch.equal(indices, batch[2])
