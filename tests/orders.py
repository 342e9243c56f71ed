"""What an operator orders, handed to a scheduler that a test steps by hand."""

import time
from typing import Any

from harness import Driver


def order(driver: Driver, name: str, **fields: Any) -> Any:
    """Hand the scheduler an operator's order as its receive loop would, and return its answer."""
    from sglang.srt.managers import io_struct

    driver.scheduler.process_input_requests([getattr(io_struct, name)(**fields)])
    kind = getattr(io_struct, f"{name.removesuffix('Input')}Output", None)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:  # some orders have no answer
        for sink in driver._sinks:
            while sink.poll(20):
                if type(answer := io_struct.sock_recv(sink)) is kind:  # not one to a client
                    return answer
    return None


def release_and_resume(driver: Driver, tags: list[str], at_once: bool = False) -> None:
    """Pause, give memory away and take it back, and go on, as whoever trains with this server does.

    At once: the scheduler receives the pause and the release together, for SGLang's HTTP server answers
    a pause before the scheduler has seen it.
    """
    from sglang.srt.managers import io_struct

    pause = io_struct.PauseGenerationReqInput(mode="retract")
    release = io_struct.ReleaseMemoryOccupationReqInput(tags=tags)
    for received in [[pause, release]] if at_once else [[pause], [release]]:
        driver.scheduler.process_input_requests(received)
    order(driver, "ResumeMemoryOccupationReqInput", tags=tags)
    order(driver, "ContinueGenerationReqInput")
