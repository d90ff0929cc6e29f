"""Copies to the host keep the value that a tensor had."""

from __future__ import annotations

import torch

from dovetail.runtime.transfer import HostCopy


def test_a_copy_keeps_its_value_when_the_tensor_is_overwritten() -> None:
    tensor = torch.tensor([1, 2, 3])
    copy = HostCopy(tensor)
    tensor.fill_(9)
    assert copy.value.tolist() == [1, 2, 3]
