"""The private names of torch that the simulated GPU uses exist. Where one is missing, adapt the
simulation. Those of the package are tested in tests/unit/test_private_names.py.
"""

from importlib import import_module

import pytest
import torch

NAMES = [
    ("torch.cuda._sanitizer", "EventHandler"),
    ("torch.cuda._sanitizer", "EventHandler._handle_kernel_launch"),
    ("torch.cuda._sanitizer", "EventHandler._handle_stream_creation"),
    ("torch.cuda._sanitizer", "EventHandler._handle_stream_synchronization"),
    ("torch.cuda._sanitizer", "EventHandler._handle_event_creation"),
    ("torch.cuda._sanitizer", "EventHandler._handle_event_record"),
    ("torch.cuda._sanitizer", "EventHandler._handle_event_wait"),
    ("torch.multiprocessing.reductions", "StorageWeakRef"),
    ("torch.utils._pytree", "tree_leaves"),
    ("torch.utils._python_dispatch", "TorchDispatchMode"),
    ("torch.utils._foreach_utils", "_group_tensors_by_device_and_dtype"),
    ("torch.utils.checkpoint", "_allowed_determinism_checks_to_fns"),
    ("torch.autograd", "_engine_run_backward"),
    ("torch.cuda", "_lazy_init"),
    ("torch.nn.parallel.data_parallel", "parallel_apply"),
    ("torch.nn.parallel.comm", "broadcast_coalesced"),
    ("torch.nn.parallel.comm", "reduce_add_coalesced"),
    ("torch.nn.modules.batchnorm", "sync_batch_norm"),
    ("torch._C", "_current_graph_task_id"),
    ("torch.ops", "aten.add.Tensor._opname"),
    ("torch.ops", "aten.add.Tensor._schema"),
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_private_name_exists(module: str, name: str) -> None:
    found = torch.ops if module == "torch.ops" else import_module(module)
    for part in name.split("."):
        assert hasattr(found, part), f"torch {torch.__version__} has no {module}.{name}"
        found = getattr(found, part)


def test_storages_have_an_address() -> None:
    assert isinstance(torch.zeros(1).untyped_storage()._cdata, int)
