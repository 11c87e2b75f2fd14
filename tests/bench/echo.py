"""A measuring process for tests: does what its job says, without a model."""

from collections.abc import Callable

from bench.harness.protocol import Job, take_part


def prepare(job: Job) -> Callable[[Job], Job]:
    print("a library talks on standard output")

    def measure(request: Job) -> Job:
        if job["kind"] == "fails":
            raise ValueError("no such luck")
        held = bytearray(job.get("bytes", 0))
        held[::4096] = b"x" * len(held[::4096])
        return {"kind": job["kind"], "held": len(held)}

    return measure


if __name__ == "__main__":
    take_part(prepare)
