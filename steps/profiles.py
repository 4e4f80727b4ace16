"""What one node of an instance type offers: GPUs, EFA interfaces, huge pages, memory, and how large its /dev/shm may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Profile:
    """What one node of an instance type gives to one training pod."""

    name: str
    instance_type: str = ""
    gpus: int = 0
    gpu_memory_gib: int = 0
    peak_flops: float = 0.0
    """Dense bf16 FLOP/s of one GPU."""
    efa: int = 0
    hugepages_mib: int = 0
    """2 MiB pages that EFA's library takes."""
    cpus: str = "1"
    memory_gib: int = 6
    """Limit of the pod, /dev/shm included."""
    shm_gib: int = 1
    vcpus: int = 0
    """Of the whole instance: what AWS counts against the account's quota."""
    quota_code: str = ""
    """Of the service quota that limits how many such instances run on demand."""
    bus_bandwidth_gb: float = 0.0
    """All-reduce bus bandwidth within a node below which something is wrong with it, GB/s."""
    environment: Mapping[str, str] = field(default_factory=dict)


EFA_ENVIRONMENT = {
    "FI_PROVIDER": "efa",
    "FI_EFA_FORK_SAFE": "1",
    "NCCL_SOCKET_IFNAME": "^docker,lo,veth",
    "NCCL_DEBUG": "WARN",
}
GPU_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "^docker,lo,veth",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "p5", "p5.48xlarge", gpus=8, gpu_memory_gib=80, peak_flops=989e12, efa=32, hugepages_mib=5120, cpus="180",
            memory_gib=1800, shm_gib=800, vcpus=192, quota_code="L-417A185B", bus_bandwidth_gb=300,
            environment=GPU_ENVIRONMENT | EFA_ENVIRONMENT,
        ),
        Profile(
            "p4de", "p4de.24xlarge", gpus=8, gpu_memory_gib=80, peak_flops=312e12, efa=4, hugepages_mib=5120, cpus="88",
            memory_gib=1020, shm_gib=480, vcpus=96, quota_code="L-417A185B", bus_bandwidth_gb=150,
            environment=GPU_ENVIRONMENT | EFA_ENVIRONMENT | {"FI_EFA_USE_DEVICE_RDMA": "1"},
        ),
        Profile(
            "g5", "g5.48xlarge", gpus=8, gpu_memory_gib=22, peak_flops=70e12, efa=1, cpus="180",
            memory_gib=680, shm_gib=256, vcpus=192, quota_code="L-DB2E81BA", bus_bandwidth_gb=3,
            environment=GPU_ENVIRONMENT | EFA_ENVIRONMENT,
        ),
        Profile("cpu"),
    )
}  # fmt: skip
