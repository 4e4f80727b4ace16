"""In-job restart: ft_launcher's monitor kills a rank that sends no heartbeat, and starts all ranks again."""

from __future__ import annotations

from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

from trainer.recovery.base import Recovery, Train, Watch


class InJob:
    """Heartbeats to ft_launcher's rank monitor around another mechanism."""

    def __init__(self, inner: Recovery, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch

    def run(self, train: Train) -> int:
        client = RankMonitorClient()
        client.init_workload_monitoring()
        self._watch.add(client.send_heartbeat)
        self._watch.beat()
        try:
            step = self._inner.run(train)
        finally:
            self._watch.remove(client.send_heartbeat)
        client.shutdown_workload_monitoring()
        return step
