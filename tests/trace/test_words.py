from __future__ import annotations

import pytest

from smon.trace.events import Collective, Phase
from smon.trace.words import collective_of, collective_of_kernel, dtype_bytes, phase_of


@pytest.mark.parametrize(
    "name, expected",
    [
        ("allreduce", Collective.ALL_REDUCE),
        ("nccl:all_reduce", Collective.ALL_REDUCE),
        ("gloo:all_gather", Collective.ALL_GATHER),
        ("_allgather_base", Collective.ALL_GATHER),
        ("nccl:_all_gather_base", Collective.ALL_GATHER),
        ("_reduce_scatter_base", Collective.REDUCE_SCATTER),
        ("reduce_scatter_tensor_coalesced", Collective.REDUCE_SCATTER),
        ("all_to_allv", Collective.ALL_TO_ALL),
        ("nccl:send 0->1", Collective.SEND),
        ("ReduceScatter", Collective.REDUCE_SCATTER),
        ("coalesced", None),
        ("", None),
    ],
)
def test_a_collective_has_many_names(name: str, expected: Collective | None) -> None:
    """Those of torch's backends, of their coalesced forms, and of NCCL."""
    assert collective_of(name) is expected


@pytest.mark.parametrize(
    "name, expected",
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", Collective.ALL_REDUCE),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)", Collective.REDUCE_SCATTER),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", Collective.SEND_RECV),
        ("ncclDevKernel_Generic(ncclDevComm*)", None),
        ("void gemm()", None),
    ],
)
def test_kernels_of_nccl_say_what_they_run(name: str, expected: Collective | None) -> None:
    """Old and new spelling; on AMD GPUs they do not say."""
    assert collective_of_kernel(name) is expected


@pytest.mark.parametrize(
    "name, expected",
    [
        ("forward-compute", Phase.FORWARD),
        ("smon::forward-compute|mb=3", Phase.FORWARD),
        ("Forward 3", Phase.FORWARD),
        ("DistributedDataParallel.forward", Phase.FORWARD),
        ("PP:2F7", Phase.FORWARD),
        ("backward-compute", Phase.BACKWARD),
        ("PP:2B7", Phase.BACKWARD),
        ("PP:0W11", Phase.BACKWARD),
        ("Optimizer.step#AdamW.step", Phase.OPTIMIZER),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", Phase.DATA),
        ("smon::forward-send|mb=3", None),
        ("backward_recv", None),
        ("optimizer-clip-main-grad", None),
        ("ProfilerStep#3", None),
    ],
)
def test_annotations_surround_phases(name: str, expected: Phase | None) -> None:
    """A send or a receive waits: it is no part of the forward or backward."""
    assert phase_of(name) is expected


def test_sizes_of_types_are_known_by_their_names() -> None:
    """As torch and Kineto spell them; 0 for others."""
    names = ["Float", "c10::BFloat16", "long int", "Half", "whatever"]
    assert [dtype_bytes(name) for name in names] == [4, 2, 8, 2, 0]
