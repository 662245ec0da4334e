"""docs/launchers.md: the manifest of Kubernetes is complete."""

import re
from pathlib import Path

import yaml
from torch.distributed import run

from imagenet_cls.commands.train import load_for_training, train_parser

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "launchers.md").read_text()


def test_manifest_starts_a_valid_training_in_each_pod() -> None:
    manifest = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
    pods = manifest["spec"]["pytorchReplicaSpecs"]
    assert manifest["kind"] == "PyTorchJob" and set(pods) == {"Master", "Worker"}
    for pod in pods.values():
        (container,) = pod["template"]["spec"]["containers"]
        assert container["name"] == "pytorch", "the operator sets variables only there"
        torchrun, *words = container["command"]
        started = run.parse_args(words)
        in_image = Path(started.training_script).relative_to("/opt/imagenet-cls")
        assert torchrun == "torchrun" and in_image == Path("tools/train.py")
        assert "/opt/imagenet-cls" in (ROOT / "Dockerfile").read_text()
        assert int(started.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
        load_for_training(train_parser().parse_intermixed_args(started.training_script_args))
        mounts, volumes = container["volumeMounts"], pod["template"]["spec"]["volumes"]
        assert [mount["name"] for mount in mounts] == [volume["name"] for volume in volumes]
